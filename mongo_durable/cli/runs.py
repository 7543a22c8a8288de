"""`mongo-durable runs`, `show`, `cancel` and `retry`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mongo_durable.cli.database import Database, Opened, Uri, complete_run, with_database
from mongo_durable.cli.output import STYLES, After, AsJson, age, complain, console, moment, print_json, print_json_line, printable, say_next
from mongo_durable.cli.run_tree import Story, run_tree, waits_for
from mongo_durable.cli.watching import Watch, watch

if TYPE_CHECKING:
    from rich.table import Table

    from mongo_durable.snapshots import RunSnapshot

RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.", show_default=False, autocompletion=complete_run)]


def list_runs(
    status: Annotated[
        str | None,
        typer.Option(help="pending, running, suspended, ready, completed, failed, diverged or cancelled.", show_default=False),
    ] = None,
    workflow: Annotated[str | None, typer.Option(help="Of this workflow only.", show_default=False)] = None,
    version: Annotated[str | None, typer.Option(help="Of this version of it only.", show_default=False)] = None,
    thread: Annotated[str | None, typer.Option(help="Of this thread only.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 100,
    after: After = None,
    unserved: Annotated[bool, typer.Option("--unserved", help="Only those that no live runner serves, the oldest first.")] = False,
    is_watched: Watch = False,
    as_json: AsJson = False,
    uri: Uri = None,
    database: Database = None,
) -> None:
    """List runs, newest first. With --watch and --json each change is one JSON object on a line of its own."""
    if unserved and (status or workflow or version or thread):
        raise typer.BadParameter("--unserved goes with --limit and --after alone")

    async def work(opened: Opened) -> list[RunSnapshot]:
        if unserved:
            return await opened.client.unserved_runs(limit=limit, after=after)
        return await opened.client.list_runs(status=status, workflow=workflow, version=version, thread_id=thread, limit=limit, after=after)

    if is_watched:
        is_live = console().is_interactive and not as_json
        watch(uri, database, work, _table, _tell_as_json if as_json else _tell, is_live=is_live)
        return

    async def once(opened: Opened) -> tuple[list[RunSnapshot], str]:
        return await work(opened), opened.nothing("no run matches")

    found, nothing = with_database(uri, database, once)
    if len(found) == limit:
        say_next(found[-1].cursor)
    if as_json:
        print_json([_listed(each) for each in found])
    elif not found:
        console().print(nothing, markup=False)
    else:
        console().print(_table(found))


def _listed(run: RunSnapshot) -> dict[str, Any]:
    # A listing has no outputs and no questions: leave out what would read as "none".
    return {**{name: value for name, value in _fields(run).items() if name not in ("output", "frontier")}, "cursor": run.cursor}


def _table(found: list[RunSnapshot]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("run", "status", "workflow", "attempt", "submitted", "took", "thread", "waits, or error"):
        table.add_column(name, overflow="fold", no_wrap=name in ("status", "submitted", "took"))
    for each in found:
        error = str((each.error or {}).get("type") or "")
        table.add_row(
            Text(printable(each.run_id)),
            Text(each.status, style=STYLES.get(each.status, "")),
            Text(printable(f"{each.workflow} {each.version}")),
            Text(str(each.attempt)),
            Text(f"{age(each.submitted_at)} ago"),
            Text(age(each.submitted_at, each.ended_at) if each.ended_at is not None else "-"),
            Text(printable(each.thread_id) if each.thread_id != each.run_id else "-"),
            Text(printable(error), style="red") if error else Text(printable(waits_for(each) or "")),
        )
    return table


async def _tell(_: Opened, before: list[RunSnapshot] | None, now: list[RunSnapshot]) -> None:
    for run in _changed(before, now):
        why = (run.error or {}).get("type") or waits_for(run) or ""
        said = f"run {run.run_id}  {run.workflow} {run.version}  {run.status}  attempt {run.attempt}  {why}"
        print(printable(f"{moment(datetime.now(UTC))}  {said}".rstrip()), flush=True)


async def _tell_as_json(_: Opened, before: list[RunSnapshot] | None, now: list[RunSnapshot]) -> None:
    for run in _changed(before, now):
        print_json_line(_listed(run))


def _changed(before: list[RunSnapshot] | None, now: list[RunSnapshot]) -> list[RunSnapshot]:
    """The runs that are new or have another status, attempt or reason to wait, the oldest first."""

    def state(run: RunSnapshot) -> tuple[Any, ...]:
        return (run.run_id, run.status, run.attempt, run.generation, run.waits_for)

    known = {state(each) for each in before or ()}
    return [each for each in reversed(now) if state(each) not in known]


def show(
    run_id: RunId,
    is_whole: Annotated[bool, typer.Option("--full", help="Cut no value, and show each activity's id and whole position.")] = False,
    has_replayed: Annotated[bool, typer.Option("--all", help="A line for each replayed activity, too.")] = False,
    as_json: AsJson = False,
    uri: Uri = None,
    database: Database = None,
) -> None:
    """Show a run: its attempts, what each executed and took from the history, step by step and sub-agent by sub-agent, its frontiers, its end.

    A frontier shows its questions, who answered what by which way, answers that were refused, and the draft so far.
    """

    async def work(opened: Opened) -> Story:
        return await _read(opened, run_id)

    story = with_database(uri, database, work)
    if as_json:
        print_json(_as_document(story))
    else:
        console(is_whole=is_whole).print(run_tree(story, is_whole=is_whole, has_replayed=has_replayed))


async def _read(opened: Opened, run_id: str) -> Story:
    from mongo_durable.protocol.events import EventType
    from mongo_durable.timeline import timeline

    client = opened.client
    run = await client.get_run(run_id)
    history = await client.history(run_id)
    found = timeline(history)
    stored = [await client.frontier(run_id, each.generation) for each in found.frontiers]
    return Story(
        run=run,
        input=next((event.value for event in history if event.type is EventType.RUN_SUBMITTED), None),
        timeline=found,
        questions={(each.generation, entry.activity_id): entry for each in stored if each is not None for entry in each.entries},
        draft=await client.draft(run_id, generation=run.frontier.generation) if run.frontier is not None else None,
        refusals=await client.refusals(run_id),
    )


def _as_document(story: Story) -> dict[str, Any]:
    frontiers = []
    for frontier in story.timeline.frontiers:
        entries = []
        for entry in frontier.entries:
            asked = story.questions.get((frontier.generation, entry["activity_id"]))
            known = {name: value for name, value in _fields(asked).items() if name != "value"} if asked is not None else {}
            entries.append({**entry, **known, "question": asked.value if asked is not None else None})
        frontiers.append({**_fields(frontier), "entries": entries})
    return {
        "run": story.run,
        "input": story.input,
        "attempts": story.timeline.attempts,
        "frontiers": frontiers,
        "draft": story.draft,
        "refusals": story.refusals,
    }


def _fields(value: Any) -> dict[str, Any]:
    import dataclasses

    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}


def cancel(
    run_id: RunId,
    reason: Annotated[str | None, typer.Option(help="Why; recorded.", show_default=False)] = None,
    as_json: AsJson = False,
    uri: Uri = None,
    database: Database = None,
) -> None:
    """End a run as cancelled, whatever it does now. Exit code 1 if it had ended otherwise before."""

    async def work(opened: Opened) -> RunSnapshot:
        return await opened.client.cancel(run_id, reason=reason)

    snapshot = with_database(uri, database, work)
    _say(snapshot, as_json)
    if snapshot.status != "cancelled":
        complain(f"run {run_id} had ended as {snapshot.status} before it could be cancelled")
        raise typer.Exit(1)


def retry(run_id: RunId, as_json: AsJson = False, uri: Uri = None, database: Database = None) -> None:
    """Let a failed or diverged run go on from its history. What it has recorded is not executed again."""

    async def work(opened: Opened) -> RunSnapshot:
        return await opened.client.retry(run_id)

    _say(with_database(uri, database, work), as_json)


def _say(snapshot: RunSnapshot, as_json: bool) -> None:
    if as_json:
        print_json(snapshot)
    else:
        console().print(f"run {printable(snapshot.run_id)} is {snapshot.status}", markup=False)
