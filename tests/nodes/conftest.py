"""One database for all graphs of this folder; at the end the whole of it must keep the invariants."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pymongo
import pytest

from tests.langgraph.bench import Bench, fragile_attempts
from tests.nodes.stage import ASK_USER, INTERRUPT, Path, Stage
from tests.support.invariants import assert_invariants


@pytest.fixture(scope="session")
def bench(mongo_uri: str) -> Iterator[Bench]:
    """Runs graphs."""
    database = f"test_nodes_{uuid.uuid4().hex[:12]}"
    made = Bench(mongo_uri, database)
    try:
        with fragile_attempts():
            yield made
        made.close()
        assert_invariants(mongo_uri, database)
    finally:
        with pymongo.MongoClient(mongo_uri) as client:
            client.drop_database(database)


@pytest.fixture(params=["durable-async", "durable-sync", "plain-async", "plain-sync"])
def stage(bench: Bench, request: pytest.FixtureRequest) -> Stage:
    """A mode: durably or in plain LangGraph, under `ainvoke` or `invoke`."""
    kind, colour = request.param.split("-")
    return Stage(bench, is_durable=kind == "durable", is_sync=colour == "sync")


@pytest.fixture
def durable(bench: Bench) -> Stage:
    """The durable mode."""
    return Stage(bench, is_durable=True, is_sync=False)


@pytest.fixture(params=[INTERRUPT, ASK_USER], ids=["interrupt", "ask_user"])
def path(request: pytest.FixtureRequest) -> Path:
    """One of the two paths."""
    found: Path = request.param
    return found
