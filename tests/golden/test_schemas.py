"""A database that an earlier release has set up: today's code works on it as it is, and `mongo-durable init` brings it to today's schema.

A file in `schemas` is what `create`, `listIndexes` and the record of the version said then, one collection or view a line. Like the histories, it is
never changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pymongo
import pytest
from bson import json_util

from mongo_durable import DurableClient
from mongo_durable.protocol.events import EventType
from mongo_durable.store import schema
from mongo_durable.store.connection import Endpoint
from tests.golden.histories import load, put, run_id_of
from tests.golden.record import BY_NAME
from tests.golden.test_golden import Shelf

FILES = sorted((Path(__file__).parent / "schemas").iterdir())
SHAPE = "loop"


@pytest.fixture(params=FILES, ids=[each.stem for each in FILES])
def old(request: pytest.FixtureRequest, mongo_uri: str, database: str) -> Iterator[Shelf]:
    """Such a database, with a run that has just been answered."""
    with pymongo.MongoClient(mongo_uri, tz_aware=True) as client:
        found = client[database]
        for line in request.param.read_text(encoding="utf-8").splitlines():
            described = json_util.loads(line)
            if "meta" in described:
                found["meta"].insert_one(described["meta"])
                continue
            if described["create"]["create"] != "meta":
                found.command(described["create"])
            if described.get("indexes"):
                found.command({"createIndexes": described["create"]["create"], "indexes": described["indexes"]})
        recorded = load(SHAPE)
        put(found, recorded[: 1 + max(index for index, each in enumerate(recorded) if each.type is EventType.ACTIVITIES_RESOLVED)])
        yield Shelf(mongo_uri, database, found)


def shown(database: pymongo.database.Database[dict[str, Any]]) -> dict[str, Any]:
    """Validators, views and indexes."""
    found: dict[str, Any] = {}
    for each in database.list_collections():
        if not each["name"].startswith("system."):
            options = {name: value for name, value in each["options"].items() if name in ("validator", "viewOn", "pipeline")}
            found[each["name"]] = options, database[each["name"]].index_information() if each["type"] == "collection" else {}
    return found


@pytest.mark.parametrize("is_brought_up", [False, True], ids=["as it is", "after init"])
async def test_an_older_database_goes_on(old: Shelf, is_brought_up: bool) -> None:
    """Its runs are listed, executed, exported and pruned; after `init`, repeated, its schema is that of a new database."""
    run_id = run_id_of(SHAPE)
    endpoint = Endpoint(old.uri, old.name)
    if is_brought_up:
        new = Endpoint(old.uri, f"{old.name}_new")
        try:
            await schema.ensure_schema(new.connection())
            for _ in range(2):
                await schema.ensure_schema(endpoint.connection())
                assert shown(old.database) == shown(old.database.client[new.database])
        finally:
            old.database.client.drop_database(new.database)
            await new.aclose()
    await endpoint.aclose()
    await old.go_on(run_id, BY_NAME[SHAPE].make)
    async with DurableClient(old.uri, database=old.name) as client:
        assert [(each.run_id, each.status) for each in await client.list_runs(workflow="tested", status="completed")] == [(run_id, "completed")]
        assert await client.unserved_runs() == []
        assert await client.open_frontiers() == []
        assert len([line async for line in client.export(run_id)]) == 1 + len(old.events(run_id))
        assert await client.prune(older_than=timedelta()) == [run_id]
    assert old.events(run_id) == []
