"""Frontiers: the exact sets of activities that suspended together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum, StrEnum
from typing import Any

from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.events import ActivityKind
from mongo_durable.protocol.identity import Position, activity_id


class Unanswered(Enum):
    """Stands where an answer would: the deadline has passed, and the question has no default."""

    UNANSWERED = "unanswered"


UNANSWERED = Unanswered.UNANSWERED


class AnswerChannel(StrEnum):
    """The way by which an answer came."""

    APP = "app"
    CLIENT = "client"
    CLI = "cli"
    TOKEN = "token"
    DRAFT = "draft"
    MONGOSH = "mongosh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Audience:
    """Who is asked: names that the application gives a meaning.

    Attributes:
        first: Asked from the beginning.
        then: Asked as well, after `after` from the suspension. Both are given or neither.
    """

    first: str
    then: str | None = None
    after: timedelta | None = None


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
        audience: Who is asked, or None where the code did not say.
        escalates_at: From when the second audience is asked as well, by the server's clock; known once it is stored.
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
    audience: Audience | None = None
    escalates_at: datetime | None = None

    def asks(self, now: datetime) -> tuple[str, ...]:
        """The audiences that are asked at `now`; none where the code did not say."""
        if self.audience is None:
            return ()
        if self.audience.then is None or self.escalates_at is None or self.escalates_at > now:
            return (self.audience.first,)
        return (self.audience.first, self.audience.then)


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
    audience: Audience | None = None,
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
        audience=audience,
    )


def in_position_order(entries: Iterable[FrontierEntry]) -> tuple[FrontierEntry, ...]:
    """The entries as a frontier lists them: by position, never by arrival (I11)."""
    return tuple(sorted(entries, key=lambda entry: entry.position.sort_key))


def frontier_digest(entries: Iterable[FrontierEntry]) -> str:
    """What a reviewer pins to be sure that the answers belong to the questions that they saw."""
    return digest([[entry.activity_id, entry.digest] for entry in in_position_order(entries)])
