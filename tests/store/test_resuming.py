"""The answers and the attempt that goes on from them, in one transaction: for a process that executes the run itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mongo_durable.errors import CommitUnknown, FrontierExpired, ResolutionConflict, RunNotClaimable
from mongo_durable.protocol.events import EventType, RunStatus
from mongo_durable.protocol.history import fold
from mongo_durable.store import claims, frontiers, heads, runs
from mongo_durable.store.appender import Appender
from mongo_durable.store.claims import Claim, Claimer
from mongo_durable.store.connection import Connection, Endpoint
from mongo_durable.store.documents import SOMEBODY, RunLimit, StoredFrontier
from mongo_durable.store.events import read_history
from mongo_durable.store.failpoints import FailPoint
from tests.store.conftest import Commands
from tests.store.test_holes import Died, die_at
from tests.support.attempts import VERSION, WORKFLOW, Attempt, answers, submission
from tests.support.server_faults import failing

ME = Claimer(owner="p2", workflow=(WORKFLOW, VERSION), code_version="abc")
ANSWERED = [EventType.RUN_SUBMITTED, EventType.ATTEMPT_STARTED, EventType.ACTIVITIES_SUSPENDED, EventType.ACTIVITIES_RESOLVED]


async def suspended(connection: Connection, appender: Appender, run_id: str) -> StoredFrontier:
    """A run that waits for one answer."""
    return await (await Attempt.submit(connection, appender, run_id)).suspend()


async def go_on(connection: Connection, frontier: StoredFrontier, value: Any = "yes", claimer: Claimer = ME) -> Claim | None:
    """Answer, and be the attempt."""
    return await frontiers.resolve_and_claim(connection, frontier, answers(frontier, value), SOMEBODY, claimer)


async def types(connection: Connection, run_id: str) -> list[EventType]:
    """What is recorded."""
    return [event.type for event in await read_history(connection, run_id)]


async def test_the_attempt_begins_with_the_answers(connection: Connection, appender: Appender, run_id: str, commands: Commands) -> None:
    """One transaction of four writes, and the history is one query: the head and the events are those that a claim behind the answers leaves."""
    one, other = f"{run_id}-1", f"{run_id}-2"
    frontier, reference = await suspended(connection, appender, one), await suspended(connection, appender, other)
    commands.forget()
    claimed = await go_on(connection, frontier)
    assert claimed is not None
    assert commands.sent[:-1] == [("findAndModify", "runs"), ("update", "frontiers"), ("insert", "resolutions"), ("insert", "activity_events")]
    assert commands.sent[-1][0] == "commitTransaction"
    commands.forget()
    history = await claims.history(connection, claimed)
    assert commands.counted() == {("find", "activity_events"): 1}
    assert [event.type for event in history] == [*ANSWERED, EventType.ATTEMPT_STARTED]
    assert (fold(one, history).fence, claimed.seq, claimed.head.fence) == (2, 5, 2)

    await frontiers.resolve(connection, reference, answers(reference))
    await claims.claim(connection, other, ME.owner, workflows={ME.workflow: "abc"})

    differing = {"_id", "run_id", "thread_id", "attempt", "news"}

    async def stored(run: str) -> list[dict[str, Any]]:
        """Head and last event, without what differs between any two runs."""
        head = await connection.runs.find_one({"_id": run})
        event = await connection.activity_events.find_one({"run_id": run}, sort=[("seq", -1)])
        assert head is not None
        assert event is not None
        assert head["attempt"] == event["attempt"]
        return [
            {name: datetime if isinstance(value, datetime) else value for name, value in each.items() if name not in differing}
            for each in (head, event)
        ]

    assert await stored(one) == await stored(other)
    resolution = await connection.resolutions.find_one({"_id": frontier.id})
    assert resolution is not None
    assert resolution["at"] == claimed.head.available_at == claimed.head.claimed_at
    await Attempt.of(connection, appender, claimed).end()
    assert (await heads.get(connection, one)).status is RunStatus.COMPLETED


@pytest.mark.parametrize("case", ["limit", "cancel", "version"])
async def test_what_needs_more_than_the_plain_claim_is_claimed_apart(case: str, connection: Connection, appender: Appender, run_id: str) -> None:
    """A run that needs a place, one that is to be ended, and one of another version: the answers are recorded, and the run waits to be claimed."""
    limit = RunLimit(key=run_id, running=1)
    if case == "limit":
        await runs.submit(connection, replace(submission(run_id), limit=limit))
        attempt = await Attempt.start(connection, appender, run_id)
    else:
        attempt = await Attempt.submit(connection, appender, run_id)
    if case == "cancel":
        # The canceller died, and the attempt suspended the run in between.
        await connection.runs.update_one({"_id": run_id}, {"$set": {"cancel": {"at": datetime.now(UTC), "reason": None, "is_deadline": False}}})
    frontier = await attempt.suspend()
    version = "2" if case == "version" else VERSION
    assert await go_on(connection, frontier, claimer=Claimer(owner="p2", workflow=(WORKFLOW, version))) is None
    assert await types(connection, run_id) == ANSWERED
    assert (await heads.get(connection, run_id)).status is RunStatus.READY
    if case == "limit":
        other = f"{run_id}-other"
        await runs.submit(connection, replace(submission(other), limit=limit))
        taken = await claims.claim(connection, other, "p3")
        with pytest.raises(RunNotClaimable):
            await claims.claim(connection, run_id, "p2")
        await claims.release(connection, taken)
    claimed = await claims.claim(connection, run_id, "p2")
    assert (claimed.head.fence, claimed.seq, claimed.head.is_cancel_requested) == (2, 5, case == "cancel")
    if case == "cancel":
        await runs.end_stopped(connection, claimed)
        assert (await heads.get(connection, run_id)).status is RunStatus.CANCELLED


async def test_the_same_answers_again_begin_nothing(connection: Connection, appender: Appender, run_id: str) -> None:
    """Who repeats the call gets no second attempt, whether the run is still executed or has gone on; other answers are a conflict."""
    frontier = await suspended(connection, appender, run_id)
    claimed = await go_on(connection, frontier)
    assert claimed is not None
    for _ in range(2):
        before = await types(connection, run_id)
        assert await go_on(connection, frontier) is None
        with pytest.raises(ResolutionConflict):
            await go_on(connection, frontier, "no")
        assert await types(connection, run_id) == before
        if (await heads.get(connection, run_id)).status is RunStatus.RUNNING:
            await Attempt.of(connection, appender, claimed).suspend()
    assert (await heads.get(connection, run_id)).generation == 2


async def test_one_of_many_goes_on(connection: Connection, appender: Appender, run_id: str) -> None:
    """Sixteen processes answer at once and would go on: one answer stands, one attempt begins; the others are told as ever (I1, I2, I6)."""
    frontier = await suspended(connection, appender, run_id)

    def rival(number: int) -> Any:
        return go_on(connection, frontier, "no" if number % 2 else "yes", Claimer(owner=f"p{number}", workflow=(WORKFLOW, VERSION)))

    results = await asyncio.gather(*(rival(number) for number in range(16)), return_exceptions=True)
    (winner,) = [each for each in results if isinstance(each, Claim)]
    is_no = results.index(winner) % 2
    assert all(isinstance(each, ResolutionConflict) if number % 2 != is_no else each in (None, winner) for number, each in enumerate(results))
    assert await types(connection, run_id) == [*ANSWERED, EventType.ATTEMPT_STARTED]
    head = await heads.get(connection, run_id)
    assert (head.owner, head.fence, head.attempt) == (winner.owner, 2, winner.attempt)


async def test_an_expired_frontier_begins_nothing(connection: Connection, appender: Appender, run_id: str) -> None:
    """A frontier past its deadline takes no answer, and nobody becomes the attempt; the head is as it was."""
    attempt = await Attempt.submit(connection, appender, run_id)
    frontier = await attempt.suspend(expires_in=timedelta(seconds=-1))
    before = await connection.runs.find_one({"_id": run_id})
    with pytest.raises(FrontierExpired):
        await go_on(connection, frontier)
    assert await connection.runs.find_one({"_id": run_id}) == before


@pytest.mark.parametrize("point", [FailPoint.RESOLVE_BEFORE, FailPoint.RESOLVE_INSIDE, FailPoint.RESOLVE_AFTER])
async def test_who_dies_between_leaves_all_or_nothing(point: FailPoint, connection: Connection, appender: Appender, run_id: str) -> None:
    """Before the commit there is neither answer nor attempt; after it the process finds the run that it does not know it has, and no other does."""
    frontier = await suspended(connection, appender, run_id)
    die_at(point)
    with pytest.raises(Died):
        await go_on(connection, frontier)
    if point is not FailPoint.RESOLVE_AFTER:
        assert await types(connection, run_id) == ANSWERED[:-1]
        assert (await heads.get(connection, run_id)).status is RunStatus.SUSPENDED
        assert await go_on(connection, frontier) is not None
        return
    assert await go_on(connection, frontier) is None
    with pytest.raises(RunNotClaimable):
        await claims.claim(connection, run_id, "p3", dead_owners=["p1"])
    claimed = await claims.claim(connection, run_id, ME.owner, dead_owners=[ME.owner])
    assert (claimed.head.fence, claimed.seq) == (3, 6)


async def test_a_commit_that_is_tried_again_begins_one_attempt(
    run_id: str, appname: str, mongo_uri: str, shared_database: str, client_of: Callable[[int], Any]
) -> None:
    """The transaction is aborted at its commit and its body runs again: the claim is the one that was committed."""
    endpoint = Endpoint(mongo_uri, shared_database, client=client_of(0))  # PyMongo; Motor tries no commit again
    connection = endpoint.connection()
    frontier = await suspended(connection, Appender(connection), run_id)
    fault = {"errorCode": 251, "errorLabels": ["TransientTransactionError"]}
    with failing(mongo_uri, ["commitTransaction"], appname=appname, mode={"times": 1}, **fault) as strikes:
        claimed = await go_on(connection, frontier)
        assert strikes() == 1
    assert claimed is not None
    assert await types(connection, run_id) == [*ANSWERED, EventType.ATTEMPT_STARTED]
    assert (await heads.get(connection, run_id)).attempt == claimed.attempt
    await endpoint.aclose()


async def test_a_commit_whose_answer_is_lost_leaves_a_run_that_its_process_finds(
    run_id: str, appname: str, mongo_uri: str, shared_database: str, client_of: Callable[[int], Any]
) -> None:
    """The caller cannot know; the same answers again give the receipt, and the process takes the run that it does not know it has (H9)."""
    endpoint = Endpoint(mongo_uri, shared_database, client=client_of(1))  # Motor, likewise
    connection = endpoint.connection()
    frontier = await suspended(connection, Appender(connection), run_id)
    concern = {"code": 64, "errmsg": "waiting for replication timed out"}
    with failing(mongo_uri, ["commitTransaction"], appname=appname, mode={"times": 1}, writeConcernError=concern), pytest.raises(CommitUnknown):
        await go_on(connection, frontier)
    assert await go_on(connection, frontier) is None
    assert (await heads.get(connection, run_id)).owner == ME.owner
    assert (await claims.claim(connection, run_id, ME.owner, dead_owners=[ME.owner])).head.fence == 3
    assert await types(connection, run_id) == [*ANSWERED, EventType.ATTEMPT_STARTED, EventType.ATTEMPT_STARTED]
    await endpoint.aclose()
