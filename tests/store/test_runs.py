"""Submit, end, release, retry, cancel: the life of a run seen from its head."""

from __future__ import annotations

import asyncio

import pytest

from mongo_durable.errors import RunConflict, RunError, RunNotFound, Superseded, ThreadBusy
from mongo_durable.protocol.events import EventType, RunStatus
from mongo_durable.store import claims, failpoints, heads, runs
from mongo_durable.store.appender import Appender
from mongo_durable.store.claims import Claim
from mongo_durable.store.connection import Connection
from mongo_durable.store.documents import RunHead
from mongo_durable.store.due import due
from mongo_durable.store.events import read_history
from mongo_durable.store.failpoints import FailPoint
from mongo_durable.store.runs import ThreadState
from tests.support.attempts import Attempt, submission, submit


async def test_a_submitted_run_waits_for_its_first_attempt(connection: Connection, run_id: str) -> None:
    """When submit returns, the run is in the database with its input, its turn and its first event."""
    head = await submit(connection, run_id, value={"amount": 3})
    assert (head.status, head.fence, head.turn, head.base_turn, head.owner) == (RunStatus.PENDING, 0, 1, 0, None)
    assert await heads.get(connection, run_id) == head
    (event,) = await read_history(connection, run_id)
    assert (event.type, event.value, event.data["turn"]) == (EventType.RUN_SUBMITTED, {"amount": 3}, 1)


async def test_submit_for_oneself_starts_the_first_attempt(connection: Connection, run_id: str) -> None:
    """Who executes the run itself needs no claim; the same call again only finds the run."""
    claimed = await runs.submit(connection, submission(run_id), owner="p1", code_version="abc")
    assert isinstance(claimed, Claim)
    assert (claimed.head.status, claimed.head.fence, claimed.seq, claimed.head.attempt) == (RunStatus.RUNNING, 1, 2, claimed.attempt)
    assert (await read_history(connection, run_id))[-1].data["code_version"] == "abc"
    assert await runs.submit(connection, submission(run_id), owner="p2") == await heads.get(connection, run_id)


async def test_the_same_run_submitted_by_many_at_once_is_one_run(connection: Connection, run_id: str) -> None:
    """Fifty submissions of one run id at once all return that run; nobody hears that the thread is busy."""
    for number in range(4):
        found = await asyncio.gather(*(runs.submit(connection, submission(f"{run_id}-{number}")) for _ in range(50)))
        assert all(isinstance(each, RunHead) and each.run_id == f"{run_id}-{number}" for each in found)
        assert len(await read_history(connection, f"{run_id}-{number}")) == 1


async def test_a_run_id_is_taken_once(connection: Connection, run_id: str) -> None:
    """The same id with another workflow, version, thread or input is another run, and is refused."""
    await submit(connection, run_id, value=1)
    assert (await submit(connection, run_id, value=1)).run_id == run_id
    for other in ({"value": 2}, {"value": 1, "workflow": "else"}, {"value": 1, "version": "2"}, {"value": 1, "thread_id": "else"}):
        with pytest.raises(RunConflict):
            await submit(connection, run_id, **other)


async def test_a_thread_has_one_live_run(connection: Connection, appender: Appender, run_id: str) -> None:
    """A second run on a thread is refused while the first lives, whoever comes first; afterwards it is the next turn."""
    thread = f"thread-{run_id}"
    racers = (runs.submit(connection, submission(f"{run_id}-{number}", thread_id=thread)) for number in range(20))
    results = await asyncio.gather(*racers, return_exceptions=True)
    (winner,) = [each for each in results if isinstance(each, RunHead)]
    busy = [each for each in results if isinstance(each, ThreadBusy)]
    assert len(busy) == 19
    assert await connection.runs.count_documents({"thread_id": thread}) == 1
    with pytest.raises(ThreadBusy) as refused:
        await submit(connection, f"{run_id}-late", thread_id=thread)
    assert (refused.value.active_run, refused.value.thread_id) == (winner.run_id, thread)
    await (await Attempt.start(connection, appender, winner.run_id)).end(state=ThreadState(serde_type="msgpack", data=b"x"))
    following = await submit(connection, f"{run_id}-next", thread_id=thread)
    assert (following.turn, following.base_turn) == (2, 1)


@pytest.mark.parametrize(
    ("kind", "status"),
    [(EventType.RUN_COMPLETED, "completed"), (EventType.RUN_FAILED, "failed"), (EventType.RUN_DIVERGED, "diverged")],
)
async def test_an_attempt_ends_its_run(kind: EventType, status: str, connection: Connection, appender: Appender, run_id: str) -> None:
    """The head says how the run ended, the history ends with it, the thread is free, and ending again changes nothing."""
    attempt = await Attempt.submit(connection, appender, run_id)
    await attempt.end(kind, output="out" if kind is EventType.RUN_COMPLETED else None)
    await attempt.end(kind)
    head, history = await heads.get(connection, run_id), await read_history(connection, run_id)
    assert (head.status, head.owner, head.output) == (status, None, "out" if status == "completed" else None)
    assert head.error == (None if status == "completed" else {"type": "ValueError", "message": "no"})
    assert [each.type for each in history[2:]] == [kind]
    thread = await connection.threads.find_one({"_id": run_id})
    assert thread is not None
    assert thread["active_run"] is None


async def test_a_superseded_attempt_cannot_end_or_release(connection: Connection, appender: Appender, run_id: str) -> None:
    """What an attempt that was taken over says about its run does not count."""
    attempt = await Attempt.submit(connection, appender, run_id)
    newer = await claims.claim(connection, run_id, "p2", dead_owners=["p1"])
    await attempt.release()
    head = await heads.get(connection, run_id)
    assert (head.status, head.attempt) == (RunStatus.RUNNING, newer.attempt)
    with pytest.raises(Superseded):
        await attempt.end()
    assert (await heads.get(connection, run_id)).status is RunStatus.RUNNING


async def test_a_released_run_can_be_taken_at_once(connection: Connection, appender: Appender, run_id: str) -> None:
    """A process that stops gives its runs back, and another goes on under the next fence."""
    attempt = await Attempt.submit(connection, appender, run_id)
    await attempt.started(1)
    await attempt.release()
    assert (await heads.get(connection, run_id)).status is RunStatus.READY
    again = await Attempt.start(connection, appender, run_id, "p2")
    assert (again.claim.head.fence, again.claim.seq) == (2, 4)


async def test_a_failed_run_can_be_retried(connection: Connection, appender: Appender, run_id: str) -> None:
    """It goes on from its history under a new fence, with its thread busy again."""
    attempt = await Attempt.submit(connection, appender, run_id)
    await attempt.end(EventType.RUN_FAILED)
    head = await runs.retry(connection, run_id)
    assert (head.status, head.error) == (RunStatus.READY, None)
    with pytest.raises(RunError):
        await runs.retry(connection, run_id)
    with pytest.raises(ThreadBusy):
        await submit(connection, f"{run_id}-2", thread_id=run_id)
    again = await Attempt.start(connection, appender, run_id)
    await again.end()
    with pytest.raises(RunError):
        await runs.retry(connection, run_id)


async def test_a_retry_needs_its_thread(connection: Connection, appender: Appender, run_id: str) -> None:
    """While another run lives on the thread, the failed one stays failed."""
    await (await Attempt.submit(connection, appender, run_id)).end(EventType.RUN_FAILED)
    await submit(connection, f"{run_id}-2", thread_id=run_id)
    with pytest.raises(ThreadBusy) as refused:
        await runs.retry(connection, run_id)
    assert refused.value.active_run == f"{run_id}-2"
    assert (await heads.get(connection, run_id)).status is RunStatus.FAILED


@pytest.mark.parametrize("state", ["pending", "running", "suspended", "ready"])
async def test_cancel_ends_a_run_in_any_state(state: str, connection: Connection, appender: Appender, run_id: str) -> None:
    """When cancel returns, the run is cancelled, its attempt can write nothing more, and its thread is free."""
    attempt = None
    if state == "pending":
        await submit(connection, run_id)
    else:
        attempt = await Attempt.submit(connection, appender, run_id)
        await attempt.started(1)
        if state == "suspended":
            await attempt.suspend()
        elif state == "ready":
            await attempt.release()
    head = await runs.cancel(connection, run_id, "$reason", "operator")
    assert (head.status, head.cancel_reason, head.owner) == (RunStatus.CANCELLED, "$reason", None)
    assert (await read_history(connection, run_id))[-1].data["reason"] == "$reason"
    if attempt is not None and state == "running":
        with pytest.raises(Superseded):
            await attempt.completed(1)
    assert (await submit(connection, f"{run_id}-2", thread_id=run_id)).turn == 2
    assert await runs.cancel(connection, run_id, "again", "operator") == head


async def test_a_cancel_that_a_suspension_overtakes_cancels_the_suspended_run(connection: Connection, appender: Appender, run_id: str) -> None:
    """The run may change its state between any two steps of a cancel, which then looks again."""
    attempt = await Attempt.submit(connection, appender, run_id)

    async def suspend_first(point: FailPoint) -> None:
        if point is FailPoint.CANCEL_INSIDE:
            failpoints.handler = None
            await attempt.suspend()

    failpoints.handler = suspend_first
    assert (await runs.cancel(connection, run_id, None, "operator")).status is RunStatus.CANCELLED


async def test_a_cancel_that_an_end_overtakes_says_how_the_run_ended(connection: Connection, appender: Appender, run_id: str) -> None:
    """Too late is no error: the caller sees what the run became. A retry later is a new decision, and the old cancel does not undo it."""
    attempt = await Attempt.submit(connection, appender, run_id)

    async def fail_first(point: FailPoint) -> None:
        if point is FailPoint.CANCEL_INSIDE:
            failpoints.handler = None
            await attempt.end(EventType.RUN_FAILED)

    failpoints.handler = fail_first
    assert (await runs.cancel(connection, run_id, None, "operator")).status is RunStatus.FAILED
    assert not (await runs.retry(connection, run_id)).is_cancel_requested
    await claims.claim(connection, run_id, "p2")
    assert (await due(connection, "p2", 10)).stopped == []


async def test_a_run_that_is_not_there(connection: Connection, run_id: str) -> None:
    """Every call about it says so."""
    for call in (heads.get(connection, run_id), runs.retry(connection, run_id), runs.cancel(connection, run_id, None, "operator")):
        with pytest.raises(RunNotFound):
            await call
    assert await read_history(connection, run_id) == []


async def test_runs_are_listed_newest_first(connection: Connection, appender: Appender, run_id: str) -> None:
    """By status, workflow and thread."""
    workflow = f"workflow-{run_id}"
    for number in range(3):
        await submit(connection, f"{run_id}-{number}", workflow=workflow)
    await (await Attempt.start(connection, appender, f"{run_id}-1")).end()
    listed = await heads.listing(connection, workflow=workflow)
    assert [each.run_id for each in listed] == [f"{run_id}-2", f"{run_id}-1", f"{run_id}-0"]
    assert [each.run_id for each in await heads.listing(connection, workflow=workflow, status="completed")] == [f"{run_id}-1"]
    assert [each.run_id for each in await heads.listing(connection, thread_id=f"{run_id}-0")] == [f"{run_id}-0"]
    assert len(await heads.listing(connection, workflow=workflow, limit=2)) == 2
