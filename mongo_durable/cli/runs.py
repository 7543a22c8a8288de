"""`mongo-durable runs`, `show`, `cancel` and `retry`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mongo_durable.cli.database import Database, Opened, Uri, with_database
from mongo_durable.cli.output import STYLES, After, AsJson, complain, console, in_one_line, length, moment, print_json, printable, say_next

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from mongo_durable.snapshots import RunSnapshot
    from mongo_durable.timeline import ActivityLine, AttemptLine, FrontierLine, Timeline

RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.", show_default=False)]


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
    as_json: AsJson = False,
    uri: Uri = None,
    database: Database = None,
) -> None:
    """List runs, newest first."""
    if unserved and (status or workflow or version or thread):
        raise typer.BadParameter("--unserved goes with --limit and --after alone")

    async def work(opened: Opened) -> list[RunSnapshot]:
        if unserved:
            return await opened.client.unserved_runs(limit=limit, after=after)
        return await opened.client.list_runs(status=status, workflow=workflow, version=version, thread_id=thread, limit=limit, after=after)

    found = with_database(uri, database, work)
    if len(found) == limit:
        say_next(found[-1].cursor)
    if as_json:
        # A listing has no outputs and no questions: leave out what would read as "none".
        print_json(
            [
                {**{name: value for name, value in _fields(each).items() if name not in ("output", "frontier")}, "cursor": each.cursor}
                for each in found
            ]
        )
        return
    out = console()
    if not found:
        out.print("no run matches")
        return

    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("run", "workflow", "status", "attempt", "thread", "submitted", "ended", "error or wait"):
        table.add_column(name, overflow="fold", no_wrap=name in ("status", "submitted", "ended"))
    for each in found:
        table.add_row(
            Text(printable(each.run_id)),
            Text(printable(f"{each.workflow} {each.version}")),
            Text(each.status, style=STYLES.get(each.status, "")),
            Text(str(each.attempt)),
            Text(printable(each.thread_id)),
            Text(moment(each.submitted_at)),
            Text(moment(each.ended_at)),
            Text(printable(str((each.error or {}).get("type") or each.waits_for or ""))),
        )
    out.print(table)


def show(run_id: RunId, as_json: AsJson = False, uri: Uri = None, database: Database = None) -> None:
    """Show a run: its attempts with what each executed and what it took from the history, its frontiers with their answers, its end."""

    async def work(opened: Opened) -> tuple[RunSnapshot, Any, Timeline, dict[str, Any]]:
        from mongo_durable.protocol.events import EventType
        from mongo_durable.store import frontiers
        from mongo_durable.timeline import timeline

        snapshot = await opened.client.get_run(run_id)
        history = await opened.client.history(run_id)
        found = timeline(history)
        questions = {}
        for frontier in found.frontiers:
            stored = await frontiers.get(opened.connection, run_id, frontier.generation)
            for entry in stored.entries if stored is not None else ():
                questions[entry.activity_id] = opened.client.decode(entry.value)
        submitted = next((event.value for event in history if event.type is EventType.RUN_SUBMITTED), None)
        return snapshot, submitted, found, questions

    snapshot, submitted, found, questions = with_database(uri, database, work)
    if as_json:
        frontiers = [
            {**_fields(each), "entries": [{**entry, "question": questions.get(entry["activity_id"])} for entry in each.entries]}
            for each in found.frontiers
        ]
        print_json({"run": snapshot, "input": submitted, "attempts": found.attempts, "frontiers": frontiers})
        return
    console().print(_run_tree(snapshot, submitted, found, questions))


def _fields(value: Any) -> dict[str, Any]:
    import dataclasses

    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}


def _run_tree(snapshot: RunSnapshot, submitted: Any, found: Timeline, questions: dict[str, Any]) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    head = Text.assemble(
        (f"run {printable(snapshot.run_id)}", "bold"),
        f"  {printable(snapshot.workflow)} {printable(snapshot.version)}  ",
        (snapshot.status, STYLES.get(snapshot.status, "")),
        f"  thread {printable(snapshot.thread_id)}  submitted {moment(snapshot.submitted_at)}",
        f"  ended {moment(snapshot.ended_at)}" if snapshot.ended_at is not None else "",
    )
    tree = Tree(head)
    if snapshot.waits_for is not None:
        tree.add(Text(f"waits: {printable(snapshot.waits_for)}", style="yellow"))
    tree.add(Text(f"input {in_one_line(submitted)}"))
    for attempt in found.attempts:
        _add_attempt(tree, attempt)
        for frontier in found.frontiers:
            if frontier.generation == attempt.generation:
                _add_frontier(tree, frontier, questions)
    if snapshot.output is not None:
        tree.add(Text(f"output {in_one_line(snapshot.output, 400)}"))
    if snapshot.error is not None:
        error = tree.add(Text(f"error {printable(str(snapshot.error.get('type')))}: {printable(str(snapshot.error.get('message')))}", style="red"))
        for name in ("position", "expected", "found"):
            if name in snapshot.error:
                error.add(Text(f"{name} {in_one_line(snapshot.error[name], 300)}"))
    return tree


def _add_attempt(tree: Tree, attempt: AttemptLine) -> None:
    from rich.text import Text

    branch = tree.add(
        Text.assemble(
            (f"attempt {attempt.fence}", "bold"),
            f"  {attempt.owner}  {moment(attempt.started_at)}  ",
            (ending(attempt), STYLES.get(attempt.ending or "", "yellow")),
        )
    )
    for activity in attempt.recorded:
        branch.add(_activity_text(activity, f"recorded in attempt {activity.attempt}, not executed", "dim"))
    for activity in attempt.executed:
        style = "" if activity.outcome == "completed" else "red" if activity.outcome in ("failed", "denied") else "yellow"
        branch.add(_activity_text(activity, _execution(activity), style))


def _activity_text(activity: ActivityLine, what: str, style: str) -> Text:
    from rich.text import Text

    return Text(f"{activity.kind:<9} {printable(activity.name)}  {activity.activity_id}  {printable(activity.position)}  {what}", style=style)


def _execution(activity: ActivityLine) -> str:
    if activity.kind == "TIMER":
        return "fired" if activity.outcome is not None else f"set, fires {moment(activity.until)}"
    if not activity.is_executed:
        return f"{activity.outcome}, as a person said; not executed"
    if activity.outcome is None:
        return "executed, no outcome in this attempt"
    error = f": {activity.error.get('type')}: {activity.error.get('message')}" if activity.error is not None else ""
    return printable(f"executed, {activity.outcome} in {length(activity.duration)}{error}")


def ending(attempt: AttemptLine) -> str:
    """How an attempt ended, in words."""
    if attempt.ending == "suspended":
        return f"suspended on frontier {attempt.generation}"
    if attempt.ending is not None:
        return attempt.ending
    sleeps = [each.until for each in attempt.executed if each.until is not None and each.outcome is None]
    if sleeps:
        return f"gave the run back until {moment(min(sleeps))}"
    return f"no end recorded; attempt {attempt.taken_over_by} went on" if attempt.taken_over_by is not None else "no end recorded yet"


def _add_frontier(tree: Tree, frontier: FrontierLine, questions: dict[str, Any]) -> None:
    from rich.text import Text

    by = f" by {printable(frontier.resolved_by)}" if frontier.resolved_by else ""
    note = f"  “{printable(frontier.note)}”" if frontier.note else ""
    status = frontier.status.value
    branch = tree.add(
        Text.assemble(
            (f"frontier {frontier.generation}", "bold"),
            f"  opened {moment(frontier.opened_at)}  ",
            (status, STYLES.get(status, "")),
            by,
            f" {moment(frontier.closed_at)}" if frontier.closed_at is not None else "",
            note,
        )
    )
    for entry in frontier.entries:
        activity_id = entry["activity_id"]
        question = branch.add(Text(f"{activity_id}  {printable(entry['name'])} asks {in_one_line(questions.get(activity_id))}"))
        if frontier.answers is not None and activity_id in frontier.answers:
            what = "default" if frontier.status == "expired" else "answer"
            question.add(Text(f"{what} {in_one_line(frontier.answers[activity_id])}"))


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
