"""`Runner`: executes runs of some apps, in this process, beside any number of others.

The change stream is a hint that makes it fast; the sweep is the truth that makes it right. A run is executed only after this process's own claim has
succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Self

from mongo_durable.engine.process import DEFAULT_LEASE, Process
from mongo_durable.engine.resolving import expire
from mongo_durable.errors import AttemptOver, ConfigurationError, DurableError, RunNotClaimable, Superseded
from mongo_durable.langgraph.app import App
from mongo_durable.protocol.events import RunStatus
from mongo_durable.runner.fleet import Fleet
from mongo_durable.runner.janitor import Janitor
from mongo_durable.store import claims, runs
from mongo_durable.store.connection import Endpoint
from mongo_durable.store.due import Due
from mongo_durable.store.due import due as what_is_due
from mongo_durable.store.heartbeat import Lease
from mongo_durable.store.wakeups import Listener, RunChange
from mongo_durable.telemetry import about, measure

log = logging.getLogger(__name__)

_CLAIMABLE = frozenset({RunStatus.PENDING.value, RunStatus.READY.value})
_LONGEST_PAUSE_S = 60.0
_DUE_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Executing:
    """An attempt that a runner executes.

    Attributes:
        since: When it began, by this process's monotonic clock.
    """

    workflow: str
    fence: int
    since: float


class Runner:
    """Executes the runs of `apps`.

    Args:
        apps: All in the same database; each serves its own workflow and version.
        concurrency: How many attempts this process executes at once.
        workflow_concurrency: How many of them may be of one workflow, by its name; for all others `concurrency` alone counts.
        lease: How long this process may be silent before others take its runs over.
        sweep_interval: How often it looks for work that no hint told of, and for dead processes.
        retention: How long the runs of a workflow, by its name, are kept after their end: what is older is pruned in the background, a few documents
            at a time. None, or a workflow that is not named: for ever.
        retention_interval: How often it looks for such runs.
        use_change_stream: False opens none, for a role or a proxy that allows none: work is then found by the sweep alone, so at its interval.
    """

    def __init__(
        self,
        apps: Sequence[App],
        *,
        concurrency: int = 10,
        workflow_concurrency: Mapping[str, int] | None = None,
        lease: timedelta = DEFAULT_LEASE,
        sweep_interval: timedelta | None = None,
        retention: Mapping[str, timedelta] | None = None,
        retention_interval: timedelta = timedelta(minutes=10),
        use_change_stream: bool = True,
    ) -> None:
        if not apps:
            raise ConfigurationError("a Runner needs at least one App")
        if concurrency < 1:
            raise ConfigurationError("concurrency is at least 1")
        first = apps[0].endpoint
        if any((app.endpoint.uri, app.endpoint.client, app.endpoint.database) != (first.uri, first.client, first.database) for app in apps):
            raise ConfigurationError("the apps of one Runner share one database: make a Runner for each")
        if any(app.endpoint.cipher is not first.cipher for app in apps):
            raise ConfigurationError("the apps of one Runner share one cipher: give all of them the same, with all keys")
        self._apps = {(app.name, app.version): app for app in apps}
        if len(self._apps) != len(apps):
            raise ConfigurationError("two apps have the same name and version")
        # A connection and an identity of its own: calls that the application makes on its apps outlive the runner.
        self._endpoint = Endpoint(first.uri, first.database, first.client, first.cipher)
        self._concurrency = concurrency
        self._workflow_concurrency = dict(workflow_concurrency or {})
        if unknown := self._workflow_concurrency.keys() - {app.name for app in apps}:
            raise ConfigurationError(f"workflow_concurrency names workflows that this runner does not serve: {', '.join(sorted(unknown))}")
        if any(most < 1 for most in self._workflow_concurrency.values()):
            raise ConfigurationError("workflow_concurrency is at least 1 for each workflow")
        self._janitor = Janitor(retention or {}, retention_interval)
        self._cleaning: asyncio.Task[None] | None = None
        self._lease = lease
        self._use_change_stream = use_change_stream
        self._sweep_interval = (sweep_interval or lease / 2).total_seconds()
        self.process: Process | None = None
        """What its attempts share, while it runs."""
        self._dispatcher: asyncio.Task[None] | None = None
        self._attempts: dict[str, asyncio.Task[None]] = {}
        self.executing: dict[str, Executing] = {}
        """What it executes now, by run id."""
        self.tally: Counter[str] = Counter()
        """How many of its attempts have come to what: the words of `Executor.execute`, and `given back` for those that ended without a rest."""
        self._not_before: dict[str, tuple[float, float]] = {}
        self._workflows: dict[str, str] = {}
        """Name of the workflow of each running attempt."""
        self._candidates: dict[str, asyncio.TimerHandle] = {}
        """Runs that are left to other runners for a moment."""
        self._fleet = Fleet("")
        self._dead: list[str] = []
        self._sweep_at = 0.0
        self._due_at = math.inf
        self._is_to_look = False
        self._is_crowded = False
        """There was more to claim than room, or a limit had no place left: whatever ends makes it worth to look."""
        self._server_offset = datetime.min.replace(tzinfo=UTC)
        """The server's time at zero of this process's monotonic clock."""
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
        self.process = Process(self._endpoint, self._lease, list(self._apps), use_change_stream=self._use_change_stream)
        lease = await self.process.lease()
        self._fleet = Fleet(lease.owner)
        self._sweep_at = 0.0
        self._is_draining = False
        self._dispatcher = asyncio.create_task(self._dispatch(self.process), name="mongo_durable-runner")
        if self._janitor.has_work:
            self._cleaning = asyncio.create_task(self._janitor.run(self.process.connection), name="mongo_durable-janitor")

    async def stop(self, grace: timedelta = timedelta(seconds=10)) -> bool:
        """Claim nothing more; let each running attempt stop before its next effect, or end; release those that do neither in time.

        Others can go on at once with every run that was given back.

        Returns:
            Whether every attempt stopped by itself.
        """
        self._is_draining = True
        for run_id in list(self._candidates):
            self._forget(run_id)
        for attempt in self.process.running.values() if self.process is not None else ():
            if attempt is not None:
                attempt.drain()
        for task in (self._dispatcher, self._cleaning):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._dispatcher = self._cleaning = None
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
            while not self._is_draining:  # not by the cancellation alone: the driver can turn one into an error of its own
                now = time.monotonic()
                try:
                    if now >= self._sweep_at:
                        await self._sweep(process)
                    elif self._is_to_look or now >= self._due_at:
                        await self._look(process)
                except DurableError as error:
                    # The database is away or refuses: nothing is lost, the next sweep finds everything.
                    log.warning("runner could not look for work: %s", error)
                    self._sweep_at, self._due_at, self._is_to_look = now + self._sweep_interval, math.inf, False
                changes = await listener.wait(max(min(self._sweep_at, self._due_at) - time.monotonic(), 0.0))
                if changes is not None:
                    self._follow(process, changes)
                elif time.monotonic() < min(self._sweep_at, self._due_at):
                    self._sweep_at = 0.0  # the stream is new, or was broken: look at everything

    def _follow(self, process: Process, changes: Sequence[RunChange]) -> None:
        for change in changes:
            attempt = process.running.get(change.run_id)
            if attempt is not None and change.fence is not None and change.fence > attempt.fence:
                attempt.stop(Superseded(f"run {change.run_id}: another process has taken the run over", run_id=change.run_id))
                task = self._attempts.get(change.run_id)
                if task is not None:
                    task.cancel()  # what it still does would be refused
                continue
            self._is_to_look |= change.is_left_to_runners
            if change.status is not None and change.status not in _CLAIMABLE:
                self._forget(change.run_id)  # somebody has it
                self._is_to_look |= self._is_crowded  # and a place of its limit may be free now
            if change.deadline_at is not None:
                self._due_at = min(self._due_at, self._moment(change.deadline_at))
            moment = self._moment(change.available_at) if change.available_at is not None else 0.0
            if moment > time.monotonic():
                self._due_at = min(self._due_at, moment)
            elif change.status in _CLAIMABLE and change.workflow is None:
                self._is_to_look = True
            elif change.status in _CLAIMABLE and change.workflow in self._apps:
                turn_s = self._fleet.turn_s(change.run_id, change.workflow)
                self._consider(process, change.run_id, [], turn_s, change.workflow[0])

    def _moment(self, due: datetime) -> float:
        """A time of the server's clock on ours; the two are as far apart as they were at the last sweep."""
        return (due - self._server_offset).total_seconds()

    async def _sweep(self, process: Process) -> None:
        """Everything that can go on or is due, by status alone (I9)."""
        now = time.monotonic()
        self._not_before = {run_id: each for run_id, each in self._not_before.items() if each[0] + _LONGEST_PAUSE_S > now}
        lease = await process.lease()
        self._dead = await claims.dead_owners(process.connection)
        runners = await claims.live_runners(process.connection)
        self._fleet = Fleet(lease.owner, runners)
        if runners:
            self._server_offset = runners[0].seen_at - timedelta(seconds=time.monotonic())
        if (lag := process.wakeups.lag) is not None:
            measure("stream.lag", lag.total_seconds())
        self._sweep_at = now + self._sweep_interval * random.uniform(0.9, 1.0)  # so that a fleet does not sweep in step
        await self._look(process)

    async def _look(self, process: Process) -> None:
        """What is due by the server's clock, and what can be claimed by this process."""
        self._is_to_look = False
        connection, lease = process.connection, await process.lease()
        due = await what_is_due(connection, lease.owner, _DUE_AT_ONCE)
        self._due_at = time.monotonic() + due.wait.total_seconds() if due.wait is not None else math.inf
        for run_id in due.stopped:
            attempt = process.running.get(run_id)
            if attempt is not None:
                attempt.cancel()
        await self._meet_deadlines(process, due, lease)
        room = self._room()
        if room > 0:
            known = [*process.running, *self._candidates]
            served = [workflow for workflow in self._apps if self._has_room_for(workflow[0])]
            found = await claims.claimable(connection, served, lease.owner, known, self._dead, room, full=due.full)
            self._is_crowded = bool(due.full) or len(found) >= room
            for each in found:
                workflow = (each.workflow, each.version)
                self._consider(process, each.run_id, [*self._dead, lease.owner], self._fleet.turn_s(each.run_id, workflow), each.workflow)
        else:
            self._is_crowded = True

    async def _meet_deadlines(self, process: Process, due: Due, lease: Lease) -> None:
        """Expire frontiers and fail runs that are past their deadline. Any number of processes may try: one succeeds."""
        if max(len(due.expired), len(due.overdue)) >= _DUE_AT_ONCE:
            self._is_to_look = True  # there may be more
        for run_id in due.expired:
            if await expire(process.connection, run_id):
                log.info("run %s: its frontier has expired", run_id, extra=about(run_id))
        for run_id in due.overdue:
            if await runs.end_past_deadline(process.connection, run_id, lease.owner):
                log.info("run %s: failed at its deadline", run_id, extra=about(run_id))

    def _room(self) -> int:
        """How many more attempts may be started now."""
        return 0 if self._is_draining else self._concurrency - len(self._attempts)

    def _has_room_for(self, workflow: str) -> bool:
        """Whether one more attempt of a workflow may be started, as far as its own concurrency goes."""
        running = sum(each == workflow for each in self._workflows.values())
        return running < self._workflow_concurrency.get(workflow, self._concurrency)

    def _consider(self, process: Process, run_id: str, takeable_owners: Sequence[str], turn_s: float, workflow: str) -> None:
        """Try to claim a run when it is this runner's turn."""
        not_before, _ = self._not_before.get(run_id, (0.0, 0.0))
        if run_id in process.running or run_id in self._candidates or time.monotonic() < not_before:
            return

        def try_it() -> None:
            self._candidates.pop(run_id, None)
            if self._room() > 0 and run_id not in process.running and self._has_room_for(workflow):
                self._launch(process, run_id, takeable_owners, workflow)
            else:
                self._is_crowded = True

        if turn_s > 0:
            self._candidates[run_id] = asyncio.get_running_loop().call_later(turn_s, try_it)
        else:
            try_it()

    def _forget(self, run_id: str) -> None:
        candidate = self._candidates.pop(run_id, None)
        if candidate is not None:
            candidate.cancel()

    def _launch(self, process: Process, run_id: str, takeable_owners: Sequence[str], workflow: str) -> None:
        process.running[run_id] = None
        self._workflows[run_id] = workflow
        task = asyncio.create_task(self._attempt(process, run_id, takeable_owners), name=f"mongo_durable-attempt-{run_id}")
        self._attempts[run_id] = task
        task.add_done_callback(lambda _: self._finished(process, run_id))

    def _finished(self, process: Process, run_id: str) -> None:
        self._attempts.pop(run_id, None)
        self._workflows.pop(run_id, None)
        process.running.pop(run_id, None)
        if self._listener is not None and not self._is_draining and self._is_crowded:
            self._is_to_look = True  # there is room: look for what had to wait
            self._listener.wake()

    async def _attempt(self, process: Process, run_id: str, takeable_owners: Sequence[str]) -> None:
        fence: int | None = None
        try:
            lease = await process.lease()
            served = {workflow: app.code_version for workflow, app in self._apps.items()}
            claimed = await claims.claim(process.connection, run_id, lease.owner, workflows=served, dead_owners=takeable_owners)
            app = self._apps[(claimed.head.workflow, claimed.head.version)]
            fence = claimed.head.fence
            self.executing[run_id] = Executing(claimed.head.workflow, fence, time.monotonic())
            log.info("run %s: attempt %d begins", run_id, fence, extra=about(run_id, fence))
            reached = await app.execute(process, claimed)
            self.tally[reached] += 1
            log.info("run %s: attempt %d ends: %s", run_id, fence, reached, extra=about(run_id, fence))
            self._not_before.pop(run_id, None)
        except RunNotClaimable:
            log.debug("run %s was taken by another", run_id, extra=about(run_id))
        except AttemptOver as over:
            self.tally["given back"] += fence is not None
            log.info("run %s: %s", run_id, over, extra=about(run_id, fence))
        except DurableError as error:
            self.tally["given back"] += fence is not None
            self._back_off(run_id)
            log.warning("run %s: the attempt ended without a rest: %s", run_id, error, extra=about(run_id, fence))
        except Exception:
            # What is not known here must not stop the runner; the app has given the run back.
            self.tally["given back"] += fence is not None
            self._back_off(run_id)
            log.exception("run %s: the attempt failed in a way that is not expected", run_id, extra=about(run_id, fence))
        finally:
            self.executing.pop(run_id, None)

    def _back_off(self, run_id: str) -> None:
        _, pause = self._not_before.get(run_id, (0.0, 0.5))
        pause = min(pause * 2, _LONGEST_PAUSE_S)
        self._not_before[run_id] = (time.monotonic() + pause, pause)
