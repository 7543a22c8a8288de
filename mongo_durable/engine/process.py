"""This process as MongoDB knows it: one identity, one lease, one appender, one change stream, whatever the number of runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from mongo_durable.store import schema
from mongo_durable.store.appender import Appender
from mongo_durable.store.connection import Connection, Endpoint
from mongo_durable.store.heartbeat import Heartbeat, Lease, acquire
from mongo_durable.store.wakeups import Wakeups

if TYPE_CHECKING:
    from mongo_durable.engine.attempt import Attempt

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

    async def aclose(self) -> None:
        """Stop the heartbeat and tell the others that this process is gone. Its connection stays open."""
        async with self._lock:
            heartbeat, self._heartbeat = self._heartbeat, None
            await self.wakeups.aclose()
            if heartbeat is not None:
                await heartbeat.stop()
