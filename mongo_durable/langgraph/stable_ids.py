"""Message ids of states: `add_messages` invents a random one for every message without an id, so each attempt would have others.

The graph that an app runs is a copy whose `add_messages` channels use `stable_add_messages`. Within a run it stamps copies of such messages with ids
that derive from where the graph runs and what its state holds already; objects of the caller are never changed (`add_messages` alone sets the id on
the very object that a node returned). Graphs created inside a body are not reached by this; what their messages mean to a model does not depend on
ids anyway.
"""

from __future__ import annotations

import functools
from typing import Any

from langchain_core.messages import BaseMessage, convert_to_messages
from langgraph.channels import BinaryOperatorAggregate
from langgraph.graph.message import add_messages
from langgraph.pregel import Pregel

from mongo_durable.langgraph.messages import message_id
from mongo_durable.langgraph.scope import current_place

Graph = Pregel[Any, Any, Any, Any]


def with_stable_ids(graph: Graph) -> Graph:
    """A copy of `graph`, and of the compiled graphs that are its nodes, whose message channels give stable ids."""
    channels = {name: _stable(channel) for name, channel in graph.channels.items()}
    nodes = {
        name: node.copy({"bound": with_stable_ids(node.bound)}) if isinstance(node.bound, Pregel) else node for name, node in graph.nodes.items()
    }
    return graph.copy({"channels": channels, "nodes": nodes})


def _stable(channel: Any) -> Any:
    if not isinstance(channel, BinaryOperatorAggregate):
        return channel
    operator = channel.operator
    if operator is add_messages:
        options: dict[str, Any] = {}
    elif isinstance(operator, functools.partial) and getattr(operator.func, "__name__", "") == "add_messages":
        options = operator.keywords
    else:
        return channel
    stable = channel.copy()
    stable.key = channel.key
    stable.operator = functools.partial(stable_add_messages, **options)
    return stable


def stable_add_messages(left: Any, right: Any, **options: Any) -> Any:
    """`add_messages`, with ids that are the same in every attempt."""
    place = current_place()
    if place is None:
        return add_messages(left, right, **options)
    before = [message.id for message in left] if isinstance(left, list) else []
    given = convert_to_messages(right if isinstance(right, list) else [right])
    stamped: list[Any] = [_with_id(message, (place, before, index, message.type)) for index, message in enumerate(given)]
    return add_messages(left, stamped, **options)


def _with_id(message: BaseMessage, parts: tuple[Any, ...]) -> BaseMessage:
    return message if message.id is not None else message.model_copy(update={"id": message_id(*parts)})
