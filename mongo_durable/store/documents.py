"""Stored documents and the objects that they stand for. The only place that knows stored field names of events, frontiers, resolutions and heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bson import ObjectId

from mongo_durable.encryption import Cipher
from mongo_durable.errors import ConfigurationError, CorruptHistory, SchemaVersionMismatch
from mongo_durable.protocol.events import OUTCOMES, ActivityKind, Event, EventType, FrontierStatus, RunStatus
from mongo_durable.protocol.frontier import UNANSWERED, AnswerChannel, Audience, FrontierEntry
from mongo_durable.protocol.identity import Position
from mongo_durable.store.sealing import open_error, seal_error

SCHEMA_VERSION = 1
Document = dict[str, Any]


def check_version(document: Mapping[str, Any]) -> None:
    """Refuse a document of a newer release.

    Raises:
        SchemaVersionMismatch: It is newer than this release reads.
    """
    found = document.get("schema_version", 0)
    if found > SCHEMA_VERSION:
        raise SchemaVersionMismatch(
            f"a document has schema version {found}, this release reads up to {SCHEMA_VERSION}: upgrade mongo_durable in this process",
            expected=SCHEMA_VERSION,
            found=found,
        )


def event_document(event: Event, event_id: ObjectId, cipher: Cipher | None = None) -> Document:
    """The document of `event`. `event_id` is made before the first send and never changes, so that a repeated send is recognised.

    Args:
        cipher: Encrypts its error; its value is given as stored.
    """
    document: Document = {
        "_id": event_id,
        "run_id": event.run_id,
        "seq": event.seq,
        "fence": event.fence,
        "type": event.type.value,
        "at": event.at,
        "schema_version": SCHEMA_VERSION,
    }
    if event.position is not None:
        document["position"] = event.position.text
        document["path"] = "/".join(event.position.path)
        document["step"] = event.position.step
        document["ordinal"] = event.position.ordinal
    if event.activity_id is not None:
        document["activity_id"] = event.activity_id
    if event.kind is not None:
        document["kind"] = event.kind.value
    if event.name is not None:
        document["name"] = event.name
    if event.input_digest is not None:
        document["input_digest"] = event.input_digest
    if event.type in _WITH_VALUE:
        document["value"] = event.value
    if event.error is not None:
        document["error"] = seal_error(cipher, event.run_id, event.error)
    if event.type in OUTCOMES:
        document["outcome"] = True  # the unique partial index on (run_id, activity_id) counts these: the database itself enforces I3
    document.update(event.data)
    return document


_WITH_VALUE = frozenset({EventType.RUN_SUBMITTED, EventType.RUN_COMPLETED, EventType.ACTIVITY_STARTED, EventType.ACTIVITY_COMPLETED})
NOT_OF_AN_EVENT = {"path": 0, "ordinal": 0, "outcome": 0}
"""Projection: without what stands in an event's document for queries and indexes only."""
_EVENT_TYPES = {each.value: each for each in EventType}
_KINDS = {each.value: each for each in ActivityKind}
_COMMON = frozenset(
    [
        "_id",
        "run_id",
        "seq",
        "fence",
        "type",
        "at",
        "schema_version",
        "position",
        "path",
        "step",
        "ordinal",
        "activity_id",
        "kind",
        "name",
        "input_digest",
        "value",
        "error",
        "outcome",
    ]
)


def event_from(document: Mapping[str, Any], cipher: Cipher | None = None) -> Event:
    """The event that `document` stands for. Times that were read without a zone are UTC.

    Raises:
        SchemaVersionMismatch: It is of a newer release.
        CorruptHistory: Nobody but a hand can have written it.
    """
    check_version(document)
    try:
        event_type = _EVENT_TYPES[document["type"]]
        position = Position.parse(document["position"]) if document.get("position") is not None else None
        kind = _KINDS[document["kind"]] if document.get("kind") is not None else None
    except (KeyError, ValueError, TypeError, AttributeError):
        run_id, seq = document["run_id"], document["seq"]
        raise CorruptHistory(f"run {run_id}: event {seq} has a type, kind or position that there is not", run_id=run_id, seq=seq) from None
    data = {} if document.keys() <= _COMMON else {name: _in_utc(value) for name, value in document.items() if name not in _COMMON}
    if event_type is EventType.STEP_COMMITTED:
        data["step"] = document["step"]
    return Event(
        run_id=document["run_id"],
        seq=document["seq"],
        fence=document["fence"],
        type=event_type,
        at=_in_utc(document.get("at")),
        activity_id=document.get("activity_id"),
        position=position,
        kind=kind,
        name=document.get("name"),
        input_digest=document.get("input_digest"),
        value=document.get("value"),
        error=open_error(cipher, document["run_id"], document.get("error")),
        data=data,
    )


def _in_utc(value: Any) -> Any:
    """A part of a document with the zone of its times."""
    if isinstance(value, datetime):
        return value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    if isinstance(value, dict):
        return {name: _in_utc(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_in_utc(each) for each in value]
    return value


def entry_document(entry: FrontierEntry, value: Any, default: Any) -> Document:
    """An entry inside its frontier; `value` and `default` are the entry's as stored."""
    return {
        "activity_id": entry.activity_id,
        "position": entry.position.text,
        "kind": entry.kind.value,
        "name": entry.name,
        "value": value,
        "response_schema": dict(entry.response_schema) if entry.response_schema is not None else None,
        "digest": entry.digest,
        "expires_at": entry.expires_at,
        **({} if entry.default is UNANSWERED else {"default": default}),
        **_audience_fields(entry),
    }


def _audience_fields(entry: FrontierEntry) -> Document:
    if entry.audience is None:
        return {}
    if entry.escalates_at is None:
        return {"audience": entry.audience.first}
    return {"audience": entry.audience.first, "escalates_to": entry.audience.then, "escalates_at": entry.escalates_at}


def entry_from(document: Mapping[str, Any], value: Any, default: Any) -> FrontierEntry:
    """The entry that `document` stands for, with its value and its default brought in."""
    return FrontierEntry(
        activity_id=document["activity_id"],
        position=Position.parse(document["position"]),
        kind=ActivityKind(document["kind"]),
        name=document["name"],
        value=value,
        response_schema=document["response_schema"],
        digest=document["digest"],
        expires_at=document.get("expires_at"),
        default=default if "default" in document else UNANSWERED,
        audience=Audience(first=document["audience"], then=document.get("escalates_to")) if "audience" in document else None,
        escalates_at=document.get("escalates_at"),
    )


def frontier_id(run_id: str, generation: int) -> str:
    """The `_id` of a frontier. Its resolution and its draft have the same, so that there can be one of each."""
    return f"{run_id}/{generation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFrontier:
    """A frontier as stored.

    Attributes:
        seq: Of its `activities.suspended` event.
        opened_at, expires_at: The server's clock. It expires at the earliest deadline of its entries; None: it waits for ever.
        digest: Over all entries: what a reviewer pins.
    """

    run_id: str
    workflow: str
    thread_id: str
    generation: int
    status: FrontierStatus
    seq: int
    fence: int
    attempt: ObjectId
    entries: tuple[FrontierEntry, ...]
    digest: str
    opened_at: datetime | None
    expires_at: datetime | None

    @property
    def id(self) -> str:
        """Its `_id`."""
        return frontier_id(self.run_id, self.generation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answerer:
    """Who answers, as it is recorded beside the answer.

    Attributes:
        by: Who it is, in the application's words.
        note: Why, for people.
        channel: The way by which the answer came.
    """

    by: str | None = None
    note: str | None = None
    channel: AnswerChannel = AnswerChannel.CLIENT

    def __post_init__(self) -> None:
        for name, text in (("the name of who answers", self.by), ("the note", self.note)):
            if text is not None and not isinstance(text, str):
                raise ConfigurationError(f"{name} is a text, not {type(text).__name__}")

    @property
    def document(self) -> Document:
        """Its fields in a resolution, and in the event beside it."""
        return {"resolved_by": self.by, "note": self.note, "channel": self.channel.value}


SOMEBODY = Answerer()
"""Who answers without saying who it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """The receipt of answers that were accepted: majority-committed when the caller has it.

    Attributes:
        answers_digest: Digest of the answers; the same answers again give the same receipt.
        resolved_at: The server's clock.
        channel: app, client, cli, token, draft or mongosh; None in what an older release recorded.
        answered_by: Of answers that several people gave in a draft: by activity id, `{"by": …, "note": …, "at": …}`.
    """

    run_id: str
    generation: int
    answers_digest: str
    resolved_by: str | None
    note: str | None
    resolved_at: datetime | None
    channel: str | None = None
    answered_by: Mapping[str, Mapping[str, Any]] | None = None


def resolution_from(document: Mapping[str, Any]) -> Resolution:
    """The receipt of a stored resolution."""
    check_version(document)
    return Resolution(
        run_id=document["run_id"],
        generation=document["generation"],
        answers_digest=document["answers_digest"],
        resolved_by=document.get("resolved_by"),
        note=document.get("note"),
        resolved_at=document.get("at"),
        channel=document.get("channel"),
        answered_by=document.get("answered_by"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimit:
    """At most `running` runs with this `key` are executed at once, on all machines together; further ones wait their turn.

    Attributes:
        key: What is to be limited, say a tenant.
        running: From 1. A suspended run is not executed, so it takes no place.
    """

    key: str
    running: int

    def __post_init__(self) -> None:
        if not self.key or self.running < 1:
            raise ConfigurationError(f"a RunLimit needs a key and at least 1 running run, not {self.key!r} and {self.running}")

    @property
    def places(self) -> list[str]:
        """The names of its places. A run that is executed holds one; the database lets nobody hold one twice."""
        return [f"{self.key}#{number}" for number in range(self.running)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHead:
    """The head of a run: its state between events.

    Attributes:
        fence: Of the newest claim; the history may be one behind while an attempt starts.
        attempt: Id of the newest attempt.
        owner: The process that has the run, while it is running.
        turn: Of the thread, from 1; 0 while the run is queued on it.
        base_thread, base_turn: The thread and turn whose committed state the run starts from; turn 0 means from nothing.
        input, output: As stored: a large one is a reference until `heads.get` brings it in.
        settings: The run's own configuration, the same in every attempt (as stored, like input and output).
        is_cancel_requested: It was marked to be stopped: by a person, or because its deadline has passed (is_past_deadline).
        priority: Higher goes first.
        available_at: When the run can go on by itself: not before this, if it waits; at its frontier's deadline, if it is suspended (None: never).
        deadline_at: When it fails if it has not ended; None: never.
        crashes: How many attempts in a row ended with the death of their process.
        held_back: Why its last attempt gave it back without having executed it, or None.
    """

    run_id: str
    status: RunStatus
    fence: int
    attempt: ObjectId | None
    owner: str | None
    generation: int
    workflow: str
    version: str
    thread_id: str
    turn: int
    base_thread: str
    base_turn: int
    input: Any
    input_digest: str
    settings: Any
    output: Any
    error: Mapping[str, Any] | None
    is_cancel_requested: bool
    cancel_reason: str | None
    is_past_deadline: bool
    priority: int
    available_at: datetime | None
    deadline_at: datetime | None
    limit: RunLimit | None
    is_queued: bool
    crashes: int
    held_back: str | None
    submitted_at: datetime | None
    claimed_at: datetime | None
    ended_at: datetime | None


def head_from(document: Mapping[str, Any]) -> RunHead:
    """The head that `document` stands for.

    Raises:
        SchemaVersionMismatch: It is of a newer release.
    """
    check_version(document)
    cancel = document.get("cancel")
    limit = document.get("limit")
    return RunHead(
        run_id=document["_id"],
        status=RunStatus(document["status"]),
        fence=document["fence"],
        attempt=document["attempt"],
        owner=document["owner"],
        generation=document["generation"],
        workflow=document["workflow"]["name"],
        version=document["workflow"]["version"],
        thread_id=document["thread_id"],
        turn=document["turn"],
        base_thread=document.get("base_thread", document["thread_id"]),
        base_turn=document["base_turn"],
        input=document["input"],
        input_digest=document["input_digest"],
        settings=document.get("settings") or {},
        output=document.get("output"),
        error=document.get("error"),
        is_cancel_requested=cancel is not None,
        cancel_reason=cancel.get("reason") if cancel else None,
        is_past_deadline=bool(cancel and cancel.get("is_deadline")),
        priority=document.get("priority", 0),
        available_at=document.get("available_at"),
        deadline_at=document.get("deadline_at"),
        limit=RunLimit(key=limit["key"], running=limit["running"]) if limit else None,
        is_queued=bool(document.get("is_queued")),
        crashes=document.get("crashes", 0),
        held_back=document.get("held_back"),
        submitted_at=document.get("submitted_at"),
        claimed_at=document.get("claimed_at"),
        ended_at=document.get("ended_at"),
    )
