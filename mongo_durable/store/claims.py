"""Claims and leases: who may execute a run.

A claim is two writes, no transaction, because a transaction on the next key of a run that keeps appending would hold up every append of its process:
compare-and-set on the head (status, next fence, owner, new attempt id), then `attempt.started` at the tail. The rival's next append then finds its
seq taken. Whoever dies between the two only skips a fence. The tail is the last event of the history, which the attempt needs anyway: that is read
once, between the two.

Where a transaction makes a run claimable and its process would claim it at once, it begins the attempt itself: `claim_within`.

Leases are a process's, not a run's: one heartbeat, whatever the number of runs, judged by the server's clock. A claimer first declares dead processes
dead; a heartbeat cannot revive one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from bson import ObjectId
from pymongo.errors import BulkWriteError, DuplicateKeyError

from mongo_durable.errors import DurableError, RunNotClaimable, StoreError
from mongo_durable.protocol.events import ENDS, Event, EventType, RunStatus
from mongo_durable.store.connection import Connection, Session
from mongo_durable.store.documents import SCHEMA_VERSION, Document, RunHead, RunLimit, event_document, head_from
from mongo_durable.store.events import from_documents, read_documents, read_history
from mongo_durable.store.failpoints import FailPoint, reach
from mongo_durable.store.faults import is_duplicate, no_driver_errors, store_call
from mongo_durable.store.heads import NEWS, NOT_RUNNING, Lost, last_event, move_head

_PLAIN_TRIES = 3
_TRIES = 50
_NO_ATTEMPT_AFTER = frozenset({*(end.value for end in ENDS), EventType.ACTIVITIES_SUSPENDED.value})
_FIRST_PAUSE_MS = 500
_LONGEST_PAUSE_MS = 60_000
_MOST_TROUBLES = 20  # far past the longest pause; the power of 2 stays small


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to be the attempt of a run, under `head.fence`.

    Attributes:
        seq: Of this attempt's `attempt.started`; its own events follow.
        documents: The whole history up to there, as it was read or is written, if the claim has it. `history` takes it out.
    """

    head: RunHead
    owner: str
    attempt: ObjectId
    seq: int
    documents: list[Document] = field(default_factory=list, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimer:
    """A process that would execute a run itself.

    Attributes:
        owner: The process.
        workflow: Name and version of what it executes.
        code_version: That it has of it.
    """

    owner: str
    workflow: tuple[str, str]
    code_version: str | None = None


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
        StoreError: The history could not be read or written; the run is given back if the store can be reached, and the head says why.

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
    # An attempt that was held back has said nothing about those before it.
    is_held_back = {"$ne": [{"$ifNull": ["$held_back", None]}, None]}
    known = {"$ifNull": ["$crashes", 0]}
    crashes = {"$cond": [is_crashed, {"$add": [known, 1]}, {"$cond": [is_held_back, known, 0]}]}
    change = {**_begun(owner, attempt), "crashes": crashes}
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
    try:
        with no_driver_errors():
            seq, documents = await _insert_started(connection, head, code_version)
    except Lost:
        raise RunNotClaimable(f"run {run_id} was claimed by another process at the same time", run_id=run_id) from None
    except DurableError as error:
        # Should the start land yet, it is one of an attempt that did nothing: the next claim's fence is higher, and stands behind it.
        with suppress(StoreError):  # then it is for the process to give the run back, which knows from the first error that it may have it
            await _give_back(connection, as_attempt(head), held_back=f"{type(error).__name__}: {error}")
        raise
    await reach(FailPoint.CLAIM_EVENT_AFTER)
    return Claim(head=head, owner=owner, attempt=attempt, seq=seq, documents=documents)


def _begun(owner: str, attempt: ObjectId) -> Document:
    """What becomes of the head when a process becomes the run's attempt."""
    return {
        "status": RunStatus.RUNNING.value,
        "fence": {"$add": ["$fence", 1]},
        "owner": owner,
        "attempt": attempt,
        "claimed_at": "$$NOW",
        "crashes": 0,
    }


def started(head: RunHead, seq: int, code_version: str | None) -> Event:
    """The event that begins the attempt which the head names."""
    data = {"owner": head.owner, "attempt": head.attempt, "code_version": code_version}
    return Event(run_id=head.run_id, seq=seq, fence=head.fence, type=EventType.ATTEMPT_STARTED, at=datetime.now(UTC), data=data)


async def claim_within(
    connection: Connection, session: Session, claimer: Claimer, expected: Mapping[str, Any], change: Mapping[str, Any], seq: int
) -> tuple[Claim, Event] | None:
    """Become the attempt of a run in the transaction that makes it claimable.

    Only the plain case: a run that has to be ended or that needs a place of its limit, or one of another workflow, is left to whoever claims it.

    Args:
        expected: What the run must be, as a filter that leaves it at rest and without a place.
        change: What else becomes of the head.
        seq: Of `attempt.started`.

    Returns:
        The claim, and the event that the caller inserts; None where the case is another one, and nothing was written.
    """
    attempt = ObjectId()
    plain = {"$and": [dict(expected), _served([claimer.workflow]), {"limit": None, "cancel": None}]}
    try:
        head = head_from(await move_head(connection, session, plain, {**_begun(claimer.owner, attempt), **change}))
    except Lost:
        return None
    return Claim(head=head, owner=claimer.owner, attempt=attempt, seq=seq), started(head, seq, claimer.code_version)


@store_call
async def history(connection: Connection, claimed: Claim) -> list[Event]:
    """The history of a claimed run up to the start of this attempt, with large values brought in. Unless the claim has it, it is read: one query,
    whatever its length.

    Raises:
        CorruptHistory: There is a hole.
    """
    run_id = claimed.head.run_id
    documents = claimed.documents.copy()
    claimed.documents.clear()  # the claim lives as long as its attempt
    if not documents:
        return await read_history(connection, run_id, up_to=claimed.seq)
    return await from_documents(connection, run_id, documents)


def as_attempt(head: RunHead) -> dict[str, Any]:
    """Filter: the run is still the attempt's that this head names."""
    return {"_id": head.run_id, "fence": head.fence, "status": RunStatus.RUNNING.value, "attempt": head.attempt}


@store_call
async def release(connection: Connection, claimed: Claim, *, until: datetime | None = None, held_back: str | None = None) -> None:
    """Give the run back: another attempt may start. The channel must be drained. Does nothing if the run is no longer this attempt's.

    Args:
        until: Not before this time; None: at once.
        held_back: Why the run could not be executed. It then waits longer each time, up to a minute, and says why.
    """
    await _give_back(connection, as_attempt(claimed.head), until, held_back)


@store_call
async def give_up(connection: Connection, run_id: str, owner: str) -> None:
    """Give a run back that this process executes nowhere and may have all the same: the answer to what took it did not arrive. Does nothing if it has
    not."""
    await _give_back(connection, {"_id": run_id, "status": RunStatus.RUNNING.value, "owner": owner})


async def _give_back(connection: Connection, expected: Mapping[str, Any], until: datetime | None = None, held_back: str | None = None) -> None:
    available_at: Any = {"$literal": until} if until is not None else "$$NOW"
    change: Document = {**NOT_RUNNING, **NEWS, "status": RunStatus.READY.value, "held_back": {"$literal": held_back}}
    if held_back is not None:
        troubles = {"$ifNull": ["$troubles", 0]}
        pause_ms = {"$min": [_LONGEST_PAUSE_MS, {"$multiply": [_FIRST_PAUSE_MS, {"$pow": [2, troubles]}]}]}
        available_at = {"$add": ["$$NOW", pause_ms]}
        change["troubles"] = {"$min": [{"$add": [troubles, 1]}, _MOST_TROUBLES]}
    await reach(FailPoint.RELEASE_BEFORE)
    try:
        await move_head(connection, None, expected, {**change, "available_at": available_at})
    except Lost:
        return
    await reach(FailPoint.RELEASE_AFTER)


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


async def _insert_started(connection: Connection, head: RunHead, code_version: str | None) -> tuple[int, list[Document]]:
    """Begin the attempt behind the history. Returns the beginning's seq, and the history up to there if it was read."""
    run_id, event_id = head.run_id, ObjectId()
    known: list[Document] = []

    def document(seq: int) -> Document:
        return event_document(started(head, seq, code_version), event_id)

    async def from_snapshot(session: Session) -> int:
        seq = _next_seq(await last_event(connection, run_id, session), head, event_id)
        if not seq.is_mine:
            await connection.activity_events.insert_one(document(seq.number), session=session)
        return seq.number

    for tried in range(_TRIES):
        await reach(FailPoint.CLAIM_EVENT_BEFORE)
        try:
            if tried >= _PLAIN_TRIES:
                # The old attempt appends without a pause: read the tail and insert on one snapshot.
                return await connection.transaction(from_snapshot), []
            known += await read_documents(connection, run_id, after=known[-1]["seq"] if known else 0)
            if not known:
                raise Lost
            seq = _next_seq(known[-1], head, event_id)
            if not seq.is_mine:
                # insert_many, because insert_one drops the write-concern error that comes beside a duplicate key.
                beginning = document(seq.number)
                await connection.activity_events.insert_many([beginning])
                known.append(beginning)
            return seq.number, known
        except DuplicateKeyError:
            continue
        except BulkWriteError as error:
            # Without an error of the document there is one of the write concern: the next read says whether it stands.
            if (error.details or {}).get("writeErrors") and not is_duplicate(error):
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
