"""One connection for each event loop, on the application's client or on one that closes with the loop."""

from __future__ import annotations

import asyncio
import gc
import warnings
from typing import Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, MongoClient

from mongo_durable.errors import ConfigurationError, StoreUnavailable
from mongo_durable.store import schema
from mongo_durable.store.connection import Connection, Endpoint
from mongo_durable.store.heads import get


@pytest.mark.parametrize("driver", [AsyncMongoClient, AsyncIOMotorClient])
async def test_the_settings_of_a_held_client_can_be_copied(driver: Any, mongo_uri: str, shared_database: str) -> None:
    """Both drivers still keep what they were made with, which the driver does not promise: heartbeat and change stream need clients like it."""
    client = driver(mongo_uri, maxPoolSize=7, w=1)
    endpoint = Endpoint(None, shared_database, client=client)
    with endpoint.sync_client() as copy:
        assert copy.options.pool_options.max_pool_size == 7
        assert copy.admin.command("ping")["ok"]
        inner = client.delegate if driver is AsyncIOMotorClient else client
        await inner.admin.command("ping") if driver is AsyncMongoClient else await client.admin.command("ping")
        assert copy.address == (await client.address if driver is AsyncMongoClient else client.address)
    connection = endpoint.dedicated_connection()
    assert connection.client is not client
    assert isinstance(connection.client, AsyncMongoClient)
    assert (await connection.client.admin.command("ping"))["ok"]
    await connection.aclose()
    await endpoint.aclose()
    assert (await client.admin.command("ping"))["ok"]  # the application's client stays open
    closing = client.close()
    if closing is not None:
        await closing


def test_an_own_client_closes_with_its_loop(mongo_uri: str, shared_database: str) -> None:
    """Nobody has to close anything: `asyncio.run` leaves no open client and no warning behind, loop after loop."""
    endpoint = Endpoint(mongo_uri, shared_database)

    async def work() -> Connection:
        connection = endpoint.connection()
        await schema.prepare(connection)
        assert endpoint.connection() is connection
        await connection.runs.find_one({})
        return connection

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        used = [asyncio.run(work()) for _ in range(3)]
        assert all(each.is_closed for each in used)
        assert len({id(each) for each in used}) == 3
        del used
        gc.collect()
    assert [str(each.message) for each in caught] == []


async def test_a_closed_connection_is_replaced(mongo_uri: str, shared_database: str) -> None:
    """After `aclose` the next use makes a new connection; closing again does nothing."""
    endpoint = Endpoint(mongo_uri, shared_database)
    first = endpoint.connection()
    await endpoint.aclose()
    await endpoint.aclose()
    await first.aclose()
    assert first.is_closed
    second = endpoint.connection()
    assert second is not first
    assert await second.runs.find_one({"_id": "none"}) is None
    await endpoint.aclose()


async def test_what_is_closed_with_a_connection(mongo_uri: str, shared_database: str) -> None:
    """What was hung on a connection is stopped before its client closes."""
    endpoint = Endpoint(mongo_uri, shared_database)
    connection = endpoint.connection()
    seen: list[bool] = []

    async def stop() -> None:
        seen.append(await connection.runs.find_one({"_id": "none"}) is None)

    connection.on_close(stop)
    await endpoint.aclose()
    assert seen == [True]


def test_what_is_no_endpoint() -> None:
    """No URI and no client, a synchronous client, or something else altogether: refused at once, with what to pass."""
    with pytest.raises(ConfigurationError, match="MONGO_DURABLE_URI"):
        Endpoint(None)
    with pytest.raises(ConfigurationError, match="str"):
        Endpoint(None, client="mongodb://localhost")
    with MongoClient(connect=False) as client, pytest.raises(ConfigurationError, match="synchronous"):
        Endpoint(None, client=client)


async def test_a_malformed_uri_is_a_configuration_error_that_does_not_show_it() -> None:
    """The URI may carry a password."""
    for uri in ("mongodb://user:hunter2@host:notaport", "http://user:hunter2@host", "mongodb://user:hun/ter2@host"):
        for call in (Endpoint(uri).connection, Endpoint(uri).dedicated_connection, Endpoint(uri).sync_client):
            with pytest.raises(ConfigurationError) as refused:
                call()
            assert "hunter2" not in str(refused.value)
            assert "ter2" not in str(refused.value)


async def test_a_server_that_cannot_be_selected_is_unavailable(mongo_uri: str) -> None:
    """Where there is no primary to read from, the error says so, and that the call may be tried again; not where the server was looked for."""
    client: AsyncMongoClient[Any] = AsyncMongoClient(mongo_uri, replicaSet="another", serverSelectionTimeoutMS=200)
    connection = Connection(client, "nothing", is_owned=True)
    with pytest.raises(StoreUnavailable) as refused:
        await get(connection, "run")
    assert refused.value.retryable
    assert "127.0.0.1" not in str(refused.value)
    await connection.aclose()


async def test_a_transaction_that_fails_leaves_nothing(connection: Connection, run_id: str) -> None:
    """What its body raises comes out, and nothing of what it wrote is there."""

    async def body(session: Any) -> None:
        await connection.database["meta"].insert_one({"_id": run_id}, session=session)
        raise ValueError(run_id)

    with pytest.raises(ValueError, match=run_id):
        await connection.transaction(body)
    assert await connection.database["meta"].find_one({"_id": run_id}) is None


def test_what_the_uri_says_stands(mongo_uri: str, shared_database: str) -> None:
    """Our own time limits are for a URI that names none: what somebody has set is not overruled, in whatever case it is written."""
    named = f"{mongo_uri}{'&' if '?' in mongo_uri else '/?'}serverselectiontimeoutms=7000&connectTimeoutMS=3000"
    for uri, selection_s, connect_s in ((mongo_uri, 10, 10), (named, 7, 3)):
        with Endpoint(uri, shared_database).sync_client() as client:
            assert client.options.server_selection_timeout == selection_s
            assert client.options.pool_options.connect_timeout == connect_s
            assert client.options.pool_options.appname == "mongo_durable"
