"""Runners: what they take, what they leave alone, and what they give back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pymongo
import pytest
from langgraph.types import interrupt
from pymongo import AsyncMongoClient

from mongo_durable import App, DurableClient, Runner
from mongo_durable.store import claims
from mongo_durable.store.connection import Endpoint
from tests.engine.workflows import PATIENCE_S, Commands, Node, State, one_node, until
from tests.support.invariants import assert_invariants

LEASE = timedelta(seconds=2)
SWEEP = timedelta(seconds=0.1)


class Place:
    """A database, and runners of small workflows on it."""

    def __init__(self, uri: str, database: str) -> None:
        self.uri = uri
        self.database = database

    def app(self, name: str, node: Node | Callable[[State], Any], **options: Any) -> App:
        """A workflow of one node."""
        return one_node(App(name, uri=self.uri, database=self.database, **options), node)

    def runner(self, *apps: App, **options: Any) -> Runner:
        """A runner that looks often."""
        return Runner(apps, **{"lease": LEASE, "sweep_interval": SWEEP, **options})

    async def submit(self, client: DurableClient, workflow: str, number: int) -> list[str]:
        """Submit so many runs; each has its number as value."""
        names = [f"{workflow}-{each}" for each in range(number)]
        for index, name in enumerate(names):
            await client.submit(workflow, {"value": index}, run_id=name)
        return names


@pytest.fixture
def place(mongo_uri: str, database: str) -> Place:
    """A place of this test's own."""
    return Place(mongo_uri, database)


@pytest.fixture
async def client(place: Place) -> AsyncIterator[DurableClient]:
    """Somebody who submits runs and waits for them."""
    async with DurableClient(place.uri, database=place.database) as client:
        yield client


async def ended(client: DurableClient, runs: list[str]) -> Counter[str]:
    """Wait for runs; how they ended."""
    return Counter([(await client.wait(run, timeout=PATIENCE_S)).status for run in runs])


async def double(state: State) -> dict[str, Any]:
    return {"value": state["value"] * 2}


async def test_a_runner_takes_what_a_dead_process_had(place: Place, client: DurableClient) -> None:
    """Runs of a process whose lease ran out, and of one that nobody knows, go on in another; a live one's are left alone."""
    runs = await place.submit(client, "double", 3)
    endpoint = Endpoint(place.uri, place.database)
    connection = endpoint.connection()
    await claims.register(connection, "dead", 0, {})
    await claims.register(connection, "live", 600_000, {})
    for run, owner in zip(runs, ("dead", "nobody", "live"), strict=True):
        await claims.claim(connection, run, owner)
    await endpoint.aclose()
    async with place.runner(place.app("double", double)):
        assert await ended(client, runs[:2]) == {"completed": 2}
        assert (await client.get_run(runs[2])).status == "running"
    assert [(await client.get_run(run)).attempt for run in runs] == [2, 2, 1]
    assert_invariants(place.uri, place.database)


async def test_a_runner_executes_no_more_at_once_than_told(place: Place, client: DurableClient) -> None:
    """With a concurrency of three, three attempts run at once and never a fourth, and all runs get their turn."""
    now = most = 0
    gate = asyncio.Event()

    async def node(state: State) -> dict[str, Any]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await gate.wait()
        now -= 1
        return {}

    runs = await place.submit(client, "gated", 10)
    async with place.runner(place.app("gated", node), concurrency=3) as runner:
        await until(lambda: now == 3)
        assert len(runner.running) == 3
        assert len(await client.list_runs(status="pending")) == 7
        gate.set()
        assert await ended(client, runs) == {"completed": 10}
    assert most == 3


async def test_a_draining_runner_lets_its_attempts_end(place: Place, client: DurableClient) -> None:
    """Stopping a runner claims nothing more, and waits for what runs."""
    entered, gate = asyncio.Event(), asyncio.Event()

    async def node(state: State) -> dict[str, Any]:
        entered.set()
        await gate.wait()
        return {}

    (first,) = await place.submit(client, "gated", 1)
    runner = place.runner(place.app("gated", node))
    await runner.start()
    await entered.wait()
    stopping = asyncio.create_task(runner.stop(timedelta(seconds=PATIENCE_S)))
    await client.submit("gated", {"value": 0}, run_id="late")
    gate.set()
    assert await stopping
    assert (await client.get_run(first)).status == "completed"
    assert (await client.get_run("late")).status == "pending"


async def test_a_draining_runner_gives_back_what_does_not_end(place: Place, client: DurableClient) -> None:
    """What is not done in time is released at a place where another runner goes on: recorded effects do not run again."""
    entered = asyncio.Event()
    ran: Counter[str] = Counter()

    def app(is_stuck: bool) -> App:
        made = App("stuck", uri=place.uri, database=place.database)

        @made.activity
        async def pay() -> str:
            ran["pay"] += 1
            return "paid"

        async def node(state: State) -> dict[str, Any]:
            paid = await pay()
            if is_stuck:
                entered.set()
                await asyncio.Event().wait()
            return {"seen": [paid]}

        return one_node(made, node)

    (run,) = await place.submit(client, "stuck", 1)
    runner = place.runner(app(is_stuck=True))
    await runner.start()
    await entered.wait()
    assert not await runner.stop(timedelta(0))
    assert (await client.get_run(run)).status == "ready"
    async with place.runner(app(is_stuck=False)):
        done = await client.wait(run, timeout=PATIENCE_S)
    assert (done.status, done.output["seen"], done.attempt) == ("completed", ["paid"], 2)
    assert ran == {"pay": 1}
    assert_invariants(place.uri, place.database)


async def test_two_runners_share_the_runs(place: Place, client: DurableClient) -> None:
    """Twenty runs, two runners: each run has one attempt, and both had some."""
    by: Counter[str] = Counter()
    together = asyncio.Barrier(2)

    def app(name: str) -> App:
        async def node(state: State) -> dict[str, Any]:
            if not by[name]:
                by[name] += 1
                await together.wait()
            else:
                by[name] += 1
            return {"value": state["value"] * 2}

        return place.app("shared", node)

    async with place.runner(app("one"), concurrency=2), place.runner(app("two"), concurrency=2):
        runs = await place.submit(client, "shared", 20)
        assert await ended(client, runs) == {"completed": 20}
    assert by.total() == 20
    assert set(by) == {"one", "two"}
    assert [(await client.get_run(run)).output["value"] for run in runs] == [index * 2 for index in range(20)]
    assert {(await client.get_run(run)).attempt for run in runs} == {1}
    snapshot = assert_invariants(place.uri, place.database)
    for run in runs:
        assert Counter(event["type"] for event in snapshot.events[run])["attempt.started"] == 1


async def test_one_change_stream_serves_every_waiter(place: Place) -> None:
    """Two hundred tasks wait through one client: it opens one change stream."""
    commands = Commands()
    gate = asyncio.Event()

    async def node(state: State) -> dict[str, Any]:
        await gate.wait()
        return {}

    async with AsyncMongoClient(place.uri, event_listeners=[commands]) as given, DurableClient(client=given, database=place.database) as client:
        runs = await place.submit(client, "gated", 10)
        waiters = [asyncio.create_task(client.wait(runs[number % 10], timeout=PATIENCE_S)) for number in range(200)]
        async with place.runner(place.app("gated", node)):
            await until(lambda: commands.change_streams() > 0)
            gate.set()
            assert Counter(each.status for each in await asyncio.gather(*waiters)) == {"completed": 200}
    assert commands.change_streams() == 1


async def test_the_heartbeat_does_not_grow_with_the_runs(place: Place, client: DurableClient) -> None:
    """A process has one identity, one heartbeat thread and one heartbeat an interval, whether it runs nothing or twenty runs."""
    commands = Commands()
    now = 0
    gate = asyncio.Event()

    async def node(state: State) -> dict[str, Any]:
        nonlocal now
        now += 1
        await gate.wait()
        return {}

    def beats() -> int:
        return len([command for command in commands.of("update", "runners") if "state" in command["updates"][0]["q"]])

    def threads() -> int:
        return sum(thread.name == "mongo_durable-heartbeat" for thread in threading.enumerate())

    interval, others = LEASE.total_seconds() / 4, threads()
    async with AsyncMongoClient(place.uri, event_listeners=[commands]) as given:
        app = one_node(App("gated", client=given, database=place.database), node)
        runs = await place.submit(client, "gated", 20)
        async with place.runner(app, concurrency=20, sweep_interval=timedelta(seconds=30)):
            await until(lambda: now == 20)
            before, since = commands.of("update", "runners"), time.monotonic()
            beaten = beats()
            await until(lambda: beats() == beaten + 3)
            assert time.monotonic() - since > 2 * interval * 0.9
            assert len(commands.of("update", "runners")) == len(before) + 3
            assert threads() == others + 1
            gate.set()
            assert await ended(client, runs) == {"completed": 20}
    with pymongo.MongoClient(place.uri) as administration:
        assert administration[place.database]["runners"].count_documents({}) == 1


async def test_a_runner_leaves_alone_what_it_does_not_serve(place: Place, client: DurableClient) -> None:
    """A run of another workflow, or of another version, waits for a runner that has it."""
    await client.submit("other", {"value": 1}, run_id="other")
    await client.submit("double", {"value": 1}, run_id="newer", version="2")
    runs = await place.submit(client, "double", 3)
    async with place.runner(place.app("double", double)):
        assert await ended(client, runs) == {"completed": 3}
    for run in ("other", "newer"):
        left = await client.get_run(run)
        assert (left.status, left.attempt) == ("pending", 0)


async def test_a_run_that_fails_does_not_stop_the_others(place: Place, client: DurableClient) -> None:
    """A run whose graph raises has failed with type and message; the runner goes on with the others."""

    async def node(state: State) -> dict[str, Any]:
        if state["value"] == 1:
            raise LookupError("nothing there")
        return {}

    runs = await place.submit(client, "picky", 4)
    async with place.runner(place.app("picky", node), concurrency=1):
        assert await ended(client, runs) == {"completed": 3, "failed": 1}
    failed = await client.get_run(runs[1])
    assert failed.error == {"type": "LookupError", "message": "nothing there"}
    assert failed.output is None


async def test_a_synchronous_graph_runs_beside_others(place: Place, client: DurableClient) -> None:
    """A runner runs the graph of a sync app in a thread: it may block, and asks and answers like any other."""
    both = threading.Barrier(2)
    made = App("blocking", uri=place.uri, database=place.database, sync=True)
    ran: Counter[str] = Counter()

    @made.activity
    def pay(amount: int) -> int:
        ran["pay"] += 1
        both.wait(PATIENCE_S)
        return amount

    def node(state: State) -> dict[str, Any]:
        paid = pay(state["value"])
        return {"seen": [paid, interrupt("more?"), threading.current_thread() is threading.main_thread()]}

    one_node(made, node)
    async with place.runner(made, place.app("double", double)):
        runs = await place.submit(client, "blocking", 2)
        others = await place.submit(client, "double", 2)
        assert await ended(client, others) == {"completed": 2}
        assert await ended(client, runs) == {"suspended": 2}
        for run in runs:
            frontier = (await client.get_run(run)).frontier
            assert frontier is not None
            await client.resolve(run, {frontier.entries[0].activity_id: "no"})
        assert await ended(client, runs) == {"completed": 2}
    assert [(await client.get_run(run)).output["seen"] for run in runs] == [[0, "no", False], [1, "no", False]]
    assert ran == {"pay": 2}


async def test_a_resumed_run_needs_no_sweep(place: Place, client: DurableClient) -> None:
    """The change stream alone wakes a runner for a new run and for an answer: a sweep once a minute delays nobody."""

    async def node(state: State) -> dict[str, Any]:
        return {"seen": [interrupt("may I?")]}

    started = time.monotonic()
    async with place.runner(place.app("asking", node), sweep_interval=timedelta(minutes=10)):
        (run,) = await place.submit(client, "asking", 1)
        suspended = await client.wait(run, timeout=PATIENCE_S)
        assert suspended.frontier is not None
        await client.resolve(run, {suspended.frontier.entries[0].activity_id: True})
        assert (await client.wait(run, timeout=PATIENCE_S)).output["seen"] == [True]
    assert time.monotonic() - started < PATIENCE_S


async def test_a_mark_is_enough_to_cancel(place: Place, client: DurableClient) -> None:
    """A canceller that dies after its first write has cancelled the run all the same: the attempt that runs it sees the mark and ends it."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def waits(state: State) -> dict[str, Any]:
        begun.set()
        await go_on.wait()
        await effect(1)
        return {"value": state["value"]}

    app = place.app("marked", waits)

    @app.activity(idempotent=True)
    async def effect(number: int) -> int:
        return number

    async with place.runner(app) as runner, AsyncMongoClient(place.uri) as database:
        [run] = await place.submit(client, "marked", 1)
        await begun.wait()
        mark = {"$set": {"cancel": {"at": None, "reason": "no longer wanted"}}}
        await database[place.database]["runs"].update_one({"_id": run}, mark)
        assert runner.process is not None
        attempt = runner.process.running[run]
        assert attempt is not None
        await until(lambda: attempt.failure is not None)
        go_on.set()
        assert (await client.wait(run, timeout=PATIENCE_S)).status == "cancelled"
    last = (await client.history(run))[-1]
    assert (last.type.value, last.data["reason"]) == ("run.cancelled", "no longer wanted")
