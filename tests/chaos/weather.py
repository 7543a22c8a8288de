"""The faults of the chaos suite: what happens when comes from a seed; to whom, from the moment."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pymongo
from pymongo.errors import PyMongoError

from mongo_durable.dev import DevMongo
from tests.chaos.worker import Post, main

# Processes are forked from a server that has imported everything and has no client, no thread and no event loop.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["mongo_durable.runner", "mongo_durable.client", "langgraph.prebuilt", "tests.chaos.worker"])

OPEN_TRANSACTION_S = 3
_DRAIN_S = 45.0
_SEND_TIMEOUT_MS = 3000

SERVER_FAULTS: tuple[dict[str, Any], ...] = (
    {"failCommands": ["commitTransaction"], "closeConnection": True},
    {"failCommands": ["commitTransaction"], "errorCode": 91, "errorLabels": ["RetryableWriteError"]},
    {"failCommands": ["commitTransaction"], "writeConcernError": {"code": 91, "errmsg": "replication is being shut down"}},
    {"failCommands": ["insert"], "closeConnection": True},
    {"failCommands": ["insert"], "errorCode": 10107, "errorLabels": ["RetryableWriteError"]},
    {"failCommands": ["insert"], "writeConcernError": {"code": 64, "errmsg": "waiting for replication timed out"}},
    {"failCommands": ["insert"], "blockConnection": True, "blockTimeMS": 1200},
    {"failCommands": ["insert", "update", "findAndModify"], "errorCode": 112, "errorLabels": ["TransientTransactionError"]},
    {"failCommands": ["getMore"], "closeConnection": True},
    {"failCommands": ["getMore"], "errorCode": 136},
    {"failCommands": ["getMore"], "errorCode": 286},
    {"failCommands": ["findAndModify"], "closeConnection": True},
    {"failCommands": ["update", "find"], "closeConnection": True},
    {"failCommands": ["find", "aggregate"], "errorCode": 11600},
)
"""What the primary does to the commands of runners and people. Not of tools: they have clients of their own."""


_AMONG_WORKERS = {"kill": 11, "pause": 6, "drain": 1, "command": 6}
_PRIMARY = ("primary killed", "primary steps down", "primary stands still")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that happens.

    Attributes:
        at_s: Since the beginning.
        share: Which worker it hits, as a share of their number.
        lasts_s: Of a pause, or until a killed server is started again.
        detail: Index of `SERVER_FAULTS`, and how often.
    """

    at_s: float
    kind: str
    share: float = 0.0
    lasts_s: float = 0.0
    detail: tuple[int, int] = (0, 0)


def forecast(seed: int, duration_s: float, lease_s: float) -> list[Fault]:
    """The faults of a seed: something among the workers about every second, and each of the ways to lose a primary in turn."""
    dice = random.Random(f"weather {seed}")
    found: list[Fault] = []
    at_s = 0.0
    while (at_s := at_s + dice.uniform(0.2, 1.6)) < duration_s:
        [kind] = dice.choices(list(_AMONG_WORKERS), list(_AMONG_WORKERS.values()))
        lasts_s = dice.choice([0.2, 0.5, 1.5, 2.5]) * lease_s
        detail = (dice.randrange(len(SERVER_FAULTS)), dice.randint(1, 8))
        found.append(Fault(at_s=at_s, kind=kind, share=dice.random(), lasts_s=lasts_s, detail=detail))
    at_s = dice.uniform(2, 4)
    while at_s < duration_s:
        for kind in dice.sample(_PRIMARY, len(_PRIMARY)):
            found.append(Fault(at_s=at_s, kind=kind, lasts_s=dice.choice([0.3, 1.0, 4.0, 6.0])))
            at_s += dice.uniform(6, 9)
    return sorted((each for each in found if each.at_s < duration_s), key=lambda each: each.at_s)


@dataclass(frozen=True, slots=True)
class Pause:
    """A process stood still."""

    pid: int
    stopped_at: float
    went_on_at: float


@dataclass(slots=True)
class Crew:
    """The workers: always as many, whatever happens to them.

    Attributes:
        wrong: Workers that ended without being told to, or did not end.
    """

    post: Post
    size: int
    wrong: list[str] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    _workers: list[Any] = field(default_factory=list)
    _draining: list[tuple[Any, float]] = field(default_factory=list)
    _paused: dict[int, tuple[float, asyncio.TimerHandle]] = field(default_factory=dict)

    def fill(self) -> None:
        """Replace who is gone."""
        for worker in list(self._workers):
            if not worker.is_alive():
                self.wrong.append(f"worker {worker.pid} ended by itself, with {worker.exitcode}")
                self._workers.remove(worker)
        for worker, since in list(self._draining):
            if not worker.is_alive():
                if worker.exitcode not in (0, -signal.SIGTERM):  # the latter before it had begun to listen
                    self.wrong.append(f"worker {worker.pid} drained, and ended with {worker.exitcode}")
                self._draining.remove((worker, since))
            elif time.monotonic() - since > _DRAIN_S:
                self.wrong.append(f"worker {worker.pid} was told to drain {_DRAIN_S:.0f} s ago, and is there")
                self._end(worker)
                self._draining.remove((worker, since))
        while len(self._workers) < self.size:
            worker = _PROCESSES.Process(target=main, args=(self.post,), daemon=True)
            worker.start()
            self._workers.append(worker)

    def kill(self, share: float) -> None:
        """SIGKILL one."""
        worker = self._pick(share)
        self._workers.remove(worker)
        self._end(worker)

    def drain(self, share: float) -> None:
        """SIGTERM one."""
        worker = self._pick(share)
        self._go_on(worker.pid)
        self._workers.remove(worker)
        os.kill(worker.pid, signal.SIGTERM)
        self._draining.append((worker, time.monotonic()))

    def pause(self, share: float, lasts_s: float) -> None:
        """SIGSTOP one, and SIGCONT later."""
        worker = self._pick(share)
        if worker.pid in self._paused:
            return  # all of them stand still
        stopped_at = time.time()
        os.kill(worker.pid, signal.SIGSTOP)
        self._paused[worker.pid] = (stopped_at, asyncio.get_running_loop().call_later(lasts_s, self._go_on, worker.pid))

    def all_go_on(self) -> None:
        """Nobody stands still any more."""
        for pid in list(self._paused):
            self._go_on(pid)

    def close(self) -> None:
        """End everybody."""
        self.all_go_on()
        for worker in [*self._workers, *(each for each, _ in self._draining)]:
            self._end(worker)
        self._workers.clear()
        self._draining.clear()

    def _pick(self, share: float) -> Any:
        self.fill()
        moving = [worker for worker in self._workers if worker.pid not in self._paused] or self._workers
        return moving[int(share * len(moving))]

    def _go_on(self, pid: int) -> None:
        if pid not in self._paused:
            return
        stopped_at, timer = self._paused.pop(pid)
        timer.cancel()
        with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
            os.kill(pid, signal.SIGCONT)
        self.pauses.append(Pause(pid, stopped_at, time.time()))

    def _end(self, worker: Any) -> None:
        if worker.pid in self._paused:
            stopped_at, timer = self._paused.pop(worker.pid)
            timer.cancel()
            self.pauses.append(Pause(worker.pid, stopped_at, time.time()))
        worker.kill()
        worker.join()


class Weather:
    """Lets the faults of a forecast happen to the workers and the servers."""

    def __init__(self, mongo: DevMongo, crew: Crew, say: Callable[[str], None]) -> None:
        self.happened: Counter[str] = Counter()
        self._mongo = mongo
        self._crew = crew
        self._say = say
        self._repair: asyncio.Task[None] | None = None

    async def rage(self, faults: list[Fault]) -> None:
        """Let everything happen in turn; then repair what is broken."""
        try:
            started = time.monotonic()
            for fault in faults:
                await asyncio.sleep(started + fault.at_s - time.monotonic())
                await self._happen(fault)
                self._crew.fill()
        finally:
            self._crew.all_go_on()
            if self._repair is not None:
                await self._repair
            await asyncio.to_thread(self._calm)
            self._crew.fill()

    async def _happen(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                self._crew.kill(fault.share)
            case "pause":
                self._crew.pause(fault.share, fault.lasts_s)
            case "drain":
                self._crew.drain(fault.share)
            case "command":
                if not await asyncio.to_thread(self._fail_commands, *fault.detail):
                    return
            case _:
                if self._repair is not None and not self._repair.done():
                    return  # one server at a time: two of three have to be there, or nothing can be decided
                primary = await asyncio.to_thread(self._mongo.primary)
                if primary is None:
                    return
                self._repair = asyncio.create_task(self._hit_primary(fault, primary))
        self.happened[fault.kind] += 1
        self._say(fault.kind)

    async def _hit_primary(self, fault: Fault, primary: int) -> None:
        match fault.kind:
            case "primary killed":
                await asyncio.to_thread(self._mongo.kill, primary)
                await asyncio.sleep(fault.lasts_s)
                await asyncio.to_thread(self._mongo.restart, primary)
                await asyncio.to_thread(self._prepare, primary)
            case "primary stands still":
                self._mongo.pause(primary)
                await asyncio.sleep(fault.lasts_s)
                self._mongo.resume(primary)
            case _:
                await asyncio.to_thread(self._step_down, primary)

    def prepare_all(self) -> None:
        """Prepare the servers, and start the workers."""
        for node in range(len(self._mongo.ports)):
            self._prepare(node)
        self._crew.fill()

    def _prepare(self, node: int) -> None:
        """A server keeps the transaction of a dead client open, and what it wrote locked, for a minute; here are many such deaths."""
        with self._client(node) as client:
            client.admin.command("setParameter", 1, transactionLifetimeLimitSeconds=OPEN_TRANSACTION_S)

    def _step_down(self, primary: int) -> None:
        with contextlib.suppress(PyMongoError), self._client(primary) as client:  # it may have stepped down by itself, or say so by hanging up
            client.admin.command("replSetStepDown", 5, secondaryCatchUpPeriodSecs=2)

    def _fail_commands(self, kind: int, times: int) -> bool:
        """Returns whether a primary took it."""
        primary = self._mongo.primary()
        if primary is None:
            return False
        try:
            with self._client(primary) as client:
                # Both the runners and the people are clients of this name; so few at a time that they get through in the end.
                data = {**SERVER_FAULTS[kind], "appName": "mongo_durable"}
                client.admin.command("configureFailPoint", "failCommand", mode={"times": times}, data=data)
        except PyMongoError:
            return False  # it stands still, or died just now
        return True

    def _calm(self) -> None:
        for node in range(len(self._mongo.ports)):
            with self._client(node) as client:
                client.admin.command("configureFailPoint", "failCommand", mode="off")

    def _client(self, node: int) -> pymongo.MongoClient[dict[str, Any]]:
        port = self._mongo.ports[node]
        return pymongo.MongoClient(
            "127.0.0.1", port, directConnection=True, serverSelectionTimeoutMS=_SEND_TIMEOUT_MS, socketTimeoutMS=_SEND_TIMEOUT_MS
        )
