"""Processes that execute runs and are killed or stopped on the way, and the file in which their effects on the outside world can be counted."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from langgraph.types import interrupt

from mongo_durable import App, DurableClient, RetryPolicy, Runner
from mongo_durable.errors import DurableError
from mongo_durable.store import failpoints
from mongo_durable.store.failpoints import FailPoint
from tests.cases.workshop import PATIENCE_S, Workshop, chain, echo
from tests.langgraph.kit import State
from tests.support.clocks import wrong_by

LEASE = timedelta(seconds=1.5)

# Processes are forked from a server that has imported everything and has no client, no thread and no event loop.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["mongo_durable.runner", "mongo_durable.client", "tests.cases.processes"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process is to do.

    Attributes:
        does: `invoke` the workflow in LangGraph's shape; `serve` it with a runner until the runs are at rest; `submit` the runs and die.
        die_in: Effect and number of its occurrence in which the process kills itself, after it has happened.
        die_at: Fail point and number of the hit at which it kills itself.
        wait_in: Effect in whose first occurrence it tells that it is there, and waits until it is told to go on.
        skew: By how much its wall clock is wrong.
    """

    uri: str
    database: str
    effects: str
    workflow: str
    does: str
    runs: tuple[str, ...]
    shape: str = "steps"
    die_in: tuple[str, int] | None = None
    die_at: tuple[FailPoint, int] | None = None
    wait_in: str | None = None
    skew: timedelta = timedelta(0)


class Outside:
    """The outside world, as one process acts on it."""

    def __init__(self, job: Job, pipe: Pipe | None = None) -> None:
        self._job = job
        self._pipe = pipe
        self._seen: Counter[str] = Counter()

    async def effect(self, name: str, run_id: str) -> str:
        """Something happens."""
        line = os.open(self._job.effects, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(line, f"{run_id} {name}\n".encode())
        os.close(line)
        self._seen[name] += 1
        if self._job.die_in == (name, self._seen[name]):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._job.wait_in == name and self._seen[name] == 1 and self._pipe is not None:
            self._pipe.send("in effect")
            await asyncio.to_thread(self._pipe.recv)
        return name


def happened(effects: Path) -> Counter[tuple[str, str]]:
    """How often each effect of each run happened."""
    return Counter((line.split()[0], line.split()[1]) for line in effects.read_text().splitlines()) if effects.exists() else Counter()


def _steps(app: App, outside: Outside) -> Any:
    """An effect, a question, an effect."""

    @app.activity(idempotent=True)
    async def act(name: str, run_id: str) -> str:
        return await outside.effect(name, run_id)

    async def first(state: State) -> State:
        return {"lines": [await act("one", state["work"])]}

    async def second(state: State) -> State:
        return {"lines": [interrupt("sure?"), await act("two", state["work"])]}

    return chain(first=first, second=second)


def _two_effects(app: App, outside: Outside) -> Any:
    """One effect after the other, in one body."""

    @app.activity(idempotent=True)
    async def act(name: str, run_id: str) -> str:
        return await outside.effect(name, run_id)

    async def node(state: State) -> State:
        return {"lines": [await act("one", state["work"]), await act("two", state["work"])]}

    return chain(node=node)


def _stumbles(app: App, outside: Outside) -> Any:
    """An effect that fails, what is done about it, and one more effect."""

    @app.activity
    async def act(name: str, run_id: str) -> str:
        await outside.effect(name, run_id)
        if name == "fails":
            raise LookupError("nothing there")
        return name

    async def node(state: State) -> State:
        try:
            line = await act("fails", state["work"])
        except LookupError as error:
            line = f"{error}: {await act('remedy', state['work'])}"
        return {"lines": [line]}

    @app.activity(idempotent=True)
    async def last(run_id: str) -> str:
        return await outside.effect("last", run_id)

    async def end(state: State) -> State:
        return {"lines": [await last(state["work"])]}

    return chain(node=node, end=end)


def _retries(policy: Any) -> Callable[[App, Outside], Any]:
    """An effect that fails once and is tried again."""

    def make(app: App, outside: Outside) -> Any:
        tries = 0
        quick = RetryPolicy(max_attempts=3, initial_interval=timedelta(0), jitter=timedelta(0))

        @app.activity(retry=quick, on_unknown_outcome=policy)
        async def act(run_id: str) -> str:
            nonlocal tries
            tries += 1
            await outside.effect("try", run_id)
            if tries == 1:
                raise ConnectionError("not yet")
            return "done"

        async def node(state: State) -> State:
            return {"lines": [await act(state["work"])]}

        return chain(node=node)

    return make


SHAPES: dict[str, Callable[[App, Outside], Any]] = {
    "steps": _steps,
    "two effects": _two_effects,
    "stumbles": _stumbles,
    **{f"retries, {policy}": _retries(policy) for policy in ("rerun", "suspend", "fail")},
}


def app_of(job: Job, pipe: Pipe | None = None) -> App:
    """The workflow of a job."""
    app = App(job.workflow, uri=job.uri, database=job.database, lease=LEASE)
    graph = SHAPES[job.shape](app, Outside(job, pipe))
    app.entrypoint(lambda: graph)
    return app


def input_of(run_id: str) -> dict[str, Any]:
    """What a run starts from."""
    return {"lines": [], "work": run_id}


async def _do(job: Job, pipe: Pipe) -> None:
    app = app_of(job, pipe)
    match job.does:
        case "invoke":
            for run_id in job.runs:
                await app.ainvoke(input_of(run_id), {"configurable": {"thread_id": run_id}}, run_id=run_id)
            await app.aclose()
        case "submit":
            async with DurableClient(job.uri, database=job.database) as client:
                for run_id in job.runs:
                    await client.submit(job.workflow, input_of(run_id), run_id=run_id)
                os.kill(os.getpid(), signal.SIGKILL)
        case "serve":
            async with DurableClient(job.uri, database=job.database) as client:
                async with Runner([app], lease=LEASE, sweep_interval=timedelta(seconds=0.1)):
                    for run_id in job.runs:
                        await client.wait(run_id, timeout=PATIENCE_S)


def _main(job: Job, pipe: Pipe) -> None:
    hits: Counter[FailPoint] = Counter()

    async def count(point: FailPoint) -> None:
        hits[point] += 1
        if job.die_at == (point, hits[point]):
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.handler = count
    error: DurableError | None = None
    try:
        with wrong_by(job.skew):
            asyncio.run(_do(job, pipe))
    except DurableError as raised:
        error = raised
    pipe.send({"error": error, "hits": dict(hits)})
    pipe.close()


class Process:
    """One process, doing one job."""

    def __init__(self, job: Job) -> None:
        self._pipe, theirs = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(target=_main, args=(job, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def until_in_effect(self) -> None:
        """Wait until it waits in the effect that its job names."""
        assert self._receive() == "in effect"

    def stop(self) -> None:
        """Let it stand still, as a machine does that is suspended."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        until = time.monotonic() + PATIENCE_S
        while Path("/proc", str(self._process.pid), "stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < until
            os.sched_yield()

    def go_on(self) -> None:
        """Let it go on, where it stood still and in the effect."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)
        self._pipe.send("go on")

    def end(self) -> dict[str, Any] | None:
        """Wait for its end: what it tells, or None if it was killed."""
        try:
            told: dict[str, Any] | None = self._receive()
        except EOFError:
            told = None
        self._process.join(PATIENCE_S)
        code = self._process.exitcode
        self.close()
        assert code == (-signal.SIGKILL if told is None else 0), f"the process ended with {code}"
        return told

    def close(self) -> None:
        """End it, whatever it does."""
        with contextlib.suppress(ValueError):  # it is closed already
            self._process.kill()
            self._process.join()
            self._process.close()
            self._pipe.close()

    def _receive(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "the process is silent"
        return self._pipe.recv()


class Floor:
    """Jobs of one test, the processes that do them, and the runner that comes after them."""

    def __init__(self, workshop: Workshop, effects: Path) -> None:
        self.workshop = workshop
        self.effects = effects
        self._processes: list[Process] = []

    def job(self, does: str, *runs: str, **options: Any) -> Job:
        """A job for the test's workflow."""
        given = {"uri": self.workshop.uri, "database": self.workshop.database, "effects": str(self.effects), "workflow": self.workshop.name}
        return Job(**{**given, "does": does, "runs": runs, **options})

    def start(self, job: Job) -> Process:
        """Start a process."""
        process = Process(job)
        self._processes.append(process)
        return process

    async def end(self, process: Process) -> dict[str, Any] | None:
        """Wait for a process without stopping this one's loop."""
        return await asyncio.to_thread(process.end)

    async def finish(self, job: Job, say: Callable[[Any], Any] = echo, **options: Any) -> list[Any]:
        """What a new process and a person do after a crash: serve the runs, and answer what they ask. Their outputs."""
        sane = replace(job, die_in=None, die_at=None, wait_in=None)
        async with (
            DurableClient(job.uri, database=job.database) as client,
            Runner([app_of(sane)], lease=LEASE, sweep_interval=timedelta(seconds=0.1), **options),
        ):
            return [await self._finish(client, run_id, say) for run_id in job.runs]

    async def _finish(self, client: DurableClient, run_id: str, say: Callable[[Any], Any]) -> Any:
        while not (snapshot := await client.wait(run_id, timeout=PATIENCE_S)).is_ended:
            assert snapshot.frontier is not None
            await client.resolve(run_id, {each.activity_id: say(each.value) for each in snapshot.frontier.entries})
        return snapshot.result()["lines"]

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.close()
