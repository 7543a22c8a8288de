"""A person with mongosh and a runner that nobody tells anything: the change stream does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from langgraph.types import interrupt

from mongo_durable import App, DurableClient, Runner
from mongo_durable.protocol.events import RunStatus
from mongo_durable.store import frontiers, heads, runs
from mongo_durable.store.appender import Appender
from mongo_durable.store.connection import Connection
from mongo_durable.store.events import read_history
from tests.engine.workflows import PATIENCE_S, State, one_node
from tests.support.attempts import Attempt, question, submission
from tests.support.invariants import assert_invariants
from tests.support.mongosh import Mongosh

pytestmark = pytest.mark.xdist_group("mongosh")

NEVER = timedelta(hours=1)


@pytest.fixture
async def client(mongo_uri: str, database: str) -> AsyncIterator[DurableClient]:
    """Somebody who submits runs and waits for them, in a database of the test's own."""
    async with DurableClient(mongo_uri, database=database) as client:
        yield client


async def _tell(shell: Mongosh, database: str, expression: str) -> Any:
    """Have it evaluated while the loop goes on."""
    await asyncio.to_thread(shell.shown, f"use {database}")
    return await asyncio.to_thread(shell.value, expression)


async def test_a_fleet_goes_on_with_an_answer_from_mongosh(shell: Mongosh, client: DurableClient, mongo_uri: str, database: str) -> None:
    """A person sees the question and answers it with mongosh alone; a runner whose next sweep is an hour away goes on, so it was the stream."""

    async def node(state: State) -> dict[str, Any]:
        return {"seen": [interrupt({"question": "How many?"}), interrupt({"question": "And then?"})]}

    app = one_node(App("asks", uri=mongo_uri, database=database), node)
    async with Runner([app], sweep_interval=NEVER):
        await client.submit("asks", {"value": 1}, run_id="po-17")
        for number, question in enumerate(("How many?", "And then?")):
            await client.wait("po-17", timeout=PATIENCE_S)
            (row,) = await _tell(shell, database, "durable.frontiers()")
            assert (row["run"], row["question"]) == ("po-17", {"question": question})
            await _tell(shell, database, row["answer_in_mongosh"].replace("<answer>", str(number)))
        assert (await client.wait("po-17", timeout=PATIENCE_S)).output["seen"] == [0, 1]
    assert await _tell(shell, database, "durable.frontiers()") == []
    assert_invariants(mongo_uri, database)


async def test_a_fleet_ends_what_mongosh_has_marked(shell: Mongosh, client: DurableClient, mongo_uri: str, database: str) -> None:
    """A running run stops, and one that was not to begin before tomorrow ends as well, without a sweep and without the command line."""
    begun, gate = asyncio.Event(), asyncio.Event()
    app = App("waits", uri=mongo_uri, database=database)

    @app.activity
    async def effect() -> None:
        begun.set()
        await gate.wait()

    async def node(state: State) -> dict[str, Any]:
        await effect()
        await effect()
        return {}

    one_node(app, node)
    async with Runner([app], sweep_interval=NEVER):
        await client.submit("waits", {}, run_id="now")
        await client.submit("waits", {}, run_id="tomorrow", available_at=timedelta(days=1))
        await begun.wait()
        for run, status in (("now", "running"), ("tomorrow", "pending")):
            told = await _tell(shell, database, f'durable.cancel("{run}", {{reason: "enough"}})')
            assert told == {"run": run, "status": status, "is_marked": True}
        gate.set()
        for run in ("now", "tomorrow"):
            assert (await client.wait(run, timeout=PATIENCE_S)).status == "cancelled"
            assert (await client.history(run))[-1].data["reason"] == "enough"
    assert await _tell(shell, database, 'durable.cancel("now")') == {"run": "now", "status": "cancelled"}
    assert_invariants(mongo_uri, database)


async def test_a_suspended_run_is_cancelled_as_the_library_does_it(connection: Connection, appender: Appender, run_id: str, mongosh: Mongosh) -> None:
    """One transaction: head, frontier, thread, event, field by field; the run that is queued on the thread takes it."""
    found = {}
    for where in ("here", "there"):
        run, thread = f"{run_id}-{where}", f"{run_id}-{where}-thread"
        await (await Attempt.submit(connection, appender, run, thread_id=thread)).suspend()
        await runs.submit(connection, submission(f"{run}-next", thread_id=thread), is_queued_when_busy=True)
        if where == "here":
            await runs.cancel(connection, run, "enough", "operator")
        else:
            assert mongosh.value(f"durable.cancel({json.dumps(run)}, {{reason: 'enough'}})") == {"run": run, "status": "cancelled"}
        next_head = await heads.get(connection, f"{run}-next")
        assert (next_head.is_queued, next_head.turn, next_head.status) == (False, 2, RunStatus.PENDING)
        frontier = await frontiers.get(connection, run, 1)
        assert frontier is not None
        assert frontier.status == "cancelled"
        assert (await read_history(connection, run))[-1].data == {"reason": "enough"}
        documents = [
            await connection.runs.find_one({"_id": run}),
            await connection.runs.find_one({"_id": f"{run}-next"}),
            await connection.threads.find_one({"_id": thread}),
            await connection.frontiers.find_one({"_id": f"{run}/1"}),
            await connection.activity_events.find_one({"run_id": run}, sort=[("seq", -1)]),
        ]
        found[where] = [_fields(document, where) for document in documents]
    assert found["here"] == found["there"]


def _fields(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        return {key: _fields(each, where) for key, each in value.items() if key not in ("digest", "activity_id", "news")}
    if isinstance(value, list):
        return [_fields(each, where) for each in value]
    kind = type(value).__name__
    return kind if kind in ("datetime", "ObjectId") else (kind, value.replace(where, "") if isinstance(value, str) else value)


async def test_why_says_what_a_run_waits_for(connection: Connection, appender: Appender, run_id: str, mongosh: Mongosh) -> None:
    """In words, for every state that a run can be in, with what to do about it where there is something."""

    def why(run: str) -> str:
        return str(mongosh.value(f"durable.why({json.dumps(run)}).why.join()"))

    await runs.submit(connection, submission(f"{run_id}-1", workflow=run_id))
    assert why(f"{run_id}-1") == f"no live runner serves {run_id} 1"
    served = {"serves": [{"name": run_id, "version": "1"}]}
    await connection.runners.insert_one(
        {"_id": run_id, "schema_version": 1, "state": "live", "expires_at": (await _now(connection)) + timedelta(hours=1), **served}
    )
    assert why(f"{run_id}-1") == f"it waits for its turn: a live runner serves {run_id} 1"
    await runs.submit(connection, submission(f"{run_id}-2", workflow=run_id, thread_id=f"{run_id}-1"), is_queued_when_busy=True)
    assert why(f"{run_id}-2") == f"run {run_id}-1 is live on its thread {run_id}-1"
    await connection.runs.update_one({"_id": f"{run_id}-1"}, [{"$set": {"available_at": {"$add": ["$$NOW", 3_600_000]}}}])
    assert why(f"{run_id}-1").startswith("it is not to go on before 20")
    attempt = await Attempt.submit(connection, appender, f"{run_id}-3", owner=run_id)
    assert why(f"{run_id}-3").startswith(f"process {run_id} executes it, attempt 1, since 20")
    await attempt.suspend()
    assert f'durable.answer("{run_id}-3", <answer>)' in why(f"{run_id}-3")
    mongosh.value(f"durable.cancel({json.dumps(f'{run_id}-3')})")
    assert why(f"{run_id}-3").startswith("it has ended, 20")


async def _now(connection: Connection) -> Any:
    return (await connection.client.admin.command("hello"))["localTime"]


async def test_what_is_shown_is_for_people(connection: Connection, appender: Appender, run_id: str, mongosh: Mongosh) -> None:
    """A page and a timeline in plain text; a large question is named by its size, and what could steer a terminal is shown as what it is."""
    attempt = await Attempt.submit(connection, appender, run_id, value="\x1b[31mred")
    attempt.started(1)
    await attempt.completed(1)
    (activity_id, _) = [each.activity_id for each in (await attempt.suspend(question(run_id, 2), question(run_id, 3, "x" * 300_000))).entries]
    page = mongosh.shown(f"durable.show({json.dumps(run_id)})")
    for part in (
        f"run {run_id}  procurement 1  suspended",
        "attempt 1  process p1",
        "activity.completed  TOOL pay agent/1/node@1#1",
        "frontier 1  open",
    ):
        assert part in page
    assert f'{activity_id}  approval asks "may I?"' in page
    assert "approval asks (301 kB, stored apart" in page
    assert 'input "\\u001b[31mred"' in page
    assert "\x1b" not in page
    lines = mongosh.shown(f"durable.timeline({json.dumps(run_id)})").splitlines()
    assert lines[0].split() == ["seq", "at", "attempt", "event", "what", "how_long"]
    assert len(lines) == 6
    questions = mongosh.shown(f"durable.frontiers({{run: {json.dumps(run_id)}}})")
    assert f"answer with durable.resolve({json.dumps(run_id)}, {{{activity_id}: <answer>, act_" in questions
    assert "durable.resolve(run" in mongosh.shown("durable.help()")


async def test_a_database_without_collections_says_what_to_do(shell: Mongosh, connection: Connection, database: str) -> None:
    """Whoever is connected to another database is told how to choose, and the choice stays when it was a wrong one."""
    shell.shown(f"use {database}")
    shown = shell.shown("durable.frontiers()")
    assert f'database "{database}" has no mongo_durable collections' in shown
    assert "durable.use" in shown
    assert "[configuration_error]" in shell.shown(f'durable.use("{database}")')
    assert shell.shown(f'durable.use("{connection.database.name}")') == f"using database {connection.database.name}"
    assert shell.value("durable.frontiers().length") >= 0
    assert "no run" in shell.shown('durable.show("gone")')
    shell.shown("durable.use(null)")


async def test_a_database_of_a_newer_release_is_refused(shell: Mongosh, mongosh: Mongosh, connection: Connection, appender: Appender) -> None:
    """The script that wrote it knows what its documents mean; this one does not guess."""
    await connection.database["meta"].update_one({"_id": "schema"}, {"$set": {"schema_version": 2}})
    try:
        assert "SchemaVersionMismatch" in mongosh.shown("durable.frontiers()")
    finally:
        await connection.database["meta"].update_one({"_id": "schema"}, {"$set": {"schema_version": 1}})
