"""Interrupts as questions: what pends in a graph at rest, and the frontier entry that stands for it."""

from __future__ import annotations

from typing import Any

from langgraph.types import Interrupt
from pydantic import TypeAdapter

from mongo_durable.langgraph.codec import Codec
from mongo_durable.protocol.events import ActivityKind
from mongo_durable.protocol.frontier import FrontierEntry, frontier_entry
from mongo_durable.protocol.identity import Position
from mongo_durable.store.documents import StoredFrontier


def native_interrupts(snapshot: Any) -> list[Interrupt]:
    """Every interrupt that pends in a state snapshot, nested graphs included, each once: every level above repeats its id."""
    found: dict[str, Interrupt] = {}

    def walk(each: Any) -> None:
        for task in each.tasks:
            for interrupt in task.interrupts:
                found.setdefault(interrupt.id, interrupt)
            if task.state is not None and not isinstance(task.state, dict):
                walk(task.state)

    walk(snapshot)
    return list(found.values())


def question_entry(run_id: str, codec: Codec, position: Position, name: str, interrupt: Interrupt) -> FrontierEntry:
    """The frontier entry of a native interrupt.

    Raises:
        NotJsonSafe: Its value cannot be stored.
    """
    schema = interrupt.response_schema
    if schema is not None and not isinstance(schema, dict):
        schema = TypeAdapter(schema).json_schema()
    return frontier_entry(run_id, position, ActivityKind.INTERRUPT, name, codec.encode(interrupt.value), codec.encode(schema))


def public_interrupts(codec: Codec, frontier: StoredFrontier) -> list[Interrupt]:
    """The questions of a frontier as LangGraph shows interrupts; their ids are activity ids, the same in every attempt."""
    return [
        Interrupt(value=codec.decode(entry.value), id=entry.activity_id, response_schema=codec.decode(entry.response_schema))
        for entry in frontier.entries
    ]
