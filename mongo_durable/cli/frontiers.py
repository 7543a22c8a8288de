"""`mongo-durable frontiers` and `resolve`: what waits for an answer, and the answer."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from mongo_durable.cli.database import Database, Opened, Uri, with_database
from mongo_durable.cli.output import After, AsJson, console, in_one_line, length, moment, print_json, printable, say_next

if TYPE_CHECKING:
    from mongo_durable.snapshots import Frontier, Question
    from mongo_durable.store.documents import Resolution

# No JSON value begins like this.
_NAMED_ANSWER = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)=(.*)", re.DOTALL)


def list_frontiers(
    workflow: Annotated[str | None, typer.Option(help="Of this workflow only.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 1000,
    after: After = None,
    as_json: AsJson = False,
    uri: Uri = None,
    database: Database = None,
) -> None:
    """List what waits for answers, oldest first. All questions of a frontier are answered at once."""

    async def work(opened: Opened) -> list[Frontier]:
        return await opened.client.open_frontiers(workflow=workflow, limit=limit, after=after)

    found = with_database(uri, database, work)
    if len(found) == limit:
        say_next(found[-1].cursor)
    if as_json:
        print_json([{**{each.name: getattr(frontier, each.name) for each in fields(frontier)}, "cursor": frontier.cursor} for frontier in found])
        return
    out = console()
    if not found:
        out.print("nothing waits for an answer")
        return

    from rich.text import Text

    now = datetime.now(UTC)
    for frontier in found:
        age = length(now - frontier.opened_at) if frontier.opened_at is not None else "-"
        where = f"  {printable(frontier.workflow)}  generation {frontier.generation}  waits for {age}"
        out.print(Text.assemble((f"run {printable(frontier.run_id)}", "bold"), where))
        for entry in frontier.entries:
            out.print(Text(f"  {entry.activity_id}  {printable(entry.name)} asks {in_one_line(entry.value)}{_deadline(entry)}"))
    out.print("\nanswer with: mongo-durable resolve RUN --answer ACTIVITY=JSON", style="dim", markup=False)


def _deadline(entry: Question) -> str:
    """What happens to a question if nobody answers it; nothing for one that waits for ever."""
    if entry.expires_at is None:
        return ""
    then = f"is answered with {in_one_line(entry.default)}" if entry.has_default else "expires"
    return f"  ({then} at {moment(entry.expires_at)})"


def resolve(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run that waits.", show_default=False)],
    answer: Annotated[
        list[str],
        typer.Option(
            metavar="ACTIVITY_ID=JSON", help="One for each open question; JSON alone where there is exactly one question.", show_default=False
        ),
    ],
    by: Annotated[str | None, typer.Option(help="Who answers; recorded.", show_default=False)] = None,
    note: Annotated[str | None, typer.Option(help="Why; recorded.", show_default=False)] = None,
    generation: Annotated[int | None, typer.Option(help="Refuse if the run has moved on from this generation.", show_default=False)] = None,
    digest: Annotated[str | None, typer.Option(help="Refuse if the questions are not those with this digest.", show_default=False)] = None,
    as_json: AsJson = False,
    uri: Uri = None,
    database: Database = None,
) -> None:
    """Answer all open questions of a run, at once. The same answers again are accepted and change nothing."""
    given = [_parse(each) for each in answer]

    async def work(opened: Opened) -> Resolution:
        answers = await _by_activity(opened, run_id, given)
        return await opened.client.resolve(run_id, answers, generation=generation, digest=digest, resolved_by=by, note=note)

    receipt = with_database(uri, database, work)
    if as_json:
        print_json(receipt)
    else:
        console().print(f"run {printable(run_id)}: generation {receipt.generation} is answered; a runner goes on with it", markup=False)


async def _by_activity(opened: Opened, run_id: str, given: list[tuple[str | None, Any]]) -> dict[str, Any]:
    named = {activity_id: value for activity_id, value in given if activity_id is not None}
    if len(named) == len(given):
        return named
    if len(given) > 1:
        raise typer.BadParameter("--answer: with more than one, each is ACTIVITY_ID=JSON for another activity")

    from mongo_durable.store import frontiers

    frontier = await frontiers.current(opened.connection, run_id)
    if len(frontier.entries) != 1:
        ids = ", ".join(entry.activity_id for entry in frontier.entries)
        raise typer.BadParameter(f"--answer: run {run_id} has {len(frontier.entries)} open questions, name each as ACTIVITY_ID=JSON: {ids}")
    return {frontier.entries[0].activity_id: given[0][1]}


def _parse(text: str) -> tuple[str | None, Any]:
    """The activity id, if one is named, and the value.

    Raises:
        typer.BadParameter: The value is not JSON.
    """
    named = _NAMED_ANSWER.fullmatch(text)
    activity_id, value = (named[1], named[2]) if named is not None else (None, text)
    try:
        return activity_id, json.loads(value, parse_constant=_no_such_json)
    except (ValueError, RecursionError) as error:
        where = f" for {activity_id}" if activity_id is not None else ""
        hint = "a text needs its double quotes, inside the shell's: '\"yes\"'"
        raise typer.BadParameter(f"--answer: the value{where} is not JSON ({error}); {hint}") from None


def _no_such_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
