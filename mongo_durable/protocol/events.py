"""The facts of a run, as they stand in `activity_events`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from mongo_durable.protocol.identity import Position


class EventType(StrEnum):
    """What happened. Dotted, past tense."""

    RUN_SUBMITTED = "run.submitted"
    ATTEMPT_STARTED = "attempt.started"
    ACTIVITY_STARTED = "activity.started"
    ACTIVITY_COMPLETED = "activity.completed"
    ACTIVITY_FAILED = "activity.failed"
    ACTIVITY_DENIED = "activity.denied"
    ACTIVITIES_SUSPENDED = "activities.suspended"
    ACTIVITIES_RESOLVED = "activities.resolved"
    FRONTIER_EXPIRED = "frontier.expired"
    STEP_COMMITTED = "step.committed"
    RUN_COMPLETED = "run.completed"
    RUN_FAILED = "run.failed"
    RUN_DIVERGED = "run.diverged"
    RUN_CANCELLED = "run.cancelled"
    RUN_RETRIED = "run.retried"


OUTCOMES = frozenset({EventType.ACTIVITY_COMPLETED, EventType.ACTIVITY_FAILED, EventType.ACTIVITY_DENIED})
ENDS = frozenset({EventType.RUN_COMPLETED, EventType.RUN_FAILED, EventType.RUN_DIVERGED, EventType.RUN_CANCELLED})


class ActivityKind(StrEnum):
    """What sort of effect an activity is."""

    LLM = "LLM"
    TOOL = "TOOL"
    INTERRUPT = "INTERRUPT"
    ACTIVITY = "ACTIVITY"
    TIMER = "TIMER"


class RunStatus(StrEnum):
    """Where a run is in its life: pending → running → suspended → ready → running → … → one of the four ends."""

    PENDING = "pending"
    RUNNING = "running"
    SUSPENDED = "suspended"
    READY = "ready"
    COMPLETED = "completed"
    FAILED = "failed"
    DIVERGED = "diverged"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        """Whether nothing more happens by itself. Failed and diverged runs can still be retried by an operator."""
        return self in _END_STATUSES

    @property
    def is_rest(self) -> bool:
        """Whether the run waits for somebody outside: it has ended or is suspended."""
        return self.is_end or self is RunStatus.SUSPENDED


_END_STATUSES = frozenset({RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.DIVERGED, RunStatus.CANCELLED})


class FrontierStatus(StrEnum):
    """What became of a frontier."""

    OPEN = "open"
    RESOLVED = "resolved"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


@dataclass(slots=True, kw_only=True)  # not frozen: a replay makes thousands, and that would more than double what each takes
class Event:
    """One append-only fact of a run. Nobody changes one.

    Attributes:
        seq: Dense from 1 within the run; the only thing that orders events.
        fence: Attempt number under which it was written; 0 before the first attempt.
        at: The writer's clock, for people; nothing is decided by it.
        position: Of the activity that the event is about, if any.
        input_digest: Of the activity's semantic input, on `activity.started`.
        value: Plain value (see `protocol.values`): a run's input or output, an activity's input (on start) or result (on completion).
        error: `{"type": …, "message": …}`, on failures.
        data: What only this type of event has:
            run.submitted: workflow {name, version}, thread_id, turn; of a fork also origin: the run that had the first of its events
            attempt.started: owner, attempt, code_version
            activity.started: is_overlapped; of a model call also parts {like, same, then}: see `protocol.parts`
            activities.suspended: generation, digest, entries [{activity_id, position, kind, name, digest, expires_at, escalates_at}]
            activities.resolved: generation, answers {activity_id: plain value}, resolved_by, note, channel; of a draft also answered_by
            frontier.expired: generation, answers of those past their deadline, unanswered [activity_id] of those of them that have no default
            step.committed: step, activities, digest
            run.diverged: position, expected, found
            run.cancelled: reason
            activity.started of a TIMER: until
    """

    run_id: str
    seq: int
    fence: int
    type: EventType
    at: datetime | None = None
    activity_id: str | None = None
    position: Position | None = None
    kind: ActivityKind | None = None
    name: str | None = None
    input_digest: str | None = None
    value: Any = None
    error: Mapping[str, Any] | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
