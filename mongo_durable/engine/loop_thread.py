"""An event loop on a thread of its own, for callers that are synchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from mongo_durable.errors import ConfigurationError

T = TypeVar("T")


class LoopThread:
    """An event loop on a thread of its own: where the engine lives when the application calls synchronously."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the loop and wait for it, from any other thread: a plain script, or a Jupyter cell whose own loop is running."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise ConfigurationError("a synchronous call was made on mongo_durable's own event loop: it would wait for itself; use the async form")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def close(self) -> None:
        """End the loop and its thread. Open async generators are closed first, as `asyncio.run` does."""
        if self.loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._shut_down(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _shut_down(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.loop.shutdown_asyncgens()
        await self.loop.shutdown_default_executor()
