"""What the tests of this folder work with: apps made anew for each attempt, small graphs, and a person who answers.

CASES is a list of faults that people reported of neighbouring systems. Each test here names the row whose whole kind of fault it closes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command
from pymongo import AsyncMongoClient

from mongo_durable import App, DurableClient, Runner
from mongo_durable.protocol.events import Event, EventType
from tests.langgraph.kit import Ledger, ScriptedModel, State

RUNS = int(os.environ.get("MONGO_DURABLE_CASES_RUNS", "25"))
"""How often a test repeats what only chance brings to light."""

PATIENCE_S = 60.0

Make = Callable[[App], Any]
Say = Callable[[Any], Any]


class Workshop:
    """The runs of one test in a shared database: workflow, runs and threads carry the test's own name.

    Attributes:
        ran: How often the bodies of effects ran, in whatever attempt: the outside world.
    """

    def __init__(self, uri: str, database: str, name: str, client: AsyncMongoClient[dict[str, Any]]) -> None:
        self.uri = uri
        self.database = database
        self.name = name
        self.ran: Counter[str] = Counter()
        self.ledger = Ledger()
        self._client = client
        self._apps: list[App] = []

    def app(self, make: Make, **options: Any) -> App:
        """An app as a new process would have it."""
        app = App(self.name, **{"client": self._client, "database": self.database, **options})
        graph = make(app)
        app.entrypoint(lambda: graph)
        self._apps.append(app)
        return app

    def run(self, suffix: object = 1) -> str:
        """A run id of this test's own."""
        return f"{self.name}-{suffix}"

    async def once(self, make: Make, given: Any, run: object = 1, *, thread: object | None = None, **options: Any) -> Any:
        """One call, by an app made anew: to the end, or to the next question."""
        config: Any = {"configurable": {"thread_id": self.run(run if thread is None else thread)}}
        app = self.app(make, **options)
        try:
            return await app.ainvoke(given, config, run_id=self.run(run))
        finally:
            await self.close(app)

    async def complete(self, make: Make, given: Any, say: Say, run: object = 1, **options: Any) -> Any:
        """Run to the end, with an app made anew for each call and every frontier answered."""
        out = await self.once(make, given, run, **options)
        while "__interrupt__" in out:
            answers = {each.id: say(each.value) for each in out["__interrupt__"]}
            out = await self.once(make, Command(resume=answers), run, **options)
        return out

    def runner(self, *makes: Make, **options: Any) -> Runner:
        """A runner that looks often."""
        given = {"lease": timedelta(seconds=5), "sweep_interval": timedelta(seconds=0.2), **options}
        return Runner([self.app(make) for make in makes], **given)

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[DurableClient]:
        """Somebody who submits, looks and answers."""
        async with DurableClient(client=self._client, database=self.database, **options) as client:
            yield client

    async def history(self, run: object = 1, *types: EventType) -> list[Event]:
        """The events of a run, or those of some types."""
        async with self.client() as client:
            return [event for event in await client.history(self.run(run)) if not types or event.type in types]

    def effect(self, app: App, name: str = "effect", **options: Any) -> Callable[..., Any]:
        """An activity that notes that its body ran, and gives its argument back."""

        async def body(what: Any) -> Any:
            self.ran[str(what)] += 1
            return what

        return app.activity(name=name, **{"idempotent": True, **options})(body)

    def model(self, app: App, *script: AIMessage) -> Any:
        """A durable model that says these messages, one after the other."""
        return app.llm(ScriptedModel(script=list(script), ledger=self.ledger), name="model")

    async def close(self, app: App) -> None:
        """End an app, as its process would."""
        self._apps.remove(app)
        await app.aclose()

    async def aclose(self) -> None:
        """End all apps."""
        for app in list(self._apps):
            await self.close(app)


def chain(**nodes: Any) -> StateGraph[State]:
    """A graph of these nodes, one after the other."""
    graph = StateGraph(State)
    before = START
    for name, node in nodes.items():
        graph.add_node(name, node)
        graph.add_edge(before, name)
        before = name
    return graph


def beside(**nodes: Any) -> StateGraph[State]:
    """A graph of these nodes, all at once."""
    graph = StateGraph(State)
    for name, node in nodes.items():
        graph.add_node(name, node)
        graph.add_edge(START, name)
    return graph


def talk(model: Any, tools: Any, *, is_sync: bool = False) -> StateGraph[Any]:
    """A graph of a model and a node that runs the tools that it calls."""

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    def think_in_a_thread(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think_in_a_thread if is_sync else think)
    graph.add_node("tools", tools)
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph


def ours(app: App, tools: Sequence[Any], **options: Any) -> Any:
    """The app's own tool node."""
    return app.tool_node(tools, **options)


def plain(app: App, tools: Sequence[Any], **options: Any) -> Any:
    """LangGraph's tool node with the same tools."""
    return ToolNode(tools, **options)


def replies(out: Any) -> list[tuple[str, str]]:
    """Which tool call got which content."""
    return [(each.tool_call_id, str(each.content)) for each in out["messages"] if each.type == "tool"]


def echo(question: Any) -> str:
    """An answer that says which question it is for."""
    return f"answer to {question}"
