"""`mongo-durable runner`: a process that executes runs."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from mongo_durable.cli.database import DATABASE_VARIABLE, URI_VARIABLE, Database, Uri

if TYPE_CHECKING:
    from mongo_durable.langgraph.app import App

RELEASED = 3
"""Exit code: stopped, and some attempts were given back at the deadline; other runners go on with them."""


def runner(
    apps: Annotated[list[str], typer.Argument(help="What to execute, as package.module:app.", metavar="MODULE:APP...", show_default=False)],
    concurrency: Annotated[int, typer.Option(min=1, help="Attempts at once in this process.")] = 10,
    lease: Annotated[float, typer.Option(min=1.0, help="Seconds that this process may be silent before others take its runs over.")] = 10.0,
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds that running attempts get to end when the process is told to stop.")] = 10.0,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    uri: Uri = None,
    database: Database = None,
) -> None:
    """Execute runs until SIGTERM or Ctrl-C, then drain: claim nothing more, let running attempts end, release the rest.

    --uri and --database are for apps that name none themselves. Exit code 0 when every attempt came to its end by itself, 3 when some were released
    at the deadline.
    """
    for variable, value in ((URI_VARIABLE, uri), (DATABASE_VARIABLE, database)):
        if value:
            os.environ[variable] = value  # where an App looks that names none itself
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise typer.BadParameter(f"--log-level is DEBUG, INFO, WARNING or ERROR, not {log_level}")
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("pymongo").setLevel(max(level, logging.WARNING))  # its DEBUG writes every command with its values
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    loaded = [_load(each) for each in apps]

    from mongo_durable.runner import Runner

    async def work() -> bool:
        executing = Runner(loaded, concurrency=concurrency, lease=timedelta(seconds=lease))
        return await executing.run_forever(timedelta(seconds=grace))

    if not asyncio.run(work()):
        raise typer.Exit(RELEASED)


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
