"""The same small graphs durably and in plain LangGraph, in both colours, for a person who answers one question after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from langchain_core.messages import AIMessage, AnyMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph, add_messages
from langgraph.types import Command, Interrupt

from mongo_durable import App
from mongo_durable.nodes import (
    ElicitationState,
    InterruptState,
    build_ask_user_marker,
    build_interrupt_marker,
    create_elicitation_node,
    create_interrupt_node,
    interrupt_condition,
    resume_with,
)
from tests.langgraph.bench import Bench


class State(InterruptState, ElicitationState, total=False):
    """What graphs with both nodes hold. `mint` is what the first node is to leave in the state."""

    messages: Annotated[list[AnyMessage], add_messages]
    mint: Any
    run_id: str | None


@dataclass(frozen=True, slots=True)
class Path:
    """One of the two ways to ask, told apart by what a user of it sees."""

    pending: str
    response: str
    reply: str
    build: Callable[..., dict[str, Any]]
    node: Callable[..., Any]
    target: str


INTERRUPT = Path(
    "_interrupt_pending",
    "_interrupt_response",
    "interrupt:approval",
    functools.partial(build_interrupt_marker, name="approval", payload={"amount": 7}),
    create_interrupt_node,
    "interrupt",
)
ASK_USER = Path(
    "_ask_user_pending",
    "_ask_user_response",
    "ask_user",
    functools.partial(build_ask_user_marker, question="Which one?", choices=["this", "that"]),
    create_elicitation_node,
    "elicitation",
)


Make = Callable[[App | None], StateGraph[Any]]


class Stage:
    """Plays graphs in one mode. Each call in the durable mode has an app of its own, as in another process."""

    def __init__(self, bench: Bench, *, is_durable: bool, is_sync: bool) -> None:
        self.bench = bench
        self.is_durable = is_durable
        self.is_sync = is_sync
        self._saver = InMemorySaver()

    def play(self, make: Make, given: Any, thread: str, *, run: str | None = None, **options: Any) -> Any:
        """Call a graph on a thread, to its end or to a question."""
        config: Any = {"configurable": {"thread_id": thread}}
        if self.is_durable:
            app = self.bench.app("nodes", **options)
            graph = make(app)
            app.entrypoint(lambda: graph)
            return self.bench.once(app, "sync" if self.is_sync else "async", given, config, run_id=run)
        compiled = make(None).compile(checkpointer=self._saver)
        if self.is_sync:
            return compiled.invoke(given, config)

        async def call() -> Any:
            return await compiled.ainvoke(given, config)

        return self.bench.call(call())

    def thread(self) -> str:
        """A thread that nobody has."""
        return self.bench.new_run()

    def answer(self, make: Make, out: Any, answer: Any, thread: str, **options: Any) -> Any:
        """Give any answer to the one question of a result, as a user of this mode does."""
        [question] = asked(out)
        resume = {question.id: answer} if self.is_durable else resume_with(answer)
        return self.play(make, Command(resume=resume), thread, **options)


def asked(out: Any) -> list[Interrupt]:
    """The questions of a result."""
    return list(out.get("__interrupt__", ()))


def two_paths(mint: Callable[[State], dict[str, Any]] | None = None, *, ttl_seconds: float | None = None, target: str | None = None) -> Make:
    """A graph whose first node mints, and which then asks what there is to ask.

    Args:
        mint: What the first node returns; None returns the `mint` of the state.
        target: Where to go whatever the router says.
    """

    def make(_: App | None) -> StateGraph[Any]:
        def first(state: State) -> Any:
            return mint(state) if mint is not None else state.get("mint") or {}

        router = functools.partial(interrupt_condition, ttl_seconds=ttl_seconds) if target is None else lambda _: target
        graph = StateGraph(State)
        graph.add_node("first", first)
        graph.add_node("interrupt", create_interrupt_node(ttl_seconds))
        graph.add_node("elicitation", create_elicitation_node(ttl_seconds))
        graph.add_edge(START, "first")
        ends = {"interrupt": "interrupt", "elicitation": "elicitation", "continue": END, "finish": END}
        graph.add_conditional_edges("first", router, ends)
        return graph

    return make


def a_call(call_id: str = "call-1", name: str = "buy") -> AIMessage:
    """A model response that calls a tool."""
    return AIMessage("", tool_calls=[{"name": name, "args": {}, "id": call_id}])
