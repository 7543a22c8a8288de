"""The built-in interrupt `ask_user`: the marker, the node that asks, and whether a marker is still meant.

Independent of `interrupt`, on purpose: see the package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypedDict

from langchain_core.messages import AIMessage, ToolMessage
from pydantic_core import to_jsonable_python

from mongo_durable.errors import ConfigurationError
from mongo_durable.langgraph.clock import recorded_now, step_time
from mongo_durable.langgraph.draws import current_runs, draw_id
from mongo_durable.langgraph.questions import ask, json_schema
from mongo_durable.protocol.frontier import UNANSWERED

PENDING = "_ask_user_pending"
RESPONSE = "_ask_user_response"

_NAME = "ask_user"
_ACK_SENTINEL = "__mongo_durable_interrupt_ack__"  # what `resume_with` uses; a test compares it with the other path's


class ElicitationState(TypedDict, total=False):
    """The keys that this path needs in a graph's state."""

    _ask_user_pending: dict[str, Any] | None
    _ask_user_response: dict[str, Any] | None


def build_ask_user_marker(
    *,
    question: str,
    choices: Sequence[str] | None = None,
    interrupt_id: str | None = None,
    tool_call_id: str | None = None,
    run_id: str | None = None,
    response_schema: Any = None,
    expires_in: timedelta | None = None,
    default: Any = UNANSWERED,
) -> dict[str, Any]:
    """The state update that a tool or node returns to have the user asked something.

    Args:
        question: In words.
        choices: Answers to offer; other ones are accepted too, unless `response_schema={"enum": …}` says otherwise.
        interrupt_id, tool_call_id, run_id: As for `build_interrupt_marker`; without a tool call the answer goes into `_ask_user_response`.
        response_schema, expires_in, default: As for `App.interrupt`; they act in durable runs alone.

    Returns:
        `{"_ask_user_pending": {"interrupt_id", "question", "choices", "tool_call_id", "run_id", "minted_at"}}`, and what else was given, as in
        `build_interrupt_marker`.
    """
    pending: dict[str, Any] = {
        "interrupt_id": interrupt_id or draw_id(),
        "question": question,
        "choices": None if choices is None else list(choices),
        "tool_call_id": tool_call_id,
        "run_id": run_id or next(iter(current_runs()), None),
        "minted_at": recorded_now(),
    }
    if response_schema is not None:
        pending["response_schema"] = json_schema(response_schema)
    if expires_in is not None:
        pending["expires_in"] = expires_in.total_seconds()
    if default is not UNANSWERED:
        pending["default"] = to_jsonable_python(default)
    return {PENDING: pending}


def ask_user_pending_is_current(state: Any, ttl_seconds: float | None = None) -> bool:
    """Whether the state has an `_ask_user_pending` that is still to be asked; by the rules of `interrupt_pending_is_current`."""
    pending = _value(state, PENDING)
    if not pending:
        return False
    if not isinstance(pending, Mapping):
        return True
    minted_in = pending.get("run_id")
    if minted_in is not None and minted_in != _value(state, "run_id") and minted_in not in current_runs():
        return False
    minted_at = pending.get("minted_at")
    if ttl_seconds is None or not isinstance(minted_at, int | float):
        return True
    return step_time() - minted_at <= ttl_seconds


def create_elicitation_node(ttl_seconds: float | None = None) -> Callable[[Any], dict[str, Any]]:
    """A node that asks what `_ask_user_pending` says, under `invoke` and `ainvoke`.

    The question is `{"type": "ask_user", "interrupt_id", "question", "choices", "tool_call_id"}`. Any JSON value is an answer, None too; a Pydantic
    model is dumped. It goes into `messages` as the ToolMessage `ask_user` of the tool call (in place of one that the call has got already): a text as
    it is, anything else as JSON; or, without a tool call, into `_ask_user_response` as `{"question", "interrupt_id", "response"}`. The marker is
    cleared. A stale marker is cleared and not asked.

    Args:
        ttl_seconds: As for `ask_user_pending_is_current`.
    """

    def elicitation_node(state: Any) -> dict[str, Any]:
        if not ask_user_pending_is_current(state, ttl_seconds):
            return {PENDING: None}
        pending = _value(state, PENDING)
        if not isinstance(pending, Mapping) or "question" not in pending:
            raise ConfigurationError(f"{PENDING} in the state is no marker: make it with build_ask_user_marker")
        call = pending.get("tool_call_id")
        shown = {
            "type": _NAME,
            "interrupt_id": pending.get("interrupt_id"),
            "question": pending["question"],
            "choices": pending.get("choices"),
            "tool_call_id": call,
        }
        waits = timedelta(seconds=pending["expires_in"]) if "expires_in" in pending else None
        said = _plain(ask(_NAME, shown, pending.get("response_schema"), waits, pending.get("default", UNANSWERED)))
        if not call:
            response = {"question": pending["question"], "interrupt_id": pending.get("interrupt_id"), "response": said}
            return {PENDING: None, RESPONSE: response}
        content = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)
        return {PENDING: None, "messages": [ToolMessage(content, name=_NAME, tool_call_id=call, id=_result_so_far(state, call))]}

    return elicitation_node


def _plain(answer: Any) -> Any:
    """The JSON value of an answer, out of what `resume_with` put it in."""
    if isinstance(answer, Mapping) and _ACK_SENTINEL in answer:
        carried = answer[_ACK_SENTINEL]
        if len(answer) == 1 and isinstance(carried, Mapping) and "answer" in carried:
            answer = carried["answer"]
        else:
            answer = {key: value for key, value in answer.items() if key != _ACK_SENTINEL}
    return to_jsonable_python(answer, fallback=str)


def _result_so_far(state: Any, call: str) -> str | None:
    """Id of the ToolMessage that this call of the last response has got already: a model's call has one result."""
    for message in reversed(_value(state, "messages") or []):
        if isinstance(message, AIMessage):
            break
        if isinstance(message, ToolMessage) and message.tool_call_id == call:
            return message.id
    return None


def _value(state: Any, key: str) -> Any:
    return state.get(key) if isinstance(state, Mapping) else getattr(state, key, None)
