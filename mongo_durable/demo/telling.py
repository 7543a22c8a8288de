"""What the stories share: a stage, a person, worker processes that are killed, and how it is all said."""

from __future__ import annotations

import json
import secrets
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mongo_durable.client import DurableClient
from mongo_durable.demo.workers import OUTSIDE, DemoFailed, Worker, Workers
from mongo_durable.snapshots import RunSnapshot
from mongo_durable.store.connection import Connection, Endpoint
from mongo_durable.store.faults import no_driver_errors

PERSON = "ada"
LEASE_S = 2.0
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where a story is told: a database of its own, and a folder for the outside world."""

    console: Console
    uri: str
    connection: Connection
    client: DurableClient
    folder: Path

    @property
    def outside(self) -> Path:
        """The file that plays the outside world."""
        return self.folder / OUTSIDE

    def workers(self, agent: str, *arguments: str) -> Workers:
        """Worker processes that execute an agent's runs. See `Workers`."""
        return Workers(self.uri, self.connection.database.name, self.folder, LEASE_S, agent, *arguments)


@asynccontextmanager
async def on_a_stage(console: Console, uri: str, look: str, *, is_kept: bool, **options: Any) -> AsyncIterator[Stage]:
    """A stage, taken down afterwards unless its database is to be kept.

    Args:
        look: The subcommand of `mongo-durable` with which to look at a kept database.
        options: Of the stage's client.
    """
    database = f"mongo_durable_demo_{secrets.token_hex(4)}"
    console.print(Text(f"in database {database}", style="dim"))
    endpoint = Endpoint(uri, database)
    connection = endpoint.connection()
    try:
        with tempfile.TemporaryDirectory(prefix="mongo-durable-demo-") as folder:
            async with DurableClient(uri, client=connection.client, database=database, **options) as client:
                yield Stage(console=console, uri=uri, connection=connection, client=client, folder=Path(folder))
    finally:
        if is_kept:
            console.print(f"\nkept: mongo-durable {look} --database {database}", markup=False)
        else:
            with no_driver_errors():
                await connection.client.drop_database(database)
        await endpoint.aclose()


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A worker process that has ended."""

    name: str
    pid: int
    exit_code: int | None


def ended(worker: Worker) -> Process:
    """A worker that has ended, as the account has it."""
    return Process(name=worker.name, pid=worker.pid, exit_code=worker.exit_code)


class Telling:
    """One telling of a story: what happens on the stage, said as it happens."""

    def __init__(self, stage: Stage, patience_s: float = PATIENCE_S) -> None:
        self.stage = stage
        self.patience_s = patience_s
        self._began = time.monotonic()

    async def start(self, workers: Workers, name: str, *, hold: str | None = None) -> Worker:
        """Start a worker."""
        worker = await workers.start(name, hold=hold)
        self.say(f"worker {name} starts (process {worker.pid})")
        return worker

    async def answer(self, suspended: RunSnapshot, answer: Any) -> None:
        """Answer as a person would, who sees only what is stored."""
        assert suspended.frontier is not None
        stage, run_id = self.stage, suspended.run_id
        view = stage.connection.database["open_frontiers"]
        with no_driver_errors():
            rows = await view.find({"run": run_id}).to_list(None)
        self.show(f'mongosh> db.open_frontiers.find({{run: "{run_id}"}})', *(_indented(row) for row in rows))
        if len(suspended.frontier.entries) != 1:
            raise DemoFailed(f"the model asked {len(suspended.frontier.entries)} questions at once; the demo answers one")
        (entry,) = suspended.frontier.entries
        given = shlex.quote(f"{entry.activity_id}={json.dumps(answer)}")
        self.say(f"{PERSON} answers, from this process; the same as:")
        self.show(f"$ mongo-durable resolve {run_id} --answer {given} --by {PERSON}")
        await stage.client.resolve(
            run_id,
            {entry.activity_id: answer},
            generation=suspended.frontier.generation,
            digest=suspended.frontier.digest,
            resolved_by=PERSON,
        )

    def say(self, what: str) -> None:
        """Tell what has happened."""
        self.stage.console.print(Text.assemble((f"{time.monotonic() - self._began:5.1f} s ", "dim"), what))

    def show(self, *texts: str) -> None:
        """Show what a person sees or types."""
        lines = [line for text in texts for line in text.splitlines()]
        self.stage.console.print(Text("\n".join(f"        {line}" for line in lines), style="cyan"), soft_wrap=True)


def _indented(row: Mapping[str, Any]) -> str:
    return json.dumps(row, indent=2, default=str)


def table_of(title: str, *columns: str) -> Table:
    """A table of the account, to which rows are added."""
    made = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        made.add_column(name, overflow="fold")
    return made
