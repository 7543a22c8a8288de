"""One database for all deep agents of a test process; at the end the whole of it must keep the invariants."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pymongo
import pytest

from tests.deep_agents.kit import Inputs, watched_inputs
from tests.langgraph.bench import Bench, fragile_attempts
from tests.support.invariants import assert_invariants

_made = pytest.StashKey[int]()
_WORKERS_SHARE = "attempts of deep agents"


@pytest.fixture(scope="session")
def bench(mongo_uri: str, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Runs deep agents, and keeps count of its attempts."""
    database = f"test_deep_agents_{uuid.uuid4().hex[:12]}"
    made = Bench(mongo_uri, database)
    try:
        with fragile_attempts():
            yield made
        request.config.stash[_made] = made.attempts
        made.close()
        assert_invariants(mongo_uri, database)
    finally:
        with pymongo.MongoClient(mongo_uri) as client:
            client.drop_database(database)


@pytest.fixture
def inputs() -> Iterator[Inputs]:
    """What models are given in this test. At its end: the same at each position in all attempts, to the byte."""
    with watched_inputs() as watched:
        yield watched
    different = {where: sorted(given) for where, given in watched.seen.items() if len(given) != 1}
    assert not different
    assert watched.count


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells its count to the process that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_WORKERS_SHARE] = session.config.stash.get(_made, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """A worker has ended: add its count."""
    stash = node.config.stash
    stash[_made] = stash.get(_made, 0) + getattr(node, "workeroutput", {}).get(_WORKERS_SHARE, 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many attempts there were."""
    if made := config.stash.get(_made, 0):
        terminalreporter.write_line(f"{made} attempts of deep agents")
