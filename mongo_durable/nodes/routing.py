"""What knows both paths: where a state is to go, and which markers are left over.

A path whose marker is not there is not asked at all, so that a fault in it stays where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.messages import AIMessage

from mongo_durable.nodes import elicitation, interrupt


def interrupt_condition(state: Any, ttl_seconds: float | None = None) -> str:
    """Where a graph goes on, for `add_conditional_edges` behind the node that calls tools, or behind the model.

    Args:
        ttl_seconds: Markers that are older are stale; bind it with `functools.partial`. See `interrupt_pending_is_current`.

    Returns:
        "interrupt" if there is an interrupt to ask, else "elicitation" if there is something to ask the user, else "continue" if the last model
        response has tool calls, else "finish".
    """
    if _value(state, interrupt.PENDING) and interrupt.interrupt_pending_is_current(state, ttl_seconds):
        return "interrupt"
    if _value(state, elicitation.PENDING) and elicitation.ask_user_pending_is_current(state, ttl_seconds):
        return "elicitation"
    last = next((message for message in reversed(_value(state, "messages") or []) if isinstance(message, AIMessage)), None)
    return "continue" if last is not None and last.tool_calls else "finish"


def clear_stale_markers(state: Any, ttl_seconds: float | None = None) -> dict[str, Any]:
    """A node for the start of a graph: it clears what an abandoned run before has left, and leaves current markers alone.

    Args:
        ttl_seconds: As for `interrupt_condition`.
    """
    cleared: dict[str, Any] = {}
    if _value(state, interrupt.PENDING) and not interrupt.interrupt_pending_is_current(state, ttl_seconds):
        cleared[interrupt.PENDING] = None
    if _value(state, elicitation.PENDING) and not elicitation.ask_user_pending_is_current(state, ttl_seconds):
        cleared[elicitation.PENDING] = None
    return cleared


def _value(state: Any, key: str) -> Any:
    return state.get(key) if isinstance(state, Mapping) else getattr(state, key, None)
