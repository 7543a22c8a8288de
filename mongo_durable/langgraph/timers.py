"""Durable timers: a wait that no coroutine and no thread has to sit out, and that survives every process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from typing import Any

from mongo_durable.engine.attempt import ActivityCall
from mongo_durable.errors import ConfigurationError, DurableError
from mongo_durable.langgraph.control import DurableSignal, marker
from mongo_durable.langgraph.crossing import await_on_loop, runs
from mongo_durable.langgraph.scope import Scope, Session, current_session, here
from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.events import ActivityKind

_NAME = "sleep"
_ANY_TIME = digest(None)
"""The input of every timer: what was recorded first stands, so code that computes another time does not diverge."""


def sleep(*, seconds: float | timedelta | None, until: datetime | None) -> Awaitable[None] | None:
    """Wait in the node that runs now; see `App.sleep`. On an event loop the wait begins when the result is awaited; elsewhere it is over here."""
    when = _checked(seconds, until)
    session = current_session()
    if session is None:
        remaining = max((when if isinstance(when, timedelta) else when - datetime.now(UTC)).total_seconds(), 0)
        if _is_on_a_loop():
            return asyncio.sleep(remaining)
        time.sleep(remaining)
        return None
    timer = _Timer(session, here(), when)
    if runs(session.attempt.loop):
        return timer.wait_async()
    timer.wait()
    return None


def _checked(seconds: float | timedelta | None, until: datetime | None) -> datetime | timedelta:
    if (seconds is None) == (until is None):
        raise ConfigurationError("sleep needs seconds= or until=")
    if until is not None:
        if until.tzinfo is None:
            raise ConfigurationError("sleep(until=…) needs a time with a time zone, such as datetime.now(UTC) + timedelta(days=1)")
        return until
    assert seconds is not None
    duration = seconds if isinstance(seconds, timedelta) else timedelta(seconds=seconds)
    if duration < timedelta():
        raise ConfigurationError(f"sleep(seconds={seconds}) is negative")
    return duration


def _is_on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Timer:
    """One timer at its position, which is taken when this is made."""

    def __init__(self, session: Session, scope: Scope, when: datetime | timedelta) -> None:
        self._session = session
        self._scope = scope
        self._when = when
        position, is_overlapped = scope.allocate(ActivityKind.TIMER, _NAME, _ANY_TIME, None)
        if session.attempt.history.is_nested(position):
            raise scope.root.refuse("app.sleep() inside a tool or activity: call it in the node, before or after")
        self._call = ActivityCall(
            position=position,
            kind=ActivityKind.TIMER,
            name=_NAME,
            input_digest=_ANY_TIME,
            on_unknown_outcome="rerun",
            is_overlapped=is_overlapped,
        )

    async def wait_async(self) -> None:
        self._session.begin()
        try:
            self._take(await self._session.attempt.await_timer(self._call, self._when))
        except DurableError as error:
            raise DurableSignal(self._session.attempt.remember(error)) from error
        finally:
            self._leave()

    def wait(self) -> None:
        attempt: Any = self._session.attempt
        self._session.begin()
        try:
            self._take(await_on_loop(attempt.loop, attempt.await_timer(self._call, self._when), "app.sleep"))
        except DurableError as error:
            raise DurableSignal(attempt.remember(error)) from error
        finally:
            self._leave()

    def _take(self, until: datetime | None) -> None:
        if until is not None:
            self._session.timers[self._call.position] = until
            raise marker(self._call.position.text)

    def _leave(self) -> None:
        self._scope.finished(self._call.position)
        self._session.end()
