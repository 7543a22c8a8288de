"""Durable tools in all that LangChain's tools can do: injected arguments, Commands, artifacts, errors; against plain LangGraph as the oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import InjectedToolCallId, StructuredTool, ToolException
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode, ToolRuntime, tools_condition
from langgraph.types import Command

from mongo_durable import App, RetryPolicy, current_activity
from mongo_durable.errors import ConfigurationError
from mongo_durable.protocol.events import ActivityKind, EventType
from mongo_durable.protocol.identity import activity_id
from tests.langgraph.bench import Bench, Colour
from tests.langgraph.kit import ASKING, Kit, Ledger, calls, driven

HELLO: dict[str, Any] = {"messages": [HumanMessage("hi", id="first")]}

# LangChain reads the annotations of a tool where it is made, so these stand at the module's level and note their calls here.
_ledgers: list[Ledger] = []


def _note(name: str, given: object) -> None:
    _ledgers[-1].note("TOOL", name, given)


async def count_messages(q: str, state: Annotated[dict[str, Any], InjectedState]) -> str:
    """Count the messages of the state."""
    _note("count_messages", {"q": q})
    return f"{q}: {len(state['messages'])}"


async def tell_id(q: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> str:
    """Tell the id of the call."""
    _note("tell_id", {"q": q})
    return f"{q}: {tool_call_id}"


async def look_around(q: str, runtime: ToolRuntime) -> str:
    """Tell what the runtime knows."""
    _note("look_around", {"q": q})
    return f"{q}: {runtime.tool_call_id} {len(runtime.state['messages'])}"


async def update(q: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> Command[Any]:
    """Change the state."""
    _note("update", {"q": q})
    return Command(update={"messages": [ToolMessage(f"updated {q}", tool_call_id=tool_call_id)]})


async def picture(q: str) -> tuple[str, dict[str, Any]]:
    """Give a text and the thing itself."""
    _note("picture", {"q": q})
    return f"a picture of {q}", {"pixels": [1, 2], "of": q}


async def fails(q: str) -> str:
    """Fail."""
    _note("fails", {"q": q})
    raise ToolException(f"cannot {q}")


async def breaks(q: str) -> str:
    """Fail in a way that is no ToolException."""
    _note("breaks", {"q": q})
    raise ValueError(f"broke {q}")


async def wants_number(q: int) -> str:
    """Double a number."""
    _note("wants_number", {"q": q})
    return str(q * 2)


def _made(kit: Kit, function: Callable[..., Any], **options: Any) -> Any:
    return kit.app.tool(idempotent=True, **options)(kit.body(function))


def _agent(function: Callable[..., Any], **options: Any) -> Callable[[Kit], Any]:
    """An agent that calls the tool beside one that asks, so that the run replays, and then once more alone."""

    def make(kit: Kit) -> Any:
        tested = _made(kit, function, **options)
        script = (calls(tested.name, "ask"), calls(tested.name, prefix="again"), AIMessage("done"))
        return create_agent(kit.model(*script), [tested, kit.ask])

    return make


def _node(function: Callable[..., Any], handle_tool_errors: Any = True, *, is_ours: bool = False, **options: Any) -> Callable[[Kit], Any]:
    """The same with all calls of a response in one task."""

    def make(kit: Kit) -> Any:
        tested = _made(kit, function, **options)
        model = kit.model(calls("ask", tested.name, "ask_twice", "plain"), calls(tested.name, prefix="again"), AIMessage("done"))

        async def llm(state: Any) -> Any:
            return {"messages": [await kit.call(model, state["messages"])]}

        tools = [tested, kit.ask, kit.ask_twice, kit.plain]
        graph = StateGraph(MessagesState)
        graph.add_node("llm", kit.body(llm))
        made = kit.app.tool_node(tools, handle_tool_errors=handle_tool_errors) if is_ours else ToolNode(tools, handle_tool_errors=handle_tool_errors)
        graph.add_node("tools", made)
        graph.add_edge(START, "llm")
        graph.add_conditional_edges("llm", tools_condition)
        graph.add_edge("tools", "llm")
        return graph

    return make


CASES: dict[str, Callable[[Kit], Any]] = {
    "InjectedState": _agent(count_messages),
    "InjectedState in one task": _node(count_messages),
    "InjectedToolCallId": _agent(tell_id),
    "InjectedToolCallId in one task": _node(tell_id, is_ours=True),
    "ToolRuntime": _agent(look_around),
    "ToolRuntime in one task": _node(look_around),
    "a Command": _agent(update),
    "a Command in one task": _node(update),
    "a Command in app.tool_node": _node(update, is_ours=True),
    "content and artifact": _agent(picture, response_format="content_and_artifact"),
    "content and artifact in one task": _node(picture, response_format="content_and_artifact"),
    "return_direct": _agent(tell_id, return_direct=True),
    "a handled failure": _node(fails),
    "a handled failure in app.tool_node": _node(breaks, is_ours=True),
    "a failure with a text of its own": _node(breaks, "it failed"),
    "bad arguments": _agent(wants_number),
    "bad arguments beside asking calls in one task": _node(wants_number),
    "bad arguments in app.tool_node": _node(wants_number, is_ours=True),
}


@pytest.mark.parametrize("colour", ["async", "sync", "mixed"])
@pytest.mark.parametrize("what", CASES)
def test_a_durable_tool_does_what_the_plain_one_does(bench: Bench, what: str, colour: Colour) -> None:
    """Final state and effects are those of plain LangGraph; through all replays each body runs once, and interrupts are never handled as errors."""
    make = CASES[what]

    def noting(ledger: Ledger) -> Callable[[Kit], Any]:
        _ledgers.append(ledger)
        return make

    expected = Ledger()
    _ledgers.append(expected)
    state, oracle = bench.oracle(make, HELLO, colour)
    ledger = Ledger()
    told = bench.complete(noting(ledger), HELLO, colour, ledger)
    assert told.attempts > 1
    assert told.state == state
    assert ledger.without(*ASKING) == oracle.without(*ASKING) + expected.ran
    tools = Counter({key: count for key, count in told.started.items() if key[0] == "TOOL"})
    assert tools == Counter({key: count for key, count in (oracle.ran + expected.ran).items() if key[0] == "TOOL"})


@pytest.mark.parametrize("colour", ["async", "sync"])
def test_a_failure_that_nobody_handles_ends_the_run_with_its_type(bench: Bench, colour: Colour) -> None:
    """The caller sees the tool's exception, and the failure stands in the history."""
    _ledgers.append(ledger := Ledger())

    def make(kit: Kit) -> Any:
        tested = _made(kit, breaks)
        return create_agent(kit.model(calls("breaks"), AIMessage("done")), [tested])

    app = bench.built(make, ledger, colour)
    run_id = bench.new_run()
    with pytest.raises(ValueError, match="broke breaks0"):
        bench.once(app, colour, HELLO, run_id=run_id)
    told = bench.told(run_id, None)
    (failed,) = [each for each in told.events if each.type is EventType.ACTIVITY_FAILED]
    assert failed.error == {"type": "ValueError", "message": "broke breaks0"}


@pytest.mark.parametrize("colour", ["async", "sync"])
def test_retries_happen_inside_one_call(bench: Bench, colour: Colour) -> None:
    """A retry policy runs the body again before anything is recorded: one start, one outcome."""
    ran: list[int] = []

    async def shaky(q: str) -> str:
        """Fail twice."""
        ran.append(1)
        if len(ran) < 3:
            raise ConnectionError("once more")
        return f"got {q}"

    def make(kit: Kit) -> Any:
        policy = RetryPolicy(max_attempts=3, initial_interval=timedelta(0), jitter=timedelta(0))
        tested = kit.app.tool(idempotent=True, retry=policy)(kit.body(shaky))
        return create_agent(kit.model(calls("shaky"), AIMessage("done")), [tested])

    told = bench.complete(make, HELLO, colour, Ledger())
    assert len(ran) == 3
    kinds = Counter(each.type for each in told.events if each.kind is ActivityKind.TOOL)
    assert kinds == {EventType.ACTIVITY_STARTED: 1, EventType.ACTIVITY_COMPLETED: 1}
    assert "got shaky0" in str(told.state)


@pytest.mark.parametrize("colour", ["async", "sync"])
def test_a_body_knows_its_activity(bench: Bench, colour: Colour) -> None:
    """current_activity() names the recorded activity, the same in every attempt: an idempotency key."""
    seen: list[Any] = []

    async def tells(q: str) -> str:
        """Ask, and tell who asks."""
        seen.append(current_activity())
        return str(kit_of[-1].interrupt(q))

    kit_of: list[Kit] = []

    def make(kit: Kit) -> Any:
        kit_of.append(kit)
        return create_agent(kit.model(calls("tells"), AIMessage("done")), [kit.app.tool(idempotent=True)(kit.body(tells))])

    told = bench.complete(make, HELLO, colour, Ledger())
    assert len({each.activity_id for each in seen}) == 1
    (recorded,) = [each for each in told.history.activities.values() if each.name == "tells"]
    assert seen[0].activity_id == activity_id(seen[0].run_id, recorded.position)
    assert seen[0].position == recorded.position.text
    assert [each.attempt for each in seen] == sorted(each.attempt for each in seen)


def test_outside_a_body_there_is_no_activity() -> None:
    """Asking for it is an error that says where it can be asked."""
    with pytest.raises(ConfigurationError, match="outside the body"):
        current_activity()


@pytest.mark.parametrize("colour", ["async", "sync"])
def test_outside_a_run_a_durable_tool_is_the_plain_one(bench: Bench, colour: Colour) -> None:
    """No database is asked; schema, result and artifact are those of the tool inside."""
    _ledgers.append(Ledger())
    app = App("plain", uri="mongodb://localhost:1")
    function = driven(picture) if colour == "sync" else picture
    tested = app.tool(response_format="content_and_artifact")(function)
    call: Any = {"type": "tool_call", "name": "picture", "args": {"q": "x"}, "id": "c1"}

    async def awaited() -> Any:
        return await tested.ainvoke(call)

    said = tested.invoke(call) if colour == "sync" else bench.call(awaited())
    assert (said.content, said.artifact, said.tool_call_id) == ("a picture of x", {"pixels": [1, 2], "of": "x"}, "c1")
    assert tested.args == {"q": {"title": "Q", "type": "string"}}
    assert tested.description == picture.__doc__


def test_tools_are_told_apart_by_name() -> None:
    """A second tool of one name is refused; a LangChain tool is wrapped as it is; a wrapped one is itself."""
    app = App("plain", uri="mongodb://localhost:1")
    inner = StructuredTool.from_function(coroutine=picture)
    wrapped = app.tool(inner)
    assert app.tool(wrapped) is wrapped
    assert app.get_tools() == [wrapped]
    with pytest.raises(ConfigurationError, match="another name"):
        app.tool(inner)
