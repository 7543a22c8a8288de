"""What it takes to go on: after an answer, after a crash, over a long history."""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from langgraph.graph import StateGraph
from langgraph.types import interrupt
from pymongo import AsyncMongoClient

from mongo_durable import App, DurableClient, Runner, current_activity
from scripts.benchmarks.contenders.durable.commands import Commands
from scripts.benchmarks.contenders.durable.home import Home
from scripts.benchmarks.contenders.durable.recording import thread
from scripts.benchmarks.contenders.graphs import Empty, one_node
from scripts.benchmarks.crew import Samples, Worker
from scripts.benchmarks.servers import Addresses

_WARM_UP = 2
_POLL_S = 0.01
_EDGE = 500


def asking_graph(reached: Any = None) -> StateGraph[Any]:
    """One node that asks a question.

    Args:
        reached: Called whenever the node's body begins.
    """

    async def ask(state: Empty) -> Empty:
        if reached is not None:
            reached()
        interrupt({"question": "Go on?"})
        return {}

    return one_node(Empty, ask)


async def answer(client: DurableClient, run_id: str) -> None:
    """Answer the one question of a run."""
    frontier = (await client.get_run(run_id)).frontier
    assert frontier is not None
    await client.resolve(run_id, {entry.activity_id: {"approved": True} for entry in frontier.entries})


@dataclass(frozen=True, slots=True)
class _Recording:
    """An app with a suspended run `template` of many activities.

    Attributes:
        commands: What the app sends.
        taken, computed: How long each activity took, and how long the processor was busy with it, in milliseconds.
    """

    app: App
    client: AsyncMongoClient[Any]
    commands: Commands
    taken: list[float]
    computed: list[float]


class Resuming(Home):
    """Replacement attempts."""

    def __init__(self, addresses: Addresses) -> None:
        super().__init__(addresses)
        self._begun: asyncio.Queue[float] = asyncio.Queue()
        self._recordings: dict[str, _Recording] = {}
        self._passed_at = 0.0
        self._sent_by_then = 0

    async def aclose(self) -> None:
        """Close the clients of the recordings as well."""
        await super().aclose()
        for recording in self._recordings.values():
            await recording.client.close()

    async def resolving(self, *, times: int, suspended: int) -> Samples:
        """From the return of `resolve` to the first node of the next attempt, in a runner of the same process.

        Args:
            suspended: How many other runs are suspended in the database.
        """
        begun = self._begun

        def build(app: App) -> None:
            app.entrypoint(lambda: asking_graph(lambda: begun.put_nowait(time.perf_counter())))

        app = self.app(f"resolving-{suspended}", build)
        database = app.endpoint.database
        if suspended and not await self.client[database]["runs"].count_documents({}, limit=1):
            await app.ainvoke({}, thread(), run_id="template")
            await self.copy_run(database, "template", (f"waiting-{number}" for number in range(suspended - 1)))
        taken = []
        async with DurableClient(self.uri, database=database) as client, Runner([app]):
            for _ in range(times + _WARM_UP):
                run = await client.submit(app.name, {})
                frontier = (await run.wait()).frontier
                assert frontier is not None
                while not begun.empty():
                    begun.get_nowait()
                await client.resolve(run.run_id, {entry.activity_id: {"approved": True} for entry in frontier.entries})
                resolved = time.perf_counter()
                taken.append((await begun.get() - resolved) * 1e3)
                assert (await run.wait()).status == "completed"
        return {"p50": taken[_WARM_UP:], "p99": taken[_WARM_UP:]}

    def _holding(self, database: str, lease_s: float, *, holds: bool) -> App:
        app = App("takeover", uri=self.uri, database=database, lease=timedelta(seconds=lease_s))

        @app.activity(idempotent=True)
        async def effect() -> int:
            if holds:
                await asyncio.Event().wait()
            return current_activity().attempt

        async def work(state: Empty) -> Empty:
            await effect()
            return {}

        app.entrypoint(lambda: one_node(Empty, work))
        return app

    async def hold(self, *, database: str, run_id: str, lease_s: float) -> Samples:
        """Begin a run and never end it: what a process does that is killed then."""
        await self._holding(database, lease_s, holds=True).ainvoke({}, thread(), run_id=run_id)
        return {}

    async def takeover(self, *, lease_s: float) -> Samples:
        """From the SIGKILL of the process that has a run to the first event of the next attempt, in leases. Both clocks are this machine's."""
        database, run_id = self.new_database(), "run"
        app = self._holding(database, lease_s, holds=False)
        owner = await Worker.start("mongo_durable", self.addresses)
        try:
            holding = asyncio.create_task(owner.ask("hold", {"database": database, "run_id": run_id, "lease_s": lease_s}))
            events = self.client[database]["activity_events"]
            while await events.find_one({"run_id": run_id, "type": "activity.started"}) is None:
                if holding.done():
                    holding.result()  # raises why it does not hold
                await asyncio.sleep(_POLL_S)
            lease = timedelta(seconds=lease_s)
            async with DurableClient(self.uri, database=database) as client, Runner([app], lease=lease):
                await asyncio.sleep(lease_s)  # so that it is in the middle of its life, not at its first sweep
                killed_at = time.time()
                await owner.kill()
                await asyncio.gather(holding, return_exceptions=True)
                assert (await client.wait(run_id)).status == "completed"
                [started] = [event for event in await client.history(run_id) if event.fence == 2 and event.type.value == "attempt.started"]
                assert started.at is not None
                return {"leases": [(started.at.timestamp() - killed_at) / lease_s]}
        finally:
            await owner.kill()

    async def _recorded(self, activities: int, characters: int) -> _Recording:
        """The recording of that many activities, made on first use."""
        name = f"replay-{activities}"
        if name in self._recordings:
            return self._recordings[name]
        commands = Commands()
        client: AsyncMongoClient[Any] = AsyncMongoClient(self.uri, event_listeners=[commands])
        taken: list[float] = []
        computed: list[float] = []

        def build(app: App) -> None:
            @app.activity(idempotent=True)
            async def step(number: int) -> str:
                return "x" * characters

            async def work(state: Empty) -> Empty:
                for number in range(activities):
                    started, computed_by_then = time.perf_counter(), time.thread_time()
                    await step(number)
                    taken.append((time.perf_counter() - started) * 1e3)
                    computed.append((time.thread_time() - computed_by_then) * 1e3)
                return {}

            async def ask(state: Empty) -> Empty:
                interrupt({"question": "Go on?"})
                self._passed_at = time.perf_counter()
                self._sent_by_then = len(commands.sent)
                return {}

            def graph() -> StateGraph[Any]:
                made = one_node(Empty, work)
                made.add_node("ask", ask)
                made.add_edge("work", "ask")
                return made

            app.entrypoint(graph)

        app = self.app(name, build, client=client, uri=None)
        await app.ainvoke({}, thread("template"), run_id="template")
        self._recordings[name] = _Recording(app, client, commands, taken[:activities], computed[:activities])
        return self._recordings[name]

    async def replay(self, *, activities: int, characters: int) -> Samples:
        """From the query for the history to the first line that has not run before, for a run of activities one after the other."""
        recording = await self._recorded(activities, characters)
        app, commands = recording.app, recording.commands
        database, run_id = app.endpoint.database, f"run-{uuid.uuid4().hex[:12]}"
        await self.copy_run(database, "template", [run_id])
        async with DurableClient(self.uri, database=database) as client:
            await answer(client, run_id)
        commands.sent.clear()
        await app.ainvoke(None, thread(run_id))
        sent = commands.sent[: self._sent_by_then]
        queries = [each for each in sent if (each.name, each.collection, each.is_limited) == ("find", "activity_events", False)]
        writes = [each for each in sent if each.name in ("insert", "update", "delete", "findAndModify") and each.collection != "runs"]
        # Promises, not measurements: the history is one query, and only the attempt's start is written beside the head (I7).
        assert len(queries) == 1, f"{len(queries)} queries for the history"
        assert [each.collection for each in writes] == ["activity_events"], f"written by the replay: {writes}"
        rate = activities / (self._passed_at - queries[0].sent_at)
        return {"rate": [rate], "queries": [len(queries)], "writes": [len(writes)]}

    async def growth(self, *, activities: int, characters: int) -> Samples:
        """What an activity takes at the beginning of a history, and at its end."""
        recording = await self._recorded(activities, characters)
        edge = min(_EDGE, activities // 4)
        # The computing as well: on a busy machine the time says more about what else runs.
        growth = [statistics.median(each[-edge:]) / statistics.median(each[:edge]) for each in (recording.taken, recording.computed)]
        return {"first": recording.taken[:edge], "last": recording.taken[-edge:], "growth": growth[:1], "growth of computing": growth[1:]}
