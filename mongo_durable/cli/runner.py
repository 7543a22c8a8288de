"""`mongo-durable runner`: a process that executes runs."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from mongo_durable.cli.database import DATABASE_VARIABLE, URI_VARIABLE, Database, Uri
from mongo_durable.cli.output import JsonLines
from mongo_durable.cli.progress import OnConsole, progress_console, shown

if TYPE_CHECKING:
    from mongo_durable.langgraph.app import App

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
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    loaded = [_load(each) for each in apps]

    from mongo_durable.runner import Runner

    async def work() -> bool:
        executing = Runner(loaded, concurrency=concurrency, workflow_concurrency=limits, lease=timedelta(seconds=lease))
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


def _load(target: str) -> App:
    """The App that `target` names.

    Raises:
        typer.BadParameter: It names none. An error inside the module itself is raised as it is, with its traceback.
    """
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute or module_name.startswith("."):
        raise typer.BadParameter(f"{target!r} is not of the form package.module:app")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise typer.BadParameter(f"{target!r}: there is no module {error.name!r} (looked in {os.getcwd()} and on the Python path)") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise typer.BadParameter(f"{target!r}: module {module_name!r} has no {attribute!r}")
        found = getattr(found, part)

    from mongo_durable.langgraph.app import App

    if not isinstance(found, App):
        raise typer.BadParameter(f"{target!r} is of type {type(found).__name__}, not a mongo_durable App")
    return found
