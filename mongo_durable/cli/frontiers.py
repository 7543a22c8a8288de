"""`mongo-durable frontiers`: what waits for an answer, and for whose."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mongo_durable.cli.database import Database, Opened, Uri, complete_suspended_run, with_database
from mongo_durable.cli.output import (
    After,
    AsJson,
    age,
    console,
    in_brief,
    in_one_line,
    line,
    moment,
    print_json,
    print_json_line,
    printable,
    say_next,
)
from mongo_durable.cli.run_tree import terms_of
from mongo_durable.cli.watching import Watch, watch

if TYPE_CHECKING:
    from rich.console import Group

    from mongo_durable.snapshots import Draft, Frontier


@dataclass(frozen=True, slots=True)
class _Shown:
    """What waits at one moment: frontiers, and what has been drafted for them, by run and generation."""

    frontiers: list[Frontier]
    drafts: dict[tuple[str, int], Draft]

    @property
    def by_key(self) -> dict[tuple[str, int], Frontier]:
        return {(each.run_id, each.generation): each for each in self.frontiers}


def list_frontiers(
    workflow: Annotated[str | None, typer.Option(help="Of this workflow only.", show_default=False)] = None,
    audience: Annotated[str | None, typer.Option(help="With a question that this audience is asked now.", show_default=False)] = None,
    thread: Annotated[str | None, typer.Option(help="Of this thread only.", show_default=False)] = None,
    run: Annotated[
        str | None, typer.Option(metavar="RUN", help="Of this run only.", show_default=False, autocompletion=complete_suspended_run)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 1000,
    after: After = None,
    is_watched: Watch = False,
    as_json: AsJson = False,
    uri: Uri = None,
    database: Database = None,
) -> None:
    """List what waits for answers, oldest first: who is asked what, until when, and who has answered what in a draft.

    All questions of a frontier are answered at once. With --watch and --json each change is one JSON object on a line of its own.
    """

    async def look(opened: Opened) -> _Shown:
        found = await opened.client.open_frontiers(workflow=workflow, thread_id=thread, run_id=run, audience=audience, limit=limit, after=after)
        drafts = await opened.client.open_drafts(found)
        return _Shown(found, {(each.run_id, each.generation): each for each in drafts})

    if is_watched:
        is_live = console().is_interactive and not as_json
        watch(uri, database, look, _drawn, _tell_as_json if as_json else _tell, is_live=is_live)
        return

    async def once(opened: Opened) -> tuple[_Shown, str]:
        return await look(opened), opened.nothing("nothing waits for an answer")

    shown, nothing = with_database(uri, database, once)
    if len(shown.frontiers) == limit:
        say_next(shown.frontiers[-1].cursor)
    if as_json:
        print_json([_as_document(each, shown.drafts.get((each.run_id, each.generation))) for each in shown.frontiers])
        return
    out = console()
    if not shown.frontiers:
        out.print(nothing, markup=False)
        return
    out.print(_drawn(shown))
    out.print("\nanswer with: mongo-durable resolve RUN", style="dim", markup=False)


def _as_document(frontier: Frontier, draft: Draft | None) -> dict[str, Any]:
    return {**{each.name: getattr(frontier, each.name) for each in fields(frontier)}, "cursor": frontier.cursor, "draft": draft}


def _drawn(shown: _Shown) -> Group:
    from rich.console import Group

    if not shown.frontiers:
        return Group(line("nothing waits for an answer"))
    now = datetime.now(UTC)
    lines = []
    for frontier in shown.frontiers:
        draft = shown.drafts.get((frontier.run_id, frontier.generation))
        lines.append(
            line(
                (f"run {printable(frontier.run_id)}", "bold"),
                f"  {printable(frontier.workflow)}  generation {frontier.generation}  ",
                (f"waits for {age(frontier.opened_at)}", "yellow"),
                f", until {moment(frontier.expires_at)}" if frontier.expires_at is not None else "",
                f"  {len(draft.answers)} of {len(frontier.entries)} answered in the draft" if draft is not None and draft.answers else "",
            )
        )
        for entry in frontier.entries:
            asks = in_brief(entry.value)
            lines.append(line("  ", (entry.activity_id, "cyan"), f"  {printable(entry.name)} asks ", (asks, "bold")))
            if terms := terms_of(entry, now):
                lines.append(line("    ", (terms, "dim")))
            drafted = draft.answers.get(entry.activity_id) if draft is not None else None
            if drafted is not None:
                lines.append(line("    ", (f"draft: {printable(drafted.by)} says ", "green"), f"{in_one_line(drafted.value)}  {age(drafted.at)} ago"))
    return Group(*lines)


async def _tell(opened: Opened, before: _Shown | None, now: _Shown) -> None:
    for change, frontier, draft in await _changes(opened, before, now):
        what = "; ".join(f"{entry.name} asks {in_brief(entry.value, 120)}" for entry in frontier.entries)
        if change == "draft":
            said = [f"{each.by} says {in_one_line(each.value)} to {activity_id}" for activity_id, each in draft.answers.items()] if draft else []
            what = "; ".join(said) or "empty"
        _say(f"{moment(datetime.now(UTC))}  {change:<9}  run {frontier.run_id}  generation {frontier.generation}  {what}")


def _say(text: str) -> None:
    print(printable(text), flush=True)


async def _tell_as_json(opened: Opened, before: _Shown | None, now: _Shown) -> None:
    for change, frontier, draft in await _changes(opened, before, now):
        print_json_line({"change": change, "frontier": _as_document(frontier, draft)})


async def _changes(opened: Opened, before: _Shown | None, now: _Shown) -> list[tuple[str, Frontier, Draft | None]]:
    """What is new: frontiers that are open, those that are `resolved`, `expired` or `cancelled` since, and drafts that have changed."""
    old = before.by_key if before is not None else {}
    new = now.by_key
    found: list[tuple[str, Frontier, Draft | None]] = []
    for key, frontier in old.items():
        if key not in new:
            closed = await opened.client.frontier(*key)
            # One that is open still is no longer among those asked for, such as those of an audience.
            found.append((closed.status if closed is not None and closed.status != "open" else "gone", frontier, None))
    found += [("open", frontier, now.drafts.get(key)) for key, frontier in new.items() if key not in old]
    drafted_before = before.drafts if before is not None else {}
    found += [
        ("draft", new[key], draft)
        for key, draft in now.drafts.items()
        if (draft.answers and before is None) or (key in old and draft.answers != (drafted_before[key].answers if key in drafted_before else {}))
    ]
    return found
