"""Isolated bodies: a tool's body, or one branch of a `gather`, as the only node of a graph of its own.

All tools of one LangGraph task share one native interrupt id, and LangGraph hands answers to them by arrival order. So a wrapped tool's body runs
as a one-node graph on its own scratch, with the same driver loop inside: at rest, interrupts whose frontier this replay has passed get their
answers by native id, and the body goes on. What stays unanswered is registered under its position, and one marker interrupt goes up. Several
interrupts in sequence, child graphs and agents inside the tool get namespaces of their own.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.config import get_config, get_stream_writer
from langgraph.graph import START, StateGraph
from langgraph.runtime import get_runtime
from langgraph.types import Command

from mongo_durable.engine.attempt import Pending
from mongo_durable.errors import DurableError
from mongo_durable.langgraph.codec import Codec
from mongo_durable.langgraph.control import DurableSignal, is_marker, marker
from mongo_durable.langgraph.questions import delivered, native_interrupts, question_entry
from mongo_durable.langgraph.scope import ROOT_MARK_KEY, Root, Scope, Session, enter_root
from mongo_durable.langgraph.swallowed import check_answered


class _State(TypedDict, total=False):
    is_done: bool


_body: contextvars.ContextVar[Callable[[], Any]] = contextvars.ContextVar("mongo_durable_isolated_body")


def _sync_node(_: _State, config: RunnableConfig) -> _State:
    _body.get()()
    check_answered(config)
    return {"is_done": True}


async def _async_node(_: _State, config: RunnableConfig) -> _State:
    await _body.get()()
    check_answered(config)
    return {"is_done": True}


BODY_SEGMENT = "body:1"
"""The path of what starts in an isolated body, below its activity."""


def _one_node_graph(node: Any) -> Any:
    graph = StateGraph(_State)
    graph.add_node("body", node)
    graph.add_edge(START, "body")
    return graph.compile()


_SYNC_GRAPH = _one_node_graph(_sync_node)
_ASYNC_GRAPH = _one_node_graph(_async_node)


class _Isolation:
    """What both colours share."""

    def __init__(self, session: Session, codec: Codec, scope: Scope, owner: str | None) -> None:
        self._session = session
        self._codec = codec
        self._scope = scope
        self.root = Root(session.attempt, scope.path, scope.step, owner, session.root.placed)
        self.runtime = get_runtime()
        self.write = get_stream_writer()
        outer = get_config()
        self._answered: frozenset[str] = frozenset()
        configurable = {
            name: value for name, value in outer["configurable"].items() if not name.startswith("__") and not name.startswith("checkpoint")
        }
        # An explicit thread_id drops the ambient checkpoint coordinates: the body's graph is a root of its own.
        configurable |= {"thread_id": configurable.get("thread_id", "isolated"), ROOT_MARK_KEY: self.root.mark}
        self.config: RunnableConfig = {"configurable": configurable, "callbacks": outer.get("callbacks")}
        if "max_concurrency" in outer:
            self.config["max_concurrency"] = outer["max_concurrency"]
        self.results: list[Any] = []

    def graph(self, template: Any) -> Any:
        return template.copy({"checkpointer": self.root.saver, "store": self.runtime.store})

    def resume(self, snapshot: Any) -> Command[Any] | None:
        """How the body goes on after a rest, or None if it does not."""
        attempt = self._session.attempt
        try:
            attempt.check()
        except DurableError as error:
            raise DurableSignal(error) from None
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
        given: Mapping[str, Any] | Command[Any] | None = {"is_done": False}
        while given is not None:
            async for chunk in graph.astream(given, isolation.config, stream_mode="custom", context=isolation.runtime.context, durability="sync"):
                isolation.write(chunk)
            given = isolation.resume(await graph.aget_state(isolation.config, subgraphs=True))

    # A task of its own, so that the body's context variables do not leak into its caller.

    await asyncio.create_task(drive())
    return isolation.finish()


def isolated(session: Session, codec: Codec, scope: Scope, owner: str | None, body: Callable[[], Any]) -> Any:
    """The same for a graph that runs in threads."""
    isolation = _Isolation(session, codec, scope, owner)

    def drive() -> None:
        enter_root(isolation.root)
        _body.set(lambda: isolation.results.append(body()))
        graph = isolation.graph(_SYNC_GRAPH)
        given: Mapping[str, Any] | Command[Any] | None = {"is_done": False}
        while given is not None:
            if isolation.config.get("max_concurrency") == 1:
                # LangGraph's sync custom stream with max_concurrency=1 hangs: its waiter takes the only worker (seen on 1.2.24).
                graph.invoke(given, isolation.config, context=isolation.runtime.context, durability="sync")
            else:
                for chunk in graph.stream(given, isolation.config, stream_mode="custom", context=isolation.runtime.context, durability="sync"):
                    isolation.write(chunk)
            given = isolation.resume(graph.get_state(isolation.config, subgraphs=True))

    contextvars.copy_context().run(drive)
    return isolation.finish()
