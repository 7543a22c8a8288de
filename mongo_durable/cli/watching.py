"""Looking again whenever something changes, until Ctrl-C: one change stream for the news of runs, and a slow look for what it does not tell."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from mongo_durable.cli.database import Opened, with_database
from mongo_durable.cli.output import console
from mongo_durable.errors import StoreUnavailable

if TYPE_CHECKING:
    from rich.console import RenderableType

T = TypeVar("T")

Watch = Annotated[bool, typer.Option("--watch", help="Go on showing it as it changes, until Ctrl-C; in a pipe, a line for each change.")]

_LOOK_AGAIN_S = 2.0  # drafts and ages change without news of a run
_AT_MOST_EVERY_S = 0.2
_SHARE = 20  # without news, looking takes at most so small a part of the time, however much there is to read


def watch(
    uri: str | None,
    database: str | None,
    look: Callable[[Opened], Awaitable[T]],
    draw: Callable[[T], RenderableType],
    tell: Callable[[Opened, T | None, T], Awaitable[None]],
    *,
    is_live: bool,
) -> None:
    """Look, and look again at each change, until Ctrl-C.

    Args:
        look: Reads what is watched.
        draw: What a terminal shows of it.
        tell: Prints what has changed since the look before, None at first; where there is no terminal.
        is_live: Draw, in place; else tell.
    """

    async def work(opened: Opened) -> None:
        if is_live:
            await _draw(opened, look, draw)
            return
        before: T | None = None

        async def show(found: T) -> None:
            nonlocal before
            await tell(opened, before, found)
            before = found

        await _follow(opened, look, show, lambda: None)

    try:
        with_database(uri, database, work)
    except KeyboardInterrupt:
        return  # that is how one leaves


async def _draw(opened: Opened, look: Callable[[Opened], Awaitable[T]], draw: Callable[[T], RenderableType]) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    out = console()
    foot = Text("Ctrl-C leaves", style="dim")
    with Live(Text("looking", style="dim"), console=out, auto_refresh=False, vertical_overflow="ellipsis") as live:

        async def show(found: T) -> None:
            live.update(Group(draw(found), foot), refresh=True)

        def lost() -> None:
            live.update(Group(Text("MongoDB cannot be reached; looking again", style="red"), foot), refresh=True)

        await _follow(opened, look, show, lost)


async def _follow(opened: Opened, look: Callable[[Opened], Awaitable[T]], show: Callable[[T], Awaitable[None]], lost: Callable[[], None]) -> None:
    from mongo_durable.store.wakeups import Wakeups

    wakeups = Wakeups(opened.endpoint)
    try:
        async with wakeups.listen() as listener:
            took_s = 0.0
            while True:
                await listener.wait(max(_LOOK_AGAIN_S, _SHARE * took_s))
                begun = time.monotonic()
                try:
                    await show(await look(opened))
                except StoreUnavailable:
                    lost()  # an election, or a server that restarts: the next look may find it
                took_s = time.monotonic() - begun
                await asyncio.sleep(_AT_MOST_EVERY_S)  # many changes at once are one look
    finally:
        await wakeups.aclose()
