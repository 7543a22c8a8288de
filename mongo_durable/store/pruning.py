"""Pruning: removing ended runs of a certain age, with everything they own.

    mark the head ──> states no turn needs ──> each owned collection, batch by batch ──> the head itself

The mark is the point of no return: it is set by a filter that names an end and its age. From then on the run is gone for everybody who asks for it;
`retry` and `fork` need a head without it. Every batch is a transaction that touches the marked head first, so that nothing is deleted once another
pruner has removed the head: its name may be a new, live run by then. Whoever is killed leaves a mark behind, and the next call goes on there.

What a later turn, or a fork, starts from stays: the newest committed state of a thread, and any that the head of another run names as its base. The
last run that names one removes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from mongo_durable.errors import ConfigurationError
from mongo_durable.protocol.events import RunStatus
from mongo_durable.store.connection import Connection, Session
from mongo_durable.store.documents import Document
from mongo_durable.store.failpoints import FailPoint, reach
from mongo_durable.store.faults import no_driver_errors
from mongo_durable.store.heads import Cursor, Lost, branches, move_head, paged
from mongo_durable.store.payloads import reference_of
from mongo_durable.store.schema import RUN_OWNED

ENDED = [status.value for status in RunStatus if status.is_end]
_PAGE = 200
_CHUNKS_AT_ONCE = 32
"""Of `payloads`, whose documents have a megabyte each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which runs are to be removed.

    Attributes:
        older_than: They ended so long ago at least, by the server's clock.
        status: One of the four ends, or None for all of them.
    """

    older_than: timedelta
    status: str | None = None
    workflow: str | None = None
    thread_id: str | None = None

    def __post_init__(self) -> None:
        if self.older_than < timedelta():
            raise ConfigurationError("older_than is not negative")
        if self.status is not None and self.status not in ENDED:
            raise ConfigurationError(f"only runs that have ended are pruned: status is one of {', '.join(ENDED)}, not {self.status!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedRun:
    """A run that was removed, or that would be.

    Attributes:
        documents: How many were deleted, by collection; empty where the run only would be removed.
    """

    run_id: str
    workflow: str
    status: str
    ended_at: datetime
    documents: Mapping[str, int] = field(default_factory=dict)


async def prune(connection: Connection, selection: Selection, *, batch: int = 500, is_dry_run: bool = False) -> AsyncGenerator[PrunedRun, None]:
    """Remove runs, oldest first, telling of each when it is gone. What a killed call began is finished first.

    Args:
        batch: Documents a transaction.
        is_dry_run: Tell of them, and remove nothing.

    Raises:
        NotPermitted: The user may not remove runs; nothing was marked.

    Writes: `runs`, then what the run owns; each batch is a transaction.
    """
    if batch < 1:
        raise ConfigurationError("batch is at least 1")
    with no_driver_errors():
        cutoff = await connection.server_time() - selection.older_than
        if not is_dry_run:
            # Deletes nothing. A role that may write heads, but remove none, is refused here, not behind a mark.
            await connection.runs.delete_one({"_id": None})
            async for head in connection.runs.find({"pruned_at": {"$type": "date"}}).sort("pruned_at", 1):
                if (removed := await _remove(connection, head, batch)) is not None:
                    yield removed
        async for head in _candidates(connection, selection, cutoff):
            if is_dry_run:
                yield _told(head, {})
                continue
            marked = await _mark(connection, head["_id"], cutoff)
            if marked is not None and (removed := await _remove(connection, marked, batch)) is not None:
                yield removed


async def _candidates(connection: Connection, selection: Selection, cutoff: datetime) -> AsyncGenerator[Document, None]:
    """Heads to be removed, in order of submission."""
    statuses = [selection.status] if selection.status is not None else ENDED
    scans = await branches(connection, statuses, selection.workflow)
    if selection.thread_id is not None:
        scans = [{**each, "thread_id": selection.thread_id} for each in scans]
    # The second one bounds the scan: what was submitted behind the cutoff has not ended before it.
    old = {"ended_at": {"$lte": cutoff}, "$and": [{"submitted_at": {"$lte": cutoff}}]}
    if not scans:
        return  # a workflow without a run
    after: Cursor | None = None
    while True:
        # A page at a time: a cursor that is held while all of them are removed would time out.
        wanted = paged([{**each, **old} for each in scans], "submitted_at", after, is_newest_first=False)
        page: list[Document] = await connection.runs.find(wanted).sort([("submitted_at", 1), ("_id", 1)]).limit(_PAGE).to_list(None)
        for head in page:
            yield head
        if len(page) < _PAGE:
            return
        after = Cursor(page[-1]["submitted_at"], page[-1]["_id"])


async def _mark(connection: Connection, run_id: str, cutoff: datetime) -> Document | None:
    """Mark a head; None if the run goes on by now, or is somebody else's to remove."""
    await reach(FailPoint.PRUNE_BEFORE)
    ended = {"_id": run_id, "status": {"$in": ENDED}, "ended_at": {"$lte": cutoff}, "pruned_at": None}
    try:
        marked = await move_head(connection, None, ended, {"pruned_at": "$$NOW"})
    except Lost:
        return None
    await reach(FailPoint.PRUNE_MARKED)
    return marked


async def _remove(connection: Connection, head: Document, batch: int) -> PrunedRun | None:
    """Remove a marked run; None if another has."""
    removal = _Removal(connection, head)
    try:
        await removal.states()
        for name in RUN_OWNED:
            await removal.owned(name, min(batch, _CHUNKS_AT_ONCE) if name == "payloads" else batch)
        return _told(head, removal.deleted) if await removal.head() else None
    except Lost:
        return None


def _told(head: Document, documents: Mapping[str, int]) -> PrunedRun:
    return PrunedRun(
        run_id=head["_id"], workflow=head["workflow"]["name"], status=head["status"], ended_at=head["ended_at"], documents=dict(documents)
    )


class _Removal:
    """The removal of one marked run. Each method may be repeated."""

    def __init__(self, connection: Connection, head: Document) -> None:
        self._connection = connection
        self._head = head
        self._run_id: str = head["_id"]
        self._marked = {"_id": head["_id"], "pruned_at": head["pruned_at"]}
        self.deleted: Counter[str] = Counter()

    async def states(self) -> None:
        """The run's committed state and the one that it started from, where nobody needs them any more."""
        head = self._head
        thread_id: str = head["thread_id"]
        await self._state(thread_id, head["turn"])
        await self._state(head.get("base_thread") or thread_id, head["base_turn"])

    async def _state(self, thread_id: str, turn: int) -> None:
        if turn == 0:
            return
        connection = self._connection
        state_id = f"{thread_id}/{turn}"

        async def body(session: Session) -> int:
            await self._touch(session)
            state = await connection.thread_states.find_one({"_id": state_id}, session=session)
            if state is None or await self._is_needed(session, state, thread_id, turn):
                return 0
            if (reference := reference_of(state["data"])) is not None and state["run_id"] != self._run_id:  # its own go with its other chunks
                await connection.payloads.delete_many({"run_id": state["run_id"], "digest": reference["digest"]}, session=session)
            await connection.thread_states.delete_one({"_id": state_id, "run_id": state["run_id"]}, session=session)
            return 1

        await self._transaction("thread_states", body)

    async def _is_needed(self, session: Session, state: Document, thread_id: str, turn: int) -> bool:
        """Whether a run that is not being removed owns this state or starts from it, or the thread's next turn will."""
        connection, stays = self._connection, {"pruned_at": None, "_id": {"$ne": self._run_id}}
        thread = await connection.threads.find_one({"_id": thread_id}, {"committed_turn": 1}, session=session)
        if thread is not None and thread["committed_turn"] == turn:
            return True
        needs: list[Document] = [
            {"thread_id": thread_id, "base_turn": turn},
            {"base_thread": thread_id, "base_turn": turn},  # forks
            {"_id": state["run_id"]},
        ]
        for each in needs:
            if await connection.runs.find_one({"$and": [each, stays]}, {"_id": 1}, session=session) is not None:
                return True
        return False

    async def owned(self, name: str, batch: int) -> None:
        """Everything of the run in one collection, but the chunks of a state that stays."""
        connection = self._connection
        collection = connection.database[name]
        mine: Document = {"run_id": self._run_id}
        if name == "payloads":
            states = await connection.thread_states.find({"run_id": self._run_id}, {"data": 1}).to_list(None)
            kept = [reference["digest"] for state in states if (reference := reference_of(state["data"])) is not None]
            mine |= {"digest": {"$nin": kept}} if kept else {}

        async def body(session: Session) -> int:
            await self._touch(session)
            found = await collection.find(mine, {"_id": 1}, session=session).limit(batch).to_list(None)
            if not found:
                return 0
            deleted = await collection.delete_many({"_id": {"$in": [each["_id"] for each in found]}, **mine}, session=session)
            return int(deleted.deleted_count)

        while await self._transaction(name, body) == batch:
            pass

    async def head(self) -> bool:
        """The head. False: another was faster."""
        deleted = await self._connection.runs.delete_one(self._marked)
        await reach(FailPoint.PRUNE_AFTER)
        self.deleted["runs"] += deleted.deleted_count
        return bool(deleted.deleted_count)

    async def _touch(self, session: Session) -> None:
        """The head first, as always: it is marked, and nobody else can remove it before this transaction is over.

        Raises:
            Lost: It is gone.
        """
        await move_head(self._connection, session, self._marked, {"pruned_batches": {"$add": [{"$ifNull": ["$pruned_batches", 0]}, 1]}})
        await reach(FailPoint.PRUNE_INSIDE)

    async def _transaction(self, name: str, body: Any) -> int:
        deleted: int = await self._connection.transaction(body)
        self.deleted[name] += deleted
        await reach(FailPoint.PRUNE_AFTER)
        return deleted
