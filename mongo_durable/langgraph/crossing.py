"""Crossing from graph threads to the engine's event loop.

A graph runs in the colour that its caller chose. Under `invoke` its durable calls run in graph threads and cross over to the engine's loop; that must
never be done from the thread that runs the engine's loop, because it would wait for itself. A thread that runs another loop (a notebook's) may wait.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from mongo_durable.errors import ConfigurationError
from mongo_durable.langgraph.control import DurableSignal

T = TypeVar("T")


def runs(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this thread runs `loop` now."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def await_on_loop(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], what: str) -> T:
    """Run `coroutine` on the engine's loop and wait for it in this graph thread.

    Args:
        what: What was called, for the message.

    Raises:
        DurableSignal: This thread runs the engine's loop: waiting here could never end.
    """
    if runs(loop):
        coroutine.close()
        raise DurableSignal(
            ConfigurationError(
                f"{what} was called synchronously on an event loop; await its async form there (ainvoke), or run the graph with invoke"
            )
        )
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


def call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], T]) -> T:
    """Call `function`, which does not wait for anything, on the engine's loop; directly if this is it."""
    if runs(loop):
        return function()
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for it
            done.set_exception(error)

    loop.call_soon_threadsafe(run)
    return done.result()
