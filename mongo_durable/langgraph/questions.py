"""Interrupts as questions: what pends in a graph at rest, and the frontier entry that stands for it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from langgraph import types
from langgraph.types import Interrupt
from pydantic import TypeAdapter

from mongo_durable.engine.resolving import schema_faults
from mongo_durable.errors import ConfigurationError, InterruptExpired
from mongo_durable.langgraph.codec import Codec
from mongo_durable.langgraph.scope import current_session
from mongo_durable.protocol.events import ActivityKind
from mongo_durable.protocol.frontier import UNANSWERED, Audience, FrontierEntry, frontier_entry
from mongo_durable.protocol.identity import Position
from mongo_durable.store.documents import StoredFrontier


@dataclass(frozen=True, slots=True)
class Asked:
    """The value of an interrupt that `App.interrupt` made: a named question, with what is to happen if nobody answers it.

    Attributes:
        expires_in: How long it waits, or None.
        default: The answer after that time, or UNANSWERED.
        audience: Who is asked, or None.
    """

    name: str
    value: Any
    response_schema: Any
    expires_in: timedelta | None
    default: Any
    audience: Audience | None = None


def ask(name: str, value: Any, response_schema: Any, expires_in: timedelta | None, default: Any, audience: Audience | None = None) -> Any:
    """Interrupt, and return the answer. See `App.interrupt`."""
    schema = json_schema(response_schema)
    if default is not UNANSWERED and expires_in is None:
        raise ConfigurationError(f"the question {name!r} has a default, but no deadline: give expires_in=")
    if expires_in is not None and expires_in <= timedelta():
        raise ConfigurationError(f"the question {name!r} has a deadline that has passed already")
    if default is not UNANSWERED and schema is not None and (faults := schema_faults(schema, default)):
        raise ConfigurationError(f"the default of the question {name!r} does not fit its schema at {faults[0]}")
    if current_session() is None:
        return types.interrupt(value)  # plain LangGraph: whoever resumes the thread answers, and nobody watches a deadline
    answer = types.interrupt(Asked(name, value, schema, expires_in, default, audience))
    if answer is UNANSWERED:
        raise InterruptExpired(f"nobody answered {name!r} within {expires_in}")
    return answer


def audience_of(name: str, audience: str | None, escalate_in: timedelta | None, escalate_to: str | None) -> Audience | None:
    """Who is asked.

    Raises:
        ConfigurationError: An escalation lacks one of its parts.
    """
    if (escalate_in is None) != (escalate_to is None) or (escalate_to is not None and audience is None):
        raise ConfigurationError(f"the question {name!r}: an escalation needs audience=, escalate_in= and escalate_to=")
    if escalate_in is not None and escalate_in <= timedelta():
        raise ConfigurationError(f"the question {name!r} escalates at a time that has passed already")
    return Audience(first=audience, then=escalate_to, after=escalate_in) if audience is not None else None


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
    asked = interrupt.value
    if not isinstance(asked, Asked):
        asked = Asked(name, interrupt.value, interrupt.response_schema, None, UNANSWERED)
    return frontier_entry(
        run_id,
        position,
        ActivityKind.INTERRUPT,
        asked.name,
        codec.encode(asked.value),
        codec.encode(json_schema(asked.response_schema)),
        expires_in=asked.expires_in,
        default=asked.default if asked.default is UNANSWERED else codec.encode(asked.default),
        audience=asked.audience,
    )


def json_schema(schema: Any) -> dict[str, Any] | None:
    """A JSON Schema, from one or from a type that Pydantic knows."""
    return schema if schema is None or isinstance(schema, dict) else TypeAdapter(schema).json_schema()


def delivered(codec: Codec, answer: Any) -> Any:
    """A recorded answer as the code gets it; UNANSWERED as it is, for `App.interrupt` to raise."""
    return answer if answer is UNANSWERED else codec.decode(answer)


def public_interrupts(codec: Codec, frontier: StoredFrontier) -> list[Interrupt]:
    """The questions of a frontier as LangGraph shows interrupts; their ids are activity ids, the same in every attempt."""
    return [
        Interrupt(value=codec.decode(entry.value), id=entry.activity_id, response_schema=codec.decode(entry.response_schema))
        for entry in frontier.entries
    ]
