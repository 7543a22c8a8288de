"""The appender: order, acknowledgement, and what happens when the server, the network or the process does not play along."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mongo_durable.errors import AttemptOver, CommitUnknown, CorruptHistory, PayloadError, PayloadTooLarge, StoreUnavailable, Superseded
from mongo_durable.protocol.events import Event, EventType
from mongo_durable.store import claims, failpoints, frontiers, runs
from mongo_durable.store.appender import CARRIED_EVENTS, RUN_EVENTS_PER_FLIGHT, Appender
from mongo_durable.store.connection import Connection
from mongo_durable.store.events import read_history
from mongo_durable.store.failpoints import FailPoint
from mongo_durable.store.runs import Ending
from tests.store.conftest import Commands
from tests.support.attempts import Attempt, question
from tests.support.server_faults import failing


async def test_an_awaited_append_is_one_insert(connection: Connection, appender: Appender, run_id: str, commands: Commands) -> None:
    """Recording one event that somebody waits for costs one insert and nothing else."""
    attempt = await Attempt.submit(connection, appender, run_id)
    commands.forget()
    assert await attempt.started(1) == 3
    assert commands.counted() == {("insert", "activity_events"): 1}


async def test_an_event_that_nobody_waits_for_travels_with_the_next(connection: Connection, run_id: str, commands: Commands) -> None:
    """A start that is not awaited and its outcome are one insert."""
    attempt = await Attempt.submit(connection, Appender(connection, linger_s=3600), run_id)
    commands.forget()
    start = attempt.started(1, is_awaited=False)
    assert await attempt.completed(1) == 4
    assert start.done()
    assert commands.counted() == {("insert", "activity_events"): 1}


async def test_an_event_that_nobody_waits_for_is_sent_by_itself(connection: Connection, appender: Appender, run_id: str) -> None:
    """After a moment it goes even if nothing follows."""
    attempt = await Attempt.submit(connection, appender, run_id)
    assert await attempt.started(1, is_awaited=False) == 3


async def test_many_runs_share_flights(connection: Connection, appender: Appender, run_id: str, commands: Commands) -> None:
    """The events of many runs travel together, and each run's stay in order."""
    attempts = [await Attempt.submit(connection, appender, f"{run_id}-{number}") for number in range(20)]
    commands.forget()
    acknowledged = await asyncio.gather(*(attempt.started(number) for number in range(10) for attempt in attempts))
    assert acknowledged == [3 + number for number in range(10) for _ in attempts]
    assert commands.counted()["insert", "activity_events"] <= 10
    for attempt in attempts:
        assert [each.seq for each in await read_history(connection, attempt.run_id)] == list(range(1, 13))


async def test_more_events_than_a_flight_takes_stay_in_order(connection: Connection, appender: Appender, run_id: str) -> None:
    """A run with more events than it may have in one flight has them all in the end, in order."""
    attempt = await Attempt.submit(connection, appender, run_id)
    count = 5 * RUN_EVENTS_PER_FLIGHT + 1
    assert await asyncio.gather(*(attempt.started(number) for number in range(count))) == list(range(3, 3 + count))
    assert len(await read_history(connection, run_id)) == 2 + count


async def test_large_events_of_several_runs_fit_their_flights(connection: Connection, appender: Appender, run_id: str) -> None:
    """Flights are cut by bytes too, so that large events go through."""
    attempts = [await Attempt.submit(connection, appender, f"{run_id}-{number}") for number in range(3)]
    await asyncio.gather(*(attempt.started(number, "x" * 900_000) for attempt in attempts for number in range(6)))
    for attempt in attempts:
        assert len(await read_history(connection, attempt.run_id)) == 8


async def test_an_event_out_of_turn_is_refused(connection: Connection, appender: Appender, run_id: str) -> None:
    """What cannot be the channel's next event is refused before it is queued, and the channel goes on."""
    attempt = await Attempt.submit(connection, appender, run_id)
    for seq, fence, of in ((4, 1, run_id), (3, 2, run_id), (3, 1, "another")):
        with pytest.raises(CorruptHistory):
            appender.append(attempt.channel, Event(run_id=of, seq=seq, fence=fence, type=EventType.STEP_COMMITTED))
    assert await attempt.started(1) == 3


@pytest.mark.parametrize("value", [{1, 2}, object(), 1 << 70, {"a\0b": 1}, "\ud800"], ids=["set", "object", "large int", "NUL in key", "surrogate"])
async def test_a_value_that_bson_cannot_hold_fails_its_caller_alone(value: Any, connection: Connection, appender: Appender, run_id: str) -> None:
    """A value that was not encoded is refused with an error of ours, before it takes a seq; the attempt goes on."""
    attempt = await Attempt.submit(connection, appender, run_id)
    with pytest.raises(PayloadError):
        attempt.started(1, value)
    assert await attempt.started(1) == 3


async def test_an_event_larger_than_mongodb_takes_fails_its_caller_alone(connection: Connection, appender: Appender, run_id: str) -> None:
    """An event of more than 16 MB is refused when it is queued: in a flight it would hold up and end every other run in it."""
    attempt = await Attempt.submit(connection, appender, run_id)
    other = await Attempt.submit(connection, appender, f"{run_id}-other")
    innocent = other.started(1)
    with pytest.raises(PayloadTooLarge):
        attempt.started(1, "x" * (17 * 1024 * 1024))
    async with asyncio.timeout(20):
        assert await innocent == 3
        assert await attempt.started(1) == 3


async def test_a_second_outcome_ends_the_attempt(connection: Connection, appender: Appender, run_id: str) -> None:
    """The database itself refuses a second outcome of an activity (I3); the attempt ends, other runs do not notice."""
    attempt = await Attempt.submit(connection, appender, run_id)
    other = await Attempt.submit(connection, appender, f"{run_id}-other")
    await attempt.started(1)
    await attempt.completed(1)
    innocent = other.started(1)
    with pytest.raises(CorruptHistory, match="second outcome"):
        await attempt.completed(1)
    with pytest.raises(CorruptHistory):
        attempt.started(2)
    assert await innocent == 3
    assert len(await read_history(connection, run_id)) == 4


@pytest.mark.parametrize("fault", [{"closeConnection": True}, {"errorCode": 11602}, {"errorCode": 8}], ids=["cut", "interrupted", "unknown error"])
async def test_trouble_is_not_failure(
    fault: dict[str, Any], connection: Connection, appender: Appender, run_id: str, appname: str, mongo_uri: str, commands: Commands
) -> None:
    """What is no verdict of the server leaves an event unknown; it is sent again until it is recorded, once."""
    attempt = await Attempt.submit(connection, appender, run_id)
    commands.forget()
    with failing(mongo_uri, ["insert"], appname=appname, mode={"times": 3}, **fault):
        assert await asyncio.gather(attempt.started(1, is_awaited=False), attempt.completed(1), attempt.started(2)) == [3, 4, 5]
    assert len(commands.sent) > 3
    assert [each.seq for each in await read_history(connection, run_id)] == [1, 2, 3, 4, 5]


async def test_it_gives_up_in_the_end(connection: Connection, run_id: str, appname: str, mongo_uri: str) -> None:
    """An event that is never acknowledged fails its attempt as unavailable, with everything queued behind it."""
    attempt = await Attempt.submit(connection, Appender(connection, give_up_s=0.3, deadline_s=0.3), run_id)
    with failing(mongo_uri, ["insert"], appname=appname, closeConnection=True):
        results = await asyncio.gather(attempt.started(1), attempt.started(2), return_exceptions=True)
    assert [type(each) for each in results] == [StoreUnavailable] * 2
    with pytest.raises(StoreUnavailable):
        attempt.started(3)
    with pytest.raises(StoreUnavailable):
        await attempt.suspend()


async def test_closing_fails_what_is_queued(connection: Connection, run_id: str) -> None:
    """When the connection closes, nobody waits for ever: neither for an event in the queue, nor for a drain, nor for an event sent later."""
    appender = Appender(connection, linger_s=3600)
    attempt = await Attempt.submit(connection, appender, run_id)
    queued = attempt.started(1, is_awaited=False)
    await appender.aclose()
    async with asyncio.timeout(20):
        with pytest.raises(StoreUnavailable):
            await queued
        with pytest.raises(StoreUnavailable):
            await appender.drain(attempt.channel)
    with pytest.raises(StoreUnavailable):
        attempt.started(2)
    other = await Attempt.submit(connection, appender, f"{run_id}-other")
    with pytest.raises(StoreUnavailable):
        other.started(1)


async def test_what_was_not_sent_goes_with_the_transaction_that_ends_the_run(
    connection: Connection, appender: Appender, run_id: str, commands: Commands
) -> None:
    """Events that nobody waits for, and that were not sent when the attempt comes to its end, are inserted with its last one, before it."""
    attempt = await Attempt.submit(connection, appender, run_id)
    sent = attempt.started(1)
    await sent
    commands.forget()
    carried = [attempt.started(number, is_awaited=False) for number in (2, 3)]
    await appender.hand_over(attempt.channel)
    assert not commands.counted()
    with pytest.raises(AttemptOver):
        attempt.started(4)
    await runs.end(connection, attempt.claim, attempt.channel, Ending(type=EventType.RUN_COMPLETED))
    assert [await each for each in carried] == [4, 5]
    assert attempt.channel not in appender._lingering, "nothing is kept of an attempt that is over"
    assert commands.counted()["insert", "activity_events"] == 1
    assert [each.seq for each in await read_history(connection, run_id)] == [1, 2, 3, 4, 5, 6]


async def test_more_than_a_transaction_should_carry_is_sent_before_it(connection: Connection, appender: Appender, run_id: str) -> None:
    """A long queue is not handed over: it is sent as ever."""
    attempt = await Attempt.submit(connection, appender, run_id)
    futures = [attempt.started(number, is_awaited=False) for number in range(CARRIED_EVENTS + 1)]
    await appender.hand_over(attempt.channel)
    assert all(each.done() for each in futures)
    assert attempt.channel.carried == []


async def test_what_a_lost_attempt_would_have_carried_fails(connection: Connection, appender: Appender, run_id: str) -> None:
    """A rival has the run: the transaction is refused, and nothing of it stands in the history."""
    attempt = await Attempt.submit(connection, appender, run_id)
    carried = attempt.started(1, is_awaited=False)
    await appender.hand_over(attempt.channel)
    await connection.runs.update_one({"_id": run_id}, {"$inc": {"fence": 1}})
    with pytest.raises(Superseded):
        await frontiers.suspend(connection, attempt.claim, attempt.channel, [question(run_id, 1)])
    with pytest.raises(Superseded):
        await carried
    assert [each.seq for each in await read_history(connection, run_id)] == [1, 2]


@pytest.mark.parametrize("kind", ["suspend", "end"])
async def test_what_is_carried_is_acknowledged_once(
    connection: Connection, appender: Appender, run_id: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction whose commit was not heard of is repeated, and what it carried stands in the history once."""
    transaction, is_heard = connection.transaction, False

    async def unheard(body: Any) -> Any:
        done = await transaction(body)
        if not is_heard:
            raise CommitUnknown("the reply was lost")
        return done

    attempt = await Attempt.submit(connection, appender, run_id)
    carried = [attempt.started(number, is_awaited=False) for number in (1, 2)]
    await appender.hand_over(attempt.channel)

    async def finish() -> None:
        if kind == "suspend":
            await frontiers.suspend(connection, attempt.claim, attempt.channel, [question(run_id, 1)])
        else:
            await runs.end(connection, attempt.claim, attempt.channel, Ending(type=EventType.RUN_COMPLETED))

    monkeypatch.setattr(connection, "transaction", unheard)
    with pytest.raises(CommitUnknown):
        await finish()
    assert not any(each.done() for each in carried)
    is_heard = True
    await finish()
    assert [await each for each in carried] == [3, 4]
    assert [each.seq for each in await read_history(connection, run_id)] == [1, 2, 3, 4, 5]


async def test_an_attempt_that_loses_while_it_hands_over_carries_nothing(connection: Connection, appender: Appender, run_id: str) -> None:
    """A flight is in the air, and a rival takes its seq: what was to follow is not acknowledged, and leaves no hole."""
    attempt = await Attempt.submit(connection, appender, run_id)
    is_flying, go_on = asyncio.Event(), asyncio.Event()

    async def look(point: FailPoint) -> None:
        if point is FailPoint.APPEND_BEFORE:
            is_flying.set()
            await go_on.wait()

    failpoints.handler = look
    try:
        flying = attempt.started(1)
        await is_flying.wait()
        following = attempt.started(2, is_awaited=False)
        handing_over = asyncio.create_task(appender.hand_over(attempt.channel))
        await claims.claim(connection, run_id, "rival", is_forced=True)
        go_on.set()
        with pytest.raises(Superseded):
            await handing_over
    finally:
        failpoints.handler = None
    for each in (flying, following):
        with pytest.raises(Superseded):
            await each
    assert attempt.channel.carried == []
    assert [each.fence for each in await read_history(connection, run_id)] == [0, 1, 2]


async def test_a_drained_channel_is_sealed(connection: Connection, appender: Appender, run_id: str) -> None:
    """After a drain everything is acknowledged, and nothing more can be queued."""
    attempt = await Attempt.submit(connection, appender, run_id)
    futures = [attempt.started(number, is_awaited=False) for number in range(200)]
    await appender.drain(attempt.channel)
    assert all(each.done() for each in futures)
    with pytest.raises(AttemptOver):
        attempt.started(1)
