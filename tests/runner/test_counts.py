"""What a process costs: cursors, heartbeats, commands and memory, none of which grows with the number of runs or of those who wait for them."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pymongo
import pytest
from langgraph.types import interrupt
from pymongo import AsyncMongoClient

from mongo_durable import App, DurableClient, Runner
from mongo_durable.store import claims
from mongo_durable.store.connection import Endpoint
from mongo_durable.store.wakeups import Wakeups
from tests.engine.workflows import PATIENCE_S, Commands, State, one_node, until, until_known
from tests.support.change_streams import cursors
from tests.support.invariants import assert_invariants

LEASE = timedelta(seconds=2)
SWEEP = timedelta(seconds=0.2)

MANY = 10_000


async def asks(state: State) -> dict[str, Any]:
    return {"seen": [interrupt("may I?")]}


@pytest.fixture
def traced() -> Iterator[Callable[[], int]]:
    """How many bytes this process's objects take that were made in this test."""

    def size() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    yield size
    tracemalloc.stop()


async def answer(client: DurableClient, run_id: str) -> None:
    """Say yes to what a run asks."""
    frontier = (await client.get_run(run_id)).frontier
    assert frontier is not None
    await client.resolve(run_id, {frontier.entries[0].activity_id: "yes"})


async def test_a_thousand_waits_are_one_cursor(mongo_uri: str, database: str, client: DurableClient) -> None:
    """A runner, a client and a thousand waits in one process have one change stream on the server, and every wait ends."""
    gate = asyncio.Event()

    async def node(state: State) -> dict[str, Any]:
        await gate.wait()
        return {}

    app = one_node(App("gated", uri=mongo_uri, database=database), node)
    runs = [(await client.submit("gated", {}, run_id=f"run-{number}")).run_id for number in range(20)]

    def open_now() -> int:
        with pymongo.MongoClient(mongo_uri) as administration:
            return len(cursors(administration, database))

    async with Runner([app], concurrency=20, lease=LEASE):
        waits = [asyncio.create_task(client.wait(runs[number % 20], timeout=PATIENCE_S)) for number in range(1000)]
        await until_known(lambda: asyncio.to_thread(lambda: open_now() > 0))
        for _ in range(5):
            assert await asyncio.to_thread(open_now) == 1
        gate.set()
        assert Counter(each.status for each in await asyncio.gather(*waits)) == {"completed": 1000}
        assert await asyncio.to_thread(open_now) == 1


class Window:
    """What a process sends while nothing happens.

    Attributes:
        per_sweep: What each look for work takes.
        beats, reads: Heartbeats, and reads of the change stream, a second.
    """

    def __init__(self, sent: list[tuple[str, str, dict[str, Any]]], sweeps: int, seconds: float) -> None:
        beats = [command for name, of, command in sent if (name, of) == ("update", "runners") and "_id" in command["updates"][0]["q"]]
        reads = [command for name, _, command in sent if name == "getMore"]
        self.beats, self.reads = len(beats) / seconds, len(reads) / seconds
        others = Counter((name, of) for name, of, command in sent if command not in beats and command not in reads)
        self.per_sweep = {what: number / sweeps for what, number in others.items()}

    @classmethod
    async def of(cls, commands: Commands, sweeps: int = 8) -> Window:
        """Watch from the beginning of a sweep to that of another."""

        def seen() -> int:
            return len(commands.of("distinct", "runs"))

        async def next_sweep(number: int) -> int:
            await until(lambda: seen() >= number)
            return next(at for at in reversed(range(len(commands.sent))) if commands.sent[at][:2] == ("distinct", "runs"))

        first = seen() + 1
        begin = await next_sweep(first)
        begun = time.monotonic()
        end = await next_sweep(first + sweeps)
        return cls(commands.sent[begin:end], sweeps, time.monotonic() - begun)


async def test_idle_a_runner_sends_the_same_few_commands_whatever_waits(
    mongo_uri: str, database: str, client: DurableClient, traced: Callable[[], int]
) -> None:
    """Each sweep is six commands, each lease four heartbeats, each second one read of the stream, with no run and with ten thousand suspended ones.

    What the process keeps in memory does not grow with them either, and the one of them that is answered goes on as if it were alone.
    """
    commands = Commands()
    async with AsyncMongoClient(mongo_uri, event_listeners=[commands]) as held:
        app = one_node(App("asking", client=held, database=database), asks)
        async with Runner([app], lease=LEASE, sweep_interval=SWEEP) as runner:
            run = await client.submit("asking", {}, run_id="first")
            assert (await client.wait(run.run_id, timeout=PATIENCE_S)).status == "suspended"
            await until(lambda: not runner.running)
            alone = await Window.of(commands)
            commands.sent.clear()
            before = traced()
            await suspend_many(client, held, database)
            await all_is_heard(client, held, database)
            among_many = await Window.of(commands)
            commands.sent.clear()
            after = traced()
            await answer(client, run.run_id)
            assert (await client.wait(run.run_id, timeout=PATIENCE_S)).status == "completed"
            assert sum(name == "insert" for name, _, _ in commands.sent) < 10
    assert alone.per_sweep == among_many.per_sweep
    assert sum(alone.per_sweep.values()) == 6
    for window in (alone, among_many):
        assert window.beats < 4 / LEASE.total_seconds() * 1.5
        assert window.reads < 2
    assert after - before < 300_000, f"{after - before} bytes for {MANY} suspended runs"


async def all_is_heard(client: DurableClient, held: Any, database: str) -> None:
    """Wait until the process's stream has delivered everything that happened up to now."""
    wakeups = Wakeups(Endpoint(None, database, client=held))
    async with wakeups.listen("marker") as listener:
        await client.submit("nobody's", {}, run_id="marker")
        while not await listener.wait():
            pass
        await client.cancel("marker")


async def suspend_many(client: DurableClient, held: Any, database: str) -> None:
    """Copies of the suspended run, made by the server, so that this process has no memory of them."""
    for collection, key in (("frontiers", "/1"), ("runs", "")):
        copy = {"_id": {"$concat": ["copy-", {"$toString": "$n"}, key]}, "run_id": {"$concat": ["copy-", {"$toString": "$n"}]}}
        stages: list[dict[str, Any]] = [
            {"$match": {"_id": f"first{key}"}},
            {"$set": {"n": {"$range": [0, MANY]}}},
            {"$unwind": "$n"},
            {"$set": {**copy, "thread_id": copy["run_id"]}},
            {"$unset": "n"},
            {"$merge": collection},
        ]
        await (await held[database][collection].aggregate(stages)).to_list(None)
    assert await held[database]["runs"].count_documents({"status": "suspended"}) == MANY + 1
    assert (await client.get_run(f"copy-{MANY - 1}")).status == "suspended"


async def test_without_a_change_stream_a_runner_does_everything_and_opens_none(mongo_uri: str, database: str, client: DurableClient) -> None:
    """Where a role or a proxy allows no change stream, the sweep takes runs, goes on with answers and takes over from the dead (I9)."""
    commands = Commands()
    async with AsyncMongoClient(mongo_uri, event_listeners=[commands]) as held:
        app = one_node(App("asking", client=held, database=database), asks)
        runs = [(await client.submit("asking", {}, run_id=f"run-{number}")).run_id for number in range(5)]
        connection = Endpoint(mongo_uri, database, client=held).connection()
        await claims.claim(connection, runs[0], "dead")

        async def all_are(status: str) -> None:
            await until_known(lambda: are(status))

        async def are(status: str) -> bool:
            return len(await client.list_runs(status=status)) == len(runs)

        async with Runner([app], lease=LEASE, sweep_interval=SWEEP, use_change_stream=False):
            await all_are("suspended")
            for run_id in runs:
                await answer(client, run_id)
            await all_are("completed")
    assert commands.change_streams() == 0
    assert [(await client.get_run(run_id)).output["seen"] for run_id in runs] == [["yes"]] * len(runs)
    assert_invariants(mongo_uri, database)
