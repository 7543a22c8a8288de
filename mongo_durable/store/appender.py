"""Group commit: the process-wide appender of activity events.

Every attempt has a `Channel`: its run, fence and next `seq`. An event gets its seq, its `_id` and its bytes when it is enqueued, and none of them
changes any more; the unique index on (run_id, seq) is then order, optimistic concurrency and fence at once. The appender gathers the events of all
channels into flights (one insert command each), a few at a time.

Rules, found by breaking what did without them:

A1  seq, _id and bytes are fixed at enqueue; a repeated send sends the same.
A2  a run is in at most one flight. Otherwise n can fail as a duplicate while n+1 lands behind a rival's `attempt.started`.
A3  a flight is ordered if any run has more than one event in it, for the same reason.
A4  an event is acknowledged if it is in the success part of the reply AND the reply has no write-concern error: a duplicate-key reply alone does not
    say that the document is durable.
A5  anything else is unknown, not failed: the same documents go again, one event a run and unordered, until settled or until the deadline.
A6  an error ends or delays its own run only. Only a few codes are verdicts; every other write error is unknown.
A7  a channel is released exactly once, by the flight that took it.

A flight has a deadline, because one open transaction on one run's next key would hold all of them (seen: 61 s). After it each run goes alone.

A rival's event at my seq means that I am no longer the attempt, whatever its fence: the channel is dead (`Superseded`), and what it had queued is
never acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import bson
import pymongo
from bson import ObjectId
from bson.raw_bson import RawBSONDocument
from pymongo.errors import ExecutionTimeout, NetworkTimeout, PyMongoError

from mongo_durable import telemetry
from mongo_durable.encryption import Cipher
from mongo_durable.errors import AttemptOver, CorruptHistory, DurableError, PayloadTooLarge, StoreError, StoreUnavailable, Superseded
from mongo_durable.protocol.events import Event
from mongo_durable.store.connection import Connection
from mongo_durable.store.documents import event_document
from mongo_durable.store.failpoints import FailPoint, reach
from mongo_durable.store.faults import no_driver_errors

log = logging.getLogger(__name__)

FLIGHTS = 2
FLIGHT_DOCUMENTS = 500
FLIGHT_BYTES = 4 * 1024 * 1024
FLIGHT_DEADLINE_S = 1.0
RUN_EVENTS_PER_FLIGHT = 64
CARRIED_EVENTS = 64
CARRIED_BYTES = 1024 * 1024
GIVE_UP_S = 30.0
LINGER_S = 0.02
_SOLO_AT_ONCE = 16

_DUPLICATE_KEY = 11000
_TOO_LARGE = {10334, 17280}
_LARGEST_DOCUMENT = 16 * 1024 * 1024
_VERDICTS = {_DUPLICATE_KEY, 121, 2, 22, *_TOO_LARGE}


@dataclass(eq=False, slots=True)
class _Entry:
    channel: Channel
    seq: int
    document: RawBSONDocument
    size: int
    acknowledged: asyncio.Future[int]


@dataclass(eq=False, slots=True)
class Channel:
    """The write side of one attempt: it owns the run's next `seq` for as long as it lives.

    Attributes:
        seq: Of the last event enqueued.
        ended: Why nothing more can be written: a verdict of the database, or None.
        is_sealed: The attempt has suspended, ended or been released; nothing more is enqueued.
        carried: What was never sent when the attempt came to its end: the transaction that suspends or ends the run inserts it before its own event.
    """

    run_id: str
    fence: int
    seq: int
    ended: DurableError | None = None
    is_sealed: bool = False
    carried: list[_Entry] = field(default_factory=list)
    # Invariant (A2): is_flying from the moment a flight takes events until that flight, or its recovery, has settled all of them.
    is_flying: bool = False
    is_ready: bool = False
    queue: deque[_Entry] = field(default_factory=deque)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def carried_documents(self) -> list[RawBSONDocument]:
        """The documents of what is carried, in order of seq."""
        return [entry.document for entry in self.carried]

    def settle_carried(self) -> None:
        """The transaction that has inserted what is carried is committed."""
        for entry in self.carried:
            _acknowledge(entry)
        self.carried.clear()

    def end(self, reason: DurableError, also: Iterable[_Entry] = ()) -> None:
        """Fail everything that is queued or carried and refuse everything to come. The first reason stands."""
        self.ended = self.ended or reason
        for entry in (*also, *self.carried, *self.queue):
            if entry.channel is self and not entry.acknowledged.done():
                entry.acknowledged.set_exception(self.ended)
                entry.acknowledged.exception()  # seen: an event that nobody awaits must not warn of it, the channel remembers how it ended
        self.carried.clear()
        self.queue.clear()
        if not self.is_flying:
            self.idle.set()


class Appender:
    """Gathers the events of all channels of one connection into flights."""

    def __init__(
        self,
        connection: Connection,
        *,
        flights: int = FLIGHTS,
        deadline_s: float = FLIGHT_DEADLINE_S,
        give_up_s: float = GIVE_UP_S,
        linger_s: float = LINGER_S,
    ) -> None:
        self._events = connection.activity_events
        self._cipher = connection.cipher
        self._deadline_s = deadline_s
        self._give_up_s = give_up_s
        self._linger_s = linger_s
        self._ready: deque[Channel] = deque()
        self._has_ready = asyncio.Event()
        self._is_closed = False
        # Invariant: a channel with events in its queue is here, or in `_ready`, or in a flight: closing finds them all.
        self._lingering: set[Channel] = set()
        self._recoveries: set[asyncio.Task[None]] = set()
        self._flyers = [asyncio.create_task(self._fly(), name=f"mongo_durable-flight-{number}") for number in range(flights)]
        connection.on_close(self.aclose)

    def append(self, channel: Channel, event: Event, *, is_awaited: bool = True) -> asyncio.Future[int]:
        """Enqueue `event`, whose seq is the channel's next one.

        Args:
            is_awaited: Whether somebody waits for the acknowledgement now. An event that nobody waits for lingers a moment, so that it travels with
                the next one.

        Returns:
            A future of the seq, done when the event is majority-committed. It fails with `Superseded`, `StoreUnavailable`, … when it never will be.

        Raises:
            DurableError: The channel has ended, or the event cannot be encoded.
        """
        self._refuse_if_unusable(channel)
        if event.seq != channel.seq + 1 or event.fence != channel.fence or event.run_id != channel.run_id:
            raise CorruptHistory(
                f"run {channel.run_id}: event {event.seq} of fence {event.fence} cannot follow {channel.seq} of fence {channel.fence}",
                run_id=channel.run_id,
                seq=event.seq,
            )
        # A value that cannot be encoded, or not be sent, fails its caller here, not the flight and with it every other run.
        with no_driver_errors():
            entry = _entry(channel, event, self._cipher)
        channel.seq = event.seq
        channel.queue.append(entry)
        channel.idle.clear()
        if is_awaited:
            self._wake(channel)
        else:
            self._lingering.add(channel)
            asyncio.get_running_loop().call_later(self._linger_s, self._wake, channel)
        return entry.acknowledged

    async def drain(self, channel: Channel) -> None:
        """Wait until everything enqueued is acknowledged, and seal the channel. Whoever takes the next seq in a transaction calls this or `hand_over`
        first.

        Raises:
            DurableError: The channel has ended, so the attempt is over.
        """
        self._refuse_if_closed(channel)
        channel.is_sealed = True
        self._wake(channel)
        await channel.idle.wait()
        if channel.ended is not None:
            raise channel.ended

    async def hand_over(self, channel: Channel) -> None:
        """Seal the channel, wait until nothing of it is in the air, and leave what was not sent yet in `channel.carried`: it saves a flight.

        Raises:
            DurableError: The channel has ended, so the attempt is over.
        """
        if len(channel.queue) <= CARRIED_EVENTS and sum(entry.size for entry in channel.queue) <= CARRIED_BYTES:
            channel.carried.extend(channel.queue)
            channel.queue.clear()
            self._lingering.discard(channel)
            if not channel.is_flying:
                channel.idle.set()
        await self.drain(channel)

    async def reserve(self, channel: Channel) -> int:
        """Take the run's next seq for an event that a transaction inserts. Nothing of the run is sent until `free` or `fill` gives the channel back.

        Raises:
            DurableError: The channel has ended.
        """
        while channel.is_flying or channel.queue:
            self._wake(channel)
            await channel.idle.wait()
        self._refuse_if_unusable(channel)
        channel.is_flying = True
        channel.idle.clear()
        channel.seq += 1
        return channel.seq

    def free(self, channel: Channel) -> None:
        """What flew has landed, or the reserved event is committed, or the channel has ended: what was enqueued meanwhile may go."""
        channel.is_flying = False
        if channel.queue:
            self._wake(channel)
        else:
            channel.idle.set()

    def fill(self, channel: Channel, event: Event) -> asyncio.Future[int]:
        """The transaction was aborted for good: `event` takes the reserved seq, before what was enqueued meanwhile, so that no hole is left."""
        entry = _entry(channel, event, self._cipher)
        channel.queue.appendleft(entry)
        self.free(channel)
        return entry.acknowledged

    async def aclose(self) -> None:
        """Stop sending. Events that are not acknowledged by now stay unknown to their writers."""
        self._is_closed = True
        tasks = [*self._flyers, *self._recoveries]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in {*self._lingering, *self._ready}:
            if channel.queue:
                channel.end(_closed(channel))

    def _refuse_if_closed(self, channel: Channel) -> None:
        if self._is_closed:
            channel.end(StoreUnavailable(f"run {channel.run_id}: the connection is closed", run_id=channel.run_id))

    def _refuse_if_unusable(self, channel: Channel) -> None:
        self._refuse_if_closed(channel)
        if channel.ended is not None:
            raise channel.ended
        if channel.is_sealed:
            raise AttemptOver(f"run {channel.run_id}: this attempt has come to its end and writes nothing more", run_id=channel.run_id)

    def _wake(self, channel: Channel) -> None:
        if not channel.queue:
            self._lingering.discard(channel)  # it has ended
        if not channel.is_flying and not channel.is_ready and channel.queue:
            channel.is_ready = True
            self._ready.append(channel)
            self._has_ready.set()

    def _release(self, channel: Channel, held: set[Channel]) -> None:
        if channel not in held:  # A7
            return
        held.discard(channel)
        self.free(channel)

    async def _fly(self) -> None:
        while not self._is_closed:  # not by the cancellation alone: the driver can turn one into an error of its own
            while not self._ready:
                self._has_ready.clear()
                await self._has_ready.wait()
            batch, held = self._take()
            if not batch:
                continue
            try:
                rest, is_solo = await self._send(batch)
            except asyncio.CancelledError:
                _abandon(batch)
                raise
            except Exception as error:
                # Nothing here is expected to get through; if it does, these attempts end, and the others fly on.
                log.exception("a flight failed")
                for entry in batch:
                    entry.channel.end(StoreError(f"run {entry.channel.run_id}: sending an event failed with {type(error).__name__}"), batch)
                rest, is_solo = [], False
            for channel in held - {entry.channel for entry in rest}:
                self._release(channel, held)
            if rest:
                task = asyncio.create_task(self._recover(rest, held, is_solo=is_solo))
                self._recoveries.add(task)
                task.add_done_callback(self._recoveries.discard)

    def _take(self) -> tuple[list[_Entry], set[Channel]]:
        batch: list[_Entry] = []
        held: set[Channel] = set()
        size = 0
        while self._ready and len(batch) < FLIGHT_DOCUMENTS and size < FLIGHT_BYTES:
            channel = self._ready.popleft()
            channel.is_ready = False
            self._lingering.discard(channel)
            if channel.ended is not None or not channel.queue:
                continue
            channel.is_flying = True
            held.add(channel)
            taken = 0
            while channel.queue and taken < RUN_EVENTS_PER_FLIGHT and len(batch) < FLIGHT_DOCUMENTS and (size < FLIGHT_BYTES or not batch):
                entry = channel.queue.popleft()
                batch.append(entry)
                size += entry.size
                taken += 1
            if not taken:  # the batch filled up before this channel's turn
                self._release(channel, held)
        return batch, held

    async def _insert(self, entries: list[_Entry], *, is_ordered: bool) -> Mapping[str, Any]:
        """Returns the reply, in which errors of single documents stand.

        The plain command: `insert_many` repeats by itself what A5 repeats here, and a flight of few events takes it a third longer.
        """
        await reach(FailPoint.APPEND_BEFORE)
        with pymongo.timeout(self._deadline_s):
            reply: Mapping[str, Any] = await self._events.database.command(
                "insert",
                self._events.name,
                documents=[entry.document for entry in entries],
                ordered=is_ordered,
                writeConcern=self._events.write_concern.document,
            )
        telemetry.measure("append.batch", len(entries), unit="1")
        await reach(FailPoint.APPEND_AFTER)
        return reply

    async def _send(self, batch: list[_Entry]) -> tuple[list[_Entry], bool]:
        """Send a flight. Returns what is not settled, and whether each run must go alone from here."""
        is_ordered = any(one.channel is other.channel for one, other in pairwise(batch))  # A3; a run's events are contiguous
        try:
            reply = await self._insert(batch, is_ordered=is_ordered)
        except (NetworkTimeout, ExecutionTimeout):
            return batch, True
        except PyMongoError:
            return batch, False
        return self._settle_flight(batch, reply, is_ordered=is_ordered), False

    def _settle_flight(self, batch: list[_Entry], reply: Mapping[str, Any], *, is_ordered: bool) -> list[_Entry]:
        verdicts = _verdicts(reply)
        if verdicts is None:
            return batch
        if not is_ordered or not verdicts:
            self._settle(batch, verdicts, batch)
            return []
        failed = min(verdicts)
        for entry in batch[:failed]:
            _acknowledge(entry)
        self._settle([batch[failed]], {0: verdicts[failed]}, batch[failed:])
        return [entry for entry in batch[failed + 1 :] if entry.channel.ended is None]  # never sent

    def _settle(self, entries: list[_Entry], verdicts: Mapping[int, Mapping[str, Any]], scope: list[_Entry]) -> None:
        for index, entry in enumerate(entries):
            verdict = verdicts.get(index)
            end = None if verdict is None else _end_of_channel(entry, verdict)
            if end is None:
                _acknowledge(entry)
            else:
                entry.channel.end(end, scope)

    async def _recover(self, entries: list[_Entry], held: set[Channel], *, is_solo: bool) -> None:
        """Send again what is unknown: the first unsettled event of each run, unordered; after a timeout each run alone."""
        waiting: dict[Channel, deque[_Entry]] = {}
        for entry in entries:
            waiting.setdefault(entry.channel, deque()).append(entry)
        started = time.monotonic()
        try:
            if is_solo or await self._recover_in_waves(waiting, entries, held, started, None):
                gate = asyncio.Semaphore(_SOLO_AT_ONCE)
                alone = [self._recover_in_waves({channel: queue}, entries, held, started, gate) for channel, queue in waiting.items()]
                await asyncio.gather(*alone)
        except asyncio.CancelledError:
            _abandon(entries)
            raise

    async def _recover_in_waves(
        self, waiting: dict[Channel, deque[_Entry]], scope: list[_Entry], held: set[Channel], started: float, gate: asyncio.Semaphore | None
    ) -> bool:
        """Returns True if a common wave timed out, so that the rest must go alone."""
        pause = 0.05
        while waiting:
            wave = [queue[0] for queue in waiting.values()]
            try:
                if gate is None:
                    is_settled = await self._wave(wave, scope)
                else:
                    async with gate:
                        is_settled = await self._wave(wave, scope)
            except (NetworkTimeout, ExecutionTimeout):
                if gate is None:
                    return True
                is_settled = False
            except PyMongoError:
                is_settled = False
            if is_settled:
                for entry in wave:
                    waiting[entry.channel].popleft()
                    if not waiting[entry.channel] or entry.channel.ended is not None:
                        del waiting[entry.channel]
                        self._release(entry.channel, held)
                continue
            if self._is_closed or time.monotonic() - started > self._give_up_s:
                for channel in list(waiting):
                    channel.end(StoreUnavailable(f"run {channel.run_id}: MongoDB did not acknowledge an event", run_id=channel.run_id), scope)
                    del waiting[channel]
                    self._release(channel, held)
                return False
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)
        return False

    async def _wave(self, wave: list[_Entry], scope: list[_Entry]) -> bool:
        verdicts = _verdicts(await self._insert(wave, is_ordered=False))
        if verdicts is None:
            return False
        self._settle(wave, verdicts, scope)
        return True


def _entry(channel: Channel, event: Event, cipher: Cipher | None) -> _Entry:
    encoded = bson.encode(event_document(event, ObjectId(), cipher))  # a value that cannot be encoded fails its caller here, not the flight
    if len(encoded) > _LARGEST_DOCUMENT:
        raise PayloadTooLarge(
            f"run {channel.run_id}: event {event.seq} is larger than MongoDB takes",
            run_id=channel.run_id,
            size=len(encoded),
            limit=_LARGEST_DOCUMENT,
        )
    return _Entry(channel, event.seq, RawBSONDocument(encoded), len(encoded), asyncio.get_running_loop().create_future())


def _abandon(entries: Iterable[_Entry]) -> None:
    """The connection closes with these in the air: whether they were written is unknown, so their attempts are over."""
    for entry in entries:
        channel = entry.channel
        channel.is_flying = False
        channel.end(_closed(channel), [entry])


def _closed(channel: Channel) -> StoreUnavailable:
    return StoreUnavailable(f"run {channel.run_id}: the connection was closed before an event was acknowledged", run_id=channel.run_id)


def _acknowledge(entry: _Entry) -> None:
    if not entry.acknowledged.done():
        entry.acknowledged.set_result(entry.seq)


def _verdicts(reply: Mapping[str, Any]) -> dict[int, Mapping[str, Any]] | None:
    """The write errors by index, or None if this reply settles nothing (A4, A6)."""
    faults = reply.get("writeErrors", [])
    if "writeConcernError" in reply or any(fault["code"] not in _VERDICTS for fault in faults):
        return None
    return {fault["index"]: fault for fault in faults}


def _end_of_channel(entry: _Entry, verdict: Mapping[str, Any]) -> DurableError | None:
    """None if the event is my own that an earlier send had inserted; else why the channel ends."""
    run_id, code = entry.channel.run_id, verdict["code"]
    if code == _DUPLICATE_KEY:
        key = verdict.get("keyPattern") or {}
        if "_id" in key:
            return None
        if "seq" in key:
            return Superseded(f"run {run_id}: another process wrote event {entry.seq}; it has taken the run over", run_id=run_id)
        return CorruptHistory(f"run {run_id}: event {entry.seq} would be a second outcome of its activity", run_id=run_id, seq=entry.seq)
    if code in _TOO_LARGE:
        return PayloadTooLarge(
            f"run {run_id}: event {entry.seq} is larger than MongoDB takes", run_id=run_id, size=entry.size, limit=16 * 1024 * 1024
        )
    return StoreError(f"run {run_id}: MongoDB refused event {entry.seq} with code {code}", run_id=run_id)
