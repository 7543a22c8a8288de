"""One database for all tests of this folder, whose names keep their runs apart; at the end the whole of it must keep the invariants."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pymongo
import pytest
from pymongo import AsyncMongoClient

from tests.cases.processes import Floor
from tests.cases.workshop import Workshop
from tests.support.invariants import assert_invariants


@pytest.fixture(scope="session")
def shared_database(mongo_uri: str) -> Iterator[str]:
    """Name of the shared database."""
    name = f"test_cases_{uuid.uuid4().hex[:12]}"
    try:
        yield name
        assert_invariants(mongo_uri, name)
    finally:
        with pymongo.MongoClient(mongo_uri) as client:
            client.drop_database(name)


@pytest.fixture
async def workshop(mongo_uri: str, shared_database: str, request: pytest.FixtureRequest) -> AsyncIterator[Workshop]:
    """The runs of one test."""
    name = f"{request.node.originalname.removeprefix('test_')[:40]}-{uuid.uuid4().hex[:6]}"
    async with AsyncMongoClient(mongo_uri) as client:
        made = Workshop(mongo_uri, shared_database, name, client)
        yield made
        await made.aclose()


@pytest.fixture
def floor(workshop: Workshop, tmp_path: Path) -> Iterator[Floor]:
    """A floor of this test's own."""
    with pymongo.MongoClient(workshop.uri) as client:
        # A server keeps the transaction of a dead client open, and what it wrote locked, for a minute.
        client.admin.command("setParameter", 1, transactionLifetimeLimitSeconds=3)
        made = Floor(workshop, tmp_path / "effects")
        yield made
        made.close()
        client.admin.command("setParameter", 1, transactionLifetimeLimitSeconds=60)
