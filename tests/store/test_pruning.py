"""Pruning removes ended runs with everything they own, and nothing else, wherever it is killed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from mongo_durable.errors import ConfigurationError, RunConflict, RunNotFound
from mongo_durable.protocol.events import EventType, RunStatus
from mongo_durable.protocol.memory import MemoryEntry, MemoryRole
from mongo_durable.store import drafts, failpoints, forks, frontiers, heads, runs, schema
from mongo_durable.store.appender import Appender
from mongo_durable.store.connection import Connection
from mongo_durable.store.events import read_history
from mongo_durable.store.failpoints import FailPoint
from mongo_durable.store.payloads import INLINE_LIMIT
from mongo_durable.store.pruning import ENDED, PrunedRun, Selection, prune
from mongo_durable.store.runs import ThreadState
from tests.support.attempts import Attempt, answers, question, submit

NOW = timedelta()
LARGE = "x" * (INLINE_LIMIT + 1)
STATE = ThreadState(serde_type="msgpack", data=b"s" * (INLINE_LIMIT + 1))
OWNED = (*schema.RUN_OWNED, "thread_states", "runs")


@pytest.fixture
async def connection(mongo_uri: str, database: str) -> AsyncIterator[Connection]:
    """A database of its own: pruning looks at all runs."""
    async with AsyncMongoClient(mongo_uri) as client:
        made = Connection(client, database, is_owned=False)
        await schema.ensure_schema(made)
        yield made
        await made.aclose()


@pytest.fixture
async def appender(connection: Connection) -> Appender:
    """The process's one appender. It closes with the connection."""
    return Appender(connection)


async def ended(connection: Connection, appender: Appender, run_id: str, kind: EventType = EventType.RUN_COMPLETED, **options: Any) -> None:
    """A run with something in every collection, to its end."""
    attempt = await Attempt.submit(connection, appender, run_id, value=LARGE, **options)
    await attempt.started(1)
    await attempt.completed(1, f"{LARGE}{run_id}")
    await appender.drain(attempt.channel)
    said = MemoryEntry(seq=1, role=MemoryRole.INPUT, name=None, activity_id=None, value="hello")
    frontier = await frontiers.suspend(connection, attempt.claim, attempt.channel, [question(run_id, 1)], [said])
    await drafts.add(connection, frontier, answers(frontier), "ada", None)
    again = await Attempt.start(connection, appender, run_id)
    await again.end(kind, output="done", state=STATE if kind is EventType.RUN_COMPLETED else None)


async def all_of(pruning: AsyncIterator[PrunedRun]) -> list[str]:
    """The ids of the runs that are gone."""
    return [each.run_id async for each in pruning]


async def counts(connection: Connection, run_id: str) -> dict[str, int]:
    """How many documents there are of a run, by collection; none of those without."""
    found = {name: await connection.database[name].count_documents({"run_id": run_id}) for name in OWNED}
    return {name: number for name, number in found.items() if number}


async def test_everything_goes_but_what_the_next_turn_starts_from(connection: Connection, appender: Appender) -> None:
    """All that a run owns is deleted; of a thread its newest committed state stays, chunks included, and the next turn starts from it."""
    for number in (1, 2):
        await ended(connection, appender, f"turn-{number}", thread_id="t")
    assert set(await counts(connection, "turn-1")) == set(OWNED)
    removed = [each async for each in prune(connection, Selection(older_than=NOW), batch=2)]
    assert [each.run_id for each in removed] == ["turn-1", "turn-2"]
    assert all(removed[0].documents[name] for name in (*schema.RUN_OWNED, "runs"))
    assert [each.documents["thread_states"] for each in removed] == [0, 1]  # the second started from the first one's
    assert await counts(connection, "turn-1") == {}
    assert await counts(connection, "turn-2") == {"thread_states": 1, "payloads": 1}
    third = await Attempt.submit(connection, appender, "turn-3", thread_id="t")
    assert third.claim.head.base_turn == 2
    assert await runs.thread_state(connection, "t", 2) == STATE
    await third.end(state=STATE)
    assert await all_of(prune(connection, Selection(older_than=NOW))) == ["turn-3"]
    assert [each["_id"] async for each in connection.thread_states.find()] == ["t/3"]
    assert await connection.payloads.count_documents({}) == 1


async def test_only_what_has_ended_and_is_selected_goes(connection: Connection, appender: Appender) -> None:
    """Runs of every other status stay, whatever their age; so do those that are too young, or of another status, workflow or thread."""
    await submit(connection, "pending")
    running = await Attempt.submit(connection, appender, "running")
    await (await Attempt.submit(connection, appender, "suspended")).suspend()
    await (await Attempt.submit(connection, appender, "ready")).release()
    kinds = {"completed": EventType.RUN_COMPLETED, "failed": EventType.RUN_FAILED, "diverged": EventType.RUN_DIVERGED}
    for name, kind in kinds.items():
        await (await Attempt.submit(connection, appender, name)).end(kind)
    await submit(connection, "cancelled")
    await runs.cancel(connection, "cancelled", None, "somebody")
    statuses = {each.run_id: each.status.value for each in await heads.listing(connection)}
    assert statuses == {status.value: status.value for status in RunStatus}
    assert await all_of(prune(connection, Selection(older_than=timedelta(hours=1)))) == []
    assert await all_of(prune(connection, Selection(older_than=NOW, workflow="another"))) == []
    assert await all_of(prune(connection, Selection(older_than=NOW, thread_id="another"))) == []
    assert sorted(await all_of(prune(connection, Selection(older_than=NOW), is_dry_run=True))) == sorted(ENDED)
    assert await all_of(prune(connection, Selection(older_than=NOW, status="failed"))) == ["failed"]
    assert await all_of(prune(connection, Selection(older_than=NOW, thread_id="diverged"))) == ["diverged"]
    assert sorted(await all_of(prune(connection, Selection(older_than=NOW, workflow="procurement")))) == ["cancelled", "completed"]
    assert {each.run_id for each in await heads.listing(connection)} == set(statuses) - set(ENDED)
    assert len(await read_history(connection, "suspended")) == 3
    await running.started(1)  # and a live run works on
    for wrong in ({"older_than": -timedelta(1)}, {"older_than": NOW, "status": "running"}):
        with pytest.raises(ConfigurationError):
            Selection(**wrong)


class Killed(Exception):
    """The pruner is gone."""


async def test_a_killed_pruner_is_continued(connection: Connection, appender: Appender) -> None:
    """Killed between any two writes, and inside each transaction: from its mark on, the run is gone for everybody; the next call removes the rest."""
    number, reached = 0, 0

    async def kill(point: FailPoint) -> None:
        nonlocal reached
        reached += point.value.startswith("prune.")
        if reached == number:
            raise Killed

    points = 0
    while True:
        number, reached = number + 1, 0
        run_id = f"r{number}"
        await ended(connection, appender, run_id, EventType.RUN_FAILED)
        failpoints.handler = kill
        try:
            await all_of(prune(connection, Selection(older_than=NOW), batch=3))
        except Killed:
            points += 1
        else:
            break
        finally:
            failpoints.handler = None
        if number > 1 and await connection.runs.find_one({"_id": run_id}) is not None:
            for call in (heads.get(connection, run_id), runs.retry(connection, run_id), forks.fork(connection, run_id, 0, "new")):
                with pytest.raises(RunNotFound):
                    await call
            with pytest.raises(RunConflict):
                await submit(connection, run_id, value=LARGE)
            assert await heads.listing(connection) == []
        assert await all_of(prune(connection, Selection(older_than=NOW))) in ([run_id], [])
        assert await counts(connection, run_id) == {}
    assert points >= 15


async def at(point: FailPoint, act: Callable[[], Awaitable[object]]) -> None:
    """Act once, when the pruner comes to this point."""

    async def handle(reached: FailPoint) -> None:
        if reached is point:
            failpoints.handler = None
            await act()

    failpoints.handler = handle


async def test_a_retry_wins_or_loses(connection: Connection, appender: Appender) -> None:
    """An operator who retries a run before its mark has a whole live run; behind it there is nothing to retry."""
    await ended(connection, appender, "wins", EventType.RUN_FAILED)
    await at(FailPoint.PRUNE_BEFORE, lambda: runs.retry(connection, "wins"))
    whole = await counts(connection, "wins")
    assert await all_of(prune(connection, Selection(older_than=NOW))) == []
    assert await counts(connection, "wins") == whole | {"activity_events": whole["activity_events"] + 1}
    await (await Attempt.start(connection, appender, "wins")).end(EventType.RUN_FAILED)

    async def too_late() -> None:
        with pytest.raises(RunNotFound):
            await runs.retry(connection, "wins")

    await at(FailPoint.PRUNE_MARKED, too_late)
    assert await all_of(prune(connection, Selection(older_than=NOW))) == ["wins"]
    assert failpoints.handler is None
    assert await counts(connection, "wins") == {}


async def test_a_fork_keeps_what_it_starts_from(connection: Connection, appender: Appender) -> None:
    """A fork is whole without its origin; the state that both start from stays as long as one of them is there, and goes with the last."""
    for number in (1, 2, 3):
        await ended(connection, appender, f"turn-{number}", thread_id="t")
    history = await read_history(connection, "turn-2")
    start = next(each.position for each in history if each.type is EventType.ACTIVITY_STARTED)
    assert start is not None
    fork = await forks.fork(connection, "turn-2", start, "fork")
    assert (fork.base_thread, fork.base_turn) == ("t", 1)
    assert await all_of(prune(connection, Selection(older_than=NOW, thread_id="t"))) == ["turn-1", "turn-2", "turn-3"]
    assert await runs.thread_state(connection, "t", 1) == STATE
    assert [each["_id"] async for each in connection.thread_states.find().sort("_id", 1)] == ["t/1", "t/3"]
    await (await Attempt.start(connection, appender, "fork")).end()
    assert await all_of(prune(connection, Selection(older_than=NOW))) == ["fork"]
    assert [each["_id"] async for each in connection.thread_states.find()] == ["t/3"]
    assert await connection.payloads.count_documents({}) == 1


async def test_a_name_that_is_used_again_is_not_touched(connection: Connection, appender: Appender) -> None:
    """A pruner that was overtaken by another deletes nothing of the live run which has the name by then."""
    await ended(connection, appender, "name", EventType.RUN_FAILED)

    async def overtake() -> None:
        assert await all_of(prune(connection, Selection(older_than=NOW))) == ["name"]
        await (await Attempt.submit(connection, appender, "name", value=LARGE)).suspend()

    await at(FailPoint.PRUNE_AFTER, overtake)
    assert await all_of(prune(connection, Selection(older_than=NOW), batch=1)) == []
    assert await counts(connection, "name") == {"runs": 1, "activity_events": 3, "frontiers": 1, "payloads": 1}
    assert (await heads.get(connection, "name")).input == LARGE


async def test_every_collection_is_a_run_s_own_or_not() -> None:
    """A collection that holds documents of a run is pruned with it; each has an index by which they are found."""
    shared = {"runs", "threads", "thread_states", "runners", "audit"}
    assert set(schema.VALIDATORS) == shared | set(schema.RUN_OWNED)
    for name in schema.RUN_OWNED:
        assert any(next(iter(index.document["key"])) == "run_id" for index in schema.INDEXES[name]), name
