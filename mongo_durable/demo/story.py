"""The story: three workers, two of which are killed, one person, one desk."""

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
from mongo_durable.demo.proof import ASKS, KILLED_INSIDE, Account, Process, faults, last_message, model_calls, proofs, worker_of
from mongo_durable.demo.shop import Shop
from mongo_durable.demo.worker import HOLDING
from mongo_durable.demo.workers import DemoFailed, Worker, Workers
from mongo_durable.snapshots import RunSnapshot
from mongo_durable.store.connection import Connection, Endpoint
from mongo_durable.store.faults import no_driver_errors
from mongo_durable.timeline import AttemptLine, timeline

WORKFLOW = "purchase"
PERSON = "ada"
ANSWER = {"approved": True, "note": "within budget"}
REQUEST = "Please buy a standing desk."
LEASE_S = 2.0
PATIENCE_S = 60.0
_MODEL_PATIENCE_S = 300.0


async def tell(console: Console, uri: str, *, model: str | None = None, is_kept: bool = False) -> list[str]:
    """Play the story on a database of its own, print it, and check it.

    Args:
        model: provider:name instead of the scripted model.
        is_kept: Leave the database, to look at it.

    Returns:
        What is not as claimed; empty if everything is.
    """
    async with on_a_stage(console, uri, WORKFLOW, is_kept=is_kept) as stage:
        account = await _tell(Telling(stage, PATIENCE_S if model is None else _MODEL_PATIENCE_S), model)
        found = faults(account)
        _print_account(console, account, found)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where a story is told: a database of its own, and a folder for the outside world."""

    console: Console
    uri: str
    connection: Connection
    client: DurableClient
    folder: Path
    run_id: str


@asynccontextmanager
async def on_a_stage(console: Console, uri: str, workflow: str, *, is_kept: bool) -> AsyncIterator[Stage]:
    """A stage, taken down afterwards unless its database is to be kept."""
    database = f"mongo_durable_demo_{secrets.token_hex(4)}"
    run_id = f"{workflow}-{secrets.token_hex(3)}"
    console.print(Text(f"in database {database}", style="dim"))
    endpoint = Endpoint(uri, database)
    connection = endpoint.connection()
    try:
        with tempfile.TemporaryDirectory(prefix="mongo-durable-demo-") as folder:
            async with DurableClient(uri, client=connection.client, database=database) as client:
                yield Stage(console=console, uri=uri, connection=connection, client=client, folder=Path(folder), run_id=run_id)
    finally:
        if is_kept:
            console.print(f"\nkept: mongo-durable show {run_id} --database {database}", markup=False)
        else:
            with no_driver_errors():
                await connection.client.drop_database(database)
        await endpoint.aclose()


async def _tell(telling: Telling, model: str | None) -> Account:
    stage = telling.stage
    async with Workers(stage.uri, stage.connection.database.name, stage.folder, LEASE_S, model) as workers:
        await stage.client.submit(WORKFLOW, {"messages": [{"role": "user", "content": REQUEST}]}, run_id=stage.run_id)
        telling.say(f"a client submits run {stage.run_id}: “{REQUEST}”")

        a = await telling.start(workers, "A")
        suspended = await a.until("the question", stage.client.wait(stage.run_id), telling.patience_s)
        if suspended.frontier is None:
            raise DemoFailed(f"the run is {suspended.status} instead of waiting for approval: {suspended.error}")
        telling.say("the model asks for the price, the shop quotes it, the model asks for approval: the run is suspended")
        await a.kill()
        telling.say("worker A gets SIGKILL: no process is left, only MongoDB")

        await telling.answer(suspended, ANSWER)

        b = await telling.start(workers, "B", hold=KILLED_INSIDE)
        await b.until(f"the inside of {KILLED_INSIDE}", b.says(f"{HOLDING} {KILLED_INSIDE}"), telling.patience_s)
        telling.say(f"the answer reaches {ASKS}; the model orders; {KILLED_INSIDE} has ordered, and its outcome is not recorded yet")
        await b.kill()
        telling.say("worker B gets SIGKILL inside the tool: nobody knows whether the order happened")

        c = await telling.start(workers, "C")
        telling.say(f"once B's lease of {LEASE_S:g} s is over, C takes the run over; the tool is idempotent, so its policy is to run it again")
        snapshot = await c.until("the end of the run", stage.client.wait(stage.run_id), telling.patience_s)
        telling.say(f"the run is {snapshot.status}" + (f": “{last_message(snapshot.output)}”" if snapshot.output is not None else ""))
        await c.stop()
        processes = [ended(worker) for worker in (a, b, c)]
    return Account(
        snapshot=snapshot,
        timeline=timeline(await stage.client.history(stage.run_id)),
        effects=Shop(stage.folder / "effects").lines(),
        workers=processes,
        answered_by=PERSON,
        is_scripted=model is None,
    )


class Telling:
    """One telling of a story: what happens on the stage, said as it happens."""

    def __init__(self, stage: Stage, patience_s: float) -> None:
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
        stage = self.stage
        view = stage.connection.database["open_frontiers"]
        with no_driver_errors():
            rows = await view.find({"run": stage.run_id}).to_list(None)
        self.stage.console.print(f'        mongosh> db.open_frontiers.find({{run: "{stage.run_id}"}})', style="cyan", markup=False)
        for row in rows:
            self._show(row)
        if len(suspended.frontier.entries) != 1:
            raise DemoFailed(f"the model asked {len(suspended.frontier.entries)} questions at once; the demo answers one")
        (entry,) = suspended.frontier.entries
        given = shlex.quote(f"{entry.activity_id}={json.dumps(answer)}")
        self.say(f"{PERSON} answers, from this process; the same as:")
        self.stage.console.print(f"        $ mongo-durable resolve {stage.run_id} --answer {given} --by {PERSON}", style="cyan", markup=False)
        await stage.client.resolve(
            stage.run_id,
            {entry.activity_id: answer},
            generation=suspended.frontier.generation,
            digest=suspended.frontier.digest,
            resolved_by=PERSON,
        )

    def say(self, what: str) -> None:
        """Tell what has happened."""
        self.stage.console.print(Text.assemble((f"{time.monotonic() - self._began:5.1f} s ", "dim"), what))

    def _show(self, row: Mapping[str, Any]) -> None:
        self.stage.console.print(Text("\n".join(f"        {line}" for line in json.dumps(row, indent=2, default=str).splitlines()), style="cyan"))


def ended(worker: Worker) -> Process:
    """A worker that has ended, as the account has it."""
    return Process(name=worker.name, pid=worker.pid, exit_code=worker.exit_code)


def _print_account(console: Console, account: Account, found: list[str]) -> None:
    attempts = Table(title="\nWhat the history says", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in ("attempt", "process", "replayed: taken from the history", "executed", "how it ended"):
        attempts.add_column(name, overflow="fold")
    for attempt in account.timeline.attempts:
        worker = worker_of(attempt, account)
        attempts.add_row(
            str(attempt.fence),
            f"{worker.name} ({worker.pid})" if worker is not None else Text(attempt.owner),
            Text(", ".join(line.name for line in attempt.recorded) or "nothing"),
            Text(", ".join(line.name for line in attempt.executed) or "nothing"),
            Text(_ending(attempt)),
        )
    console.print(attempts)

    frontiers = Table(title="\nThe frontier", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in ("no.", "asked by", "activity", "status", "answer", "by"):
        frontiers.add_column(name, overflow="fold")
    for frontier in account.timeline.frontiers:
        for entry in frontier.entries:
            answer = (frontier.answers or {}).get(entry["activity_id"])
            cells = (
                str(frontier.generation),
                entry["name"],
                entry["activity_id"],
                frontier.status.value,
                json.dumps(answer),
                frontier.resolved_by or "",
            )
            frontiers.add_row(*(Text(cell) for cell in cells))
    console.print(frontiers)

    table = Table(title="\nWhat the outside world saw", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in ("effect", "activity", "body began in attempt", "took effect", "that is"):
        table.add_column(name, overflow="fold")
    for each in proofs(account):
        began = ", ".join(str(number) for number in each.began)
        seen = (each.effect, each.key, began, f"{each.happened} ×", each.verdict)
        table.add_row(*(Text(cell, style="" if each.is_right else "red") for cell in seen))
    console.print(table)

    calls = model_calls(account)
    made = f"{calls.made} made" if calls.made is not None else "not counted by this model"
    console.print(f"\nmodel calls: {made}, {calls.recorded} recorded; {calls.spared} answers were taken from the history instead of calling again")
    if not found:
        console.print(Text("proved: killed twice, one order, no recorded effect ran again, and the history says what the outside world saw", "green"))


def _ending(attempt: AttemptLine) -> str:
    if attempt.ending == "suspended":
        return f"suspended on frontier {attempt.generation}, then killed"
    if attempt.ending is not None:
        return attempt.ending
    last = attempt.executed[-1].name if attempt.executed else "nothing"
    return f"killed inside {last}; attempt {attempt.taken_over_by} took over"
