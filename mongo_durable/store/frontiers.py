"""Frontiers and resolutions: suspend, resolve, expire. Each is one transaction that writes the head first and the event last.

After a suspension nothing but what the head serialises can write to the run, so the answer's event stands at the frontier's seq + 1: no tail is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from pymongo.errors import DuplicateKeyError

from mongo_durable import telemetry
from mongo_durable.errors import (
    CorruptHistory,
    FrontierExpired,
    IncompleteResolution,
    ResolutionConflict,
    RunNotFound,
    RunNotSuspended,
    StaleGeneration,
    Superseded,
    UnknownActivity,
)
from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.events import Event, EventType, FrontierStatus, RunStatus
from mongo_durable.protocol.frontier import UNANSWERED, FrontierEntry, frontier_digest, in_position_order
from mongo_durable.protocol.memory import MemoryEntry
from mongo_durable.store import heads, memory
from mongo_durable.store.appender import Channel
from mongo_durable.store.claims import Claim, Claimer, as_attempt, claim_within
from mongo_durable.store.connection import Connection, Session
from mongo_durable.store.documents import (
    SCHEMA_VERSION,
    SOMEBODY,
    Answerer,
    Document,
    Resolution,
    StoredFrontier,
    check_version,
    entry_document,
    entry_from,
    frontier_id,
    resolution_from,
)
from mongo_durable.store.failpoints import FailPoint, reach
from mongo_durable.store.faults import store_call
from mongo_durable.store.heads import NEWS, NOT_RUNNING, Lost, insert_event, insert_events, milliseconds, move_head
from mongo_durable.store.payloads import bring_in, move_out_all, move_out_each
from mongo_durable.store.sealing import require_open, seal


@store_call
async def suspend(
    connection: Connection,
    claimed: Claim,
    channel: Channel,
    entries: Sequence[FrontierEntry],
    unsaved: Sequence[MemoryEntry] = (),
) -> StoredFrontier:
    """Suspend the run on the frontier given by `entries`, all of them or none. The channel must be drained, or handed over.

    A call whose commit was not acknowledged may be repeated: if the frontier is this attempt's, it is returned.

    Args:
        unsaved: Entries of the conversation since the last suspension.

    Raises:
        Superseded: The attempt is no longer the run's.

    Writes: `runs`, `frontiers`, `memory`, `activity_events` in one transaction; the body may run more than once. Payload chunks before it.
    Invariants: I2, I5, I10.
    """
    head = claimed.head
    run_id, generation = head.run_id, head.generation + 1
    ordered = in_position_order(entries)
    values = await move_out_all(connection, run_id, [entry.value for entry in ordered])
    defaults = [None if entry.default is UNANSWERED else seal(connection.cipher, run_id, entry.default) for entry in ordered]
    whole = frontier_digest(ordered)
    remembered = await memory.documents(connection, head, unsaved)
    document: Document = {
        "_id": frontier_id(run_id, generation),
        "run_id": run_id,
        "schema_version": SCHEMA_VERSION,
        "workflow": head.workflow,
        "thread_id": head.thread_id,
        "generation": generation,
        "status": FrontierStatus.OPEN.value,
        "seq": channel.seq + 1,
        "fence": channel.fence,
        "attempt": claimed.attempt,
        "digest": whole,
    }

    async def body(session: Session) -> Document:
        moved = await move_head(
            connection,
            session,
            as_attempt(claimed.head),
            {
                **NOT_RUNNING,
                "status": RunStatus.SUSPENDED.value,
                "generation": generation,
                "suspended_at": "$$NOW",
                "available_at": _earliest_deadline(ordered),
                "troubles": 0,
            },
        )
        await reach(FailPoint.SUSPEND_INSIDE)
        opened_at = moved["suspended_at"]  # the server's clock
        dated = [_dated(entry, opened_at) for entry in ordered]
        opened = {
            **document,
            "entries": [entry_document(entry, value, default) for entry, value, default in zip(dated, values, defaults, strict=True)],
            "opened_at": opened_at,
            "expires_at": moved["available_at"],
        }
        await connection.frontiers.insert_one(opened, session=session)
        await memory.save(connection, session, remembered)
        data = {"generation": generation, "digest": whole, "entries": [_listed(entry) for entry in dated]}
        event = Event(run_id=run_id, seq=channel.seq + 1, fence=channel.fence, type=EventType.ACTIVITIES_SUSPENDED, data=data)
        await insert_event(connection, session, event, channel.carried_documents)
        return opened

    await reach(FailPoint.SUSPEND_BEFORE)
    try:
        stored = await connection.transaction(body)
    except (Lost, DuplicateKeyError):
        # Lost, or mine already: the frontier that is there says which.
        stored = await connection.frontiers.find_one({"_id": document["_id"]})
        if stored is None or stored["attempt"] != claimed.attempt:
            superseded = Superseded(f"run {run_id}: attempt {head.fence} is no longer the run's attempt", run_id=run_id)
            channel.end(superseded)
            raise superseded from None
    channel.settle_carried()
    await reach(FailPoint.SUSPEND_AFTER)
    return await _from_document(connection, stored)


def _earliest_deadline(entries: Sequence[FrontierEntry]) -> Any:
    """An expression for the time at which the first of the entries is due, or None. One that was asked before keeps the deadline that it had."""
    known: list[Any] = [{"$literal": entry.expires_at} for entry in entries if entry.expires_at is not None]
    new = [entry.expires_in for entry in entries if entry.expires_at is None and entry.expires_in is not None]
    if new:
        known.append({"$add": ["$$NOW", milliseconds(min(new))]})
    return {"$min": known} if known else None


def _dated(entry: FrontierEntry, opened_at: datetime) -> FrontierEntry:
    """The entry with its times. One that was asked before keeps those that it had."""
    if entry.expires_at is None and entry.expires_in is not None:
        entry = replace(entry, expires_at=opened_at + entry.expires_in)
    if entry.escalates_at is None and entry.audience is not None and entry.audience.after is not None:
        entry = replace(entry, escalates_at=opened_at + entry.audience.after)
    return entry


def _listed(entry: FrontierEntry) -> Document:
    """What the event of a suspension says of an entry."""
    listed = {
        "activity_id": entry.activity_id,
        "position": entry.position.text,
        "kind": entry.kind.value,
        "name": entry.name,
        "digest": entry.digest,
    }
    times = {"expires_at": entry.expires_at, "escalates_at": entry.escalates_at}
    return listed | {name: time for name, time in times.items() if time is not None}


async def _from_document(connection: Connection, document: Mapping[str, Any]) -> StoredFrontier:
    check_version(document)
    run_id, entries = document["run_id"], document["entries"]
    values = await bring_in(connection, run_id, [entry["value"] for entry in entries])
    defaults = await bring_in(connection, run_id, [entry.get("default") for entry in entries])
    return StoredFrontier(
        run_id=run_id,
        workflow=document["workflow"],
        thread_id=document["thread_id"],
        generation=document["generation"],
        status=FrontierStatus(document["status"]),
        seq=document["seq"],
        fence=document["fence"],
        attempt=document["attempt"],
        entries=tuple(entry_from(*each) for each in zip(entries, values, defaults, strict=True)),
        digest=document["digest"],
        opened_at=document["opened_at"],
        expires_at=document["expires_at"],
    )


@store_call
async def get(connection: Connection, run_id: str, generation: int) -> StoredFrontier | None:
    """One frontier, or None if the run never opened it."""
    document = await connection.frontiers.find_one({"_id": frontier_id(run_id, generation)})
    return await _from_document(connection, document) if document is not None else None


@store_call
async def open_frontiers(
    connection: Connection,
    *,
    workflow: str | None = None,
    thread_id: str | None = None,
    run_id: str | None = None,
    audience: str | None = None,
    limit: int = 1000,
    after: heads.Cursor | None = None,
) -> list[StoredFrontier]:
    """Frontiers that wait for answers, oldest first; of an audience, those with a question that it is asked now.

    Args:
        after: Where the page before ended.
    """
    wanted: dict[str, Any] = {"status": FrontierStatus.OPEN.value}
    if workflow is not None:
        wanted["workflow"] = workflow
    if run_id is not None:
        wanted["run_id"] = run_id
    if thread_id is not None:
        # Only the run that holds a thread can be suspended.
        thread = await connection.threads.find_one({"_id": thread_id}, {"active_run": 1})
        if thread is None or thread["active_run"] is None or run_id not in (None, thread["active_run"]):
            return []
        wanted["run_id"] = thread["active_run"]
    if audience is not None:
        escalated = {"$elemMatch": {"escalates_to": audience, "escalates_at": {"$lte": await connection.server_time()}}}
        # Not an `$or` at this level: see `heads.paged`.
        wanted["$and"] = [{"$or": [{"entries.audience": audience}, {"entries": escalated}]}]
    page = heads.paged([wanted], "opened_at", after, is_newest_first=False)
    documents = await connection.frontiers.find(page).sort([("opened_at", 1), ("_id", 1)]).limit(limit).to_list(None)
    return [await _from_document(connection, document) for document in documents]


@store_call
async def resolve(
    connection: Connection,
    frontier: StoredFrontier,
    answers: Mapping[str, Any],
    answerer: Answerer = SOMEBODY,
) -> Resolution:
    """Record all answers of a frontier at once. When this returns they are majority-committed and the run can go on (I10).

    Args:
        frontier: As read; its entries never change.
        answers: Plain value by activity id, already validated.

    Returns:
        The receipt; the same answers again give the same one.

    Raises:
        UnknownActivity, IncompleteResolution: The answers are not exactly the frontier's.
        ResolutionConflict: Other answers were first.
        FrontierExpired, StaleGeneration, RunNotSuspended: The frontier is not open any more.
        DecryptionFailed: The questions are encrypted, and this process cannot read them: its answers would be stored in the clear.

    Writes: `runs`, `frontiers`, `resolutions`, `activity_events` in one transaction; the body may run more than once.
    Invariants: I6, I10.
    """
    receipt, _ = await _resolve(connection, frontier, answers, answerer, None)
    return receipt


@store_call
async def resolve_and_claim(
    connection: Connection, frontier: StoredFrontier, answers: Mapping[str, Any], answerer: Answerer, claimer: Claimer
) -> Claim | None:
    """The same for a process that executes the run itself: its attempt begins in the same transaction.

    Returns:
        The claim; None where the answers are recorded and the run is to be claimed: it needs more than the plain claim, or the answers were there
        already.

    Raises:
        ResolutionError, RunError: See `resolve`.

    Invariants: I1, I2, I6, I10.
    """
    _, claimed = await _resolve(connection, frontier, answers, answerer, claimer)
    return claimed


async def _resolve(
    connection: Connection, frontier: StoredFrontier, answers: Mapping[str, Any], answerer: Answerer, claimer: Claimer | None
) -> tuple[Resolution, Claim | None]:
    require_open(frontier.run_id, [entry.value for entry in frontier.entries])
    check_complete(frontier, answers)
    answers_digest = digest(dict(answers))
    stored = await move_out_each(connection, frontier.run_id, answers)

    async def body(session: Session) -> tuple[Document, Claim | None]:
        begun = await _begin(connection, session, frontier, claimer) if claimer is not None else None
        if begun is None:
            return await accept(connection, session, frontier, stored, answers_digest, answerer.document), None
        claimed, beginning = begun
        now = claimed.head.available_at
        return await _answer(connection, session, frontier, now, stored, answers_digest, answerer.document, beginning), claimed

    claimed = None
    await reach(FailPoint.RESOLVE_BEFORE)
    try:
        document, claimed = await connection.transaction(body)
        receipt = resolution_from(document)
        measure_age(frontier, FrontierStatus.RESOLVED, receipt.resolved_at)
    except (Lost, DuplicateKeyError):
        receipt = await why_lost(connection, frontier, answers_digest)
    await reach(FailPoint.RESOLVE_AFTER)
    return receipt, claimed


IN_TIME = {"$or": [{"$eq": ["$expires_at", None]}, {"$gt": ["$expires_at", "$$NOW"]}]}
"""An expression that holds for a frontier whose deadline has not passed."""


async def accept(
    connection: Connection, session: Session, frontier: StoredFrontier, stored: Mapping[str, Any], answers_digest: str, signature: Mapping[str, Any]
) -> Document:
    """What a transaction that answers a frontier does to the run. Returns the resolution.

    Args:
        stored: Value or reference by activity id.
        signature: Who answered: resolved_by, note, channel; of a draft also answered_by.

    Raises:
        Lost: The frontier takes no answer any more.
    """
    head = await _make_ready(connection, session, frontier, FailPoint.RESOLVE_INSIDE)
    return await _answer(connection, session, frontier, head["available_at"], stored, answers_digest, signature)


async def _answer(
    connection: Connection,
    session: Session,
    frontier: StoredFrontier,
    now: datetime | None,
    stored: Mapping[str, Any],
    answers_digest: str,
    signature: Mapping[str, Any],
    *beginning: Event,
) -> Document:
    """Close the frontier with these answers, after the head. Returns the resolution.

    Args:
        now: The server's clock.
        beginning: Of the attempt that starts with the answers, if it does.
    """
    await _close(connection, session, frontier, FrontierStatus.RESOLVED, IN_TIME)
    resolution: Document = {
        "_id": frontier.id,
        "run_id": frontier.run_id,
        "schema_version": SCHEMA_VERSION,
        "generation": frontier.generation,
        "seq": frontier.seq + 1,
        "answers": dict(stored),
        "answers_digest": answers_digest,
        **signature,
        "at": now,
    }
    await connection.resolutions.insert_one(resolution, session=session)
    data = {"generation": frontier.generation, "answers": resolution["answers"], **signature}
    event = Event(run_id=frontier.run_id, seq=frontier.seq + 1, fence=frontier.fence, type=EventType.ACTIVITIES_RESOLVED, data=data)
    await insert_events(connection, session, [event, *beginning])
    return resolution


def measure_age(frontier: StoredFrontier, status: FrontierStatus, closed_at: datetime | None) -> None:
    """Tell telemetry how long the frontier was open."""
    if frontier.opened_at is not None and closed_at is not None:
        telemetry.measure("frontier.age", (closed_at - frontier.opened_at).total_seconds(), status=status.value)


async def _make_ready(connection: Connection, session: Session, frontier: StoredFrontier, inside: FailPoint) -> Document:
    """The run goes on from the frontier that it is suspended on. The head first, as always."""
    change = {**NEWS, "status": RunStatus.READY.value, "available_at": "$$NOW"}
    head = await move_head(connection, session, _suspended_on(frontier), change)
    await reach(inside)
    return head


async def _begin(connection: Connection, session: Session, frontier: StoredFrontier, claimer: Claimer) -> tuple[Claim, Event] | None:
    """The same, and `claimer` is its attempt at once; None where the run has to be claimed instead."""
    # Behind the frontier stand the answers, and then the attempt's start.
    begun = await claim_within(connection, session, claimer, _suspended_on(frontier), {"available_at": "$$NOW"}, frontier.seq + 2)
    if begun is not None:
        await reach(FailPoint.RESOLVE_INSIDE)
    return begun


def _suspended_on(frontier: StoredFrontier) -> dict[str, Any]:
    return {"_id": frontier.run_id, "status": RunStatus.SUSPENDED.value, "generation": frontier.generation}


async def _close(connection: Connection, session: Session, frontier: StoredFrontier, status: FrontierStatus, condition: Mapping[str, Any]) -> None:
    """The frontier is open, and `condition` (an expression) holds for it: it becomes `status`.

    Raises:
        Lost: It is not so.
    """
    expected = {"_id": frontier.id, "status": FrontierStatus.OPEN.value, "$expr": condition}
    closed = await connection.frontiers.update_one(expected, [{"$set": {"status": status.value, "closed_at": "$$NOW"}}], session=session)
    if closed.matched_count != 1:
        raise Lost


def check_complete(frontier: StoredFrontier, answers: Mapping[str, Any]) -> None:
    """All of the frontier's questions have an answer, and nothing else has.

    Raises:
        UnknownActivity, IncompleteResolution: It is not so.
    """
    asked = [entry.activity_id for entry in frontier.entries]
    extra = [each for each in answers if each not in asked]
    missing = [each for each in asked if each not in answers]
    if extra and len(extra) == len(answers):
        raise UnknownActivity(
            f"run {frontier.run_id}: none of the answered activity ids is in its open frontier (generation {frontier.generation})",
            run_id=frontier.run_id,
            activity_ids=extra,
        )
    if missing or extra:
        raise IncompleteResolution(
            f"run {frontier.run_id}: a frontier is answered whole; missing: {', '.join(missing) or 'none'}; not in it: {', '.join(extra) or 'none'}",
            run_id=frontier.run_id,
            missing=missing,
            extra=extra,
        )


async def why_lost(connection: Connection, frontier: StoredFrontier, answers_digest: str) -> Resolution:
    """The receipt of the same answers, if they were recorded, or the error that says why these were not.

    Classify inside a transaction that commits with majority: a plain majority read may not see the winner yet."""
    run_id, generation = frontier.run_id, frontier.generation

    async def body(session: Session) -> tuple[Document | None, Document | None, Document | None]:
        return (
            await connection.resolutions.find_one({"_id": frontier.id}, session=session),
            await connection.frontiers.find_one({"_id": frontier.id}, session=session),
            await connection.runs.find_one({"_id": run_id}, session=session),
        )

    resolution, stored, head = await connection.transaction(body)
    is_waiting = head is not None and head["status"] == RunStatus.SUSPENDED.value and head["generation"] == generation
    if is_waiting and resolution is not None and stored is not None and stored["status"] == FrontierStatus.OPEN.value:
        raise CorruptHistory(
            f"run {run_id}: generation {generation} is open, with a resolution beside it that somebody has inserted by hand: remove it, and answer",
            run_id=run_id,
        )
    if resolution is not None:
        if resolution["answers_digest"] == answers_digest:
            return resolution_from(resolution)
        raise ResolutionConflict(f"run {run_id}: generation {generation} was answered before with other answers; the first ones stand", run_id=run_id)
    if head is None or stored is None:
        raise RunNotFound(f"run {run_id} or its frontier {generation} is gone", run_id=run_id)
    is_past = stored["status"] == FrontierStatus.OPEN.value and stored["expires_at"] is not None and head["status"] == RunStatus.SUSPENDED.value
    if is_past or stored["status"] == FrontierStatus.EXPIRED.value:
        deadline = min(each for each in (stored["expires_at"], head.get("deadline_at")) if each is not None)  # its own, or the run's
        raise FrontierExpired(f"run {run_id}: generation {generation} passed its deadline at {deadline:%Y-%m-%d %H:%M:%SZ}", run_id=run_id)
    if is_waiting:
        raise CorruptHistory(
            f"run {run_id}: generation {generation} can take no answer: an event stands behind it already", run_id=run_id, seq=frontier.seq + 1
        )
    if head["generation"] != generation:
        raise StaleGeneration(
            f"run {run_id} is at generation {head['generation']}, the answers are for {generation}",
            run_id=run_id,
            expected=generation,
            found=head["generation"],
        )
    raise RunNotSuspended(f"run {run_id} is {head['status']} and waits for no answer", run_id=run_id, status=head["status"])


@store_call
async def receipt(connection: Connection, run_id: str, generation: int, answers_digest: str) -> Resolution | None:
    """The receipt of exactly these answers to a frontier that is answered, or None."""
    document = await connection.resolutions.find_one({"_id": frontier_id(run_id, generation), "answers_digest": answers_digest})
    return resolution_from(document) if document is not None else None


@store_call
async def expire(connection: Connection, frontier: StoredFrontier, answers: Mapping[str, Any], unanswered: Sequence[str] = ()) -> bool:
    """Close a frontier that is past its deadline. Exactly one process does it; False says that it was not this one.

    Args:
        answers: The declared default, by activity id, of each entry that is due and has one.
        unanswered: Those that are due and have none. Entries that are in neither are asked again by the next attempt.

    Writes: `runs`, `frontiers`, `activity_events` in one transaction.
    Invariants: I6.
    """
    stored = await move_out_each(connection, frontier.run_id, answers)

    async def body(session: Session) -> datetime:
        head = await _make_ready(connection, session, frontier, FailPoint.EXPIRE_INSIDE)
        past = {"$and": [{"$ne": ["$expires_at", None]}, {"$lte": ["$expires_at", "$$NOW"]}]}
        await _close(connection, session, frontier, FrontierStatus.EXPIRED, past)
        event = Event(
            run_id=frontier.run_id,
            seq=frontier.seq + 1,
            fence=frontier.fence,
            type=EventType.FRONTIER_EXPIRED,
            data={"generation": frontier.generation, "answers": stored, "unanswered": list(unanswered)},
        )
        await insert_event(connection, session, event)
        expired_at: datetime = head["available_at"]
        return expired_at

    await reach(FailPoint.EXPIRE_BEFORE)
    try:
        measure_age(frontier, FrontierStatus.EXPIRED, await connection.transaction(body))
    except (Lost, DuplicateKeyError):
        return False
    await reach(FailPoint.EXPIRE_AFTER)
    return True


@store_call
async def current(connection: Connection, run_id: str) -> StoredFrontier:
    """The newest frontier of a run, open or not.

    Raises:
        RunNotFound, RunNotSuspended: There is none.
    """
    return await _current(connection, run_id, await connection.frontiers.find_one({"run_id": run_id}, sort=[("generation", -1)]))


@store_call
async def current_of_thread(connection: Connection, thread_id: str) -> StoredFrontier | None:
    """The newest frontier of the run that is live on a thread, open or not; None if no run is. One command.

    Raises:
        RunNotSuspended: That run has none.
    """
    newest: list[Document] = [{"$sort": {"generation": -1}}, {"$limit": 1}]
    joined: Document = {"from": "frontiers", "localField": "active_run", "foreignField": "run_id", "pipeline": newest, "as": "newest"}
    live: list[Document] = [{"$match": {"_id": thread_id, "active_run": {"$ne": None}}}, {"$project": {"active_run": 1}}, {"$lookup": joined}]
    found = await connection.aggregate(connection.threads, live)
    if not found:
        return None
    (thread,) = found
    return await _current(connection, thread["active_run"], thread["newest"][0] if thread["newest"] else None)


async def _current(connection: Connection, run_id: str, document: Document | None) -> StoredFrontier:
    if document is None:
        head = await heads.get(connection, run_id)
        raise RunNotSuspended(f"run {run_id} is {head.status} and waits for no answer", run_id=run_id, status=str(head.status))
    return await _from_document(connection, document)
