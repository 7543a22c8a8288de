"""Durable tools: a wrapped tool's call is one activity; its body runs once, isolated, and may interrupt any number of times."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, StructuredTool, Tool
from langgraph.config import get_config
from langgraph.errors import GraphBubbleUp, GraphInterrupt
from pydantic import BaseModel, ConfigDict

from mongo_durable.errors import NotJsonSafe
from mongo_durable.langgraph.codec import Codec
from mongo_durable.langgraph.effects import (
    Effect,
    Policy,
    check_before_body,
    check_before_body_async,
    checked_in_thread,
    run_effect,
    run_effect_async,
    start_effect,
)
from mongo_durable.langgraph.isolation import isolated, isolated_async
from mongo_durable.langgraph.messages import meaning
from mongo_durable.langgraph.scope import Scope, Session, current_session, here
from mongo_durable.langgraph.scratch import PLACEHOLDER
from mongo_durable.langgraph.seams import PULL, current_task_path, parse_tool_input
from mongo_durable.protocol.events import ActivityKind

one_call_at_a_time: contextvars.ContextVar[bool] = contextvars.ContextVar("mongo_durable_one_call", default=False)
"""Set inside `app.tool_node`, which runs each call by itself and combines their interrupts."""


class WrappedTool(BaseTool):
    """A tool that stands for another one: whoever asks it how it is called hears of the tool inside."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    inner: BaseTool

    @property
    def func(self) -> Any:
        """The wrapped function: ToolNode looks at its signature for injected arguments."""
        return getattr(self.inner, "func", None)

    @property
    def coroutine(self) -> Any:
        """The wrapped coroutine function."""
        return getattr(self.inner, "coroutine", None)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner._run(*args, **kwargs)

    async def _arun(self, *args: Any, **kwargs: Any) -> Any:
        return await self.inner._arun(*args, **kwargs)


class DurableTool(WrappedTool):
    """A tool whose calls are recorded once and never executed again. Outside a durable run it behaves like the tool it wraps."""

    codec: Any
    policy: Policy
    is_wrapped: Callable[[str], bool]
    """Whether a tool name is one of the application's durable tools."""

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        session = current_session()
        if session is None:
            return self.inner.invoke(input, config, **kwargs)
        call = _Call(self, session, input)

        def run() -> Any:
            check_before_body(call.effect)
            return self.inner.invoke(input, _passed_on(config), **kwargs)

        def body(scope: Scope) -> Any:
            return isolated(session, self.codec, scope, self.name, run)

        result: Any = None
        with call.arrival() as arrival:
            result = run_effect(call.effect, body)
        return call.leave(result, arrival.stopped)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        session = current_session()
        if session is None:
            return await self.inner.ainvoke(input, config, **kwargs)
        call = _Call(self, session, input)

        async def run() -> Any:
            await check_before_body_async(call.effect)
            return await _checked_in_thread(self.inner, call.effect).ainvoke(input, _passed_on(config), **kwargs)

        async def body(scope: Scope) -> Any:
            return await isolated_async(session, self.codec, scope, self.name, run)

        result: Any = None
        with call.arrival() as arrival:
            result = await run_effect_async(call.effect, body)
        return call.leave(result, arrival.stopped)


def _checked_in_thread(tool: BaseTool, effect: Effect) -> BaseTool:
    """The tool; if it has only a synchronous function, which LangChain will call in a thread, a copy that looks at the lease there."""
    if isinstance(tool, StructuredTool | Tool) and tool.coroutine is None and tool.func is not None:
        return tool.model_copy(update={"func": checked_in_thread(effect, tool.func)})
    return tool


def shown_as(tool: BaseTool) -> dict[str, Any]:
    """What a tool that stands for `tool` has from it: all that models and agents see."""
    return {
        "name": tool.name,
        "description": tool.description,
        "args_schema": tool.args_schema,
        "return_direct": tool.return_direct,
        "response_format": tool.response_format,
        "tags": tool.tags,
        "metadata": tool.metadata,
    }


def durable_tool(tool: BaseTool, codec: Codec, policy: Policy, is_wrapped: Callable[[str], bool]) -> DurableTool:
    """Wrap a tool."""
    return DurableTool(**shown_as(tool), inner=tool, codec=codec, policy=policy, is_wrapped=is_wrapped)


@dataclass(slots=True)
class _Arrival:
    stopped: GraphInterrupt | None = None


class _Call:
    """One call of a durable tool: its effect, and its share in a task that several calls of one response run in."""

    def __init__(self, tool: DurableTool, session: Session, input: Any) -> None:
        is_tool_call = isinstance(input, dict) and input.get("type") == "tool_call"
        arguments = input["args"] if is_tool_call else input
        self._tool = tool
        self._id: str | None = input.get("id") if is_tool_call else None
        self._scope = here()
        self._batch = self._calls_of_this_task()
        if not tool.inner.handle_validation_error:
            # Arguments that do not fit are no effect: refused before anything is recorded, the same in every attempt.
            with self._failure_arrives():
                parse_tool_input(tool.inner, arguments, self._id)
        shown = _model_arguments(tool.inner, arguments)
        self.effect: Effect = start_effect(
            session,
            tool.codec,
            self._scope,
            ActivityKind.TOOL,
            tool.name,
            meaning(shown),
            tool.policy,
            shown_input=_shown(tool.codec, shown),
            tool_call_id=self._id,
            is_checked_in_body=True,
            happened=self._result_from_person,
        )

    def _result_from_person(self, result: Any) -> Any:
        if self._id is None:
            return result
        return ToolMessage(content=result if isinstance(result, str) else str(result), name=self._tool.name, tool_call_id=self._id)

    def _calls_of_this_task(self) -> int:
        """How many durable calls of this response share this task (a plain ToolNode), or 0 if each has its own."""
        if self._id is None or one_call_at_a_time.get():
            return 0
        slot = self._scope.root.tool_slot(self._scope.namespace, self._id)
        path = current_task_path(get_config())
        if slot is None or len(slot.batch) < 2 or path is None or path[0] != PULL or not self._scope.is_task_body:
            return 0
        return sum(self._tool.is_wrapped(name) for _, name in slot.batch)

    @contextmanager
    def arrival(self) -> Iterator[_Arrival]:
        """Around the effect: keeps its interrupt, and counts a call that fails as arrived."""
        arrival = _Arrival()
        with self._failure_arrives():
            try:
                yield arrival
            except GraphInterrupt as interrupt:
                arrival.stopped = interrupt

    @contextmanager
    def _failure_arrives(self) -> Iterator[None]:
        """A call that fails has arrived too; if it is its task's last, it raises the others' interrupt: its own failure will replay."""
        try:
            yield
        except GraphBubbleUp:
            raise
        except Exception:
            if self._note_arrival(None) and self._scope.stopped is not None:
                raise self._scope.stopped from None
            raise

    def _note_arrival(self, stopped: GraphInterrupt | None) -> bool:
        """Count this call as arrived; True if it was the task's last."""
        scope = self._scope
        with scope.lock:
            scope.arrived += 1
            scope.stopped = scope.stopped or stopped
            return scope.arrived == self._batch

    def leave(self, result: Any, stopped: GraphInterrupt | None) -> Any:
        """The call's result. Of several calls in one task, an interrupted one returns a placeholder, and the one that arrives last raises for all.

        ToolNode throws the placeholders away with the exception. A barrier instead would deadlock when fewer threads than calls are there.
        """
        if not self._batch:
            if stopped is not None:
                raise stopped
            return result
        is_last = self._note_arrival(stopped)
        if is_last and self._scope.stopped is not None:
            raise self._scope.stopped
        if stopped is not None:
            return ToolMessage("", name=self._tool.name, tool_call_id=self._id, additional_kwargs={PLACEHOLDER: True})
        return result


def _model_arguments(tool: BaseTool, arguments: Any) -> Any:
    """The arguments that the model (or the caller) gave: not those that LangGraph injects (state, store, runtime)."""
    if not isinstance(arguments, dict):
        return arguments
    schema = tool.tool_call_schema
    if isinstance(schema, dict):
        known = set(schema.get("properties", {}))
    elif issubclass(schema, BaseModel):
        known = set(schema.model_fields)
    else:
        known = set(schema.__fields__)  # a schema of Pydantic 1, which LangChain still takes
    return {name: value for name, value in arguments.items() if name in known}


def _shown(codec: Codec, arguments: Any) -> Any:
    """What the history shows of a call: its arguments as they are, or what they mean where they hold something that cannot be stored."""
    try:
        return codec.encode(arguments)
    except NotJsonSafe:
        return meaning(arguments)


def _passed_on(config: RunnableConfig | None) -> RunnableConfig:
    # The body's own configuration is ambient: the caller's would carry checkpoint coordinates of the outer graph.
    return {"tags": config["tags"]} if config and config.get("tags") else {}
