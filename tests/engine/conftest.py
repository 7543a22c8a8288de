"""Apps of one database whose commands are listened to, and somebody who looks at their runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from mongo_durable import App, DurableClient
from mongo_durable.store import failpoints
from tests.engine.workflows import Commands


@pytest.fixture(autouse=True)
def _no_handler_left() -> Iterator[None]:
    yield
    failpoints.handler = None


@pytest.fixture
def commands() -> Commands:
    """What the app's client sent."""
    return Commands()


@pytest.fixture
async def listened(mongo_uri: str, commands: Commands) -> AsyncIterator[AsyncMongoClient[Any]]:
    """A client whose commands are noted."""
    async with AsyncMongoClient(mongo_uri, event_listeners=[commands]) as client:
        yield client


@pytest.fixture
async def new_app(listened: AsyncMongoClient[Any], database: str) -> AsyncIterator[Callable[[], App]]:
    """Apps as of different processes, all through the client that is listened to."""
    made: list[App] = []

    def make() -> App:
        made.append(App("replayed", client=listened, database=database))
        return made[-1]

    yield make
    for app in made:
        await app.aclose()


@pytest.fixture
async def operator(mongo_uri: str, database: str) -> AsyncIterator[DurableClient]:
    """Somebody who looks at runs and retries them."""
    async with DurableClient(mongo_uri, database=database) as client:
        yield client
