"""Isolated bodies: a tool's body, or one branch of a `gather`, as the only node of a graph of its own.

All tools of one LangGraph task share one native interrupt id, and LangGraph hands answers to them by arrival order. So a wrapped tool's body runs
as a one-node graph on its own scratch, with the same driver loop inside: at rest, interrupts whose frontier this replay has passed get their
answers by native id, and the body goes on. What stays unanswered is registered under its position, and one marker interrupt goes up. Several
interrupts in sequence, child graphs and agents inside the tool get namespaces of their own.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.config import get_config
from langgraph.graph import START, StateGraph
from langgraph.runtime import get_runtime
from langgraph.types import Command, Interrupt

from mongo_durable.engine.attempt import Pending
from mongo_durable.errors import DurableError
from mongo_durable.langgraph.codec import Codec
from mongo_durable.langgraph.control import DurableSignal, is_marker, marker
from mongo_durable.langgraph.questions import delivered, native_interrupts, question_entry
from mongo_durable.langgraph.scope import ROOT_MARK_KEY, Root, Scope, Session, enter_root
from mongo_durable.langgraph.seams import RESUMING_KEY, RUNTIME_KEY, Writing
from mongo_durable.langgraph.swallowed import check_answered


class _State(TypedDict, total=False):
    is_done: bool


_DONE: _State = {"is_done": True}
_body: contextvars.ContextVar[Callable[[], Any]] = contextvars.ContextVar("mongo_durable_isolated_body")


def _sync_node(_: _State, config: RunnableConfig) -> _State:
    _body.get()()
    check_answered(config)
    return _DONE


async def _async_node(_: _State, config: RunnableConfig) -> _State:
    await _body.get()()
    check_answered(config)
    return _DONE


BODY_SEGMENT = "body:1"
"""The path of what starts in an isolated body, below its activity."""


def _one_node_graph(node: Any) -> Any:
    graph = StateGraph(_State)
    graph.add_node("body", node)
    graph.add_edge(START, "body")
    return graph.compile()


_SYNC_GRAPH = _one_node_graph(_sync_node)
_ASYNC_GRAPH = _one_node_graph(_async_node)
_TRIGGERS = tuple(_ASYNC_GRAPH.nodes["body"].triggers)


class _Isolation:
    """What both colours share."""

    def __init__(self, session: Session, codec: Codec, scope: Scope, owner: str | None) -> None:
        self._session = session
        self._codec = codec
        self._scope = scope
        self.root = Root(session.attempt, scope.path, scope.step, owner, session.root.placed)
        self.runtime = get_runtime()
        self.results: list[Any] = []
        outer = get_config()
        self._caller = contextvars.copy_context()
        self._open: list[Interrupt] = []
        self._answered: frozenset[str] = frozenset()
        configurable = {
            name: value for name, value in outer["configurable"].items() if not name.startswith("__") and not name.startswith("checkpoint")
        }
        # An explicit thread_id drops the ambient checkpoint coordinates: the body's graph is a root of its own.
        self._thread_id = str(configurable.get("thread_id", "isolated"))
        configurable |= {
            "thread_id": self._thread_id,
            ROOT_MARK_KEY: self.root.mark,
            RUNTIME_KEY: Writing(store=self.runtime.store, stream_writer=self._write),
        }
        self.config: RunnableConfig = {"configurable": configurable, "callbacks": outer.get("callbacks")}
        if "max_concurrency" in outer:
            self.config["max_concurrency"] = outer["max_concurrency"]

    def graph(self, template: Any) -> Any:
        """The body's graph, in which nothing but the body is left to run."""
        self.root.saver.begin(self._thread_id, _TRIGGERS)
        return template.copy({"checkpointer": self.root.saver})

    def options(self, given: Command[Any] | None) -> dict[str, Any]:
        """How to run it: from its beginning, or on with answers."""
        config = self.config
        if given is None:
            # To LangGraph, running without input is a resume, which child graphs and listeners would hear of.
            config = {**config, "configurable": {**config["configurable"], RESUMING_KEY: False}}
        return {"config": config, "context": self.runtime.context, "durability": "sync"}

    def _write(self, chunk: Any) -> None:
        """What the body writes to a stream, written by its caller."""
        # Each time in a context of its own: a body may write from several threads at once.
        self._caller.copy().run(self.runtime.stream_writer, chunk)

    def has_ended(self, output: Any) -> bool:
        """At rest: has the body come to its end, so that nothing pends?

        Raises:
            DurableSignal: The attempt does not go on.
        """
        try:
            self._session.attempt.check()
        except DurableError as error:
            raise DurableSignal(error) from None
        self._open = []
        return bool(output == _DONE)

    def resume(self, snapshot: Any) -> Command[Any] | None:
        """How a body that has not ended goes on after a rest, or None if it does not."""
        attempt = self._session.attempt
        self._open = native_interrupts(snapshot)
        answers = {
            each.id: delivered(self._codec, attempt.answers[self.root.native[each.id]])
            for each in self._open
            if not is_marker(each.id) and self.root.native[each.id] in attempt.answers
        }
        if repeated := self._answered & answers.keys():
            raise self.root.refuse(f"an answer did not reach its interrupt inside {'/'.join(self._scope.path)} ({len(repeated)} asked again)")
        self._answered |= answers.keys()
        return Command(resume=answers) if answers else None

    def finish(self) -> Any:
        """The body's result, or one marker for all that it still asks."""
        if not self._open:
            return self.results[-1]
        for each in self._open:
            if not is_marker(each.id):
                position = self.root.native[each.id]
                entry = question_entry(self._session.attempt.run_id, self._codec, position, self.root.asked[position], each)
                self._session.pending[position] = Pending(entry.digest, entry)
        raise marker("/".join(self._scope.path))


async def isolated_async(session: Session, codec: Codec, scope: Scope, owner: str | None, body: Callable[[], Awaitable[Any]]) -> Any:
    """Run `body` isolated, in `scope`.

    Raises:
        GraphInterrupt: It pends; its questions are registered with the session.
    """
    isolation = _Isolation(session, codec, scope, owner)

    async def run_body() -> None:
        isolation.results.append(await body())

    async def drive() -> None:
        enter_root(isolation.root)
        _body.set(run_body)
        graph = isolation.graph(_ASYNC_GRAPH)
        given: Command[Any] | None = None
        while not isolation.has_ended(await graph.ainvoke(given, **isolation.options(given))):
            given = isolation.resume(await graph.aget_state(isolation.config, subgraphs=True))
            if given is None:
                break

    # A task of its own, so that the body's context variables do not leak into its caller.
    await asyncio.create_task(drive())
    return isolation.finish()


def isolated(session: Session, codec: Codec, scope: Scope, owner: str | None, body: Callable[[], Any]) -> Any:
    """The same for a graph that runs in threads."""
    isolation = _Isolation(session, codec, scope, owner)

    def run_body() -> None:
        isolation.results.append(body())

    def drive() -> None:
        enter_root(isolation.root)
        _body.set(run_body)
        graph = isolation.graph(_SYNC_GRAPH)
        given: Command[Any] | None = None
        while not isolation.has_ended(graph.invoke(given, **isolation.options(given))):
            given = isolation.resume(graph.get_state(isolation.config, subgraphs=True))
            if given is None:
                break

    contextvars.copy_context().run(drive)
    return isolation.finish()
