"""What a runner does, for whoever watches its terminal: the attempts that it executes now, and what those before came to."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from mongo_durable.cli.output import STYLES, length, printable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rich.console import Console, Group
    from rich.text import Text

    from mongo_durable.runner import Runner

_EVERY_S = 0.25
_MOST_SHOWN = 20


def progress_console() -> Console | None:
    """Standard error, if it is a terminal that can show something in place."""
    from rich.console import Console

    out = Console(stderr=True, highlight=False)
    return out if out.is_interactive else None


class OnConsole(logging.Handler):
    """Log records as lines above what is shown in place."""

    def __init__(self, out: Console) -> None:
        super().__init__()
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._out.print(self.format(record), markup=False, soft_wrap=True)
        except Exception:  # noqa: BLE001 - as logging's own handlers: a record that cannot be written stops no program
            self.handleError(record)


@asynccontextmanager
async def shown(runner: Runner, out: Console) -> AsyncIterator[None]:
    """Show the runner's progress while the block runs."""
    from rich.live import Live

    # What user code prints goes where it belongs, and above the display where that is this terminal.
    with Live(drawn(runner), console=out, auto_refresh=False, redirect_stdout=sys.stdout.isatty()) as live:

        async def refresh() -> None:
            idle_with: Counter[str] | None = None
            while True:
                # An idle runner leaves its terminal alone.
                live.update(drawn(runner), refresh=bool(runner.executing) or runner.tally != idle_with)
                idle_with = None if runner.executing else Counter(runner.tally)
                await asyncio.sleep(_EVERY_S)

        refreshing = asyncio.create_task(refresh(), name="mongo_durable-progress")
        try:
            yield
        finally:
            refreshing.cancel()
            await asyncio.gather(refreshing, return_exceptions=True)
            live.update(drawn(runner), refresh=True)


def drawn(runner: Runner) -> Group:
    """One line for the whole, and one for each attempt that is executed."""
    from rich.console import Group
    from rich.text import Text

    now = time.monotonic()
    executing = list(runner.executing.items())
    lines = [
        Text.assemble(
            (f"attempt {each.fence}", "cyan"),
            f"  run {printable(run_id)}  {printable(each.workflow)}  for {length(timedelta(seconds=now - each.since))}",
            no_wrap=True,
            overflow="ellipsis",
        )
        for run_id, each in executing[:_MOST_SHOWN]
    ]
    if len(executing) > _MOST_SHOWN:
        lines.append(Text(f"and {len(executing) - _MOST_SHOWN} more", style="dim"))
    return Group(*lines, _counts(runner, len(executing)))


def _counts(runner: Runner, running: int) -> Text:
    from rich.text import Text

    parts = [Text(f"{running} running", style="cyan")]
    parts += [Text(f"{number} {what}", style=STYLES.get(what, "")) for what, number in sorted(runner.tally.items()) if number]
    return Text.assemble(Text(" · ").join(parts), ("  Ctrl-C drains", "dim"), no_wrap=True, overflow="ellipsis")
