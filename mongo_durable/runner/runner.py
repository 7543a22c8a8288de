"""`Runner`: executes runs of some apps, in this process, beside any number of others.

The change stream is a hint that makes it fast; the sweep is the truth that makes it right. A run is executed only after this process's own claim has
succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Self

from mongo_durable.engine.process import DEFAULT_LEASE, Process
from mongo_durable.errors import AttemptOver, ConfigurationError, DurableError, RunNotClaimable, Superseded
from mongo_durable.langgraph.app import App
from mongo_durable.protocol.events import RunStatus
from mongo_durable.store import claims
from mongo_durable.store.connection import Endpoint
from mongo_durable.store.wakeups import Listener, RunChange

log = logging.getLogger(__name__)

_CLAIMABLE = frozenset({RunStatus.PENDING.value, RunStatus.READY.value})
_LONGEST_PAUSE_S = 60.0


class Runner:
    """Executes the runs of `apps`.

    Args:
        apps: All in the same database; each serves its own workflow and version.
        concurrency: How many attempts this process executes at once.
        lease: How long this process may be silent before others take its runs over.
        sweep_interval: How often it looks for work that no hint told of, and for dead processes.
        use_change_stream: False opens none, for a role or a proxy that allows none: work is then found by the sweep alone, so at its interval.
    """

    def __init__(
        self,
        apps: Sequence[App],
        *,
        concurrency: int = 10,
        lease: timedelta = DEFAULT_LEASE,
        sweep_interval: timedelta | None = None,
        use_change_stream: bool = True,
    ) -> None:
        if not apps:
            raise ConfigurationError("a Runner needs at least one App")
        if concurrency < 1:
            raise ConfigurationError("concurrency is at least 1")
        first = apps[0].endpoint
        if any((app.endpoint.uri, app.endpoint.client, app.endpoint.database) != (first.uri, first.client, first.database) for app in apps):
            raise ConfigurationError("the apps of one Runner share one database: make a Runner for each")
        self._apps = {(app.name, app.version): app for app in apps}
        if len(self._apps) != len(apps):
            raise ConfigurationError("two apps have the same name and version")
        # A connection and an identity of its own: calls that the application makes on its apps outlive the runner.
        self._endpoint = Endpoint(first.uri, first.database, first.client)
        self._concurrency = concurrency
        self._lease = lease
        self._use_change_stream = use_change_stream
        self._sweep_interval = (sweep_interval or lease / 2).total_seconds()
        self.process: Process | None = None
        """What its attempts share, while it runs."""
        self._dispatcher: asyncio.Task[None] | None = None
        self._attempts: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, tuple[float, float]] = {}
        self._is_draining = False
        self._listener: Listener | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def running(self) -> list[str]:
        """Runs that this runner executes now."""
        return list(self._attempts)

    async def start(self) -> None:
        """Begin to claim and execute.

        Raises:
            ConfigurationError, UnsupportedGraph, StoreError: It cannot work; nothing was claimed.
        """
        for app in self._apps.values():
            app.graph()
        self.process = Process(self._endpoint, self._lease, use_change_stream=self._use_change_stream)
        await self.process.lease()
        self._is_draining = False
        self._dispatcher = asyncio.create_task(self._dispatch(self.process), name="mongo_durable-runner")

    async def stop(self, grace: timedelta = timedelta(seconds=10)) -> bool:
        """Claim nothing more; let running attempts end; release those that do not in time, so that others go on with them.

        Returns:
            Whether every attempt came to its end by itself.
        """
        self._is_draining = True
        if self._dispatcher is not None:
            self._dispatcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._dispatcher
            self._dispatcher = None
        _, late = await asyncio.wait(self._attempts.values(), timeout=grace.total_seconds()) if self._attempts else (set(), set())
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        if self.process is not None:
            await self.process.aclose()
            self.process = None
            await self._endpoint.aclose()
        return not late

    async def run_forever(self, grace: timedelta = timedelta(seconds=10)) -> bool:
        """Run until SIGTERM or SIGINT, then stop; see `stop` for what is returned."""
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, stopping.set)
        await self.start()
        dispatcher = self._dispatcher
        try:
            waiting = asyncio.create_task(stopping.wait())
            await asyncio.wait([waiting, *([dispatcher] if dispatcher is not None else [])], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        finally:
            for each in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(each)
        return await self.stop(grace)

    async def _dispatch(self, process: Process) -> None:
        """Wait for hints and for time to pass, and start what can go on."""
        async with process.wakeups.listen() as listener:
            self._listener = listener
            swept = 0.0
            while not self._is_draining:  # not by the cancellation alone: the driver can turn one into an error of its own
                due = swept + self._sweep_interval - time.monotonic()
                changes = await listener.wait(max(due, 0.0)) if due > 0 else None
                try:
                    if changes is None:
                        await self._sweep(process)
                        swept = time.monotonic()
                    else:
                        await self._follow(process, changes)
                except DurableError as error:
                    # The database is away or refuses: nothing is lost, the next sweep finds everything.
                    log.warning("runner could not look for work: %s", error)
                    swept = time.monotonic()

    async def _follow(self, process: Process, changes: Sequence[RunChange]) -> None:
        for change in changes:
            attempt = process.running.get(change.run_id)
            if attempt is not None and change.fence is not None and change.fence > attempt.fence:
                attempt.stop(Superseded(f"run {change.run_id}: another process has taken the run over", run_id=change.run_id))
            elif change.status in _CLAIMABLE and self._room() and change.run_id not in process.running:
                self._launch(process, change.run_id, [])

    async def _sweep(self, process: Process) -> None:
        """Everything that can go on, by status alone (I9)."""
        now = time.monotonic()
        self._not_before = {run_id: each for run_id, each in self._not_before.items() if each[0] + _LONGEST_PAUSE_S > now}
        lease = await process.lease()
        dead = await claims.dead_owners(process.connection)
        for run_id in await claims.cancelled_runs(process.connection, lease.owner):
            attempt = process.running.get(run_id)
            if attempt is not None:
                attempt.cancel()
        room = self._room()
        if not room:
            return
        found = await claims.claimable(process.connection, list(self._apps), lease.owner, list(process.running), dead, room)
        random.shuffle(found)  # so that idle runners do not all try the same one
        for each in found:
            if each.run_id not in process.running:
                self._launch(process, each.run_id, [*dead, lease.owner])

    def _room(self) -> int:
        """How many more attempts may be started now."""
        return 0 if self._is_draining else self._concurrency - len(self._attempts)

    def _launch(self, process: Process, run_id: str, takeable_owners: Sequence[str]) -> None:
        not_before, _ = self._not_before.get(run_id, (0.0, 0.0))
        if time.monotonic() < not_before:
            return
        process.running[run_id] = None
        task = asyncio.create_task(self._attempt(process, run_id, takeable_owners), name=f"mongo_durable-attempt-{run_id}")
        self._attempts[run_id] = task
        task.add_done_callback(lambda _: self._finished(process, run_id))

    def _finished(self, process: Process, run_id: str) -> None:
        self._attempts.pop(run_id, None)
        process.running.pop(run_id, None)
        if self._listener is not None and not self._is_draining:
            self._listener.tell(None)  # there is room: look for what had to wait

    async def _attempt(self, process: Process, run_id: str, takeable_owners: Sequence[str]) -> None:
        try:
            lease = await process.lease()
            served = {workflow: app.code_version for workflow, app in self._apps.items()}
            claimed = await claims.claim(process.connection, run_id, lease.owner, workflows=served, dead_owners=takeable_owners)
            app = self._apps[(claimed.head.workflow, claimed.head.version)]
            log.info("run %s: attempt %d begins", run_id, claimed.head.fence)
            await app.execute(process, claimed)
            self._not_before.pop(run_id, None)
        except RunNotClaimable:
            log.debug("run %s was taken by another", run_id)
        except AttemptOver as over:
            log.info("run %s: %s", run_id, over)
        except DurableError as error:
            self._back_off(run_id)
            log.warning("run %s: the attempt ended without a rest: %s", run_id, error)
        except Exception:
            # What is not known here must not stop the runner; the app has given the run back.
            self._back_off(run_id)
            log.exception("run %s: the attempt failed in a way that is not expected", run_id)

    def _back_off(self, run_id: str) -> None:
        _, pause = self._not_before.get(run_id, (0.0, 0.5))
        pause = min(pause * 2, _LONGEST_PAUSE_S)
        self._not_before[run_id] = (time.monotonic() + pause, pause)
