"""Every collection, index, validator and view, and the check that a process makes before it works.

`ensure_schema` is an admin's step (`mongo-durable init`; an `App` or `Runner` with enough rights does it by itself the first time). It may be called
any number of times, by any number of processes at once. Nothing is created inside a transaction.

The validator of `activity_events` is minimal, because it is paid for at every append (a full one costs 25 %); the rare documents have full ones,
which also say how their fields go together. What moves a run or a frontier to another status sets a field beside it that a hand would not think of
(`news`, `ended_at`, `closed_at`), so the server refuses a status that somebody changes by hand.
"""

from __future__ import annotations

from typing import Any

from pymongo import ASCENDING, DESCENDING, IndexModel
from pymongo.errors import CollectionInvalid, OperationFailure

from mongo_durable.errors import ConfigurationError, NotPermitted, ReplicaSetRequired, SchemaVersionMismatch
from mongo_durable.protocol.events import FrontierStatus, RunStatus
from mongo_durable.store.connection import Connection
from mongo_durable.store.documents import SCHEMA_VERSION
from mongo_durable.store.faults import store_call
from mongo_durable.store.roles import ROLES, privileges
from mongo_durable.store.views import VIEWS

OLDEST_SERVER = (6, 0)
_META_ID = "schema"
_NAMESPACE_EXISTS = 48
_INDEX_NOT_FOUND = 27


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None, *, rules: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    schema = {
        "bsonType": "object",
        "required": sorted(required),
        "properties": {**required, **(optional or {})},
    }
    return {"$jsonSchema": schema, **({"$expr": {"$and": rules}} if rules is not None else {})}


def _is(field: str, *types: str) -> dict[str, Any]:
    return {"$in": [{"$type": field}, list(types)]}


def _implies(condition: dict[str, Any], consequence: dict[str, Any]) -> dict[str, Any]:
    return {"$or": [{"$not": condition}, consequence]}


def _status(*statuses: str) -> dict[str, Any]:
    return {"$in": ["$status", list(statuses)]}


_TEXT = {"bsonType": "string", "minLength": 1}
_TEXT_OR_NULL = {"bsonType": ["string", "null"]}
_DATE = {"bsonType": "date"}
_DATE_OR_NULL = {"bsonType": ["date", "null"]}
_COUNT = {"bsonType": ["int", "long"], "minimum": 0}
_ORDINAL = {"bsonType": ["int", "long"], "minimum": 1}
_OBJECT_OR_NULL = {"bsonType": ["object", "null"]}
_HEX_DIGEST = {"bsonType": "string", "pattern": "^[0-9a-f]{32}$"}
_VERSION = {"bsonType": ["int", "long"], "minimum": 1}

_FRONTIER_ID = {"$eq": ["$_id", {"$concat": ["$run_id", "/", {"$toString": "$generation"}]}]}

_HEAD_RULES: list[dict[str, Any]] = [
    {"$eq": ["$_id", "$run_id"]},
    # Each frontier was opened by an attempt of its own.
    {"$gte": ["$fence", "$generation"]},
    {"$eq": [_status("running"), _is("$owner", "string")]},
    _implies(_status("running"), _is("$attempt", "objectId")),
    {"$eq": [_status(*(status.value for status in RunStatus if status.is_end)), _is("$ended_at", "date")]},
    _implies(_status("pending"), {"$eq": ["$fence", 0]}),
    _implies(_status("pending", "ready"), _is("$available_at", "date")),
    _implies(_status("ready"), _is("$news", "string")),
    _implies(_status("suspended"), {"$and": [{"$gte": ["$generation", 1]}, _is("$news", "missing")]}),
]

VALIDATORS: dict[str, dict[str, Any]] = {
    "runs": _object(
        {
            "_id": _TEXT,
            "run_id": _TEXT,
            "schema_version": _VERSION,
            "status": {"enum": [status.value for status in RunStatus]},
            "fence": _COUNT,
            "attempt": {"bsonType": ["objectId", "null"]},
            "owner": _TEXT_OR_NULL,
            "generation": _COUNT,
            "workflow": {"bsonType": "object", "required": ["name", "version"], "properties": {"name": _TEXT, "version": _TEXT}},
            "thread_id": _TEXT,
            "turn": _COUNT,
            "base_turn": _COUNT,
            "input": {},
            "input_digest": _HEX_DIGEST,
            "available_at": _DATE_OR_NULL,
            "submitted_at": _DATE,
        },
        {
            "priority": {"bsonType": ["int", "long"]},
            "deadline_at": _DATE_OR_NULL,
            "limit": {"bsonType": ["object", "null"], "required": ["key", "running"], "properties": {"key": _TEXT, "running": _ORDINAL}},
            "place": _TEXT_OR_NULL,
            "crashes": _COUNT,
            "troubles": _COUNT,
            "held_back": _TEXT_OR_NULL,
            "error": _OBJECT_OR_NULL,
            "cancel": _OBJECT_OR_NULL,
            "claimed_at": _DATE_OR_NULL,
            "ended_at": _DATE_OR_NULL,
            "pruned_at": _DATE,
        },
        rules=_HEAD_RULES,
    ),
    "activity_events": {
        "seq": {"$type": ["int", "long"]},
        "type": {"$type": "string"},
        "run_id": {"$type": "string"},
        "fence": {"$type": ["int", "long"]},
    },
    "frontiers": _object(
        {
            "_id": {"bsonType": "string", "pattern": "/[0-9]+$"},
            "run_id": _TEXT,
            "schema_version": _VERSION,
            "workflow": _TEXT,
            "thread_id": _TEXT,
            "generation": _ORDINAL,
            "seq": _ORDINAL,
            "fence": _ORDINAL,
            "attempt": {"bsonType": "objectId"},
            "status": {"enum": [status.value for status in FrontierStatus]},
            "entries": {
                "bsonType": "array",
                "minItems": 1,
                "items": {
                    "bsonType": "object",
                    "required": ["activity_id", "position", "kind", "name", "digest"],
                    "properties": {"activity_id": _TEXT, "position": _TEXT, "kind": _TEXT, "name": _TEXT, "digest": _HEX_DIGEST},
                },
            },
            "digest": _HEX_DIGEST,
            "opened_at": _DATE,
            "expires_at": _DATE_OR_NULL,
        },
        {"closed_at": _DATE},
        rules=[_FRONTIER_ID, {"$ne": [_status("open"), _is("$closed_at", "date")]}],
    ),
    # `answers_digest` and `seq` are what a hand-written insert would not have: answers go in through the library, the command line or the mongosh
    # script, because a bare insert would leave the run suspended for ever.
    "resolutions": _object(
        {
            "_id": {"bsonType": "string", "pattern": "/[0-9]+$"},
            "run_id": _TEXT,
            "schema_version": _VERSION,
            "generation": _ORDINAL,
            "seq": _ORDINAL,
            "answers": {"bsonType": "object", "minProperties": 1},
            "answers_digest": _HEX_DIGEST,
            "at": _DATE,
        },
        {"resolved_by": _TEXT_OR_NULL, "note": _TEXT_OR_NULL, "channel": _TEXT_OR_NULL, "answered_by": {"bsonType": "object"}},
        rules=[_FRONTIER_ID],
    ),
    "drafts": _object(
        {
            "_id": {"bsonType": "string", "pattern": "/[0-9]+$"},
            "run_id": _TEXT,
            "schema_version": _VERSION,
            "generation": _ORDINAL,
            "digest": _HEX_DIGEST,
            "answers": {
                "bsonType": "object",
                "additionalProperties": {
                    "bsonType": "object",
                    "required": ["value", "digest", "by", "at"],
                    "properties": {"digest": _HEX_DIGEST, "by": _TEXT, "note": _TEXT_OR_NULL, "at": _DATE},
                },
            },
        },
        rules=[_FRONTIER_ID],
    ),
    "audit": _object(
        {"run_id": _TEXT, "schema_version": _VERSION, "type": _TEXT, "code": _TEXT, "channel": _TEXT, "at": _DATE},
        {"generation": {"bsonType": ["int", "long", "null"]}, "by": _TEXT_OR_NULL, "activity_ids": {"bsonType": "array"}, "message": _TEXT},
    ),
    "runners": _object({"_id": _TEXT, "schema_version": _VERSION, "state": {"enum": ["live", "dead"]}, "expires_at": _DATE}),
    "threads": _object({"_id": _TEXT, "schema_version": _VERSION, "active_run": _TEXT_OR_NULL, "turn": _COUNT, "committed_turn": _COUNT}),
    "thread_states": _object({"_id": _TEXT, "run_id": _TEXT, "thread_id": _TEXT, "schema_version": _VERSION, "turn": _ORDINAL, "created_at": _DATE}),
    "memory": _object(
        {"_id": _TEXT, "run_id": _TEXT, "thread_id": _TEXT, "schema_version": _VERSION, "turn": _ORDINAL, "seq": _ORDINAL, "role": _TEXT}
    ),
    "payloads": _object(
        {
            "_id": _TEXT,
            "run_id": _TEXT,
            "schema_version": _VERSION,
            "digest": _HEX_DIGEST,
            "n": _COUNT,
            "data": {"bsonType": "binData"},
            "created_at": _DATE,
        }
    ),
}

RUN_OWNED = ("payloads", "memory", "drafts", "resolutions", "frontiers", "activity_events")
"""Collections whose documents are a run's own, by their `run_id`, and go with it when it is pruned, in this order. A thread's states are not: later
turns and forks start from them (see `store.pruning`). Nor is `audit`: what was refused stays on record."""

INDEXES: dict[str, list[IndexModel]] = {
    "runs": [
        IndexModel([("status", ASCENDING), ("owner", ASCENDING)], name="status_owner"),
        IndexModel([("status", ASCENDING), ("available_at", ASCENDING)], name="status_available_at"),
        # The order in which waiting runs are claimed.
        IndexModel([("status", ASCENDING), ("priority", DESCENDING), ("available_at", ASCENDING)], name="status_priority_available_at"),
        IndexModel(
            [("status", ASCENDING), ("deadline_at", ASCENDING)],
            name="status_deadline_at",
            partialFilterExpression={"deadline_at": {"$type": "date"}},
        ),
        # Two runs can not hold the same place of a limit.
        IndexModel([("place", ASCENDING)], name="place", unique=True, partialFilterExpression={"place": {"$type": "string"}}),
        # Listings, newest first, whatever they are narrowed to; `_id` tells apart what was submitted in the same millisecond. A thread has few runs.
        IndexModel([("status", ASCENDING), ("submitted_at", ASCENDING), ("_id", ASCENDING)], name="status_submitted_at"),
        IndexModel(
            [
                ("workflow.name", ASCENDING),
                ("workflow.version", ASCENDING),
                ("status", ASCENDING),
                ("submitted_at", ASCENDING),
                ("_id", ASCENDING),
            ],
            name="workflow_status_submitted_at",
        ),
        IndexModel([("thread_id", ASCENDING), ("submitted_at", ASCENDING), ("_id", ASCENDING)], name="thread_submitted_at"),
        # Forks, and what is being pruned, are few.
        IndexModel([("base_thread", ASCENDING)], name="base_thread", partialFilterExpression={"base_thread": {"$type": "string"}}),
        IndexModel([("pruned_at", ASCENDING)], name="pruned_at", partialFilterExpression={"pruned_at": {"$type": "date"}}),
    ],
    "activity_events": [
        # Order, optimistic concurrency and fence at once: two writers can not have the same seq (I1).
        IndexModel([("run_id", ASCENDING), ("seq", ASCENDING)], name="run_seq", unique=True),
        IndexModel(
            [("run_id", ASCENDING), ("activity_id", ASCENDING)],
            name="one_outcome",
            unique=True,
            partialFilterExpression={"outcome": True},
        ),
    ],
    "frontiers": [
        IndexModel([("run_id", ASCENDING), ("generation", ASCENDING)], name="run_generation"),
        # The few that are open, oldest first.
        IndexModel([("opened_at", ASCENDING), ("_id", ASCENDING)], name="open_opened_at", partialFilterExpression={"status": "open"}),
        IndexModel(
            [("workflow", ASCENDING), ("opened_at", ASCENDING), ("_id", ASCENDING)],
            name="open_workflow_opened_at",
            partialFilterExpression={"status": "open"},
        ),
    ],
    "resolutions": [IndexModel([("run_id", ASCENDING)], name="run")],
    "drafts": [IndexModel([("run_id", ASCENDING)], name="run")],
    "audit": [IndexModel([("run_id", ASCENDING), ("at", ASCENDING)], name="run_at")],
    "runners": [IndexModel([("state", ASCENDING), ("expires_at", ASCENDING)], name="state_expires_at")],
    "threads": [],
    "thread_states": [IndexModel([("run_id", ASCENDING)], name="run")],
    "memory": [
        IndexModel([("run_id", ASCENDING)], name="run"),
        IndexModel([("thread_id", ASCENDING), ("turn", ASCENDING), ("seq", ASCENDING)], name="thread"),
    ],
    "payloads": [IndexModel([("run_id", ASCENDING)], name="run")],
}

RETIRED_INDEXES: dict[str, list[str]] = {"runs": ["thread_turn"], "frontiers": ["status_expires_at"]}
"""Indexes of earlier releases that others have taken the place of. `ensure_schema` drops them when those are there."""


@store_call
async def ensure_schema(connection: Connection) -> None:
    """Create what is missing: collections with validators, indexes, views, and the record of the schema's version.

    Raises:
        ReplicaSetRequired, ConfigurationError: The server can not carry mongo_durable, or the user may not create collections.
        SchemaVersionMismatch: The database was set up by a newer release.
    """
    await check_server(connection)
    await _check_recorded_version(connection)
    existing = set(await connection.database.list_collection_names())
    for name, validator in VALIDATORS.items():
        if name in existing:
            await connection.database.command("collMod", name, validator=validator, validationLevel="strict", validationAction="error")
        else:
            await _create(connection, name, {"validator": validator})
        if INDEXES[name]:
            await connection.database[name].create_indexes(INDEXES[name])
        for index in RETIRED_INDEXES.get(name, []) if name in existing else []:
            await _drop_index(connection, name, index)
    for name, (source, pipeline) in VIEWS.items():
        if name in existing:
            await connection.database.command("collMod", name, viewOn=source, pipeline=pipeline)
        else:
            await _create(connection, name, {"viewOn": source, "pipeline": pipeline})
    await connection.database["meta"].update_one(
        {"_id": _META_ID}, {"$max": {"schema_version": SCHEMA_VERSION}, "$setOnInsert": {"run_id": None}}, upsert=True
    )


@store_call
async def ensure_roles(connection: Connection) -> None:
    """Create the custom roles in this database, or bring them up to date. An admin's step; not on Atlas, where roles are made outside the database.

    Raises:
        NotPermitted: The user may not create roles.
    """
    database = connection.database
    found = await database.command("rolesInfo", list(ROLES))
    existing = {each["role"] for each in found["roles"]}
    for role in ROLES:
        command = "updateRole" if role in existing else "createRole"
        await database.command({command: role, "privileges": privileges(role, database.name), "roles": []})


async def _create(connection: Connection, name: str, options: dict[str, Any]) -> None:
    try:
        await connection.database.command({"create": name, **options})
    except (CollectionInvalid, OperationFailure) as error:
        # Another process was faster; it creates the same.
        if getattr(error, "code", None) != _NAMESPACE_EXISTS:
            raise


async def _drop_index(connection: Connection, name: str, index: str) -> None:
    try:
        await connection.database[name].drop_index(index)
    except OperationFailure as error:
        # It is not there, or another process was faster.
        if error.code != _INDEX_NOT_FOUND:
            raise


async def _check_recorded_version(connection: Connection) -> bool:
    meta = await connection.database["meta"].find_one({"_id": _META_ID})
    if meta is None:
        return False
    if meta["schema_version"] > SCHEMA_VERSION:
        raise SchemaVersionMismatch(
            f"the database has schema version {meta['schema_version']}, this release knows {SCHEMA_VERSION}: upgrade mongo_durable in this process",
            expected=SCHEMA_VERSION,
            found=meta["schema_version"],
        )
    return bool(meta["schema_version"] == SCHEMA_VERSION)


@store_call
async def prepare(connection: Connection) -> None:
    """What a process does before its first work on a connection: check the server, and set up a database that is not set up yet.

    On a database that is set up, this needs no more rights than `find` on `meta`.
    """
    if connection.is_schema_set_up:
        return
    await check(connection)
    if not connection.is_schema_set_up:
        try:
            await ensure_schema(connection)
        except NotPermitted as error:
            raise ConfigurationError(
                "the database is not set up and this user may not do it: run `mongo-durable init` with an admin's URI once"
            ) from error
    connection.is_schema_set_up = True


@store_call
async def check(connection: Connection) -> None:
    """What a process does before it only reads or answers: check the server and the schema's version. It creates nothing.

    Raises:
        ReplicaSetRequired, ConfigurationError, SchemaVersionMismatch.
    """
    if connection.is_server_checked:
        return
    await check_server(connection)
    connection.is_schema_set_up = await _check_recorded_version(connection)
    connection.is_server_checked = True
    await connection.watch_loop()


@store_call
async def check_server(connection: Connection) -> None:
    """Refuse a server on which the protocol can not hold.

    Raises:
        ReplicaSetRequired: It is a standalone.
        ConfigurationError: It is older than MongoDB 6.0.
    """
    hello = await connection.client.admin.command("hello")
    if "setName" not in hello and hello.get("msg") != "isdbgrid":
        raise ReplicaSetRequired()
    build = await connection.client.admin.command("buildInfo")
    found = tuple(build["versionArray"][:2])
    if found < OLDEST_SERVER:
        raise ConfigurationError(f"MongoDB {build['version']} is too old: 6.0 or newer is needed")
