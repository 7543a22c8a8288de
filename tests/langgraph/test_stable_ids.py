"""Message ids of states are the same in every attempt."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, ToolMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from mongo_durable import App, DurableClient

MODULE_LEVEL = AIMessage("said by everyone")


def build_app(uri: str, database: str) -> App:
    app = App("ids", uri=uri, database=database)

    def says(name: str) -> Any:
        def node(_: MessagesState) -> dict[str, Any]:
            return {"messages": [AIMessage(name), ToolMessage("made in a node", tool_call_id=name), ("user", "a tuple")]}

        return node

    def forgets(state: MessagesState) -> dict[str, Any]:
        return {"messages": [RemoveMessage(id=state["messages"][1].id)]}

    def asks(_: MessagesState) -> dict[str, Any]:
        return {"messages": [HumanMessage(str(interrupt("?"))), MODULE_LEVEL]}

    def child() -> Any:
        inner = StateGraph(MessagesState)
        inner.add_node("inner", says("equal"))
        inner.add_edge(START, "inner")
        return inner.compile()

    @app.entrypoint
    def build() -> StateGraph[Any]:
        graph = StateGraph(MessagesState)
        for name in ("left", "right"):
            graph.add_node(name, child())
            graph.add_edge(START, name)
        graph.add_node("forgets", forgets)
        graph.add_edge(["left", "right"], "forgets")
        graph.add_node("asks", asks)
        graph.add_edge("forgets", "asks")
        return graph

    return app


async def test_a_replay_has_the_same_ids(mongo_uri: str, database: str) -> None:
    """CASES 34: the state of a replacement attempt has the ids of the first one, in child graphs and for every kind of message."""
    config: Any = {"configurable": {"thread_id": "t"}}
    first = await build_app(mongo_uri, database).ainvoke({"messages": [("user", "hello")]}, config, run_id="r")
    second = await build_app(mongo_uri, database).ainvoke(Command(resume="yes"), config)
    ids = [message.id for message in first["messages"]]
    assert ids == [message.id for message in second["messages"]][: len(ids)]
    assert len(set(ids)) == len(ids) == 6
    async with DurableClient(mongo_uri, database=database) as client:
        stored = (await client.get_run("r")).result()
    assert [message.id for message in stored["messages"]] == [message.id for message in second["messages"]]


async def test_the_callers_objects_stay_as_they_are(mongo_uri: str, database: str) -> None:
    """Ids are stamped on copies: neither the input's messages nor one that a node shares with others gets an id."""
    config: Any = {"configurable": {"thread_id": "t"}}
    given = HumanMessage("hello")
    app = build_app(mongo_uri, database)
    await app.ainvoke({"messages": [given]}, config)
    await app.ainvoke(Command(resume="yes"), config)
    assert given.id is None
    assert MODULE_LEVEL.id is None


@pytest.mark.parametrize("colour", ["sync", "async"])
async def test_outside_a_run_ids_are_langgraphs_own(mongo_uri: str, database: str, colour: str) -> None:
    """The app's graph, run by itself, behaves as LangGraph does."""
    graph = build_app(mongo_uri, database).graph()
    given: Any = {"messages": [HumanMessage("hello", id="mine")]}
    result = await graph.ainvoke(given) if colour == "async" else graph.invoke(given)
    assert result["messages"][0].id == "mine"
