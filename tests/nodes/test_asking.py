"""A marker in the state is asked, and its answer goes where it belongs: durably and in plain LangGraph alike."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import InjectedToolCallId
from langchain_core.tools import tool as langchain_tool
from langgraph.graph import END, START, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command
from pydantic import BaseModel

from mongo_durable import App
from mongo_durable.errors import ConfigurationError
from mongo_durable.nodes import (
    INTERRUPT_ACK_SENTINEL,
    build_ask_user_marker,
    build_interrupt_marker,
    clear_stale_markers,
    create_elicitation_node,
    create_interrupt_node,
    interrupt_condition,
)
from tests.nodes.stage import ASK_USER, INTERRUPT, Path, Stage, State, a_call, asked, two_paths

ANSWERS: list[Any] = [{}, None, [], 0, "", False, 1.5, "Ja, gern: “ü”", {"approved": True, "by": ["a", None]}, {"a" * 32: 1}, {"act_abc": 1}]


class Approval(BaseModel):
    """An answer as a model."""

    approved: bool = True
    lines: list[int] = []


class Nothing(BaseModel):
    """A model without a field: it dumps to {}."""


def _content(path: Path, answer: Any) -> str:
    return answer if path is ASK_USER and isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def test_the_question(stage: Stage, path: Path) -> None:
    """What a person sees has the type, what was asked, and what to correlate by."""
    thread = stage.thread()
    [question] = asked(stage.play(two_paths(lambda _: path.build(interrupt_id="i-1", tool_call_id="call-1")), {"messages": [a_call()]}, thread))
    what = (
        {"type": "interrupt", "name": "approval", "payload": {"amount": 7}}
        if path is INTERRUPT
        else {"type": "ask_user", "question": "Which one?", "choices": ["this", "that"]}
    )
    assert question.value == {**what, "interrupt_id": "i-1", "tool_call_id": "call-1"}


def test_any_answer_to_a_tool_call(stage: Stage, path: Path) -> None:
    """The answer is the call's ToolMessage, and nothing pends any more; no JSON value is misread, none asks again."""
    make = two_paths(lambda _: path.build(tool_call_id="call-1"))
    for answer in ANSWERS[:4] if stage.is_sync else ANSWERS:
        thread = stage.thread()
        out = stage.answer(make, stage.play(make, {"messages": [a_call()]}, thread), answer, thread)
        assert asked(out) == [], answer
        [_, reply] = out["messages"]
        assert isinstance(reply, ToolMessage)
        assert (reply.content, reply.name, reply.tool_call_id) == (_content(path, answer), path.reply, "call-1")
        assert out[path.pending] is None
        assert path.response not in out


def test_any_answer_without_a_tool_call(stage: Stage, path: Path) -> None:
    """The answer stands in the state as it was given, under the question's id; there is no message."""
    make = two_paths(lambda _: path.build(interrupt_id="i-2"))
    what = {"name": "approval"} if path is INTERRUPT else {"question": "Which one?"}
    for answer in ANSWERS[:4] if stage.is_sync else ANSWERS:
        thread = stage.thread()
        out = stage.answer(make, stage.play(make, {"messages": []}, thread), answer, thread)
        assert asked(out) == [], answer
        assert out[path.response] == {**what, "interrupt_id": "i-2", "response": answer}
        assert type(out[path.response]["response"]) is type(answer)
        assert (out[path.pending], out["messages"]) == (None, [])


def test_the_sentinel_is_taken_out(stage: Stage, path: Path) -> None:
    """Whoever puts the sentinel beside or around an answer, or in place of none: it reaches neither the model nor the state."""
    make = two_paths(lambda _: path.build(tool_call_id="call-1"))
    carried = [
        ({INTERRUPT_ACK_SENTINEL: True}, {}),
        ({INTERRUPT_ACK_SENTINEL: True, "approved": True}, {"approved": True}),
        ({INTERRUPT_ACK_SENTINEL: {"answer": {"approved": True}}}, {"approved": True}),
        ({INTERRUPT_ACK_SENTINEL: {"answer": 1}, "approved": True}, {"approved": True}),
    ]
    for resume, answer in carried:
        thread = stage.thread()
        [question] = asked(stage.play(make, {"messages": [a_call()]}, thread))
        out = stage.play(make, Command(resume={question.id: resume}), thread)
        assert out["messages"][-1].content == json.dumps(answer)
        assert INTERRUPT_ACK_SENTINEL not in repr(out)


def test_an_answer_that_is_a_model(stage: Stage, path: Path) -> None:
    """A Pydantic model is dumped, also one that dumps to {}."""
    make = two_paths(lambda _: path.build())
    options: dict[str, Any] = {"types": [Approval, Nothing]} if stage.is_durable else {}
    for answer in (Approval(lines=[1]), Nothing()):
        thread = stage.thread()
        out = stage.answer(make, stage.play(make, {"messages": []}, thread, **options), answer, thread, **options)
        assert out[path.response]["response"] == answer.model_dump(mode="json")
    if not stage.is_durable:  # bare, as LangGraph's own users give it
        thread = stage.thread()
        stage.play(make, {"messages": []}, thread)
        assert stage.play(make, Command(resume=Approval()), thread)[path.response]["response"] == {"approved": True, "lines": []}


def _agent(app: App | None) -> StateGraph[Any]:
    """A scripted model that calls a tool which asks, and says at its end what it has heard; tools in LangGraph's ToolNode."""

    def buy(tool_call_id: Annotated[str, InjectedToolCallId]) -> Command[Any]:
        """Buy something."""
        marker = build_interrupt_marker(name="approval", payload={"what": "desk"}, tool_call_id=tool_call_id)
        return Command(update={**marker, "messages": [ToolMessage("waits for approval", tool_call_id=tool_call_id)]})

    def choose(tool_call_id: Annotated[str, InjectedToolCallId]) -> Command[Any]:
        """Ask which."""
        marker = build_ask_user_marker(question="Which desk?", tool_call_id=tool_call_id)
        return Command(update={**marker, "messages": [ToolMessage("waits for the user", tool_call_id=tool_call_id)]})

    def model(state: State) -> Any:
        said = [message for message in state["messages"] if isinstance(message, AIMessage)]
        if len(said) < 2:
            return {"messages": [a_call(f"call-{len(said)}", ("choose", "buy")[len(said)])]}
        return {"messages": [AIMessage("; ".join(str(each.content) for each in state["messages"] if isinstance(each, ToolMessage)))]}

    tools = app.tool_node([app.tool(buy), app.tool(choose)]) if app is not None else ToolNode([langchain_tool(buy), langchain_tool(choose)])
    graph = StateGraph(State)
    graph.add_node("clear", clear_stale_markers)
    graph.add_node("model", model)
    graph.add_node("tools", tools)
    graph.add_node("interrupt", create_interrupt_node())
    graph.add_node("elicitation", create_elicitation_node())
    graph.add_edge(START, "clear")
    graph.add_edge("clear", "model")
    nodes = {"interrupt": "interrupt", "elicitation": "elicitation"}
    graph.add_conditional_edges("model", interrupt_condition, {**nodes, "continue": "tools", "finish": END})
    graph.add_conditional_edges("tools", interrupt_condition, {**nodes, "continue": "model", "finish": END})
    graph.add_edge("interrupt", "model")
    graph.add_edge("elicitation", "model")
    return graph


def test_a_graph_with_both(stage: Stage) -> None:
    """A model's tools ask the user and then for approval: each question goes through its own node, and each call has one result, the answer."""
    thread = stage.thread()
    out = stage.play(_agent, {"messages": [("user", "a desk, please")]}, thread)
    assert [each.value["type"] for each in asked(out)] == ["ask_user"]
    out = stage.answer(_agent, out, "the white one", thread)
    assert [(each.value["type"], each.value["payload"]) for each in asked(out)] == [("interrupt", {"what": "desk"})]
    out = stage.answer(_agent, out, {}, thread)
    assert asked(out) == []
    replies = [(each.tool_call_id, each.name, each.content) for each in out["messages"] if isinstance(each, ToolMessage)]
    assert replies == [("call-0", "ask_user", "the white one"), ("call-1", "interrupt:approval", "{}")]
    assert out["messages"][-1].content == "the white one; {}"


def test_a_call_id_that_was_used_before(stage: Stage, path: Path) -> None:
    """A provider may give an id again: the answer stands behind its own call, and the earlier call keeps its result."""
    make = two_paths(lambda _: path.build(tool_call_id="call-1"))
    earlier = [a_call(), ToolMessage("earlier", tool_call_id="call-1", id="kept"), AIMessage("so"), a_call()]
    thread = stage.thread()
    out = stage.answer(make, stage.play(make, {"messages": earlier}, thread), "now", thread)
    assert [str(each.content) for each in out["messages"]] == ["", "earlier", "so", "", _content(path, "now")]


def test_the_state_may_be_a_dataclass(path: Path) -> None:
    """Predicate, router and node read attributes where the state has no keys."""
    fields = [(path.pending, Any, dataclasses.field(default=None)), ("messages", Any, dataclasses.field(default_factory=list))]
    state = dataclasses.make_dataclass("Plain", fields)
    assert interrupt_condition(state(**path.build())) == path.target
    assert interrupt_condition(state(messages=[a_call()])) == "continue"
    assert clear_stale_markers(state(**path.build(run_id="old"))) == {path.pending: None}
    assert path.node()(state(**path.build(run_id="old"))) == {path.pending: None}


@pytest.mark.parametrize("marker", ["approval", {"payload": {}}])
def test_something_else_under_the_key(marker: Any, path: Path) -> None:
    """What no builder made is not asked and not silently lost: the node says which key, and what to use."""
    with pytest.raises(ConfigurationError, match=f"{path.pending} in the state is no marker: make it with build_"):
        path.node()({path.pending: marker})
