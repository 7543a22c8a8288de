"""Judges a database: whether what stands in it could have been written by correct writers only.

    assert_invariants(uri, database, promises)

It reads every collection in one snapshot, so it may be asked while writers are at work, and shares no code with the writers but the fold. Faults are
named after the invariants:

I1   the events of a run are dense from 1
I2   fences only rise, and nothing of a lower fence follows an `attempt.started`
I3   an activity has one outcome at most
I5   a frontier is there whole, in its document and in its event
I6   a frontier has one resolution at most, with an answer to each of its questions
I9   a sweep by status finds every run that can go on
I10  what was acknowledged is there
head what a run's head says is what its history says
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pymongo

from mongo_durable.errors import CorruptHistory
from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.events import OUTCOMES, FrontierStatus, RunStatus
from mongo_durable.protocol.history import History, fold
from mongo_durable.store.documents import event_from

Document = dict[str, Any]

_LIVE = {RunStatus.PENDING, RunStatus.READY, RunStatus.RUNNING}
# A head that moves without an event: claimed and not yet started, released, taken over.
_STATUS_IN_HISTORY = {
    RunStatus.PENDING: {RunStatus.PENDING},
    RunStatus.READY: {RunStatus.READY, RunStatus.RUNNING},
    RunStatus.RUNNING: _LIVE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """Somebody was told that this event is recorded."""

    run_id: str
    seq: int
    fence: int
    type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Somebody has a receipt for these answers."""

    run_id: str
    generation: int
    answers_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """Somebody was told that the run is cancelled."""

    run_id: str


Promise = Acknowledged | Received | Cancelled


@dataclass(slots=True)
class Snapshot:
    """Everything that stands in a database, by run, at one moment."""

    runs: dict[str, Document] = field(default_factory=dict)
    events: dict[str, list[Document]] = field(default_factory=lambda: defaultdict(list))
    frontiers: dict[str, list[Document]] = field(default_factory=lambda: defaultdict(list))
    resolutions: dict[str, list[Document]] = field(default_factory=lambda: defaultdict(list))
    threads: dict[str, Document] = field(default_factory=dict)
    thread_states: dict[str, Document] = field(default_factory=dict)
    chunks: set[str] = field(default_factory=set)


def read(client: pymongo.MongoClient[Document], database: str) -> Snapshot:
    """Read a database in one snapshot."""
    source = client[database]
    found = Snapshot()
    with client.start_session(snapshot=True) as session:
        found.runs = {each["_id"]: each for each in source["runs"].find(session=session)}
        for each in source["activity_events"].find(session=session).sort([("run_id", 1), ("seq", 1)]):
            found.events[each["run_id"]].append(each)
        for each in source["frontiers"].find(session=session).sort([("run_id", 1), ("generation", 1)]):
            found.frontiers[each["run_id"]].append(each)
        for each in source["resolutions"].find(session=session):
            found.resolutions[each["run_id"]].append(each)
        found.threads = {each["_id"]: each for each in source["threads"].find(session=session)}
        found.thread_states = {each["_id"]: each for each in source["thread_states"].find({}, {"data": 0}, session=session)}
        found.chunks = {each["_id"] for each in source["payloads"].find({}, {"_id": 1}, session=session)}
    return found


def assert_invariants(uri: str, database: str, promises: Iterable[Promise] = ()) -> Snapshot:
    """Fail unless the database keeps every invariant and every promise; returns what was read."""
    with pymongo.MongoClient(uri) as client:
        snapshot = read(client, database)
    found = list(faults(snapshot, promises))
    assert not found, f"{len(found)} faults in {database}:\n" + "\n".join(found[:40])
    return snapshot


def faults(snapshot: Snapshot, promises: Iterable[Promise] = ()) -> Iterator[str]:
    """Everything that is wrong, one text a fault, each starting with the name of the invariant."""
    for run_id in sorted({*snapshot.runs, *snapshot.events, *snapshot.frontiers, *snapshot.resolutions}):
        yield from _faults_of_run(snapshot, run_id)
    yield from _faults_of_threads(snapshot)
    for promise in promises:
        yield from _broken(snapshot, promise)


def _faults_of_run(snapshot: Snapshot, run_id: str) -> Iterator[str]:
    events = snapshot.events.get(run_id, [])
    head = snapshot.runs.get(run_id)
    if head is None:
        yield f"head {run_id}: documents of a run without a head"
        return
    yield from _faults_of_order(run_id, events)
    yield from _faults_of_outcomes(run_id, events)
    yield from _missing_chunks(snapshot, run_id, [head, *events, *snapshot.frontiers.get(run_id, []), *snapshot.resolutions.get(run_id, [])])
    try:
        history = fold(run_id, [event_from(each) for each in events])
    except CorruptHistory as error:
        yield f"fold {run_id}: {error}"
        return
    yield from _faults_of_frontiers(snapshot, history, head)
    yield from _faults_of_head(history, head)


def _faults_of_order(run_id: str, events: list[Document]) -> Iterator[str]:
    numbers = [each["seq"] for each in events]
    if numbers != list(range(1, len(events) + 1)):
        yield f"I1 {run_id}: the events are numbered {numbers}"
    fence = 0
    for each in events:
        if each["type"] == "attempt.started":
            if each["fence"] <= fence:
                yield f"I2 {run_id}: event {each['seq']} starts fence {each['fence']} after fence {fence}"
            fence = each["fence"]
        elif each["fence"] != fence:
            yield f"I2 {run_id}: event {each['seq']} ({each['type']}) is of fence {each['fence']}, the attempt's is {fence}"


def _faults_of_outcomes(run_id: str, events: list[Document]) -> Iterator[str]:
    count = Counter(each.get("activity_id") for each in events if each["type"] in OUTCOMES)
    yield from (f"I3 {run_id}: activity {activity_id} has {number} outcomes" for activity_id, number in count.items() if number > 1)


def _missing_chunks(snapshot: Snapshot, run_id: str, documents: list[Document]) -> Iterator[str]:
    for reference in _references(documents):
        missing = [n for n in range(reference["chunks"]) if f"{run_id}/{reference['digest']}/{n}" not in snapshot.chunks]
        if missing:
            yield f"payload {run_id}: value {reference['digest']} lacks its chunks {missing}"


def _references(value: Any) -> Iterator[Document]:
    if isinstance(value, list):
        for each in value:
            yield from _references(each)
    elif isinstance(value, dict):
        if value.get("__type__") == "payload":
            yield value["value"]
        else:
            yield from _references(list(value.values()))


def _faults_of_frontiers(snapshot: Snapshot, history: History, head: Document) -> Iterator[str]:
    run_id = history.run_id
    stored = {each["generation"]: each for each in snapshot.frontiers.get(run_id, [])}
    resolutions = {each["generation"]: each for each in snapshot.resolutions.get(run_id, [])}
    events = {each["seq"]: each for each in snapshot.events.get(run_id, [])}
    if set(stored) != {each.generation for each in history.frontiers}:
        yield f"I5 {run_id}: frontiers {sorted(stored)} are stored, the history has {len(history.frontiers)}"
    if set(resolutions) - set(stored):
        yield f"I6 {run_id}: resolutions of frontiers that are not there: {sorted(set(resolutions) - set(stored))}"
    for recorded in history.frontiers:
        name, document, resolution = f"{run_id}/{recorded.generation}", stored.get(recorded.generation), resolutions.get(recorded.generation)
        if document is None:
            continue
        if document["_id"] != name or (document["seq"], document["fence"]) != (recorded.seq, events[recorded.seq]["fence"]):
            yield f"I5 {name}: the document does not belong to its event {recorded.seq}"
        asked = {entry["activity_id"]: entry["digest"] for entry in document["entries"]}
        if asked != {activity_id: recorded.entries[position] for position, activity_id in recorded.activity_ids.items()}:
            yield f"I5 {name}: the document and its event have other entries"
        if document["status"] != recorded.status:
            yield f"I6 {name}: the frontier is {document['status']}, the history says {recorded.status}"
        if (resolution is not None) != (recorded.status is FrontierStatus.RESOLVED):
            yield f"I6 {name}: it has {'a' if resolution else 'no'} resolution, the history says {recorded.status}"
        if resolution is not None:
            if set(resolution["answers"]) != set(asked):
                yield f"I6 {name}: the resolution does not answer exactly the frontier's questions"
            if recorded.answers is not None and digest(dict(recorded.answers)) != digest(resolution["answers"]):
                yield f"I6 {name}: the resolution has other answers than the history"
    if head["status"] == RunStatus.SUSPENDED and head["generation"] not in stored:
        yield f"I5 {run_id}: suspended on a frontier that is not there"


def _faults_of_head(history: History, head: Document) -> Iterator[str]:
    run_id, status = history.run_id, RunStatus(head["status"])
    if history.status not in _STATUS_IN_HISTORY.get(status, {status}):
        yield f"head {run_id}: it says {status}, the history {history.status}"
    is_claimed = status is RunStatus.RUNNING  # its `attempt.started` may still be on the way, or never have come
    if head["fence"] < history.fence or (not is_claimed and head["fence"] != history.fence):
        yield f"head {run_id}: it has fence {head['fence']}, the history {history.fence}"
    if head["generation"] != history.generation:
        yield f"head {run_id}: it has generation {head['generation']}, the history {history.generation}"
    if history.end is not None and status.is_end:
        value = history.end.value if status is RunStatus.COMPLETED else None
        if head.get("output") != value or head.get("error") != history.end.error:
            yield f"head {run_id}: output or error is not that of its end"
    if is_claimed != (head["owner"] is not None):
        yield f"I9 {run_id}: {status} with owner {head['owner']!r}"
    if status in _LIVE and not isinstance(head["available_at"], datetime):
        yield f"I9 {run_id}: no sweep finds it, it is available at {head['available_at']!r}"


def _faults_of_threads(snapshot: Snapshot) -> Iterator[str]:
    for run_id, head in snapshot.runs.items():
        thread = snapshot.threads.get(head["thread_id"])
        if thread is None:
            yield f"thread {head['thread_id']}: it has run {run_id} and no head"
        elif (thread["active_run"] == run_id) == (RunStatus(head["status"]).is_end or head.get("is_queued", False)):
            yield f"thread {head['thread_id']}: its active run is {thread['active_run']!r}, and run {run_id} is {head['status']}"
    turns = Counter((head["thread_id"], head["turn"]) for head in snapshot.runs.values() if head["turn"])  # a queued run has none yet
    yield from (f"thread {thread_id}: {number} runs of turn {turn}" for (thread_id, turn), number in turns.items() if number > 1)
    for thread_id, thread in snapshot.threads.items():
        if thread["committed_turn"] and f"{thread_id}/{thread['committed_turn']}" not in snapshot.thread_states:
            yield f"thread {thread_id}: the state of turn {thread['committed_turn']} is committed and not there"


def _broken(snapshot: Snapshot, promise: Promise) -> Iterator[str]:
    match promise:
        case Acknowledged():
            kept = any(
                (each["seq"], each["fence"], each["type"]) == (promise.seq, promise.fence, promise.type)
                for each in snapshot.events.get(promise.run_id, [])
            )
        case Received():
            kept = any(
                (each["generation"], each["answers_digest"]) == (promise.generation, promise.answers_digest)
                for each in snapshot.resolutions.get(promise.run_id, [])
            )
        case Cancelled():
            head = snapshot.runs.get(promise.run_id)
            kept = head is not None and head["status"] == RunStatus.CANCELLED
    if not kept:
        yield f"I10 broken promise: {promise}"
