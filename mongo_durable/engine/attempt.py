"""One attempt: one process's try at a run, under one fence.

It holds the run's history, the sink that it writes to, and what it has met so far. Everything here runs on one event loop; graph threads
cross over to it. Any verdict that ends the attempt (superseded, diverged, refused) is remembered and raised again at every later call, because
user code can swallow any exception.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import tenacity

from mongo_durable import telemetry
from mongo_durable.engine.policy import OnUnknownOutcome, store_retrying
from mongo_durable.engine.process import Process
from mongo_durable.engine.sink import Sink, StoreSink
from mongo_durable.errors import AttemptOver, CancelRequested, DurableError, InvalidAnswer, LeaseLost, StoreError, UnknownOutcome
from mongo_durable.protocol.events import ActivityKind, Event, EventType, FrontierStatus
from mongo_durable.protocol.frontier import FrontierEntry, frontier_entry
from mongo_durable.protocol.history import History, fold
from mongo_durable.protocol.identity import Position, activity_id
from mongo_durable.protocol.parts import pack
from mongo_durable.protocol.replay import (
    UNKNOWN_OUTCOME,
    AwaitTimer,
    ConsumeFrontier,
    DecideUnknown,
    ReturnOutcome,
    RunBody,
    SetTimer,
    StayPending,
    TakeVerdict,
    TimerFired,
    check_end,
    check_step,
    choose_ordinal,
    decide_start,
    decide_timer,
    match_frontier,
    step_digest,
)
from mongo_durable.store import claims, events, heads, runs
from mongo_durable.store.claims import Claim
from mongo_durable.store.documents import RunHead, StoredFrontier
from mongo_durable.store.heartbeat import Lease, lease_clock
from mongo_durable.store.transactional import BodyFailed

log = logging.getLogger(__name__)
T = TypeVar("T")

_STORE_PATIENCE_S = 120.0
"""Longer than a transaction that a dead process left open can hold a run: 60 s (transactionLifetimeLimitSeconds)."""

_NEVER = datetime.max.replace(tzinfo=UTC)
"""When a timer fires that may not be set: not in this attempt."""

_SHORT_WAIT = timedelta(seconds=2)
"""What a timer still has to wait may be waited out in the process, up to this; for longer the run is given back."""

VERDICT_SCHEMA: dict[str, Any] = {
    "oneOf": [
        {
            "title": "It happened; this was its result",
            "type": "object",
            "required": ["verdict", "result"],
            "properties": {"verdict": {"const": "completed"}, "result": {}},
            "additionalProperties": False,
        },
        {
            "title": "It did not happen; run it",
            "type": "object",
            "required": ["verdict"],
            "properties": {"verdict": {"const": "rerun"}},
            "additionalProperties": False,
        },
        {
            "title": "Fail the run",
            "type": "object",
            "required": ["verdict"],
            "properties": {"verdict": {"const": "fail"}, "reason": {"type": "string"}},
            "additionalProperties": False,
        },
    ]
}
"""What a person answers when a process died inside an effect."""


@dataclass(slots=True, kw_only=True)  # not frozen: there is one for each effect of a replay
class ActivityCall:
    """An effect that the code has reached.

    Attributes:
        input: Plain value, shown to people with the start; None where it would be stored again and again (a model's messages).
        parts: Short digests of the messages of a model call, so that a divergence can name the one that differs.
        is_start_awaited: Whether the start must be committed before the body runs (I4). Not for a model call, which may be paid twice.
        is_checked_in_body: Whether the body begins with `check_before_body`, which waits for the start then: what is to be prepared for the body is
            prepared meanwhile.
    """

    position: Position
    kind: ActivityKind
    name: str
    input_digest: str
    input: Any = None
    on_unknown_outcome: OnUnknownOutcome
    parts: tuple[str, ...] = ()
    is_start_awaited: bool = True
    is_checked_in_body: bool = False
    is_overlapped: bool = False


@dataclass(frozen=True, slots=True)
class Execute:
    """The body may run now."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The outcome stands in the history: a completed value, or an error to raise."""

    outcome: Event


@dataclass(frozen=True, slots=True)
class Pend:
    """The activity pends on these questions; its body does not run."""

    pending: Mapping[Position, Pending]


@dataclass(frozen=True, slots=True)
class Happened:
    """A person said that the effect happened, with this result (plain value); the caller records it as the outcome."""

    result: Any


StartResult = Execute | Recorded | Pend | Happened


@dataclass(frozen=True, slots=True)
class Pending:
    """A suspended activity at rest. `entry` is None where it was taken from a recorded frontier."""

    digest: str
    entry: FrontierEntry | None = None


@dataclass(frozen=True, slots=True)
class Suspended:
    """The run waits for answers; the attempt is over."""

    frontier: StoredFrontier


@dataclass(frozen=True, slots=True)
class Answered:
    """The replay passed a recorded frontier: its answers by position."""

    answers: Mapping[Position, Any]


class Attempt:
    """One process's try at a run.

    Attributes:
        history: All events, this attempt's own included as soon as they are enqueued.
        consumed: How many recorded frontiers this replay has passed.
        answers: Answers of the frontiers that were passed, by position.
        failure: The verdict that ended the attempt, or None.
    """

    def __init__(self, head: RunHead, history: History, sink: Sink) -> None:
        self.run_id = head.run_id
        self.head = head
        self.history = history
        self.fence = head.fence
        self.consumed = 0
        self.answers: dict[Position, Any] = {}
        self.failure: DurableError | None = None
        self.loop = asyncio.get_running_loop()
        self._sink = sink
        self._reached: dict[int, set[str]] = {}
        self._unacknowledged: dict[str, asyncio.Future[int]] = {}
        self._starting: dict[str, asyncio.Future[int]] = {}
        self._reserved: dict[str, int] = {}
        self._claimed_clock = lease_clock()
        self._sealed: int | None = None
        self.is_draining = False
        """No effect is to be started any more that is not inside one which runs."""

    @classmethod
    async def begin(cls, process: Process, lease: Lease, claimed: Claim) -> Attempt:
        """Begin with the history of a claimed run. It is read unless the claim has it.

        Raises:
            CorruptHistory: It breaks the protocol.
            DecryptionFailed: Its values are encrypted, and this process has not the key.
        """
        recorded = await claims.history(process.connection, claimed)
        events.require_readable(claimed.head.run_id, recorded)
        telemetry.count("attempts", workflow=claimed.head.workflow)
        return cls(claimed.head, fold(claimed.head.run_id, recorded), StoreSink(process, lease, claimed))

    @property
    def reached(self) -> Set[str]:
        """Positions, as text, that the code has reached so far, without those inside the bodies of others."""
        return set().union(*self._reached.values())

    def check(self) -> None:
        """Raise the verdict that ended this attempt, if there is one.

        Raises:
            DurableError: The attempt is over.
        """
        if self.failure is None:
            self.failure = self._sink.ended
        if self.failure is not None:
            raise self.failure

    def stop(self, reason: DurableError) -> DurableError:
        """End the attempt: nothing more is started or recorded. The first reason stands and is returned."""
        if self.failure is None:
            self.failure = reason.with_run(self.run_id)
        self._sink.end(self.failure)
        return self.failure

    def remember(self, failure: DurableError) -> DurableError:
        """Keep a refusal or divergence, so that swallowing it changes nothing; the attempt can still end its run. The first one stands."""
        if self.failure is None:
            self.failure = failure.with_run(self.run_id)
        return self.failure

    def drain(self) -> None:
        """This process is being stopped: effects that run may end, and then the run is to be given back."""
        self.is_draining = True

    def now(self) -> datetime:
        """The server's time, never ahead of it: its clock at the claim, and what has gone by here since the claim was known."""
        claimed_at = self.head.claimed_at
        assert claimed_at is not None  # every claim sets it
        return claimed_at + timedelta(seconds=lease_clock() - self._claimed_clock)

    @property
    def step_began_at(self) -> datetime:
        """When the running root step began: when the one before it was sealed, or the run submitted. The same in every attempt.

        A seal is queued, not awaited, so an attempt can die between using this time and the seal's landing; the next one then seals anew, at another
        time. Nothing recorded can have depended on the lost one: it would stand behind the seal, and events are dense (I1).
        """
        sealed = self.history.steps.get(self._sealed) if self._sealed is not None else None
        event = sealed or self.history.submitted
        assert event is not None  # a history begins with its submission
        assert event.at is not None  # every writer sets it
        return event.at

    def cancel(self) -> None:
        """The cancellation of the run was requested: stop at the next durable call; the attempt's end is then the run's end as cancelled."""
        self.remember(CancelRequested(f"run {self.run_id} is to be cancelled", run_id=self.run_id))

    def choose_ordinal(
        self,
        path: tuple[str, ...],
        step: int,
        next_number: int,
        used: Collection[str],
        is_overlapping: bool,
        kind: ActivityKind,
        name: str,
        digest: str,
    ) -> str:
        """See `protocol.replay.choose_ordinal`."""
        return choose_ordinal(self.history, path, step, next_number, used, is_overlapping, kind, name, digest)

    async def start(self, call: ActivityCall) -> StartResult:
        """Decide what becomes of an effect that the code has reached, and record its start where the body may run.

        Raises:
            NondeterminismError: The history has something else here.
            LeaseLost: This process may start no effect now.
            UnknownOutcome: A process died inside it, and its policy or a person said to fail.
            AttemptOver, StoreError: The attempt is over.

        Writes: `activity.started`, unless the history says that nothing is to run.
        Invariants: I2, I4, I7.
        """
        self.check()
        position = call.position
        text = position.text
        if not self.history.is_nested(position):
            self._reached.setdefault(position.step, set()).add(text)
        try:
            decision = decide_start(
                self.history, position, call.kind, call.name, call.input_digest, fence=self.fence, consumed=self.consumed, parts=call.parts
            )
        except DurableError as failure:
            raise self.remember(failure) from None
        match decision:
            case StayPending(frontier, positions):
                return Pend({each: Pending(frontier.entries[each]) for each in positions})
            case ReturnOutcome(outcome):
                if (acknowledged := self._unacknowledged.get(text)) is not None:
                    await asyncio.shield(acknowledged)
                return Recorded(outcome)
            case _ if not self._sink.admits(position):
                return Pend({position: Pending(call.input_digest)})
            case RunBody(is_recorded=True):
                self._check_lease()
                return Execute()
            case TakeVerdict(verdict):
                return await self._follow(call, verdict)
            case DecideUnknown(question, is_retried):
                policy = "suspend" if is_retried and call.on_unknown_outcome == "fail" else call.on_unknown_outcome
                return await self._decide_unknown(call, policy, question)
            case RunBody():
                return await self._execute(call)

    async def _execute(self, call: ActivityCall) -> Execute:
        stored_input = await self._sink.move_out(call.input) if call.input is not None else None
        acknowledged = self._append(
            EventType.ACTIVITY_STARTED,
            is_awaited=call.is_start_awaited,
            position=call.position,
            kind=call.kind,
            name=call.name,
            input_digest=call.input_digest,
            value=call.input,
            stored=stored_input,
            data=self._start_data(call),
        )
        if call.is_start_awaited and call.is_checked_in_body:
            self._starting[call.position.text] = acknowledged
        elif call.is_start_awaited:
            await self._settled(acknowledged)
        self._check_lease()  # as late as can be, because a stopped process may go on right here; the acknowledgement, if any, proved the fence
        return Execute()

    def _start_data(self, call: ActivityCall) -> dict[str, Any]:
        data: dict[str, Any] = {"is_overlapped": True} if call.is_overlapped else {}
        if call.parts:
            last = self.history.last_model_call
            data["parts"] = pack(call.parts, last.position.text if last else None, last.parts if last else ())
        return data

    async def _decide_unknown(self, call: ActivityCall, policy: OnUnknownOutcome, question: Position) -> StartResult:
        match policy:
            case "rerun":
                return await self._execute(call)
            case "fail":
                raise self.remember(_unknown_outcome(call, "its policy is to fail"))
            case "suspend":
                asked = {
                    "question": f"A process died while {call.name!r} ran. Did it happen?",
                    "kind": str(call.kind),
                    "name": call.name,
                    "input": call.input,
                    "position": call.position.text,
                    "idempotency_key": activity_id(self.run_id, call.position),
                }
                entry = frontier_entry(self.run_id, question, ActivityKind.INTERRUPT, UNKNOWN_OUTCOME, asked, VERDICT_SCHEMA)
                return Pend({question: Pending(entry.digest, entry)})

    async def _follow(self, call: ActivityCall, verdict: Any) -> StartResult:
        match verdict:
            case {"verdict": "completed", "result": result}:
                return Happened(result)
            case {"verdict": "rerun"}:
                return await self._execute(call)
            case {"verdict": "fail"}:
                raise self.remember(_unknown_outcome(call, f"a person decided to fail: {verdict.get('reason', 'no reason given')}"))
            case _:
                # The answer was validated before it was stored; a hand-written one may still be anything.
                activity = activity_id(self.run_id, call.position)
                raise self.remember(
                    InvalidAnswer(f"at {call.position}: the answer is no verdict on whether it happened", activity_id=activity, errors=[])
                )

    async def check_before_body(self, call: ActivityCall) -> None:
        """Something lies between `start` and a body: the body begins no more where the run, or the right to start effects, is lost meanwhile.

        Where `start` has left it to this (`is_checked_in_body`), it waits for the start's commit.

        Raises:
            LeaseLost: This process may start no effect now.
            AttemptOver, StoreError: The attempt is over.

        Invariants: I4.
        """
        if (acknowledged := self._starting.get(call.position.text)) is not None:
            await self._settled(acknowledged)
            self._starting.pop(call.position.text, None)
        self.check()
        self._check_lease()

    async def complete(self, call: ActivityCall, value: Any) -> None:
        """Record the result of an effect. When this returns it is durable.

        Args:
            value: Plain value.

        Writes: `activity.completed`; payload chunks before it.
        Invariants: I2, I3, I10.
        """
        stored = await self._sink.move_out(value)
        await self._record(call, EventType.ACTIVITY_COMPLETED, stored, value, None)

    async def complete_in_transaction(self, call: ActivityCall, body: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run a transactional body and commit its writes with its outcome: all or nothing, once.

        Args:
            body: Gets the driver's session, returns a plain value; it may run more than once, and only one run of it is kept.

        Returns:
            The recorded plain value.

        Raises:
            Exception: What the body raised; nothing was committed, and the failure is not recorded yet (see `fail`).

        Writes: See `store.transactional`.
        """
        self.check()
        outcome = self._event(EventType.ACTIVITY_COMPLETED, 0, call.position, kind=call.kind, name=call.name)
        try:
            committed = await self._sink.commit_with_outcome(outcome, body, self.history.apply)
        except BodyFailed as failed:
            if failed.seq is not None:
                self._reserved[call.position.text] = failed.seq
            raise failed.error from None
        self.history.activities[call.position.text].outcome = committed
        return committed.value

    async def fail(self, call: ActivityCall, error: Mapping[str, Any]) -> None:
        """Record that an effect failed, by the type and message of its error. A replay raises the same.

        Writes: `activity.failed`.
        """
        await self._record(call, EventType.ACTIVITY_FAILED, None, None, error)

    async def _record(self, call: ActivityCall, event_type: EventType, stored: Any, value: Any, error: Mapping[str, Any] | None) -> None:
        self.check()
        text = call.position.text
        reserved = self._reserved.pop(text, None)
        if reserved is None:
            acknowledged = self._append(
                event_type, is_awaited=True, position=call.position, value=value, stored=stored, error=error, kind=call.kind, name=call.name
            )
        else:
            event = self._event(event_type, reserved, call.position, error=error, kind=call.kind, name=call.name)
            self.history.activities[text].outcome = event
            acknowledged = self._sink.fill(event)
        self._unacknowledged[text] = acknowledged
        await self._settled(acknowledged)
        self._unacknowledged.pop(text, None)

    def finalize_step(self, step: int) -> None:
        """Seal root step `step`: queued, not awaited. On replay it is compared, not written again.

        Raises:
            NondeterminismError: The step did not reach exactly the recorded activities.
        """
        self.check()
        reached = self._reached.get(step, set())
        try:
            is_sealed = check_step(self.history, step, reached)
        except DurableError as failure:
            raise self.remember(failure) from None
        if not is_sealed and not self._sink.is_closed:
            data = {"step": step, "activities": len(reached), "digest": step_digest(reached)}
            self._append(EventType.STEP_COMMITTED, is_awaited=False, data=data)
        self._sealed = step

    async def await_timer(self, call: ActivityCall, when: datetime | timedelta) -> datetime | None:
        """Let a timer fire if it is due, or set it.

        Args:
            when: When it is to fire, or how long from now by the server's clock. What was recorded first stands.

        Returns:
            None when it has fired; else when it is to fire: the run is then to be given back until that time.

        Raises:
            NondeterminismError: The history has something else here.
            AttemptOver, StoreError: The attempt is over.

        Writes: `activity.started` once, `activity.completed` once.
        """
        self.check()
        text = call.position.text
        self._reached.setdefault(call.position.step, set()).add(text)
        try:
            decision = decide_timer(self.history, call.position, call.name, call.input_digest, consumed=self.consumed)
        except DurableError as failure:
            raise self.remember(failure) from None
        match decision:
            case TimerFired():
                return None
            case AwaitTimer(until, is_held=True):
                return until
            case _ if not self._sink.admits(call.position):
                return _NEVER
            case AwaitTimer(until):
                pass
            case SetTimer():
                until = self.now() + when if isinstance(when, timedelta) else when
                self._append(
                    EventType.ACTIVITY_STARTED,
                    is_awaited=False,
                    position=call.position,
                    kind=call.kind,
                    name=call.name,
                    input_digest=call.input_digest,
                    data={**self._start_data(call), "until": until},
                )
        if until - self.now() > _SHORT_WAIT:
            return until
        await asyncio.sleep(max((until - self.now()).total_seconds(), 0))
        await self.complete(call, None)
        return None

    async def rest(self, pending: Mapping[Position, Pending]) -> Suspended | Answered:
        """The graph has come to rest on these questions: pass the next recorded frontier, or suspend the run on a new one.

        Raises:
            NondeterminismError: The history has another frontier here.
            AttemptOver, StoreError: The attempt is over.
        """
        self.check()
        digests = {position: each.digest for position, each in pending.items()}
        self._sink.at_rest(self.history, self.consumed, digests)
        try:
            decision = match_frontier(self.history, self.consumed, digests)
        except DurableError as failure:
            raise self.remember(failure) from None
        if isinstance(decision, ConsumeFrontier):
            self.consumed += 1
            self.answers.update(decision.answers)
            return Answered(decision.answers)
        entries = [self._as_first_asked(each.entry) for each in pending.values() if each.entry is not None]
        await self._sink.hand_over()
        return Suspended(await self._patiently(lambda: self._sink.suspend(entries, self.history.unsaved)))

    def _as_first_asked(self, entry: FrontierEntry) -> FrontierEntry:
        """A question that is asked again, because its frontier expired for another one's sake, keeps the times that it had."""
        last = self.history.frontiers[-1] if self.history.frontiers else None
        if last is None or last.status is not FrontierStatus.EXPIRED or entry.position not in last.entries or last.is_closed(entry.position):
            return entry
        return replace(
            entry, expires_at=last.expires_at.get(entry.activity_id), escalates_at=last.escalates_at.get(entry.activity_id, entry.escalates_at)
        )

    async def end(self, ending: runs.Ending) -> None:
        """End the run under this attempt's fence.

        Raises:
            AttemptOver, StoreError: The attempt is over; how the run ends is not this attempt's to say.
        """
        await self._sink.hand_over()
        complete = replace(ending, unsaved=self.history.unsaved)
        await self._patiently(lambda: self._sink.end_run(complete))
        telemetry.count("runs.ended", workflow=self.head.workflow, status=heads.ENDING[ending.type])

    async def end_as_stopped(self) -> None:
        """End the run as it was marked to be ended: cancelled, or failed at its deadline. See `end`."""
        await self.end(await self._sink.stopped_ending())

    def check_end(self, last_step: int) -> None:
        """Whether a graph that ended at root step `last_step` has passed everything recorded.

        Raises:
            NondeterminismError: It has not.
        """
        self.check()
        try:
            check_end(self.history, self.consumed, last_step)
        except DurableError as failure:
            raise self.remember(failure) from None

    async def release(self, *, until: datetime | None = None, held_back: str | None = None) -> None:
        """Give the run back, so that another attempt can go on. What this attempt has recorded stays.

        Args:
            until, held_back: See `store.claims.release`.

        Raises:
            AttemptOver, StoreError: The attempt is over already.
        """
        await self._sink.drain()
        await self._sink.release(until=until, held_back=held_back)

    def _append(
        self, event_type: EventType, *, is_awaited: bool, position: Position | None = None, value: Any = None, stored: Any = None, **fields: Any
    ) -> asyncio.Future[int]:
        """Enqueue an event. The history of this attempt keeps `value`; what is sent is `stored`: it, or the reference to its chunks."""
        event = self._event(event_type, self._sink.seq + 1, position, value=stored, **fields)
        acknowledged = self._sink.append(event, is_awaited=is_awaited)
        self.history.apply(event if stored is value else replace(event, value=value))
        return acknowledged

    def _event(self, event_type: EventType, seq: int, position: Position | None, **fields: Any) -> Event:
        return Event(
            run_id=self.run_id,
            seq=seq,
            fence=self.fence,
            type=event_type,
            at=datetime.now(UTC),
            position=position,
            activity_id=activity_id(self.run_id, position) if position is not None else None,
            **fields,
        )

    async def _settled(self, acknowledged: asyncio.Future[int]) -> None:
        # Shielded: when the graph's task is cancelled, the event is still in the air and must be accounted for.
        await asyncio.shield(acknowledged)

    def _check_lease(self) -> None:
        if not self._sink.is_lease_valid:
            raise self.stop(
                LeaseLost(
                    f"run {self.run_id}: this process has not reached MongoDB for longer than its lease; it starts no effect", run_id=self.run_id
                )
            )

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a head transaction that is safe to repeat while the store is unavailable or its answers get lost."""

        async def tried() -> T:
            return await call()

        try:
            return await store_retrying(tenacity.stop_after_delay(_STORE_PATIENCE_S))(tried)
        except (AttemptOver, StoreError) as failure:
            # It takes the place of a verdict: the run was not ended with that one, and is not this attempt's to end any more.
            self.failure = failure.with_run(self.run_id)
            raise self.failure from None
        except DurableError as failure:
            raise self.remember(failure) from None


def _unknown_outcome(call: ActivityCall, why: str) -> UnknownOutcome:
    return UnknownOutcome(
        f"at {call.position}: a process died while {call.kind} {call.name!r} ran, and {why}; check the outside system, then retry or cancel the run",
        position=call.position.text,
        name=call.name,
    )
