"""`mongo-durable runner`: a process that executes runs."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from typing import Annotated

import typer

from mongo_durable.cli.applications import load
from mongo_durable.cli.database import DATABASE_VARIABLE, URI_VARIABLE, Database, Uri
from mongo_durable.cli.durations import duration
from mongo_durable.cli.output import JsonLines
from mongo_durable.cli.progress import OnConsole, progress_console, shown

RELEASED = 3
"""Exit code: stopped, and some attempts were given back at the deadline; other runners go on with them."""


def runner(
    apps: Annotated[list[str], typer.Argument(help="What to execute, as package.module:app.", metavar="MODULE:APP...", show_default=False)],
    concurrency: Annotated[int, typer.Option(min=1, help="Attempts at once in this process.")] = 10,
    workflow_concurrency: Annotated[
        list[str] | None,
        typer.Option(help="Of them, at most N of one workflow. May be repeated.", metavar="WORKFLOW=N", show_default=False),
    ] = None,
    lease: Annotated[float, typer.Option(min=1.0, help="Seconds that this process may be silent before others take its runs over.")] = 10.0,
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds that running attempts get to end when the process is told to stop.")] = 10.0,
    retention: Annotated[
        list[str] | None,
        typer.Option(
            help="Prune runs of a workflow so long after their end, such as 30d. May be repeated.", metavar="WORKFLOW=AGE", show_default=False
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR; DEBUG names each activity.")] = "INFO",
    log_json: Annotated[bool, typer.Option("--log-json", help="Log one JSON object a line, with run_id, fence and position.")] = False,
    uri: Uri = None,
    database: Database = None,
) -> None:
    """Execute runs until SIGTERM or Ctrl-C, then drain: claim nothing more, let each attempt end or stop before its next effect, release the rest.

    --uri and --database are for apps that name none themselves. Exit code 0 when every attempt stopped by itself, 3 when some were broken off at the
    deadline. Either way other runners go on with the runs at once. A terminal shows what is executed now, and what the attempts before came to.
    """
    limits = _limits(workflow_concurrency or [])
    kept = _ages(retention or [])
    for variable, value in ((URI_VARIABLE, uri), (DATABASE_VARIABLE, database)):
        if value:
            os.environ[variable] = value  # where an App looks that names none itself
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise typer.BadParameter(f"--log-level is DEBUG, INFO, WARNING or ERROR, not {log_level}")
    out = None if log_json else progress_console()
    handler = OnConsole(out) if out is not None else logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_json else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("pymongo").setLevel(max(level, logging.WARNING))  # its DEBUG writes every command with its values
    loaded = load(apps)

    from mongo_durable.runner import Runner

    async def work() -> bool:
        executing = Runner(loaded, concurrency=concurrency, workflow_concurrency=limits, retention=kept, lease=timedelta(seconds=lease))
        async with shown(executing, out) if out is not None else nullcontext():
            return await executing.run_forever(timedelta(seconds=grace))

    if not asyncio.run(work()):
        raise typer.Exit(RELEASED)


def _limits(given: list[str]) -> dict[str, int]:
    limits = {}
    for each in given:
        workflow, equals, number = each.rpartition("=")
        if not equals or not workflow or not number.isdecimal():
            raise typer.BadParameter(f"--workflow-concurrency is WORKFLOW=N, not {each!r}")
        limits[workflow] = int(number)
    return limits


def _ages(given: list[str]) -> dict[str, timedelta]:
    ages = {}
    for each in given:
        workflow, equals, age = each.rpartition("=")
        if not equals or not workflow:
            raise typer.BadParameter(f"--retention is WORKFLOW=AGE, not {each!r}")
        ages[workflow] = duration(age, "--retention")
    return ages
