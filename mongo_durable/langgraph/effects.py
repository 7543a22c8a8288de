"""The heart of every wrapper: run an effect once, durably, or give what was recorded.

`run_effect` and `run_effect_async` are the two colours of one protocol; what they share is in `Effect`.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from langgraph.errors import GraphBubbleUp, GraphInterrupt

from mongo_durable import telemetry
from mongo_durable.engine.attempt import ActivityCall, Happened, Pend, Recorded, StartResult
from mongo_durable.engine.policy import OnUnknownOutcome, RetryPolicy
from mongo_durable.errors import OF_THE_CODE, Draining, DurableError
from mongo_durable.langgraph.codec import Codec
from mongo_durable.langgraph.control import CONTROL_FLOW, DurableSignal, marker
from mongo_durable.langgraph.copies import ATOMS
from mongo_durable.langgraph.crossing import await_on_loop
from mongo_durable.langgraph.current import CurrentActivity, set_current_activity
from mongo_durable.langgraph.messages import stamp
from mongo_durable.langgraph.redaction import redacted
from mongo_durable.langgraph.scope import Scope, Session, inside_body
from mongo_durable.langgraph.seams import is_invalid_resume
from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.events import ActivityKind, Event, EventType
from mongo_durable.protocol.identity import activity_id
from mongo_durable.protocol.parts import shorten

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How an effect is to be treated.

    Attributes:
        is_transactional: The body gets a driver session, and what it writes to the cluster commits with its outcome. Async bodies only.
    """

    on_unknown_outcome: OnUnknownOutcome
    is_transactional: bool = False
    retry: RetryPolicy | None = None
    is_start_awaited: bool = True


@dataclass(slots=True, kw_only=True)  # not frozen: there is one for each effect of a replay
class Effect:
    """An effect that a body has started: its position is taken when this is made.

    Attributes:
        shown_input: Plain value stored with the start, for people; None stores none.
        happened: Makes the effect's value from the result that a person gave for it.
    """

    session: Session
    codec: Codec
    scope: Scope
    call: ActivityCall
    policy: Policy
    happened: Callable[[Any], Any]

    @property
    def is_to_drain(self) -> bool:
        """Whether the process is being stopped and this effect is not part of one that runs already."""
        attempt = self.session.attempt
        return attempt.is_draining and not attempt.history.is_nested(self.call.position)

    def drained(self) -> DurableSignal:
        """What stops the attempt before this effect; no other effect may be running then."""
        attempt = self.session.attempt
        return DurableSignal(attempt.remember(Draining(f"run {attempt.run_id}: this process is being stopped", run_id=attempt.run_id)))

    def _check_in(self) -> None:
        self.session.begin()

    def _check_out(self) -> None:
        self.scope.finished(self.call.position)
        self.session.end()

    def _outcome(self, started: StartResult) -> tuple[bool, Any]:
        """Whether there is a result without running the body, and it.

        Raises:
            GraphInterrupt: The effect pends.
            Exception: What the effect had raised.
        """
        match started:
            case Recorded(outcome):
                telemetry.count("activities", kind=self.call.kind.value, how="replayed")
                return True, self._recorded(outcome)
            case Pend(pending):
                self.session.pending.update(pending)
                raise marker(self.call.position.text)
            case _:
                return False, None

    def _from_person(self, verdict: Happened) -> Any:
        return self.happened(self.codec.decode(verdict.result))

    def _recorded(self, outcome: Event) -> Any:
        if outcome.type is EventType.ACTIVITY_COMPLETED:
            value = outcome.value
            return value if type(value) in ATOMS else self.codec.decode(value)
        raise self.codec.rebuild_error(outcome.error or {"type": "Exception", "message": "no error was recorded"})

    def _encode(self, value: Any) -> tuple[Any, Any]:
        """The plain value of a result, and the caller's own copy of it: what a replay would give, so that both see the same."""
        if type(value) in ATOMS:
            return self.codec.encode(value), value
        copy = self.codec.decode(self.codec.encode(value))
        stamp(copy, self.identity)
        return self.codec.encode(copy), copy

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around the body: its span, its duration, its log records."""
        kind, name, attempt = self.call.kind.value, self.call.name, self.session.attempt
        named = telemetry.about(attempt.run_id, attempt.fence, self.call.position.text)
        telemetry.count("activities", kind=kind, how="executed")
        log.debug("run %s: %s %r at %s runs", attempt.run_id, kind, name, self.call.position, extra=named)
        outcome, started = "failed", time.monotonic()
        try:
            with telemetry.span("activity", kind=kind, name=name, activity_id=activity_id(attempt.run_id, self.call.position), **named):
                yield
            outcome = "completed"
        except GraphBubbleUp:
            outcome = "suspended"
            raise
        finally:
            telemetry.measure("activity.duration", time.monotonic() - started, kind=kind, outcome=outcome)
            log.debug("run %s: %s %r at %s %s", attempt.run_id, kind, name, self.call.position, outcome, extra=named)

    @property
    def identity(self) -> str:
        """What ids of messages in the result derive from: run and position.

        The run, because the turns of a thread share positions, and `add_messages` replaces a message by its id.
        """
        return f"{self.session.attempt.run_id}:{self.call.position.text}"

    def checked(self, signal: GraphBubbleUp) -> GraphBubbleUp:
        """Control flow that leaves the body: an interrupt may leave a tool only, whose body is isolated."""
        if isinstance(signal, GraphInterrupt) and self.call.kind is not ActivityKind.TOOL:
            why = f"{self.call.kind} {self.call.name!r} was interrupted inside: call interrupt() in the node or in a tool instead"
            return self.scope.root.refuse(why)
        return signal

    @property
    def _current(self) -> CurrentActivity:
        attempt = self.session.attempt
        return CurrentActivity(
            activity_id=activity_id(attempt.run_id, self.call.position),
            run_id=attempt.run_id,
            position=self.call.position.text,
            attempt=attempt.fence,
        )


def start_effect(
    session: Session,
    codec: Codec,
    scope: Scope,
    kind: ActivityKind,
    name: str,
    semantic_input: Any,
    policy: Policy,
    *,
    shown_input: Any = None,
    parts: Sequence[str] = (),
    tool_call_id: str | None = None,
    is_checked_in_body: bool = False,
    happened: Callable[[Any], Any] = lambda result: result,
) -> Effect:
    """Take the position of an effect. Call this where the body calls the effect, before anything is awaited.

    Args:
        is_checked_in_body: See `ActivityCall`: every body that is run for this effect begins with `check_before_body`.
    """
    input_digest = digest(semantic_input)
    if session.redact is not None and shown_input is not None:
        shown_input = redacted(session.redact, codec, kind, name, shown_input)
    position, is_overlapped = scope.allocate(kind, name, input_digest, tool_call_id)
    call = ActivityCall(
        position=position,
        kind=kind,
        name=name,
        input_digest=input_digest,
        input=shown_input,
        parts=shorten(parts),
        on_unknown_outcome=policy.on_unknown_outcome,
        is_start_awaited=policy.is_start_awaited,
        is_checked_in_body=is_checked_in_body,
        is_overlapped=is_overlapped,
    )
    return Effect(session=session, codec=codec, scope=scope, call=call, policy=policy, happened=happened)


async def run_effect_async(effect: Effect, body: Callable[..., Awaitable[Any]]) -> Any:
    """Run the effect's body, or return what was recorded for it.

    Args:
        body: Gets the scope of its own effects; a transactional one also the driver's session.

    Raises:
        DurableSignal: The attempt is over, diverged or refused.
        GraphInterrupt: The effect pends on an interrupt.
    """
    attempt = effect.session.attempt
    if effect.is_to_drain:
        await effect.session.settle_async()
        raise effect.drained()
    effect._check_in()
    try:
        try:
            started = await attempt.start(effect.call)
            is_known, value = effect._outcome(started)
            if is_known:
                return value
            if effect.policy.is_transactional:
                return effect.codec.decode(await _run_body_async(effect, lambda scope: _in_transaction(effect, scope, body)))
            value = effect._from_person(started) if isinstance(started, Happened) else await _run_body_async(effect, body)
            plain, copy = effect._encode(value)
            await attempt.complete(effect.call, plain)
            return copy
        except DurableError as error:
            if isinstance(error, OF_THE_CODE):
                raise
            raise DurableSignal(attempt.remember(error)) from error
    finally:
        effect._check_out()


async def _in_transaction(effect: Effect, scope: Scope, body: Callable[..., Awaitable[Any]]) -> Any:
    async def plain_body(session: Any) -> Any:
        plain, _ = effect._encode(await body(scope, session))
        return plain

    return await effect.session.attempt.complete_in_transaction(effect.call, plain_body)


async def _run_body_async(effect: Effect, body: Callable[[Scope], Awaitable[Any]]) -> Any:
    scope = effect.scope.inside(effect.call.position)
    leave = inside_body(scope)
    forget = set_current_activity(effect._current)
    retry = effect.policy.retry
    is_another_try = False

    async def tried() -> Any:
        nonlocal is_another_try
        if is_another_try:
            await check_before_body_async(effect)
        is_another_try = True
        return await body(scope)

    try:
        with effect.watched():
            return await (body(scope) if retry is None else retry.run_async(tried, CONTROL_FLOW))
    except GraphBubbleUp as signal:
        raise effect.checked(signal) from None
    except Exception as error:
        if not _is_ours(error):
            recorded = effect.codec.describe_error(error)
            await effect.session.attempt.fail(effect.call, recorded)
            # What a replay will raise is raised now too, so that user code sees the same in every attempt.
            raise effect.codec.rebuild_error(recorded) from error
        raise
    finally:
        forget()
        leave()


def run_effect(effect: Effect, body: Callable[[Scope], Any]) -> Any:
    """The same for a graph that runs in threads."""
    attempt = effect.session.attempt
    what = f"{effect.call.kind} {effect.call.name!r}"
    if effect.is_to_drain:
        effect.session.settle()
        raise effect.drained()
    effect._check_in()
    try:
        try:
            started = await_on_loop(attempt.loop, attempt.start(effect.call), what)
            is_known, value = effect._outcome(started)
            if is_known:
                return value
            value = effect._from_person(started) if isinstance(started, Happened) else _run_body(effect, body, what)
            plain, copy = effect._encode(value)
            await_on_loop(attempt.loop, attempt.complete(effect.call, plain), what)
            return copy
        except DurableError as error:
            if isinstance(error, OF_THE_CODE):
                raise
            raise DurableSignal(attempt.remember(error)) from error
    finally:
        effect._check_out()


def _run_body(effect: Effect, body: Callable[[Scope], Any], what: str) -> Any:
    attempt = effect.session.attempt
    scope = effect.scope.inside(effect.call.position)
    leave = inside_body(scope)
    forget = set_current_activity(effect._current)
    retry = effect.policy.retry
    is_another_try = False

    def tried() -> Any:
        nonlocal is_another_try
        if is_another_try:
            check_before_body(effect)
        is_another_try = True
        return body(scope)

    try:
        with effect.watched():
            return body(scope) if retry is None else retry.run(tried, CONTROL_FLOW)
    except GraphBubbleUp as signal:
        raise effect.checked(signal) from None
    except Exception as error:
        if not _is_ours(error):
            recorded = effect.codec.describe_error(error)
            await_on_loop(attempt.loop, attempt.fail(effect.call, recorded), what)
            raise effect.codec.rebuild_error(recorded) from error
        raise
    finally:
        forget()
        leave()


async def check_before_body_async(effect: Effect) -> None:
    """Called where a body begins later than its effect: in another try, behind the start of a graph of its own, or in a thread.

    Raises:
        DurableSignal: The run, or the right to start effects, is lost meanwhile.
    """
    try:
        await effect.session.attempt.check_before_body(effect.call)
    except DurableError as error:
        raise DurableSignal(error) from None  # control flow, which no retry policy catches


def check_before_body(effect: Effect) -> None:
    """The same for a graph that runs in threads."""
    await_on_loop(effect.session.attempt.loop, check_before_body_async(effect), f"{effect.call.kind} {effect.call.name!r}")


def checked_in_thread(effect: Effect, function: Callable[P, T]) -> Callable[P, T]:
    """A synchronous body for a thread of the loop's executor, where it may have to wait for its turn: it looks once more before it begins."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        check_before_body(effect)
        return function(*args, **kwargs)

    return run


def _is_ours(error: Exception) -> bool:
    # An answer that its interrupt's schema refuses is not the tool's failure; the interrupt stays unanswered.
    return is_invalid_resume(error) or (isinstance(error, DurableError) and not isinstance(error, OF_THE_CODE))
