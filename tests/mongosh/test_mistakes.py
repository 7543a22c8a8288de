"""What people get wrong who write to the collections by hand: the server refuses it, or the run goes on as if nothing had been, or it is found out.

No validator can refuse a change of a document that still looks right after it, such as another value in an event: an append-only role does that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pymongo
import pytest
from pymongo.database import Database

from mongo_durable.engine import resolving
from mongo_durable.errors import CorruptHistory, Superseded
from mongo_durable.protocol.events import RunStatus
from mongo_durable.protocol.history import fold
from mongo_durable.store import heads
from mongo_durable.store.appender import Appender
from mongo_durable.store.connection import Connection, Endpoint
from mongo_durable.store.documents import StoredFrontier
from mongo_durable.store.events import read_history
from tests.support.attempts import Attempt, answers, question
from tests.support.mongosh import Mongosh, MongoshError

pytestmark = pytest.mark.xdist_group("mongosh")

_INVALID, _DUPLICATE = 121, 11000
_COLLECTIONS = ("runs", "activity_events", "frontiers", "resolutions", "threads")

# RUN is a run that waits at generation 1, event 5, for an answer to ACT; activity DONE of it has its outcome.
REFUSED: dict[str, tuple[int, str]] = {
    "a resolution by hand": (_INVALID, "db.resolutions.insertOne({_id: 'RUN/1', run_id: 'RUN', answers: {ACT: true}})"),
    "a resolution without its digest": (_INVALID, "db.resolutions.insertOne({...RESOLUTION, answers_digest: null})"),
    "a resolution of another frontier": (_INVALID, "db.resolutions.insertOne({...RESOLUTION, generation: 2})"),
    "answers in a list": (_INVALID, "db.resolutions.insertOne({...RESOLUTION, answers: [true]})"),
    "no answers": (_INVALID, "db.resolutions.insertOne({...RESOLUTION, answers: {}})"),
    "a frontier declared resolved": (_INVALID, "db.frontiers.updateOne({run_id: 'RUN'}, {$set: {status: 'resolved'}})"),
    "a frontier's status that there is not": (_INVALID, "db.frontiers.updateOne({run_id: 'RUN'}, {$set: {status: 'closed'}})"),
    "a frontier upserted by a wrong id": (_INVALID, "db.frontiers.updateOne({_id: 'RUN-1'}, {$set: {status: 'resolved'}}, {upsert: true})"),
    "a frontier without its questions": (_INVALID, "db.frontiers.updateOne({run_id: 'RUN'}, {$set: {entries: []}})"),
    "a frontier of another generation": (_INVALID, "db.frontiers.updateOne({run_id: 'RUN'}, {$inc: {generation: 1}})"),
    "a run declared ready": (_INVALID, "db.runs.updateOne({_id: 'RUN'}, {$set: {status: 'ready'}})"),
    "a run declared ready from now": (_INVALID, "db.runs.updateOne({_id: 'RUN'}, {$set: {status: 'ready', available_at: new Date()}})"),
    "a run declared pending": (_INVALID, "db.runs.updateOne({_id: 'RUN'}, {$set: {status: 'pending'}})"),
    "a run declared running": (_INVALID, "db.runs.updateOne({_id: 'RUN'}, {$set: {status: 'running'}})"),
    "a run declared completed": (_INVALID, "db.runs.updateOne({_id: 'RUN'}, {$set: {status: 'completed', output: 7}})"),
    "a run declared cancelled": (_INVALID, "db.runs.updateOne({_id: 'RUN'}, {$set: {status: 'cancelled'}})"),
    "a status with a slip": (_INVALID, "db.runs.updateOne({_id: 'RUN'}, {$set: {status: 'canceled'}})"),
    "a run upserted by a wrong id": (_INVALID, "db.runs.updateOne({_id: 'RUN-typo'}, {$set: {status: 'cancelled'}}, {upsert: true})"),
    "a run inserted by hand": (
        _INVALID,
        "db.runs.insertOne({_id: 'RUN-new', run_id: 'RUN-new', status: 'pending', workflow: {name: 'w'}})",
    ),
    "a run copied under another id": (_INVALID, "db.runs.insertOne({...db.runs.findOne({_id: 'RUN'}), _id: 'RUN-copy'})"),
    "a run without its fence": (_INVALID, "db.runs.updateOne({_id: 'RUN'}, {$unset: {fence: 1}})"),
    "a run without its input": (_INVALID, "db.runs.updateOne({_id: 'RUN'}, {$unset: {input: 1}})"),
    "a run without its workflow's version": (_INVALID, "db.runs.updateOne({_id: 'RUN'}, {$unset: {'workflow.version': 1}})"),
    "a fence in words": (_INVALID, "db.runs.updateOne({_id: 'RUN'}, {$set: {fence: '2'}})"),
    "a negative fence": (_INVALID, "db.runs.updateOne({_id: 'RUN'}, {$set: {fence: -1}})"),
    "a generation ahead of the attempts": (_INVALID, "db.runs.updateOne({_id: 'RUN'}, {$inc: {generation: 1}})"),
    "a generation in words": (_INVALID, "db.runs.updateOne({_id: 'RUN'}, {$set: {generation: '1'}})"),
    "a cancel that is just true": (_INVALID, "db.runs.updateOne({_id: 'RUN'}, {$set: {cancel: true}})"),
    "a time in words": (_INVALID, "db.runs.updateOne({_id: 'RUN'}, {$set: {available_at: 'now'}})"),
    "an event's number in words": (_INVALID, "db.activity_events.insertOne({run_id: 'RUN', seq: '6', fence: 1, type: 'activities.resolved'})"),
    "an event between two others": (_INVALID, "db.activity_events.insertOne({run_id: 'RUN', seq: 4.5, fence: 1, type: 'step.committed'})"),
    "an event without its run": (_INVALID, "db.activity_events.insertOne({seq: 6, fence: 1, type: 'activities.resolved'})"),
    "an event at a number that is taken": (
        _DUPLICATE,
        "db.activity_events.insertOne({run_id: 'RUN', seq: 5, fence: 1, type: 'run.retried'})",
    ),
    "a second outcome": (
        _DUPLICATE,
        "db.activity_events.insertOne({run_id: 'RUN', seq: 6, fence: 1, type: 'activity.failed', activity_id: 'DONE', outcome: true})",
    ),
    "a runner declared alive in words": (_INVALID, "db.runners.insertOne({_id: 'RUN', state: 'alive'})"),
}


async def _waiting(connection: Connection, appender: Appender, run_id: str) -> StoredFrontier:
    attempt = await Attempt.submit(connection, appender, run_id)
    attempt.started(1)
    await attempt.completed(1, "found")
    return await attempt.suspend(question(run_id, 2))


def _statement(template: str, run_id: str, frontier: StoredFrontier, done: str) -> str:
    resolution = f"{{_id: '{run_id}/1', run_id: '{run_id}', schema_version: 1, generation: 1, seq: 6, answers: {{ACT: true}}, "
    resolution += f"answers_digest: '{'0' * 32}', resolved_by: null, note: null, at: new Date()}}"
    return template.replace("RESOLUTION", resolution).replace("RUN", run_id).replace("ACT", frontier.entries[0].activity_id).replace("DONE", done)


async def _goes_on(connection: Connection, appender: Appender, run_id: str, frontier: StoredFrontier) -> None:
    """The run takes its answer, and comes to its end."""
    await resolving.resolve(connection, run_id, answers(frontier))
    again = await Attempt.start(connection, appender, run_id)
    history = fold(run_id, await read_history(connection, run_id))
    assert history.status is RunStatus.RUNNING
    await again.end(output="done")
    head = await heads.get(connection, run_id)
    assert (head.status, head.output) == (RunStatus.COMPLETED, "done")


@dataclass(frozen=True)
class Tried:
    """The run on which everything is tried that the server refuses."""

    run_id: str
    frontier: StoredFrontier
    done: str
    database: Database[dict[str, Any]]

    def documents(self) -> dict[str, Any]:
        """Everything that stands under its name, or one like it."""
        begins = {"$regex": f"^{self.run_id}"}
        return {name: list(self.database[name].find({"$or": [{"_id": begins}, {"run_id": begins}]}).sort("_id", 1)) for name in _COLLECTIONS}


@pytest.fixture(scope="module")
def tried(mongo_uri: str, shared_database: str) -> Iterator[Tried]:
    """One run for all of them, because none changes it."""

    async def wait() -> tuple[StoredFrontier, str]:
        endpoint = Endpoint(mongo_uri, shared_database)
        connection = endpoint.connection()
        frontier = await _waiting(connection, Appender(connection), "run-tried")
        done = await connection.activity_events.find_one({"run_id": "run-tried", "type": "activity.completed"})
        await endpoint.aclose()
        assert done is not None
        return frontier, done["activity_id"]

    frontier, done = asyncio.run(wait())
    with pymongo.MongoClient[dict[str, Any]](mongo_uri) as client:
        yield Tried("run-tried", frontier, done, client[shared_database])


@pytest.mark.parametrize("what", REFUSED)
def test_the_server_refuses_it(tried: Tried, mongosh: Mongosh, what: str) -> None:
    """Nothing is changed."""
    code, template = REFUSED[what]
    before = tried.documents()
    with pytest.raises(MongoshError) as refused:
        mongosh.value(_statement(template, tried.run_id, tried.frontier, tried.done))
    assert refused.value.code == code
    assert tried.documents() == before


async def test_after_all_that_the_run_goes_on(connection: Connection, appender: Appender, tried: Tried) -> None:
    """It takes its answer and ends as if nobody had tried."""
    await _goes_on(connection, appender, tried.run_id, tried.frontier)


async def test_no_status_can_be_set_by_hand(connection: Connection, appender: Appender, run_id: str, mongosh: Mongosh) -> None:
    """Wherever a run is in its life: another status than its own is refused, but one end for another, from which nothing goes on."""
    await Attempt.submit(connection, appender, f"{run_id}-running")
    frontier = await _waiting(connection, appender, f"{run_id}-ready")
    await resolving.resolve(connection, frontier.run_id, answers(frontier))
    await _waiting(connection, appender, f"{run_id}-suspended")
    await (await Attempt.submit(connection, appender, f"{run_id}-completed")).end()
    tried = [(own, other) for own in ("running", "ready", "suspended", "completed") for other in RunStatus if other != own]
    tried = [(own, other) for own, other in tried if not (RunStatus(own).is_end and other.is_end)]
    change = f"([own, other]) => db.runs.updateOne({{_id: '{run_id}-' + own}}, {{$set: {{status: other}}}})"
    ran = "(pair) => { try { change(pair); return pair.join() } catch (error) { return error.code } }"
    found = mongosh.value(f"(() => {{ const change = {change}; return {json.dumps(tried)}.map({ran}) }})()")
    assert found == [_INVALID] * len(tried)


@pytest.mark.parametrize(
    "statement",
    [
        "db.runs.updateOne({_id: 'RUN'}, {$set: {fence: 9}})",
        "db.runs.updateOne({_id: 'RUN'}, {$set: {owner: null, claimed_at: null}})",
        "db.runs.updateOne({_id: 'RUN-typo'}, {$set: {status: 'cancelled'}})",
        "db.frontiers.updateOne({run_id: 'RUN'}, {$set: {note: 'asked her'}})",
        "db.frontiers.updateMany({run_id: 'RUN', status: 'Open'}, {$set: {status: 'resolved'}})",
    ],
    ids=["a higher fence", "nobody's", "a wrong id", "a note", "a filter with a slip"],
)
async def test_it_does_no_harm(connection: Connection, appender: Appender, run_id: str, mongosh: Mongosh, statement: str) -> None:
    """The run takes its answer, and ends."""
    frontier = await _waiting(connection, appender, run_id)
    mongosh.value(_statement(statement, run_id, frontier, ""))
    await _goes_on(connection, appender, run_id, frontier)


@pytest.mark.parametrize(
    ("insert", "remove", "is_stuck"),
    [
        ("db.resolutions.insertOne(RESOLUTION)", "db.resolutions.deleteOne({_id: 'RUN/1'})", True),
        (
            "db.activity_events.insertOne({run_id: 'RUN', seq: 6, fence: 1, type: 'activities.resolved', generation: 1, answers: {ACT: true}})",
            "db.activity_events.deleteOne({run_id: 'RUN', seq: 6})",
            False,
        ),
    ],
    ids=["a resolution like a right one", "the event of an answer"],
)
async def test_half_an_answer_is_found_out(
    connection: Connection, appender: Appender, run_id: str, mongosh: Mongosh, insert: str, remove: str, is_stuck: bool
) -> None:
    """Whoever answers then hears what stands in the way, in Python and in mongosh; nothing is lost, and with it gone the run goes on."""
    frontier = await _waiting(connection, appender, run_id)
    mongosh.value(_statement(insert, run_id, frontier, ""))
    with pytest.raises(CorruptHistory):
        await resolving.resolve(connection, run_id, answers(frontier))
    with pytest.raises(MongoshError) as refused:
        mongosh.value(f"durable.answer({json.dumps(run_id)}, true)")
    assert refused.value.name == "CorruptHistory"
    row = await connection.database["stuck_runs"].find_one({"run": run_id})
    assert (row is not None) == is_stuck
    mongosh.value(_statement(remove, run_id, frontier, ""))
    await _goes_on(connection, appender, run_id, frontier)


@pytest.mark.parametrize(
    "event",
    [
        "{run_id: 'RUN', seq: 5, fence: 1, type: 'activity.completed', activity_id: 'DONE', position: POSITION, value: 'forged'}",
        "{run_id: 'RUN', seq: 5, fence: 1, type: 'activity.complete', activity_id: 'DONE', position: POSITION, value: 'forged'}",
        "{run_id: 'RUN', seq: 5, fence: 1, type: 'activity.completed', activity_id: 'DONE', position: 'there', value: 'forged'}",
        "{run_id: 'RUN', seq: 5, fence: 7, type: 'step.committed', step: 1, activities: 1, digest: ''}",
    ],
    ids=["a second outcome without its flag", "a type with a slip", "a position that there is not", "another fence"],
)
async def test_an_event_by_hand_ends_the_attempt_and_is_found_out(
    connection: Connection, appender: Appender, run_id: str, mongosh: Mongosh, event: str
) -> None:
    """The attempt that runs can record nothing behind it, and whoever reads the history hears of it: it is never taken for a fact."""
    attempt = await Attempt.submit(connection, appender, run_id)
    attempt.started(1)
    await attempt.completed(1, "found")
    recorded = await connection.activity_events.find_one({"run_id": run_id, "type": "activity.completed"})
    assert recorded is not None
    statement = event.replace("RUN", run_id).replace("DONE", recorded["activity_id"]).replace("POSITION", json.dumps(recorded["position"]))
    mongosh.value(f"db.activity_events.insertOne({statement})")
    with pytest.raises(Superseded):
        await attempt.started(2)
    with pytest.raises(CorruptHistory):
        fold(run_id, await read_history(connection, run_id))
