"""What a server and a listener know of change streams."""

from __future__ import annotations

import asyncio
from typing import Any

import pymongo
from pymongo.errors import PyMongoError

from mongo_durable.store.connection import Connection
from mongo_durable.store.wakeups import Listener

_READ_WITHIN_MS = 10_000


def cursors(client: pymongo.MongoClient[dict[str, Any]], database: str) -> list[int]:
    """The change streams on this database's runs that are open on the server, and that somebody reads.

    Where a reply was lost, the driver opens a stream again, and the server keeps the one before for minutes; nobody reads it.
    """
    is_read = {"$or": [{"$ne": ["$type", "idleCursor"]}, {"$gte": ["$cursor.lastAccessDate", {"$subtract": ["$$NOW", _READ_WITHIN_MS]}]}]}
    stages: list[dict[str, Any]] = [
        {"$currentOp": {"idleCursors": True}},
        {"$match": {"ns": f"{database}.runs", "cursor.originatingCommand.pipeline.0.$changeStream": {"$exists": True}, "$expr": is_read}},
    ]
    # A cursor whose read ends while the server lists is listed as busy and as idle.
    return list(dict.fromkeys(each["cursor"]["cursorId"] for each in client.admin.aggregate(stages)))


class Follower:
    """Knows the runs that it was told of, or that it saw when it was told to look. It never looks of its own accord.

    Attributes:
        heard: Those that it was told of.
        looks: How often it was told to look.
    """

    def __init__(self, connection: Connection) -> None:
        self.known: set[str] = set()
        self.heard: set[str] = set()
        self.looks = 0
        self._connection = connection

    async def follow(self, listener: Listener) -> None:
        """Follow until cancelled."""
        while True:
            changes = await listener.wait()
            if changes is None:
                await self._look()
                self.looks += 1
            else:
                self.heard |= {change.run_id for change in changes}
                self.known |= self.heard

    async def _look(self) -> None:
        while True:
            try:
                self.known |= {document["_id"] async for document in self._connection.runs.find({}, {"_id": 1})}
                return
            except PyMongoError:
                await asyncio.sleep(0.05)  # the database is away
