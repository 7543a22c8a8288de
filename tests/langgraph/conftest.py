"""One database for all graphs of a test process; its runs are told apart by their ids. At the end the whole of it must keep the invariants."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pymongo
import pytest

from tests.langgraph.bench import Bench, fragile_attempts
from tests.support.invariants import assert_invariants


@pytest.fixture(scope="session")
def bench(mongo_uri: str) -> Iterator[Bench]:
    """Runs graphs, and keeps count of its attempts."""
    database = f"test_langgraph_{uuid.uuid4().hex[:12]}"
    made = Bench(mongo_uri, database)
    try:
        with fragile_attempts():
            yield made
        made.close()
        assert_invariants(mongo_uri, database)
    finally:
        with pymongo.MongoClient(mongo_uri) as client:
            client.drop_database(database)
