"""Leases: whose clock judges them, whose identity they are, and what a process may still do without one."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from mongo_durable import App, Runner
from mongo_durable.errors import FrontierExpired
from mongo_durable.protocol.events import EventType
from mongo_durable.store import claims, frontiers, schema
from mongo_durable.store.appender import Appender
from mongo_durable.store.connection import Connection, Endpoint
from mongo_durable.store.wakeups import Wakeups
from tests.cases.processes import LEASE, Floor, happened, input_of
from tests.cases.workshop import PATIENCE_S, Workshop, chain
from tests.engine.workflows import until, until_known
from tests.langgraph.kit import State
from tests.support.attempts import Attempt, answers, question
from tests.support.clocks import wrong_by

HOUR = timedelta(hours=1)


async def _server_time(connection: Connection) -> Any:
    return (await connection.database.command("hello"))["localTime"]


@pytest.mark.parametrize("ahead", [HOUR, -HOUR], ids=["an hour ahead", "an hour behind"])
async def test_wrong_clocks_do_no_harm(ahead: timedelta, floor: Floor) -> None:
    """CASES 85: one process is an hour ahead, another behind: a living one's run is left to it for several leases, a dead one's is taken."""
    run = floor.workshop.run()
    endpoint = Endpoint(floor.workshop.uri, floor.workshop.database)
    connection = endpoint.connection()
    async with floor.workshop.client() as client:
        await client.submit(floor.workshop.name, input_of(run), run_id=run)
        holder = floor.start(floor.job("serve", run, wait_in="one", skew=ahead))
        await asyncio.to_thread(holder.until_in_effect)
        begun = await _server_time(connection)
        head = await connection.runs.find_one({"_id": run})
        other = floor.start(floor.job("serve", run, skew=-ahead))

        async def three_leases_later() -> bool:
            return await _server_time(connection) > begun + 3 * LEASE

        await until_known(three_leases_later)
        assert await connection.runs.find_one({"_id": run}) == head  # it was left alone
        holder.close()
        assert await floor.end(other) is not None
        assert (await client.get_run(run)).status == "suspended"  # it was taken over
        assert await floor.finish(floor.job("serve", run)) == [["one", "answer to sure?", "two"]]
    await endpoint.aclose()
    assert happened(floor.effects) == {(run, "one"): 2, (run, "two"): 1}
    assert [event.fence for event in await floor.workshop.history(1, EventType.ATTEMPT_STARTED)] == [1, 2, 3]


@pytest.mark.parametrize("skew", [HOUR, -HOUR], ids=["an hour ahead", "an hour behind"])
async def test_deadlines_and_queues_are_the_servers(skew: timedelta, workshop: Workshop) -> None:
    """CASES 85: with a clock that is an hour wrong, nothing expires early or late, an answered run is available at once, no lease ends."""
    endpoint = Endpoint(workshop.uri, workshop.database)
    connection = endpoint.connection()
    await schema.ensure_schema(connection)
    appender = Appender(connection)
    open_run, past_run, owner = workshop.run("open"), workshop.run("past"), workshop.run("owner")
    with wrong_by(skew):
        await claims.register(connection, owner, 30_000, {})
        attempts = [await Attempt.submit(connection, appender, run_id, owner, workflow=workshop.name) for run_id in (open_run, past_run)]
        assert owner not in await claims.dead_owners(connection)
        in_time = await attempts[0].suspend(question(open_run, 1), expires_in=timedelta(minutes=30))
        past = await attempts[1].suspend(question(past_run, 1), expires_in=-timedelta(milliseconds=1))
        assert not await frontiers.expire(connection, in_time, answers(in_time, "nobody answered"))
        await frontiers.resolve(connection, in_time, answers(in_time))
        with pytest.raises(FrontierExpired):
            await frontiers.resolve(connection, past, answers(past))
        assert await frontiers.expire(connection, past, answers(past, "nobody answered"))
        found = await claims.claimable(connection, [(workshop.name, "1")], owner, [], [], 10)
        assert [each.run_id for each in found] == [open_run, past_run]
        for run_id in (open_run, past_run):
            again = await Attempt.start(connection, appender, run_id, owner)
            assert again.claim.head.fence == 2
            await again.end()
    await endpoint.aclose()


async def test_who_stood_still_beyond_its_lease_starts_nothing_more(floor: Floor) -> None:
    """CASES 85: a process is stopped inside an effect until others declared it dead: its next effect starts only under a new identity and fence."""
    run = floor.workshop.run()
    endpoint = Endpoint(floor.workshop.uri, floor.workshop.database)
    connection = endpoint.connection()
    async with floor.workshop.client() as client:
        await client.submit(floor.workshop.name, input_of(run), run_id=run)
        paused = floor.start(floor.job("serve", run, wait_in="one", shape="two effects"))
        await asyncio.to_thread(paused.until_in_effect)
        head = await connection.runs.find_one({"_id": run})
        assert head is not None
        await asyncio.to_thread(paused.stop)

        async def is_dead() -> bool:
            return head["owner"] in await claims.dead_owners(connection)

        await until_known(is_dead)
        paused.go_on()
        assert await floor.end(paused) is not None
        assert (await client.get_run(run)).status == "completed"
    started = await floor.workshop.history(1, EventType.ATTEMPT_STARTED)
    assert [event.fence for event in started] == [1, 2]
    assert started[0].data["owner"] != started[1].data["owner"]
    assert happened(floor.effects)[(run, "two")] == 1
    assert (await floor.workshop.history(1, EventType.ACTIVITY_STARTED))[-1].fence == 2
    await endpoint.aclose()


async def test_each_start_is_an_identity_of_its_own(workshop: Workshop) -> None:
    """CASES 88: the same program, started again on the same machine under the same process id, is somebody else to the database."""

    async def node(state: State) -> State:
        return {"lines": ["done"]}

    def make(app: App) -> Any:
        return chain(node=node)

    owners = []
    for _ in range(5):
        runner = workshop.runner(make)
        async with runner:
            assert runner.process is not None
            owners.append((await runner.process.lease()).owner)
    assert len(set(owners)) == 5


async def test_a_process_that_drains_takes_nothing_back(workshop: Workshop) -> None:
    """CASES 88: while one runner drains, its successor releases a run: the one that drains hears of it and leaves it, a third takes it."""
    gate, entered = asyncio.Event(), Counter[str]()

    def make(app: App) -> Any:
        async def node(state: State) -> State:
            entered[state["work"]] += 1
            if entered[state["work"]] == 1:
                await gate.wait()
            return {"lines": [state["work"]]}

        return chain(node=node)

    def runner() -> Runner:
        return workshop.runner(make, sweep_interval=timedelta(seconds=0.05))

    endpoint = Endpoint(workshop.uri, workshop.database)
    wakeups = Wakeups(endpoint)
    async with workshop.client() as client:
        draining, successor = runner(), runner()
        await draining.start()
        await client.submit(workshop.name, {"lines": [], "work": "first"}, run_id=workshop.run("first"))
        await until(lambda: entered["first"] == 1)
        stopping = asyncio.create_task(draining.stop(timedelta(seconds=PATIENCE_S)))
        await successor.start()
        await client.submit(workshop.name, {"lines": [], "work": "second"}, run_id=workshop.run("second"))
        await until(lambda: entered["second"] == 1)
        async with wakeups.listen(workshop.run("second")) as listener:
            for _ in ("at first", "when it is open"):
                assert await listener.wait() is None
            assert not await successor.stop(timedelta(0))
            while not any(change.status == "ready" for change in await listener.wait() or ()):
                pass
        done, _ = await asyncio.wait([stopping], timeout=0.5)  # ten looks for work, if it still looked
        assert not done
        assert (await client.get_run(workshop.run("second"))).status == "ready"
        gate.set()
        assert await stopping
        assert (await client.get_run(workshop.run("first"))).status == "completed"
        left = await client.get_run(workshop.run("second"))
        assert (left.status, left.attempt) == ("ready", 1)
        async with runner():
            assert (await client.wait(workshop.run("second"), timeout=PATIENCE_S)).attempt == 2
    await wakeups.aclose()
    assert entered == {"first": 1, "second": 2}
