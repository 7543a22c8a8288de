"""Claims and leases: who may execute a run.

A claim is two writes, no transaction, because a transaction on the next key of a run that keeps appending would hold up every append of its process:
compare-and-set on the head (status, next fence, owner, new attempt id), then `attempt.started` at the tail. The rival's next append then finds its
seq taken. Whoever dies between the two only skips a fence.

Leases are a process's, not a run's: one heartbeat, whatever the number of runs, judged by the server's clock. A claimer first declares dead processes
dead; a heartbeat cannot revive one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bson import ObjectId
from pymongo.errors import BulkWriteError, DuplicateKeyError

from mongo_durable.errors import RunNotClaimable
from mongo_durable.protocol.events import ENDS, Event, EventType, RunStatus
from mongo_durable.store.connection import Connection, Session
from mongo_durable.store.documents import SCHEMA_VERSION, Document, RunHead, RunLimit, event_document, head_from
from mongo_durable.store.failpoints import FailPoint, reach
from mongo_durable.store.faults import store_call
from mongo_durable.store.heads import Lost, last_event, move_head

_PLAIN_TRIES = 3
_TRIES = 50
_NO_ATTEMPT_AFTER = frozenset({*(end.value for end in ENDS), EventType.ACTIVITIES_SUSPENDED.value})
_DUPLICATE_KEY = 11000


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to be the attempt of a run, under `head.fence`.

    Attributes:
        seq: Of this attempt's `attempt.started`; its own events follow.
        recorded: The whole history up to there, if the claimer knows it; else it is to be read.
    """

    head: RunHead
    owner: str
    attempt: ObjectId
    seq: int
    recorded: tuple[Event, ...] | None = None


@store_call
async def claim(
    connection: Connection,
    run_id: str,
    owner: str,
    *,
    workflows: Mapping[tuple[str, str], str] | None = None,
    dead_owners: Collection[str | None] = (),
    is_forced: bool = False,
    code_version: str | None = None,
) -> Claim:
    """Become the attempt of a run.

    Args:
        owner: This process.
        workflows: Only if the run is of one of these (name, version), with the code version that this process has of each; None takes any.
        dead_owners: Processes whose running runs may be taken; includes this one for runs that it does not know it has (a lost reply).
        is_forced: Take it whoever runs it: for cancel.

    Raises:
        RunNotClaimable: Somebody else has it, or it waits or has ended.

    Writes: `runs`, then `activity_events`; no transaction. Only after three lost races for the tail, a short one.
    Invariants: I1, I2.
    """
    attempt = ObjectId()
    takeable: list[dict[str, Any]] = [_DUE]
    if is_forced:
        takeable = [{"status": {"$in": [RunStatus.PENDING.value, RunStatus.READY.value, RunStatus.RUNNING.value]}}]
    elif dead_owners:
        takeable.append({"status": RunStatus.RUNNING.value, "owner": {"$in": list(dead_owners)}})
    is_crashed = {"$and": [{"$eq": ["$status", RunStatus.RUNNING.value]}, not is_forced]}
    change = {
        "status": RunStatus.RUNNING.value,
        "fence": {"$add": ["$fence", 1]},
        "owner": owner,
        "attempt": attempt,
        "claimed_at": "$$NOW",
        "crashes": {"$cond": [is_crashed, {"$add": [{"$ifNull": ["$crashes", 0]}, 1]}, 0]},
    }
    expected: dict[str, Any] = {"_id": run_id, "$or": takeable, **_READABLE}
    if workflows is not None:
        expected = {"$and": [expected, _served(list(workflows))]}
    await reach(FailPoint.CLAIM_HEAD_BEFORE)
    try:
        head = head_from(await _take(connection, expected, change, is_forced=is_forced))
    except Lost:
        raise RunNotClaimable(f"run {run_id} cannot be claimed now", run_id=run_id) from None
    await reach(FailPoint.CLAIM_HEAD_AFTER)
    if workflows is not None:
        code_version = workflows[(head.workflow, head.version)]
    data = {"owner": owner, "attempt": attempt, "code_version": code_version}
    try:
        seq = await _insert_started(connection, head, data)
    except Lost:
        raise RunNotClaimable(f"run {run_id} was claimed by another process at the same time", run_id=run_id) from None
    await reach(FailPoint.CLAIM_EVENT_AFTER)
    return Claim(head=head, owner=owner, attempt=attempt, seq=seq)


async def _take(connection: Connection, expected: Mapping[str, Any], change: Mapping[str, Any], *, is_forced: bool) -> Document:
    """Move the head, and take a place of its limit with it, if it has one and holds none yet.

    Raises:
        Lost: No head matched, or every place is taken.
    """
    if is_forced:
        return await move_head(connection, None, expected, change)
    try:
        return await move_head(connection, None, {"$and": [expected, _NEEDS_NO_PLACE]}, change)
    except Lost:
        found = await connection.runs.find_one({"$and": [expected, {"limit": {"$ne": None}, "place": None}]}, {"limit": 1})
        if found is None:
            raise
    places = RunLimit(**found["limit"]).places
    taken = {each["place"] async for each in connection.runs.find({"place": {"$in": places}}, {"place": 1})}
    for place in places:
        if place in taken:
            continue
        try:
            return await move_head(connection, None, {"$and": [expected, {"place": None}]}, {**change, "place": {"$literal": place}})
        except DuplicateKeyError:
            continue  # another run was faster
    raise Lost


async def _insert_started(connection: Connection, head: RunHead, data: Document) -> int:
    event_id = ObjectId()
    at = datetime.now(UTC)

    def document(seq: int) -> Document:
        event = Event(run_id=head.run_id, seq=seq, fence=head.fence, type=EventType.ATTEMPT_STARTED, at=at, data=data)
        return event_document(event, event_id)

    async def from_snapshot(session: Session) -> int:
        seq = _next_seq(await last_event(connection, head.run_id, session), head, event_id)
        if seq.is_mine:
            return seq.number
        await connection.activity_events.insert_one(document(seq.number), session=session)
        return seq.number

    for tried in range(_TRIES):
        await reach(FailPoint.CLAIM_EVENT_BEFORE)
        try:
            if tried >= _PLAIN_TRIES:
                # The old attempt appends without a pause: read the tail and insert on one snapshot.
                return await connection.transaction(from_snapshot)
            seq = _next_seq(await last_event(connection, head.run_id), head, event_id)
            if seq.is_mine:
                return seq.number
            # insert_many, because insert_one drops the write-concern error that comes beside a duplicate key.
            await connection.activity_events.insert_many([document(seq.number)])
            return seq.number
        except DuplicateKeyError:
            continue
        except BulkWriteError as error:
            if any(fault["code"] != _DUPLICATE_KEY for fault in (error.details or {}).get("writeErrors", [{"code": None}])):
                raise
    raise Lost


@dataclass(frozen=True, slots=True)
class _NextSeq:
    number: int
    is_mine: bool


def _next_seq(tail: Document, head: RunHead, event_id: ObjectId) -> _NextSeq:
    if tail["_id"] == event_id:
        return _NextSeq(tail["seq"], True)
    if tail["fence"] >= head.fence or tail["type"] in _NO_ATTEMPT_AFTER:
        raise Lost
    return _NextSeq(tail["seq"] + 1, False)


@store_call
async def register(connection: Connection, owner: str, lease_ms: int, description: Document) -> None:
    """Make this process known as live, with a lease from now by the server's clock."""
    await connection.runners.update_one(
        {"_id": owner},
        [
            {
                "$set": {
                    "schema_version": SCHEMA_VERSION,
                    "run_id": None,
                    "state": "live",
                    "lease_ms": lease_ms,
                    "started_at": "$$NOW",
                    "expires_at": {"$add": ["$$NOW", lease_ms]},
                    **{name: {"$literal": value} for name, value in description.items()},
                }
            }
        ],
        upsert=True,
    )


def renew(sync_runners: Any, owner: str, lease_ms: int) -> bool:
    """Extend the lease of a live process. False: it was declared dead, for ever. Synchronous, for the heartbeat's own thread and client."""
    renewed = sync_runners.update_one({"_id": owner, "state": "live"}, [{"$set": {"expires_at": {"$add": ["$$NOW", lease_ms]}}}])
    return bool(renewed.matched_count)


def unregister(sync_runners: Any, owner: str) -> None:
    """Say that this process is gone, so that its runs can be taken at once. Synchronous, like `renew`."""
    sync_runners.update_one({"_id": owner}, [{"$set": {"state": "dead", "expires_at": "$$NOW"}}])


@store_call
async def dead_owners(connection: Connection) -> list[str]:
    """Declare processes dead whose lease is over, and name every owner of a running run that is not live. 4 ms with 10,000 running runs.

    Runs of an owner without any document count as orphaned, so `runners` may be cleaned up at any time.
    """
    await connection.runners.update_many({"state": "live", "$expr": {"$lte": ["$expires_at", "$$NOW"]}}, {"$set": {"state": "dead"}})
    owners = [owner for owner in await connection.runs.distinct("owner", {"status": RunStatus.RUNNING.value}) if owner is not None]
    if not owners:
        return []
    live = {document["_id"] async for document in connection.runners.find({"_id": {"$in": owners}, "state": "live"}, {"_id": 1})}
    return [owner for owner in owners if owner not in live]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRunner:
    """A process that executes runs.

    Attributes:
        serves: Name and version of the workflows.
        seen_at: The server's clock when this was read.
    """

    owner: str
    serves: frozenset[tuple[str, str]]
    seen_at: datetime


@store_call
async def live_runners(connection: Connection) -> list[LiveRunner]:
    """Every runner whose lease is not over."""
    live = {"state": "live", "serves": {"$type": "object"}, "$expr": {"$gt": ["$expires_at", "$$NOW"]}}
    return [
        LiveRunner(owner=each["_id"], serves=frozenset((served["name"], served["version"]) for served in each["serves"]), seen_at=each["now"])
        async for each in connection.runners.find(live, {"serves": 1, "now": "$$NOW"})
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimable:
    """A run that this process could try to claim."""

    run_id: str
    workflow: str
    version: str


# A run that is queued on its thread is pending, but nobody's turn before the thread is free.
_WAITING = {"status": {"$in": [RunStatus.PENDING.value, RunStatus.READY.value]}, "is_queued": {"$ne": True}}
_DUE = {**_WAITING, "$expr": {"$lte": ["$available_at", "$$NOW"]}}

_NEEDS_NO_PLACE = {"$or": [{"limit": None}, {"place": {"$ne": None}}]}

# A newer release's run is left to processes that can read it.
_READABLE = {"schema_version": {"$lte": SCHEMA_VERSION}}


def _served(workflows: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {"$or": [{"workflow.name": name, "workflow.version": version} for name, version in workflows], **_READABLE}


@store_call
async def claimable(
    connection: Connection,
    workflows: Sequence[tuple[str, str]],
    owner: str,
    known_runs: Collection[str],
    dead: Sequence[str],
    limit: int,
    *,
    full: Sequence[str] = (),
) -> list[Claimable]:
    """Runs of these (name, version) workflows that can go on, the highest priority first, then the oldest (I9: by status alone).

    Args:
        known_runs: Runs that this process knows it executes; a run whose head names this process and that is not among them was claimed by a call
            whose reply was lost.
        dead: Owners whose runs may be taken.
        full: Keys of limits that leave no place.
    """
    served = _served(workflows)
    shown = {"workflow": 1}
    waiting: dict[str, Any] = {**_DUE, **served}
    if full:
        waiting["limit.key"] = {"$nin": list(full)}
    found = await connection.runs.find(waiting, shown).sort([("priority", -1), ("available_at", 1)]).limit(limit).to_list(None)
    orphaned = {"status": RunStatus.RUNNING.value, "owner": {"$in": [*dead, owner]}, "_id": {"$nin": list(known_runs)}, **served}
    found += await connection.runs.find(orphaned, shown).limit(limit).to_list(None)
    return [Claimable(run_id=each["_id"], workflow=each["workflow"]["name"], version=each["workflow"]["version"]) for each in found]
