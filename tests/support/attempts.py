"""Verbs for tests of the store: what an attempt does to its run, in the order in which an engine would do it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.events import ActivityKind, Event, EventType
from mongo_durable.protocol.frontier import FrontierEntry, frontier_entry
from mongo_durable.protocol.identity import Position, activity_id
from mongo_durable.protocol.values import encode
from mongo_durable.store import claims, frontiers, runs
from mongo_durable.store.appender import Appender, Channel
from mongo_durable.store.claims import Claim
from mongo_durable.store.connection import Connection
from mongo_durable.store.documents import RunHead, StoredFrontier
from mongo_durable.store.runs import Ending, Submission, ThreadState
from tests.support.invariants import Acknowledged

WORKFLOW, VERSION = "procurement", "1"


def position(number: int) -> Position:
    """Where the activity `number` of a run is."""
    return Position(("agent", "1", "node"), number, "1")


def question(run_id: str, number: int, value: Any = "may I?", schema: Mapping[str, Any] | None = None) -> FrontierEntry:
    """A question that somebody has to answer."""
    return frontier_entry(run_id, position(number), ActivityKind.INTERRUPT, "approval", encode(value), schema)


def submission(run_id: str, *, thread_id: str | None = None, value: Any = None, workflow: str = WORKFLOW, version: str = VERSION) -> Submission:
    """What a run starts from; a thread of its own unless told otherwise."""
    return Submission(run_id=run_id, workflow=workflow, version=version, thread_id=thread_id or run_id, input=encode(value))


async def submit(connection: Connection, run_id: str, **options: Any) -> RunHead:
    """Submit a run for others to execute."""
    head = await runs.submit(connection, submission(run_id, **options))
    assert isinstance(head, RunHead)
    return head


@dataclass(slots=True)
class Attempt:
    """One process's try at a run: its claim, and the channel on which it writes.

    Attributes:
        sent: What was appended, with the future of its acknowledgement.
    """

    connection: Connection
    appender: Appender
    claim: Claim
    channel: Channel
    sent: list[tuple[Event, asyncio.Future[int]]] = field(default_factory=list)

    @classmethod
    def of(cls, connection: Connection, appender: Appender, claimed: Claim) -> Attempt:
        """The attempt that a claim gives the right to."""
        return cls(connection, appender, claimed, Channel(claimed.head.run_id, claimed.head.fence, claimed.seq))

    @classmethod
    async def start(cls, connection: Connection, appender: Appender, run_id: str, owner: str = "p1", **options: Any) -> Attempt:
        """Claim a run that is there."""
        return cls.of(connection, appender, await claims.claim(connection, run_id, owner, **options))

    @classmethod
    async def submit(cls, connection: Connection, appender: Appender, run_id: str, owner: str = "p1", **options: Any) -> Attempt:
        """Submit a run and execute it at once."""
        claimed = await runs.submit(connection, submission(run_id, **options), owner=owner)
        assert isinstance(claimed, Claim)
        return cls.of(connection, appender, claimed)

    @property
    def run_id(self) -> str:
        """The run."""
        return self.claim.head.run_id

    def started(self, number: int, value: Any = None, *, is_awaited: bool = True) -> asyncio.Future[int]:
        """Append the start of activity `number`."""
        return self._append(
            EventType.ACTIVITY_STARTED, number, is_awaited, kind=ActivityKind.TOOL, name="pay", input_digest=digest(None), value=value
        )

    def completed(self, number: int, value: Any = None, *, is_awaited: bool = True) -> asyncio.Future[int]:
        """Append the outcome of activity `number`."""
        return self._append(EventType.ACTIVITY_COMPLETED, number, is_awaited, value=value)

    def _append(self, event_type: EventType, number: int, is_awaited: bool, **fields: Any) -> asyncio.Future[int]:
        where = position(number)
        event = Event(
            run_id=self.run_id,
            seq=self.channel.seq + 1,
            fence=self.channel.fence,
            type=event_type,
            position=where,
            activity_id=activity_id(self.run_id, where),
            **fields,
        )
        future = self.appender.append(self.channel, event, is_awaited=is_awaited)
        self.sent.append((event, future))
        return future

    async def suspend(self, *entries: FrontierEntry, expires_in: timedelta | None = None) -> StoredFrontier:
        """Hand over, and suspend the run on these questions; one plain question if none is given."""
        await self.appender.hand_over(self.channel)
        asked = [replace(entry, expires_in=expires_in) for entry in entries or (question(self.run_id, 1),)]
        return await frontiers.suspend(self.connection, self.claim, self.channel, asked)

    async def end(self, kind: EventType = EventType.RUN_COMPLETED, output: Any = None, state: ThreadState | None = None) -> None:
        """Hand over, and end the run."""
        await self.appender.hand_over(self.channel)
        error = {"type": "ValueError", "message": "no"} if kind in (EventType.RUN_FAILED, EventType.RUN_DIVERGED) else None
        await runs.end(self.connection, self.claim, self.channel, Ending(type=kind, output=output, error=error, thread_state=state))

    async def release(self) -> None:
        """Drain, and give the run back."""
        await self.appender.drain(self.channel)
        await claims.release(self.connection, self.claim)

    def acknowledged(self) -> list[Acknowledged]:
        """Everything that this attempt was told is recorded."""
        done = [event for event, future in self.sent if future.done() and not future.cancelled() and future.exception() is None]
        told = [Acknowledged(run_id=each.run_id, seq=each.seq, fence=each.fence, type=each.type) for each in done]
        started = Acknowledged(run_id=self.run_id, seq=self.claim.seq, fence=self.claim.head.fence, type=EventType.ATTEMPT_STARTED)
        return [started, *told]


def answers(frontier: StoredFrontier, value: Any = "yes") -> dict[str, Any]:
    """The same answer to every question of a frontier."""
    return {entry.activity_id: encode(value) for entry in frontier.entries}


async def settled(attempts: Iterable[Attempt]) -> None:
    """Wait until every event that was sent is acknowledged or refused. What an attempt carried into the transaction that it died in is neither."""
    carried = {each.acknowledged for attempt in attempts for each in attempt.channel.carried}
    sent = {future for attempt in attempts for _, future in attempt.sent}
    await asyncio.gather(*(sent - carried), return_exceptions=True)
