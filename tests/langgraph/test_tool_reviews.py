"""Reviews of tool calls by LangChain's own middleware: a wrong decision is refused before it is stored, and no right one ever is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware, human_in_the_loop
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.graph import START, StateGraph
from langgraph.prebuilt.tool_node import ToolCallRequest, ToolRuntime
from langgraph.types import Command, interrupt

from mongo_durable.engine import resolving
from mongo_durable.engine.schemas import schema_faults
from mongo_durable.errors import InvalidAnswer
from mongo_durable.protocol.events import EventType, RunStatus
from mongo_durable.protocol.requests import recognised_schema
from mongo_durable.protocol.values import encode
from mongo_durable.store import events, frontiers, heads
from tests.langgraph.bench import Bench, Colour
from tests.langgraph.kit import Kit, Ledger, State, calls

POLICIES: dict[str, Any] = {"plain": {"allowed_decisions": ["reject", "edit"]}, "ask": {"allowed_decisions": ("approve", "respond")}}
EDITED = {"type": "edit", "edited_action": {"name": "plain", "args": {"q": "edited"}}}

WRONG: dict[str, tuple[Any, str]] = {
    "approve where only reject and edit are allowed": ({"decisions": [{"type": "approve"}, {"type": "approve"}]}, "$.decisions[0].type"),
    "too few": ({"decisions": [{"type": "reject"}]}, "$.decisions"),
    "too many": ({"decisions": [{"type": "reject"}, {"type": "approve"}, {"type": "approve"}]}, "$.decisions"),
    "in the order of another response": ({"decisions": [{"type": "approve"}, {"type": "reject"}]}, "$.decisions[1].type"),
    "unknown": ({"decisions": [{"type": "accept"}, {"type": "approve"}]}, "$.decisions[0].type"),
    "an edit of nothing": ({"decisions": [{"type": "edit"}, {"type": "approve"}]}, "$.decisions[0]"),
    "a response without words": ({"decisions": [{"type": "reject"}, {"type": "respond"}]}, "$.decisions[1]"),
    "not in a response": ([{"type": "reject"}, {"type": "approve"}], "$"),
    "a word": ("approve", "$"),
}


def reviewed(kit: Kit) -> Any:
    """An agent whose two tool calls a person reviews."""
    model = kit.model(calls("plain", "ask"), AIMessage("done"))
    return create_agent(model, kit.tools, middleware=[HumanInTheLoopMiddleware(interrupt_on=POLICIES)])


@pytest.mark.parametrize("colour", ["async", "sync"])
def test_a_wrong_decision_is_refused_when_it_is_made(bench: Bench, colour: Colour) -> None:
    """Nothing is stored and nothing runs, through the app or from elsewhere; then the right decisions do what they say, also for a tool that asks."""
    run_id, ledger = bench.new_run(), Ledger()
    app = bench.built(reviewed, ledger, colour)
    config = {"configurable": {"thread_id": run_id}}
    connection = bench.process.connection
    (asked,) = bench.once(app, colour, {"messages": [("user", "go")]}, config, run_id=run_id)["__interrupt__"]
    before = [each.type for each in bench.call(events.read_history(connection, run_id))]
    for wrong, path in WRONG.values():
        with pytest.raises(InvalidAnswer) as refused:
            bench.once(app, colour, Command(resume={asked.id: wrong}), config, run_id=run_id)
        assert path in {fault.partition(":")[0] for fault in refused.value.errors}
        with pytest.raises(InvalidAnswer):
            bench.call(resolving.resolve(connection, run_id, {asked.id: wrong}))
    assert [each.type for each in bench.call(events.read_history(connection, run_id))] == before
    assert bench.call(heads.get(connection, run_id)).status is RunStatus.SUSPENDED
    assert not ledger.of("plain", "ask")
    (in_tool,) = bench.once(app, colour, Command(resume={asked.id: {"decisions": [EDITED, {"type": "approve"}]}}), config, run_id=run_id)[
        "__interrupt__"
    ]
    assert in_tool.response_schema is None
    out = bench.once(app, colour, Command(resume={in_tool.id: "yes"}), config, run_id=run_id)
    assert out["messages"][-1].content == "done"
    assert ledger.of("plain") == {("TOOL", "plain", repr({"q": "edited"})): 1}


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("place", ["node", "tool"])
def test_a_question_for_an_inbox(bench: Bench, place: str, is_listed: bool) -> None:
    """A question in an Agent Inbox's shape takes the responses that it allows, in nodes and in tools."""
    config = {"allow_accept": True, "allow_ignore": False, "allow_respond": False, "allow_edit": True}
    question = {"action_request": {"action": "pay", "args": {"amount": 5}}, "config": config, "description": "Pay?"}
    heard: list[Any] = []

    def make(kit: Kit) -> Any:
        async def pay(q: str) -> str:
            """Pay."""
            heard.append(interrupt([question] if is_listed else question))
            return "paid"

        durable = kit.tool(pay)

        async def node(state: Any) -> Any:
            return {"lines": [await (kit.call(durable, {"q": "now"}) if place == "tool" else pay("now"))]}

        graph = StateGraph(State)
        graph.add_node("node", kit.body(node))
        graph.add_edge(START, "node")
        return graph

    run_id = bench.new_run()
    app = bench.built(make, Ledger(), "async")
    thread = {"configurable": {"thread_id": run_id}}
    (asked,) = bench.once(app, "async", {"lines": []}, thread, run_id=run_id)["__interrupt__"]
    for wrong in ([{"type": "ignore", "args": None}], {"type": "response", "args": "no"}, [], {"type": "edit", "args": "x"}, True):
        with pytest.raises(InvalidAnswer):
            bench.once(app, "async", Command(resume={asked.id: wrong}), thread, run_id=run_id)
    answer: Any = {"type": "edit", "args": {"action": "pay", "args": {"amount": "4"}}}
    answer = [answer] if is_listed else answer
    assert bench.once(app, "async", Command(resume={asked.id: answer}), thread, run_id=run_id)["lines"] == ["paid"]
    assert heard == [answer]


def test_what_is_recognised_is_no_part_of_what_a_replay_compares(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was suspended by a release that recognised nothing goes on."""
    run_id = bench.new_run()
    config = {"configurable": {"thread_id": run_id}}
    with monkeypatch.context() as earlier:
        earlier.setattr("mongo_durable.langgraph.questions.recognised_schema", lambda _: None)
        app = bench.built(reviewed, Ledger(), "async")
        (asked,) = bench.once(app, "async", {"messages": [("user", "go")]}, config, run_id=run_id)["__interrupt__"]
    assert asked.response_schema is None
    app = bench.built(reviewed, Ledger(), "async")
    decisions = {"decisions": [{"type": "reject"}, {"type": "respond", "message": "said"}]}
    out = bench.once(app, "async", Command(resume={asked.id: decisions}), config, run_id=run_id)
    assert out["messages"][-1].content == "done"
    frontier = bench.call(frontiers.get(bench.process.connection, run_id, 1))
    assert frontier is not None
    assert frontier.entries[0].response_schema is None
    assert EventType.RUN_DIVERGED not in {each.type for each in bench.call(events.read_history(bench.process.connection, run_id))}


# -- the real middleware as the judge ----------------------------------------------------------------------------------------------------------------


@tool
def pay(amount: int = 0) -> str:
    """Pay."""
    return "paid"


@tool
def tell(text: str = "") -> str:
    """Tell."""
    return "told"


TOOLS = {each.name: each for each in (pay, tell)}
KINDS = ("approve", "edit", "reject", "respond")


def middleware_takes(middleware: HumanInTheLoopMiddleware[Any, Any, Any], response: AIMessage, answer: Any) -> bool:
    """Whether the middleware and the tools after it get through with an answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(human_in_the_loop, "interrupt", lambda _: answer)
        try:
            update = middleware.after_model({"messages": [response]}, None) or {}  # type: ignore[arg-type,typeddict-item]
            answered = {each.tool_call_id for each in update["messages"] if isinstance(each, ToolMessage)}
            runtime: Any = ToolRuntime(
                state={}, context=None, config={}, stream_writer=lambda _: None, tool_call_id=None, store=None, tools=list(TOOLS.values())
            )
            for call in response.tool_calls:
                if call["id"] not in answered:
                    request = ToolCallRequest(tool_call=call, tool=TOOLS[call["name"]], state=update, runtime=runtime)
                    middleware.wrap_tool_call(request, lambda given: given.tool.invoke({**given.tool_call, "type": "tool_call"}))
        except Exception:  # noqa: BLE001 - whatever it is, the run would fail of it
            return False
    return True


VALUES = st.sampled_from([None, "", "because", 5, ["because"], {}])
ACTIONS = st.sampled_from([{"name": "pay", "args": {"amount": 4}}, {"name": "tell", "args": {}, "more": 1}, {"name": "pay"}, {"args": {}}, {}, "pay"])
DECISION = st.fixed_dictionaries(
    {"type": st.sampled_from([*KINDS, *KINDS, *KINDS, "accept", None])}, optional={"message": VALUES, "edited_action": ACTIONS, "more": VALUES}
)
FITTING = {
    "approve": st.just({"type": "approve"}),
    "reject": st.fixed_dictionaries({"type": st.just("reject")}, optional={"message": VALUES}),
    "respond": st.fixed_dictionaries({"type": st.just("respond"), "message": VALUES}),
    "edit": st.fixed_dictionaries({"type": st.just("edit"), "edited_action": ACTIONS}),
}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_schema_takes_what_the_middleware_takes(data: st.DataObject) -> None:
    """For any requests, policies and answers, right and wrong ones: what the middleware gets through with fits the schema, and nothing else does."""
    allowed = {name: data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3), label=name) for name in TOOLS}
    names = data.draw(st.lists(st.sampled_from(sorted(TOOLS)), min_size=1, max_size=3))
    middleware: Any = HumanInTheLoopMiddleware(interrupt_on={name: {"allowed_decisions": kinds} for name, kinds in allowed.items()})  # type: ignore[typeddict-item]
    asked: list[Any] = []

    def response() -> AIMessage:
        return AIMessage("", tool_calls=[{"name": name, "args": {}, "id": f"call-{number}"} for number, name in enumerate(names)])

    def keep(request: Any) -> Any:
        asked.append(request)
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(human_in_the_loop, "interrupt", keep)
        with pytest.raises(InterruptedError):
            middleware.after_model({"messages": [response()]}, None)
    schema = recognised_schema(encode(asked[0]))
    assert schema is not None
    fitting = st.tuples(*(st.sampled_from(allowed[name]).flatmap(FITTING.__getitem__) for name in names)).map(list)
    decisions = data.draw(fitting | st.lists(DECISION, min_size=len(names), max_size=len(names)) | st.lists(DECISION, max_size=4))
    answer = data.draw(st.sampled_from([{"decisions": decisions}, {"decisions": decisions, "note": "more"}]))
    assert (schema_faults(schema, answer) == []) is middleware_takes(middleware, response(), answer)
