"""The conversation record of a thread."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from mongo_durable import App, DurableClient
from mongo_durable.errors import AttemptOver
from mongo_durable.store import failpoints
from mongo_durable.store.failpoints import FailPoint

CONFIG: Any = {"configurable": {"thread_id": "t"}}
WHOLE = [
    ("input", None),
    ("model", "fake"),
    ("human", "ask"),
    ("model", "fake"),
]


def build_app(uri: str, database: str) -> App:
    app = App("talk", uri=uri, database=database)
    model = app.llm(FakeListChatModel(responses=["hello"]), name="fake")

    async def talk(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def ask(_: MessagesState) -> dict[str, Any]:
        return {"messages": [HumanMessage(interrupt("?"))]}

    @app.entrypoint
    def build() -> StateGraph[Any]:
        graph = StateGraph(MessagesState)
        graph.add_sequence([("talk", talk), ("ask", ask), ("again", talk)])
        graph.add_edge(START, "talk")
        return graph

    return app


async def said(uri: str, database: str) -> list[tuple[str, str | None]]:
    async with DurableClient(uri, database=database) as client:
        return [(each.role, each.name) for each in await client.transcript("t")]


@pytest.mark.parametrize("lost_at", [FailPoint.SUSPEND_BEFORE, FailPoint.END_BEFORE])
async def test_who_dies_before_the_record_loses_nothing_of_it(
    mongo_uri: str, database: str, lost_at: FailPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H13: an outcome that was recorded by an attempt which then ended is in the conversation once, written by the attempt that replayed it."""
    is_lost = False

    async def lose(point: FailPoint) -> None:
        nonlocal is_lost
        if point is lost_at and not is_lost:
            is_lost = True
            raise AttemptOver("lost here")

    async def attempt(given: Any) -> Any:
        app = build_app(mongo_uri, database)
        try:
            return await app.ainvoke(given, CONFIG)
        except AttemptOver:
            await app.aclose()
            return await build_app(mongo_uri, database).ainvoke(None, CONFIG)

    monkeypatch.setattr(failpoints, "handler", lose)
    asked = await attempt({"messages": [HumanMessage("hi")]})
    assert await said(mongo_uri, database) == WHOLE[:2]
    await attempt(Command(resume={asked["__interrupt__"][0].id: "yes"}))
    assert is_lost
    assert await said(mongo_uri, database) == WHOLE
