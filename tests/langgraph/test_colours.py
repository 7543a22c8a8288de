"""The sync API from plain scripts, from a thread whose own event loop runs (a notebook), and where it would deadlock."""

from __future__ import annotations

from typing import Any

import pytest
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from mongo_durable import App, SyncDurableClient
from mongo_durable.errors import ConfigurationError

CONFIG: Any = {"configurable": {"thread_id": "t"}}


def build_app(uri: str, database: str, *, is_node_async: bool = False) -> App:
    app = App("colours", uri=uri, database=database)

    @app.activity(idempotent=True)
    def effect(number: int) -> int:
        return number + 1

    @app.tool(idempotent=True)
    def ask(what: str) -> str:
        """Ask."""
        return f"{effect(1)} {interrupt(what)}"

    def node(_: MessagesState) -> dict[str, Any]:
        return {"messages": [("user", f"{effect(2)} {ask.invoke({'what': '?'})}")]}

    async def async_node(_: MessagesState) -> dict[str, Any]:
        return {"messages": [("user", ask.invoke({"what": "a synchronous call on the loop"}))]}

    @app.entrypoint
    def build() -> StateGraph[Any]:
        graph = StateGraph(MessagesState)
        graph.add_node("node", async_node if is_node_async else node)
        graph.add_edge(START, "node")
        return graph

    return app


def use_it_all(uri: str, database: str) -> None:
    app = build_app(uri, database)
    asked = app.invoke({"messages": []}, CONFIG, run_id="r")
    with SyncDurableClient(uri, database=database) as client:
        [frontier] = client.open_frontiers()
        assert frontier.entries[0].activity_id == asked["__interrupt__"][0].id
    chunks = list(app.stream(Command(resume="yes"), CONFIG, stream_mode="values"))
    assert chunks[-1]["messages"][-1].content == "3 2 yes"
    assert app.get_state(CONFIG).values["messages"][-1].content == "3 2 yes"
    with SyncDurableClient(uri, database=database) as client:
        run = client.submit("colours", {"messages": []}, run_id="other")
        assert client.cancel(run.run_id, reason="enough").status == "cancelled"
        assert run.wait(timeout=10).status == "cancelled"
        assert len(list(client.events("r"))) == len(client.history("r"))
        assert [each.role for each in client.transcript("t")] == ["input", "human", "tool"]
    app.close()


def test_from_a_plain_script(mongo_uri: str, database: str) -> None:
    """invoke, stream, get_state and SyncDurableClient need no event loop of the caller."""
    use_it_all(mongo_uri, database)


async def test_from_a_notebook(mongo_uri: str, database: str) -> None:
    """They work the same in a thread whose event loop is running, as in a notebook's cell."""
    use_it_all(mongo_uri, database)


async def test_a_call_that_would_deadlock_is_refused(mongo_uri: str, database: str) -> None:
    """A synchronous durable call in an async node would wait for its own loop: it is refused, and says what to do."""
    with pytest.raises(ConfigurationError, match="ainvoke"):
        await build_app(mongo_uri, database, is_node_async=True).ainvoke({"messages": []}, CONFIG)
