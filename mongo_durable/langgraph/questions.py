"""Interrupts as questions: what pends in a graph at rest, and the frontier entry that stands for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from langgraph import types
from langgraph.types import Interrupt
from pydantic import TypeAdapter, ValidationError

from mongo_durable.engine.schemas import schema_faults
from mongo_durable.errors import ConfigurationError, InterruptExpired, UnusableAnswer
from mongo_durable.langgraph.codec import Codec
from mongo_durable.langgraph.scope import current_session
from mongo_durable.protocol.events import ActivityKind
from mongo_durable.protocol.frontier import UNANSWERED, Audience, FrontierEntry, frontier_entry
from mongo_durable.protocol.identity import Position, activity_id
from mongo_durable.protocol.requests import recognised_schema
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


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that a model refuses.

    Attributes:
        path: Where, as `$.items[0].price`.
        message: Why, which may quote the value.
        kind: Pydantic's name of the reason, which does not.
    """

    path: str
    message: str
    kind: str

    @property
    def text(self) -> str:
        """Path and message."""
        return f"{self.path}: {self.message}"


def model_faults(error: ValidationError) -> list[Fault]:
    """What a model refused."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return [Fault(_json_path(each["loc"]), each["msg"], each["type"]) for each in found]


def _json_path(steps: Sequence[int | str]) -> str:
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


def ask(
    name: str,
    value: Any,
    response_schema: Any = None,
    expires_in: timedelta | None = None,
    default: Any = UNANSWERED,
    *,
    audience: Audience | None = None,
    answer_type: Any = None,
) -> Any:
    """Interrupt, and return the answer. See `App.interrupt`.

    Args:
        answer_type: What LangGraph makes of the answer, which has to let UNANSWERED pass; None returns it as it came. An answer that it refuses stays
            unread, and the interrupt open.
    """
    schema = json_schema(response_schema)
    if default is not UNANSWERED and expires_in is None:
        raise ConfigurationError(f"the question {name!r} has a default, but no deadline: give expires_in=")
    if expires_in is not None and expires_in <= timedelta():
        raise ConfigurationError(f"the question {name!r} has a deadline that has passed already")
    if default is not UNANSWERED and schema is not None and (faults := schema_faults(schema, default)):
        raise ConfigurationError(f"the default of the question {name!r} does not fit its schema at {faults[0]}")
    if current_session() is None:
        # Plain LangGraph: whoever resumes the thread answers, and nobody watches a deadline.
        return types.interrupt(value, response_schema=answer_type)
    answer = types.interrupt(Asked(name, value, schema, expires_in, default, audience), response_schema=answer_type)
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
    value = codec.encode(asked.value)
    # Not part of the entry's digest: a replay does not ask where a schema comes from.
    schema = recognised_schema(value) if asked.response_schema is None else json_schema(asked.response_schema)
    return frontier_entry(
        run_id,
        position,
        ActivityKind.INTERRUPT,
        asked.name,
        value,
        codec.encode(schema),
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


_UNUSABLE = "_durable_unusable_answer"


def note_unusable(error: BaseException, run_id: str, position: Position, name: str) -> None:
    """Keep with the error by which LangGraph refuses an answer whose answer it was. The innermost task says so first, and the first one stands."""
    if not isinstance(error, ValidationError) or hasattr(error, _UNUSABLE):
        return
    faults = model_faults(error)
    activity = activity_id(run_id, position)
    unusable = UnusableAnswer(
        f"run {run_id}: the answer to {activity} ({name!r}) has been accepted by its JSON Schema, and is refused by the code that asked "
        f"at {', '.join(fault.path for fault in faults)}; retry the run with code that takes it, or fork it from before the question",
        run_id=run_id,
        activity_id=activity,
        name=name,
        errors=[fault.text for fault in faults],
    )
    setattr(error, _UNUSABLE, unusable)


def unusable_answer(error: BaseException) -> UnusableAnswer | None:
    """What `note_unusable` kept with an error."""
    return getattr(error, _UNUSABLE, None)


def public_interrupts(codec: Codec, frontier: StoredFrontier) -> list[Interrupt]:
    """The questions of a frontier as LangGraph shows interrupts; their ids are activity ids, the same in every attempt."""
    return [
        Interrupt(value=codec.decode(entry.value), id=entry.activity_id, response_schema=codec.decode(entry.response_schema))
        for entry in frontier.entries
    ]
