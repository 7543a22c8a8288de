"""The network between a worker and MongoDB breaks while it executes runs: another goes on after the lease, and it comes back itself."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pymongo
import pytest

from tests.chaos import checker, outside
from tests.chaos.outside import BEGUN
from tests.chaos.people import People
from tests.chaos.proxy import Network, Proxy
from tests.chaos.weather import OPEN_TRANSACTION_S, Crew
from tests.chaos.worker import Post
from tests.chaos.workload import Order, orders

LEASE = timedelta(seconds=1.5)
PATIENCE_S = 60.0
BEFORE, AFTER = 12, 4


@dataclass(slots=True)
class World:
    """A worker behind a proxy, one that is not, and people who are not."""

    uri: str
    database: str
    folder: Path
    proxy: Proxy
    _crews: list[Crew] = field(default_factory=list)

    @property
    def effects(self) -> Path:
        """The outside world."""
        return self.folder / "effects"

    def worker(self, *, is_behind_proxy: bool) -> Crew:
        """Start a worker."""
        uri = f"mongodb://127.0.0.1:{self.proxy.port}/?directConnection=true" if is_behind_proxy else self.uri
        post = Post(uri=uri, database=self.database, effects=self.effects, log=self.folder / "log", lease=LEASE)
        crew = Crew(post, 1)
        crew.fill()
        self._crews.append(crew)
        return crew

    def wait_for_heartbeat(self) -> None:
        """Wait until a worker has renewed its lease: its heartbeat has the connection that will break."""
        until = time.monotonic() + PATIENCE_S
        renewed = {"$expr": {"$gt": ["$expires_at", {"$add": ["$started_at", "$lease_ms"]}]}}
        with pymongo.MongoClient(self.uri) as client:
            while not client[self.database]["runners"].count_documents(renewed):
                assert time.monotonic() < until
                time.sleep(0.02)

    def wait_until_begun(self, number: int) -> None:
        """Wait until so many runs have begun an effect."""
        until = time.monotonic() + PATIENCE_S
        while len({line.run_id for line in outside.read(self.effects) if line.moment == BEGUN}) < number:
            assert time.monotonic() < until
            time.sleep(0.02)

    async def complete(self, wanted: list[Order], seed: int) -> People:
        """Have people order, answer, and see all runs to their end."""
        people = People(self.uri, self.database, wanted, self.effects, at_once=len(wanted), seed=seed)
        async with asyncio.timeout(PATIENCE_S):
            await people.live_and_let_live()
        return people

    def close(self) -> None:
        """End all workers."""
        for crew in self._crews:
            crew.close()


@pytest.fixture
def world(mongo_uri: str, database: str, tmp_path: Path) -> Iterator[World]:
    """A world of this test's own, on one server."""
    with ExitStack() as stack:
        client = stack.enter_context(pymongo.MongoClient(mongo_uri))
        client.admin.command("setParameter", 1, transactionLifetimeLimitSeconds=OPEN_TRANSACTION_S)
        stack.callback(client.admin.command, "setParameter", 1, transactionLifetimeLimitSeconds=60)
        assert client.address is not None
        made = World(mongo_uri, database, tmp_path, stack.enter_context(Proxy(*client.address)))
        stack.callback(made.close)
        yield made


def _kept(seed: int, number: int, first: int = 0) -> list[Order]:
    return [order for order in orders(seed, first + number)[first:] if order.cancel_after_s is None]


@pytest.mark.parametrize("network", [each for each in Network if each is not Network.WELL], ids=str)
async def test_a_broken_network_loses_and_doubles_nothing(network: Network, world: World) -> None:
    """Whatever the network does, the runs end rightly with another worker; no effect begins without a lease; the first worker works again."""
    cut_off = world.worker(is_behind_proxy=True)
    await asyncio.to_thread(world.wait_for_heartbeat)
    first = asyncio.create_task(world.complete(_kept(1, BEFORE), 1))
    await asyncio.to_thread(world.wait_until_begun, 4)
    world.proxy.become(network)
    broken_at = time.monotonic()
    successor = world.worker(is_behind_proxy=False)
    people = await first
    print(f"{network}: all ended {time.monotonic() - broken_at:.1f} s after the network broke; {world.proxy.lost} chunks lost")
    successor.close()
    world.proxy.become(Network.WELL)
    mended_at = time.monotonic()
    later = await world.complete(_kept(1, AFTER, 1000), 2)
    print(f"{network}: the worker has ended new runs {time.monotonic() - mended_at:.1f} s after the network was mended")
    cut_off.fill()
    cut_off.close()

    people.told.accepted |= later.told.accepted
    people.told.promises += later.told.promises
    people.told.wrong += later.told.wrong
    log = [json.loads(line) for line in (world.folder / "log").read_text().splitlines()]
    story = await checker.gather(world.uri, world.database, people.told, world.effects, wrong=[*cut_off.wrong, *successor.wrong], log=log)
    found = list(checker.faults(story))
    assert not found, "\n".join(found[:40])
    assert len(story.outputs) == len(people.told.accepted) == len(_kept(1, BEFORE)) + len(_kept(1, AFTER, 1000))
    assert (world.proxy.lost > 0) == (network in (Network.ONE_WAY, Network.FORGOTTEN))
