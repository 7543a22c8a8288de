"""The change stream: one for all, and whatever happens to it, nobody misses a change and nobody hammers the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import timedelta
from itertools import count, pairwise
from typing import Any

import pymongo
import pytest
from pymongo import AsyncMongoClient, WriteConcern

from mongo_durable.dev import DevMongo
from mongo_durable.store import schema
from mongo_durable.store.connection import Connection, Endpoint
from mongo_durable.store.wakeups import Listener, RunChange, Wakeups
from tests.store.conftest import Commands
from tests.support.attempts import submit
from tests.support.change_streams import Follower, cursors
from tests.support.server_faults import failing

_PATIENCE_S = 45


async def until(condition: Callable[[], bool]) -> None:
    """Let others work until something is so."""
    async with asyncio.timeout(_PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for is in the server or in a thread, and sets no event
            await asyncio.sleep(0.005)


class Place:
    """A database, and who follows its change stream.

    Attributes:
        connection: Of those who make changes, and of the follower's looks: not the stream's own.
    """

    def __init__(self, uri: str, database: str, connection: Connection) -> None:
        self.uri = uri
        self.database = database
        self.connection = connection
        self.namespace = f"{database}.runs"

    def endpoint(self) -> Endpoint:
        """The database, as an application would name it."""
        return Endpoint(self.uri, self.database)

    async def cursors(self) -> list[int]:
        """The change streams that are open on the server."""

        def ask() -> list[int]:
            with pymongo.MongoClient(self.uri) as client:
                return cursors(client, self.database)

        return await asyncio.to_thread(ask)

    async def until_closed(self) -> None:
        """Wait until the server has noticed that nobody reads any more."""
        async with asyncio.timeout(_PATIENCE_S):
            while await self.cursors():
                pass

    async def kill_cursors(self) -> None:
        """Kill the change stream that is open."""

        def kill(ids: list[int]) -> None:
            with pymongo.MongoClient(self.uri) as client:
                client[self.database].command("killCursors", "runs", cursors=ids)

        async with asyncio.timeout(_PATIENCE_S):
            while not (ids := await self.cursors()):  # between two getMores of a reopening there is none
                pass
        await asyncio.to_thread(kill, ids)

    @asynccontextmanager
    async def follower(self, **options: Any) -> AsyncIterator[Follower]:
        """Somebody who follows and has heard of a first change, so that the stream is known to be open."""
        wakeups = Wakeups(self.endpoint(), **options)
        follower = Follower(self.connection)
        async with wakeups.listen() as listener:
            task = asyncio.create_task(follower.follow(listener))
            try:
                await until(lambda: follower.looks > 1)  # at first, and when the stream is open
                await submit(self.connection, "first")
                await until(lambda: "first" in follower.known)
                yield follower
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await wakeups.aclose()


@pytest.fixture
async def place(mongo_uri: str, database: str) -> AsyncIterator[Place]:
    """A database of this test's own."""
    endpoint = Endpoint(mongo_uri, database)
    await schema.ensure_schema(endpoint.connection())
    yield Place(mongo_uri, database, endpoint.connection())
    await endpoint.aclose()


@pytest.fixture(scope="module")
def three() -> Iterator[DevMongo]:
    """Three servers, for what one alone cannot show."""
    with (server := DevMongo(nodes=3, test_commands=True)):
        yield server


@pytest.fixture
async def set_of_three(three: DevMongo, request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    """A database on three servers."""
    database = f"test_{request.node.name[:40]}"
    endpoint = Endpoint(three.uri, database)
    await schema.ensure_schema(endpoint.connection())
    yield Place(three.uri, database, endpoint.connection())
    await endpoint.aclose()


# -- one stream ------------------------------------------------------------------------------------------------------------------------------------


async def test_everybody_on_a_database_shares_one_stream(place: Place) -> None:
    """An app, a runner and a client, each with its own endpoint and a thousand waits between them, have one cursor; each hears of its own run."""
    everybody = [Wakeups(place.endpoint()) for _ in range(3)]

    async def waits(number: int) -> tuple[int, set[str]]:
        heard: set[str] = set()
        async with everybody[number % 3].listen(f"run-{number % 100}") as listener:
            while not heard:
                heard = {change.run_id for change in await listener.wait() or ()}
        return number, heard

    async with everybody[0].listen() as first:
        waiting = [asyncio.create_task(waits(number)) for number in range(1000)]
        assert await first.wait() is None
        assert await first.wait() is None  # now it is open
        assert len(await place.cursors()) == 1
        for number in range(100):
            await submit(place.connection, f"run-{number}")
        async with asyncio.timeout(_PATIENCE_S):
            heard = await asyncio.gather(*waiting)
        assert all(runs == {f"run-{number % 100}"} for number, runs in heard)
        assert len(await place.cursors()) == 1
    for each in everybody:
        await each.aclose()
    await place.until_closed()


async def test_an_applications_client_has_its_own_stream(place: Place) -> None:
    """Those who share a client of the application share a stream on a client like it: the application's pool stays its own."""
    async with AsyncMongoClient(place.uri, maxPoolSize=1) as held:
        both = [Wakeups(Endpoint(None, place.database, client=held)) for _ in range(2)]
        async with both[0].listen() as one, both[1].listen() as other:
            for _ in ("at first", "when it is open"):
                for listener in (one, other):
                    assert await listener.wait() is None
            assert len(await place.cursors()) == 1
            await submit(Connection(held, place.database, is_owned=False), "run")  # the pool's one connection is free
            for listener in (one, other):
                while (changes := await listener.wait()) is None:
                    pass
                assert (changes[0].run_id, changes[0].status, changes[0].fence) == ("run", "pending", 0)
        for each in both:
            await each.aclose()


async def test_who_does_not_wait_opens_nothing_and_who_waits_again_opens_nothing_new(place: Place) -> None:
    """A stream is opened by the first wait, outlives it for the next one, and ends with the last user's end, not with the first's."""
    one, other = Wakeups(place.endpoint()), Wakeups(place.endpoint())
    async with one.listen("run"):
        assert one.lag is None
    opened = set()
    for wakeups in (one, one, other):
        async with wakeups.listen("run") as listener:
            while not (found := await place.cursors()):
                await listener.wait(0.05)
            opened.update(found)
        opened.update(await place.cursors())
    assert len(opened) == 1
    async with other.listen("run"):
        await one.aclose()
        assert set(await place.cursors()) == opened
    await other.aclose()
    await place.until_closed()


async def test_without_a_stream_a_listener_looks_for_itself(place: Place) -> None:
    """Where no change stream is allowed, none is opened: every wait ends at its time and says: look."""
    wakeups = Wakeups(place.endpoint(), use_change_stream=False)
    async with wakeups.listen() as listener:
        for _ in range(3):
            assert await listener.wait(0.05) is None
        assert await place.cursors() == []
        assert wakeups.lag is None
    await wakeups.aclose()


async def test_only_changes_that_somebody_may_wait_for_come(place: Place) -> None:
    """The server filters: of a head's changes only those of status, fence, cancellation and queueing come, and nothing of other collections."""
    wakeups = Wakeups(place.endpoint())
    await submit(place.connection, "run")
    runs = place.connection.runs
    async with wakeups.listen() as listener:
        for _ in ("at first", "when it is open"):
            assert await listener.wait() is None
        await place.connection.database["others"].insert_many([{"status": "pending"} for _ in range(1000)])
        await runs.update_one({"_id": "run"}, {"$set": {"output": {"v": 1}}})
        for field in ({"status": "running", "fence": 1}, {"cancel": {"reason": "enough"}}, {"is_queued": False}):
            await runs.update_one({"_id": "run"}, {"$set": field}, bypass_document_validation=True)
        heard: list[RunChange] = []
        while len(heard) < 3:
            heard += await listener.wait() or []
    assert heard == [
        RunChange(run_id="run", status="running", fence=1),
        RunChange(run_id="run", status=None, fence=None),
        RunChange(run_id="run", status="pending", fence=None),
    ]
    await wakeups.aclose()


async def test_a_listener_that_does_not_listen_keeps_no_heap_of_changes() -> None:
    """Memory is bounded: who is told of more than it takes is told to look instead."""
    listener = Listener(None, None)
    assert await listener.wait() is None
    for number in range(9_000):
        listener.tell(RunChange(run_id=str(number), status=None, fence=None))
    assert len(await listener.wait() or ()) == 9_000
    for number in range(11_000):
        listener.tell(RunChange(run_id=str(number), status=None, fence=None))
    assert await listener.wait() is None


# -- faults ----------------------------------------------------------------------------------------------------------------------------------------


Fault = Callable[[Place], AbstractAsyncContextManager[None]]


def command_fails(command: str, **fault: Any) -> Fault:
    """The server fails a command of the stream as long as the fault lasts; what is open is ended by killing it."""

    @asynccontextmanager
    async def lasts(place: Place) -> AsyncIterator[None]:
        with failing(place.uri, [command], namespace=place.namespace, **fault) as strikes:
            if command != "getMore":
                await place.kill_cursors()
            await until(lambda: strikes() >= 2)
            yield

    return lasts


@asynccontextmanager
async def cursor_killed(place: Place) -> AsyncIterator[None]:
    """Somebody kills the cursor."""
    await place.kill_cursors()
    yield


def dropped(what: str) -> Fault:
    """The collection goes away, with all runs in it, and is there again afterwards."""

    @asynccontextmanager
    async def lasts(place: Place) -> AsyncIterator[None]:
        if what == "collection":
            await place.connection.runs.drop()
        elif what == "name":
            await place.connection.runs.rename("old_runs")
        else:
            await place.connection.client.drop_database(place.database)
        yield

    return lasts


FAULTS: dict[str, Fault] = {
    "history lost": command_fails("getMore", errorCode=286),
    "fallen off the oplog": command_fails("getMore", errorCode=136),
    "getMore refused": command_fails("getMore", errorCode=13),
    "getMore cut off": command_fails("getMore", closeConnection=True),
    "not opened": command_fails("aggregate", errorCode=8),
    "token gone at opening": command_fails("aggregate", errorCode=286),
    "opening cut off": command_fails("aggregate", closeConnection=True),
    "no operation time": command_fails("find", errorCode=11601, mode={"times": 4}),
    "cursor killed": cursor_killed,
    "collection dropped": dropped("collection"),
    "collection renamed": dropped("name"),
    "database dropped": dropped("database"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_change_during_an_outage_is_not_missed(fault: str, place: Place) -> None:
    """Whatever ends the stream or keeps it from opening, who follows it learns of the runs that came meanwhile and afterwards, without a timeout."""
    async with place.follower() as follower:
        async with FAULTS[fault](place):
            await submit(place.connection, "meanwhile")
        await until(lambda: "meanwhile" in follower.known)
        async with asyncio.timeout(_PATIENCE_S):
            for number in count():
                await submit(place.connection, f"after-{number}")
                if any(run_id.startswith("after") for run_id in follower.heard):
                    break
        await until(lambda: {f"after-{each}" for each in range(number + 1)} <= follower.known)


async def test_a_stream_that_fails_again_and_again_is_opened_less_and_less_often(place: Place) -> None:
    """Back-off: with a history that is lost at every opening, each pause has double the last one's floor, so there are never 30 openings a minute."""
    commands = Commands()
    wakeups = Wakeups(Endpoint(None, place.database, client=(held := AsyncMongoClient(place.uri, event_listeners=[commands]))))
    openings: list[float] = []

    async with held, wakeups.listen() as listener:
        with failing(place.uri, ["getMore"], namespace=place.namespace, errorCode=286):
            async with asyncio.timeout(_PATIENCE_S):
                while len(openings) < 7:
                    await listener.wait(0.05)
                    openings += [time.monotonic()] * (commands.counted()[("aggregate", "runs")] - len(openings))
        await wakeups.aclose()
    pauses = [later - earlier for earlier, later in pairwise(openings)]
    floors = [0.05 * 2**number for number in range(len(pauses))]
    assert all(pause > floor - 0.05 for pause, floor in zip(pauses, floors, strict=True)), pauses
    assert commands.counted()[("aggregate", "runs")] == 7


async def test_the_lag_says_that_a_stream_is_blind(place: Place) -> None:
    """What an operator watches: next to nothing while the stream lives, and growing as long as it cannot be opened, whatever the number of tries."""
    wakeups = Wakeups(place.endpoint())
    async with wakeups.listen() as listener:
        for _ in ("at first", "when it is open"):
            assert await listener.wait() is None
        await submit(place.connection, "run")
        assert await listener.wait() is not None
        await until(lambda: (wakeups.lag or timedelta.max) < timedelta(seconds=1))
        with failing(place.uri, ["getMore"], namespace=place.namespace, errorCode=286) as strikes:
            await until(lambda: strikes() >= 5 and (wakeups.lag or timedelta(0)) > timedelta(seconds=0.4))
        await until(lambda: (wakeups.lag or timedelta.max) < timedelta(seconds=0.4))
    await wakeups.aclose()


# -- servers that die, hang, or stand alone ---------------------------------------------------------------------------------------------------------


async def test_the_primarys_death_loses_no_change(set_of_three: Place, three: DevMongo) -> None:
    """Failover: the primary is killed while runs are submitted; who follows learns of every one that was accepted."""
    accepted: list[str] = []

    async def submits() -> None:
        for number in count():
            await submit(set_of_three.connection, f"run-{number}")
            accepted.append(f"run-{number}")

    async with set_of_three.follower() as follower:
        submitting = asyncio.create_task(submits())
        await until(lambda: len(accepted) > 5)
        primary = three.primary()
        assert primary is not None
        await asyncio.to_thread(three.kill, primary)
        before = len(accepted)
        await until(lambda: len(accepted) > before + 5)
        submitting.cancel()
        await asyncio.wait([submitting])
        await until(lambda: set(accepted) <= follower.known)
    await asyncio.to_thread(three.restart, primary)


@contextmanager
def no_majority(server: DevMongo) -> Iterator[None]:
    """The secondaries stand still: the primary takes writes and none of them is majority-committed."""
    primary = server.primary()
    clients = [pymongo.MongoClient("127.0.0.1", port, directConnection=True) for node, port in enumerate(server.ports) if node != primary]
    try:
        for client in clients:
            client.admin.command("configureFailPoint", "stopReplProducer", mode="alwaysOn")
        yield
    finally:
        for client in clients:
            client.admin.command("configureFailPoint", "stopReplProducer", mode="off")
            client.close()


async def insert_here_alone(place: Place, *run_ids: str) -> None:
    """Heads that the primary has and no majority yet."""
    found = await place.connection.runs.find_one({"_id": "first"})
    assert found is not None
    alone = place.connection.runs.with_options(write_concern=WriteConcern(1))
    for run_id in run_ids:
        await alone.insert_one({**found, "_id": run_id, "run_id": run_id})


async def test_what_no_majority_had_at_the_opening_is_heard_of_later(set_of_three: Place, three: DevMongo) -> None:
    """A stream starts where majority reads end: changes that a look at its opening could not see yet are delivered, not left out."""
    async with set_of_three.follower() as follower:
        looks = follower.looks
        with no_majority(three):
            await insert_here_alone(set_of_three, "one", "two", "three")
            await set_of_three.kill_cursors()
            with failing(three.uri, ["getMore"], namespace=set_of_three.namespace, mode={"times": 1}, errorCode=286) as strikes:
                await until(lambda: strikes() > 0 and follower.looks > looks + 1)
            assert not follower.known & {"one", "two", "three"}
        await until(lambda: {"one", "two", "three"} <= follower.known)


async def test_a_token_that_stands_still_counts_as_silence(set_of_three: Place, three: DevMongo) -> None:
    """A stream that is open and answers, but whose token does not move, is given up: its listeners are told to look again and again until it does."""
    async with set_of_three.follower(silence=timedelta(seconds=1)) as follower:
        with no_majority(three):
            looks = follower.looks
            await insert_here_alone(set_of_three, "unseen")
            await until(lambda: follower.looks > looks + 2)
            assert "unseen" not in follower.known
        await until(lambda: "unseen" in follower.known)


async def test_a_server_that_hangs_counts_as_silence() -> None:
    """A server that stands still with its connections open is noticed after the silence, not after the driver's timeouts."""
    server = DevMongo()
    with server as uri:
        endpoint = Endpoint(uri, "hangs")
        place = Place(uri, "hangs", endpoint.connection())
        await schema.ensure_schema(place.connection)
        wakeups = Wakeups(place.endpoint(), silence=timedelta(seconds=1))
        async with wakeups.listen() as listener:
            for _ in ("at first", "when it is open"):
                assert await listener.wait() is None
            server.pause(0)
            try:
                paused = time.monotonic()
                assert await listener.wait() is None
                assert time.monotonic() - paused < 5
            finally:
                server.resume(0)
            async with asyncio.timeout(_PATIENCE_S):
                for number in count():
                    await submit(place.connection, f"after-{number}")
                    if await listener.wait(1):
                        break
        await wakeups.aclose()
        await endpoint.aclose()


async def test_closing_does_not_wait_for_a_server_that_hangs() -> None:
    """A process that stops while its server stands still is not held up by the stream."""
    server = DevMongo()
    with server as uri:
        wakeups = Wakeups(Endpoint(uri, "hangs"))
        async with wakeups.listen() as listener:
            for _ in ("at first", "when it is open"):
                assert await listener.wait() is None
            server.pause(0)
            try:
                paused = time.monotonic()
                await wakeups.aclose()
                assert time.monotonic() - paused < 5
            finally:
                server.resume(0)
