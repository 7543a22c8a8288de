"""Where a sub-agent stands: `agent/1/research/2` is the second `research` that the model of the root ordered in its last response.

Two phases. When the model answers, its calls have an order; it is in the recorded response, so in the agent's state. When the tools run, one worker a
call and in any order, the first of them that gets here gives every sub-agent of the batch its ordinal, in the model's order; the others find theirs.
Ordinals go on within a root step: an agent inside another agent may delegate several times in one.

A call's place is known by its id, and where a provider has used an id twice in one response, by the worker's number among the Sends.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.messages.tool import ToolCall
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool
from langgraph.config import get_config

from mongo_durable.langgraph.deep_agents.identity import Delegated, delegated
from mongo_durable.langgraph.deep_agents.seams import EDITED_CALLS_KEY, TASK_TOOL, last_response
from mongo_durable.langgraph.scope import Root, Scope, current_place, current_session, here, inside_body
from mongo_durable.langgraph.seams import PUSH, current_task_path
from mongo_durable.langgraph.tools import WrappedTool, shown_as
from mongo_durable.protocol.identity import segment

_Place = tuple[tuple[str, ...], int]
"""Path of an agent's graph, and root step."""


class Delegation(Scope):
    """The body of one task call. The first graph that it calls is the sub-agent, and stands where the delegation stands."""

    def __init__(self, around: Scope, path: tuple[str, ...]) -> None:
        super().__init__(around.root, around.namespace, around.info, path, around.step)

    def child(self, namespace: str) -> tuple[str, ...]:
        """The path of a graph that this task call runs."""
        path = super().child(namespace)
        return self.path if path[-1] == "c1" else path


@dataclass(slots=True)
class _Ordinals:
    """Who has which ordinal in one tree of graphs.

    Attributes:
        ordered: Per place and sub-agent type, how many have been ordered.
        calls: Per place, how many tool calls its batches had before.
        batches: Per batch, the type and ordinal of each of its calls, and the number of calls before it.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    ordered: Counter[tuple[_Place, str]] = field(default_factory=Counter)
    calls: Counter[_Place] = field(default_factory=Counter)
    batches: dict[tuple[_Place, str], tuple[list[tuple[str, int] | None], int]] = field(default_factory=dict)


_ordinals: weakref.WeakKeyDictionary[Root, _Ordinals] = weakref.WeakKeyDictionary()
_creating = threading.Lock()


class DelegatingTool(WrappedTool):
    """deepagents' `task` tool, whose sub-agents know where they stand. What it does and says stays its own."""

    types: frozenset[str]
    """The sub-agents that there are. A call for another one is answered by the tool itself: the model reads what it did wrong."""

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        with self._delegated(input):
            return self.inner.invoke(input, config, **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        with self._delegated(input):
            return await self.inner.ainvoke(input, config, **kwargs)

    @contextmanager
    def _delegated(self, call: Any) -> Iterator[None]:
        named = call["args"].get("subagent_type") if isinstance(call, dict) and isinstance(call.get("args"), dict) else None
        if current_session() is None or not isinstance(named, str) or named not in self.types:
            yield
            return
        scope = here()
        state = getattr(call["args"].get("runtime"), "state", None)
        path = _path(scope, named, call, state, self.types)
        leave = inside_body(Delegation(scope, path))
        token = delegated.set(Delegated(call["id"], path, current_place()))
        try:
            yield
        finally:
            delegated.reset(token)
            leave()


def delegating_tool(task: BaseTool, types: frozenset[str]) -> DelegatingTool:
    """Wrap a `task` tool."""
    return DelegatingTool(**shown_as(task), handle_tool_error=task.handle_tool_error, inner=task, types=types)


def _path(scope: Scope, named: str, call: Mapping[str, Any], state: Any, types: frozenset[str]) -> tuple[str, ...]:
    """The path of the sub-agent that `call` runs: the first worker of a batch gives all their ordinals."""
    root = scope.root
    if not scope.is_task_body:
        raise root.refuse("a task call ran inside another effect: leave the task tool to the agent's own tool node")
    messages = state.get("messages") if isinstance(state, Mapping) else None
    response = last_response(messages)[0] if messages else None
    if response is None or messages is None:
        raise root.refuse("a task call ran without the model's response in the agent's state: the order of its sub-agents is not known")
    calls = response.tool_calls
    task_calls = [each for each in calls if each["name"] == TASK_TOOL]
    if not all(each["id"] for each in task_calls):
        raise root.refuse("the model ordered a sub-agent without a tool-call id, so its report could not be told from another's")
    if not _is_worker() and len(task_calls) > 1:
        raise root.refuse('several task calls share one tools task (jump_to="tools" in a middleware): let the model\'s calls run as they are')
    index = call_index(call["id"], messages)
    if index is None:
        raise root.refuse(f"the call of sub-agent {named!r} is not in the model's last response: its place in the order is not known")
    place = (scope.path[:-1], scope.step)
    with _creating:
        ordinals = _ordinals.setdefault(root, _Ordinals())
    # The workers of a batch differ in their index only; in a nested agent what follows is that agent's own step.
    step = scope.path[-1].partition(":")[2]
    with ordinals.lock:
        types_ordered, before = ordinals.batches.get((place, step)) or _order(ordinals, place, step, calls, state, types)
    own = types_ordered[index]
    # A person may send a call to another sub-agent as it starts, when the others have their ordinals.
    ordinal = str(own[1]) if own is not None and own[0] == named else f"e{before + index + 1}"
    return (*scope.path[:-1], segment(named), ordinal)


def _order(
    ordinals: _Ordinals, place: _Place, step: str, calls: list[ToolCall], state: Mapping[str, Any], types: frozenset[str]
) -> tuple[list[tuple[str, int] | None], int]:
    edited = state.get(EDITED_CALLS_KEY) or {}
    batch: list[tuple[str, int] | None] = []
    for call in calls:
        action = edited.get(call["id"], call)
        named = action["args"].get("subagent_type") if action["name"] == TASK_TOOL else None
        if not isinstance(named, str) or named not in types:
            batch.append(None)
            continue
        ordinals.ordered[(place, named)] += 1
        batch.append((named, ordinals.ordered[(place, named)]))
    before = ordinals.calls[place]
    ordinals.calls[place] += len(calls)
    ordinals.batches[(place, step)] = batch, before
    return batch, before


def call_index(tool_call_id: str | None, messages: list[BaseMessage]) -> int | None:
    """Which call of the model's last response the worker that runs here has; None if it cannot be known."""
    response, answered = last_response(messages)
    calls = response.tool_calls if response is not None else []
    same = [index for index, call in enumerate(calls) if call["id"] == tool_call_id]
    if len(same) < 2:
        return same[0] if same else None
    pending = [index for index, call in enumerate(calls) if call["id"] not in answered]
    path = current_task_path(get_config())
    number = path[1] if path is not None and path[0] == PUSH else None
    return pending[number] if isinstance(number, int) and number < len(pending) and pending[number] in same else None


def _is_worker() -> bool:
    path = current_task_path(get_config())
    return path is not None and path[0] == PUSH
