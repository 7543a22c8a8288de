"""`mongo-durable export`: histories as files."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from mongo_durable.cli.database import Database, Opened, Uri, with_database
from mongo_durable.cli.durations import duration
from mongo_durable.cli.output import complain

if TYPE_CHECKING:
    from mongo_durable.snapshots import RunSnapshot

_PAGE = 500


def export(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="RUN...", help="Ids of runs; none: all that the options select.", show_default=False)
    ] = None,
    workflow: Annotated[str | None, typer.Option(help="Runs of this workflow.", show_default=False)] = None,
    version: Annotated[str | None, typer.Option(help="Of this version of it only.", show_default=False)] = None,
    status: Annotated[str | None, typer.Option(help="Runs with this status.", show_default=False)] = None,
    since: Annotated[str | None, typer.Option(metavar="7d", help="Submitted within this time: seconds, or a number with s, m, h, d.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The newest so many.", show_default=False)] = None,
    to: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file, not to standard output.")] = None,
    uri: Uri = None,
    database: Database = None,
) -> None:
    """Write whole histories as JSON lines, for `mongo-durable replay`, or to keep them before `prune`."""
    is_selected = any(each is not None for each in (workflow, version, status, since, limit))
    if bool(runs) == is_selected:
        raise typer.BadParameter("name runs, or select them with --workflow, --status, --since or --limit")
    age = duration(since, "--since") if since is not None else None

    async def write(opened: Opened, file: TextIO) -> int:
        written = 0
        async for run_id in _named(runs) if runs else _selected(opened, workflow, version, status, age, limit):
            async for line in opened.client.export(run_id):
                file.write(f"{line}\n")
            written += 1
        return written

    with _file(to) as file:
        written = with_database(uri, database, lambda opened: write(opened, file))
        if not written:
            complain("no run matches: nothing was exported")
            raise typer.Exit(1)
    typer.echo(f"{written} run{'s' if written > 1 else ''} exported", err=True)


@contextmanager
def _file(to: Path | None) -> Iterator[TextIO]:
    """Where to write: a file is there whole or not at all, so that a reader never meets the half of one."""
    if to is None:
        yield sys.stdout
        return
    unfinished = to.with_name(f"{to.name}.unfinished")
    try:
        with open(unfinished, "w", encoding="utf-8", newline="\n") as file:
            yield file
        unfinished.replace(to)
    except OSError as error:
        raise typer.BadParameter(f"--output: {to} cannot be written: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)


async def _named(runs: list[str]) -> AsyncIterator[str]:
    for run_id in runs:
        yield run_id


async def _selected(
    opened: Opened, workflow: str | None, version: str | None, status: str | None, age: timedelta | None, limit: int | None
) -> AsyncIterator[str]:
    """Ids of runs, newest first, page by page."""
    after: str | None = None
    left = limit
    since: datetime | None = None
    if age is not None:
        since = await opened.connection.server_time() - age
    while left is None or left > 0:
        size = _PAGE if left is None else min(_PAGE, left)
        page: list[RunSnapshot] = await opened.client.list_runs(workflow=workflow, version=version, status=status, limit=size, after=after)
        for each in page:
            if since is not None and each.submitted_at is not None and each.submitted_at < since:
                return
            yield each.run_id
        if len(page) < size:
            return
        after = page[-1].cursor
        left = None if left is None else left - size
