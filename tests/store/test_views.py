"""What people read in mongosh without any script: the three views."""

from __future__ import annotations

import json
import shlex
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from mongo_durable.protocol.events import EventType
from mongo_durable.store import claims, frontiers, runs, schema, views
from mongo_durable.store.appender import Appender
from mongo_durable.store.connection import Connection, Endpoint
from mongo_durable.store.documents import Answerer
from tests.support.attempts import Attempt, answers, question, submission


@pytest.fixture
async def place(mongo_uri: str, database: str) -> AsyncIterator[Connection]:
    """A database of the test's own."""
    endpoint = Endpoint(mongo_uri, database)
    connection = endpoint.connection()
    await schema.ensure_schema(connection)
    yield connection
    await endpoint.aclose()


async def _rows(connection: Connection, view: str, **wanted: Any) -> list[dict[str, Any]]:
    return await connection.database[view].find(wanted).to_list(None)  # type: ignore[no-any-return]


async def test_a_row_for_each_open_question(place: Connection) -> None:
    """Oldest first; how long it waits, what is asked, and the whole answer to type, in mongosh and in a shell, whatever the run is called."""
    appender = Appender(place)
    names = ["po-17", 'it\'s "new" $(x)']
    for name in names:
        attempt = await Attempt.submit(place, appender, name)
        await attempt.suspend(question(name, 1, {"buy": "desk"}), *([question(name, 2, "x" * 300_000)] if name != "po-17" else []))
    answered = await (await Attempt.submit(place, appender, "answered")).suspend()
    await frontiers.resolve(place, answered, answers(answered))
    single, first, second = await _rows(place, "open_frontiers")
    assert [each["run"] for each in (single, first, second)] == ["po-17", names[1], names[1]]
    assert list(single) == [
        "run", "workflow", "age", "name", "question", "activity_id", "position", "answer_in_mongosh", "answer_in_shell", "generation", "digest",
    ]  # fmt: skip
    assert single["question"] == {"buy": "desk"}
    assert second["question"] == "(301 kB, stored apart)"
    assert single["age"].endswith(" ms") or single["age"].endswith(" s")
    assert single["answer_in_mongosh"] == 'durable.answer("po-17", <answer>)'
    assert single["answer_in_shell"] == f"mongo-durable resolve po-17 --answer '{single['activity_id']}=<json>'"
    ids = [first["activity_id"], second["activity_id"]]
    asked = ", ".join(f"{each}: <answer>" for each in ids)
    assert first["answer_in_mongosh"] == second["answer_in_mongosh"] == f"durable.resolve({json.dumps(names[1])}, {{{asked}}})"
    options = [part for each in ids for part in ("--answer", f"{each}=<json>")]
    assert shlex.split(first["answer_in_shell"]) == ["mongo-durable", "resolve", names[1], *options]


async def test_a_timeline_says_who_did_what_and_for_how_long(place: Connection) -> None:
    """One row an event, in order: the attempt, what it is about, and how long that took which it ends."""
    appender = Appender(place)
    attempt = await Attempt.submit(place, appender, "po-17", value={"item": "desk"})
    attempt.started(1, {"account": 7})
    await attempt.completed(1, "x" * 3000)
    frontier = await attempt.suspend(question("po-17", 2))
    await frontiers.resolve(place, frontier, answers(frontier), Answerer(by="ada", note="fine"))
    again = await Attempt.start(place, appender, "po-17", owner="p2")
    await again.end(EventType.RUN_FAILED)
    rows = await _rows(place, "run_timeline", run="po-17")
    assert [(each["seq"], each["attempt"], each["event"], each["what"]) for each in rows] == [
        (1, 0, "run.submitted", "procurement 1"),
        (2, 1, "attempt.started", "process p1"),
        (3, 1, "activity.started", "TOOL pay agent/1/node@1#1"),
        (4, 1, "activity.completed", "TOOL pay agent/1/node@1#1"),
        (5, 1, "activities.suspended", "asks approval"),
        (6, 1, "activities.resolved", "by ada “fine”"),
        (7, 2, "attempt.started", "process p2"),
        (8, 2, "run.failed", "ValueError: no"),
    ]
    assert [each["seq"] for each in rows if "how_long" in each] == [5, 6, 8]  # the events of this test's activities have no times
    assert rows[0]["value"] == {"item": "desk"}
    assert rows[3]["value"] == "(4 kB)"
    assert rows[5]["answers"] == answers(frontier)


async def test_a_duration_is_the_activitys_own(place: Connection) -> None:
    """From its last start to its outcome, though others began in between."""
    for seq, kind, activity, at in ((1, "started", "a", 0), (2, "started", "a", 1000), (3, "started", "b", 2500), (4, "completed", "a", 4000)):
        document = {"run_id": "r", "seq": seq, "fence": 1, "type": f"activity.{kind}", "activity_id": activity, "kind": "TOOL", "name": activity}
        stored = await place.activity_events.insert_one(document)
        await place.activity_events.update_one({"_id": stored.inserted_id}, [{"$set": {"at": {"$toDate": 1_700_000_000_000 + at}}}])
    rows = await _rows(place, "run_timeline", run="r")
    assert [each.get("how_long") for each in rows] == [None, None, None, "3 s"]


async def test_a_length_is_for_people(place: Connection) -> None:
    """In the words of the command line."""
    lengths = {0: "0 ms", -5: "0 ms", 999: "999 ms", 1500: "1.5 s", 119_949: "119.9 s", 120_000: "2 min", 7_200_000: "2 h", 200_000_000: "2 d"}
    shown = {"is": views.length({"$toLong": "$ms"})}
    rows = await place.aggregate(place.database, [{"$documents": [{"ms": each} for each in lengths]}, {"$project": shown}])
    assert [row["is"] for row in rows] == list(lengths.values())


async def test_the_timeline_reads_one_run_alone(place: Connection) -> None:
    """Asked for a run, the server goes through that run's events by the index, not through all events."""
    appender = Appender(place)
    for number in range(20):
        await (await Attempt.submit(place, appender, f"run-{number}")).end()
    explained = await place.database.command("explain", {"find": "run_timeline", "filter": {"run": "run-7"}}, verbosity="executionStats")
    first, *others = explained["stages"]
    assert first["$cursor"]["executionStats"]["totalDocsExamined"] == 3
    assert [each["totalDocsExamined"] for each in others if "$lookup" in each] == [1]


async def test_a_run_that_does_not_go_on_is_named_with_its_reason(place: Connection) -> None:
    """Each way to be stuck; what runs, waits for an answer in time, is not due yet or has ended is not listed."""
    appender = Appender(place)
    live = {"schema_version": 1, "state": "live", "serves": [{"name": "procurement", "version": "1"}]}
    now = (await place.client.admin.command("hello"))["localTime"]
    await place.runners.insert_many(
        [
            {"_id": "alive", **live, "expires_at": now + timedelta(hours=1)},
            {"_id": "dead", **live, "state": "dead", "expires_at": now},
            {"_id": "late", **live, "expires_at": now},
        ]
    )
    await runs.submit(place, submission("served"))
    await runs.submit(place, submission("unserved", version="2"))
    await runs.submit(place, submission("queued", version="2", thread_id="unserved"), is_queued_when_busy=True)
    for owner in ("alive", "dead", "late", "gone"):
        await Attempt.submit(place, appender, f"run-of-{owner}", owner=owner)
    await (await Attempt.submit(place, appender, "asks")).suspend()
    await (await Attempt.submit(place, appender, "asks-in-time")).suspend(expires_in=timedelta(hours=1))
    await (await Attempt.submit(place, appender, "asks-too-late")).suspend(expires_in=timedelta(milliseconds=-1))
    await (await Attempt.submit(place, appender, "asks-nothing")).suspend()
    await place.frontiers.delete_one({"run_id": "asks-nothing"})
    await (await Attempt.submit(place, appender, "asks-what-is-answered")).suspend()
    await place.frontiers.update_one({"run_id": "asks-what-is-answered"}, [{"$set": {"status": "resolved", "closed_at": "$$NOW"}}])
    answered = await (await Attempt.submit(place, appender, "answered")).suspend()
    await frontiers.resolve(place, answered, answers(answered))
    troubled = await Attempt.submit(place, appender, "troubled")
    await appender.drain(troubled.channel)
    await claims.release(place, troubled.claim, held_back="StoreUnavailable: away")
    await (await Attempt.submit(place, appender, "done")).end()
    await runs.submit(place, submission("overdue"))
    await place.runs.update_one({"_id": "overdue"}, [{"$set": {"deadline_at": "$$NOW"}}])
    rows = {each["run"]: each for each in await _rows(place, "stuck_runs")}
    beginnings = {
        "unserved": "no live runner serves procurement 2",
        "run-of-dead": "its process dead is dead: a runner that serves procurement 1 has to take it over",
        "run-of-late": "the lease of its process late has run out",
        "run-of-gone": "its process gone has vanished",
        "asks-too-late": "frontier 1 is past its deadline",
        "asks-nothing": "it waits on frontier 1, and there is none",
        "asks-what-is-answered": "it waits on frontier 1, which is resolved",
        "troubled": "held back until 20",
        "overdue": "it is past its deadline",
    }
    assert {run: row["why"][: len(beginnings.get(run, ""))] for run, row in rows.items()} == beginnings
    assert rows["troubled"]["why"].endswith(": StoreUnavailable: away")
    assert list(rows["unserved"]) == ["run", "workflow", "status", "since", "age", "why"]
    assert all(row["since"] is not None for row in rows.values())
    assert [each["run"] for each in await _rows(place, "stuck_runs", run="asks-nothing")] == ["asks-nothing"]
