"""What a run takes in MongoDB: documents and bytes of BSON by collection, for runs of some shapes, as a Markdown table.

The bytes are those of the documents ($bsonSize), before the server compresses them and without indexes.
"""

from __future__ import annotations

import asyncio
import operator
import os
import uuid
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Annotated, Any, TypedDict

import pymongo
from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

from mongo_durable import App
from mongo_durable.dev import DevMongo

RUNS = "runs"
EVENTS = "activity_events"
OTHERS = ("frontiers", "resolutions", "memory", "thread_states", "threads", "payloads")
ANSWER = "The order has been placed, and the supplier will deliver on Thursday. " * 3


class State(TypedDict, total=False):
    """What the graphs carry."""

    lines: Annotated[list[str], operator.add]


Shape = Callable[[App], Awaitable[None]]


def graph_of(app: App, *nodes: Callable[..., Any]) -> None:
    """Nodes one after the other."""
    graph = StateGraph(State)
    names = [f"node_{number}" for number in range(len(nodes))]
    for name, node in zip(names, nodes, strict=True):
        graph.add_node(name, node)
    for one, other in zip((START, *names), names, strict=False):
        graph.add_edge(one, other)
    app.entrypoint(lambda: graph)


async def no_effect(app: App) -> None:
    """One node, which does nothing."""

    async def node(state: State) -> State:
        return {"lines": ["done"]}

    graph_of(app, node)
    await app.ainvoke({"lines": ["start"]})


async def one_tool_call(app: App) -> None:
    """One node that calls a tool."""

    @app.tool
    async def order(item: str, amount: int) -> str:
        """Order something."""
        return f"{amount} of {item} ordered"

    async def node(state: State) -> State:
        return {"lines": [await order.ainvoke({"item": "desk", "amount": 2})]}

    graph_of(app, node)
    await app.ainvoke({"lines": ["start"]})


async def one_model_call(app: App) -> None:
    """One node that calls a model, which answers with 210 characters."""
    model = app.llm(GenericFakeChatModel(messages=iter([AIMessage(ANSWER)])))

    async def node(state: State) -> State:
        return {"lines": [str((await model.ainvoke([HumanMessage("What about the desk?")])).content)]}

    graph_of(app, node)
    await app.ainvoke({"lines": ["start"]})


async def ten_nodes_and_a_question(app: App) -> None:
    """Ten nodes with an activity each; the fifth asks a person."""

    @app.activity(idempotent=True)
    async def look_up(item: str) -> str:
        return f"found {item}"

    async def node(state: State) -> State:
        return {"lines": [await look_up(f"item {len(state['lines'])}")]}

    async def asks(state: State) -> State:
        return {"lines": [await look_up("prices"), str(interrupt({"question": "Buy the desk for 28?"}))]}

    graph_of(app, *[asks if number == 4 else node for number in range(10)])
    config: Any = {"configurable": {"thread_id": "t"}}
    await app.ainvoke({"lines": ["start"]}, config)
    await app.ainvoke(Command(resume={"approved": True}), config)


async def fifty_activities(app: App) -> None:
    """One node with 50 activities."""

    @app.activity(idempotent=True)
    async def look_up(item: str) -> str:
        return f"found {item}"

    async def node(state: State) -> State:
        return {"lines": [await look_up(f"item {number}") for number in range(50)]}

    graph_of(app, node)
    await app.ainvoke({"lines": ["start"]})


async def chat_of_twenty_turns(app: App) -> None:
    """An agent's conversation of 20 turns: 20 runs of one thread, each with one model call."""
    agent = create_agent(app.llm(GenericFakeChatModel(messages=iter([AIMessage(ANSWER)] * 20))), [])
    app.entrypoint(lambda: agent)
    for number in range(20):
        await app.ainvoke({"messages": [HumanMessage(f"Question {number}: what about the desk?")]}, {"configurable": {"thread_id": "t"}})


SHAPES: dict[str, Shape] = {
    "no effect": no_effect,
    "one tool call": one_tool_call,
    "one model call": one_model_call,
    "10 nodes, 10 activities, one question": ten_nodes_and_a_question,
    "50 activities in one node": fifty_activities,
    "a chat of 20 turns (20 runs)": chat_of_twenty_turns,
}


def measured(database: pymongo.database.Database[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Documents and bytes by collection."""
    found = {}
    for name in (RUNS, EVENTS, *OTHERS):
        sums = {"$group": {"_id": None, "documents": {"$sum": 1}, "bytes": {"$sum": {"$bsonSize": "$$ROOT"}}}}
        for each in database[name].aggregate([sums]):
            found[name] = each["documents"], each["bytes"]
    return found


def shown(documents: int, size: int) -> str:
    """A cell of the table."""
    return f"{documents} / {size / 1000:.1f}"


def main() -> None:
    """Run each shape in a database of its own, and print the table."""
    with ExitStack() as stack:
        uri = os.environ.get("MONGO_DURABLE_URI") or stack.enter_context(DevMongo())
        client = stack.enter_context(pymongo.MongoClient(uri))
        print("| documents / kB | `runs` | `activity_events` | all others | together |")
        print("|---|---|---|---|---|")
        for name, shape in SHAPES.items():
            database = f"sizes_{uuid.uuid4().hex[:12]}"
            try:
                asyncio.run(run(shape, uri, database))
                found = measured(client[database])
            finally:
                client.drop_database(database)
            others = [found[each] for each in OTHERS if each in found]
            columns = [found[RUNS], found[EVENTS], tuple(map(sum, zip(*others, strict=True))), tuple(map(sum, zip(*found.values(), strict=True)))]
            print(f"| {name} | {' | '.join(shown(*each) for each in columns)} |")


async def run(shape: Shape, uri: str, database: str) -> None:
    """One run of a shape, or its conversation."""
    app = App("measured", uri=uri, database=database)
    try:
        await shape(app)
    finally:
        await app.aclose()


if __name__ == "__main__":
    main()
