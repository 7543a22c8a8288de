"""One change stream a process: the hint that a run has changed.

The stream is only a hint; the truth is a sweep by status. Whatever goes wrong with it (an error at its opening or later, a history that the oplog has
lost, a silent end, a token that does not move), the answer is the same: drop the token, tell every listener to look for itself, wait a little longer
than the last time, take the server's operation time, open again from there, and have everybody look once more. What happened in between is then seen
by the look or by the stream.

Apps, runners and clients on one event loop share a stream where they reach one database in one way: by the same URI, or through the same client of
the application. (A driver's client belongs to its loop, so a synchronous client, which has a loop of its own, has a stream of its own.) The stream
has its own client, is opened when somebody first waits, and closed when nobody has listened for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
import weakref
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pymongo.errors import OperationFailure, PyMongoError

from mongo_durable.errors import DurableError
from mongo_durable.protocol.events import RunStatus
from mongo_durable.store.connection import Endpoint
from mongo_durable.store.faults import UNAUTHORIZED

log = logging.getLogger(__name__)

SILENCE = timedelta(seconds=30)
"""A healthy idle server moves the token every 10 s: a stream whose token stands still for longer than this has gone blind."""

_AWAIT_MS = 1000
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_STEADY_S = 30.0  # a stream that was open for so long has ended a trouble; the next one begins with the first pause
_LINGER_S = 10.0  # waits that follow one another share a stream
_CLOSE_S = 2.0
_MOST_CHANGES = 10_000

# `drop`, `rename` and `invalidate` are named, because a stream whose pipeline leaves them out ends without a word.
PIPELINE: list[dict[str, Any]] = [
    {
        "$match": {
            "$or": [
                {"operationType": {"$in": ["insert", "replace", "drop", "rename", "invalidate"]}},
                {
                    "operationType": "update",
                    "$or": [
                        {"updateDescription.updatedFields.status": {"$exists": True}},
                        {"updateDescription.updatedFields.fence": {"$exists": True}},
                        {"updateDescription.updatedFields.cancel": {"$exists": True}},
                        {"updateDescription.updatedFields.is_queued": {"$exists": True}},
                    ],
                },
            ]
        }
    },
    {
        "$project": {
            "operationType": 1,
            "documentKey": 1,
            "updateDescription.updatedFields.status": 1,
            "updateDescription.updatedFields.fence": 1,
            "updateDescription.updatedFields.is_queued": 1,
            "updateDescription.updatedFields.available_at": 1,
            "updateDescription.updatedFields.news": 1,
            "updateDescription.updatedFields.cancel.channel": 1,
            "fullDocument.status": 1,
            "fullDocument.fence": 1,
            "fullDocument.available_at": 1,
            "fullDocument.deadline_at": 1,
            "fullDocument.workflow": 1,
        }
    },
]


@dataclass(frozen=True, slots=True)
class RunChange:
    """A head changed. What this change did not set is None.

    Attributes:
        workflow: Name and version, where the run is new or can be claimed.
        is_left_to_runners: The run was marked to be stopped in mongosh, which leaves the rest to the runners; others take the run over themselves.
    """

    run_id: str
    status: str | None
    fence: int | None
    available_at: datetime | None = None
    deadline_at: datetime | None = None
    workflow: tuple[str, str] | None = None
    is_left_to_runners: bool = False


class Listener:
    """What one waiter has heard. `run_id` None hears of every run."""

    def __init__(self, run_id: str | None, stream: _Stream | None) -> None:
        self.run_id = run_id
        self._stream = stream
        self._changes: deque[RunChange] = deque()
        self._is_to_look = True  # a new listener has missed everything so far
        self._heard = asyncio.Event()
        self._heard.set()
        if stream is not None:
            stream.join(self)

    def tell(self, change: RunChange | None) -> None:
        """Deliver a change, or None: look for yourself."""
        if change is None or len(self._changes) >= _MOST_CHANGES:
            self._is_to_look = True
            self._changes.clear()
        elif not self._is_to_look:
            self._changes.append(change)
        self._heard.set()

    def wake(self) -> None:
        """Let `wait` return with what has been heard so far, if only nothing."""
        self._heard.set()

    async def wait(self, timeout: float | None = None) -> list[RunChange] | None:
        """The changes since the last call, or None: look for yourself (after trouble, at first, and at the timeout)."""
        if self._stream is not None:
            self._stream.open()  # not before: most waits find at their first look what they wait for
        try:
            async with asyncio.timeout(timeout):
                await self._heard.wait()
        except TimeoutError:
            return None
        self._heard.clear()
        if self._is_to_look:
            self._is_to_look = False
            return None
        changes = list(self._changes)
        self._changes.clear()
        return changes

    def leave(self) -> None:
        """Hear nothing more. Calling again does nothing."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.leave(self)


class Wakeups:
    """What one app, runner or client hears through the change stream that it shares with the others.

    Args:
        use_change_stream: False opens none: listeners are told nothing, and look for themselves at their timeouts.
        silence: How long a stream's token may stand still before the stream counts as blind.
    """

    def __init__(self, endpoint: Endpoint, *, use_change_stream: bool = True, silence: timedelta = SILENCE) -> None:
        self._endpoint = endpoint
        self._use_change_stream = use_change_stream
        self._silence = silence
        self._streams: set[_Stream] = set()
        self._listeners: set[Listener] = set()

    @asynccontextmanager
    async def listen(self, run_id: str | None = None) -> AsyncIterator[Listener]:
        """Hear of changes until the block ends."""
        stream = _shared(self._endpoint, self._silence) if self._use_change_stream else None
        if stream is not None:
            self._streams.add(stream)
        listener = Listener(run_id, stream)
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)
            listener.leave()

    @property
    def lag(self) -> timedelta | None:
        """How long ago the stream last gave a sign of life, of which an idle server gives one every 10 s. None while no stream is wanted here."""
        lags = [stream.lag_s for stream in self._streams if stream.lag_s is not None]
        return timedelta(seconds=max(lags)) if lags else None

    async def aclose(self) -> None:
        """Hear nothing more, and close the stream unless others listen to it."""
        for listener in self._listeners:
            listener.leave()
        self._listeners.clear()
        streams, self._streams = self._streams, set()
        for stream in streams:
            await stream.close_if_unused()


class _Stream:
    """One change stream on `runs`, kept open by a task of its own while somebody needs it."""

    def __init__(self, endpoint: Endpoint, silence: timedelta, siblings: dict[_Key, _Stream]) -> None:
        self._endpoint = endpoint
        self._silence_s = silence.total_seconds()
        self._siblings = siblings
        self._listeners: defaultdict[str | None, set[Listener]] = defaultdict(set)
        self._keeper: asyncio.Task[None] | None = None
        self._closing: asyncio.TimerHandle | None = None
        self._opened_at = math.inf
        self._lived_at = 0.0  # when the token last moved

    def join(self, listener: Listener) -> None:
        self._listeners[listener.run_id].add(listener)
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None

    def leave(self, listener: Listener) -> None:
        listeners = self._listeners[listener.run_id]
        listeners.discard(listener)
        if not listeners:
            del self._listeners[listener.run_id]
        if not self._listeners:
            self._closing = asyncio.get_running_loop().call_later(_LINGER_S, self._end)

    def open(self) -> None:
        if self._keeper is None or self._keeper.done():
            self._lived_at = time.monotonic()
            self._keeper = asyncio.create_task(self._keep(), name="mongo_durable-wakeups")

    @property
    def lag_s(self) -> float | None:
        return time.monotonic() - self._lived_at if self._keeper is not None else None

    async def close_if_unused(self) -> None:
        if not self._listeners:
            keeper = self._end()
            if keeper is not None:
                with contextlib.suppress(asyncio.CancelledError):
                    await keeper

    def _end(self) -> asyncio.Task[None] | None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        # At once: who comes now gets another stream, and never waits for the end of this one.
        for key in [key for key, stream in self._siblings.items() if stream is self]:
            del self._siblings[key]
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
        return keeper

    def _tell(self, change: RunChange | None) -> None:
        listeners = [each for every in self._listeners.values() for each in every]
        if change is not None:
            listeners = [*self._listeners.get(None, ()), *self._listeners.get(change.run_id, ())]
        for listener in listeners:
            listener.tell(change)

    async def _keep(self) -> None:
        """Open the stream again whenever it ends, with longer and longer pauses while it does not last."""
        pause = _FIRST_PAUSE_S
        while True:
            self._opened_at = math.inf
            # A task of its own: where the server hangs, the driver can take a minute to notice, and half of one to let go of a cursor.
            reading = asyncio.create_task(self._read(), name="mongo_durable-wakeups-reading")
            try:
                what = await self._until_over(reading)
            except asyncio.CancelledError:
                _abandon(reading)
                await asyncio.wait([reading], timeout=_CLOSE_S)
                raise
            _abandon(reading)
            log.warning("change stream %s; sweeping and opening it again", what)
            self._tell(None)
            if self._lived_at - self._opened_at > _STEADY_S:
                pause = _FIRST_PAUSE_S
            await asyncio.sleep(pause * (0.5 + random.random()))  # jitter, so that processes do not reopen in step
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def _until_over(self, reading: asyncio.Task[None]) -> str:
        """What the end of the stream was, in words."""
        begun = time.monotonic()
        while True:
            left = max(begun, self._lived_at) + self._silence_s - time.monotonic()
            if left <= 0:
                return f"fell silent for {self._silence_s:.0f} s"
            await asyncio.wait([reading], timeout=left)
            if not reading.done():
                continue
            error = asyncio.CancelledError() if reading.cancelled() else reading.exception()
            if error is None:
                return "ended"
            if not isinstance(error, PyMongoError | DurableError | asyncio.CancelledError):
                log.error("change stream failed in a way that is not expected", exc_info=error)
            hint = ""
            if isinstance(error, OperationFailure) and error.code == UNAUTHORIZED:
                hint = ": this user may open none, so changes are found by looking, at intervals"
            return f"failed with {type(error).__name__}{hint}"

    async def _read(self) -> None:
        """Deliver changes until the stream ends."""
        connection = self._endpoint.dedicated_connection()
        try:
            start = await _uncancelled(connection.operation_time())
            stream_of = connection.change_stream(
                connection.runs, PIPELINE, start_at_operation_time=start, max_await_time_ms=_AWAIT_MS, batch_size=1000
            )
            async with stream_of as stream:
                self._opened_at = time.monotonic()
                self._tell(None)
                token = None
                while stream.alive and not _is_cancelled():
                    change = await stream.try_next()
                    if _is_cancelled():
                        return  # another stream has taken over
                    if stream.resume_token != token:
                        token, self._lived_at = stream.resume_token, time.monotonic()
                    if change is not None:
                        if "documentKey" not in change:
                            return  # drop, rename or invalidate: nothing more comes
                        self._tell(_run_change(change))
        finally:
            await connection.aclose()


_Key = tuple[object, str, timedelta]
_streams: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, _Stream]] = weakref.WeakKeyDictionary()
_abandoned: set[asyncio.Task[None]] = set()


def _shared(endpoint: Endpoint, silence: timedelta) -> _Stream:
    """The running loop's stream on this database."""
    streams = _streams.setdefault(asyncio.get_running_loop(), {})
    key = (endpoint.uri if endpoint.uri is not None else id(endpoint.client), endpoint.database, silence)
    if key not in streams:
        streams[key] = _Stream(endpoint, silence, streams)
    return streams[key]


def _abandon(reading: asyncio.Task[None]) -> None:
    """Let a reader end in its own time."""

    def ended(task: asyncio.Task[None]) -> None:
        _abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # nobody will ask for it

    _abandoned.add(reading)
    reading.add_done_callback(ended)
    reading.cancel()


def _run_change(change: dict[str, Any]) -> RunChange:
    fields = change.get("fullDocument") or change.get("updateDescription", {}).get("updatedFields", {})
    status = fields.get("status")
    if fields.get("is_queued") is False and status is None:
        status = RunStatus.PENDING.value  # its thread has become free
    return RunChange(
        run_id=change["documentKey"]["_id"],
        status=status,
        fence=fields.get("fence"),
        available_at=fields.get("available_at"),
        deadline_at=fields.get("deadline_at"),
        workflow=_workflow(fields),
        is_left_to_runners="channel" in (fields.get("cancel") or {}),
    )


def _workflow(fields: dict[str, Any]) -> tuple[str, str] | None:
    if "workflow" in fields:
        return fields["workflow"]["name"], fields["workflow"]["version"]
    name, _, rest = (fields.get("news") or "").rpartition("\n")[0].partition("\n")
    return (name, rest) if name else None


async def _uncancelled(coroutine: Coroutine[Any, Any, Any]) -> Any:
    # A cancellation while the driver connects leaks its socket (seen in 4.20): it has to wait until the first command is through.
    task = asyncio.ensure_future(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # nobody will ask for it
        raise


def _is_cancelled() -> bool:
    # The driver can turn a cancellation into an error of its own (seen in 4.20, while it connects): the task alone remembers.
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
