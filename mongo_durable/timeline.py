"""A run's history as people read it: its attempts, what each of them executed and what it found recorded, and the frontiers between them.

A pure reading of the events, for the command line and the demo. Nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from mongo_durable.protocol.events import ENDS, OUTCOMES, Event, EventType, FrontierStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityLine:
    """One activity as one attempt met it.

    Attributes:
        is_executed: The attempt let its body run. False: its outcome was recorded before the attempt began, or a person said what happened.
        attempt: The attempt under which its outcome was recorded, else the one that started it.
        outcome: completed, failed or denied; None while there is none, also for ever where the process died inside.
        duration: From the last start to the outcome, by the writer's clock; None without an outcome. An activity that waited for a person was
            started again with the answer, so the wait does not count.
        result: Of a completed one.
        error: Of a failed one.
        until: Of a timer: when it fires.
        input: What it was called with, where that is recorded; of a model call it is not.
    """

    activity_id: str
    kind: str
    name: str
    position: str
    is_executed: bool
    attempt: int
    outcome: str | None = None
    started_at: datetime | None = None
    duration: timedelta | None = None
    result: Any = None
    error: Mapping[str, Any] | None = None
    until: datetime | None = None
    input: Any = None


@dataclass(slots=True, kw_only=True)
class AttemptLine:
    """One attempt.

    Attributes:
        recorded: Outcomes that stood in the history when the attempt began: it takes these and does not run their bodies.
        executed: Activities whose bodies it let run, in order.
        ending: `suspended`, `completed`, `failed`, `diverged` or `cancelled`; None where the attempt recorded no end: it runs, was released, or died.
        generation: Of the frontier on which it suspended the run.
        taken_over_by: The attempt that followed one without an end.
    """

    fence: int
    owner: str
    started_at: datetime | None
    recorded: tuple[ActivityLine, ...]
    executed: list[ActivityLine] = field(default_factory=list)
    ending: str | None = None
    generation: int | None = None
    taken_over_by: int | None = None
    ended_at: datetime | None = None


@dataclass(slots=True, kw_only=True)
class FrontierLine:
    """One frontier, and what became of it.

    Attributes:
        answers: By activity id; None until resolved or expired.
        channel: By what way the answers came.
        answered_by: Of answers that came together in a draft: by activity id, `{"by": …, "note": …, "at": …}`.
    """

    generation: int
    attempt: int
    entries: tuple[Mapping[str, Any], ...]
    status: FrontierStatus = FrontierStatus.OPEN
    answers: Mapping[str, Any] | None = None
    resolved_by: str | None = None
    note: str | None = None
    opened_at: datetime | None = None
    closed_at: datetime | None = None
    channel: str | None = None
    answered_by: Mapping[str, Mapping[str, Any]] | None = None


@dataclass(slots=True, kw_only=True)
class Timeline:
    """Attempts and frontiers of a run, each in order.

    Attributes:
        cancel_reason: Why it was cancelled, if somebody said why.
    """

    attempts: list[AttemptLine] = field(default_factory=list)
    frontiers: list[FrontierLine] = field(default_factory=list)
    cancel_reason: str | None = None


def timeline(events: Iterable[Event]) -> Timeline:
    """Read the whole history of a run, in order of `seq`."""
    found = Timeline()
    outcomes: dict[str, ActivityLine] = {}
    for event in events:
        attempt = found.attempts[-1] if found.attempts else None
        match event.type:
            case EventType.ATTEMPT_STARTED:
                if attempt is not None and attempt.ending is None:
                    attempt.taken_over_by = event.fence
                recorded = tuple(outcomes.values())
                found.attempts.append(AttemptLine(fence=event.fence, owner=event.data["owner"], started_at=event.at, recorded=recorded))
            case EventType.ACTIVITY_STARTED if attempt is not None:
                attempt.executed.append(_started(event))
            case kind if kind in OUTCOMES and attempt is not None:
                outcomes[_id(event)] = _finish(attempt, event)
            case EventType.ACTIVITIES_SUSPENDED if attempt is not None:
                attempt.ending, attempt.ended_at, attempt.generation = "suspended", event.at, event.data["generation"]
                found.frontiers.append(
                    FrontierLine(generation=event.data["generation"], attempt=event.fence, entries=tuple(event.data["entries"]), opened_at=event.at)
                )
            case EventType.ACTIVITIES_RESOLVED | EventType.FRONTIER_EXPIRED:
                frontier = found.frontiers[-1]
                frontier.status = FrontierStatus.RESOLVED if event.type is EventType.ACTIVITIES_RESOLVED else FrontierStatus.EXPIRED
                frontier.answers, frontier.closed_at = event.data["answers"], event.at
                frontier.resolved_by, frontier.note = event.data.get("resolved_by"), event.data.get("note")
                frontier.channel, frontier.answered_by = event.data.get("channel"), event.data.get("answered_by")
            case kind if kind in ENDS:
                found.cancel_reason = event.data.get("reason")
                if found.frontiers and found.frontiers[-1].status is FrontierStatus.OPEN:
                    is_cancelled = kind is EventType.RUN_CANCELLED
                    found.frontiers[-1].status = FrontierStatus.CANCELLED if is_cancelled else FrontierStatus.EXPIRED  # at the run's deadline
                    found.frontiers[-1].closed_at = event.at
                elif attempt is not None:
                    attempt.ending, attempt.ended_at = kind.value.removeprefix("run."), event.at
            case _:
                pass  # the submission, a retry, a sealed step: no line of their own
    return found


def _id(event: Event) -> str:
    # The protocol gives every activity event an id; the fold refuses a history where one has none.
    return event.activity_id or ""


def _started(event: Event) -> ActivityLine:
    return ActivityLine(
        activity_id=_id(event),
        kind=str(event.kind),
        name=event.name or "",
        position=str(event.position),
        is_executed=True,
        attempt=event.fence,
        started_at=event.at,
        until=event.data.get("until"),
        input=event.value if event.type is EventType.ACTIVITY_STARTED else None,
    )


def _finish(attempt: AttemptLine, event: Event) -> ActivityLine:
    """Give the activity's line in `attempt` its outcome, and return the line that later attempts find recorded."""
    outcome = event.type.value.removeprefix("activity.")
    index = next((at for at in reversed(range(len(attempt.executed))) if attempt.executed[at].activity_id == event.activity_id), None)
    if index is None:  # started by an earlier attempt: a timer that fires now, or an effect of which a person has said that it happened
        line = replace(_started(event), is_executed=False, outcome=outcome, result=event.value, error=event.error)
        attempt.executed.append(line)
        return line
    begun = attempt.executed[index]
    duration = event.at - begun.started_at if event.at is not None and begun.started_at is not None else None
    line = replace(begun, outcome=outcome, duration=duration, result=event.value, error=event.error)
    attempt.executed[index] = line
    return replace(line, is_executed=False)
