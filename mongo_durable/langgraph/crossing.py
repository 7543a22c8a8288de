"""Crossing from graph threads to the engine's event loop.

A graph runs in the colour that its caller chose. Under `invoke` its durable calls run in graph threads and cross over to the engine's loop; that must
never be done from a thread that runs an event loop itself, because it would wait for itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from mongo_durable.errors import ConfigurationError
from mongo_durable.langgraph.control import DurableSignal

T = TypeVar("T")


def is_on_a_loop() -> bool:
    """Whether this thread runs an event loop now."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def await_on_loop(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], what: str) -> T:
    """Run `coroutine` on the engine's loop and wait for it in this graph thread.

    Args:
        what: What was called, for the message.

    Raises:
        DurableSignal: This thread runs an event loop: waiting here could never end.
    """
    if is_on_a_loop():
        coroutine.close()
        raise DurableSignal(
            ConfigurationError(
                f"{what} was called synchronously on an event loop; await its async form there (ainvoke), or run the graph with invoke"
            )
        )
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


def call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], T]) -> T:
    """Call `function`, which does not wait for anything, on the engine's loop; directly if this is it."""
    try:
        if asyncio.get_running_loop() is loop:
            return function()
    except RuntimeError:
        pass
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for it
            done.set_exception(error)

    loop.call_soon_threadsafe(run)
    return done.result()
