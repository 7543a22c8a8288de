"""Interrupt nodes: a tool or node leaves a marker in the state, and a node of its own asks, for any LangGraph graph, durable or not.

    model ──> tools ──interrupt_condition──┬─ "interrupt" ────> create_interrupt_node() ───┐
      ^                                    ├─ "elicitation" ──> create_elicitation_node() ─┤
      │                                    ├─ "continue" ──────────────────────────────────┤
      │                                    └─ "finish" ──> END                             │
      └────────────────────────────────────────────────────────────────────────────────────┘

Who wants a question asked returns `build_interrupt_marker(...)` or `build_ask_user_marker(...)` as a state update. The two paths, `interrupt` and
`elicitation`, import nothing of each other and do the same things twice: a fault in one cannot reach the other. Only `routing` and `resuming` know
both.

Keys of the state, each an ordinary channel that keeps its last value (`InterruptState` and `ElicitationState` declare them):

    _interrupt_pending, _ask_user_pending      the marker, or None when nothing is to be asked; see the builders
    _interrupt_response, _ask_user_response    the answer to a marker without a tool call; see the nodes
    messages                                   where the answer to a marker of a tool call goes, as that call's ToolMessage
    run_id                                     optional: what the markers' `run_id` is compared with, beside the durable run's own

A step may leave one marker of each kind. Several tools of one model response that ask at once call `App.interrupt` in their bodies instead.
"""

from __future__ import annotations

from mongo_durable.nodes.elicitation import ElicitationState, ask_user_pending_is_current, build_ask_user_marker, create_elicitation_node
from mongo_durable.nodes.interrupt import (
    INTERRUPT_ACK_SENTINEL,
    InterruptState,
    build_interrupt_marker,
    create_interrupt_node,
    interrupt_pending_is_current,
)
from mongo_durable.nodes.resuming import resume_with
from mongo_durable.nodes.routing import clear_stale_markers, interrupt_condition

__all__ = [
    "INTERRUPT_ACK_SENTINEL",
    "ElicitationState",
    "InterruptState",
    "ask_user_pending_is_current",
    "build_ask_user_marker",
    "build_interrupt_marker",
    "clear_stale_markers",
    "create_elicitation_node",
    "create_interrupt_node",
    "interrupt_condition",
    "interrupt_pending_is_current",
    "resume_with",
]
