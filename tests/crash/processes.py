"""Real processes for the crash tests, and the world around them: a database and a file of outside effects."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pymongo

from mongo_durable import RunSnapshot, SyncDurableClient
from mongo_durable.errors import DurableError
from mongo_durable.store.failpoints import FailPoint
from tests.crash.worker import PATIENCE_S, RUN_ID, Order, main

# Processes are forked from a server that has imported everything and has no client, no thread and no event loop.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["mongo_durable.runner", "mongo_durable.client", "langgraph.prebuilt", "tests.crash.worker"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a process told at its end."""

    result: dict[str, Any]
    error: DurableError | None
    hits: Mapping[FailPoint, int]
    log: list[str]


class Worker:
    """One process, following one order."""

    def __init__(self, order: Order) -> None:
        self._pipe, theirs = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(target=main, args=(order, theirs), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def until_in_body(self) -> None:
        """Wait until the process waits in the body that its order names."""
        assert self._receive() == "in body"

    def go_on(self) -> None:
        """Let it go on from there."""
        self._pipe.send("go on")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def end(self) -> Report | None:
        """Wait for the end: the report, or None if the process was killed."""
        try:
            told = self._receive()
        except EOFError:
            told = None
        self._process.join(PATIENCE_S)
        code = self._process.exitcode
        self.close()
        assert code == (-signal.SIGKILL if told is None else 0), f"the process ended with {code}"
        return Report(**told) if told is not None else None

    def close(self) -> None:
        """End the process, whatever it does."""
        with contextlib.suppress(ValueError):  # it is closed already
            self._process.kill()
            self._process.join()
            self._process.close()
            self._pipe.close()

    def _receive(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "the process is silent"
        return self._pipe.recv()


class World:
    """A database, a file of outside effects, and the processes between them."""

    def __init__(self, uri: str, database: str, effects: Path) -> None:
        self.uri = uri
        self.database = database
        self.effects = effects
        self._workers: list[Worker] = []

    def start(self, role: str, **order: Any) -> Worker:
        """Start a process."""
        worker = Worker(Order(uri=self.uri, database=self.database, effects=str(self.effects), role=role, **order))
        self._workers.append(worker)
        return worker

    def do(self, role: str, **order: Any) -> Report:
        """Have a process do something, and wait for its report."""
        report = self.start(role, **order).end()
        assert report is not None
        if report.error is not None:
            raise report.error
        return report

    def kill_in(self, role: str, **order: Any) -> Report | None:
        """Have a process do something during which it is to die. None if it did."""
        return self.start(role, **order).end()

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.close()

    def lines(self) -> Counter[str]:
        """How often each tool had its effect. An effect has one activity id, however often it happens."""
        happened = [line.split() for line in self.effects.read_text().splitlines()] if self.effects.exists() else []
        assert len({tuple(each) for each in happened}) == len({tool for tool, _ in happened}), "one tool, two idempotency keys"
        return Counter(tool for tool, _ in happened)

    def idempotency_keys(self) -> set[str]:
        """The idempotency keys under which something happened."""
        return {line.split()[1] for line in self.effects.read_text().splitlines()} if self.effects.exists() else set()

    def events(self, run_id: str = RUN_ID) -> list[dict[str, Any]]:
        """The run's events as they are stored."""
        with pymongo.MongoClient(self.uri) as client:
            return list(client[self.database]["activity_events"].find({"run_id": run_id}).sort("seq", 1))

    def run(self, run_id: str = RUN_ID) -> RunSnapshot:
        """The run as it is."""
        with SyncDurableClient(self.uri, database=self.database) as client:
            return client.get_run(run_id)

    def answers(self, run_id: str = RUN_ID) -> dict[str, Any]:
        """What a careful person answers: `yes`; and to whether something happened, what the outside world says."""
        frontier = self.run(run_id).frontier
        assert frontier is not None
        known = self.idempotency_keys()
        results = {"approve": "approved: yes"}
        answers: dict[str, Any] = {}
        for entry in frontier.entries:
            if entry.name != "unknown_outcome":
                answers[entry.activity_id] = "yes"
            elif entry.value["idempotency_key"] in known:
                answers[entry.activity_id] = {"verdict": "completed", "result": results[entry.value["name"]]}
            else:
                answers[entry.activity_id] = {"verdict": "rerun"}
        return answers

    def finish(self, run_id: str = RUN_ID, **order: Any) -> RunSnapshot:
        """Let fresh processes and a careful person bring the run to its end."""
        while True:
            self.do("work", run_id=run_id, **order)
            snapshot = self.run(run_id)
            if snapshot.is_ended:
                return snapshot
            self.do("resolve", run_id=run_id, answers=self.answers(run_id))


def in_the_dark(events: list[dict[str, Any]]) -> set[str]:
    """Names of the activities in whose body the first attempt that was taken over has died: started, and without an outcome."""
    open_starts: dict[str, str] = {}
    is_running = False
    for event in events:
        match event["type"]:
            case "attempt.started":
                if is_running:
                    return set(open_starts.values())
                is_running = True
            case "activity.started":
                open_starts[event["position"]] = event["name"]
            case "activity.completed" | "activity.failed":
                open_starts.pop(event["position"])
            case "activities.suspended" | "run.completed" | "run.failed" | "run.cancelled":
                is_running = False
                open_starts.clear()
    return set()
