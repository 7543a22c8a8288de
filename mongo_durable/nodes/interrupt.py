"""Named interrupts: the marker, the node that asks, and whether a marker is still meant.

Independent of `elicitation`, on purpose: see the package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypedDict

from langchain_core.messages import AIMessage, ToolMessage
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from mongo_durable.errors import ConfigurationError
from mongo_durable.langgraph.clock import recorded_now, step_time
from mongo_durable.langgraph.draws import current_runs, draw_id
from mongo_durable.langgraph.questions import ask, json_schema
from mongo_durable.protocol.frontier import UNANSWERED

PENDING = "_interrupt_pending"
RESPONSE = "_interrupt_response"

INTERRUPT_ACK_SENTINEL = "__mongo_durable_interrupt_ack__"
"""Key in what `Command(resume=…)` carries where plain LangGraph would misread the answer itself: it takes `{}` for nothing to resume with, and asks
for ever. See `resume_with`. The node takes it out again; nothing else sees it."""


class InterruptState(TypedDict, total=False):
    """The keys that this path needs in a graph's state."""

    _interrupt_pending: dict[str, Any] | None
    _interrupt_response: dict[str, Any] | None


def build_interrupt_marker(
    *,
    name: str,
    payload: Mapping[str, Any] | BaseModel | None = None,
    interrupt_id: str | None = None,
    tool_call_id: str | None = None,
    run_id: str | None = None,
    response_schema: Any = None,
    expires_in: timedelta | None = None,
    default: Any = UNANSWERED,
) -> dict[str, Any]:
    """The state update that a tool or node returns to have a named interrupt asked.

    Args:
        name: What the question is listed under.
        payload: The question, JSON-safe; a Pydantic model is dumped.
        interrupt_id: For whoever correlates question and answer. None makes one: inside a durable run it derives from the place of the call (in the
            body of a tool or activity it is that activity's id), so it is the same in every attempt; elsewhere it is random.
        tool_call_id: Of the tool call that asks: the answer becomes its ToolMessage. None leaves the answer in `_interrupt_response`.
        run_id: The run that the marker belongs to. None takes the durable run; outside any, the marker belongs to none and is of every run.
        response_schema, expires_in, default: As for `App.interrupt`; they act in durable runs alone.

    Returns:
        `{"_interrupt_pending": {"name", "interrupt_id", "payload", "tool_call_id", "run_id", "minted_at"}}`, and in it "response_schema" (JSON
        Schema), "expires_in" (seconds) and "default" where they are given. `minted_at` is in seconds since 1970; inside a durable run it is when the
        running tool or activity, or else the step, began: a recorded time, the same in every attempt.
    """
    marker = {
        "name": name,
        "interrupt_id": interrupt_id or draw_id(),
        "payload": {} if payload is None else to_jsonable_python(payload),
        "tool_call_id": tool_call_id,
        "run_id": run_id or next(iter(current_runs()), None),
        "minted_at": recorded_now(),
    }
    if response_schema is not None:
        marker["response_schema"] = json_schema(response_schema)
    if expires_in is not None:
        marker["expires_in"] = expires_in.total_seconds()
    if default is not UNANSWERED:
        marker["default"] = to_jsonable_python(default)
    return {PENDING: marker}


def interrupt_pending_is_current(state: Any, ttl_seconds: float | None = None) -> bool:
    """Whether the state has an `_interrupt_pending` that is still to be asked, and not one that a run before has left behind.

    A marker with a `run_id` is current if that is the state's `run_id` or the durable run's id; one without is of every run. With `ttl_seconds`, one
    that is older is stale, whatever its run. Its age is counted to the start of the running step: a replay decides as the first attempt did, and a
    person who answers late is still heard.
    """
    pending = _field(state, PENDING)
    if not pending:
        return False
    if not isinstance(pending, Mapping):
        return True
    run_id = pending.get("run_id")
    if run_id is not None and run_id not in (_field(state, "run_id"), *current_runs()):
        return False
    minted_at = pending.get("minted_at")
    return ttl_seconds is None or not isinstance(minted_at, int | float) or step_time() - minted_at <= ttl_seconds


def create_interrupt_node(ttl_seconds: float | None = None) -> Callable[[Any], dict[str, Any]]:
    """A node that asks what `_interrupt_pending` says, under `invoke` and `ainvoke`.

    The question is `{"type": "interrupt", "name", "interrupt_id", "payload", "tool_call_id"}`. Any JSON value is an answer, None too; a Pydantic
    model is dumped. It goes into `messages` as the ToolMessage `interrupt:<name>` of the tool call, as JSON (in place of one that the call has got
    already, because LangGraph's ToolNode wants one); or, without a tool call, into `_interrupt_response` as `{"name", "interrupt_id", "response"}`.
    The marker is cleared. A stale marker is cleared and not asked.

    Args:
        ttl_seconds: As for `interrupt_pending_is_current`.
    """

    def interrupt_node(state: Any) -> dict[str, Any]:
        if not interrupt_pending_is_current(state, ttl_seconds):
            return {PENDING: None}
        marker = _field(state, PENDING)
        if not isinstance(marker, Mapping) or "name" not in marker:
            raise ConfigurationError(f"{PENDING} in the state is no marker: make it with build_interrupt_marker")
        name, tool_call_id = marker["name"], marker.get("tool_call_id")
        question = {
            "type": "interrupt",
            "name": name,
            "interrupt_id": marker.get("interrupt_id"),
            "payload": marker.get("payload", {}),
            "tool_call_id": tool_call_id,
        }
        expires_in = timedelta(seconds=marker["expires_in"]) if "expires_in" in marker else None
        answer = ask(name, question, marker.get("response_schema"), expires_in, marker.get("default", UNANSWERED))
        response = to_jsonable_python(_without_sentinel(answer), fallback=str)
        if not tool_call_id:
            return {PENDING: None, RESPONSE: {"name": name, "interrupt_id": marker.get("interrupt_id"), "response": response}}
        reply = ToolMessage(
            json.dumps(response, ensure_ascii=False), name=f"interrupt:{name}", tool_call_id=tool_call_id, id=_replaced(state, tool_call_id)
        )
        return {PENDING: None, "messages": [reply]}

    return interrupt_node


def _without_sentinel(answer: Any) -> Any:
    if not isinstance(answer, Mapping) or INTERRUPT_ACK_SENTINEL not in answer:
        return answer
    match answer[INTERRUPT_ACK_SENTINEL]:
        case {"answer": carried} if len(answer) == 1:
            return carried
        case _:
            return {key: value for key, value in answer.items() if key != INTERRUPT_ACK_SENTINEL}


def _replaced(state: Any, tool_call_id: str) -> str | None:
    """Id of the ToolMessage that this call of the last response has got already: a model's call has one result."""
    for message in reversed(_field(state, "messages") or []):
        if isinstance(message, AIMessage):
            break
        if isinstance(message, ToolMessage) and message.tool_call_id == tool_call_id:
            return message.id
    return None


def _field(state: Any, key: str) -> Any:
    return state.get(key) if isinstance(state, Mapping) else getattr(state, key, None)
