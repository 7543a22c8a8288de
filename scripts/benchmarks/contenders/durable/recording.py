"""What it takes to record: calls, sequences, many runs at once, tools at once, a whole graph."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from langchain_core.messages import AIMessage
from langgraph.graph import MessagesState
from langgraph.types import Command

from mongo_durable import App, DurableClient, Runner
from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.events import ActivityKind, Event, EventType
from mongo_durable.protocol.identity import ROOT_PATH, Position, activity_id
from mongo_durable.store.appender import Channel
from scripts.benchmarks.contenders.durable.home import Home
from scripts.benchmarks.contenders.graphs import Empty, PausingModel, answer, llm_graph, one_node, ten_nodes
from scripts.benchmarks.crew import Samples


def thread(name: str | None = None) -> Any:
    """A configuration that names a thread, a new one if none is given."""
    return {"configurable": {"thread_id": name or uuid.uuid4().hex}}


async def ready(app: App) -> None:
    """Do what an app does once: compile its graph, look at the schema, take a lease."""
    app.graph()
    await app.process().lease()


class Recording(Home):
    """New work."""

    async def llm(self, *, calls: int, pause_s: float, characters: int) -> Samples:
        """Model calls, one after the other, in one run."""
        samples: Samples = {"overhead": [], "whole call": []}
        inner = PausingModel(pause_s, characters)
        app = App("llm", uri=self.uri, database=self.new_database())
        model = app.llm(inner)
        app.entrypoint(lambda: llm_graph(model, inner, calls, samples))
        async with contextlib.aclosing(app):
            await app.ainvoke({}, thread())
        return samples

    async def tool(self, *, calls: int, characters: int) -> Samples:
        """Tool calls, one after the other, in one run."""
        samples: Samples = {"overhead": []}
        app = App("tool", uri=self.uri, database=self.new_database())
        body = 0.0

        @app.tool
        async def look_up(number: int) -> str:
            """Look something up."""
            nonlocal body
            started = time.perf_counter()
            found = "x" * characters
            body = time.perf_counter() - started
            return found

        async def work(state: Empty) -> Empty:
            for number in range(calls + 1):
                started = time.perf_counter()
                await look_up.ainvoke({"number": number})
                if number:
                    samples["overhead"].append((time.perf_counter() - started - body) * 1e3)
            return {}

        app.entrypoint(lambda: one_node(Empty, work))
        async with contextlib.aclosing(app):
            await app.ainvoke({}, thread())
        return samples

    def _sequence(self, steps: int, characters: int) -> App:
        def build(app: App) -> None:
            @app.activity(idempotent=True)
            async def step(number: int) -> str:
                return "x" * characters

            async def work(state: Empty) -> Empty:
                for number in range(steps):
                    await step(number)
                return {}

            app.entrypoint(lambda: one_node(Empty, work))

        return self.app(f"sequence-{steps}", build)

    async def sequence(self, *, steps: int, characters: int) -> Samples:
        """One run of activities one after the other."""
        app = self._sequence(steps, characters)
        await ready(app)
        started = time.perf_counter()
        await app.ainvoke({}, thread())
        return {"time": [(time.perf_counter() - started) * 1e3]}

    async def at_once(self, *, runs: int, steps: int, characters: int) -> Samples:
        """Such runs at once."""
        app = self._sequence(steps, characters)
        await ready(app)
        started = time.perf_counter()
        await asyncio.gather(*(app.ainvoke({}, thread()) for _ in range(runs)))
        rate = runs * steps / (time.perf_counter() - started)
        return {"steps": [rate], "documents": [2 * rate]}  # a step is two documents: its start and its outcome

    async def events_at_once(self, *, runs: int, steps: int, characters: int, is_start_awaited: bool = True) -> Samples:
        """The events of such runs, two a step and one after the other in each run, through the appender alone: no graph, no head of a run."""
        app = self._sequence(steps, characters)
        await ready(app)
        process = app.process()
        result, name, input_digest = "x" * characters, uuid.uuid4().hex, digest("step")

        async def write(run_id: str) -> None:
            channel = Channel(run_id, fence=1, seq=0)
            for number in range(steps):
                where = Position((*ROOT_PATH, "work"), 1, str(number + 1))
                for kind in (EventType.ACTIVITY_STARTED, EventType.ACTIVITY_COMPLETED):
                    is_start = kind is EventType.ACTIVITY_STARTED
                    event = Event(
                        run_id=run_id,
                        seq=channel.seq + 1,
                        fence=1,
                        type=kind,
                        at=datetime.now(UTC),
                        position=where,
                        activity_id=activity_id(run_id, where),
                        kind=ActivityKind.ACTIVITY,
                        name="step",
                        input_digest=input_digest if is_start else None,
                        value={"number": number} if is_start else result,
                    )
                    acknowledged = process.appender.append(channel, event, is_awaited=is_start_awaited or not is_start)
                    if is_start_awaited or not is_start:
                        await acknowledged

        started = time.perf_counter()
        await asyncio.gather(*(write(f"{name}-{number}") for number in range(runs)))
        return {"documents": [2 * runs * steps / (time.perf_counter() - started)]}

    async def at_once_by_runner(self, *, runs: int, steps: int, characters: int) -> Samples:
        """Such runs, submitted by a client and executed by a runner, until the client has seen the last one's end."""
        app = self._sequence(steps, characters)
        async with DurableClient(self.uri, database=app.endpoint.database) as client, Runner([app], concurrency=runs):
            await (await client.submit(app.name, {})).wait()
            started = time.perf_counter()
            handles = await asyncio.gather(*(client.submit(app.name, {}) for _ in range(runs)))
            ends = await asyncio.gather(*(handle.wait() for handle in handles))
            elapsed = time.perf_counter() - started
        assert {each.status for each in ends} == {"completed"}
        return {"steps": [runs * steps / elapsed]}

    async def tools(self, *, calls: int, characters: int) -> Samples:
        """One run with the tool calls of one model response."""

        def build(app: App) -> None:
            @app.tool
            async def look_up(number: int) -> str:
                """Look something up."""
                return "x" * characters

            app.entrypoint(lambda: one_node(MessagesState, app.tool_node([look_up])))

        app = self.app("tools", build)
        asked = [{"name": "look_up", "args": {"number": number}, "id": f"call_{number}"} for number in range(calls)]
        await ready(app)
        started = time.perf_counter()
        ended = await app.ainvoke({"messages": [AIMessage("", tool_calls=asked, id="asked")]}, thread())
        taken = time.perf_counter() - started
        assert len(ended["messages"]) == calls + 1
        return {"time": [taken * 1e3]}

    async def graph(self, *, times: int, has_activities: bool = True) -> Samples:
        """The ten nodes from their start over the interrupt to their end."""

        def build(app: App) -> None:
            async def effect(number: int) -> str:
                return answer(number)

            durable = app.activity(idempotent=True)(effect) if has_activities else effect
            app.entrypoint(lambda: ten_nodes(durable, is_async=True))

        app = self.app(f"graph-{has_activities}", build)
        taken = []
        for _ in range(times + 1):
            config = thread()
            started = time.perf_counter()
            asked = await app.ainvoke({"log": []}, config)
            [question] = asked["__interrupt__"]
            ended = await app.ainvoke(Command(resume={question.id: {"approved": True}}), config)
            assert len(ended["log"]) == 10
            taken.append((time.perf_counter() - started) * 1e3)
        return {"time": taken[1:]}
