"""The beginning and the end of a run: submit, end, retry, cancel. Each is one transaction or one compare-and-set on the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from bson import ObjectId
from pymongo import ReturnDocument
from pymongo.errors import DuplicateKeyError

from mongo_durable.errors import CorruptHistory, RunConflict, RunError, RunNotClaimable, Superseded, ThreadBusy
from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.events import Event, EventType, FrontierStatus, RunStatus
from mongo_durable.protocol.history import fold
from mongo_durable.protocol.memory import MemoryEntry
from mongo_durable.store import heads, memory
from mongo_durable.store.appender import Channel
from mongo_durable.store.claims import Claim, as_attempt, claim, history, started
from mongo_durable.store.connection import Connection, Session
from mongo_durable.store.documents import SCHEMA_VERSION, Document, RunHead, RunLimit, check_version, event_document, frontier_id, head_from
from mongo_durable.store.failpoints import FailPoint, reach
from mongo_durable.store.faults import store_call
from mongo_durable.store.heads import NEWS, NOT_ENDED, NOT_RUNNING, Lost, free_thread, insert_event, last_event, milliseconds, move_head
from mongo_durable.store.payloads import assemble, move_out, move_out_all
from mongo_durable.store.sealing import open_sealed, require_open, seal_error

PAST_DEADLINE = "RunDeadlineExceeded"
"""Type of the recorded error of a run that had not ended at its deadline."""

PARKED = "RunParked"
"""Type of the recorded error of a run whose attempts kept killing their processes."""

_CANCEL_TRIES = 50
_SERVER_TIMES = frozenset({"available_at", "submitted_at", "claimed_at", "deadline_at"})
_NO_VERSION = -1  # matches no document, so that an upsert always inserts


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a run starts from.

    Attributes:
        thread_id: The conversation; a run without one has a thread of its own, named like the run.
        input: Plain value (see `protocol.values`).
        settings: Plain value: configuration that every attempt needs.
        topology: Digest of the graph's nodes and edges, where it is known; for people who look into a divergence.
        priority: Higher goes first.
        available_at: Not to be executed before this time, or this long from now by the server's clock; None: at once.
        deadline: When the run fails if it has not ended, likewise; None: never.
        limit: How many like it may be executed at once.
    """

    run_id: str
    workflow: str
    version: str
    thread_id: str
    input: Any
    settings: Any = None
    topology: str | None = None
    priority: int = 0
    available_at: datetime | timedelta | None = None
    deadline: datetime | timedelta | None = None
    limit: RunLimit | None = None


@store_call
async def submit(
    connection: Connection,
    submission: Submission,
    *,
    owner: str | None = None,
    code_version: str | None = None,
    is_queued_when_busy: bool = False,
) -> Claim | RunHead:
    """Accept a run: when this returns it is majority-committed and will be executed (I10).

    Args:
        owner: The process that executes the run itself: then the first attempt starts in the same transaction, and its claim is returned.
        is_queued_when_busy: If another run is live on the thread, the run waits for its end instead of being refused.

    Returns:
        The claim, if `owner` is given and the run is new and not queued; else the head. The same `run_id` again is the same run.

    Raises:
        RunConflict: The `run_id` is taken by another run (other workflow, version, thread or input).
        ThreadBusy: Another run is live on the thread.

    Writes: `runs`, `threads`, `activity_events` in one transaction; the body may run more than once.
    Invariants: I1, I10.
    """
    run_id = submission.run_id
    input_digest = digest(submission.input)
    stored_input, stored_settings = await move_out_all(connection, run_id, [submission.input, submission.settings])
    workflow = {"name": submission.workflow, "version": submission.version, "topology": submission.topology}
    attempt = ObjectId()

    async def body(session: Session) -> tuple[RunHead, list[Document]]:
        thread = await _take_thread(connection, session, submission, is_queued_when_busy=is_queued_when_busy)
        await reach(FailPoint.SUBMIT_INSIDE)
        head = _new_head(submission, workflow, stored_input, stored_settings, input_digest)
        turn = {"turn": None, "base_turn": None}
        if thread is None:
            head |= {"is_queued": True}
        else:
            turn = {"turn": thread["turn"], "base_turn": thread["committed_turn"]}
            head |= turn
            if owner is not None:
                head |= {"status": RunStatus.RUNNING.value, "fence": 1, "owner": owner, "attempt": attempt, "claimed_at": "$$NOW"}
        created = head_from(await _create_head(connection, session, head))
        now = datetime.now(UTC)
        data = {"workflow": workflow, "thread_id": submission.thread_id, **turn}
        events = [Event(run_id=run_id, seq=1, fence=0, type=EventType.RUN_SUBMITTED, at=now, value=stored_input, data=data)]
        if created.owner is not None:
            events.append(started(created, 2, code_version))
        documents = [event_document(event, ObjectId()) for event in events]
        await connection.activity_events.insert_many(documents, session=session)
        return created, documents

    await reach(FailPoint.SUBMIT_BEFORE)
    try:
        head, documents = await connection.transaction(body)
    except DuplicateKeyError:
        return await _existing(connection, submission, input_digest)
    await reach(FailPoint.SUBMIT_AFTER)
    if head.owner is None:
        return head
    documents[0]["value"] = submission.input  # it need not be brought in again
    return Claim(head=head, owner=head.owner, attempt=attempt, seq=2, documents=documents)


def _new_head(submission: Submission, workflow: Document, stored_input: Any, stored_settings: Any, input_digest: str) -> Document:
    optional: Document = {}
    if submission.deadline is not None:
        optional["deadline_at"] = _server_time(submission.deadline)
    if submission.limit is not None:
        optional["limit"] = {"key": submission.limit.key, "running": submission.limit.running}
    return {
        "run_id": submission.run_id,
        "schema_version": SCHEMA_VERSION,
        "status": RunStatus.PENDING.value,
        "fence": 0,
        "attempt": None,
        "owner": None,
        "generation": 0,
        "workflow": workflow,
        "thread_id": submission.thread_id,
        "turn": 0,
        "base_turn": 0,
        "input": stored_input,
        "input_digest": input_digest,
        "settings": stored_settings,
        "output": None,
        "error": None,
        "priority": submission.priority,
        "available_at": _server_time(submission.available_at or timedelta()),
        "submitted_at": "$$NOW",
        **optional,
    }


def _server_time(when: datetime | timedelta) -> Any:
    """An expression for a point in time; a duration counts from now by the server's clock."""
    return {"$literal": when} if isinstance(when, datetime) else {"$add": ["$$NOW", milliseconds(when)]}


async def _create_head(connection: Connection, session: Session, head: Document) -> Document:
    """Insert a head; as an upsert, because only a pipeline has the server's clock.

    Raises:
        DuplicateKeyError: There is a run of this name.
    """
    literal = {name: value if name in _SERVER_TIMES else {"$literal": value} for name, value in head.items()}
    created: Document = await connection.runs.find_one_and_update(
        {"_id": head["run_id"], "schema_version": _NO_VERSION},
        [{"$set": literal}],
        upsert=True,
        return_document=ReturnDocument.AFTER,
        session=session,
    )
    return created


async def _take_thread(connection: Connection, session: Session, submission: Submission, *, is_queued_when_busy: bool) -> Document | None:
    """The thread, now held by the run; None if it is busy and the run is to wait for it."""
    thread_id = submission.thread_id
    if is_queued_when_busy:
        waiting = await connection.threads.update_one({"_id": thread_id, "active_run": {"$ne": None}}, {"$inc": {"queued": 1}}, session=session)
        if waiting.matched_count:
            return None
    taken: Document = await connection.threads.find_one_and_update(
        {"_id": thread_id, "active_run": None},
        {
            "$set": {"active_run": submission.run_id},
            "$inc": {"turn": 1},
            "$setOnInsert": {"schema_version": SCHEMA_VERSION, "run_id": submission.run_id, "committed_turn": 0},
        },
        upsert=True,
        return_document=ReturnDocument.AFTER,
        session=session,
    )
    return taken


async def _existing(connection: Connection, submission: Submission, input_digest: str) -> RunHead:
    """Classify in a transaction that commits with majority: a plain majority read may not see yet what the submission ran into."""

    async def body(session: Session) -> tuple[Document | None, Document | None]:
        return (
            await connection.runs.find_one({"_id": submission.run_id}, session=session),
            await connection.threads.find_one({"_id": submission.thread_id}, session=session),
        )

    found_run, thread = await connection.transaction(body)
    if found_run is None:
        active = thread["active_run"] if thread else None
        raise ThreadBusy(
            f"thread {submission.thread_id!r} is busy with run {active!r}: wait for it, answer it or cancel it",
            run_id=submission.run_id,
            thread_id=submission.thread_id,
            active_run=active,
        )
    if found_run.get("pruned_at") is not None:
        raise RunConflict(f"run {submission.run_id!r} is being pruned: choose another run_id", run_id=submission.run_id)
    head = head_from(found_run)
    found = (head.workflow, head.version, head.thread_id, head.input_digest)
    if found != (submission.workflow, submission.version, submission.thread_id, input_digest):
        raise RunConflict(
            f"run {submission.run_id!r} exists with another workflow, version, thread or input: choose another run_id", run_id=submission.run_id
        )
    return head


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an attempt ends its run.

    Attributes:
        type: One of the four ends.
        output: Plain value, of a completed run.
        error: `{"type": …, "message": …}` and more, of a failed or diverged one.
        thread_state: The state to commit for the thread's next turn; None keeps the last one. People read the run's output.
        unsaved: Entries of the conversation since the last suspension.
    """

    type: EventType
    output: Any = None
    error: Mapping[str, Any] | None = None
    data: Mapping[str, Any] | None = None
    thread_state: ThreadState | None = None
    unsaved: Sequence[MemoryEntry] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadState:
    """The committed state of a thread after a turn: what its next turn starts from."""

    serde_type: str
    data: bytes


@store_call
async def end(connection: Connection, claimed: Claim, channel: Channel, ending: Ending) -> None:
    """End the run under the attempt's fence. The channel must be drained, or handed over.

    Raises:
        Superseded: The attempt is no longer the run's.

    Writes: `runs`, `threads`, `thread_states`, `memory`, `activity_events` in one transaction; payload chunks before it.
    Invariants: I2, I10.
    """
    run_id, head = claimed.head.run_id, claimed.head
    output = await move_out(connection, run_id, ending.output) if ending.type is EventType.RUN_COMPLETED else None
    error = seal_error(connection.cipher, run_id, ending.error)
    remembered = await memory.documents(connection, head, ending.unsaved)
    state = ending.thread_state
    stored_state = None
    if state is not None:
        stored_state = {
            "_id": f"{head.thread_id}/{head.turn}",
            "run_id": run_id,
            "thread_id": head.thread_id,
            "schema_version": SCHEMA_VERSION,
            "turn": head.turn,
            "created_at": datetime.now(UTC),
            "serde_type": state.serde_type,
            "data": await move_out(connection, run_id, state.data),
        }

    async def body(session: Session) -> None:
        status = heads.ENDING[ending.type]
        change = {
            **NOT_RUNNING,
            "status": status,
            "ended_at": "$$NOW",
            "output": {"$literal": output},
            "error": {"$literal": error},
        }
        await move_head(connection, session, as_attempt(claimed.head), change)
        await reach(FailPoint.END_INSIDE)
        committed = {}
        if stored_state is not None:
            await connection.thread_states.replace_one({"_id": stored_state["_id"]}, stored_state, upsert=True, session=session)
            committed = {"committed_turn": head.turn}
        await free_thread(connection, session, head.thread_id, run_id, committed)
        await memory.save(connection, session, remembered)
        await insert_event(
            connection,
            session,
            Event(
                run_id=run_id,
                seq=channel.seq + 1,
                fence=channel.fence,
                type=ending.type,
                value=output,
                error=ending.error,
                data=ending.data or {},
            ),
            channel.carried_documents,
        )

    await reach(FailPoint.END_BEFORE)
    try:
        await _as_owner(connection, claimed, body)
    except Superseded as superseded:
        channel.end(superseded)
        raise
    channel.settle_carried()
    await reach(FailPoint.END_AFTER)


async def _as_owner(connection: Connection, claimed: Claim, body: Any) -> None:
    try:
        await connection.transaction(body)
    except (Lost, DuplicateKeyError):
        head = await heads.get(connection, claimed.head.run_id)
        if head.status.is_end and head.attempt == claimed.attempt:
            return  # the answer to an earlier commit was lost; it was mine
        raise _superseded(claimed) from None


def _superseded(claimed: Claim) -> Superseded:
    run_id = claimed.head.run_id
    return Superseded(f"run {run_id}: attempt {claimed.head.fence} is no longer the run's attempt", run_id=run_id)


@store_call
async def active_run(connection: Connection, thread_id: str) -> str | None:
    """The run that is live on a thread, or None."""
    thread = await connection.threads.find_one({"_id": thread_id}, {"active_run": 1})
    return thread["active_run"] if thread is not None else None


@store_call
async def committed_turn(connection: Connection, thread_id: str) -> int:
    """The last turn of a thread whose state was committed; 0 if there is none."""
    thread = await connection.threads.find_one({"_id": thread_id}, {"committed_turn": 1})
    return thread["committed_turn"] if thread is not None else 0


@store_call
async def thread_state(connection: Connection, thread_id: str, turn: int) -> ThreadState | None:
    """The state that a thread had committed after a turn, or None for turn 0.

    Raises:
        CorruptHistory: It is gone.
    """
    document = await stored_state(connection, thread_id, turn)
    if document is None:
        return None
    data = open_sealed(connection.cipher, document["run_id"], document["data"])
    require_open(document["run_id"], [data])
    return ThreadState(serde_type=document["serde_type"], data=bytes(data))


async def stored_state(connection: Connection, thread_id: str, turn: int) -> Document | None:
    """The document of that state, whole, and encrypted if it is; None for turn 0.

    Raises:
        CorruptHistory: It is gone.
    """
    if turn == 0:
        return None
    document: Document | None = await connection.thread_states.find_one({"_id": f"{thread_id}/{turn}"})
    if document is None:
        raise CorruptHistory(f"the committed state of thread {thread_id!r} after turn {turn} is missing: it was deleted by hand")
    check_version(document)
    (document["data"],) = await assemble(connection, document["run_id"], [document["data"]])
    return document


@store_call
async def retry(connection: Connection, run_id: str) -> RunHead:
    """Let a failed or diverged run go on from its history.

    Raises:
        RunError: The run is in another state, or its thread has moved on.
        ThreadBusy: Another run is live on its thread.

    Writes: `runs`, `threads`, `activity_events` in one transaction.
    """
    before = await heads.get(connection, run_id)
    if (before.error or {}).get("type") == PAST_DEADLINE:
        # It may have been suspended: that frontier is closed without answers, and a replay could not pass it.
        raise RunError(f"run {run_id}: its deadline has passed; submit a new run, or fork this one", run_id=run_id)

    async def body(session: Session) -> Document:
        retryable = [RunStatus.FAILED.value, RunStatus.DIVERGED.value]
        change = {
            **NEWS,
            "status": RunStatus.READY.value,
            "available_at": "$$NOW",
            "ended_at": None,
            "error": None,
            "cancel": None,
            "crashes": 0,
            "troubles": 0,
            "held_back": None,
        }
        document = await move_head(connection, session, {"_id": run_id, "status": {"$in": retryable}, "pruned_at": None}, change)
        await reach(FailPoint.RETRY_INSIDE)
        thread = await connection.threads.find_one({"_id": before.thread_id}, session=session)
        if thread["active_run"] is not None:
            raise ThreadBusy(
                f"thread {before.thread_id!r} is busy with run {thread['active_run']!r}",
                run_id=run_id,
                thread_id=before.thread_id,
                active_run=thread["active_run"],
            )
        if thread["committed_turn"] > before.base_turn:
            raise RunError(f"run {run_id}: a later turn of thread {before.thread_id!r} has been committed; submit a new run instead", run_id=run_id)
        await connection.threads.update_one({"_id": before.thread_id}, {"$set": {"active_run": run_id}}, session=session)
        tail = await last_event(connection, run_id, session)
        await insert_event(connection, session, Event(run_id=run_id, seq=tail["seq"] + 1, fence=tail["fence"], type=EventType.RUN_RETRIED))
        return document

    await reach(FailPoint.RETRY_BEFORE)
    try:
        document = await connection.transaction(body)
    except (Lost, DuplicateKeyError):
        now = await heads.get(connection, run_id)
        raise RunError(f"run {run_id} is {now.status}: only failed and diverged runs can be retried", run_id=run_id) from None
    await reach(FailPoint.RETRY_AFTER)
    return head_from(document)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stop:
    """How a run is ended from outside: by a person who cancels it, or by its deadline.

    Attributes:
        condition: What must hold for the head while it is stopped, as a filter.
    """

    reason: str | None
    is_deadline: bool
    condition: Mapping[str, Any]

    @property
    def mark(self) -> Document:
        return {"at": "$$NOW", "reason": {"$literal": self.reason}, "is_deadline": self.is_deadline}


_PAST_DEADLINE = {"$expr": {"$and": [{"$gt": ["$deadline_at", None]}, {"$lte": ["$deadline_at", "$$NOW"]}]}}


@store_call
async def cancel(connection: Connection, run_id: str, reason: str | None, canceller: str) -> RunHead:
    """End a run as cancelled, whatever it does now. When this returns, nothing of it is executed or recorded any more.

    A suspended run is cancelled in one transaction, with its frontier. A running or waiting one is marked (from here any claimer ends it), taken over
    under the next fence, and ended by that attempt: its old attempt's next write is refused.

    Returns:
        The head: cancelled, or how the run ended before the cancel reached it.
    """
    return await _stop(connection, run_id, canceller, _Stop(reason=reason, is_deadline=False, condition={}))


@store_call
async def end_past_deadline(connection: Connection, run_id: str, owner: str) -> bool:
    """Fail a run whose deadline has passed, whatever it does now, in the way of `cancel`. False: not due, or ended otherwise."""
    stop = _Stop(reason=None, is_deadline=True, condition=_PAST_DEADLINE)
    if await connection.runs.find_one({"_id": run_id, "status": {"$in": NOT_ENDED}, **stop.condition}, {"_id": 1}) is None:
        return False
    return (await _stop(connection, run_id, owner, stop)).status is RunStatus.FAILED


async def _stop(connection: Connection, run_id: str, owner: str, stop: _Stop) -> RunHead:
    for _ in range(_CANCEL_TRIES):
        head = await heads.get(connection, run_id)
        if head.status.is_end:
            return head
        try:
            if head.status is RunStatus.SUSPENDED:
                await _stop_suspended(connection, head, stop)
            else:
                await reach(FailPoint.CANCEL_BEFORE)
                live = {"_id": run_id, "status": {"$in": [RunStatus.PENDING.value, RunStatus.READY.value, RunStatus.RUNNING.value]}}
                await move_head(connection, None, {**live, **stop.condition}, {"cancel": {"$ifNull": ["$cancel", stop.mark]}})
                await reach(FailPoint.CANCEL_INSIDE)
                claimed = await claim(connection, run_id, owner, is_forced=True)
                await end_stopped(connection, claimed)
            await reach(FailPoint.CANCEL_AFTER)
        except (Lost, DuplicateKeyError, RunNotClaimable, Superseded):
            continue  # the run moved in between; look again
    return await heads.get(connection, run_id)


def stopped_ending(head: RunHead) -> Ending:
    """How a run ends that was marked to be stopped."""
    if head.is_past_deadline:
        return Ending(type=EventType.RUN_FAILED, error={"type": PAST_DEADLINE, "message": f"the run had not ended at {head.deadline_at}"})
    return Ending(type=EventType.RUN_CANCELLED, data={"reason": head.cancel_reason})


async def end_stopped(connection: Connection, claimed: Claim) -> None:
    """End a claimed run that was marked to be stopped, without executing anything of it."""
    run_id = claimed.head.run_id
    recorded = fold(run_id, await history(connection, claimed))
    channel = Channel(run_id, claimed.head.fence, claimed.seq)
    await end(connection, claimed, channel, replace(stopped_ending(claimed.head), unsaved=recorded.unsaved))


async def _stop_suspended(connection: Connection, head: RunHead, stop: _Stop) -> None:
    suspended_on = frontier_id(head.run_id, head.generation)
    frontier = await connection.frontiers.find_one({"_id": suspended_on}, {"seq": 1})
    if frontier is None:
        raise Lost
    stopped = replace(head, is_cancel_requested=True, cancel_reason=stop.reason, is_past_deadline=stop.is_deadline)
    ending = stopped_ending(stopped)
    closed_as = FrontierStatus.EXPIRED if stop.is_deadline else FrontierStatus.CANCELLED

    async def body(session: Session) -> None:
        expected = {"_id": head.run_id, "status": RunStatus.SUSPENDED.value, "generation": head.generation, **stop.condition}
        change = {
            **NOT_RUNNING,
            "status": heads.ENDING[ending.type],
            "ended_at": "$$NOW",
            "error": {"$literal": ending.error},
            "cancel": stop.mark,
        }
        await move_head(connection, session, expected, change)
        await reach(FailPoint.CANCEL_INSIDE)
        is_open = {"_id": suspended_on, "status": FrontierStatus.OPEN.value}
        closed = await connection.frontiers.update_one(is_open, [{"$set": {"status": closed_as.value, "closed_at": "$$NOW"}}], session=session)
        if closed.matched_count != 1:
            raise Lost
        await free_thread(connection, session, head.thread_id, head.run_id)
        seq = frontier["seq"] + 1  # nothing can follow a suspension but what the head serialises
        event = Event(run_id=head.run_id, seq=seq, fence=head.fence, type=ending.type, error=ending.error, data=ending.data or {})
        await insert_event(connection, session, event)

    await reach(FailPoint.CANCEL_BEFORE)
    await connection.transaction(body)
