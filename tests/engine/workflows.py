"""Small workflows, what they did in this process, and what a client sent for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypedDict

import bson
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import START, StateGraph
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

from mongo_durable import App
from tests.crash.worker import ScriptedModel

PATIENCE_S = 60.0
CONFIG: Any = {"configurable": {"thread_id": "desk"}}


class State(TypedDict, total=False):
    """What a run carries."""

    value: Any
    seen: list[Any]


Node = Callable[[State], Awaitable[dict[str, Any]]]


def one_node(app: App, node: Any) -> App:
    """Give `app` a graph of one node."""

    @app.entrypoint
    def build() -> StateGraph:
        graph = StateGraph(State)
        graph.add_node("node", node)
        graph.add_edge(START, "node")
        return graph

    return app


async def until(condition: Callable[[], bool]) -> None:
    """Let others work until something is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for is often another process's doing, which sets no event here
            await asyncio.sleep(0.005)


async def until_known(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask until the answer is yes."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110 - likewise
            await asyncio.sleep(0.01)


class Purchase:
    """A workflow of one node with a model call, a tool call and ten activities. It can be broken at its end."""

    def __init__(self, app: App, *, is_broken: bool = False) -> None:
        self.app = app
        self.ran: Counter[str] = Counter()
        ran = self.ran

        class CountedModel(ScriptedModel):
            def _generate(self, *args: Any, **options: Any) -> Any:
                ran["model"] += 1
                return super()._generate(*args, **options)

        model = app.llm(CountedModel(script=[AIMessage("go on")]))

        @app.tool
        async def pay(amount: int) -> str:
            """Pay."""
            ran["pay"] += 1
            return f"paid {amount}"

        @app.activity
        async def count(number: int) -> int:
            ran["count"] += 1
            return number + 1

        async def node(state: State) -> dict[str, Any]:
            said = await model.ainvoke([HumanMessage("may I?")])
            paid = await pay.ainvoke({"amount": 7})
            number = 0
            for _ in range(10):
                number = await count(number)
            if is_broken:
                raise ValueError("broken")
            return {"seen": [said.content, paid, number]}

        one_node(app, node)


class Commands(CommandListener):
    """What a client, and the clients made like it, sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, dict[str, Any]]] = []

    def started(self, event: CommandStartedEvent) -> None:
        collection = event.command.get(event.command_name)
        self.sent.append((event.command_name, str(collection), dict(event.command)))

    def succeeded(self, event: CommandSucceededEvent) -> None:
        pass

    def failed(self, event: CommandFailedEvent) -> None:
        pass

    def of(self, name: str, collection: str) -> list[dict[str, Any]]:
        """The commands of this name on this collection, in order."""
        return [command for sent, target, command in self.sent if (sent, target) == (name, collection)]

    def counted(self) -> Counter[tuple[str, str]]:
        """How often each was sent."""
        return Counter((name, collection) for name, collection, _ in self.sent)

    def inserts(self) -> list[list[dict[str, Any]]]:
        """The events of each insert into `activity_events`."""
        return [[_plain(document) for document in command["documents"]] for command in self.of("insert", "activity_events")]

    def change_streams(self) -> int:
        """How many change streams were opened."""
        return sum(name == "aggregate" and "$changeStream" in command["pipeline"][0] for name, _, command in self.sent)


def _plain(document: Any) -> dict[str, Any]:
    return bson.decode(document.raw) if hasattr(document, "raw") else dict(document)
