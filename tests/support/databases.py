"""Databases that are set up, for tests that each use runs of their own."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pymongo
from pymongo import AsyncMongoClient

from mongo_durable.store import schema
from mongo_durable.store.connection import Connection


@contextmanager
def shared_by(whom: str, uri: str) -> Iterator[str]:
    """The name of a new database with its collections, indexes and views. It is dropped afterwards."""
    name = f"test_{whom}_{uuid.uuid4().hex[:16]}"

    async def set_up() -> None:
        async with AsyncMongoClient(uri) as client:
            await schema.ensure_schema(Connection(client, name, is_owned=False))

    asyncio.run(set_up())
    yield name
    with pymongo.MongoClient(uri) as client:
        client.drop_database(name)
