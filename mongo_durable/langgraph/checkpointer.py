"""What a graph of a durable app may be compiled with."""

from __future__ import annotations

from langgraph.checkpoint.memory import InMemorySaver


class DurableCheckpointer(InMemorySaver):
    """A checkpointer that says "this graph is run by mongo_durable".

    In a durable run the driver puts its own scratch saver in its place, one for each attempt. Outside one, the graph runs on this as on LangGraph's
    in-memory saver, which is what unit tests of a graph want.
    """
