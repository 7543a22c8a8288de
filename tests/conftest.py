"""What every test may ask for: a MongoDB replica set, and a database of its own on it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pymongo
import pytest

from mongo_durable.dev import DevMongo


@pytest.fixture(scope="session")
def mongo_uri() -> Iterator[str]:
    """Connection string of the replica set: `MONGO_DURABLE_URI`, else a throwaway one for this process. Without a server, tests fail."""
    given = os.environ.get("MONGO_DURABLE_URI")
    if given:
        yield given
        return
    with DevMongo(test_commands=True) as uri:
        yield uri


@pytest.fixture(scope="session")
def _administration(mongo_uri: str) -> Iterator[pymongo.MongoClient]:
    with pymongo.MongoClient(mongo_uri) as client:
        yield client


@pytest.fixture
def database(_administration: pymongo.MongoClient) -> Iterator[str]:
    """Name of a database that no other test uses. It is dropped afterwards."""
    name = f"test_{uuid.uuid4().hex[:16]}"
    yield name
    _administration.drop_database(name)
