"""Transactional activities: what the body writes to this cluster commits in one transaction with its outcome event.

The unique seq of that event fences the whole: if another process has taken the run over, its `attempt.started` stands at that seq, and nothing of
the transaction is kept. The run's channel is held only from the outcome's insert to the commit, because the transaction would otherwise wait for, and
then kill, the attempt's own appends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from bson import ObjectId
from pymongo.errors import DuplicateKeyError, PyMongoError

from mongo_durable.errors import DurableError, StoreUnavailable, Superseded
from mongo_durable.protocol.events import Event
from mongo_durable.store.appender import Appender, Channel
from mongo_durable.store.connection import Connection, Session
from mongo_durable.store.documents import event_document, event_from
from mongo_durable.store.failpoints import FailPoint, reach
from mongo_durable.store.faults import translate
from mongo_durable.store.payloads import move_out

_TRIES = 5


class BodyFailed(Exception):
    """The body raised `error`; nothing was committed. `seq` is the one that was reserved for the outcome, or None."""

    def __init__(self, error: Exception, seq: int | None) -> None:
        super().__init__(str(error))
        self.error = error
        self.seq = seq


async def commit_with_outcome(
    connection: Connection,
    appender: Appender,
    channel: Channel,
    outcome: Event,
    body: Callable[[Session], Awaitable[Any]],
    on_reserved: Callable[[Event], None],
) -> Event:
    """Run `body` in a transaction and commit its writes with its outcome.

    Args:
        outcome: The `activity.completed` event, without seq and value.
        body: Gets the session, returns the plain value. It may run more than once; only one run of it is kept.
        on_reserved: Told once, when the outcome has got its seq: events enqueued from here on follow it.

    Returns:
        The committed event, with its value as stored.

    Raises:
        BodyFailed: The body raised; the caller records the failure.
        Superseded: The attempt is over; nothing was kept.
        StoreUnavailable: Whether it was committed is unknown; the attempt is over, and the next one finds out.

    Writes: `activity_events`, and what the body writes, in one transaction; payload chunks before the insert.
    Invariants: I2, I3.
    """
    event_id = ObjectId()
    reserved: int | None = None
    raised: Exception | None = None
    written: Event | None = None

    async def transaction(session: Session) -> None:
        nonlocal reserved, raised, written
        raised = None
        try:
            value = await body(session)
        except Exception as error:
            # The driver decides by the label whether the whole transaction runs again; it must see its own exception.
            raised = error
            raise
        if reserved is None:
            reserved = await appender.reserve(channel)
            on_reserved(replace(outcome, seq=reserved, value=value))
        stored = await move_out(connection, channel.run_id, value)
        written = replace(outcome, seq=reserved, value=stored)
        await reach(FailPoint.TRANSACTIONAL_BEFORE)
        await connection.activity_events.insert_one(event_document(written, event_id), session=session)
        await reach(FailPoint.TRANSACTIONAL_INSIDE)

    async def attempted() -> Event | None:
        """One transaction: the committed event, or None if it is worth another try."""
        try:
            await connection.transaction(transaction)
        except DuplicateKeyError as error:
            if raised is error:
                raise BodyFailed(error, reserved) from error
            mine = await connection.activity_events.find_one({"_id": event_id})
            if mine is None:
                raise Superseded(
                    f"run {channel.run_id}: another process has taken the run over; nothing was committed", run_id=channel.run_id
                ) from None
            return event_from(mine)  # an earlier commit, whose answer was lost
        except Exception as error:
            if isinstance(error, PyMongoError) and translate(error).retryable:
                return None
            if raised is error:
                raise BodyFailed(error, reserved) from error
            raise
        return written

    try:
        for _ in range(_TRIES):
            committed = await attempted()
            if committed is not None:
                await reach(FailPoint.TRANSACTIONAL_AFTER)
                appender.free(channel)
                return committed
        raise StoreUnavailable(f"run {channel.run_id}: it is unknown whether a transactional activity was committed", run_id=channel.run_id)
    except BodyFailed:
        raise  # the caller fills the reserved seq with the failure
    except BaseException as error:
        # Whether the reserved seq was written is unknown, so this attempt can write nothing behind it.
        if isinstance(error, PyMongoError):
            error = translate(error)
        channel.end(error if isinstance(error, DurableError) else StoreUnavailable(f"run {channel.run_id}: a transaction was broken off"))
        if reserved is not None:
            appender.free(channel)
        raise error from None
