"""One change stream a process: the hint that a run has changed.

The stream is only a hint; the truth is a sweep by status. Whatever goes wrong with it (an error, a silent end, a token that does not move), the
answer is the same: drop the token, take the server's operation time, open again from there, and tell every listener to look for itself. What
happened in between is then seen by the look or by the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pymongo.errors import PyMongoError

from mongo_durable.errors import DurableError
from mongo_durable.protocol.events import RunStatus
from mongo_durable.store.connection import Endpoint

log = logging.getLogger(__name__)

SILENCE_S = 30.0
_AWAIT_MS = 1000
_LONGEST_PAUSE_S = 5.0

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
            "fullDocument.status": 1,
            "fullDocument.fence": 1,
            "fullDocument.available_at": 1,
            "fullDocument.deadline_at": 1,
        }
    },
]


@dataclass(frozen=True, slots=True)
class RunChange:
    """A head changed. What this change did not set is None."""

    run_id: str
    status: str | None
    fence: int | None
    available_at: datetime | None = None
    deadline_at: datetime | None = None


class Listener:
    """What one waiter has heard. `run_id` None hears of every run."""

    def __init__(self, run_id: str | None) -> None:
        self.run_id = run_id
        self._changes: deque[RunChange] = deque()
        self._is_to_look = True  # a new listener has missed everything so far
        self._heard = asyncio.Event()
        self._heard.set()

    def tell(self, change: RunChange | None) -> None:
        """Deliver a change, or None: look for yourself."""
        if change is None:
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


class Wakeups:
    """The process's one change stream on `runs`, on a client of its own, open while somebody listens."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._listeners: set[Listener] = set()
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def listen(self, run_id: str | None = None) -> AsyncIterator[Listener]:
        """Hear of changes until the block ends."""
        listener = Listener(run_id)
        self._listeners.add(listener)
        if self._task is None:
            self._task = asyncio.create_task(self._watch(), name="mongo_durable-wakeups")
        try:
            yield listener
        finally:
            self._listeners.discard(listener)
            if not self._listeners:
                await self.aclose()

    async def aclose(self) -> None:
        """Close the stream."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _tell(self, change: RunChange | None) -> None:
        for listener in self._listeners:
            if change is None or listener.run_id is None or listener.run_id == change.run_id:
                listener.tell(change)

    async def _watch(self) -> None:
        pause = 0.1
        while not _is_cancelled():
            opened = time.monotonic()
            try:
                await self._watch_once()
                if _is_cancelled():
                    return
                log.warning("change stream ended or fell silent; sweeping and opening it again")
            except (PyMongoError, DurableError) as error:
                log.warning("change stream failed with %s; sweeping and opening it again", type(error).__name__)
            if _is_cancelled():
                return
            self._tell(None)
            if time.monotonic() - opened > SILENCE_S:
                pause = 0.1
            await asyncio.sleep(pause * (0.5 + random.random()))  # jitter, so that processes do not reopen in step
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def _watch_once(self) -> None:
        connection = self._endpoint.dedicated_connection()
        try:
            start = await _uncancelled(connection.operation_time())
            stream_of = connection.change_stream(
                connection.runs, PIPELINE, start_at_operation_time=start, max_await_time_ms=_AWAIT_MS, batch_size=1000
            )
            async with stream_of as stream:
                self._tell(None)
                await self._read(stream)
        finally:
            await connection.aclose()

    async def _read(self, stream: Any) -> None:
        """Deliver changes until the stream ends or its token stands still for too long."""
        token, moved_at = None, time.monotonic()
        while stream.alive and not _is_cancelled():
            change = await stream.try_next()
            if change is not None:
                if "documentKey" not in change:
                    return  # drop, rename or invalidate: nothing more comes
                self._tell(_run_change(change))
            if stream.resume_token != token:
                token, moved_at = stream.resume_token, time.monotonic()
            elif time.monotonic() - moved_at > SILENCE_S:
                return


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
    )


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
