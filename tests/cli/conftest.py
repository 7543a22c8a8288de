"""What the command line's tests share: the command line itself, and runs to look at."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from pymongo import AsyncMongoClient
from typer.testing import CliRunner, Result

from mongo_durable import App, SyncDurableClient
from mongo_durable.cli.commands import app as commands
from mongo_durable.protocol.events import ActivityKind
from mongo_durable.protocol.frontier import FrontierEntry, frontier_entry
from mongo_durable.protocol.values import encode
from mongo_durable.store import frontiers
from mongo_durable.store.appender import Appender
from mongo_durable.store.connection import Connection
from tests.support.attempts import Attempt, position
from tests.support.databases import shared_by
from tests.support.terminal import Terminal

Cli = Callable[..., Result]
KEYS = {"MONGO_DURABLE_SIGNING_KEYS": f"k1:{'1' * 32}"}


class State(TypedDict, total=False):
    """What the tests' graphs carry."""

    fault: str
    answers: list[Any]


@pytest.fixture
def cli(mongo_uri: str, database: str) -> Cli:
    """`cli("runs", "--json")`: the command line in this process, on the test's own database."""

    def call(*arguments: str, **environment: str | None) -> Result:
        where = {"MONGO_DURABLE_URI": mongo_uri, "MONGO_DURABLE_DATABASE": database, **environment}
        return CliRunner().invoke(commands, list(arguments), env=where, prog_name="mongo-durable")

    return call


class Desk:
    """A database that many tests share, each with runs of its own; and the ways to work on it."""

    def __init__(self, uri: str, database: str) -> None:
        self.uri = uri
        self.database = database
        self.environment = {"MONGO_DURABLE_URI": uri, "MONGO_DURABLE_DATABASE": database, **KEYS}

    def cli(self, *arguments: str, **environment: str | None) -> Result:
        """The command line in this process."""
        return CliRunner().invoke(commands, list(arguments), env={**self.environment, **environment}, prog_name="mongo-durable")

    def ask(self, *questions: dict[str, Any], run_id: str | None = None) -> tuple[str, list[str]]:
        """A run that waits for answers: fields of a `FrontierEntry`, and `schema`, for each question. Its id, and those of the questions."""
        named = run_id or f"run-{uuid.uuid4().hex[:10]}"
        entries = [_entry(named, number, **each) for number, each in enumerate(questions or ({},), 1)]

        async def suspend() -> None:
            async with AsyncMongoClient[Any](self.uri) as client:
                connection = Connection(client, self.database, is_owned=False)
                attempt = await Attempt.submit(connection, Appender(connection), named)
                await frontiers.suspend(connection, attempt.claim, attempt.channel, entries)
                await connection.aclose()

        asyncio.run(suspend())
        return named, [each.activity_id for each in entries]


def _entry(run_id: str, number: int, *, value: Any = "may I?", schema: Any = None, name: str = "approval", **options: Any) -> FrontierEntry:
    return frontier_entry(run_id, position(number), ActivityKind.INTERRUPT, name, encode(value), schema, **options)


@pytest.fixture(scope="session")
def desk(mongo_uri: str) -> Iterator[Desk]:
    """Where people look and answer."""
    with shared_by("desk", mongo_uri) as name:
        yield Desk(mongo_uri, name)


@pytest.fixture
def clerk(desk: Desk) -> Any:
    """The public client on the shared database."""
    with closing(SyncDurableClient(desk.uri, database=desk.database)) as opened:
        yield opened


@pytest.fixture
def terminal(desk: Desk, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """`terminal("show", "po-17")`: the command line in a terminal of its own, on the shared database. None is left behind."""
    begun: list[Terminal] = []

    def start(*arguments: str, columns: int = 120, **environment: str) -> Terminal:
        where = {**os.environ, **desk.environment, "PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm-256color", **environment}
        where = {name: value for name, value in where.items() if name not in ("NO_COLOR", "FORCE_COLOR") or name in environment}
        begun.append(Terminal("-W", "error", "-m", "mongo_durable.cli", *arguments, environment=where, folder=tmp_path, columns=columns))
        return begun[-1]

    yield start
    for each in begun:
        each.close()


@pytest.fixture
def started(mongo_uri: str, database: str) -> Callable[..., None]:
    """`started("po-17", questions=1)`: a run of an app that asks so many questions at once, driven to its rest in this process."""

    def start(run_id: str, *, questions: int = 0, workflow: str = "purchase", thread_id: str | None = None, fault: str = "") -> None:
        async def drive() -> None:
            app = asking_app(workflow, mongo_uri, database, questions)
            try:
                await app.ainvoke({"fault": fault}, {"configurable": {"thread_id": thread_id or run_id}}, run_id=run_id)
            except ValueError:
                assert fault
            finally:
                await app.aclose()

        asyncio.run(drive())

    return start


@pytest.fixture
def answered(mongo_uri: str, database: str) -> Callable[..., None]:
    """`answered("po-17", questions=1)`: goes on with an answered run, in a new attempt."""

    def go_on(run_id: str, *, questions: int = 1, workflow: str = "purchase") -> None:
        async def drive() -> None:
            app = asking_app(workflow, mongo_uri, database, questions)
            try:
                await app.ainvoke(None, {"configurable": {"thread_id": run_id}})
            finally:
                await app.aclose()

        asyncio.run(drive())

    return go_on


@pytest.fixture
def client(mongo_uri: str, database: str) -> Any:
    """The public client, to see what a command did."""
    with closing(SyncDurableClient(mongo_uri, database=database)) as opened:
        yield opened


def asking_app(workflow: str, uri: str, database: str, questions: int) -> App:
    """An app with one activity, and so many nodes that ask at once."""
    app = App(workflow, uri=uri, database=database)

    @app.activity
    async def look_up(fault: str) -> str:
        if fault:
            raise ValueError(fault)
        return "found"

    def asking(number: int) -> Callable[[State], Awaitable[State]]:
        async def ask(state: State) -> State:
            interrupt({"question": f"number {number}"})
            return {}

        return ask

    @app.entrypoint
    def build() -> Any:
        graph = StateGraph(State)

        async def first(state: State) -> State:
            return {"answers": [await look_up(state["fault"])]}

        graph.add_node("first", first)
        graph.add_edge(START, "first")
        for number in range(1, questions + 1):
            graph.add_node(f"ask_{number}", asking(number))
            graph.add_edge("first", f"ask_{number}")
        return graph

    return app


@pytest.fixture
def process(mongo_uri: str, database: str, tmp_path: Path) -> Any:
    """`process("runner", "shop:app")`: the command line as a process of its own, in the test's folder. None is left behind."""
    begun: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "MONGO_DURABLE_URI": mongo_uri, "MONGO_DURABLE_DATABASE": database}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-W", "error", "-m", "mongo_durable.cli", *arguments]
        begun.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return begun[-1]

    yield start
    for each in begun:
        if each.poll() is None:
            each.kill()
        each.communicate()


def until(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
