"""This process as MongoDB knows it: one identity, one lease, one appender, one change stream, whatever the number of runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from mongo_durable.engine.policy import store_retrying
from mongo_durable.errors import StoreError
from mongo_durable.store import claims, schema
from mongo_durable.store.appender import Appender
from mongo_durable.store.connection import Connection, Endpoint
from mongo_durable.store.heartbeat import Heartbeat, Lease, acquire
from mongo_durable.store.wakeups import Wakeups
from mongo_durable.telemetry import about

if TYPE_CHECKING:
    from mongo_durable.engine.attempt import Attempt

log = logging.getLogger(__name__)
T = TypeVar("T")

DEFAULT_LEASE = timedelta(seconds=10)


class Process:
    """What the runs of one process share, on one event loop. Open it once; `aclose` gives the lease up.

    Args:
        serves: Name and version of the workflows whose runs it looks for; none unless it is a runner's.
    """

    def __init__(
        self, endpoint: Endpoint, lease: timedelta = DEFAULT_LEASE, serves: Sequence[tuple[str, str]] = (), *, use_change_stream: bool = True
    ) -> None:
        self.endpoint = endpoint
        self.connection: Connection = endpoint.connection()
        self.wakeups = Wakeups(endpoint, use_change_stream=use_change_stream)
        self.running: dict[str, Attempt | None] = {}
        """Runs that this process knows it executes; a head that names this process beyond these was claimed by a call whose reply was lost."""
        self._lease_duration = lease
        self._serves = serves
        self._heartbeat: Heartbeat | None = None
        self._appender: Appender | None = None
        self._lock = asyncio.Lock()
        self._in_doubt: set[asyncio.Task[None]] = set()

    @property
    def appender(self) -> Appender:
        """The group commit of this connection."""
        if self._appender is None:
            self._appender = Appender(self.connection)
        return self._appender

    async def lease(self) -> Lease:
        """A lease under which work may be started: taken on first use, and taken anew after the last one was lost.

        A lease that has run out and is not lost may be kept yet: this waits for the heartbeat, because a run that is claimed without a valid lease
        could only be given back, to be claimed again.

        Raises:
            StoreUnavailable: MongoDB acknowledges no lease.
        """
        while True:
            async with self._lock:
                if self._heartbeat is not None and self._heartbeat.lease.is_lost:
                    await self._heartbeat.stop()
                    self._heartbeat = None
                if self._heartbeat is None:
                    await schema.prepare(self.connection)
                    self._heartbeat = Heartbeat(self.endpoint, await acquire(self.connection, self._lease_duration, self._serves))
                    self.connection.on_close(self.aclose)
                heartbeat = self._heartbeat
            if await heartbeat.is_kept():
                return heartbeat.lease

    @property
    def held_lease(self) -> Lease | None:
        """The lease, if this process has one under which work may be started now. Unlike `lease` this takes none, and waits for nothing."""
        return self._heartbeat.lease if self._heartbeat is not None and self._heartbeat.lease.is_valid else None

    async def taking(self, run_id: str, lease: Lease, take: Awaitable[T]) -> T:
        """Await what makes this process the attempt of a run. Where that comes to a claim, the run is known as this process's (`running`) until the
        caller says otherwise.

        A caller that is cancelled, or that hears of no outcome, executes nothing, and nobody else would: this process lives, and the head names it.
        So the run is given back, as soon as it is known to have been taken.
        """
        self.running[run_id] = None
        taken = asyncio.ensure_future(take)
        try:
            outcome = await asyncio.shield(taken)
        except (asyncio.CancelledError, StoreError):
            settling = asyncio.create_task(self._give_up(run_id, lease, taken))
            self._in_doubt.add(settling)
            settling.add_done_callback(self._in_doubt.discard)
            raise
        except BaseException:
            self.running.pop(run_id, None)
            raise
        if not isinstance(outcome, claims.Claim):
            self.running.pop(run_id, None)
        return outcome

    async def _give_up(self, run_id: str, lease: Lease, taken: asyncio.Future[Any]) -> None:
        retrying = store_retrying(lambda _: lease.is_lost)  # then the others know that they may take it
        try:
            await asyncio.wait([taken])
            await retrying(claims.give_up, self.connection, run_id, lease.owner)
        except StoreError as error:
            log.warning("run %s may be left to the end of this process's lease: %s", run_id, error, extra=about(run_id))
        finally:
            taken.cancel()
            self.running.pop(run_id, None)

    async def aclose(self) -> None:
        """Stop the heartbeat and tell the others that this process is gone. Its connection stays open."""
        for task in self._in_doubt:
            task.cancel()
        await asyncio.gather(*self._in_doubt, return_exceptions=True)
        async with self._lock:
            heartbeat, self._heartbeat = self._heartbeat, None
            await self.wakeups.aclose()
            if heartbeat is not None:
                await heartbeat.stop()
