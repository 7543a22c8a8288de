"""A process dies at every point around every store write, and inside every effect; others finish the run.

`HITS` says which points a run passes, in which of its stages, and how often; a test checks it against runs that nobody kills. What the matrix does
not pass, `DIRECTED` does, each point in a situation made for it.
"""

from __future__ import annotations

import signal
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pymongo
import pytest

from mongo_durable import RunSnapshot
from mongo_durable.errors import FrontierExpired, InvalidAnswer, RunConflict, RunError, RunNotFound
from mongo_durable.store.failpoints import FailPoint
from tests.crash.processes import Report, World, in_the_dark
from tests.crash.worker import FORKED_ID, LARGE, RUN_ID
from tests.support.invariants import assert_invariants

P = FailPoint
_CLAIM = {P.CLAIM_HEAD_BEFORE: 1, P.CLAIM_HEAD_AFTER: 1, P.CLAIM_EVENT_BEFORE: 1, P.CLAIM_EVENT_AFTER: 1}

# Which stage passes which points, how often. How many events a flight takes is the scheduler's choice: for appends the number is the largest.
_APPENDS = {P.APPEND_BEFORE: 6, P.APPEND_AFTER: 6}
HITS: dict[str, dict[FailPoint, int]] = {
    "submit": {P.SUBMIT_BEFORE: 1, P.SUBMIT_INSIDE: 1, P.SUBMIT_AFTER: 1},
    "first work": {**_CLAIM, **_APPENDS, P.SUSPEND_BEFORE: 1, P.SUSPEND_INSIDE: 1, P.SUSPEND_AFTER: 1},
    "resolve": {P.RESOLVE_BEFORE: 1, P.RESOLVE_INSIDE: 1, P.RESOLVE_AFTER: 1},
    "second work": {**_CLAIM, **_APPENDS, P.END_BEFORE: 1, P.END_INSIDE: 1, P.END_AFTER: 1},
}
STAGES = list(HITS)
CASES = [(stage, point, hit) for stage, points in HITS.items() for point, hits in points.items() for hit in range(1, hits + 1)]

_PAYLOAD = [(point, hit) for point in (P.PAYLOAD_BEFORE, P.PAYLOAD_AFTER) for hit in (1, 2, 3)]
_CANCEL = [P.CANCEL_BEFORE, P.CANCEL_INSIDE, P.CANCEL_AFTER]
_RETRY = [P.RETRY_BEFORE, P.RETRY_INSIDE, P.RETRY_AFTER]
_RELEASE = [P.RELEASE_BEFORE, P.RELEASE_AFTER]
_EXPIRE = [P.EXPIRE_BEFORE, P.EXPIRE_INSIDE, P.EXPIRE_AFTER]
_TRANSACTIONAL = [P.TRANSACTIONAL_BEFORE, P.TRANSACTIONAL_INSIDE, P.TRANSACTIONAL_AFTER]
_DRAFT = [P.DRAFT_BEFORE, P.DRAFT_AFTER]
_FORK = [P.FORK_BEFORE, P.FORK_INSIDE, P.FORK_AFTER]
_PRUNE = [P.PRUNE_BEFORE, P.PRUNE_MARKED, P.PRUNE_INSIDE, P.PRUNE_AFTER]
DIRECTED = {*(point for point, _ in _PAYLOAD), *_CANCEL, *_RETRY, *_RELEASE, *_EXPIRE, *_DRAFT, *_TRANSACTIONAL, *_FORK, *_PRUNE}


def do_stage(world: World, stage: str, **order: Any) -> Report:
    """One stage of a run, in a process of its own."""
    if stage == "resolve":
        order = {"answers": world.answers(), **order}
    return world.do(stage.split()[-1], **order)


def said(snapshot: RunSnapshot) -> list[tuple[Any, ...]]:
    """A run's conversation, ids included."""
    return [(each.type, each.content, each.id, getattr(each, "tool_call_id", None)) for each in snapshot.output["messages"]]


@pytest.fixture(scope="session")
def unkilled(mongo_uri: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Report], RunSnapshot]:
    """What a run does that nobody kills: the report of each stage, and its end."""
    name = f"test_unkilled_{tmp_path_factory.getbasetemp().name}_{datetime.now(UTC):%H%M%S%f}".replace("-", "_")
    world = World(mongo_uri, name, Path(tmp_path_factory.mktemp("unkilled"), "effects"))
    try:
        reports = {stage: do_stage(world, stage) for stage in STAGES}
        assert world.lines() == {"quote": 1, "approve": 1, "book": 1}
        return reports, world.run()
    finally:
        world.close()
        with pymongo.MongoClient(mongo_uri) as client:
            client.drop_database(name)


def test_every_point_is_reached() -> None:
    """Every fail point is one at which some test kills a process."""
    assert {point for _, point, _ in CASES} | DIRECTED == set(FailPoint)


def test_the_matrix_has_every_hit(unkilled: tuple[dict[str, Report], RunSnapshot]) -> None:
    """The matrix kills at every point, and at every hit, that an unkilled run has."""
    reports, end = unkilled
    assert end.status == "completed"
    for stage, report in reports.items():
        assert set(report.hits) == set(HITS[stage]), stage
        for point, hits in report.hits.items():
            assert hits == HITS[stage][point] or (point in _APPENDS and hits < _APPENDS[point]), (stage, point, hits)


@pytest.mark.parametrize(("stage", "point", "hit"), CASES, ids=[f"{stage}-{point}-{hit}".replace(" ", "-") for stage, point, hit in CASES])
def test_a_run_survives_a_death_at(stage: str, point: FailPoint, hit: int, world: World, unkilled: tuple[dict[str, Report], RunSnapshot]) -> None:
    """A process dies at this point; others finish the run: every effect once or as its policy says, the same output, an intact history."""
    for before in STAGES[: STAGES.index(stage)]:
        do_stage(world, before)
    order = {"answers": world.answers()} if stage == "resolve" else {}
    report = world.kill_in(stage.split()[-1], kill_at=(point, hit), **order)
    if report is not None:
        # This time there were fewer flights.
        assert point in _APPENDS
        assert report.hits[point] < hit
    elif stage in ("submit", "resolve"):
        world.do(stage, **order)  # whoever got no answer asks again, and gets the one there is
    happened = world.lines()
    end = world.finish()
    dark = in_the_dark(world.events())
    assert_invariants(world.uri, world.database)
    names = {entry["name"] for event in world.events() if event["type"] == "activities.suspended" for entry in event["entries"]}
    assert ("unknown_outcome" in names) == ("approve" in dark and "book" not in dark)
    if "book" in dark:
        assert (end.status, end.error["type"]) == ("failed", "mongo_durable.errors.UnknownOutcome")
        assert world.lines()["book"] == happened["book"]
        return
    again = happened["quote"] if "quote" in dark else 0
    assert world.lines() == {"quote": 1 + again, "approve": 1, "book": 1}
    assert end.status == "completed"
    assert said(end) == said(unkilled[1])


# -- inside an effect -------------------------------------------------------------------------------------------------------------------------

IN_TURN = {"workflow": "purchase-in-turn"}
MOMENTS = pytest.mark.parametrize("moment", ["before", "after"])


@MOMENTS
def test_an_effect_that_may_rerun_runs_again(moment: str, world: World) -> None:
    """A process dies inside an effect with the policy "rerun": its body runs again, under the same idempotency key."""
    world.do("submit", **IN_TURN)
    assert world.kill_in("work", body=("quote", moment, "die"), **IN_TURN) is None
    end = world.finish(**IN_TURN)
    assert in_the_dark(world.events()) == {"quote"}
    assert end.status == "completed"
    assert world.lines() == {"quote": 1 if moment == "before" else 2, "approve": 1, "book": 1}
    assert_invariants(world.uri, world.database)


@MOMENTS
def test_an_effect_that_must_not_be_guessed_about_fails_the_run(moment: str, world: World) -> None:
    """A process dies inside an effect with the policy "fail": the run fails, and says where and why."""
    world.do("submit", **IN_TURN)
    assert world.kill_in("work", body=("book", moment, "die"), **IN_TURN) is None
    end = world.finish(**IN_TURN)
    assert end.status == "failed"
    assert end.error is not None
    assert end.error["type"].endswith("UnknownOutcome")
    assert "book" in end.error["message"]
    assert world.lines() == ({"quote": 1} if moment == "before" else {"quote": 1, "book": 1})
    assert_invariants(world.uri, world.database)


def die_inside_approve(world: World, moment: str) -> tuple[str, dict[str, Any]]:
    """A run whose process died inside `approve`: the question that it is suspended on, as activity id and value."""
    world.do("submit", **IN_TURN)
    world.do("work", **IN_TURN)
    world.do("resolve", answers=world.answers())
    assert world.kill_in("work", body=("approve", moment, "die"), **IN_TURN) is None
    world.do("work", **IN_TURN)
    frontier = world.run().frontier
    assert frontier is not None
    (entry,) = frontier.entries
    assert entry.name == "unknown_outcome"
    assert (entry.value["name"], entry.value["input"]) == ("approve", {"item": "desk"})
    return entry.activity_id, entry.value


@MOMENTS
def test_a_person_can_say_that_an_effect_happened(moment: str, world: World) -> None:
    """Policy "suspend", verdict "completed": the effect does not run again, and its result is the one that the person gave."""
    question, value = die_inside_approve(world, moment)
    happened = world.lines()
    assert (value["idempotency_key"] in world.idempotency_keys()) == (moment == "after")
    world.do("resolve", answers={question: {"verdict": "completed", "result": "approved by phone"}})
    end = world.finish(**IN_TURN)
    assert [each.content for each in end.output["messages"] if each.type == "tool"] == ["desk: 10", "desk booked", "approved by phone"]
    assert world.lines() == happened
    assert_invariants(world.uri, world.database)


@MOMENTS
def test_a_person_can_say_that_an_effect_is_to_run(moment: str, world: World) -> None:
    """Policy "suspend", verdict "rerun": the body runs again, with the answer that it had already."""
    question, _ = die_inside_approve(world, moment)
    happened = world.lines()
    world.do("resolve", answers={question: {"verdict": "rerun"}})
    world.do("work", **IN_TURN)
    end = world.run()
    assert end.status == "completed"
    assert [each.content for each in end.output["messages"] if each.type == "tool"] == ["desk: 10", "desk booked", "approved: yes"]
    assert world.lines() == happened + Counter(approve=1)
    assert_invariants(world.uri, world.database)


@MOMENTS
def test_a_person_can_fail_the_run(moment: str, world: World) -> None:
    """Policy "suspend", verdict "fail": the run fails with the person's reason."""
    question, _ = die_inside_approve(world, moment)
    happened = world.lines()
    world.do("resolve", answers={question: {"verdict": "fail", "reason": "nobody knows"}})
    end = world.finish(**IN_TURN)
    assert end.status == "failed"
    assert end.error is not None
    assert end.error["type"].endswith("UnknownOutcome")
    assert "nobody knows" in end.error["message"]
    assert world.lines() == happened
    assert_invariants(world.uri, world.database)


def test_a_verdict_of_another_shape_is_refused(world: World) -> None:
    """What is no verdict is refused before anything is written."""
    question, _ = die_inside_approve(world, "before")
    for answer in ("rerun", {"verdict": "maybe"}, {"verdict": "completed"}, {"verdict": "rerun", "result": 1}, None):
        with pytest.raises(InvalidAnswer):
            world.do("resolve", answers={question: answer})
    assert world.run().status == "suspended"


# -- points that the matrix does not pass -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("point", "hit"), _PAYLOAD)
def test_a_large_value_survives_a_death_at(point: FailPoint, hit: int, world: World) -> None:
    """A process dies around the write of a large value's chunks: no value is lost, none refers to chunks that are not there."""
    world.do("submit", workflow="bulky")
    assert world.kill_in("work", workflow="bulky", kill_at=(point, hit)) is None
    happened = world.lines()
    end = world.finish(workflow="bulky")
    assert end.status == "completed"
    assert end.output["messages"][-1].content == f"desk: {LARGE}"
    assert world.lines() == happened + (Counter(fetch=1) if "fetch" in in_the_dark(world.events()) else Counter())
    assert_invariants(world.uri, world.database)


@pytest.mark.parametrize("point", HITS["resolve"])
def test_an_answer_that_goes_on_survives_a_death_at(point: FailPoint, world: World) -> None:
    """A process dies while it answers and begins to go on: there is neither an answer nor an attempt, or there are both and others take over."""
    assert world.kill_in("invoke and answer", kill_at=(point, 1)) is None
    kinds = [event["type"] for event in world.events()]
    if point is P.RESOLVE_AFTER:
        assert kinds[-2:] == ["activities.resolved", "attempt.started"]
        assert world.run().status == "running"
    else:
        assert kinds[-1] == "activities.suspended"
        world.do("resolve", answers=world.answers())
    assert world.finish().status == "completed"
    assert world.lines() == {"quote": 1, "approve": 1, "book": 1}
    assert_invariants(world.uri, world.database)


@pytest.mark.parametrize("point", _TRANSACTIONAL)
def test_a_transactional_activity_survives_a_death_at(point: FailPoint, world: World) -> None:
    """A process dies around the commit of what an activity writes to this cluster: it is there exactly once, with its outcome."""
    world.do("submit", workflow="ledger")
    assert world.kill_in("work", workflow="ledger", kill_at=(point, 1)) is None
    with pymongo.MongoClient(world.uri) as client:
        ledger = client[world.database]["ledger"]
        assert ledger.count_documents({}) == (1 if point is P.TRANSACTIONAL_AFTER else 0)
        end = world.finish(workflow="ledger")
        assert [each["item"] for each in ledger.find()] == ["desk"]
    assert end.output["messages"][-1].content == "desk entered"
    assert [event["type"] for event in world.events()].count("activity.completed") == 1
    assert_invariants(world.uri, world.database)


@pytest.mark.parametrize("point", _CANCEL)
def test_a_cancel_of_a_suspended_run_survives_a_death_at(point: FailPoint, world: World) -> None:
    """A canceller dies: the run is cancelled whole or not at all, and the next cancel finds it so or does it."""
    world.do("submit")
    world.do("work")
    assert world.kill_in("cancel", kill_at=(point, 1)) is None
    assert world.run().status == ("cancelled" if point is P.CANCEL_AFTER else "suspended")
    assert_invariants(world.uri, world.database)
    assert world.do("cancel").result == {"status": "cancelled"}
    assert [event["type"] for event in world.events()].count("run.cancelled") == 1
    snapshot = assert_invariants(world.uri, world.database)
    assert [frontier["status"] for frontier in snapshot.frontiers["po-17"]] == ["cancelled"]


@pytest.mark.parametrize("point", [*_CANCEL, *_CLAIM, P.END_BEFORE, P.END_INSIDE, P.END_AFTER])
def test_a_cancel_of_a_running_run_survives_a_death_at(point: FailPoint, world: World) -> None:
    """A canceller dies while the run runs: the next cancel ends it, and its attempt writes nothing more."""
    world.do("submit", **IN_TURN)
    worker = world.start("work", body=("quote", "after", "wait"), **IN_TURN)
    worker.until_in_body()
    assert world.kill_in("cancel", kill_at=(point, 1)) is None
    assert world.do("cancel").result == {"status": "cancelled"}
    events = world.events()
    assert [event["type"] for event in events].count("run.cancelled") == 1
    worker.go_on()
    report = worker.end()
    assert report is not None
    assert report.result == {"status": "cancelled"}
    assert world.events() == events
    assert world.lines() == {"quote": 1}
    assert_invariants(world.uri, world.database)


@pytest.mark.parametrize("point", [*_CANCEL, *_CLAIM])
def test_a_cancel_of_a_waiting_run_survives_a_death_at(point: FailPoint, world: World) -> None:
    """Once a cancel has marked a run that waits for a runner, a runner ends it without executing anything, although the canceller died."""
    world.do("submit")
    assert world.kill_in("cancel", kill_at=(point, 1)) is None
    if point is P.CANCEL_BEFORE:
        assert world.run().status == "pending"
        assert world.do("cancel").result == {"status": "cancelled"}
    assert world.do("work").result == {"status": "cancelled"}
    assert [event["type"] for event in world.events()].count("run.cancelled") == 1
    assert world.lines() == {}
    assert_invariants(world.uri, world.database)


@pytest.mark.parametrize("point", _RETRY)
def test_a_retry_survives_a_death_at(point: FailPoint, world: World, unkilled: tuple[dict[str, Report], RunSnapshot]) -> None:
    """An operator's process dies while it lets a failed run go on: the run is failed or goes on, and recorded effects do not run again."""
    for stage in STAGES:
        do_stage(world, stage, is_broken=True)
    failed = world.run()
    assert (failed.status, failed.error) == ("failed", {"type": "ValueError", "message": "broken"})
    assert world.kill_in("retry", kill_at=(point, 1)) is None
    if point is P.RETRY_AFTER:
        with pytest.raises(RunError):
            world.do("retry")
    else:
        assert world.run().status == "failed"
        assert world.do("retry").result == {"status": "ready"}
    assert said(world.finish()) == said(unkilled[1])
    assert world.lines() == {"quote": 1, "approve": 1, "book": 1}
    assert [event["type"] for event in world.events()].count("run.retried") == 1
    assert_invariants(world.uri, world.database)


@pytest.mark.parametrize("point", _RELEASE)
def test_a_release_survives_a_death_at(point: FailPoint, world: World) -> None:
    """A draining runner dies while it gives a run back: another goes on with it."""
    world.do("submit", **IN_TURN)
    worker = world.start("work until told", body=("quote", "before", "wait"), kill_at=(point, 1), **IN_TURN)
    worker.until_in_body()
    worker.signal(signal.SIGTERM)
    assert worker.end() is None
    assert world.run().status == ("ready" if point is P.RELEASE_AFTER else "running")
    assert world.finish(**IN_TURN).status == "completed"
    assert world.lines() == {"quote": 1, "approve": 1, "book": 1}
    assert_invariants(world.uri, world.database)


@pytest.mark.parametrize("point", _EXPIRE)
def test_an_expiry_survives_a_death_at(point: FailPoint, world: World) -> None:
    """The process that closes an overdue frontier dies: it is open or expired, never half of it; then the run goes on with the default answer."""
    world.do("submit")
    world.do("work")
    frontier = world.run().frontier
    assert frontier is not None
    default = {frontier.entries[0].activity_id: "nobody came"}
    with pymongo.MongoClient(world.uri) as client:
        overdue = datetime.now(UTC) - timedelta(seconds=1)
        client[world.database]["frontiers"].update_one({"_id": "po-17/1"}, {"$set": {"expires_at": overdue}})
    assert world.kill_in("expire", answers=default, kill_at=(point, 1)) is None
    assert world.do("expire", answers=default).result == {"was_mine": point is not P.EXPIRE_AFTER}
    with pytest.raises(FrontierExpired):
        world.do("resolve", answers=default)
    assert world.do("work").result == {"status": "completed"}
    assert [each.content for each in world.run().output["messages"] if each.type == "tool"] == ["desk: 10", "approved: nobody came", "desk booked"]
    assert [event["type"] for event in world.events()].count("frontier.expired") == 1
    assert_invariants(world.uri, world.database)


@pytest.mark.parametrize("point", [*_DRAFT, P.RESOLVE_INSIDE])
def test_a_draft_survives_a_death_at(point: FailPoint, world: World) -> None:
    """Whoever completes a draft dies: its answers have all gone in or none has, and giving the last one again sees to it."""
    world.do("submit")
    world.do("work")
    answers = world.answers()
    assert world.kill_in("draft", answers=answers, kill_at=(point, 1)) is None
    assert world.run().status == ("ready" if point is P.DRAFT_AFTER else "suspended")
    assert_invariants(world.uri, world.database)
    assert world.do("draft", answers=answers).result == {"is_in": True}
    assert world.do("work").result == {"status": "completed"}
    assert [event["type"] for event in world.events()].count("activities.resolved") == 1
    assert_invariants(world.uri, world.database)


@pytest.mark.parametrize("point", _FORK)
def test_a_fork_survives_a_death_at(point: FailPoint, world: World) -> None:
    """The process that forks a run dies: the fork is there whole or not at all, and its origin is as it was."""
    for stage in STAGES:
        do_stage(world, stage)
    origin = world.events()
    assert world.kill_in("fork", kill_at=(point, 1)) is None
    assert bool(world.events(FORKED_ID)) == (point is P.FORK_AFTER)
    if point is P.FORK_AFTER:
        with pytest.raises(RunConflict):
            world.do("fork")
    else:
        world.do("fork")
    end = world.finish(FORKED_ID)
    assert [each.content for each in end.output["messages"]] == [each.content for each in world.run().output["messages"]]
    assert world.events() == origin
    assert_invariants(world.uri, world.database)


@pytest.mark.parametrize("point", _PRUNE)
def test_a_pruning_survives_a_death_at(point: FailPoint, world: World) -> None:
    """A run is there whole, or gone for everybody who asks; the next call removes what is left of it."""
    world.do("submit")
    world.do("cancel")
    assert world.kill_in("prune", kill_at=(point, 1)) is None
    if point is P.PRUNE_BEFORE:
        assert world.run().status == "cancelled"
        assert_invariants(world.uri, world.database)
    else:
        with pytest.raises(RunNotFound):
            world.run()
    assert world.do("prune").result == {"removed": [RUN_ID]}
    with pymongo.MongoClient(world.uri) as client:
        owned = [name for name in client[world.database].list_collection_names() if name not in ("meta", "runners", "threads")]
        assert [client[world.database][name].count_documents({"run_id": RUN_ID}) for name in owned] == [0] * len(owned)
