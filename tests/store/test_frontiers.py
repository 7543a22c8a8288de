"""Suspend, resolve, expire: what a person is asked, and what becomes of the answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, timedelta

import pytest

from mongo_durable.errors import (
    FrontierExpired,
    IncompleteResolution,
    ResolutionConflict,
    RunNotFound,
    RunNotSuspended,
    StaleGeneration,
    Superseded,
    UnknownActivity,
)
from mongo_durable.protocol.events import EventType, FrontierStatus, RunStatus
from mongo_durable.protocol.history import fold
from mongo_durable.store import claims, frontiers, heads, runs
from mongo_durable.store.appender import Appender
from mongo_durable.store.connection import Connection
from mongo_durable.store.documents import Answerer, event_from
from mongo_durable.store.events import read_history
from tests.support.attempts import Attempt, answers, question

PAST = timedelta(milliseconds=-1)


async def test_a_frontier_lists_its_questions_by_position(connection: Connection, appender: Appender, run_id: str) -> None:
    """Whatever the order in which activities suspended, the frontier is the same, and it is stored whole."""
    asked = [question(run_id, number, schema={"type": "string"}) for number in (10, 2, 1)]
    stored = await (await Attempt.submit(connection, appender, run_id)).suspend(*asked)
    assert [entry.position.step for entry in stored.entries] == [1, 2, 10]
    assert stored.entries[0] == asked[2]
    assert (stored.status, stored.generation, stored.seq, stored.expires_at) == (FrontierStatus.OPEN, 1, 3, None)
    assert await frontiers.get(connection, run_id, 1) == stored
    assert await frontiers.open_frontiers(connection, run_id=run_id) == [stored]
    assert await frontiers.current(connection, run_id) == stored
    head = await heads.get(connection, run_id)
    assert (head.status, head.generation, head.owner) == (RunStatus.SUSPENDED, 1, None)


async def test_suspending_again_returns_what_was_recorded(connection: Connection, appender: Appender, run_id: str) -> None:
    """A repeated suspend, after a lost answer, finds its own frontier and writes nothing."""
    attempt = await Attempt.submit(connection, appender, run_id)
    stored = await attempt.suspend()
    assert await attempt.suspend() == stored
    assert len(await read_history(connection, run_id)) == 3


async def test_a_superseded_attempt_cannot_suspend(connection: Connection, appender: Appender, run_id: str) -> None:
    """An attempt that was taken over leaves no frontier, no event, and the head as it is."""
    attempt = await Attempt.submit(connection, appender, run_id)
    await claims.claim(connection, run_id, "p2", dead_owners=["p1"])
    with pytest.raises(Superseded):
        await attempt.suspend()
    assert await frontiers.get(connection, run_id, 1) is None
    assert (await heads.get(connection, run_id)).status is RunStatus.RUNNING


async def test_answers_let_the_run_go_on(connection: Connection, appender: Appender, run_id: str) -> None:
    """A resolution is recorded with who and why, the frontier is closed, the run is ready, and the answers are in its history."""
    stored = await (await Attempt.submit(connection, appender, run_id)).suspend()
    receipt = await frontiers.resolve(connection, stored, answers(stored), Answerer(by="approver-7", note="fine"))
    assert (receipt.run_id, receipt.generation, receipt.resolved_by, receipt.note) == (run_id, 1, "approver-7", "fine")
    assert (await heads.get(connection, run_id)).status is RunStatus.READY
    history = fold(run_id, await read_history(connection, run_id))
    assert history.frontiers[0].answers == answers(stored)
    assert (await frontiers.current(connection, run_id)).status is FrontierStatus.RESOLVED


async def test_the_same_answers_give_the_same_receipt_for_ever(connection: Connection, appender: Appender, run_id: str) -> None:
    """Also after the run has gone on, been suspended again, and ended; in another order of keys too."""
    first = await (await Attempt.submit(connection, appender, run_id)).suspend(question(run_id, 1), question(run_id, 2))
    given = answers(first, {"a": 1, "b": 2})
    receipt = await frontiers.resolve(connection, first, given)
    attempt = await Attempt.start(connection, appender, run_id)
    second = await attempt.suspend(question(run_id, 3))
    other_order = {key: {"b": 2, "a": 1} for key in reversed(given)}
    assert await frontiers.resolve(connection, first, other_order) == receipt
    await frontiers.resolve(connection, second, answers(second))
    await (await Attempt.start(connection, appender, run_id)).end()
    assert await frontiers.resolve(connection, first, given, Answerer(by="another")) == receipt
    with pytest.raises(ResolutionConflict):
        await frontiers.resolve(connection, first, answers(first, "else"))


async def test_a_frontier_is_answered_whole(connection: Connection, appender: Appender, run_id: str) -> None:
    """Fewer, more or unknown answers are refused before anything is written."""
    stored = await (await Attempt.submit(connection, appender, run_id)).suspend(question(run_id, 1), question(run_id, 2))
    whole = answers(stored)
    one, two = whole
    with pytest.raises(IncompleteResolution) as fewer:
        await frontiers.resolve(connection, stored, {one: "yes"})
    assert (fewer.value.missing, fewer.value.extra) == ([two], [])
    with pytest.raises(IncompleteResolution) as more:
        await frontiers.resolve(connection, stored, {**whole, "act_else": "yes"})
    assert (more.value.missing, more.value.extra) == ([], ["act_else"])
    with pytest.raises(UnknownActivity) as unknown:
        await frontiers.resolve(connection, stored, {"act_else": "yes"})
    assert unknown.value.activity_ids == ["act_else"]
    assert await connection.resolutions.count_documents({"run_id": run_id}) == 0
    assert len(await read_history(connection, run_id)) == 3


async def test_a_frontier_past_its_deadline_takes_no_answer(connection: Connection, appender: Appender, run_id: str) -> None:
    """From the deadline on the default stands, whether it was recorded yet or not; exactly one of many expirers records it."""
    stored = await (await Attempt.submit(connection, appender, run_id)).suspend(expires_in=PAST)
    with pytest.raises(FrontierExpired):
        await frontiers.resolve(connection, stored, answers(stored))
    default = answers(stored, "default")
    assert sorted(await asyncio.gather(*(frontiers.expire(connection, stored, default) for _ in range(10)))) == [False] * 9 + [True]
    with pytest.raises(FrontierExpired):
        await frontiers.resolve(connection, stored, default)
    assert (await frontiers.current(connection, run_id)).status is FrontierStatus.EXPIRED
    assert (await heads.get(connection, run_id)).status is RunStatus.READY
    last = (await read_history(connection, run_id))[-1]
    assert (last.type, last.data["answers"]) == (EventType.FRONTIER_EXPIRED, default)
    assert await connection.resolutions.count_documents({"run_id": run_id}) == 0


async def test_a_frontier_before_its_deadline_does_not_expire(connection: Connection, appender: Appender, run_id: str) -> None:
    """Neither does one without a deadline; both take answers."""
    for expires_in in (timedelta(hours=1), None):
        stored = await (await Attempt.submit(connection, appender, f"{run_id}-{expires_in}")).suspend(expires_in=expires_in)
        assert not await frontiers.expire(connection, stored, answers(stored))
        await frontiers.resolve(connection, stored, answers(stored))
        assert not await frontiers.expire(connection, stored, answers(stored))


async def test_what_a_late_reviewer_is_told(connection: Connection, appender: Appender, run_id: str) -> None:
    """A frontier that was never answered and is not open any more says why: cancelled, or a generation that never was."""
    stored = await (await Attempt.submit(connection, appender, run_id)).suspend()
    with pytest.raises(RunNotFound):
        await frontiers.resolve(connection, replace(stored, generation=7), answers(stored))
    await runs.cancel(connection, run_id, None, "operator")
    with pytest.raises(RunNotSuspended) as refused:
        await frontiers.resolve(connection, stored, answers(stored))
    assert refused.value.status == "cancelled"
    assert not isinstance(refused.value, StaleGeneration)


async def test_a_run_without_a_frontier_has_no_current_one(connection: Connection, appender: Appender, run_id: str) -> None:
    """A run that never asked, and a run that is not there, are two different answers."""
    with pytest.raises(RunNotFound):
        await frontiers.current(connection, run_id)
    await Attempt.submit(connection, appender, run_id)
    with pytest.raises(RunNotSuspended):
        await frontiers.current(connection, run_id)


async def test_open_frontiers_are_found_by_workflow_and_thread(connection: Connection, appender: Appender, run_id: str) -> None:
    """A reviewer's list can be narrowed down, oldest first."""
    workflow, thread = f"workflow-{run_id}", f"thread-{run_id}"
    first = await (await Attempt.submit(connection, appender, f"{run_id}-1", workflow=workflow)).suspend()
    second = await (await Attempt.submit(connection, appender, f"{run_id}-2", workflow=workflow, thread_id=thread)).suspend()
    assert await frontiers.open_frontiers(connection, workflow=workflow) == [first, second]
    assert await frontiers.open_frontiers(connection, thread_id=thread) == [second]
    assert await frontiers.open_frontiers(connection, workflow=workflow, limit=1) == [first]


async def test_a_history_is_read_like_its_events(connection: Connection, appender: Appender, run_id: str) -> None:
    """What is read at once, without zones and without what only queries need, says what each event says by itself: its times as well."""
    attempt = await Attempt.submit(connection, appender, run_id)
    await attempt.started(1)
    await attempt.suspend(expires_in=timedelta(hours=1))
    read = await read_history(connection, run_id)
    alone = [event_from(document) async for document in connection.activity_events.find({"run_id": run_id}).sort("seq", 1)]
    assert read == alone
    assert {each.at.tzinfo for each in read if each.at is not None} == {UTC}
    assert [entry["expires_at"].tzinfo for entry in read[-1].data["entries"]] == [UTC]
