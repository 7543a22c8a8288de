"""Interrupts that user code swallows: `interrupt()` raises, and a broad `except` around it lets the body go on as if somebody had answered.

LangGraph cannot tell, and would finish such a node. Here its run is refused, at the end of the body, before anything that follows it runs. Graphs
that a body makes and calls itself are not reached by this.
"""

from __future__ import annotations

from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.constants import START
from langgraph.pregel import Pregel

from mongo_durable.langgraph.scope import current_root, current_session
from mongo_durable.langgraph.seams import has_unanswered_interrupt

Graph = Pregel[Any, Any, Any, Any]


def check_answered(config: RunnableConfig) -> None:
    """The body that ends in this configuration has got an answer to every interrupt that it called.

    Raises:
        DurableSignal: It has not; the run is refused.
    """
    if current_session() is not None and has_unanswered_interrupt(config):
        node = config.get("metadata", {}).get("langgraph_node")
        raise current_root().refuse("an interrupt was swallowed by user code (an `except Exception` around it): let it pass", node)


class _CheckAnswered(Runnable[Any, Any]):
    """Passes on what a node has returned, once it is known that no question of it was swallowed."""

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        check_answered(config or {})
        return input

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return self.invoke(input, config)


def with_answers_checked(graph: Graph) -> Graph:
    """A copy of `graph`, and of the compiled graphs that are its nodes, whose nodes cannot swallow interrupts."""
    # After the node's own writers, because conditional edges are among them, and may ask as well.
    nodes = {
        name: node.copy({"bound": with_answers_checked(node.bound)})
        if isinstance(node.bound, Pregel)
        else node
        if name == START
        else node.copy({"writers": [*node.writers, _CheckAnswered()]})
        for name, node in graph.nodes.items()
    }
    return graph.copy({"nodes": nodes})
