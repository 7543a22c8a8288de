"""The lease of a process, where its network breaks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pymongo
import pytest

from mongo_durable.engine.process import Process
from mongo_durable.errors import StoreUnavailable
from mongo_durable.store.connection import Endpoint
from tests.chaos.proxy import Network, Proxy

LEASE = timedelta(seconds=3)
PATIENCE_S = 15.0
"""Less than the half minute after which the driver itself notices that a connection is dead."""


@pytest.fixture
def proxy(mongo_uri: str) -> Iterator[Proxy]:
    """The network between the process and the server."""
    with pymongo.MongoClient(mongo_uri) as client:
        client.admin.command("ping")
        assert client.address is not None
        address = client.address
    with Proxy(*address) as made:
        yield made


def _endpoint(proxy: Proxy, database: str) -> Endpoint:
    return Endpoint(f"mongodb://127.0.0.1:{proxy.port}/?directConnection=true", database)


def _wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def test_a_heartbeat_outlives_its_connection(proxy: Proxy, mongo_uri: str, database: str) -> None:
    """The connections die without a word: the next beat goes over another one, the process keeps its identity, and its end does not wait for them."""
    process = Process(_endpoint(proxy, database), LEASE)
    lease = await process.lease()
    with pymongo.MongoClient(mongo_uri, tz_aware=True) as client:
        runners = client[database]["runners"]

        def expiry() -> float:
            return float(runners.find_one({"_id": lease.owner})["expires_at"].timestamp())

        taken = expiry()
        await asyncio.to_thread(_wait, lambda: expiry() > taken)  # by now it has a connection
        proxy.become(Network.FORGOTTEN)
        kept = expiry()
        await asyncio.to_thread(_wait, lambda: expiry() > kept)
    assert proxy.lost
    assert await process.lease() is lease
    async with asyncio.timeout(PATIENCE_S):
        await process.aclose()
        await process.endpoint.aclose()


async def test_a_command_outlives_its_connection(proxy: Proxy, database: str) -> None:
    """A command whose connection dies without a word is sent again over another one, before the driver's own half minute is over."""
    endpoint = _endpoint(proxy, database)
    connection = endpoint.connection()
    await connection.runs.find_one({})
    proxy.become(Network.FORGOTTEN)
    async with asyncio.timeout(20):
        await connection.runs.find_one({})
    await endpoint.aclose()


async def test_nothing_is_begun_under_a_lease_that_has_run_out(proxy: Proxy, database: str) -> None:
    """A run claimed without a valid lease could only be given back: who asks for the lease waits for the heartbeat, and not for ever."""
    process = Process(_endpoint(proxy, database), LEASE)
    lease = await process.lease()
    proxy.become(Network.CUT)
    await asyncio.to_thread(_wait, lambda: not lease.is_valid)
    with pytest.raises(StoreUnavailable):
        await process.lease()
    waiting = asyncio.create_task(process.lease())
    proxy.become(Network.WELL)
    found = await waiting
    assert found is lease  # nobody has declared it dead
    assert found.is_valid
    await process.aclose()
    await process.endpoint.aclose()
