"""Where an attempt writes what its history does not have yet: the store; or nowhere, when a history is only to be replayed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Protocol

from mongo_durable.engine.process import Process
from mongo_durable.errors import DurableError, HistoryEnded, LeaseLost
from mongo_durable.protocol.events import Event
from mongo_durable.protocol.frontier import FrontierEntry
from mongo_durable.protocol.history import History
from mongo_durable.protocol.identity import Position
from mongo_durable.protocol.memory import MemoryEntry
from mongo_durable.store import claims, frontiers, heads, runs
from mongo_durable.store.appender import Channel
from mongo_durable.store.claims import Claim
from mongo_durable.store.documents import StoredFrontier
from mongo_durable.store.heartbeat import Lease
from mongo_durable.store.payloads import bring_in, move_out
from mongo_durable.store.transactional import commit_with_outcome


class Sink(Protocol):
    """What an attempt needs of the world outside its history."""

    @property
    def is_closed(self) -> bool:
        """Whether nothing is written, and so nothing executed."""

    @property
    def seq(self) -> int:
        """Of the last event of the run that this attempt knows, its own enqueued ones included."""

    @property
    def ended(self) -> DurableError | None:
        """Why nothing more can be written, or None."""

    @property
    def is_lease_valid(self) -> bool:
        """Whether an effect may be started now."""

    def admits(self, position: Position) -> bool:
        """Whether something may happen at `position` that the history does not have. Where not, it pends: what runs beside it still comes to the end
        of its own history."""

    def at_rest(self, history: History, consumed: int, pending: Mapping[Position, str]) -> None:
        """The graph has come to rest on `pending` (digests by position).

        Raises:
            HistoryEnded: There is no answer to pass on, and none is to be waited for.
        """

    def end(self, reason: DurableError) -> None:
        """Nothing more is written. The first reason stands."""

    def append(self, event: Event, *, is_awaited: bool) -> asyncio.Future[int]:
        """See `Appender.append`."""

    def fill(self, event: Event) -> asyncio.Future[int]:
        """See `Appender.fill`."""

    async def drain(self) -> None:
        """See `Appender.drain`."""

    async def hand_over(self) -> None:
        """See `Appender.hand_over`."""

    async def move_out(self, value: Any) -> Any:
        """See `store.payloads.move_out`."""

    async def commit_with_outcome(self, outcome: Event, body: Callable[[Any], Awaitable[Any]], on_reserved: Callable[[Event], None]) -> Event:
        """See `store.transactional.commit_with_outcome`; the event that is returned has its value brought in."""

    async def suspend(self, entries: Sequence[FrontierEntry], unsaved: Sequence[MemoryEntry]) -> StoredFrontier:
        """See `store.frontiers.suspend`."""

    async def end_run(self, ending: runs.Ending) -> None:
        """See `store.runs.end`."""

    async def stopped_ending(self) -> runs.Ending:
        """How the run ends that was marked to be stopped."""

    async def release(self, *, until: datetime | None, held_back: str | None) -> None:
        """See `store.claims.release`."""


class StoreSink:
    """The store, as the attempt of a claim writes to it."""

    is_closed = False

    def __init__(self, process: Process, lease: Lease, claimed: Claim) -> None:
        self.lease = lease
        self._process = process
        self._claimed = claimed
        self._run_id = claimed.head.run_id
        self.channel = Channel(self._run_id, claimed.head.fence, claimed.seq)

    @property
    def seq(self) -> int:
        """See `Sink`."""
        return self.channel.seq

    @property
    def ended(self) -> DurableError | None:
        """See `Sink`: a verdict of the database, or that this process was declared dead."""
        if self.channel.ended is None and self.lease.is_lost:
            return LeaseLost(f"run {self._run_id}: this process was declared dead; another may have the run", run_id=self._run_id)
        return self.channel.ended

    @property
    def is_lease_valid(self) -> bool:
        """See `Sink`."""
        return self.lease.is_valid

    def admits(self, position: Position) -> bool:
        """Everything."""
        return True

    def at_rest(self, history: History, consumed: int, pending: Mapping[Position, str]) -> None:
        """What is not answered yet, somebody will answer."""

    def end(self, reason: DurableError) -> None:
        """See `Sink`."""
        self.channel.end(reason)

    def append(self, event: Event, *, is_awaited: bool) -> asyncio.Future[int]:
        """See `Sink`."""
        return self._process.appender.append(self.channel, event, is_awaited=is_awaited)

    def fill(self, event: Event) -> asyncio.Future[int]:
        """See `Sink`."""
        return self._process.appender.fill(self.channel, event)

    async def drain(self) -> None:
        """See `Sink`."""
        await self._process.appender.drain(self.channel)

    async def hand_over(self) -> None:
        """See `Sink`."""
        await self._process.appender.hand_over(self.channel)

    async def move_out(self, value: Any) -> Any:
        """See `Sink`."""
        return await move_out(self._process.connection, self._run_id, value)

    async def commit_with_outcome(self, outcome: Event, body: Callable[[Any], Awaitable[Any]], on_reserved: Callable[[Event], None]) -> Event:
        """See `Sink`."""
        connection = self._process.connection
        committed = await commit_with_outcome(connection, self._process.appender, self.channel, outcome, body, on_reserved)
        (value,) = await bring_in(connection, self._run_id, [committed.value])
        return replace(committed, value=value)

    async def suspend(self, entries: Sequence[FrontierEntry], unsaved: Sequence[MemoryEntry]) -> StoredFrontier:
        """See `Sink`."""
        return await frontiers.suspend(self._process.connection, self._claimed, self.channel, entries, unsaved)

    async def end_run(self, ending: runs.Ending) -> None:
        """See `Sink`."""
        await runs.end(self._process.connection, self._claimed, self.channel, ending)

    async def stopped_ending(self) -> runs.Ending:
        """See `Sink`."""
        return runs.stopped_ending(await heads.get(self._process.connection, self._run_id))

    async def release(self, *, until: datetime | None, held_back: str | None) -> None:
        """See `Sink`."""
        await claims.release(self._process.connection, self._claimed, until=until, held_back=held_back)


class ClosedSink:
    """Nowhere: the attempt replays what is recorded, executes nothing, and stops where its history does.

    Attributes:
        new: What the code reached that may not happen here, in the order in which it did.
        pending: On what the graph came to rest at the end (digests by position).
        ending: How the code ended the run, if it did.
    """

    is_closed = True
    is_lease_valid = False
    ended: DurableError | None = None

    def __init__(self, run_id: str, seq: int) -> None:
        self.seq = seq
        self.new: list[Position] = []
        self.pending: Mapping[Position, str] = {}
        self.ending: runs.Ending | None = None
        self._run_id = run_id

    def admits(self, position: Position) -> bool:
        """Nothing."""
        self.new.append(position)
        return False

    def at_rest(self, history: History, consumed: int, pending: Mapping[Position, str]) -> None:
        """See `Sink`."""
        self.pending = pending
        if self.new or consumed == len(history.frontiers) or history.frontiers[consumed].answers is None:
            raise self._over()

    def end(self, reason: DurableError) -> None:
        """See `Sink`."""
        self.ended = self.ended or reason

    async def drain(self) -> None:
        """There is nothing to wait for."""

    async def hand_over(self) -> None:
        """There is nothing to hand over."""

    async def end_run(self, ending: runs.Ending) -> None:
        """Keep it, to be compared with how the recorded run ended."""
        self.ending = ending

    async def release(self, *, until: datetime | None, held_back: str | None) -> None:
        """The run sleeps where its history ends."""
        raise self._over()

    def append(self, event: Event, *, is_awaited: bool) -> asyncio.Future[int]:
        """Refused (I7)."""
        raise self._over()

    def fill(self, event: Event) -> asyncio.Future[int]:
        """Refused (I7)."""
        raise self._over()

    async def move_out(self, value: Any) -> Any:
        """Refused (I7)."""
        raise self._over()

    async def commit_with_outcome(self, outcome: Event, body: Callable[[Any], Awaitable[Any]], on_reserved: Callable[[Event], None]) -> Event:
        """Refused (I7)."""
        raise self._over()

    async def suspend(self, entries: Sequence[FrontierEntry], unsaved: Sequence[MemoryEntry]) -> StoredFrontier:
        """Refused (I7)."""
        raise self._over()

    async def stopped_ending(self) -> runs.Ending:
        """Refused: nobody stops a replay."""
        raise self._over()

    def _over(self) -> HistoryEnded:
        return HistoryEnded(f"run {self._run_id}: the replay has come to the end of the history", run_id=self._run_id)
