"""Runs that wait for answers, without a graph: what is tested here is who may answer, and how."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from mongo_durable import DurableClient, Frontier, SigningKeys
from mongo_durable.protocol.events import ActivityKind
from mongo_durable.protocol.frontier import FrontierEntry, frontier_entry
from mongo_durable.protocol.values import encode
from mongo_durable.store import failpoints
from mongo_durable.store.appender import Appender
from mongo_durable.store.connection import Connection
from mongo_durable.store.documents import StoredFrontier
from mongo_durable.store.heads import get
from tests.support.attempts import Attempt, position
from tests.support.databases import shared_by

KEYS = SigningKeys({"k1": "1" * 32})
HOUR = timedelta(hours=1)


@pytest.fixture(scope="session")
def database_of_all(mongo_uri: str) -> Iterator[str]:
    """A database that is set up, for tests that each use runs of their own."""
    with shared_by("trust", mongo_uri) as name:
        yield name


@pytest.fixture(autouse=True)
def _no_handler_left() -> Iterator[None]:
    yield
    failpoints.handler = None


class Office:
    """Makes runs that wait, and clients that answer."""

    def __init__(self, uri: str, database: str, connection: Connection) -> None:
        self.uri = uri
        self.database = database
        self.connection = connection
        self._appender = Appender(connection)

    def client(self, **options: Any) -> DurableClient:
        """A client on the same connection."""
        options = {"signing_keys": KEYS, **options}
        return DurableClient(self.uri, client=self.connection.client, database=self.database, **options)

    async def ask(self, *questions: FrontierEntry | Any, run_id: str | None = None) -> tuple[Frontier, Attempt]:
        """A run that waits for an answer to each question, and the attempt that asked."""
        named = run_id or f"run-{uuid.uuid4().hex[:12]}"
        entries = [
            each if isinstance(each, FrontierEntry) else question(named, number, each) for number, each in enumerate(questions or ["may I?"], 1)
        ]
        attempt = await Attempt.submit(self.connection, self._appender, named)
        await self.suspend(attempt, *entries)
        return await self.frontier(named), attempt

    async def suspend(self, attempt: Attempt, *entries: FrontierEntry) -> StoredFrontier:
        """Suspend an attempt's run on these, as they are."""
        from mongo_durable.store import frontiers

        return await frontiers.suspend(self.connection, attempt.claim, attempt.channel, entries)

    async def ask_again(self, run_id: str, *questions: Any) -> Frontier:
        """The next attempt of a run that was answered comes to other questions."""
        attempt = await Attempt.start(self.connection, self._appender, run_id, owner=f"p-{uuid.uuid4().hex[:6]}")
        await self.suspend(attempt, *(question(run_id, number, each) for number, each in enumerate(questions, 11)))
        return await self.frontier(run_id)

    async def frontier(self, run_id: str) -> Frontier:
        """The newest frontier of a run, as a client is shown it."""
        found = await self.client().frontier(run_id, (await get(self.connection, run_id)).generation)
        assert found is not None
        return found

    async def status(self, run_id: str) -> str:
        """The run's status."""
        return (await get(self.connection, run_id)).status.value


def question(run_id: str, number: int, value: Any = "may I?", schema: Any = None, *, name: str = "approval", **options: Any) -> FrontierEntry:
    """A question at a place of its own."""
    return frontier_entry(run_id, position(number), ActivityKind.INTERRUPT, name, encode(value), schema, **options)


@pytest.fixture
async def office(mongo_uri: str, database_of_all: str) -> AsyncIterator[Office]:
    """Where answers are given."""
    async with AsyncMongoClient(mongo_uri) as client:
        connection = Connection(client, database_of_all, is_owned=False)
        yield Office(mongo_uri, database_of_all, connection)
        await connection.aclose()


@pytest.fixture
def moved_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[timedelta], None]:
    """Sets what the store takes for the server's clock, for what is judged outside a write."""
    original = Connection.server_time

    def move(by: timedelta) -> None:
        async def server_time(self: Connection) -> Any:
            return await original(self) + by

        monkeypatch.setattr(Connection, "server_time", server_time)

    return move
