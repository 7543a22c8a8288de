"""The floor: what the database itself takes for the writes that cannot be avoided, through the same driver."""

from __future__ import annotations

import asyncio
import time
import uuid
from itertools import count
from typing import Any

from bson import ObjectId
from pymongo import AsyncMongoClient, WriteConcern
from pymongo.read_concern import ReadConcern

from scripts.benchmarks.crew import Samples
from scripts.benchmarks.servers import Addresses

_AT_ONCE = 2  # batches in the air, as the appender has them


class Raw:
    """Plain documents in a collection without further indexes, `w: majority`."""

    def __init__(self, addresses: Addresses) -> None:
        self._client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(addresses.mongodb)
        self._database = self._client.get_database(
            f"bench_{uuid.uuid4().hex[:16]}", write_concern=WriteConcern("majority"), read_concern=ReadConcern("majority")
        )
        self._documents = self._database["documents"]
        self._histories: set[int] = set()
        self._number = count(1)

    async def aclose(self) -> None:
        """Drop what was written."""
        await self._client.drop_database(self._database)
        await self._client.close()

    def _document(self, size: int) -> dict[str, Any]:
        """A document of about `size` bytes, with fields like those of an event."""
        return {"_id": ObjectId(), "run_id": "run", "seq": next(self._number), "type": "activity.completed", "value": "x" * max(size - 90, 0)}

    async def llm(self, *, calls: int, pause_s: float, size: int) -> Samples:
        """One insert after the pause of each call."""
        await self._documents.insert_one(self._document(size))
        samples: Samples = {"overhead": [], "whole call": []}
        for _ in range(calls):
            document = self._document(size)
            started = time.perf_counter()
            await asyncio.sleep(pause_s)
            paused = time.perf_counter()
            await self._documents.insert_one(document)
            ended = time.perf_counter()
            samples["overhead"].append((ended - paused) * 1e3)
            samples["whole call"].append((ended - started) * 1e3)
        return samples

    async def tool(self, *, calls: int, size: int) -> Samples:
        """One insert a call."""
        return {"overhead": (await self.llm(calls=calls, pause_s=0, size=size))["overhead"]}

    async def sequence(self, *, inserts: int, size: int) -> Samples:
        """Inserts one after the other."""
        started = time.perf_counter()
        for _ in range(inserts):
            await self._documents.insert_one(self._document(size))
        return {"time": [(time.perf_counter() - started) * 1e3]}

    async def at_once(self, *, documents: int, batch: int, size: int) -> Samples:
        """Batches, a few at once, in no order."""
        batches = [[self._document(size) for _ in range(batch)] for _ in range(max(documents // batch, _AT_ONCE))]

        async def send() -> None:
            while batches:
                await self._documents.insert_many(batches.pop(), ordered=False)

        total = batch * len(batches)
        started = time.perf_counter()
        await asyncio.gather(*(send() for _ in range(_AT_ONCE)))
        return {"documents": [total / (time.perf_counter() - started)]}

    async def tools(self, *, calls: int, size: int) -> Samples:
        """All starts in one insert, then all outcomes in one."""
        batches = [[self._document(size) for _ in range(calls)] for _ in range(2)]
        started = time.perf_counter()
        for batch in batches:
            await self._documents.insert_many(batch, ordered=False)
        return {"time": [(time.perf_counter() - started) * 1e3]}

    async def resolving(self, *, times: int) -> Samples:
        """One transaction of two writes, then one insert: what lies between an answer and the next attempt at the least."""
        await self._documents.insert_one(self._document(500))
        taken = []
        for _ in range(times):
            started = time.perf_counter()
            async with self._client.start_session() as session:
                await session.with_transaction(self._two_writes)
            await self._documents.insert_one(self._document(500))
            taken.append((time.perf_counter() - started) * 1e3)
        return {"p50": taken, "p99": taken}

    async def _two_writes(self, session: Any) -> None:
        for _ in range(2):
            await self._documents.insert_one(self._document(500), session=session)

    async def replay(self, *, activities: int, size: int) -> Samples:
        """Read the documents of that many activities, two each, in order."""
        events = self._database[f"history_{activities}"]
        if activities not in self._histories:
            await events.create_index("seq")
            await events.insert_many([self._document(size) for _ in range(2 * activities)], ordered=False)
            self._histories.add(activities)
        started = time.perf_counter()
        found = await events.find({}, batch_size=1_000_000).sort("seq", 1).to_list(None)
        return {"rate": [len(found) / 2 / (time.perf_counter() - started)]}
