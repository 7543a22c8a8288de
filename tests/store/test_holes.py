"""Every way in which the protocol was once broken in an experiment, or could be by reasoning, each closed for good.

H1 to H18 are the holes' names. H13, about entries of the conversation record, is not here: the store does not write those.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pymongo
import pytest
from bson import ObjectId
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, WriteConcern
from pymongo.client_session import ClientSession
from pymongo.errors import AutoReconnect, WriteError

from mongo_durable.errors import AttemptOver, ResolutionConflict, RunError, Superseded
from mongo_durable.protocol.events import Event, EventType, FrontierStatus, RunStatus
from mongo_durable.store import claims, failpoints, frontiers, heads, payloads, runs, schema
from mongo_durable.store.appender import Appender
from mongo_durable.store.connection import Connection, Endpoint
from mongo_durable.store.documents import Resolution, event_document
from mongo_durable.store.events import read_history
from mongo_durable.store.failpoints import FailPoint
from mongo_durable.store.runs import ThreadState
from mongo_durable.store.wakeups import Listener, Wakeups
from tests.store.conftest import Commands
from tests.support import invariants
from tests.support.attempts import Attempt, answers, question, submit
from tests.support.server_faults import failing

_PATIENCE_S = 45


async def until(condition: Callable[[], bool]) -> None:
    """Let others work until something is so."""
    async with asyncio.timeout(_PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for is in the server or in a queue, and sets no event
            await asyncio.sleep(0.005)


@contextmanager
def held_key(uri: str, database: str, run_id: str, seq: int, fence: int = 1) -> Iterator[ClientSession]:
    """An open transaction that has inserted event `seq` of a run; it is aborted at the end unless it was committed."""
    event = Event(run_id=run_id, seq=seq, fence=fence, type=EventType.RUN_RETRIED)
    with pymongo.MongoClient(uri) as client, client.start_session() as session:
        session.start_transaction(write_concern=WriteConcern("majority"))
        client[database]["activity_events"].insert_one(event_document(event, ObjectId()), session=session)
        yield session
        if session.in_transaction:
            session.abort_transaction()


class Died(Exception):
    """The process dies at a fail point."""


def die_at(point: FailPoint) -> None:
    """Let whoever comes to `point` first die there."""

    async def handler(reached: FailPoint) -> None:
        if reached is point:
            failpoints.handler = None
            raise Died

    failpoints.handler = handler


async def test_h1_a_superseded_run_leaves_nothing_behind_its_rival(connection: Connection, appender: Appender, run_id: str) -> None:
    """H1: when the first of two events in one flight finds its seq taken, the second must not land behind the rival's start."""
    attempt = await Attempt.submit(connection, appender, run_id)
    innocent = await Attempt.submit(connection, appender, f"{run_id}-other")
    await claims.claim(connection, run_id, "p2", dead_owners=["p1"])
    sent = [attempt.started(1, is_awaited=False), attempt.completed(1, is_awaited=False), attempt.started(2)]
    others = [innocent.started(1, is_awaited=False), innocent.completed(1)]
    assert [type(each) for each in await asyncio.gather(*sent, return_exceptions=True)] == [Superseded] * 3
    assert await asyncio.gather(*others) == [3, 4]
    history = await read_history(connection, run_id)
    assert [(each.seq, each.fence, each.type) for each in history] == [
        (1, 0, EventType.RUN_SUBMITTED),
        (2, 1, EventType.ATTEMPT_STARTED),
        (3, 2, EventType.ATTEMPT_STARTED),
    ]
    with pytest.raises(Superseded):
        attempt.completed(2)


@pytest.mark.parametrize("is_committed", [True, False], ids=["committed", "aborted"])
async def test_h2_a_stuck_key_delays_its_own_run_only(is_committed: bool, connection: Connection, run_id: str, mongo_uri: str) -> None:
    """H2: a transaction that sits on one run's next seq holds up no other run, and decides only about its own when it ends."""
    appender = Appender(connection, deadline_s=0.5)
    stuck = await Attempt.submit(connection, appender, run_id)
    others = [await Attempt.submit(connection, appender, f"{run_id}-{number}") for number in range(8)]
    with held_key(mongo_uri, connection.database.name, run_id, stuck.channel.seq + 1) as session:
        waiting = stuck.started(1)
        for number in range(3):  # also those that come while it is stuck
            async with asyncio.timeout(30):  # the server itself would end the transaction after 60 s
                await asyncio.gather(*(each.started(number) for each in others))
        assert not waiting.done()
        if is_committed:
            session.commit_transaction()
    async with asyncio.timeout(_PATIENCE_S):
        if is_committed:
            with pytest.raises(Superseded):
                await waiting
        else:
            assert await waiting == 3


async def test_h3_a_duplicate_beside_a_write_concern_error_is_no_acknowledgement(
    connection: Connection, appender: Appender, run_id: str, appname: str, commands: Commands, mongo_uri: str
) -> None:
    """H3: the event is there, and a repeated send finds it, but it is not acknowledged while the server cannot say that it is durable."""
    attempt = await Attempt.submit(connection, appender, run_id)
    commands.forget()
    concern = {"code": 64, "errmsg": "waiting for replication timed out"}
    with failing(mongo_uri, ["insert"], appname=appname, writeConcernError=concern):
        sent = attempt.started(1)
        await until(lambda: commands.counted()["insert", "activity_events"] >= 3)
        async with asyncio.timeout(_PATIENCE_S):
            while not await connection.activity_events.count_documents({"run_id": run_id, "seq": 3}):
                pass
        assert not sent.done()
    assert await sent == 3
    assert len(await read_history(connection, run_id)) == 3


async def test_h4_an_own_duplicate_is_an_acknowledgement(connection: Connection, appender: Appender, run_id: str) -> None:
    """H4: after a lost reply the same event is sent again, is recognised by its id, and stands once."""
    attempt = await Attempt.submit(connection, appender, run_id)
    cuts = 0

    async def lose_reply(point: FailPoint) -> None:
        nonlocal cuts
        if point is FailPoint.APPEND_AFTER and not cuts:
            cuts += 1
            raise AutoReconnect("the reply is lost")

    failpoints.handler = lose_reply
    assert await asyncio.gather(attempt.started(1, is_awaited=False), attempt.completed(1)) == [3, 4]
    assert cuts == 1
    assert [each.seq for each in await read_history(connection, run_id)] == [1, 2, 3, 4]


async def test_h4_a_foreign_event_of_my_own_fence_ends_me(connection: Connection, appender: Appender, run_id: str) -> None:
    """H4: control events carry the attempt's own fence, so whoever finds another's event at its seq is over, whatever the fence."""
    attempt = await Attempt.submit(connection, appender, run_id)
    foreign = Event(run_id=run_id, seq=3, fence=attempt.channel.fence, type=EventType.RUN_CANCELLED)
    await connection.activity_events.insert_one(event_document(foreign, ObjectId()))
    with pytest.raises(Superseded):
        await attempt.started(1)
    with pytest.raises(Superseded):
        await attempt.suspend()


@pytest.mark.parametrize("way", ["suspend", "end", "release"])
async def test_h5_what_is_queued_is_written_before_the_attempt_lets_go(way: str, connection: Connection, run_id: str) -> None:
    """H5: suspending, ending or releasing with events still queued leaves no hole, and nothing can be queued afterwards."""
    appender = Appender(connection, linger_s=3600)  # nothing travels by itself
    attempt = await Attempt.submit(connection, appender, run_id)
    for number in range(5):
        attempt.started(number, is_awaited=False)
        attempt.completed(number, is_awaited=False)
    await {"suspend": attempt.suspend, "end": attempt.end, "release": attempt.release}[way]()
    assert [each.seq for each in await read_history(connection, run_id)] == list(range(1, 13 if way == "release" else 14))
    with pytest.raises(AttemptOver):
        attempt.started(9)


async def test_h6_a_transaction_of_the_attempt_itself_takes_its_seq_after_a_drain(
    connection: Connection, appender: Appender, run_id: str, mongo_uri: str
) -> None:
    """H6: a transaction on the attempt's own next seq kills an append that is under way, and after a drain it has none to kill.

    What is covered is the seq that such a transaction takes, with a transaction made by hand; not the store's own call for such activities.
    """
    attempt = await Attempt.submit(connection, appender, run_id)
    with held_key(mongo_uri, connection.database.name, run_id, attempt.channel.seq + 1) as session:
        under_way = attempt.started(1)
        session.commit_transaction()
    with pytest.raises(Superseded):
        await under_way

    other = f"{run_id}-drained"
    drained = await Attempt.submit(connection, appender, other)
    under_way = drained.started(1, is_awaited=False)
    await appender.drain(drained.channel)
    with held_key(mongo_uri, connection.database.name, other, drained.channel.seq + 1) as session:
        session.commit_transaction()
    assert await under_way == 3
    assert [each.seq for each in await read_history(connection, other)] == [1, 2, 3, 4]


async def test_h7_a_claim_is_three_commands(connection: Connection, run_id: str, commands: Commands) -> None:
    """H7: a claim is one compare-and-set, one read of the history and one insert; no transaction, and the history is not read again."""
    await submit(connection, run_id)
    commands.forget()
    claimed = await claims.claim(connection, run_id, "p1")
    assert [each.seq for each in await claims.history(connection, claimed)] == [1, 2]
    assert commands.counted() == {("findAndModify", "runs"): 1, ("find", "activity_events"): 1, ("insert", "activity_events"): 1}


async def test_h7_a_run_that_keeps_appending_can_be_taken_over(
    connection: Connection, run_id: str, commands: Commands, mongo_uri: str, shared_database: str, client_of: Callable[[int], Any]
) -> None:
    """H7: taking over a run whose attempt appends without a pause takes few commands, not a storm of conflicting transactions."""
    endpoint = Endpoint(mongo_uri, shared_database, client=client_of(0))
    theirs = endpoint.connection()
    attempt = await Attempt.submit(theirs, Appender(theirs), run_id)

    async def work() -> None:
        for number in range(1_000_000):
            await attempt.started(number)

    working = asyncio.create_task(work())
    await until(lambda: attempt.channel.seq > 10)
    commands.forget()
    claimed = await claims.claim(connection, run_id, "p2", dead_owners=["p1"])
    with pytest.raises(Superseded):
        await working
    counted = commands.counted()
    assert counted["findAndModify", "runs"] == 1
    assert sum(counted.values()) <= 80, counted
    history = await read_history(connection, run_id)
    assert (history[-1].seq, history[-1].fence, history[-1].type) == (claimed.seq, 2, EventType.ATTEMPT_STARTED)
    assert (await claims.history(connection, claimed))[:-1] == history[:-1]  # however it was put together
    await endpoint.aclose()


async def test_h8_an_answer_written_by_hand_is_refused(connection: Connection, appender: Appender, run_id: str) -> None:
    """H8: a bare insert into `resolutions` would leave the run suspended for ever; the database refuses it, and the real answer still works."""
    attempt = await Attempt.submit(connection, appender, run_id)
    frontier = await attempt.suspend()
    bare = {"_id": f"{run_id}/1", "run_id": run_id, "generation": 1, "answers": answers(frontier), "resolved_by": "approver-7"}
    with pytest.raises(WriteError) as refusal:
        await connection.resolutions.insert_one(bare)
    assert refusal.value.code == 121
    await frontiers.resolve(connection, frontier, answers(frontier))
    assert (await heads.get(connection, run_id)).status is RunStatus.READY


@pytest.mark.parametrize("point", [FailPoint.CLAIM_HEAD_AFTER, FailPoint.CLAIM_EVENT_AFTER])
async def test_h9_a_claim_that_its_process_does_not_know_of_is_found(point: FailPoint, connection: Connection, run_id: str) -> None:
    """H9: a head that names a live process which never heard so is claimable by that process, and by no other."""
    workflow = f"workflow-{run_id}"
    await submit(connection, run_id, workflow=workflow)
    die_at(point)
    with pytest.raises(Died):
        await claims.claim(connection, run_id, "me")

    async def found(owner: str, known: list[str]) -> list[str]:
        return [each.run_id for each in await claims.claimable(connection, [(workflow, "1")], owner, known, [], 10)]

    assert (await heads.get(connection, run_id)).owner == "me"
    assert await found("other", []) == []
    assert await found("me", [run_id]) == []
    assert await found("me", []) == [run_id]
    claimed = await claims.claim(connection, run_id, "me", dead_owners=["me"])
    assert claimed.head.fence == 2
    started = [each.fence for each in await read_history(connection, run_id) if each.type is EventType.ATTEMPT_STARTED]
    assert started == ([2] if point is FailPoint.CLAIM_HEAD_AFTER else [1, 2])


async def test_h10_the_loser_of_a_race_with_the_same_answers_gets_the_receipt(connection: Connection, appender: Appender, run_id: str) -> None:
    """H10: fifty reviewers who say the same at once all get the one receipt; nobody hears that the run is not suspended."""
    for round_number in range(4):
        attempt = await Attempt.submit(connection, appender, f"{run_id}-{round_number}")
        frontier = await attempt.suspend()
        receipts = await asyncio.gather(*(frontiers.resolve(connection, frontier, answers(frontier)) for _ in range(50)))
        assert len({(each.answers_digest, each.resolved_at) for each in receipts}) == 1


async def test_h10_the_losers_of_a_race_with_other_answers_hear_of_the_conflict(connection: Connection, appender: Appender, run_id: str) -> None:
    """H10: of fifty reviewers with different answers one wins, and each other one is told that others were first."""
    attempt = await Attempt.submit(connection, appender, run_id)
    frontier = await attempt.suspend()
    racers = (frontiers.resolve(connection, frontier, answers(frontier, number)) for number in range(50))
    results = await asyncio.gather(*racers, return_exceptions=True)
    receipts = [each for each in results if isinstance(each, Resolution)]
    assert len(receipts) == 1
    assert [type(each) for each in results if each is not receipts[0]] == [ResolutionConflict] * 49
    stored = await connection.resolutions.find_one({"_id": f"{run_id}/1"})
    assert stored is not None
    assert stored["answers_digest"] == receipts[0].answers_digest


async def _drop(connection: Connection, uri: str) -> None:
    await connection.runs.drop()
    await schema.ensure_schema(connection)


async def _kill_cursor(connection: Connection, uri: str) -> None:
    namespace = f"{connection.database.name}.runs"

    def kill() -> bool:
        with pymongo.MongoClient(uri) as client:
            stages = [{"$currentOp": {"idleCursors": True, "allUsers": True}}, {"$match": {"ns": namespace, "cursor.cursorId": {"$exists": True}}}]
            ids = [each["cursor"]["cursorId"] for each in client.admin.aggregate(stages)]
            for each in ids:
                client[connection.database.name].command("killCursors", "runs", cursors=[each])
            return bool(ids)

    async with asyncio.timeout(_PATIENCE_S):
        while not await asyncio.to_thread(kill):
            pass


async def _lose_history(connection: Connection, uri: str) -> None:
    with failing(uri, ["getMore"], namespace=f"{connection.database.name}.runs", mode={"times": 1}, errorCode=286) as strikes:
        await until(lambda: strikes() > 0)


async def _told_to_look(listener: Listener) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while await listener.wait() is not None:
            pass


async def _heard_of_new_runs(listener: Listener, connection: Connection, name: str) -> None:
    """Submit runs until one is heard of: those that come while the stream is closed are what the listener has to look for."""
    heard: set[str] = set()
    submitted: set[str] = set()
    async with asyncio.timeout(_PATIENCE_S):
        while not heard & submitted:
            submitted.add((await submit(connection, f"{name}-{len(submitted)}")).run_id)
            heard.update(change.run_id for change in await listener.wait(1.0) or ())


@pytest.mark.parametrize(
    ("trouble", "is_told"),
    [(_drop, True), (_lose_history, True), (_kill_cursor, False)],  # of a killed cursor the driver may get over by itself
    ids=["collection dropped", "oplog overrun", "cursor killed"],
)
async def test_h11_a_broken_stream_tells_its_listeners_to_look_and_opens_again(
    trouble: Callable[[Connection, str], Awaitable[None]], is_told: bool, client: Any, database: str, mongo_uri: str, run_id: str
) -> None:
    """H11: however the change stream ends, silently or not, listeners are told to look for themselves, and hear of later changes."""
    endpoint = Endpoint(None, database, client=client)
    connection = endpoint.connection()
    await schema.ensure_schema(connection)
    async with Wakeups(endpoint).listen() as listener:
        await _told_to_look(listener)
        await _heard_of_new_runs(listener, connection, f"{run_id}-before")
        await trouble(connection, mongo_uri)
        if is_told:
            await _told_to_look(listener)
        await _heard_of_new_runs(listener, connection, f"{run_id}-after")
    await endpoint.aclose()


async def test_h12_cancel_closes_the_frontier(connection: Connection, appender: Appender, run_id: str) -> None:
    """H12: a cancelled run leaves no question open that nobody can answer any more."""
    attempt = await Attempt.submit(connection, appender, run_id)
    frontier = await attempt.suspend()
    assert (await runs.cancel(connection, run_id, "enough", "operator")).status is RunStatus.CANCELLED
    stored = await frontiers.get(connection, run_id, frontier.generation)
    assert stored is not None
    assert stored.status is FrontierStatus.CANCELLED
    assert await frontiers.open_frontiers(connection, run_id=run_id) == []


async def test_h14_a_turn_that_was_followed_cannot_be_retried(connection: Connection, appender: Appender, run_id: str) -> None:
    """H14: a failed turn is not replayed on top of a later one; while none was committed, it starts again from the state that it started from."""
    state = ThreadState(serde_type="msgpack", data=b"1")
    thread = f"thread-{run_id}"
    first = await Attempt.submit(connection, appender, f"{run_id}-1", thread_id=thread)
    await first.end(state=state)
    second = await Attempt.submit(connection, appender, f"{run_id}-2", thread_id=thread)
    assert (second.claim.head.turn, second.claim.head.base_turn) == (2, 1)
    await second.end(EventType.RUN_FAILED)
    assert (await runs.retry(connection, second.run_id)).base_turn == 1
    second = await Attempt.start(connection, appender, f"{run_id}-2")
    assert await runs.thread_state(connection, thread, second.claim.head.base_turn) == state
    await second.end(EventType.RUN_FAILED)
    third = await Attempt.submit(connection, appender, f"{run_id}-3", thread_id=thread)
    assert (third.claim.head.turn, third.claim.head.base_turn) == (3, 1)
    await third.end(state=ThreadState(serde_type="msgpack", data=b"3"))
    with pytest.raises(RunError, match="later turn"):
        await runs.retry(connection, second.run_id)
    assert (await heads.get(connection, second.run_id)).status is RunStatus.FAILED


async def test_h15_a_run_owns_its_chunks(connection: Connection, run_id: str) -> None:
    """H15: the same large value in two runs is stored for each, so that removing one run takes nothing from the other."""
    value = "x" * (2 * payloads.INLINE_LIMIT)
    one, other = f"{run_id}-1", f"{run_id}-2"
    references = [await payloads.move_out(connection, each, value) for each in (one, other)]
    await connection.payloads.delete_many({"run_id": one})
    assert await payloads.bring_in(connection, other, [references[1]]) == [value]


async def test_h16_h17_a_process_that_was_declared_dead_cannot_come_back(connection: Connection, endpoint: Endpoint, run_id: str) -> None:
    """H16, H17: a lease is judged by the server's clock and renewed from a client of its own; who was declared dead once stays dead."""
    owner, workflow = f"owner-{run_id}", f"workflow-{run_id}"
    await submit(connection, run_id, workflow=workflow)
    await claims.claim(connection, run_id, owner)
    with endpoint.sync_client() as client:
        runners = client[connection.database.name]["runners"]
        await claims.register(connection, owner, 3_600_000, {"host": "here"})
        assert owner not in await claims.dead_owners(connection)
        assert await asyncio.to_thread(claims.renew, runners, owner, 0)  # the last heartbeat: over at once
        assert owner in await claims.dead_owners(connection)
        assert not await asyncio.to_thread(claims.renew, runners, owner, 3_600_000)
        assert owner in await claims.dead_owners(connection)
    assert (await claims.claim(connection, run_id, "p2", dead_owners=await claims.dead_owners(connection))).head.fence == 2


@pytest.mark.parametrize("driver", [AsyncMongoClient, AsyncIOMotorClient])
async def test_h18_the_applications_own_settings_do_not_matter(driver: Any, mongo_uri: str, shared_database: str, run_id: str) -> None:
    """H18: a client that reads from secondaries and writes with w: 1 by default serves as well as any other."""
    client = driver(mongo_uri, readPreference="secondaryPreferred", w=1, readConcernLevel="local")
    endpoint = Endpoint(None, shared_database, client=client)
    connection = endpoint.connection()
    await schema.prepare(connection)
    appender = Appender(connection)
    attempt = await Attempt.submit(connection, appender, run_id)
    await attempt.started(1)
    frontier = await attempt.suspend(question(run_id, 2))
    receipt = await frontiers.resolve(connection, frontier, answers(frontier))
    assert await frontiers.resolve(connection, frontier, answers(frontier)) == receipt
    again = await Attempt.start(connection, appender, run_id)
    await again.completed(1)
    await again.end(output="done")
    assert (await heads.get(connection, run_id)).output == "done"
    assert connection.database.write_concern.document == {"w": "majority"}
    await endpoint.aclose()
    closing = client.close()
    if closing is not None:
        await closing


async def test_every_story_here_leaves_a_sound_database(connection: Connection, appender: Appender, mongo_uri: str, database: str) -> None:
    """A plain story, start to end, in a database of its own: the checker has nothing to object to."""
    own = Connection(connection.client, database, is_owned=False)
    await schema.ensure_schema(own)
    attempt = await Attempt.submit(own, Appender(own), "plain")
    await attempt.started(1)
    await attempt.completed(1)
    await attempt.end(output={"total": 3})
    invariants.assert_invariants(mongo_uri, database, attempt.acknowledged())
    await own.aclose()
