"""`mongo-durable prune`: removing runs that ended long ago."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mongo_durable.cli.database import Database, Opened, Uri, with_database
from mongo_durable.cli.durations import duration
from mongo_durable.cli.output import AsJson, console, print_json, printable

if TYPE_CHECKING:
    from mongo_durable.store.pruning import PrunedRun


def prune(
    older_than: Annotated[str, typer.Option(metavar="30d", help="Ended so long ago: seconds, or a number with s, m, h, d.", show_default=False)],
    status: Annotated[
        str | None, typer.Option(help="completed, failed, diverged or cancelled; all of them if not given.", show_default=False)
    ] = None,
    workflow: Annotated[str | None, typer.Option(help="Of this workflow only.", show_default=False)] = None,
    thread: Annotated[str | None, typer.Option(help="Of this thread only.", show_default=False)] = None,
    batch: Annotated[int, typer.Option(min=1, help="Documents deleted at once.")] = 500,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say which, and remove nothing.")] = False,
    as_json: AsJson = False,
    uri: Uri = None,
    database: Database = None,
) -> None:
    """Remove ended runs of a certain age with everything they own. Nothing that lives is touched; stopped at any moment, the next call goes on.

    What stays of a thread is its newest committed state, from which its next run starts.
    """
    age = duration(older_than, "--older-than")
    documents: Counter[str] = Counter()

    async def work(opened: Opened) -> list[str]:
        options: dict[str, Any] = {"older_than": age, "status": status, "workflow": workflow, "thread_id": thread, "batch": batch, "dry_run": dry_run}
        if dry_run or not sys.stderr.isatty():
            return await opened.client.prune(**options, on_run=lambda each: documents.update(each.documents))

        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        shown = Console(stderr=True)
        total = len(await opened.client.prune(**{**options, "dry_run": True}))
        with Progress(
            SpinnerColumn(), *Progress.get_default_columns()[:3], TextColumn("{task.completed} runs"), TimeElapsedColumn(), console=shown
        ) as bar:
            task = bar.add_task("pruning", total=total)

            def count(each: PrunedRun) -> None:
                documents.update(each.documents)
                bar.advance(task)

            return await opened.client.prune(**options, on_run=count)

    found = with_database(uri, database, work)
    if as_json:
        print_json({"dry_run": dry_run, "runs": found, "documents": dict(documents)})
        return
    out = console()
    if dry_run:
        for run_id in found:
            out.print(printable(run_id), markup=False)
    how_many = f"{len(found)} run{'' if len(found) == 1 else 's'}"
    what = "would be removed" if dry_run else f"removed, {sum(documents.values())} documents in all"
    out.print(f"{how_many} {what}", markup=False)
