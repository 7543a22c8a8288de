"""Code that does something else than its history is found, with what, where, and by which code."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from mongo_durable import App, DurableClient
from mongo_durable.errors import NondeterminismError

CONFIG: Any = {"configurable": {"thread_id": "t"}}


def build_app(uri: str, database: str, *, prompt: str = "be kind", extra: bool = False, name: str = "first", question: str = "?") -> App:
    app = App("changing", uri=uri, database=database)
    model = app.llm(FakeListChatModel(responses=["hello"]), name="fake")

    @app.activity(idempotent=True, name=name)
    async def effect(number: int) -> int:
        return number

    async def talk(state: MessagesState) -> dict[str, Any]:
        await effect(1)
        if extra:
            await effect(2)
        return {"messages": [await model.ainvoke([SystemMessage(prompt), HumanMessage("hi"), *state["messages"]])]}

    async def ask(_: MessagesState) -> dict[str, Any]:
        return {"messages": [HumanMessage(interrupt(question))]}

    @app.entrypoint
    def build() -> StateGraph[Any]:
        graph = StateGraph(MessagesState)
        graph.add_node("talk", talk)
        graph.add_node("ask", ask)
        graph.add_edge(START, "talk")
        graph.add_edge("talk", "ask")
        return graph

    return app


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "be rude"}, r"LLM 'fake' at agent/1/talk@1#2 differs from the history: message 1 of 3 is another one"),
        ({"name": "second"}, r"the code reached ACTIVITY 'second', the history has ACTIVITY 'first'"),
        ({"extra": True}, r"the code reached ACTIVITY 'first', the history has LLM 'fake'"),
        ({"question": "what?"}, r"other questions than frontier 1 of the history; first at agent/1/ask@2#!1"),
    ],
)
async def test_a_change_diverges(mongo_uri: str, database: str, change: dict[str, Any], message: str) -> None:
    """The run ends as diverged, not in an endless retry; position, expected, found and both code versions are recorded; with the old code it goes
    on."""
    given: Any = {"messages": [HumanMessage("go")]}
    await build_app(mongo_uri, database).ainvoke(given, CONFIG, run_id="r")
    changed = build_app(mongo_uri, database, **change)
    with pytest.raises(NondeterminismError, match=message) as raised:
        await changed.ainvoke(Command(resume="yes"), CONFIG)
    async with DurableClient(mongo_uri, database=database) as client:
        run = await client.get_run("r")
        assert run.status == "diverged"
        assert run.error is not None
        assert (run.error["position"], run.error["code_version"]) == (raised.value.position, changed.code_version)
        assert {"expected", "found"} <= set(run.error)
        await client.retry("r")
    out = await build_app(mongo_uri, database).ainvoke(None, CONFIG)
    assert out["messages"][-1].content == "yes"
