"""One mongosh for all tests of this folder: it takes a second to start, and memory. So they run in one test process."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from mongo_durable.store.appender import Appender
from mongo_durable.store.connection import Connection, Endpoint
from tests.support.databases import shared_by
from tests.support.mongosh import Mongosh


@pytest.fixture(scope="session")
def shared_database(mongo_uri: str) -> Iterator[str]:
    """A database that is set up, for tests that each use runs of their own."""
    with shared_by("mongosh", mongo_uri) as name:
        yield name


@pytest.fixture(scope="session")
def shell(mongo_uri: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mongosh]:
    """The one mongosh, connected as a person would be."""
    opened = Mongosh(mongo_uri, tmp_path_factory.mktemp("mongosh"))
    yield opened
    opened.close()


@pytest.fixture
def mongosh(shell: Mongosh, shared_database: str) -> Mongosh:
    """It, at the shared database."""
    shell.shown(f"use {shared_database}")
    return shell


@pytest.fixture
def run_id() -> str:
    """A run that no other test has."""
    return f"run-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def connection(mongo_uri: str, shared_database: str) -> AsyncIterator[Connection]:
    """The shared database, for the library."""
    endpoint = Endpoint(mongo_uri, shared_database)
    yield endpoint.connection()
    await endpoint.aclose()


@pytest.fixture
async def appender(connection: Connection) -> Appender:
    """The process's one appender. It closes with the connection."""
    return Appender(connection)
