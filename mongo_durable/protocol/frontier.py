"""Frontiers: the exact sets of activities that suspended together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.events import ActivityKind
from mongo_durable.protocol.identity import Position, activity_id


class Unanswered(Enum):
    """Stands where an answer would: the deadline has passed, and the question has no default."""

    UNANSWERED = "unanswered"


UNANSWERED = Unanswered.UNANSWERED


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierEntry:
    """One suspended activity: a question that somebody has to answer.

    Attributes:
        value: The question, as a plain value.
        response_schema: JSON Schema that the answer must fit, or None for any value.
        digest: Of kind, name and value: what a replay compares, and what a reviewer pins.
        expires_in: How long it waits for its answer, from its suspension; None: for ever.
        expires_at: When that is over, by the server's clock; known once it is stored.
        default: The answer that it then gets (plain value); UNANSWERED: none, whoever asks hears so.
    """

    activity_id: str
    position: Position
    kind: ActivityKind
    name: str
    value: Any
    response_schema: Mapping[str, Any] | None
    digest: str
    expires_in: timedelta | None = None
    expires_at: datetime | None = None
    default: Any = UNANSWERED


def frontier_entry(
    run_id: str,
    position: Position,
    kind: ActivityKind,
    name: str,
    value: Any,
    response_schema: Mapping[str, Any] | None = None,
    *,
    expires_in: timedelta | None = None,
    default: Any = UNANSWERED,
) -> FrontierEntry:
    """The entry for the activity at `position`, with its id and digest."""
    return FrontierEntry(
        activity_id=activity_id(run_id, position),
        position=position,
        kind=kind,
        name=name,
        value=value,
        response_schema=response_schema,
        digest=digest([str(kind), name, value]),
        expires_in=expires_in,
        default=default,
    )


def in_position_order(entries: Iterable[FrontierEntry]) -> tuple[FrontierEntry, ...]:
    """The entries as a frontier lists them: by position, never by arrival (I11)."""
    return tuple(sorted(entries, key=lambda entry: entry.position.sort_key))


def frontier_digest(entries: Iterable[FrontierEntry]) -> str:
    """What a reviewer pins to be sure that the answers belong to the questions that they saw."""
    return digest([[entry.activity_id, entry.digest] for entry in in_position_order(entries)])
