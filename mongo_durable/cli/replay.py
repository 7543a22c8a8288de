"""`mongo-durable replay`: recorded histories against the code of today."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mongo_durable.cli.applications import load
from mongo_durable.cli.output import AsJson, complain, console, in_one_line, print_json, printable

if TYPE_CHECKING:
    from mongo_durable.replaying import Replayed

_WORDS = {
    "end": "replays to its recorded end",
    "frontier": "replays to the frontier that it waits on",
    "history": "replays as far as its history goes",
}


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `mongo-durable export` has written.", show_default=False)],
    apps: Annotated[list[str], typer.Argument(metavar="MODULE:APP...", help="The code to check, as package.module:app.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Replay recorded runs against today's code, without a database: no effect is executed, no model called, nothing written.

    Exit code 0 if the code does what every history says, as far as it goes; 1 if it does something else.
    """
    loaded = load(apps)

    from mongo_durable.replaying import each_replayed

    found: list[Replayed] = []
    for replayed in each_replayed(loaded, file):
        found.append(replayed)
        if not as_json:
            _show(replayed)
    if as_json:
        print_json([{"is_same": each.is_same, **_fields(each)} for each in found])
    diverged = sum(not each.is_same for each in found)
    if diverged:
        complain(f"{diverged} of {len(found)} runs diverge: run them with the code that started them, or make the change a new workflow version")
        raise typer.Exit(1)


def _fields(replayed: Replayed) -> dict[str, object]:
    import dataclasses

    return {each.name: getattr(replayed, each.name) for each in dataclasses.fields(replayed)}


def _show(replayed: Replayed) -> None:
    from rich.text import Text

    head = f"run {printable(replayed.run_id)}  {printable(replayed.workflow)} {printable(replayed.version)}  {replayed.status}  "
    if replayed.divergence is None:
        console().print(Text.assemble(head, (_WORDS[replayed.reached or "history"], "green")))
        return
    where = f" at {replayed.divergence.position}" if replayed.divergence.position is not None else ""
    console().print(Text.assemble(head, (f"diverges{printable(where)}", "red")))
    for name, value in (("why", replayed.divergence.message), ("expected", replayed.divergence.expected), ("found", replayed.divergence.found)):
        console().print(Text(f"  {name}: {printable(value) if name == 'why' else in_one_line(value, 300)}"))
