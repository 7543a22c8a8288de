"""Shapes that cannot be made durable, refused by name before anything runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from langgraph.pregel import Pregel
from langgraph.types import Command

from mongo_durable.errors import UnsupportedGraph
from mongo_durable.langgraph.checkpointer import DurableCheckpointer

_OPTIONS_OF_THE_DRIVER = ("interrupt_before", "interrupt_after", "durability", "checkpoint_during", "control")


def check_graph(graph: Any) -> Pregel[Any, Any, Any, Any]:
    """Refuse a graph with a shape that would run wrongly.

    Raises:
        UnsupportedGraph: Names the node and what to do instead.
    """
    if not isinstance(graph, Pregel):
        bound = getattr(graph, "kwargs", None)
        hint = ": put the options into the call instead of binding them" if bound else ""
        raise UnsupportedGraph(f"the entrypoint has to return a StateGraph or a compiled graph, not {type(graph).__name__}{hint}")
    _check_pregel(graph, "the graph", is_root=True)
    _check_children(graph)
    return graph


def check_child(graph: Pregel[Any, Any, Any, Any], name: str) -> None:
    """Refuse a compiled sub-agent with a shape that would run wrongly.

    Raises:
        UnsupportedGraph: Names it, or the node in it, and what to do instead.
    """
    _check_pregel(graph, f"sub-agent {name!r}", is_root=False, node=name)
    _check_children(graph)


def _check_children(graph: Pregel[Any, Any, Any, Any]) -> None:
    for name, child in graph.get_subgraphs(recurse=True):
        if isinstance(child, Pregel):
            _check_pregel(child, f"child graph {name!r}", is_root=False, node=name)


def _check_pregel(graph: Pregel[Any, Any, Any, Any], what: str, *, is_root: bool, node: str | None = None) -> None:
    if _is_raw_deep_agent(graph):
        raise UnsupportedGraph(
            f"{what} is a deep agent made by create_deep_agent, whose sub-agents are out of reach: make it with app.deep_agent, which takes the same "
            "arguments",
            node=node,
        )
    if graph.interrupt_before_nodes or graph.interrupt_after_nodes:
        raise UnsupportedGraph(
            f"{what} has static interrupts (interrupt_before / interrupt_after), which leave no trace in the history: call interrupt() in the node",
            node=node,
        )
    if graph.checkpointer not in (None, False) and not isinstance(graph.checkpointer, DurableCheckpointer):
        remedy = "use app.checkpointer(), or none" if is_root else "compile it without one"
        raise UnsupportedGraph(f"{what} is compiled with a checkpointer of its own: {remedy}; checkpoints are scratch here", node=node)
    if graph.checkpointer is False and not is_root:
        raise UnsupportedGraph(f"{what} is compiled with checkpointer=False, so its interrupts never get answers: compile it without it", node=node)
    if graph.cache is not None or graph.cache_policy is not None:
        raise UnsupportedGraph(f"{what} has a cache: a hit would leave out recorded effects; remove it, outcomes are recorded anyway", node=node)
    if graph.step_timeout is not None:
        raise UnsupportedGraph(f"{what} has a step_timeout: the wall clock would decide what a replay does; put a timeout inside a tool", node=node)
    if graph.retry_policy:
        raise UnsupportedGraph(
            f"{what} has a retry policy: a recorded failure would replay in every try; use retry= of app.tool / app.llm", node=node
        )
    for name, each in graph.nodes.items():
        _check_node(name, each)


def _is_raw_deep_agent(graph: Pregel[Any, Any, Any, Any]) -> bool:
    if "deepagents.graph" not in sys.modules:
        return False  # nobody has made one
    from mongo_durable.langgraph.deep_agents.building import is_durable_agent
    from mongo_durable.langgraph.deep_agents.seams import is_deep_agent

    return is_deep_agent(graph) and not is_durable_agent(graph)


def _check_node(name: str, node: Any) -> None:
    if node.retry_policy:
        raise UnsupportedGraph(
            f"node {name!r} has a retry policy: a recorded failure would replay in every try; use retry= of app.tool, app.llm or app.activity",
            node=name,
        )
    if node.cache_policy is not None:
        raise UnsupportedGraph(f"node {name!r} has a cache policy: a hit would leave out recorded effects; remove it", node=name)
    if getattr(node, "timeout", None) is not None:
        raise UnsupportedGraph(
            f"node {name!r} has a timeout: the wall clock would decide what a replay does; put a timeout inside a tool or activity", node=name
        )
    if name.startswith("__error_handler__"):
        handled = name.removeprefix("__error_handler__")
        raise UnsupportedGraph(
            f"node {handled!r} has an error handler, which is not proven to replay: handle the error inside the node", node=handled
        )
    bound = node.bound
    if isinstance(bound, Pregel) and bound.checkpointer is False:
        raise UnsupportedGraph(
            f"child graph {name!r} is compiled with checkpointer=False, so its interrupts never get answers: compile it without it", node=name
        )


def check_call(graph_input: Any, options: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse call options that the driver has to decide itself.

    Raises:
        UnsupportedGraph: Names the option.
    """
    for option in _OPTIONS_OF_THE_DRIVER:
        if options.get(option) is not None:
            what = "call interrupt() in the node instead" if option.startswith("interrupt") else "leave it out; the driver uses what replay needs"
            raise UnsupportedGraph(f"{option}= cannot be given for a durable run: {what}")
    configurable = config.get("configurable", {})
    for coordinate in ("checkpoint_id", "checkpoint_ns", "checkpoint_map"):
        if configurable.get(coordinate):
            raise UnsupportedGraph(f"{coordinate} cannot be given for a durable run: its history, not a checkpoint, says where it goes on")
    if isinstance(graph_input, Command) and (graph_input.goto or graph_input.update is not None or graph_input.graph is not None):
        raise UnsupportedGraph("a Command with goto, update or graph cannot answer a durable run: give Command(resume={activity_id: answer}) alone")
