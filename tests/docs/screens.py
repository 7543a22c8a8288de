"""What the README shows of a terminal, as it really looks.

    scripts/readme_screens        # writes it between the markers of README.md

A screen stands between `<!-- screen: NAME -->` and `<!-- end of screen -->`. The tests compare what stands there with what comes out today.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mongo_durable.dev import DevMongo
from tests.docs.cli_screens import cli_screens
from tests.support.mongosh import ROOT, Mongosh

README = ROOT / "README.md"
_SCREEN = re.compile(r"(<!-- screen: (?P<name>[a-z-]+) -->\n)(?P<shown>.*?)(<!-- end of screen -->)", re.DOTALL)
_EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def in_readme() -> dict[str, str]:
    """The screens that stand in the README, by name."""
    return {found["name"]: found["shown"] for found in _SCREEN.finditer(README.read_text(encoding="utf-8"))}


def write(screens: Mapping[str, str]) -> None:
    """Put screens into the README; one that is not among them stays."""
    text = README.read_text(encoding="utf-8")
    README.write_text(_SCREEN.sub(lambda found: f"{found[1]}{screens.get(found['name'], found['shown'])}{found[4]}", text), encoding="utf-8")


def mongosh_screens(shell: Mongosh, database: str) -> dict[str, str]:
    """The README's first example, looked at and answered in mongosh. `MONGO_DURABLE_URI` and `MONGO_DURABLE_DATABASE` say where it runs."""
    example: dict[str, Any] = {"__name__": "example"}
    exec(compile(_EXAMPLE.findall(README.read_text(encoding="utf-8"))[0], "example.py", "exec"), example)

    def go_on(given: Any) -> None:
        asyncio.run(_drive(example["app"], given))

    shell.shown(f"use {database}")
    go_on({"item": "desk"})
    screens = {
        "mongosh-frontiers": _typed(shell, "durable.frontiers()"),
        "mongosh-views": _typed(shell, 'db.open_frontiers.find({workflow: "procurement"})'),
    }
    answered = _typed(shell, 'durable.answer("po-17", {approved: true}, {by: "approver-7"})')
    go_on(None)
    shown = _typed(shell, 'durable.show("po-17")')
    screens["mongosh-show"] = f"{answered}\n{shown}"
    return {name: f"```\n{screen.replace(socket.gethostname(), 'host-1')}\n```\n" for name, screen in screens.items()}


def _typed(shell: Mongosh, statement: str) -> str:
    return f"> {statement}\n{shell.shown(statement)}"


async def _drive(app: Any, given: Any) -> None:
    try:
        await app.ainvoke(given, {"configurable": {"thread_id": "team-7"}}, **({"run_id": "po-17"} if given is not None else {}))
    finally:
        await app.aclose()


def _main() -> None:
    with DevMongo() as uri, tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MONGO_DURABLE_URI": uri, "MONGO_DURABLE_DATABASE": "mongo_durable"}
        shell = Mongosh(uri, Path(folder))
        try:
            write(mongosh_screens(shell, "mongo_durable"))
        finally:
            shell.close()
    with DevMongo() as uri:  # the same run again: on a server of its own
        os.environ["MONGO_DURABLE_URI"] = uri
        write(cli_screens(os.environ))


if __name__ == "__main__":
    sys.exit(_main())
