"""Which run goes first, which has to wait, and what a waiting run says of itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pymongo
import pytest
from langgraph.types import interrupt

from mongo_durable import App, DurableClient, RunLimit, Runner
from mongo_durable.errors import ConfigurationError
from mongo_durable.store import claims
from mongo_durable.store.due import full_limits
from tests.engine.workflows import PATIENCE_S, Commands, State, one_node, until, until_known
from tests.runner.fleets import Gate, counted_runner

SWEEP = timedelta(seconds=0.2)


@pytest.fixture
def new_app(mongo_uri: str, database: str) -> Callable[..., App]:
    """Workflows of one node."""

    def make(name: str, node: Any, **options: Any) -> App:
        return one_node(App(name, uri=mongo_uri, database=database, **options), node)

    return make


async def ended(client: DurableClient, *runs: str) -> None:
    for run in runs:
        assert (await client.wait(run, timeout=PATIENCE_S)).status == "completed"


async def test_the_highest_priority_goes_first_and_then_the_oldest(client: DurableClient, new_app: Callable[..., App]) -> None:
    """Of runs that wait for one place, the highest priority is executed first; equal ones in the order of their submission."""
    gate = Gate()
    for number, priority in enumerate((0, 0, 5, -1, 5)):
        await client.submit("gated", {"value": number}, run_id=f"r{number}", priority=priority)
    async with Runner([new_app("gated", gate.node)], concurrency=1, sweep_interval=SWEEP):
        gate.open()
        await ended(client, *(f"r{number}" for number in range(5)))
    assert gate.seen == [2, 4, 0, 1, 3]
    assert (await client.get_run("r2")).priority == 5


@pytest.mark.parametrize("is_absolute", [False, True])
async def test_a_delayed_run_waits_and_then_starts_by_itself(client: DurableClient, new_app: Callable[..., App], is_absolute: bool) -> None:
    """A run with a later start is not claimed before it, says so, and starts then without any other event and without waiting for a sweep."""
    gate = Gate()
    gate.open()
    delay = timedelta(seconds=1.5)
    async with Runner([new_app("gated", gate.node)], sweep_interval=timedelta(seconds=600), lease=timedelta(seconds=60)):
        await client.submit("gated", {"value": 0}, run_id="first")
        await ended(client, "first")
        handle = await client.submit("gated", {"value": 1}, available_at=datetime.now(UTC) + delay if is_absolute else delay)
        waiting = await handle.get()
        assert waiting.status == "pending"
        assert "not to go on before" in str(waiting.waits_for)
        done = await handle.wait(PATIENCE_S)
        assert done.status == "completed"
        started = [event for event in await client.history(handle.run_id) if event.type == "attempt.started"]
    assert len(started) == 1
    assert waiting.available_at is not None
    assert done.ended_at is not None
    assert done.ended_at >= waiting.available_at


async def test_a_direct_claim_respects_the_delay(client: DurableClient, mongo_uri: str, database: str, new_app: Callable[..., App]) -> None:
    """Whoever calls for a delayed run gets it when its time has come, not before."""
    gate = Gate()
    gate.open()
    await client.submit("gated", {"value": 7}, run_id="later", available_at=timedelta(seconds=1))
    app = new_app("gated", gate.node)
    out = await app.ainvoke(None, run_id="later")
    await app.aclose()
    assert out["value"] == 7
    snapshot = await client.get_run("later")
    started = (await client.history("later"))[1]
    assert started.type == "attempt.started"
    assert snapshot.submitted_at is not None
    assert snapshot.ended_at is not None
    assert snapshot.ended_at - snapshot.submitted_at >= timedelta(seconds=1)


async def test_a_limit_bounds_what_all_runners_execute_together(
    client: DurableClient, new_app: Callable[..., App], mongo_uri: str, database: str
) -> None:
    """Of a tenant with two places, never more than two runs are executed at once by three runners; others pass it; all get their turn."""
    gates = {"tenant": Gate(), "other": Gate()}
    limit = RunLimit(key="tenant-7", running=2)
    for number in range(6):
        await client.submit("tenant", {"value": number}, run_id=f"t{number}", limit=limit)
    for number in range(2):
        await client.submit("other", {"value": number}, run_id=f"o{number}")
    runners = [
        Runner([new_app("tenant", gates["tenant"].node), new_app("other", gates["other"].node)], concurrency=5, sweep_interval=SWEEP)
        for _ in range(3)
    ]
    for runner in runners:
        await runner.start()
    try:
        await until(lambda: gates["tenant"].now == 2 and gates["other"].now == 2)
        waiting = [each for each in await client.list_runs(workflow="tenant") if each.status == "pending"]
        assert len(waiting) == 4
        assert {each.waits_for for each in waiting} == {"all 2 places of limit 'tenant-7' are taken"}
        for gate in gates.values():
            gate.open()
        await ended(client, *(f"t{number}" for number in range(6)), "o0", "o1")
    finally:
        for runner in runners:
            await runner.stop()
    assert gates["tenant"].most == 2
    with pymongo.MongoClient(mongo_uri) as raw:
        assert raw[database]["runs"].count_documents({"place": {"$exists": True}}) == 0


async def test_a_place_of_a_limit_outlives_its_process(client: DurableClient, mongo_uri: str, database: str) -> None:
    """A run keeps its place when another process takes it over; a suspended, released or cancelled one gives it back."""
    from mongo_durable.store.connection import Endpoint

    endpoint = Endpoint(mongo_uri, database)
    connection = endpoint.connection()
    limit = RunLimit(key="t", running=1)
    for number in range(2):
        await client.submit("w", {"value": number}, run_id=f"r{number}", limit=limit)
    await claims.claim(connection, "r0", "p1")
    with pytest.raises(claims.RunNotClaimable):
        await claims.claim(connection, "r1", "p2")
    taken = await claims.claim(connection, "r0", "p2", dead_owners=["p1"])
    assert taken.head.fence == 2
    with pytest.raises(claims.RunNotClaimable):
        await claims.claim(connection, "r1", "p2")
    assert await full_limits(connection) == ["t"]
    await client.cancel("r0")
    assert await full_limits(connection) == []
    assert (await claims.claim(connection, "r1", "p2")).head.fence == 1
    await endpoint.aclose()


async def test_many_claims_of_a_limit_at_once_never_exceed_it(client: DurableClient, mongo_uri: str, database: str) -> None:
    """However many processes claim at once, as many runs are claimed as the limit has places."""
    from mongo_durable.store.connection import Endpoint

    endpoint = Endpoint(mongo_uri, database)
    connection = endpoint.connection()
    limit = RunLimit(key="t", running=3)
    for number in range(12):
        await client.submit("w", {"value": number}, run_id=f"r{number}", limit=limit)
    found = await asyncio.gather(*(claims.claim(connection, f"r{number}", f"p{number}") for number in range(12)), return_exceptions=True)
    assert sum(isinstance(each, claims.Claim) for each in found) == 3
    assert all(isinstance(each, (claims.Claim, claims.RunNotClaimable)) for each in found)
    await endpoint.aclose()


async def test_one_workflow_leaves_room_for_others(client: DurableClient, new_app: Callable[..., App]) -> None:
    """A workflow with a concurrency of its own takes no more of the runner, also when its runs are hinted at one by one."""
    slow, quick = Gate(), Gate()
    quick.open()
    async with Runner([new_app("slow", slow.node), new_app("quick", quick.node)], workflow_concurrency={"slow": 2}, sweep_interval=SWEEP):
        for number in range(6):
            await client.submit("slow", {"value": number}, run_id=f"s{number}")
        await until(lambda: slow.now == 2)
        await client.submit("quick", {"value": 0}, run_id="q")
        await ended(client, "q")
        assert slow.most == 2
        slow.open()
        await ended(client, *(f"s{number}" for number in range(6)))
    assert slow.most == 2


async def test_a_run_that_nobody_serves_says_so_and_blocks_nobody(client: DurableClient, new_app: Callable[..., App]) -> None:
    """An unknown workflow or version waits, is listed as unserved with the reason, and the others go on; a runner that has it takes it."""
    gate = Gate()
    gate.open()
    await client.submit("nobody", {"value": 0}, run_id="lost")
    await client.submit("gated", {"value": 0}, run_id="next-version", version="2")
    await client.submit("gated", {"value": 1}, run_id="known")
    async with Runner([new_app("gated", gate.node)], sweep_interval=SWEEP):
        await ended(client, "known")
        unserved = {each.run_id: each.waits_for for each in await client.unserved_runs()}
        assert unserved == {
            "lost": "no live runner serves workflow 'nobody' version '1'",
            "next-version": "no live runner serves workflow 'gated' version '2'",
        }
        async with Runner([new_app("gated", gate.node, version="2")], sweep_interval=SWEEP):
            await ended(client, "next-version")
        assert [each.run_id for each in await client.unserved_runs()] == ["lost"]


async def test_a_run_that_cannot_be_loaded_waits_longer_each_time_and_says_why(
    client: DurableClient, new_app: Callable[..., App], mongo_uri: str, database: str
) -> None:
    """A run whose history this release cannot read is given back, held back for longer each time, and the others go on."""
    gate = Gate()
    gate.open()
    await client.submit("gated", {"value": 0}, run_id="poison")
    with pymongo.MongoClient(mongo_uri) as raw:
        raw[database]["activity_events"].update_one({"run_id": "poison"}, {"$set": {"schema_version": 99}})
        async with Runner([new_app("gated", gate.node)], sweep_interval=SWEEP):
            await client.submit("gated", {"value": 1}, run_id="good")
            await ended(client, "good")

            async def is_held_back_twice() -> bool:
                return raw[database]["runs"].find_one({"_id": "poison"})["troubles"] >= 2

            await until_known(is_held_back_twice)
        found = raw[database]["runs"].find_one({"_id": "poison"})
    assert found["status"] == "ready"
    assert "SchemaVersionMismatch" in found["held_back"]
    assert found["available_at"] - found["claimed_at"] >= timedelta(seconds=0.9)


async def test_twenty_idle_runners_do_not_stampede(mongo_uri: str, database: str, client: DurableClient) -> None:
    """With 20 idle runners, a run that becomes ready costs few claims, not 20; and 60 runs spread over most of the runners."""
    commands = [Commands() for _ in range(20)]
    executed: Counter[int] = Counter()

    def node_of(number: int) -> Any:
        async def node(state: State) -> dict[str, Any]:
            executed[number] += 1
            return {}

        return node

    runners = [counted_runner(mongo_uri, database, "swarm", node_of(number), each) for number, each in enumerate(commands)]
    for runner, _ in runners:
        await runner.start()
    try:

        async def is_fleet_known() -> bool:
            return all(len(runner._fleet._runners) == 20 for runner, _ in runners)

        await until_known(is_fleet_known)
        for each in commands:
            each.sent.clear()
        for number in range(60):
            handle = await client.submit("swarm", {"value": number}, run_id=f"r{number}")
            assert (await handle.wait(PATIENCE_S)).status == "completed"
        tried = sum(_claims(each) for each in commands)
    finally:
        for runner, raw in runners:
            await runner.stop()
            await raw.close()
    assert sum(executed.values()) == 60
    assert len(executed) >= 12
    # On an idle machine it is about one a run. Where news takes longer than a turn, as on a busy one, the next runner tries as well.
    assert tried <= 60 * 20 / 3


async def test_a_runner_tries_to_claim_only_what_it_serves(mongo_uri: str, database: str, client: DurableClient) -> None:
    """The news of a run, new or answered, says of which workflow it is: who does not serve it sends no claim."""
    commands = Commands()
    foreign, raw = counted_runner(mongo_uri, database, "foreign", Gate().node, commands, sweep_interval=timedelta(seconds=60))

    async def asks(state: State) -> dict[str, Any]:
        return {"seen": [interrupt("may I?")]}

    app = one_node(App("asking", uri=mongo_uri, database=database), asks)
    async with foreign, Runner([app], sweep_interval=SWEEP):
        for number in range(10):
            handle = await client.submit("asking", {"value": number}, run_id=f"r{number}")
            frontier = (await handle.wait(PATIENCE_S)).frontier
            assert frontier is not None
            await client.resolve(handle.run_id, {frontier.entries[0].activity_id: "yes"})

            async def is_ended(run: str = handle.run_id) -> bool:
                return (await client.get_run(run)).is_ended

            await until_known(is_ended)
        mine = await client.submit("foreign", {"value": 0}, run_id="mine")
        await until(lambda: _claims(commands) > 0)  # it has heard of everything before
        await client.cancel(mine.run_id)
    await raw.close()
    assert _claims(commands) == 1


def _claims(commands: Commands) -> int:
    """How many claims were tried: writes of a head that set an owner."""
    return sum("claimed_at" in str(command.get("update")) for command in commands.of("findAndModify", "runs"))


def test_wrong_settings_are_refused(new_app: Callable[..., App]) -> None:
    """A limit without places, a workflow that is not served, or a concurrency of nothing is refused at once."""
    with pytest.raises(ConfigurationError):
        RunLimit(key="t", running=0)
    app = new_app("gated", Gate().node)
    with pytest.raises(ConfigurationError, match="does not serve: other"):
        Runner([app], workflow_concurrency={"other": 1})
    with pytest.raises(ConfigurationError, match="at least 1"):
        Runner([app], workflow_concurrency={"gated": 0})


async def test_a_time_without_a_zone_is_refused(client: DurableClient) -> None:
    """A start or deadline without a time zone could mean anything: refused, and nothing is submitted."""
    with pytest.raises(ConfigurationError, match="time zone"):
        await client.submit("w", {}, run_id="r", available_at=datetime(2030, 1, 1))  # noqa: DTZ001 - that is what is refused
    with pytest.raises(ConfigurationError, match="time zone"):
        await client.submit("w", {}, run_id="r", deadline=datetime(2030, 1, 1))  # noqa: DTZ001 - likewise
    assert await client.list_runs() == []
