"""The checker has teeth: a database that was damaged by hand is never called sound."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pymongo
import pytest
from bson import ObjectId

from mongo_durable.protocol.events import EventType
from mongo_durable.store import frontiers, runs, schema
from mongo_durable.store.appender import Appender
from mongo_durable.store.connection import Endpoint
from tests.support import invariants
from tests.support.attempts import Attempt, answers, question, submit
from tests.support.invariants import Acknowledged, Cancelled, Promise, Received

Database = pymongo.database.Database[dict[str, Any]]


@pytest.fixture
async def sound(mongo_uri: str, database: str, client_of: Callable[[int], Any]) -> AsyncIterator[tuple[Database, list[Promise]]]:
    """A database in which much has happened: run `done` was answered and taken over, `dropped` was cancelled while it waited, `waiting` waits."""
    endpoint = Endpoint(mongo_uri, database, client=client_of(0))
    connection = endpoint.connection()
    await schema.ensure_schema(connection)
    appender = Appender(connection)

    first = await Attempt.submit(connection, appender, "done")
    await first.started(1)
    await first.completed(1, "paid")
    second = await Attempt.start(connection, appender, "done", "p2", dead_owners=["p1"])
    await second.started(2)
    frontier = await second.suspend(question("done", 3), question("done", 4))
    receipt = await frontiers.resolve(connection, frontier, answers(frontier))
    third = await Attempt.start(connection, appender, "done")
    await third.completed(2)
    await third.end(output="big " * 100_000)
    dropped = await Attempt.submit(connection, appender, "dropped")
    await dropped.suspend()
    await runs.cancel(connection, "dropped", None, "operator")
    waiting = await Attempt.submit(connection, appender, "waiting")
    await waiting.suspend()
    await submit(connection, "new")
    promises: list[Promise] = [*first.acknowledged(), *second.acknowledged(), *third.acknowledged(), Cancelled(run_id="dropped")]
    promises.append(Received(run_id="done", generation=1, answers_digest=receipt.answers_digest))
    await endpoint.aclose()
    with pymongo.MongoClient(mongo_uri) as client:
        yield client[database], promises


def _hole(database: Database) -> None:
    database["activity_events"].delete_one({"run_id": "done", "seq": 3})


def _lower_fence(database: Database) -> None:
    seq = database["activity_events"].find_one({"run_id": "waiting"}, sort=[("seq", -1)])["seq"]
    database["activity_events"].update_many({"run_id": "done", "seq": 5}, {"$set": {"fence": 1}})
    assert seq == 3


def _fence_that_falls(database: Database) -> None:
    database["activity_events"].update_one({"run_id": "done", "type": "attempt.started", "fence": 3}, {"$set": {"fence": 2}})


def _second_outcome(database: Database) -> None:
    events = database["activity_events"]
    outcome = events.find_one({"run_id": "done", "outcome": True})
    assert outcome is not None
    events.update_one({"run_id": "done", "type": "activity.started", "seq": 6}, {"$set": {"type": "activity.failed"}})
    events.drop_index("one_outcome")
    events.update_one({"run_id": "done", "seq": 6}, {"$set": {"type": "activity.completed", "activity_id": outcome["activity_id"], "outcome": True}})


def _event_after_the_end(database: Database) -> None:
    database["activity_events"].insert_one(
        {"_id": ObjectId(), "run_id": "dropped", "seq": 5, "fence": 1, "type": "activity.started", "schema_version": 1}
    )


def _open_frontier_of_cancelled_run(database: Database) -> None:
    database["frontiers"].update_one({"run_id": "dropped"}, {"$set": {"status": "open"}})


def _frontier_without_event(database: Database) -> None:
    frontier = database["frontiers"].find_one({"run_id": "waiting"})
    assert frontier is not None
    database["frontiers"].insert_one({**frontier, "_id": "waiting/2", "generation": 2})


def _event_without_frontier(database: Database) -> None:
    database["frontiers"].delete_one({"run_id": "waiting"})


def _frontier_with_one_entry_less(database: Database) -> None:
    database["frontiers"].update_one({"run_id": "done"}, {"$pop": {"entries": 1}})


def _resolution_gone(database: Database) -> None:
    database["resolutions"].delete_one({"run_id": "done"})


def _resolution_beside_an_open_frontier(database: Database) -> None:
    resolution = database["resolutions"].find_one({"run_id": "done"})
    assert resolution is not None
    database["resolutions"].insert_one({**resolution, "_id": "waiting/1", "run_id": "waiting"})


def _other_answers(database: Database) -> None:
    resolution = database["resolutions"].find_one({"run_id": "done"})
    assert resolution is not None
    database["resolutions"].update_one({"run_id": "done"}, {"$set": {"answers": dict.fromkeys(resolution["answers"], "no")}})


def _head_without_event(database: Database) -> None:
    database["runs"].update_one({"_id": "waiting"}, {"$set": {"status": "ready"}})


def _head_with_another_fence(database: Database) -> None:
    database["runs"].update_one({"_id": "done"}, {"$inc": {"fence": 1}})


def _head_with_another_generation(database: Database) -> None:
    database["runs"].update_one({"_id": "waiting"}, {"$inc": {"generation": 1}})


def _other_output(database: Database) -> None:
    database["runs"].update_one({"_id": "done"}, {"$set": {"output": "else"}})


def _running_without_owner(database: Database) -> None:
    database["runs"].update_one({"_id": "new"}, {"$set": {"status": "running"}})


def _acknowledged_event_gone(database: Database) -> None:
    last = database["activity_events"].find_one({"run_id": "done"}, sort=[("seq", -1)])
    assert last is not None
    database["activity_events"].delete_many({"run_id": "done", "seq": {"$gte": last["seq"] - 1}})


def _chunk_gone(database: Database) -> None:
    database["payloads"].delete_one({"run_id": "done"})


def _thread_never_freed(database: Database) -> None:
    database["threads"].update_one({"_id": "done"}, {"$set": {"active_run": "done"}})


def _thread_freed_too_soon(database: Database) -> None:
    database["threads"].update_one({"_id": "waiting"}, {"$set": {"active_run": None}})


def _uncancelled(database: Database) -> None:
    database["runs"].update_one({"_id": "dropped"}, {"$set": {"status": "failed"}})


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (_hole, "I1"),
        (_lower_fence, "I2"),
        (_fence_that_falls, "I2"),
        (_second_outcome, "I3"),
        (_event_after_the_end, "fold"),
        (_frontier_without_event, "I5"),
        (_event_without_frontier, "I5"),
        (_frontier_with_one_entry_less, "I5"),
        (_open_frontier_of_cancelled_run, "I6"),
        (_resolution_gone, "I6"),
        (_resolution_beside_an_open_frontier, "I6"),
        (_other_answers, "I6"),
        (_running_without_owner, "I9"),
        (_resolution_gone, "I10"),
        (_acknowledged_event_gone, "I10"),
        (_uncancelled, "I10"),
        (_head_without_event, "head"),
        (_head_with_another_fence, "head"),
        (_head_with_another_generation, "head"),
        (_other_output, "head"),
        (_thread_never_freed, "thread"),
        (_thread_freed_too_soon, "thread"),
        (_chunk_gone, "payload"),
    ],
)
async def test_damage_is_found(damage: Callable[[Database], None], fault: str, sound: tuple[Database, list[Promise]], mongo_uri: str) -> None:
    """A database is sound before it is damaged, and after it the checker names what was damaged."""
    database, promises = sound
    invariants.assert_invariants(mongo_uri, database.name, promises)
    for collection in ("runs", "frontiers"):
        database.command("collMod", collection, validationLevel="off")  # the server would refuse most of it
    damage(database)
    found = list(invariants.faults(invariants.read(database.client, database.name), promises))
    assert any(each.startswith(f"{fault} ") for each in found), found
    with pytest.raises(AssertionError):
        invariants.assert_invariants(mongo_uri, database.name, promises)


async def test_a_promise_of_what_never_happened_is_broken(sound: tuple[Database, list[Promise]]) -> None:
    """An acknowledgement counts by seq, fence and type: another event at the same seq does not keep it."""
    database, _ = sound
    snapshot = invariants.read(database.client, database.name)
    first = snapshot.events["done"][0]
    told = Acknowledged(run_id="done", seq=first["seq"], fence=first["fence"], type=EventType.RUN_SUBMITTED)
    assert not list(invariants.faults(snapshot, [told]))
    for other in (
        Acknowledged(run_id="done", seq=first["seq"], fence=7, type=EventType.RUN_SUBMITTED),
        Acknowledged(run_id="done", seq=first["seq"], fence=first["fence"], type=EventType.RUN_COMPLETED),
        Acknowledged(run_id="none", seq=1, fence=0, type=EventType.RUN_SUBMITTED),
        Received(run_id="done", generation=1, answers_digest="0" * 32),
        Cancelled(run_id="done"),
    ):
        assert len(list(invariants.faults(snapshot, [other]))) == 1
