"""What is held: in a runner's memory while thousands wait, and in the database for long conversations."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from pymongo import AsyncMongoClient

from mongo_durable import App, Runner
from scripts.benchmarks.contenders.durable.commands import Commands
from scripts.benchmarks.contenders.durable.home import Home
from scripts.benchmarks.contenders.durable.recording import thread
from scripts.benchmarks.contenders.durable.resuming import asking_graph
from scripts.benchmarks.contenders.graphs import Empty, PausingModel, chat_graph, one_node
from scripts.benchmarks.crew import Samples, Worker

_SETTLE_S = 2.0
_SWEEPS = 5
_FOR_EVER = timedelta(hours=1)


class Storing(Home):
    """Memory and bytes."""

    _runner: Runner | None = None
    _commands: Commands | None = None

    async def idle(self, *, suspended: int) -> Samples:
        """A runner of a process of its own while many runs wait for their answers."""
        app = self.app(f"idle-{suspended}", lambda app: app.entrypoint(asking_graph) and None)
        database = app.endpoint.database
        await app.ainvoke({}, thread("template"), run_id="template")
        runner = await Worker.start("mongo_durable", self.addresses)
        try:
            before = await runner.ask("be_idle", {"name": app.name, "database": database})
            await self.copy_run(database, "template", (f"waiting-{number}" for number in range(suspended - 1)))
            after = await runner.ask("sweep", {"times": _SWEEPS})
            samples = {
                "memory before": before["memory"],
                "memory added": [after["memory"][0] - before["memory"][0]],
                "cursors": [float(await self._cursors(database))],
                "commands of a sweep": after["commands"],
                "time of a sweep": after["time"],
            }
            await runner.ask("stop_idling", {})
        finally:
            await runner.stop()
        return samples

    async def be_idle(self, *, name: str, database: str) -> Samples:
        """Start a runner that sweeps when it is told to."""
        self._commands = Commands()
        self._idle_client: AsyncMongoClient[Any] = AsyncMongoClient(self.uri, event_listeners=[self._commands])
        app = App(name, client=self._idle_client, database=database)
        app.entrypoint(asking_graph)
        self._runner = Runner([app], sweep_interval=_FOR_EVER)
        await self._runner.start()
        await asyncio.sleep(_SETTLE_S)
        await self.sweep(times=1)
        return {"memory": [_resident_mb()]}

    async def sweep(self, *, times: int) -> Samples:
        """Sweep, and note what it takes."""
        assert self._runner is not None
        assert self._runner.process is not None
        assert self._commands is not None
        await asyncio.sleep(_SETTLE_S)  # what the change stream told of has been dealt with
        samples: Samples = {"commands": [], "time": []}
        for _ in range(times):
            self._commands.sent.clear()
            started = time.perf_counter()
            await self._runner._sweep(self._runner.process)
            samples["time"].append((time.perf_counter() - started) * 1e3)
            samples["commands"].append(float(len(self._commands.sent)))
        return {**samples, "memory": [_resident_mb()]}

    async def stop_idling(self) -> Samples:
        """Stop the runner."""
        assert self._runner is not None
        await self._runner.stop()
        await self._idle_client.close()
        return {}

    async def _cursors(self, database: str) -> int:
        """How many change streams on this database are open on the server."""
        stages: list[dict[str, Any]] = [
            {"$currentOp": {"idleCursors": True}},
            {"$match": {"ns": {"$regex": f"^{database}[.]"}, "cursor.originatingCommand.pipeline.0.$changeStream": {"$exists": True}}},
        ]
        found = await (await self.client.admin.aggregate(stages)).to_list(None)
        return len({each["cursor"]["cursorId"] for each in found})  # one whose read ends meanwhile is listed twice

    async def turns(self, *, turns: int, characters: int) -> Samples:
        """A conversation, a run for each turn: its bytes after half of the turns, and what was added by the rest."""
        app = App("turns", uri=self.uri, database=self.new_database())
        model = app.llm(PausingModel(0, characters))
        app.entrypoint(lambda: chat_graph(model, is_async=True))
        sizes = []
        async with contextlib.aclosing(app):
            for half in (turns // 2, turns - turns // 2):
                for _ in range(half):
                    await app.ainvoke({"messages": [HumanMessage("x" * characters)]}, thread("conversation"))
                sizes.append(await self._stored_bytes(app))
        return _halves(sizes[0], sizes[1] - sizes[0])

    async def model_calls(self, *, calls: int, characters: int) -> Samples:
        """A conversation in one run: the bytes of its events up to the middle, and of the rest."""
        app = App("calls", uri=self.uri, database=self.new_database())
        model = app.llm(PausingModel(0, characters))

        async def work(state: Empty) -> Empty:
            messages: list[Any] = []
            for number in range(calls):
                messages.append(HumanMessage("x" * characters, id=f"h{number}"))
                said = await model.ainvoke(messages)
                messages.append(AIMessage(said.content, id=f"a{number}"))
            return {}

        app.entrypoint(lambda: one_node(Empty, work))
        async with contextlib.aclosing(app):
            await app.ainvoke({}, thread(), run_id="run")
            events = self.client[app.endpoint.database]["activity_events"]
            stages = [{"$sort": {"seq": 1}}, {"$project": {"type": 1, "bytes": {"$bsonSize": "$$ROOT"}}}]
            found = await (await events.aggregate(stages)).to_list(None)
        ends = [index for index, each in enumerate(found) if each["type"] == "activity.completed"]
        middle = ends[len(ends) // 2 - 1] + 1
        first, second = (sum(each["bytes"] for each in part) for part in (found[:middle], found[middle:]))
        return _halves(first, second)

    async def _stored_bytes(self, app: App) -> float:
        database = self.client[app.endpoint.database]
        stages = [{"$group": {"_id": None, "bytes": {"$sum": {"$bsonSize": "$$ROOT"}}}}]
        total = 0.0
        for held in await (await database.list_collections(filter={"type": "collection"})).to_list(None):
            name = held["name"]
            if not name.startswith("system."):
                total += sum([each["bytes"] async for each in await database[name].aggregate(stages)])
        return total


def _halves(first: float, second: float) -> Samples:
    return {"whole": [(first + second) / 1e3], "growth": [second / first]}


def _resident_mb() -> float:
    """Memory of this process, in MB; where the system does not tell it, its highest so far."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
