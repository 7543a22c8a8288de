"""What the README shows of the command line."""

from __future__ import annotations

import asyncio
import re
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.terminal import Terminal

ROOT = Path(__file__).parents[2]
_EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COLUMNS = 150


def cli_screens(environment: Mapping[str, str]) -> dict[str, str]:
    """The README's first example, looked at and answered in a terminal.

    Args:
        environment: With `MONGO_DURABLE_URI` and `MONGO_DURABLE_DATABASE`, as the process has it too: the example reads it there.
    """
    example: dict[str, Any] = {"__name__": "example"}
    exec(compile(_EXAMPLE.findall((ROOT / "README.md").read_text(encoding="utf-8"))[0], "example.py", "exec"), example)
    asyncio.run(_drive(example["app"], {"item": "desk"}))
    screens = {"cli-frontiers": _typed(environment, "frontiers")}
    screens["cli-resolve"] = _typed(environment, "resolve", "po-17", "--by", "approver-7", lines={"(JSON): ": '{"approved": true}', "[y/n] ": "y"})
    late = ("resolve", "po-17", "--by", "approver-9", "--answer", '{"approved": false}')
    _typed(environment, *late)  # refused: the first answer stands
    asyncio.run(_drive(example["app"], None))
    screens["cli-show"] = _typed(environment, "show", "po-17")
    here = re.compile(rf"\b{re.escape(socket.gethostname())}(?=-\d+-[0-9a-f]+)")
    return {name: f"```\n{here.sub('host-1', screen)}```\n" for name, screen in screens.items()}


def _typed(environment: Mapping[str, str], *arguments: str, lines: Mapping[str, str] | None = None) -> str:
    """What the terminal shows after a command was typed, and a line at each of these prompts."""
    where = {**environment, "TERM": "xterm", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        terminal = Terminal("-m", "mongo_durable.cli", *arguments, environment=where, folder=Path(folder), columns=_COLUMNS)
        try:
            for prompt, line in (lines or {}).items():
                terminal.answer(prompt, line)
            terminal.ended()
        finally:
            terminal.close()
    return f"$ mongo-durable {' '.join(arguments)}\n{terminal.text}"


async def _drive(app: Any, given: Any) -> None:
    try:
        await app.ainvoke(given, {"configurable": {"thread_id": "team-7"}}, **({"run_id": "po-17"} if given is not None else {}))
    finally:
        await app.aclose()
