"""Setting a database up, and refusing one that this release cannot work with."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pymongo
import pytest

from mongo_durable.dev import find_mongod
from mongo_durable.errors import ReplicaSetRequired, SchemaVersionMismatch
from mongo_durable.store import frontiers, heads, runs, schema
from mongo_durable.store.appender import Appender
from mongo_durable.store.connection import Connection, Endpoint
from mongo_durable.store.documents import SCHEMA_VERSION
from mongo_durable.store.events import read_history
from mongo_durable.store.runs import ThreadState
from tests.store.conftest import Commands
from tests.support.attempts import Attempt, answers, submit


@pytest.fixture
def fresh(client: Any, database: str) -> Connection:
    """A database in which there is nothing yet."""
    return Connection(client, database, is_owned=False)


async def _description(connection: Connection) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async for each in await connection.database.list_collections():
        indexes = {}
        if each["type"] == "collection":
            indexes = await connection.database[each["name"]].index_information()
        each.pop("info", None)
        if "validator" in each["options"]:  # the server does not show its defaults until they are named once
            each["options"] = {"validationLevel": "strict", "validationAction": "error", **each["options"]}
        found[each["name"]] = {**each, "indexes": indexes}
    return found


async def test_everything_is_created(fresh: Connection) -> None:
    """Every collection has its validator and its indexes, every view is there, and the version is recorded."""
    await schema.ensure_schema(fresh)
    found = await _description(fresh)
    for name, validator in schema.VALIDATORS.items():
        assert found[name]["options"]["validator"] == validator
        assert set(found[name]["indexes"]) == {"_id_", *(index.document["name"] for index in schema.INDEXES[name])}
    assert {each for each, description in found.items() if description["type"] == "view"} == set(schema.VIEWS)
    meta = await fresh.database["meta"].find_one({})
    assert meta is not None
    assert meta["schema_version"] == SCHEMA_VERSION


async def test_doing_it_again_changes_nothing(fresh: Connection) -> None:
    """An admin may run it any number of times."""
    await schema.ensure_schema(fresh)
    before = await _description(fresh)
    await schema.ensure_schema(fresh)
    assert await _description(fresh) == before


async def test_what_is_missing_or_older_is_put_right(fresh: Connection) -> None:
    """A database of an older release gets today's validators, indexes and views, and keeps its documents."""
    await schema.ensure_schema(fresh)
    before = await _description(fresh)
    await submit(fresh, "kept")
    await fresh.database.command("collMod", "runs", validator={})
    await fresh.activity_events.drop_index("one_outcome")
    await fresh.database.drop_collection("open_frontiers")
    await fresh.database["meta"].update_one({}, {"$set": {"schema_version": 0}})
    await schema.prepare(fresh)
    assert await _description(fresh) == before
    assert (await heads.get(fresh, "kept")).run_id == "kept"


async def test_many_may_do_it_at_once(fresh: Connection) -> None:
    """Processes that all find the database empty set it up together, and so do those that find it set up."""
    for _ in range(2):
        await asyncio.gather(*(schema.ensure_schema(Connection(fresh.client, fresh.database.name, is_owned=False)) for _ in range(8)))
    assert set(schema.VALIDATORS) <= set(await _description(fresh))


async def test_a_prepared_database_needs_no_further_rights(fresh: Connection, commands: Commands) -> None:
    """On a database that is set up, a process only reads; the second time on a connection it asks nothing at all."""
    await schema.ensure_schema(fresh)
    commands.forget()
    await schema.prepare(fresh)
    assert {name for name, _ in commands.sent} <= {"hello", "buildInfo", "find"}
    commands.forget()
    await schema.prepare(fresh)
    assert commands.sent == []
    await fresh.aclose()


async def test_a_database_of_a_newer_release_is_refused(fresh: Connection) -> None:
    """Neither used nor changed; the message names both versions."""
    await schema.ensure_schema(fresh)
    await fresh.database["meta"].update_one({}, {"$set": {"schema_version": SCHEMA_VERSION + 1}})
    for call in (schema.prepare, schema.ensure_schema):
        with pytest.raises(SchemaVersionMismatch) as refused:
            await call(fresh)
        assert (refused.value.expected, refused.value.found) == (SCHEMA_VERSION, SCHEMA_VERSION + 1)


async def _reads(connection: Connection) -> dict[str, tuple[str, Callable[[], Awaitable[Any]]]]:
    appender = Appender(connection)
    attempt = await Attempt.submit(connection, appender, "r", value="x" * 300_000)
    frontier = await attempt.suspend()
    await frontiers.resolve(connection, frontier, answers(frontier))
    again = await Attempt.start(connection, appender, "r")
    await again.end(state=ThreadState(serde_type="msgpack", data=b"x"))
    return {
        "head": ("runs", lambda: heads.get(connection, "r")),
        "listing": ("runs", lambda: heads.listing(connection)),
        "history": ("activity_events", lambda: read_history(connection, "r")),
        "frontier": ("frontiers", lambda: frontiers.get(connection, "r", 1)),
        "receipt": ("resolutions", lambda: frontiers.resolve(connection, frontier, answers(frontier))),
        "thread state": ("thread_states", lambda: runs.thread_state(connection, "r", 1)),
        "large value": ("payloads", lambda: heads.get(connection, "r")),
    }


@pytest.mark.parametrize("what", ["head", "listing", "history", "frontier", "receipt", "thread state", "large value"])
async def test_a_document_of_a_newer_release_is_refused(what: str, fresh: Connection) -> None:
    """In every kind of read: this release cannot know what such a document means."""
    await schema.ensure_schema(fresh)
    collection, read = (await _reads(fresh))[what]
    await read()
    await fresh.database[collection].update_many({}, {"$set": {"schema_version": SCHEMA_VERSION + 1}})
    with pytest.raises(SchemaVersionMismatch):
        await read()
    await fresh.aclose()


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[str]:
    """A server that is no replica set."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["--port", str(port), "--bind_ip", "127.0.0.1", "--dbpath", str(tmp_path), "--logpath", str(tmp_path / "log"), "--nounixsocket"]
    with subprocess.Popen([find_mongod(), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            uri = f"mongodb://127.0.0.1:{port}"
            with pymongo.MongoClient(uri, directConnection=True) as client:
                client.admin.command("ping")
            yield uri
        finally:
            server.terminate()


async def test_a_standalone_is_refused(standalone: str) -> None:
    """A server without transactions and change streams is refused before anything is written, with what to do."""
    endpoint = Endpoint(standalone, "standalone")
    connection = endpoint.connection()
    for call in (schema.check_server, schema.prepare, schema.ensure_schema):
        with pytest.raises(ReplicaSetRequired, match="replSet"):
            await call(connection)
    assert await connection.database.list_collection_names() == []
    await endpoint.aclose()
