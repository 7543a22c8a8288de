"""One MongoDB with authorization and TLS for all of these tests, and databases on it that are set up with their roles."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pymongo
import pytest
from pymongo import AsyncMongoClient
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

from mongo_durable import DurableClient
from mongo_durable.store import schema
from mongo_durable.store.connection import Endpoint
from tests.support.secured import SecuredMongo

# All in one process of a parallel run: then one server is enough.
GROUP = pytest.mark.xdist_group("security")


class Commands(CommandListener):
    """Every command that some clients sent: database, name, command."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, Any]] = []

    def started(self, event: CommandStartedEvent) -> None:
        self.sent.append((event.database_name, event.command_name, event.command))

    def succeeded(self, event: CommandSucceededEvent) -> None:
        pass

    def failed(self, event: CommandFailedEvent) -> None:
        pass


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredMongo]:
    """The server."""
    with SecuredMongo(tmp_path_factory.mktemp("secured")) as server:
        yield server


@pytest.fixture
def database(secured: SecuredMongo) -> Iterator[str]:
    """A database that an admin has set up, with its roles. Dropped afterwards, with its users."""
    name = f"test_{uuid.uuid4().hex[:16]}"

    async def set_up() -> None:
        endpoint = Endpoint(secured.root_uri, name)
        await schema.ensure_schema(endpoint.connection())
        await schema.ensure_roles(endpoint.connection())
        await endpoint.aclose()

    asyncio.run(set_up())
    yield name
    with pymongo.MongoClient[Any](secured.root_uri) as root:
        root[name].command("dropAllUsersFromDatabase")
        root.drop_database(name)


@pytest.fixture
def commands() -> Commands:
    """What the clients of `client_of` sent."""
    return Commands()


@pytest.fixture
async def driver_of(secured: SecuredMongo, database: str, commands: Commands) -> AsyncIterator[Callable[..., AsyncMongoClient[Any]]]:
    """`driver_of("runner")`: a driver's client of a user with these roles."""
    made: list[AsyncMongoClient[Any]] = []

    def make(*roles: str) -> AsyncMongoClient[Any]:
        made.append(AsyncMongoClient(secured.user(database, *roles), event_listeners=[commands]))
        return made[-1]

    yield make
    for client in made:
        await client.close()


@pytest.fixture
async def client_of(driver_of: Callable[..., AsyncMongoClient[Any]], database: str) -> AsyncIterator[Callable[..., Awaitable[DurableClient]]]:
    """`await client_of("viewer")`: our client of a user with these roles."""
    made: list[DurableClient] = []

    async def make(*roles: str) -> DurableClient:
        made.append(await DurableClient(client=driver_of(*roles), database=database).__aenter__())
        return made[-1]

    yield make
    for client in made:
        await client.aclose()
