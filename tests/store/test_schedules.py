"""Randomised schedules on the real server: whatever the order and whoever dies, no invariant breaks and no promise is broken.

In a schedule, actors fight over one run: attempts (some of which were declared dead and do not know it), resolvers with different answers, a
canceller, an expirer, an operator who retries. They pause at random at the store's fail points and die at some of them; what a dead attempt had
queued stays in flight, because all attempts share one appender. Then a sweep by status alone brings every run to rest, and the checker judges the
database.

`MONGO_DURABLE_SCHEDULES` says how many schedules there are.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from pymongo.errors import AutoReconnect, NetworkTimeout

from mongo_durable.errors import AttemptOver, ResolutionConflict, ResolutionError, RunError
from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.events import EventType, FrontierStatus, RunStatus
from mongo_durable.protocol.history import fold
from mongo_durable.store import claims, failpoints, frontiers, runs, schema
from mongo_durable.store.appender import Appender
from mongo_durable.store.claims import Claimer
from mongo_durable.store.connection import Connection, Endpoint
from mongo_durable.store.documents import Answerer, StoredFrontier
from mongo_durable.store.failpoints import FailPoint
from tests.support import invariants
from tests.support.attempts import VERSION, WORKFLOW, Attempt, answers, question, settled, submit
from tests.support.invariants import Acknowledged, Cancelled, Promise, Received

SCHEDULES = int(os.environ.get("MONGO_DURABLE_SCHEDULES", "500"))
BATCH = 25
AT_ONCE = 12
CRASH = 0.015
PAUSE = 0.35
LONGEST_PAUSE_S = 0.02


class Crash(Exception):
    """The actor dies here."""


dice: ContextVar[random.Random | None] = ContextVar("dice", default=None)
"""The random source of the actor that runs in this task."""
on_the_wire: ContextVar[bool] = ContextVar("on_the_wire", default=False)
"""Whether this task is one of the appender's: the network fails there, nobody dies."""


async def fate(point: FailPoint) -> None:
    """Pause, kill or cut off whoever comes to a fail point."""
    own = dice.get()
    if own is None:
        return
    if own.random() < PAUSE:
        await asyncio.sleep(own.random() * LONGEST_PAUSE_S)
    if own.random() < CRASH:
        if on_the_wire.get():
            raise own.choice([AutoReconnect, NetworkTimeout])(f"cut at {point}")
        raise Crash(point)


@dataclass(slots=True)
class World:
    """What the schedules of one batch share."""

    connection: Connection
    appender: Appender
    attempts: list[Attempt] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
    deaths: int = 0

    def promise(self, run_id: str, seq: int, fence: int, kind: EventType) -> None:
        self.promises.append(Acknowledged(run_id=run_id, seq=seq, fence=fence, type=kind))


@dataclass(slots=True)
class Schedule:
    """One run, and those who fight over it."""

    world: World
    run_id: str
    random: random.Random

    async def play(self) -> None:
        """Let all actors act at once, until the last one has died or given up."""
        await submit(self.world.connection, self.run_id)
        self.world.promise(self.run_id, 1, 0, EventType.RUN_SUBMITTED)
        owners = [f"{self.run_id}-p{number}" for number in range(self.random.randint(1, 3))]
        cast: list[Callable[[random.Random], Awaitable[None]]] = [self._attempts_as(owner, owners) for owner in owners]
        choices = ["yes", "no", {"amount": 3}]
        cast += [self._resolver(self.random.choice(choices), self.random.choice([None, *owners])) for _ in range(self.random.randint(2, 4))]
        cast += [self._expirer, self._retrier]
        if self.random.random() < 0.4:
            cast.append(self._canceller)
        async with asyncio.TaskGroup() as group:
            for actor in cast:
                group.create_task(self._live(actor, random.Random(self.random.random())))

    async def _live(self, actor: Callable[[random.Random], Awaitable[None]], own: random.Random) -> None:
        dice.set(own)
        await asyncio.sleep(own.random() * 0.05)
        try:
            await actor(own)
        except Crash:
            self.world.deaths += 1

    def _attempts_as(self, owner: str, owners: list[str]) -> Callable[[random.Random], Awaitable[None]]:
        async def attempt_again_and_again(own: random.Random) -> None:
            for _ in range(own.randint(2, 5)):
                # The others may well be alive: somebody declared them dead.
                dead = [each for each in owners if own.random() < 0.4]
                try:
                    attempt = await Attempt.start(self.world.connection, self.world.appender, self.run_id, owner, dead_owners=dead)
                    self.world.attempts.append(attempt)
                    await self.execute(attempt, own)
                except (RunError, AttemptOver):
                    await asyncio.sleep(own.random() * 0.03)

        return attempt_again_and_again

    async def execute(self, attempt: Attempt, own: random.Random) -> None:
        """Be the attempt: record activities, then suspend, end, release or just vanish."""
        world, head = self.world, attempt.claim.head
        if head.is_cancel_requested:
            await runs.end_stopped(world.connection, attempt.claim)
            world.promise(self.run_id, attempt.claim.seq + 1, head.fence, EventType.RUN_CANCELLED)
            return
        history = fold(self.run_id, await claims.history(world.connection, attempt.claim))
        unfinished = [each.position.step for each in history.activities.values() if each.outcome is None]
        new = len(history.activities)
        for number in [*unfinished, *range(new, new + own.randint(0, 5))]:
            start = attempt.started(number, is_awaited=own.random() < 0.5)
            if own.random() < 0.3:
                await start
            done = attempt.completed(number, own.random(), is_awaited=own.random() < 0.7)
            if own.random() < 0.3:
                await done
        choice = own.random()
        if choice < 0.5:
            entries = [question(self.run_id, 1000 * (head.generation + 1) + number) for number in range(own.randint(1, 3))]
            expires_in = timedelta(milliseconds=own.randint(1, 60)) if own.random() < 0.4 else None
            frontier = await attempt.suspend(*entries, expires_in=expires_in)
            world.promise(self.run_id, frontier.seq, frontier.fence, EventType.ACTIVITIES_SUSPENDED)
        elif choice < 0.7:
            kind = own.choice([EventType.RUN_COMPLETED, EventType.RUN_FAILED, EventType.RUN_DIVERGED])
            await attempt.end(kind)
            world.promise(self.run_id, attempt.channel.seq + 1, head.fence, kind)
        elif choice < 0.85:
            await attempt.release()

    def _resolver(self, answer: Any, owner: str | None) -> Callable[[random.Random], Awaitable[None]]:
        async def resolve(own: random.Random) -> None:
            for _ in range(own.randint(3, 8)):
                await asyncio.sleep(own.random() * 0.03)
                try:
                    frontier = await frontiers.current(self.world.connection, self.run_id)
                    attempt = await self.resolve(frontier, answer, owner)
                    if attempt is not None:
                        await self.execute(attempt, own)
                except (RunError, ResolutionError, AttemptOver):
                    continue

        return resolve

    async def resolve(self, frontier: StoredFrontier, answer: Any, owner: str | None = None) -> Attempt | None:
        """Answer a frontier, and check what a refusal says.

        Args:
            owner: Who goes on with the run at once, if it can.
        """
        connection, mine, somebody = self.world.connection, answers(frontier, answer), Answerer(by="somebody")
        claimed = None
        try:
            if owner is None:
                receipt = await frontiers.resolve(connection, frontier, mine, somebody)
                assert (receipt.generation, receipt.answers_digest) == (frontier.generation, digest(mine))
            else:
                claimed = await frontiers.resolve_and_claim(connection, frontier, mine, somebody, Claimer(owner=owner, workflow=(WORKFLOW, VERSION)))
        except ResolutionConflict:
            stored = await connection.resolutions.find_one({"_id": f"{self.run_id}/{frontier.generation}"})
            assert stored is not None
            assert stored["answers"] != mine
            raise
        self.world.promises.append(Received(run_id=self.run_id, generation=frontier.generation, answers_digest=digest(mine)))
        self.world.promise(self.run_id, frontier.seq + 1, frontier.fence, EventType.ACTIVITIES_RESOLVED)
        if claimed is None:
            return None
        attempt = Attempt.of(connection, self.world.appender, claimed)
        self.world.attempts.append(attempt)
        return attempt

    async def _expirer(self, own: random.Random) -> None:
        for _ in range(own.randint(3, 8)):
            await asyncio.sleep(own.random() * 0.04)
            for frontier in await frontiers.open_frontiers(self.world.connection, run_id=self.run_id):
                await self.expire(frontier)

    async def expire(self, frontier: StoredFrontier) -> bool:
        """Close a frontier with its default, if it is due."""
        if not await frontiers.expire(self.world.connection, frontier, answers(frontier, "default")):
            return False
        self.world.promise(self.run_id, frontier.seq + 1, frontier.fence, EventType.FRONTIER_EXPIRED)
        return True

    async def _retrier(self, own: random.Random) -> None:
        for _ in range(own.randint(1, 4)):
            await asyncio.sleep(own.random() * 0.06)
            try:
                await runs.retry(self.world.connection, self.run_id)
            except RunError:
                continue

    async def _canceller(self, own: random.Random) -> None:
        await asyncio.sleep(own.random() * 0.15)
        head = await runs.cancel(self.world.connection, self.run_id, "enough", f"{self.run_id}-canceller")
        assert head.status.is_end
        if head.status is RunStatus.CANCELLED:
            self.world.promises.append(Cancelled(run_id=self.run_id))


async def sweep(world: World, own: random.Random, schedules: dict[str, Schedule]) -> None:
    """Bring every run to rest, found by status alone: everybody who owned one is dead by now."""
    workflows = [(WORKFLOW, VERSION)]
    while True:
        dead = await claims.dead_owners(world.connection)
        found = await claims.claimable(world.connection, workflows, "sweeper", (), dead, 1000)
        for each in found:
            claimed = await claims.claim(world.connection, each.run_id, "sweeper", dead_owners=[*dead, "sweeper"])
            attempt = Attempt.of(world.connection, world.appender, claimed)
            world.attempts.append(attempt)
            await schedules[each.run_id].execute(attempt, own)
        is_moved = False
        for frontier in await frontiers.open_frontiers(world.connection):
            schedule = schedules[frontier.run_id]
            if frontier.expires_at is not None:
                is_moved |= await schedule.expire(frontier)  # not yet, maybe: then it is found again
            elif own.random() < 0.5:
                await schedule.resolve(frontier, "from the sweep")
                is_moved = True
        if not found and not is_moved and not await world.connection.frontiers.count_documents({"status": "open", "expires_at": {"$ne": None}}):
            return


@pytest.mark.parametrize("first", range(0, SCHEDULES, BATCH))
async def test_random_schedules_break_no_invariant(first: int, mongo_uri: str, database: str, client_of: Callable[[int], Any]) -> None:
    """Whatever the schedule, I1, I2, I3, I5, I6, I9 and I10 hold, and every head says what its history says."""
    endpoint = Endpoint(mongo_uri, database, client=client_of(first // BATCH))
    connection = endpoint.connection()
    await schema.ensure_schema(connection)
    dice.set(random.Random(f"wire {first}"))
    on_the_wire.set(True)
    world = World(connection, Appender(connection))  # its tasks take these two with them
    on_the_wire.set(False)
    dice.set(None)
    failpoints.handler = fate
    schedules = {f"s{seed}": Schedule(world, f"s{seed}", random.Random(seed)) for seed in range(first, min(first + BATCH, SCHEDULES))}
    gate = asyncio.Semaphore(AT_ONCE)

    async def play(schedule: Schedule) -> None:
        async with gate:
            await schedule.play()

    async with asyncio.TaskGroup() as group:
        for schedule in schedules.values():
            group.create_task(play(schedule))
    await sweep(world, random.Random(first), schedules)
    await settled(world.attempts)
    promises = [*world.promises, *(each for attempt in world.attempts for each in attempt.acknowledged())]
    await endpoint.aclose()

    snapshot = invariants.assert_invariants(mongo_uri, database, promises)
    assert set(snapshot.runs) == set(schedules)
    resting = {status for status in RunStatus if status.is_rest}
    assert {head["status"] for head in snapshot.runs.values()} <= resting
    assert len(promises) > len(schedules)  # they did something


def test_the_schedules_reach_every_kind_of_end() -> None:
    """The words that the schedules end in are those of the protocol: a new status has to be thought of here."""
    assert {status.value for status in FrontierStatus} == {"open", "resolved", "expired", "cancelled"}
    assert {status.value for status in RunStatus if status.is_end} == {"completed", "failed", "diverged", "cancelled"}
