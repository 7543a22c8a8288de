"""The crash tests share a world: a database of their own, a file of outside effects, real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pymongo
import pytest

from tests.crash.processes import World

_SERVER_DEFAULT_S = 60
_OPEN_TRANSACTION_S = 3


@pytest.fixture(scope="session")
def _server(mongo_uri: str) -> Iterator[pymongo.MongoClient]:
    with pymongo.MongoClient(mongo_uri) as client:
        yield client
        client.admin.command("setParameter", 1, transactionLifetimeLimitSeconds=_SERVER_DEFAULT_S)


@pytest.fixture(autouse=True)
def _dead_transactions_end_soon(_server: pymongo.MongoClient) -> None:
    # A server keeps the transaction of a dead client open, and what it wrote locked, for a minute; these tests have many such deaths.
    _server.admin.command("setParameter", 1, transactionLifetimeLimitSeconds=_OPEN_TRANSACTION_S)


@pytest.fixture
def world(mongo_uri: str, database: str, tmp_path: Path) -> Iterator[World]:
    """A world of this test's own."""
    world = World(mongo_uri, database, tmp_path / "effects")
    yield world
    world.close()
