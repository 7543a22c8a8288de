"""What people and programs are shown of runs, frontiers and conversations: values as they were given, each at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mongo_durable.errors import RunFailed
from mongo_durable.protocol.events import RunStatus
from mongo_durable.store.documents import Resolution
from mongo_durable.store.heads import Cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One suspended activity of a frontier.

    Attributes:
        activity_id: What the answer is given under; the same in every attempt.
        name: The node or tool that asks, or the name of the interrupt.
        value: What it asks.
        response_schema: JSON Schema that the answer must fit, or None for any value.
        expires_at: When the question is no longer asked; None: never.
        has_default, default: Whether there is an answer that it then gets, and which.
        audience: Who is asked, or None where the code did not say.
        escalates_to, escalates_at: Who is asked as well, and from when; None: nobody.
    """

    activity_id: str
    name: str
    kind: str
    position: str
    value: Any
    response_schema: Any
    expires_at: datetime | None = None
    has_default: bool = False
    default: Any = None
    audience: str | None = None
    escalates_to: str | None = None
    escalates_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """All questions that a run waits for; they are answered together.

    Attributes:
        generation, digest: What a reviewer saw; `resolve` refuses if either has moved.
    """

    run_id: str
    workflow: str
    thread_id: str
    generation: int
    digest: str
    status: str
    entries: tuple[Question, ...]
    opened_at: datetime | None
    expires_at: datetime | None

    @property
    def cursor(self) -> str:
        """Where it stands in a listing: `after=` of the next page."""
        return str(Cursor(self.opened_at or datetime.min.replace(tzinfo=UTC), f"{self.run_id}/{self.generation}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterance:
    """One entry of a thread's conversation.

    Attributes:
        role: input, model, tool or human.
        name: Of the model, tool or question; None for the input.
        error: Of a failed model or tool call, instead of a value.
    """

    run_id: str
    turn: int
    role: str
    name: str | None
    activity_id: str | None
    value: Any
    error: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """A run as it is at one moment.

    Attributes:
        status: pending, running, suspended, ready, completed, failed, diverged or cancelled.
        output: Of a completed run.
        error: Of a failed or diverged one: `{"type": …, "message": …}`, and for a divergence position, expected and found.
        frontier: Of a suspended one.
        attempt: How many attempts there have been.
        waits_for: What keeps a pending or ready run from being executed, besides its turn: the end of a delay or sleep, a runner that serves its
            workflow, a place of its limit, another run of its thread. None for any other.
        available_at: Of a pending or ready run: not before this time. Of a suspended one: the deadline of its frontier.
        deadline_at: When it fails if it has not ended.
    """

    run_id: str
    workflow: str
    version: str
    thread_id: str
    status: str
    generation: int
    attempt: int
    output: Any
    error: Mapping[str, Any] | None
    frontier: Frontier | None
    submitted_at: datetime | None
    ended_at: datetime | None
    waits_for: str | None = None
    priority: int = 0
    available_at: datetime | None = None
    deadline_at: datetime | None = None

    @property
    def cursor(self) -> str:
        """Where it stands in a listing: `after=` of the next page."""
        return str(Cursor(self.submitted_at or datetime.min.replace(tzinfo=UTC), self.run_id))

    @property
    def is_ended(self) -> bool:
        """Whether the run has come to one of its four ends."""
        return RunStatus(self.status).is_end

    def result(self) -> Any:
        """The output of a completed run.

        Raises:
            RunFailed: It ended otherwise, or has not ended.
        """
        if self.status == RunStatus.COMPLETED:
            return self.output
        kind = (self.error or {}).get("type", "no error recorded")
        raise RunFailed(f"run {self.run_id} is {self.status}: {kind}", run_id=self.run_id, status=self.status, error=self.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftAnswer:
    """One answer of a draft.

    Attributes:
        by, note, at: Who gave it, why, and when (the server's clock).
    """

    value: Any
    by: str
    note: str | None
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The answers that several people have given to a frontier so far.

    Attributes:
        generation, digest: Of the frontier.
        answers: By activity id.
        missing: Activity ids of the questions that nobody has answered yet.
        resolution: The receipt, once the answers have gone in; None: nothing of them has reached the run.
    """

    run_id: str
    generation: int
    digest: str
    answers: Mapping[str, DraftAnswer]
    missing: tuple[str, ...]
    resolution: Resolution | None
