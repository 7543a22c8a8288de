"""What the command line's tests share: the command line itself, and runs to look at."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from typer.testing import CliRunner, Result

from mongo_durable import App, SyncDurableClient
from mongo_durable.cli.commands import app as commands

Cli = Callable[..., Result]


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
