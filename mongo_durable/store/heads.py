"""What all transactions on a run's head share.

Rule T0: every change of a run's state writes `runs` FIRST, by a filter that names the exact expected status, fence or generation, and attempt. The
one document a run serialises everything that concerns it; nothing matched means `Lost`: abort, then find out why by reading.
Rule T2: the event is the last write. Rule T3: a duplicate key inside means lost as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from bson import ObjectId
from bson.raw_bson import RawBSONDocument
from pymongo import ReturnDocument
from pymongo.errors import BulkWriteError

from mongo_durable.errors import ConfigurationError, RunNotFound
from mongo_durable.protocol.events import Event, EventType, RunStatus
from mongo_durable.store.connection import Connection, Session
from mongo_durable.store.documents import Document, RunHead, event_document, head_from
from mongo_durable.store.faults import is_duplicate, store_call
from mongo_durable.store.payloads import bring_in
from mongo_durable.store.sealing import open_error

NOT_RUNNING: Mapping[str, Any] = {"owner": None, "place": "$$REMOVE", "news": "$$REMOVE"}
"""What every change from running to another status sets: nobody executes the run, it holds no place of its limit, and there is no news of it
unless the change says so (`NEWS`)."""


ALL_STATUSES = [status.value for status in RunStatus]
NOT_ENDED = [status.value for status in RunStatus if not status.is_end]

NEWS: Mapping[str, Any] = {
    "news": {"$concat": ["$workflow.name", "\n", "$workflow.version", "\n", {"$dateToString": {"date": "$$NOW"}}]},
}
"""What every change to a status from which a run can be claimed sets, beside it: a change stream tells of an update only what is new in it, and a
runner that hears of a run has to know whether it serves it. The time makes it new each time. The server refuses a ready run without it: a status that
somebody changes by hand."""


def milliseconds(duration: timedelta) -> int:
    """A duration as documents hold it, rounded."""
    return round(duration.total_seconds() * 1000)


_VALUES = ("input", "output", "settings")


class Lost(Exception):
    """The head is not in the expected state. Never leaves the store."""


async def move_head(connection: Connection, session: Session | None, expected: Mapping[str, Any], change: Mapping[str, Any]) -> Document:
    """Compare-and-set on a head; returns the document after the change. `change` is an update-pipeline `$set`, so `$$NOW` works.

    Raises:
        Lost: No head matched.
    """
    found: Document | None = await connection.runs.find_one_and_update(
        expected, [{"$set": dict(change)}], return_document=ReturnDocument.AFTER, session=session
    )
    if found is None:
        raise Lost
    return found


async def insert_event(connection: Connection, session: Session | None, event: Event, carried: Sequence[RawBSONDocument] = ()) -> None:
    """Insert one event outside the appender. The caller's transaction holds the head, or nothing else can write this seq.

    Args:
        carried: Events before it that the appender has not sent.
    """
    document = _document(connection, event)
    if carried:
        await _insert_all(connection, session, [*carried, document])
    else:
        await connection.activity_events.insert_one(document, session=session)


async def insert_events(connection: Connection, session: Session, events: Sequence[Event]) -> None:
    """The same for events that follow one another."""
    await _insert_all(connection, session, [_document(connection, event) for event in events])


def _document(connection: Connection, event: Event) -> Document:
    return event_document(event if event.at is not None else replace(event, at=datetime.now(UTC)), ObjectId(), connection.cipher)


async def _insert_all(connection: Connection, session: Session | None, documents: Sequence[Document | RawBSONDocument]) -> None:
    try:
        await connection.activity_events.insert_many(documents, session=session)
    except BulkWriteError as error:
        if is_duplicate(error):
            raise Lost from None  # what insert_one says with a DuplicateKeyError; it has no label that would make the driver repeat the transaction
        raise


async def last_event(connection: Connection, run_id: str, session: Session | None = None) -> Document:
    """The newest event of a run: `_id`, seq, fence, type."""
    found: Document | None = await connection.activity_events.find_one(
        {"run_id": run_id}, {"seq": 1, "fence": 1, "type": 1}, sort=[("seq", -1)], session=session
    )
    if found is None:
        raise Lost
    return found


async def free_thread(connection: Connection, session: Session, thread_id: str, run_id: str, change: Mapping[str, Any] | None = None) -> None:
    """The run no longer holds its thread; the oldest run that is queued on it, if any, takes it. Idempotent."""
    thread: Document | None = await connection.threads.find_one_and_update(
        {"_id": thread_id, "active_run": run_id},
        {"$set": {"active_run": None, **(change or {})}},
        return_document=ReturnDocument.AFTER,
        session=session,
    )
    if thread is None or not thread.get("queued"):
        return
    queued = {"thread_id": thread_id, "status": RunStatus.PENDING.value, "is_queued": True}
    turn = {"turn": thread["turn"] + 1, "base_turn": thread["committed_turn"]}
    following: Document | None = await connection.runs.find_one_and_update(
        queued,
        [{"$set": {**NEWS, "is_queued": False, **turn, "available_at": {"$max": ["$available_at", "$$NOW"]}}}],
        sort=[("submitted_at", 1), ("_id", 1)],
        return_document=ReturnDocument.AFTER,
        session=session,
    )
    if following is None:  # the queued ones were cancelled
        await connection.threads.update_one({"_id": thread_id}, {"$set": {"queued": 0}}, session=session)
    else:
        taken = {"$set": {"active_run": following["_id"], "turn": turn["turn"]}, "$inc": {"queued": -1}}
        await connection.threads.update_one({"_id": thread_id}, taken, session=session)


@store_call
async def get(connection: Connection, run_id: str) -> RunHead:
    """The head of a run, with input, output and settings brought in.

    Raises:
        RunNotFound: There is none, or it is being pruned.
    """
    document = await connection.runs.find_one({"_id": run_id})
    if document is None or document.get("pruned_at") is not None:
        raise RunNotFound(f"there is no run {run_id!r} in database {connection.database.name!r}", run_id=run_id)
    stored = [document.get(name) for name in _VALUES]
    document |= zip(_VALUES, await bring_in(connection, run_id, stored), strict=True)
    document["error"] = open_error(connection.cipher, run_id, document.get("error"))
    return head_from(document)


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a page ends: the time and `_id` of its last document."""

    at: datetime
    id: str

    def __str__(self) -> str:
        return f"{self.at.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='milliseconds')}Z/{self.id}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """The cursor that `text` stands for.

        Raises:
            ConfigurationError: It is none.
        """
        at, slash, name = text.partition("/")
        try:
            if slash and name:
                return cls(datetime.fromisoformat(at), name)
        except ValueError:
            pass  # said below
        raise ConfigurationError(f"after= takes the `cursor` of a run or frontier, not {text!r}")


def paged(branches: Sequence[Mapping[str, Any]], field: str, after: Cursor | None, *, is_newest_first: bool) -> Document:
    """A query of one page of a listing by `field` and `_id`. Each branch fixes the fields in front of those in an index, so that it is one scan in
    order; the server merges the scans. All conditions stand in the branches: an `$or` beside others would not be planned branch by branch.

    Args:
        after: Where the page before ended, or None for the first one.
    """
    order = "$lt" if is_newest_first else "$gt"
    behind: list[Document] = [{}] if after is None else [{field: {order: after.at}}, {field: after.at, "_id": {order: after.id}}]
    found = [{**branch, **each} for branch in branches for each in behind]
    return found[0] if len(found) == 1 else {"$or": found}


async def branches(connection: Connection, statuses: Sequence[str], workflow: str | None, version: str | None = None) -> list[Document]:
    """The scans that find runs with these statuses, of all workflows or of one, in order of submission."""
    found: list[Document] = [{"status": status, "pruned_at": None} for status in statuses]
    if workflow is None:
        return found if version is None else [{**each, "workflow.version": version} for each in found]
    known = [version] if version is not None else await versions(connection, workflow)
    return [{"workflow.name": workflow, "workflow.version": each, **rest} for each in known for rest in found]


@store_call
async def listing(
    connection: Connection,
    *,
    status: str | None = None,
    workflow: str | None = None,
    version: str | None = None,
    thread_id: str | None = None,
    limit: int = 100,
    after: Cursor | None = None,
) -> list[RunHead]:
    """Heads, newest first, without bringing in large inputs and outputs.

    For each of these an index has what is returned, and nothing else is examined: everything; a status; a workflow, also with a version, a status, or
    both; a thread. What else is asked for is looked for among those.

    Args:
        after: Where the page before ended.
    """
    statuses = [status] if status is not None else ALL_STATUSES
    if thread_id is None:
        scans = await branches(connection, statuses, workflow, version)
    else:
        given = {"status": status, "workflow.name": workflow, "workflow.version": version}
        scans = [{"thread_id": thread_id, "pruned_at": None, **{name: value for name, value in given.items() if value is not None}}]
    if not scans:
        return []  # a workflow without a run
    page = paged(scans, "submitted_at", after, is_newest_first=True)
    documents = await connection.runs.find(page).sort([("submitted_at", -1), ("_id", -1)]).limit(limit).to_list(None)
    return [head_from({**document, "error": open_error(connection.cipher, document["_id"], document.get("error"))}) for document in documents]


@store_call
async def versions(connection: Connection, workflow: str) -> list[str]:
    """The versions of a workflow that there are runs of: one entry of an index for each."""
    found: list[str] = await connection.runs.distinct("workflow.version", {"workflow.name": workflow})
    return found


ENDING = {
    EventType.RUN_COMPLETED: "completed",
    EventType.RUN_FAILED: "failed",
    EventType.RUN_DIVERGED: "diverged",
    EventType.RUN_CANCELLED: "cancelled",
}
