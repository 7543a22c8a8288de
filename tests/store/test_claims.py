"""Claims and leases: who may execute a run, and how others find out."""

from __future__ import annotations

import asyncio

import pytest

from mongo_durable.errors import RunNotClaimable, StoreUnavailable
from mongo_durable.protocol.events import EventType, RunStatus
from mongo_durable.store import claims, frontiers, heads
from mongo_durable.store.appender import Appender
from mongo_durable.store.claims import Claim
from mongo_durable.store.connection import Connection, Endpoint
from mongo_durable.store.events import read_history
from tests.store.conftest import Commands
from tests.support.attempts import Attempt, answers, submit
from tests.support.server_faults import failing

HOUR_MS = 3_600_000


async def test_one_of_many_claimers_gets_the_run(connection: Connection, run_id: str) -> None:
    """However many try at once, one has it, and the history has one attempt."""
    await submit(connection, run_id)
    results = await asyncio.gather(*(claims.claim(connection, run_id, f"p{number}") for number in range(16)), return_exceptions=True)
    (claimed,) = [each for each in results if isinstance(each, Claim)]
    assert sum(isinstance(each, RunNotClaimable) for each in results) == 15
    head = await heads.get(connection, run_id)
    assert (head.status, head.owner, head.attempt, head.fence) == (RunStatus.RUNNING, claimed.owner, claimed.attempt, 1)
    assert [each.type for each in await read_history(connection, run_id)] == [EventType.RUN_SUBMITTED, EventType.ATTEMPT_STARTED]


async def test_many_who_think_each_other_dead_take_turns(connection: Connection, run_id: str) -> None:
    """Even when everybody may take the run from everybody, fences only rise and the history stays dense."""
    await submit(connection, run_id)
    owners = [f"p{number}" for number in range(10)]
    results = await asyncio.gather(*(claims.claim(connection, run_id, owner, dead_owners=owners) for owner in owners), return_exceptions=True)
    won = [each for each in results if isinstance(each, Claim)]
    assert won
    assert all(isinstance(each, Claim | RunNotClaimable) for each in results)
    started = [each for each in await read_history(connection, run_id) if each.type is EventType.ATTEMPT_STARTED]
    assert [each.fence for each in started] == sorted({each.fence for each in started})
    assert {(each.seq, each.head.fence) for each in won} <= {(each.seq, each.fence) for each in started}


@pytest.mark.parametrize("state", ["running", "suspended", "completed", "absent"])
async def test_what_cannot_be_claimed(state: str, connection: Connection, appender: Appender, run_id: str) -> None:
    """A run that a live process has, that waits for answers, that has ended, or that is not there; force takes it from a live process only."""
    if state != "absent":
        attempt = await Attempt.submit(connection, appender, run_id)
        if state == "suspended":
            await attempt.suspend()
        elif state == "completed":
            await attempt.end()
    before = await connection.runs.find_one({"_id": run_id})
    with pytest.raises(RunNotClaimable):
        await claims.claim(connection, run_id, "p2", dead_owners=["p3"])
    assert await connection.runs.find_one({"_id": run_id}) == before
    if state == "running":
        assert (await claims.claim(connection, run_id, "p2", is_forced=True)).head.fence == 2
    else:
        with pytest.raises(RunNotClaimable):
            await claims.claim(connection, run_id, "p2", is_forced=True, dead_owners=["p1"])


async def test_an_answered_run_can_be_claimed(connection: Connection, appender: Appender, run_id: str) -> None:
    """The replacement attempt follows the answers, under the next fence."""
    stored = await (await Attempt.submit(connection, appender, run_id)).suspend()
    await frontiers.resolve(connection, stored, answers(stored))
    claimed = await claims.claim(connection, run_id, "p2", code_version="abc")
    assert (claimed.head.fence, claimed.seq, claimed.head.generation) == (2, 5, 1)
    last = (await read_history(connection, run_id, up_to=claimed.seq))[-1]
    assert (last.data["owner"], last.data["attempt"], last.data["code_version"]) == ("p2", claimed.attempt, "abc")


async def test_only_workflows_that_are_served_are_claimed(connection: Connection, run_id: str) -> None:
    """A process takes no run of a workflow or version that it does not have."""
    await submit(connection, run_id, workflow="mine", version="2")
    with pytest.raises(RunNotClaimable):
        await claims.claim(connection, run_id, "p1", workflows={("mine", "1"): "code", ("other", "2"): "code"})
    assert (await claims.claim(connection, run_id, "p1", workflows={("other", "1"): "code", ("mine", "2"): "code"})).head.fence == 1


async def test_a_sweep_finds_what_can_go_on(connection: Connection, appender: Appender, run_id: str) -> None:
    """By status alone (I9): pending, ready and orphaned runs of the workflows that are served; none that is at rest or at work."""
    workflow = f"workflow-{run_id}"
    for name in ("pending", "ready", "orphaned", "working", "suspended", "ended"):
        await submit(connection, f"{run_id}-{name}", workflow=workflow)
    await submit(connection, f"{run_id}-other-version", workflow=workflow, version="2")
    await (await Attempt.start(connection, appender, f"{run_id}-ready")).release()
    await claims.claim(connection, f"{run_id}-orphaned", f"dead-{run_id}")
    await claims.claim(connection, f"{run_id}-working", f"live-{run_id}")
    await (await Attempt.start(connection, appender, f"{run_id}-suspended")).suspend()
    await (await Attempt.start(connection, appender, f"{run_id}-ended")).end()
    await claims.register(connection, f"live-{run_id}", HOUR_MS, {})
    dead = await claims.dead_owners(connection)
    assert f"dead-{run_id}" in dead  # an owner without a document counts as dead
    assert f"live-{run_id}" not in dead
    found = await claims.claimable(connection, [(workflow, "1")], "me", [], dead, 100)
    assert {each.run_id for each in found} == {f"{run_id}-{name}" for name in ("pending", "ready", "orphaned")}
    assert {(each.workflow, each.version) for each in found} == {(workflow, "1")}


async def test_a_claim_whose_history_cannot_be_read_gives_the_run_back(connection: Connection, run_id: str, mongo_uri: str, appname: str) -> None:
    """The run is not left to a process that does not execute it: it waits for the next try, and says why."""
    await submit(connection, run_id)
    with failing(mongo_uri, ["find"], appname=appname, mode={"times": 1}, errorCode=50), pytest.raises(StoreUnavailable):
        await claims.claim(connection, run_id, "p1")
    head = await heads.get(connection, run_id)
    assert (head.status, head.owner, head.fence) == (RunStatus.READY, None, 1)
    assert head.held_back is not None
    assert head.held_back.startswith("StoreUnavailable: ")
    assert [each.type for each in await read_history(connection, run_id)] == [EventType.RUN_SUBMITTED]
    await connection.runs.update_one({"_id": run_id}, [{"$set": {"available_at": "$$NOW"}}])
    assert (await claims.claim(connection, run_id, "p2")).head.fence == 2


async def test_a_claim_whose_start_was_not_confirmed_looks_whether_it_stands(
    connection: Connection, run_id: str, mongo_uri: str, appname: str
) -> None:
    """The server wrote the attempt's start and could not say that a majority has it: the next read, of what a majority has, says so."""
    await submit(connection, run_id)
    concern = {"code": 64, "errmsg": "waiting for replication timed out"}
    with failing(mongo_uri, ["insert"], appname=appname, mode={"times": 1}, writeConcernError=concern) as strikes:
        claimed = await claims.claim(connection, run_id, "p1")
        assert strikes() == 1
    assert (claimed.seq, claimed.head.fence) == (2, 1)
    assert [each.type for each in await read_history(connection, run_id)] == [EventType.RUN_SUBMITTED, EventType.ATTEMPT_STARTED]


async def test_what_was_held_back_says_nothing_of_crashes(connection: Connection, run_id: str, mongo_uri: str, appname: str) -> None:
    """An attempt that could not be executed is between two crashes: they still follow one another."""
    await submit(connection, run_id)
    await claims.claim(connection, run_id, "dead")
    with failing(mongo_uri, ["find"], appname=appname, mode={"times": 1}, errorCode=50), pytest.raises(StoreUnavailable):
        await claims.claim(connection, run_id, "p1", dead_owners=["dead"])
    await connection.runs.update_one({"_id": run_id}, [{"$set": {"available_at": "$$NOW"}}])
    claimed = await claims.claim(connection, run_id, "p2")
    assert claimed.head.crashes == 1
    await claims.release(connection, claimed)
    assert (await claims.claim(connection, run_id, "p3")).head.crashes == 0


async def test_an_idle_sweep_is_few_commands(connection: Connection, run_id: str, commands: Commands) -> None:
    """Looking for work costs the same few commands whatever the number of runs."""
    workflow = f"workflow-{run_id}"
    for number in range(10):
        await submit(connection, f"{run_id}-{number}", workflow=workflow)
    commands.forget()
    found = await claims.claimable(connection, [(workflow, "1")], "me", [], await claims.dead_owners(connection), 3)
    assert [each.run_id for each in found] == [f"{run_id}-{number}" for number in range(3)]
    assert len(commands.sent) <= 5


async def test_a_process_that_says_goodbye_is_dead_at_once(connection: Connection, endpoint: Endpoint, run_id: str) -> None:
    """Its runs can be taken without waiting for its lease."""
    owner = f"owner-{run_id}"
    await submit(connection, run_id)
    await claims.claim(connection, run_id, owner)
    await claims.register(connection, owner, HOUR_MS, {"host": "$here"})
    assert owner not in await claims.dead_owners(connection)
    stored = await connection.runners.find_one({"_id": owner})
    assert stored is not None
    assert stored["host"] == "$here"
    with endpoint.sync_client() as client:
        await asyncio.to_thread(claims.unregister, client[connection.database.name]["runners"], owner)
    assert owner in await claims.dead_owners(connection)
