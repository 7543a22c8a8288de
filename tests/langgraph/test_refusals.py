"""What cannot be made durable is refused by name: as early as it can be known, and never run wrongly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import CachePolicy, Command, RetryPolicy, interrupt

from mongo_durable import App
from mongo_durable.errors import ConfigurationError, DurableError, UnsupportedGraph
from mongo_durable.protocol.events import RunStatus
from mongo_durable.store import heads
from tests.langgraph.bench import Bench, Colour
from tests.langgraph.kit import Kit, Ledger, State, calls


def _nothing(state: State) -> State:
    return {}


async def _nothing_async(state: State) -> State:
    return {}


def _one_node(node: Any = _nothing, **options: Any) -> StateGraph[State]:
    graph = StateGraph(State)
    graph.add_node("step", node, **options)
    graph.add_edge(START, "step")
    return graph


def _with_step_timeout() -> Any:
    graph = _one_node().compile()
    graph.step_timeout = 1.0
    return graph


def _functional(**options: Any) -> Any:
    @entrypoint(**options)
    def workflow(given: int) -> int:
        return given

    return workflow


def _calls_a_child(child: Any) -> Any:
    def step(state: State) -> State:
        child.invoke({"lines": []})
        return {}

    return _one_node(step)


BUILT: dict[str, tuple[Callable[[], Any], str, str | None]] = {
    "interrupt_before": (lambda: _one_node().compile(interrupt_before=["step"]), "static interrupts", None),
    "interrupt_after": (lambda: _one_node().compile(interrupt_after="*"), "static interrupts", None),
    "interrupt_before in a child": (lambda: _one_node(_one_node().compile(interrupt_before=["step"])), "static interrupts", "step"),
    "interrupt_after in a called child": (lambda: _calls_a_child(_one_node().compile(interrupt_after=["step"])), "static interrupts", "step"),
    "a saver": (lambda: _one_node().compile(checkpointer=InMemorySaver()), "checkpointer of its own", None),
    "a child with a saver": (lambda: _one_node(_one_node().compile(checkpointer=InMemorySaver())), "checkpointer of its own", "step"),
    "a child with checkpointer=True": (lambda: _one_node(_one_node().compile(checkpointer=True)), "checkpointer of its own", "step"),
    "a child with checkpointer=False": (lambda: _one_node(_one_node().compile(checkpointer=False)), "checkpointer=False", "step"),
    "a node's retry policy": (lambda: _one_node(retry_policy=RetryPolicy()), "retry policy", "step"),
    "a child node's retry policy": (lambda: _one_node(_one_node(retry_policy=RetryPolicy()).compile()), "retry policy", "step"),
    "an entrypoint's retry policy": (lambda: _functional(retry_policy=RetryPolicy()), "retry policy", None),
    "a node's cache policy": (lambda: _one_node(cache_policy=CachePolicy()), "cache policy", "step"),
    "a cache": (lambda: _one_node().compile(cache=InMemoryCache()), "has a cache", None),
    "a node's timeout": (lambda: _one_node(_nothing_async, timeout=1.0), "timeout", "step"),
    "a step timeout": (_with_step_timeout, "step_timeout", None),
    "an error handler": (lambda: _one_node(error_handler=lambda state, error: {}), "error handler", "step"),
    "options bound to a graph": (lambda: _one_node().compile().bind(interrupt_before="*"), "instead of binding them", None),
    "no graph": (lambda: lambda state: state, "has to return", None),
}


@pytest.mark.parametrize("what", BUILT)
def test_a_graph_that_cannot_be_durable_is_refused_before_it_runs(what: str) -> None:
    """The error names the node and the reason; no database is asked."""
    build, why, node = BUILT[what]
    app = App("refused", uri="mongodb://localhost:1")
    app.entrypoint(build)
    with pytest.raises(UnsupportedGraph, match=why) as raised:
        app.graph()
    assert raised.value.node == node


@pytest.mark.parametrize("build", [lambda: _one_node(), lambda: _one_node().compile(checkpointer=App("a").checkpointer())])
def test_a_plain_graph_and_one_with_the_apps_checkpointer_are_accepted(build: Callable[[], Any]) -> None:
    """`app.checkpointer()` may stand where a graph wants one."""
    app = App("accepted", uri="mongodb://localhost:1")
    app.entrypoint(build)
    assert app.graph() is not None


CALLED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "interrupt_before": ({}, {}, {"interrupt_before": ["step"]}, "interrupt_before="),
    "interrupt_after": ({}, {}, {"interrupt_after": "*"}, "interrupt_after="),
    "durability": ({}, {}, {"durability": "exit"}, "durability="),
    "checkpoint_during": ({}, {}, {"checkpoint_during": False}, "checkpoint_during="),
    "control": ({}, {}, {"control": object()}, "control="),
    "checkpoint_id": ({}, {"checkpoint_id": "1f0"}, {}, "checkpoint_id"),
    "checkpoint_ns": ({}, {"checkpoint_ns": "child:1"}, {}, "checkpoint_ns"),
    "checkpoint_map": ({}, {"checkpoint_map": {"": "1f0"}}, {}, "checkpoint_map"),
    "Command(goto=)": (Command(goto="step"), {}, {}, "goto"),
    "Command(update=)": (Command(resume=1, update={"lines": []}), {}, {}, "update"),
    "Command(graph=)": (Command(resume=1, graph=Command.PARENT), {}, {}, "graph"),
}


@pytest.mark.parametrize("colour", ["async", "sync"])
@pytest.mark.parametrize("what", CALLED)
def test_a_call_that_the_driver_has_to_decide_is_refused(bench: Bench, what: str, colour: Colour) -> None:
    """Options and coordinates that a replay could not honour are refused before a run exists."""
    given, configurable, options, why = CALLED[what]
    app = bench.app()
    app.entrypoint(_one_node)
    config: Any = {"configurable": {"thread_id": "refused", **configurable}}

    async def call() -> None:
        await app.ainvoke(given, config, **options)

    with pytest.raises(UnsupportedGraph, match=why):
        app.invoke(given, config, **options) if colour == "sync" else bench.call(call())


def _concurrent_children(kit: Kit) -> Any:
    child = kit.parallel("child")

    async def step(state: State) -> State:
        await asyncio.gather(child.ainvoke({"lines": []}), child.ainvoke({"lines": []}))
        return {}

    return _one_node(step)


def _child_with_a_thread(kit: Kit) -> Any:
    child = _one_node(kit.node("child")).compile()
    config = {"configurable": {"thread_id": "other"}}

    async def step(state: State) -> State:
        return child.invoke({"lines": []}, config) if kit.is_sync else await child.ainvoke({"lines": []}, config)  # type: ignore[return-value]

    return _one_node(kit.body(step))


def _asking_child_with_a_thread(kit: Kit) -> Any:
    def asks(state: State) -> State:
        return {"lines": [interrupt("?")]}

    child = _one_node(asks).compile()
    config = {"configurable": {"thread_id": "other"}}

    async def step(state: State) -> State:
        result = child.invoke({"lines": []}, config) if kit.is_sync else await child.ainvoke({"lines": []}, config)
        return {"lines": result["lines"]}

    return _one_node(kit.body(step))


def _called_child(checkpointer: bool) -> Callable[[Kit], Any]:
    def make(kit: Kit) -> Any:
        hidden = {"child": _one_node(kit.node("child")).compile(checkpointer=checkpointer)}

        async def step(state: State) -> State:
            await kit.call(hidden["child"], {"lines": []})
            return {}

        return _one_node(kit.body(step))

    return make


def _swallowed_refusal(kit: Kit) -> Any:
    inner = _child_with_a_thread(kit).nodes["step"].runnable

    async def step(state: State) -> State:
        try:
            return inner.invoke(state) if kit.is_sync else await inner.ainvoke(state)  # type: ignore[no-any-return]
        except Exception:  # noqa: BLE001 - what a careless body does
            return {"lines": ["swallowed"]}

    return _one_node(kit.body(step))


def _swallowed_tool_interrupt(kit: Kit) -> Any:
    async def step(state: State) -> State:
        try:
            return {"lines": [await kit.call(kit.ask, {"q": "1"})]}
        except Exception:  # noqa: BLE001 - what a careless body does
            return {"lines": ["swallowed"]}

    return _one_node(kit.body(step))


def _interrupt_in_an_activity(kit: Kit) -> Any:
    async def asks() -> Any:
        return interrupt("from an activity?")

    activity = kit.app.activity(idempotent=True)(kit.body(asks))

    async def step(state: State) -> State:
        return {"lines": [activity() if kit.is_sync else await activity()]}

    return _one_node(kit.body(step))


def _task_with_retries(kit: Kit) -> Any:
    async def fails() -> None:
        raise ConnectionError("down")

    activity = kit.app.activity(idempotent=True)(kit.body(fails))

    if kit.is_sync:

        @task(retry_policy=RetryPolicy(initial_interval=0.001, jitter=False))
        def work() -> Any:
            return activity()

        @entrypoint()
        def workflow(given: Any) -> Any:
            return work().result()

        return workflow

    @task(retry_policy=RetryPolicy(initial_interval=0.001, jitter=False))
    async def work_async() -> Any:
        return await activity()

    @entrypoint()
    async def workflow_async(given: Any) -> Any:
        return await work_async()

    return workflow_async


def _placeholder(kit: Kit) -> Any:
    """Two asking calls and one of a durable tool that this ToolNode does not have: its wrapper is never reached."""
    model = kit.model(calls("ask", "ask_twice", "plain"), AIMessage("done"))

    async def llm(state: Any) -> Any:
        return {"messages": [await kit.call(model, state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("llm", kit.body(llm))
    graph.add_node("tools", ToolNode([kit.ask, kit.ask_twice]))
    graph.add_edge(START, "llm")
    graph.add_conditional_edges("llm", tools_condition)
    graph.add_edge("tools", "llm")
    return graph


RUNNING: dict[str, tuple[Callable[[Kit], Any], str, tuple[Colour, ...]]] = {
    "children called at once, with a question inside": (_concurrent_children, "use app.gather or Send", ("async",)),
    "a child with a thread of its own": (_child_with_a_thread, "its own thread_id", ("async", "sync")),
    "a child with a thread of its own that only asks": (_asking_child_with_a_thread, "its own thread_id", ("async", "sync")),
    "a hidden child with checkpointer=True": (_called_child(True), "checkpointer=True", ("async", "sync")),
    "a hidden child with checkpointer=False": (_called_child(False), "checkpointer=False", ("async", "sync")),
    "a refusal that the body swallows": (_swallowed_refusal, "its own thread_id", ("async", "sync")),
    "a tool's interrupt that the body swallows": (_swallowed_tool_interrupt, "swallowed", ("async", "sync")),
    "an interrupt in an activity": (_interrupt_in_an_activity, "call interrupt\\(\\) in the node or in a tool", ("async", "sync")),
    "a task with a retry policy": (_task_with_retries, "retry policy", ("async", "sync")),
    "a call that never reaches its wrapper": (_placeholder, "use app.tool_node", ("async", "sync")),
}
_ROWS = [(what, colour) for what, (_, _, colours) in RUNNING.items() for colour in colours]


@pytest.mark.parametrize(("what", "colour"), _ROWS)
def test_what_shows_only_while_it_runs_ends_the_run_with_a_refusal(bench: Bench, what: str, colour: Colour) -> None:
    """The caller gets UnsupportedGraph, and the run has failed: it never completes or suspends with something wrong."""
    make, why, _ = RUNNING[what]
    run_id = bench.new_run()
    app = bench.built(make, Ledger(), colour)
    given: Any = {"messages": [("user", "hi")]} if make is _placeholder else {"lines": []}
    with pytest.raises(UnsupportedGraph, match=why):
        bench.once(app, colour, given, run_id=run_id)
    assert bench.call(heads.get(bench.process.connection, run_id)).status is RunStatus.FAILED


def test_a_placeholder_never_reaches_a_later_node(bench: Bench) -> None:
    """The refusal comes before the next step's nodes: no model sees a message that stands in for a suspended call."""
    ledger = Ledger()
    app = bench.built(_placeholder, ledger, "async")
    with pytest.raises(UnsupportedGraph, match=r"app\.tool_node"):
        bench.once(app, "async", {"messages": [("user", "hi")]}, run_id=bench.new_run())
    assert sum(ledger.of("model").values()) == 1


def test_a_synchronous_durable_call_on_an_event_loop_says_what_to_do(bench: Bench) -> None:
    """A tool that is invoked, not awaited, in an async node cannot wait for the engine: it is told so, and nothing hangs."""

    def make(kit: Kit) -> Any:
        async def step(state: State) -> State:
            return {"lines": [kit.plain.invoke({"q": "1"})]}

        return _one_node(step)

    app = bench.built(make, Ledger(), "async")
    with pytest.raises(ConfigurationError, match="await its async form"):
        bench.once(app, "async", {"lines": []}, run_id=bench.new_run())


def test_an_effect_in_a_raw_thread_is_outside_the_run(bench: Bench) -> None:
    """A thread without the graph's context has no place in it: the effect runs as outside any run, and nothing is recorded for it."""

    def make(kit: Kit) -> Any:
        async def step(state: State) -> State:
            loop = asyncio.get_running_loop()
            said = await loop.run_in_executor(None, lambda: asyncio.run(_awaited(kit.act("raw"))))
            return {"lines": [said]}

        return _one_node(step)

    told = bench.complete(make, {"lines": []}, "async", Ledger())
    assert told.state == {"lines": ["e(raw)"]}
    assert told.positions == []


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def test_errors_name_the_run(bench: Bench) -> None:
    """A refusal at run time says which run it ended."""
    run_id = bench.new_run()
    app = bench.built(_child_with_a_thread, Ledger(), "async")
    with pytest.raises(DurableError) as raised:
        bench.once(app, "async", {"lines": []}, run_id=run_id)
    assert raised.value.run_id == run_id
    assert run_id in str(raised.value)
