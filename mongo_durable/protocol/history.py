"""The history fold: what a list of events says about a run.

The fold checks the protocol while it reads: an event that could not have been written by a correct writer is `CorruptHistory`, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from mongo_durable.errors import CorruptHistory
from mongo_durable.protocol.events import ENDS, OUTCOMES, ActivityKind, Event, EventType, FrontierStatus, RunStatus
from mongo_durable.protocol.frontier import UNANSWERED
from mongo_durable.protocol.identity import Position
from mongo_durable.protocol.memory import MemoryEntry, MemoryRole
from mongo_durable.protocol.parts import unpack

_NO_PROGRESS = frozenset({EventType.ACTIVITY_STARTED, EventType.STEP_COMMITTED})
_ROLES = {ActivityKind.LLM: MemoryRole.MODEL, ActivityKind.TOOL: MemoryRole.TOOL}


@dataclass(slots=True)
class RecordedActivity:
    """An activity as recorded so far.

    Attributes:
        started_seq: Of its last `activity.started`: one for each time its body was let run on.
        started_fence: The attempt that wrote it.
        started_at: Of its first `activity.started`, which stands whoever lets the body run again: the time that the body may tell.
        until: Of a timer: when it fires.
        outcome: Its terminal event, or None.
        parts: Short digests of the messages of a model call.
    """

    position: Position
    kind: ActivityKind
    name: str
    input_digest: str
    started_seq: int
    started_fence: int
    started_at: datetime | None
    outcome: Event | None = None
    parts: tuple[str, ...] = ()
    until: datetime | None = None


@dataclass(slots=True)
class RecordedFrontier:
    """A suspension as recorded.

    Attributes:
        entries: Digest of each entry, by position.
        activity_ids: Of the entries, by position.
        names: Of the entries, by activity id.
        answers: By activity id; None until resolved or expired.
        expires_at: Deadline of each entry that has one, by activity id.
        escalates_at: From when a second audience is asked, of each entry that has one, by activity id.
        unanswered: Entries of an expired frontier that got no answer, and never will. Those that are neither here nor answered are asked again.
    """

    generation: int
    seq: int
    entries: dict[Position, str]
    activity_ids: dict[Position, str]
    names: dict[str, str]
    status: FrontierStatus = FrontierStatus.OPEN
    answers: Mapping[str, Any] | None = None
    expires_at: dict[str, datetime] = field(default_factory=dict)
    escalates_at: dict[str, datetime] = field(default_factory=dict)
    unanswered: frozenset[str] = frozenset()

    def answer(self, position: Position) -> Any:
        """The answer of the entry at `position`, or UNANSWERED.

        Raises:
            KeyError: There is none: it was not due when the frontier expired.
        """
        activity_id = self.activity_ids[position]
        return UNANSWERED if activity_id in self.unanswered else (self.answers or {})[activity_id]

    def is_closed(self, position: Position) -> bool:
        """Whether the question at `position` has been answered, or never will be."""
        activity_id = self.activity_ids[position]
        return activity_id in self.unanswered or activity_id in (self.answers or {})


@dataclass(slots=True)
class RecordedStep:
    """A sealed root step: how many activities it had, the digest of their positions, and when the seal was written.

    Two seals that differ in their time alone are equal: they seal the same.
    """

    activities: int
    digest: str
    at: datetime | None = field(compare=False)


@dataclass(slots=True)
class History:
    """Everything that the events of one run say.

    Invariants: I1 (dense seq), I2 (fences only rise), I3 (one outcome an activity), I6 (one resolution a frontier) are checked by `apply`.
    """

    run_id: str
    seq: int = 0
    fence: int = 0
    status: RunStatus = RunStatus.PENDING
    submitted: Event | None = None
    attempts: int = 0
    activities: dict[str, RecordedActivity] = field(default_factory=dict)
    # Invariant: by_step names only activities that are not nested in another's body.
    by_step: dict[int, list[str]] = field(default_factory=dict)
    by_body: dict[tuple[tuple[str, ...], int], list[str]] = field(default_factory=dict)
    # Invariant: of the bodies in by_body, those of activities. An activity is recorded before what its body starts, so this never changes.
    inner_bodies: set[tuple[tuple[str, ...], int]] = field(default_factory=set)
    overlapped: set[tuple[tuple[str, ...], int]] = field(default_factory=set)
    frontiers: list[RecordedFrontier] = field(default_factory=list)
    steps: dict[int, RecordedStep] = field(default_factory=dict)
    end: Event | None = None
    retried_seq: int = 0
    code_versions: dict[int, str | None] = field(default_factory=dict)
    last_model_call: RecordedActivity | None = None
    # How many attempts in a row have recorded neither an outcome nor a question; the running one counts.
    fruitless_attempts: int = 0
    # What the next transaction that suspends or ends has to save: entries since the last suspension.
    unsaved: list[MemoryEntry] = field(default_factory=list)

    @property
    def generation(self) -> int:
        """How many frontiers the run has opened."""
        return len(self.frontiers)

    @property
    def origin(self) -> str:
        """The run whose id stands in what this history recorded: another one's in a fork, also of a fork; else its own."""
        return str(self.submitted.data.get("origin", self.run_id)) if self.submitted is not None else self.run_id

    def is_nested(self, position: Position) -> bool:
        """Whether `position` lies inside the body of another recorded activity: a replay that returns that one's outcome never reaches it."""
        body = (position.path, position.step)
        if body in self.by_body:
            return body in self.inner_bodies
        return any(each.text in self.activities for each in position.enclosing())

    def apply(self, event: Event) -> None:
        """Take the next event.

        Raises:
            CorruptHistory: The event cannot follow what came before.
        """
        if event.seq != self.seq + 1:
            raise self._corrupt(event, f"seq {event.seq} follows {self.seq}")
        if event.type is EventType.ATTEMPT_STARTED:
            if event.fence <= self.fence:
                raise self._corrupt(event, f"attempt with fence {event.fence} after fence {self.fence}")
            if self.status.is_end or self.status is RunStatus.SUSPENDED:
                raise self._corrupt(event, f"attempt on a run that is {self.status}")
            self.fence = event.fence
            self.code_versions[event.fence] = event.data.get("code_version")
            self.attempts += 1
            self.fruitless_attempts += 1
            self.status = RunStatus.RUNNING
        else:
            if event.fence != self.fence:
                raise self._corrupt(event, f"fence {event.fence} after fence {self.fence}")
            self._take(event)
            if event.type not in _NO_PROGRESS:
                self.fruitless_attempts = 0
        self.seq = event.seq

    def _take(self, event: Event) -> None:
        match event.type:
            # The two that most events are of come first.
            case EventType.ACTIVITY_STARTED:
                self._expect_running(event)
                self._start(event)
            case kind if kind in OUTCOMES:
                self._expect_running(event)
                self._finish(event)
            case EventType.RUN_SUBMITTED:
                self._expect(event, self.seq == 0, "a second submission")
                self.submitted = event
                self.unsaved.append(MemoryEntry(seq=event.seq, role=MemoryRole.INPUT, name=None, activity_id=None, value=event.value))
            case EventType.STEP_COMMITTED:
                self._expect_running(event)
                step = event.data["step"]
                self._expect(event, step not in self.steps, f"step {step} sealed twice")
                self.steps[step] = RecordedStep(event.data["activities"], event.data["digest"], event.at)
            case EventType.ACTIVITIES_SUSPENDED:
                self._expect_running(event)
                self._suspend(event)
            case EventType.ACTIVITIES_RESOLVED | EventType.FRONTIER_EXPIRED:
                self._answer(event)
            case EventType.RUN_RETRIED:
                self._expect(event, self.status in (RunStatus.FAILED, RunStatus.DIVERGED), f"retry of a run that is {self.status}")
                self.status = RunStatus.READY
                self.end = None
                self.retried_seq = event.seq
            case kind if kind in ENDS:
                self._end(event)
            case _:
                raise self._corrupt(event, "unknown event")

    def _start(self, event: Event) -> None:
        if event.position is None or event.kind is None or event.name is None or event.input_digest is None:
            raise self._corrupt(event, "start without position, kind, name or input digest")
        position = event.position
        known = self.activities.get(position.text)
        if known is not None:
            if known.outcome is not None:
                raise self._corrupt(event, f"start of the finished activity {position}")
            known.started_seq, known.started_fence = event.seq, event.fence
            return
        recorded = RecordedActivity(position, event.kind, event.name, event.input_digest, event.seq, event.fence, event.at)
        recorded.until = event.data.get("until")
        self.activities[position.text] = recorded
        if (stored := event.data.get("parts")) is not None:
            like = self.activities.get(stored["like"])
            recorded.parts = unpack(stored, {stored["like"]: like.parts} if like is not None else {})
            self.last_model_call = recorded
        body = (position.path, position.step)
        if self.is_nested(position):
            self.inner_bodies.add(body)
        else:
            self.by_step.setdefault(position.step, []).append(position.text)
        self.by_body.setdefault(body, []).append(position.text)
        if event.data.get("is_overlapped"):
            self.overlapped.add(body)

    def _finish(self, event: Event) -> None:
        known = self.activities.get(event.position.text) if event.position else None
        if known is None:
            raise self._corrupt(event, "outcome of an activity that was not started")
        if known.outcome is not None:
            raise self._corrupt(event, f"second outcome of {event.position}")
        known.outcome = event
        role = _ROLES.get(known.kind)
        if role is not None:
            entry = MemoryEntry(seq=event.seq, role=role, name=known.name, activity_id=event.activity_id, value=event.value, error=event.error)
            self.unsaved.append(entry)

    def _suspend(self, event: Event) -> None:
        self._expect(event, event.data["generation"] == self.generation + 1, "generation out of order")
        entries = {Position.parse(entry["position"]): entry for entry in event.data["entries"]}
        self._expect(event, bool(entries), "empty frontier")
        self.frontiers.append(
            RecordedFrontier(
                generation=event.data["generation"],
                seq=event.seq,
                entries={position: entry["digest"] for position, entry in entries.items()},
                activity_ids={position: entry["activity_id"] for position, entry in entries.items()},
                names={entry["activity_id"]: entry["name"] for entry in entries.values()},
                expires_at={entry["activity_id"]: entry["expires_at"] for entry in entries.values() if entry.get("expires_at") is not None},
                escalates_at={entry["activity_id"]: entry["escalates_at"] for entry in entries.values() if "escalates_at" in entry},
            )
        )
        self.status = RunStatus.SUSPENDED
        self.unsaved.clear()  # the transaction that suspended has saved them

    def _answer(self, event: Event) -> None:
        self._expect(event, self.status is RunStatus.SUSPENDED, f"answers for a run that is {self.status}")
        frontier = self.frontiers[-1]
        self._expect(event, event.data["generation"] == frontier.generation, "answers for another generation")
        asked, unanswered = set(frontier.activity_ids.values()), frozenset(event.data.get("unanswered", ()))
        closed = event.data["answers"].keys() | unanswered
        is_fitting = closed == asked if event.type is EventType.ACTIVITIES_RESOLVED else bool(closed) and closed <= asked
        self._expect(event, is_fitting, "answers for other questions than the frontier's")
        frontier.answers, frontier.unanswered = event.data["answers"], unanswered
        frontier.status = FrontierStatus.RESOLVED if event.type is EventType.ACTIVITIES_RESOLVED else FrontierStatus.EXPIRED
        self.status = RunStatus.READY
        if event.type is EventType.ACTIVITIES_RESOLVED:
            for activity_id, answer in frontier.answers.items():
                name = frontier.names[activity_id]
                self.unsaved.append(MemoryEntry(seq=event.seq, role=MemoryRole.HUMAN, name=name, activity_id=activity_id, value=answer))

    def _end(self, event: Event) -> None:
        self._expect(event, not self.status.is_end, f"end of a run that is {self.status}")
        self.unsaved.clear()
        if self.status is RunStatus.SUSPENDED:
            closed_as = {EventType.RUN_CANCELLED: FrontierStatus.CANCELLED, EventType.RUN_FAILED: FrontierStatus.EXPIRED}
            self._expect(event, event.type in closed_as, "a suspended run can only be cancelled, or fail at its deadline")
            self.frontiers[-1].status = closed_as[event.type]
        self.status = RunStatus(event.type.value.removeprefix("run."))
        self.end = event

    def _expect_running(self, event: Event) -> None:
        if self.status is not RunStatus.RUNNING:
            raise self._corrupt(event, f"written while the run is {self.status}")

    def _expect(self, event: Event, is_right: bool, fault: str) -> None:
        if not is_right:
            raise self._corrupt(event, fault)

    def _corrupt(self, event: Event, fault: str) -> CorruptHistory:
        return CorruptHistory(
            f"run {self.run_id}: event {event.seq} ({event.type}) breaks the protocol: {fault}; "
            "the history was changed by hand or by a faulty writer",
            run_id=self.run_id,
            seq=event.seq,
        )


def fold(run_id: str, events: Iterable[Event]) -> History:
    """The history that `events`, in order of `seq`, say.

    Raises:
        CorruptHistory: They break the protocol.
    """
    history = History(run_id)
    for event in events:
        history.apply(event)
    return history
