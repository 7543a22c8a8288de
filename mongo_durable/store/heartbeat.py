"""The lease of this process, and the thread that keeps it.

The heartbeat has a thread and a synchronous client of its own, so that a busy event loop does not lose the lease of a healthy process. The lease
counts from before the heartbeat was sent, by a clock that goes on while the machine is suspended. An identity that another process has declared
dead stays dead (`Lease.is_lost`); who wants to go on takes a new one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import pymongo
from pymongo.errors import PyMongoError

from mongo_durable.errors import StoreUnavailable
from mongo_durable.store import claims
from mongo_durable.store.connection import Connection, Endpoint

log = logging.getLogger(__name__)

_BEAT = 1 / 4
"""Pause between two heartbeats, as a share of the lease."""
_BEAT_GIVES_UP = 1 / 3
"""How long a heartbeat waits for its answer, as a share of the lease: on a connection that died without a word the driver waits for half a minute.
The next heartbeat takes another connection, and is in time."""

# CLOCK_MONOTONIC stands still while a machine is suspended; CLOCK_BOOTTIME, where there is one, does not.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def lease_clock() -> float:
    """Seconds on the clock that leases are judged by inside this process."""
    return time.clock_gettime(_CLOCK)


class Lease:
    """The right of one process identity to be the owner of runs.

    Attributes:
        owner: Random at each start: a constant would let a draining process take back what its successor was given.
        is_lost: Another process has declared this identity dead, or it was given up.
    """

    def __init__(self, duration: timedelta) -> None:
        self.owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.duration = duration
        self.is_lost = False
        self._valid_until = 0.0

    @property
    def duration_ms(self) -> int:
        """The lease's length in milliseconds."""
        return int(self.duration.total_seconds() * 1000)

    @property
    def is_valid(self) -> bool:
        """Whether this process may start an effect now."""
        return not self.is_lost and lease_clock() < self._valid_until

    def extend(self, sent_at: float) -> None:
        """A heartbeat that was sent at `sent_at` has been acknowledged."""
        self._valid_until = max(self._valid_until, sent_at + self.duration.total_seconds())


async def acquire(connection: Connection, duration: timedelta, serves: Sequence[tuple[str, str]] = ()) -> Lease:
    """Make this process known under a new identity.

    Args:
        serves: Name and version of the workflows whose runs it looks for; none for a process that executes only what it is called for.
    """
    lease = Lease(duration)
    sent_at = lease_clock()
    description = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "serves": [{"name": name, "version": version} for name, version in serves],
    }
    await claims.register(connection, lease.owner, lease.duration_ms, description)
    lease.extend(sent_at)
    return lease


class Heartbeat:
    """The thread that keeps one lease until it is stopped or the lease is lost."""

    def __init__(self, endpoint: Endpoint, lease: Lease) -> None:
        self.lease = lease
        self._endpoint = endpoint
        self._stopping = threading.Event()
        self._is_giving_up = False
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._has_beaten = asyncio.Event()
        self._thread = threading.Thread(target=self._beat, name="mongo_durable-heartbeat", daemon=True)
        self._thread.start()

    async def is_kept(self) -> bool:
        """Wait until the lease is valid (True) or lost (False).

        Raises:
            StoreUnavailable: Neither within the length of a lease.
        """
        try:
            async with asyncio.timeout(self.lease.duration.total_seconds()):
                while not self.lease.is_valid and not self.lease.is_lost:
                    self._has_beaten.clear()
                    await self._has_beaten.wait()
        except TimeoutError:
            raise StoreUnavailable("this process has not reached MongoDB for longer than its lease: it begins nothing until it does") from None
        return not self.lease.is_lost

    async def stop(self) -> None:
        """Give the lease up, so that others can take this process's runs at once, and wait for the thread's end."""
        self._is_giving_up = not self.lease.is_lost
        self.lease.is_lost = True
        self._stopping.set()
        await self._ended.wait()

    def _beat(self) -> None:
        try:
            self._beat_until_stopped()
        finally:
            # Not joined through the loop's executor: at interpreter exit that is gone already.
            self._tell(self._ended)
            self._tell(self._has_beaten)

    def _tell(self, event: asyncio.Event) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(event.set)

    def _beat_until_stopped(self) -> None:
        lease_s = self.lease.duration.total_seconds()
        with self._endpoint.sync_client() as client:
            runners = client[self._endpoint.database]["runners"]
            while not self._stopping.wait(lease_s * _BEAT):
                sent_at = lease_clock()
                try:
                    with pymongo.timeout(lease_s * _BEAT_GIVES_UP):
                        is_live = claims.renew(runners, self.lease.owner, self.lease.duration_ms)
                except PyMongoError as error:
                    # Not renewed: the lease runs out by itself unless a later beat gets through.
                    log.warning("heartbeat of %s failed with %s", self.lease.owner, type(error).__name__)
                    continue
                if not is_live:
                    self.lease.is_lost = True
                    log.warning("process %s was declared dead by another; its attempts are over", self.lease.owner)
                    return
                self.lease.extend(sent_at)
                self._tell(self._has_beaten)
            if self._is_giving_up:
                try:
                    with pymongo.timeout(lease_s):
                        claims.unregister(runners, self.lease.owner)
                except PyMongoError as error:
                    log.warning("process %s could not say that it is gone (%s); its lease will run out", self.lease.owner, type(error).__name__)
