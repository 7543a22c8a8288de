"""DBOS, with its defaults, on PostgreSQL: async workflows with async steps, each step's outcome recorded in a transaction."""

from __future__ import annotations

import asyncio
import time
import uuid

from dbos import DBOS

from scripts.benchmarks.crew import Samples
from scripts.benchmarks.servers import Addresses


@DBOS.step()
async def step(number: int, size: int) -> str:
    """One durable step."""
    return "x" * size


@DBOS.workflow()
async def sequence(steps: int, size: int) -> None:
    """Steps one after the other."""
    for number in range(steps):
        await step(number, size)


@DBOS.workflow()
async def together(steps: int, size: int) -> None:
    """Steps at once."""
    await asyncio.gather(*(step(number, size) for number in range(steps)))


class DbosOnPostgres:
    """DBOS in this process. Its database goes with the server."""

    def __init__(self, addresses: Addresses) -> None:
        url = f"{addresses.postgres}/bench_{uuid.uuid4().hex[:16]}"
        DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR"})
        self._is_launched = False

    async def _ready(self) -> None:
        if not self._is_launched:
            await asyncio.to_thread(DBOS.launch)
            await sequence(2, 10)
            self._is_launched = True

    async def aclose(self) -> None:
        """Stop DBOS's threads."""
        await asyncio.to_thread(DBOS.destroy)

    async def sequence(self, *, steps: int, size: int) -> Samples:
        """One workflow of steps one after the other."""
        await self._ready()
        started = time.perf_counter()
        await sequence(steps, size)
        return {"time": [(time.perf_counter() - started) * 1e3]}

    async def at_once(self, *, runs: int, steps: int, size: int) -> Samples:
        """Such workflows at once."""
        await self._ready()
        started = time.perf_counter()
        await asyncio.gather(*(sequence(steps, size) for _ in range(runs)))
        return {"steps": [runs * steps / (time.perf_counter() - started)]}

    async def tools(self, *, calls: int, size: int) -> Samples:
        """One workflow of steps at once."""
        await self._ready()
        started = time.perf_counter()
        await together(calls, size)
        return {"time": [(time.perf_counter() - started) * 1e3]}
