"""The store's tests run on both drivers: PyMongo's async client and Motor's."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

from mongo_durable.store import failpoints
from mongo_durable.store.appender import Appender
from mongo_durable.store.connection import Connection, Endpoint
from tests.support.databases import shared_by


class Commands(CommandListener):
    """Which commands a client sent: `(name, collection)`."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []

    def started(self, event: CommandStartedEvent) -> None:
        self.sent.append((event.command_name, str(event.command.get(event.command_name, ""))))

    def succeeded(self, event: CommandSucceededEvent) -> None:
        pass

    def failed(self, event: CommandFailedEvent) -> None:
        pass

    def counted(self) -> Counter[tuple[str, str]]:
        """How often each was sent since the last `forget`."""
        return Counter(self.sent)

    def forget(self) -> None:
        """Start counting anew."""
        self.sent.clear()


@pytest.fixture(scope="session")
def shared_database(mongo_uri: str) -> Iterator[str]:
    """A database that is set up, for tests that each use runs of their own."""
    with shared_by("store", mongo_uri) as name:
        yield name


@pytest.fixture
def run_id() -> str:
    """A run that no other test has."""
    return f"run-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def appname() -> str:
    """Name of this test's clients, so that a fault can be made for them alone."""
    return f"test-{uuid.uuid4().hex[:16]}"


@pytest.fixture
def commands() -> Commands:
    """What the test's client sent."""
    return Commands()


@pytest.fixture(params=["pymongo", "motor"])
async def client(request: pytest.FixtureRequest, mongo_uri: str, appname: str, commands: Commands) -> AsyncIterator[Any]:
    """A client of the application, of one driver or the other."""
    options: dict[str, Any] = {"appname": appname, "event_listeners": [commands]}
    if request.param == "pymongo":
        async with AsyncMongoClient(mongo_uri, **options) as client:
            yield client
    else:
        motor = AsyncIOMotorClient(mongo_uri, **options)
        yield motor
        motor.close()


@pytest.fixture
async def endpoint(mongo_uri: str, shared_database: str, client: Any) -> Endpoint:
    """The shared database, through the application's client."""
    return Endpoint(mongo_uri, shared_database, client=client)


@pytest.fixture
async def connection(endpoint: Endpoint) -> AsyncIterator[Connection]:
    """The connection of this test's loop."""
    yield endpoint.connection()
    await endpoint.aclose()


@pytest.fixture
async def appender(connection: Connection) -> Appender:
    """The process's one appender. It closes with the connection."""
    return Appender(connection)


@pytest.fixture(autouse=True)
def _no_handler_left() -> Iterator[None]:
    yield
    failpoints.handler = None


@pytest.fixture
async def client_of(mongo_uri: str, appname: str) -> AsyncIterator[Callable[[int], Any]]:
    """One driver for even numbers, the other for odd ones: where every case on both would take too long."""
    made: list[Any] = []

    def make(number: int) -> Any:
        made.append((AsyncIOMotorClient if number % 2 else AsyncMongoClient)(mongo_uri, appname=appname))
        return made[-1]

    yield make
    for client in made:
        closed = client.close()
        if closed is not None:
            await closed
