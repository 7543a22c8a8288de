"""Control flow that has to cross LangGraph.

A `GraphBubbleUp` is not retried, not given to error handlers or `handle_tool_errors`, lets running siblings finish and commit, and comes out of
invoke. User code can still swallow it (it is an Exception); the attempt therefore remembers every verdict and raises it again at its next call.
"""

from __future__ import annotations

from langgraph.errors import GraphBubbleUp, GraphInterrupt
from langgraph.types import Interrupt

from mongo_durable.errors import DurableError

CONTROL_FLOW: tuple[type[BaseException], ...] = (GraphBubbleUp,)

MARKER_PREFIX = "durable:"
"""Ids of native interrupts that are only markers: the interrupt itself is owned by a wrapper and known by its position."""


class DurableSignal(GraphBubbleUp):
    """Carries an error of mongo_durable through LangGraph.

    Attributes:
        error: What the driver raises at the outside.
    """

    def __init__(self, error: DurableError) -> None:
        super().__init__(str(error))
        self.error = error


def marker(name: str) -> GraphInterrupt:
    """What a wrapper raises for the interrupts that it owns."""
    return GraphInterrupt((Interrupt(value="durable", id=MARKER_PREFIX + name),))


def is_marker(native_interrupt_id: str) -> bool:
    """Whether a native interrupt is only a marker."""
    return native_interrupt_id.startswith(MARKER_PREFIX)
