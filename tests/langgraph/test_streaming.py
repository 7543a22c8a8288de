"""Streams of a durable run."""

from __future__ import annotations

import asyncio
import operator
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.config import get_stream_writer
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from mongo_durable import App
from mongo_durable.errors import UnsupportedGraph


class State(TypedDict):
    said: Annotated[list[str], operator.add]


CONFIG: Any = {"configurable": {"thread_id": "t"}}


def build_app(uri: str, database: str, *, is_sync: bool) -> App:
    app = App("streams", uri=uri, database=database, sync=is_sync)

    def first(_: State) -> State:
        get_stream_writer()("working")
        return {"said": ["first"]}

    def asks(_: State) -> State:
        return {"said": [interrupt("one?"), interrupt("two?")]}

    def inner(_: State) -> State:
        return {"said": ["inner"]}

    def last(_: State) -> State:
        return {"said": ["last"]}

    @app.entrypoint
    def build() -> StateGraph[Any]:
        child = StateGraph(State)
        child.add_node("inner", inner)
        child.add_edge(START, "inner")
        graph = StateGraph(State)
        graph.add_node("first", first)
        graph.add_node("asks", asks)
        graph.add_node("child", child.compile())
        graph.add_node("last", last)
        graph.add_edge(START, "first")
        graph.add_edge("first", "asks")
        graph.add_edge("asks", "child")
        graph.add_edge("child", "last")
        return graph

    return app


async def collect(app: App, given: Any, **options: Any) -> list[Any]:
    """All chunks, in the app's colour."""
    if app.is_sync:
        return await asyncio.to_thread(lambda: list(app.stream(given, CONFIG, **options)))
    return [chunk async for chunk in app.astream(given, CONFIG, **options)]


def questions(chunk: Any) -> list[tuple[str, Any]]:
    return [(each.id, each.value) for each in chunk["__interrupt__"]]


@pytest.mark.parametrize("is_sync", [False, True])
async def test_values_go_on_where_the_last_stream_ended(mongo_uri: str, database: str, is_sync: bool) -> None:
    """Each stream shows what is new: replayed steps are not streamed again, interrupts have stable ids and appear once."""
    app = build_app(mongo_uri, database, is_sync=is_sync)
    first = await collect(app, {"said": []})
    assert first[:2] == [{"said": []}, {"said": ["first"]}]
    assert questions(first[2]) == [(questions(first[2])[0][0], "one?")]
    assert len(first) == 3
    second = await collect(app, Command(resume="a"))
    assert [value for _, value in questions(second[-1])] == ["two?"]
    assert len(second) == 1
    third = await collect(app, Command(resume={questions(second[-1])[0][0]: "b"}))
    assert third == [
        {"said": ["first", "a", "b"]},
        {"said": ["first", "a", "b", "first", "a", "b", "inner"]},  # the child graph returns the whole of its state
        {"said": ["first", "a", "b", "first", "a", "b", "inner", "last"]},
    ]


@pytest.mark.parametrize("is_sync", [False, True])
async def test_what_a_tool_writes(mongo_uri: str, database: str, is_sync: bool) -> None:
    """What the body of a durable tool writes comes from the graph that calls the tool; what a child graph in it writes does not come out."""
    app = App("streams", uri=mongo_uri, database=database, sync=is_sync)

    def leaf(_: State) -> State:
        get_stream_writer()("below")
        return {"said": []}

    @app.tool
    def shout(word: str) -> str:
        """Say it aloud."""
        get_stream_writer()(word)
        inner = StateGraph(State)
        inner.add_node("leaf", leaf)
        inner.add_edge(START, "leaf")
        inner.compile().invoke({"said": []})
        get_stream_writer()(interrupt("louder?"))
        return word

    def calls(_: State) -> State:
        return {"said": [shout.invoke({"word": "hey"})]}

    async def calls_async(_: State) -> State:
        return {"said": [await shout.ainvoke({"word": "hey"})]}

    @app.entrypoint
    def build() -> StateGraph[Any]:
        child = StateGraph(State)
        child.add_node("calls", calls if is_sync else calls_async)
        child.add_edge(START, "calls")
        graph = StateGraph(State)
        graph.add_node("child", child.compile())
        graph.add_edge(START, "child")
        return graph

    async def written(given: Any) -> list[Any]:
        chunks = await collect(app, given, stream_mode=["custom"], subgraphs=True)
        return [(*(name.partition(":")[0] for name in namespace), payload) for namespace, _, payload in chunks]

    assert await written({"said": []}) == [("child", "hey")]
    # A body that is run again writes again: up to the question, and then with its answer.
    assert await written(Command(resume="yes")) == [("child", "hey"), ("child", "hey"), ("child", "yes")]


@pytest.mark.parametrize("is_sync", [False, True])
async def test_several_modes_and_child_graphs(mongo_uri: str, database: str, is_sync: bool) -> None:
    """Lists of modes and subgraphs=True have LangGraph's shape."""
    app = build_app(mongo_uri, database, is_sync=is_sync)
    first = await collect(app, {"said": []}, stream_mode=["updates", "custom"], subgraphs=True)
    assert ((), "custom", "working") in first
    assert ((), "updates", {"first": {"said": ["first"]}}) in first
    assert [mode for _, mode, payload in first if isinstance(payload, dict) and "__interrupt__" in payload] == ["updates"]
    await collect(app, Command(resume="a"), stream_mode="updates")
    last = await collect(app, Command(resume="b"), stream_mode=["updates", "custom"], subgraphs=True)
    assert ((), "custom", "working") not in last
    assert [payload for namespace, _, payload in last if namespace] == [{"inner": {"said": ["inner"]}}]
    assert next(payload for namespace, _, payload in last if not namespace) == {"asks": {"said": ["a", "b"]}}


async def test_replayed_steps_are_streamed_again_when_asked(mongo_uri: str, database: str) -> None:
    """replay="emit" shows the whole run."""
    app = build_app(mongo_uri, database, is_sync=False)
    await collect(app, {"said": []})
    again = await collect(app, Command(resume="a"), stream_mode="updates", replay="emit")
    assert again[0] == {"first": {"said": ["first"]}}


async def test_tasks_mode_shows_no_native_ids(mongo_uri: str, database: str) -> None:
    """The random ids of LangGraph's own interrupts do not get out."""
    app = build_app(mongo_uri, database, is_sync=False)
    tasks = await collect(app, {"said": []}, stream_mode="tasks")
    assert [task["name"] for task in tasks if "input" in task] == ["first", "asks"]
    assert all(not task.get("interrupts") for task in tasks)


async def test_closing_a_stream_early_gives_the_run_back(mongo_uri: str, database: str) -> None:
    """Who stops listening loses nothing: the run goes on with the next call."""
    app = build_app(mongo_uri, database, is_sync=False)
    stream = app.astream({"said": []}, CONFIG)
    await anext(stream)
    await stream.aclose()
    rest = await app.ainvoke(None, CONFIG)
    assert [each.value for each in rest["__interrupt__"]] == ["one?"]


@pytest.mark.parametrize("options", [{"stream_mode": "checkpoints"}, {"stream_mode": ["values", "debug"]}, {"replay": "sometimes"}])
async def test_what_a_durable_stream_does_not_have_is_refused(options: dict[str, Any]) -> None:
    """Modes that show scratch are refused by name."""
    with pytest.raises(UnsupportedGraph):
        await collect(build_app("mongodb://localhost", "none", is_sync=False), {"said": []}, **options)


@pytest.mark.parametrize("is_sync", [False, True])
async def test_tokens_come_as_they_are_said_and_not_again(mongo_uri: str, database: str, is_sync: bool) -> None:
    """In messages mode a recorded call streams its tokens, under the id that the recorded message has; a replay streams none of them."""
    app = App("tokens", uri=mongo_uri, database=database, sync=is_sync)
    model = app.llm(GenericFakeChatModel(messages=iter([AIMessage("one two"), AIMessage("never said")])))

    async def talks(_: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke("say it")]}

    def talks_sync(_: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke("say it")]}

    def asks(_: MessagesState) -> dict[str, Any]:
        return {"messages": [HumanMessage(interrupt("?"), id="h")]}

    @app.entrypoint
    def build() -> StateGraph[Any]:
        graph = StateGraph(MessagesState)
        graph.add_node("talks", talks_sync if is_sync else talks)
        graph.add_node("asks", asks)
        graph.add_edge(START, "talks")
        graph.add_edge("talks", "asks")
        return graph

    first = [message for message, _ in await collect(app, {"messages": []}, stream_mode="messages")]
    assert [message.content for message in first] == ["one", " ", "two"]
    second = await collect(app, Command(resume="thanks"), stream_mode=["messages", "values"])
    assert [payload[0].content for mode, payload in second if mode == "messages"] == ["thanks"]
    assert {message.id for message in first} == {second[-1][1]["messages"][0].id}
