"""Listings page by where the last page ended, and an index gives each page: nothing is examined that is not returned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import ObjectId
from pymongo import AsyncMongoClient
from pymongo.monitoring import CommandListener, CommandStartedEvent

from mongo_durable.errors import ConfigurationError
from mongo_durable.protocol.events import RunStatus
from mongo_durable.store import claims, frontiers, heads, waiting
from mongo_durable.store.connection import Connection
from mongo_durable.store.heads import Cursor
from mongo_durable.store.pruning import Selection, prune
from tests.support.databases import shared_by

RUNS, LIMIT = 600, 20
STATUSES = list(RunStatus)
START = datetime(2026, 1, 1, tzinfo=UTC)


def run_of(number: int) -> dict[str, Any]:
    """Runs of two workflows with two versions each, in every status, three of a millisecond, ten of a thread."""
    at = START + timedelta(milliseconds=number // 3)
    status = STATUSES[number % 8]
    is_pending = status is RunStatus.PENDING
    return {
        "_id": f"r{number:04}",
        "run_id": f"r{number:04}",
        "schema_version": 1,
        "status": status.value,
        "fence": 0 if is_pending else 1,
        "attempt": None if is_pending else ObjectId(),
        "owner": "p" if status is RunStatus.RUNNING else None,
        "generation": 0 if is_pending else 1,
        "workflow": {"name": f"w{number // 8 % 2}", "version": str(number // 16 % 2)},
        "thread_id": f"t{number // 10}",
        "turn": 1,
        "base_turn": 0,
        "input": None,
        "input_digest": "0" * 32,
        "available_at": at,
        "submitted_at": at,
        "ended_at": at if status.is_end else None,
        **({"news": "of it"} if status is RunStatus.READY else {}),
    }


def frontier_of(number: int) -> dict[str, Any]:
    """Every third one open."""
    entry = {
        "activity_id": "a",
        "position": "agent/1/n@1#!1",
        "kind": "INTERRUPT",
        "name": "n",
        "digest": "0" * 32,
        "value": 1,
        "response_schema": None,
    }
    is_open = number % 3 == 0
    return {
        "_id": f"r{number:04}/1",
        "run_id": f"r{number:04}",
        "schema_version": 1,
        "workflow": f"w{number // 8 % 2}",
        "thread_id": f"t{number // 10}",
        "generation": 1,
        "seq": 3,
        "fence": 1,
        "attempt": ObjectId(),
        "status": "open" if is_open else "resolved",
        **({} if is_open else {"closed_at": START}),
        "entries": [entry],
        "digest": "0" * 32,
        "opened_at": START + timedelta(milliseconds=number // 7),
        "expires_at": None,
    }


@pytest.fixture(scope="module")
def filled(mongo_uri: str) -> Iterator[str]:
    """A database with runs and frontiers."""

    async def fill(name: str) -> None:
        async with AsyncMongoClient(mongo_uri) as client:
            connection = Connection(client, name, is_owned=False)
            await connection.runs.insert_many([run_of(number) for number in range(RUNS)])
            await connection.frontiers.insert_many([frontier_of(number) for number in range(RUNS)])
            await connection.threads.insert_many(
                [
                    {"_id": f"t{n}", "run_id": "r", "schema_version": 1, "active_run": f"r{n * 10:04}", "turn": 1, "committed_turn": 0}
                    for n in range(RUNS // 10)
                ]
            )
            await claims.register(connection, "p", 60_000, {"serves": [{"name": "w0", "version": "0"}, {"name": "w0", "version": "1"}]})

    with shared_by("paging", mongo_uri) as name:
        asyncio.run(fill(name))
        yield name


class Queries(CommandListener):
    """The queries that were sent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def started(self, event: CommandStartedEvent) -> None:
        if event.command_name in ("find", "distinct"):
            self.sent.append({name: value for name, value in event.command.items() if name not in ("lsid", "$clusterTime", "$db", "txnNumber")})

    def succeeded(self, event: Any) -> None:
        pass

    def failed(self, event: Any) -> None:
        pass


@pytest.fixture
def queries() -> Queries:
    """What this test's client asked."""
    return Queries()


@pytest.fixture
async def connection(mongo_uri: str, filled: str, queries: Queries) -> AsyncIterator[Connection]:
    """The filled database."""
    async with AsyncMongoClient(mongo_uri, tz_aware=True, event_listeners=[queries]) as client:
        yield Connection(client, filled, is_owned=False)


async def assert_exact(connection: Connection, queries: Queries, collection: str) -> None:
    """The last query of a collection examined what it returned: with one scan exactly that, where the server merges several, one more for each."""
    query = next(each for each in reversed(queries.sent) if each.get("find") == collection)
    explained = await connection.database.command({"explain": query, "verbosity": "executionStats"})
    stats, plan = explained["executionStats"], str(explained["queryPlanner"]["winningPlan"])
    others = plan.count("'IXSCAN'") - 1
    assert stats["nReturned"] > 0
    assert others <= 32, plan
    assert "'SORT'" not in plan or (collection == "frontiers" and "run_id" in query["filter"]), plan
    assert stats["totalDocsExamined"] <= stats["nReturned"] + others, plan
    assert stats["totalKeysExamined"] <= stats["nReturned"] + others, plan


async def pages(page: Callable[[Cursor | None], Awaitable[list[Any]]], cursor_of: Callable[[Any], Cursor]) -> list[list[Any]]:
    """Page after page, to the last."""
    found: list[list[Any]] = []
    after: Cursor | None = None
    while True:
        found.append(await page(after))
        if len(found[-1]) < LIMIT:
            return found
        after = cursor_of(found[-1][-1])


def head_cursor(head: Any) -> Cursor:
    return Cursor(head.submitted_at, head.run_id)


FILTERS: list[dict[str, str]] = [
    {},
    {"status": "failed"},
    {"workflow": "w1"},
    {"workflow": "w1", "status": "failed"},
    {"workflow": "w1", "version": "1"},
    {"workflow": "w1", "version": "1", "status": "failed"},
    {"thread_id": "t7"},
]


@pytest.mark.parametrize("wanted", FILTERS, ids=["-".join(each) or "all" for each in FILTERS])
async def test_a_listing_examines_what_it_returns(connection: Connection, queries: Queries, wanted: dict[str, str]) -> None:
    """Every supported combination of filters: newest first, no run twice or left out, and nothing examined that is not returned."""
    found = await pages(lambda after: heads.listing(connection, **wanted, limit=LIMIT, after=after), head_cursor)
    runs = [run_of(number) for number in reversed(range(RUNS))]
    named = {"status": lambda run: run["status"], "workflow": lambda run: run["workflow"]["name"], "version": lambda run: run["workflow"]["version"]}
    named["thread_id"] = lambda run: run["thread_id"]
    assert [each.run_id for page in found for each in page] == [
        run["_id"] for run in runs if all(named[name](run) == value for name, value in wanted.items())
    ]
    for after in (None, head_cursor(found[0][-1])) if len(found) > 1 else (None,):
        await heads.listing(connection, **wanted, limit=LIMIT, after=after)
        await assert_exact(connection, queries, "runs")


@pytest.mark.parametrize("wanted", [{}, {"workflow": "w1"}, {"thread_id": "t6"}, {"run_id": "r0063"}], ids=["all", "workflow", "thread", "run"])
async def test_open_frontiers_examine_what_they_return(connection: Connection, queries: Queries, wanted: dict[str, str]) -> None:
    """Oldest first; what was answered, ever so much of it, is not looked at."""
    found = await pages(
        lambda after: frontiers.open_frontiers(connection, **wanted, limit=LIMIT, after=after),
        lambda each: Cursor(each.opened_at, f"{each.run_id}/{each.generation}"),
    )
    expected = [frontier_of(number) for number in range(0, RUNS, 3)]
    if "workflow" in wanted:
        expected = [each for each in expected if each["workflow"] == "w1"]
    if "thread_id" in wanted:
        expected = [each for each in expected if each["run_id"] == "r0060"]
    if "run_id" in wanted:
        expected = [each for each in expected if each["run_id"] == "r0063"]
    assert [each.run_id for page in found for each in page] == [each["run_id"] for each in expected]
    for after in (None, Cursor(found[0][-1].opened_at, f"{found[0][-1].run_id}/1")) if len(found) > 1 else (None,):
        await frontiers.open_frontiers(connection, **wanted, limit=LIMIT, after=after)
        await assert_exact(connection, queries, "frontiers")


async def test_unserved_runs_are_found_among_many(connection: Connection, queries: Queries) -> None:
    """What waits and is served is not looked at, nor what has ended."""
    found = await pages(lambda after: waiting.unserved(connection, LIMIT, after), head_cursor)
    expected = [run for run in map(run_of, range(RUNS)) if run["status"] in ("pending", "ready") and run["workflow"]["name"] == "w1"]
    assert [each.run_id for page in found for each in page] == [run["_id"] for run in expected]
    for after in (None, head_cursor(found[0][-1])):
        await waiting.unserved(connection, LIMIT, after)
        await assert_exact(connection, queries, "runs")


async def test_what_is_to_be_pruned_is_found_among_many(connection: Connection, queries: Queries) -> None:
    """A look for what is past its retention examines neither what lives nor what is too young."""
    cutoff = START + timedelta(milliseconds=120)
    selection = Selection(older_than=await connection.server_time() - cutoff, workflow="w1")
    found = [each.run_id async for each in prune(connection, selection, is_dry_run=True)]
    old = [run for run in map(run_of, range(RUNS)) if run["ended_at"] and run["workflow"]["name"] == "w1"]
    assert set(found) <= {run["_id"] for run in old}
    assert {run["_id"] for run in old if run["submitted_at"] <= cutoff} <= set(found)
    assert len(found) < len(old)
    await assert_exact(connection, queries, "runs")


async def test_a_page_starts_where_the_last_one_ended(connection: Connection) -> None:
    """Its cursor is a text; another text is refused. What was submitted since moves nothing."""
    first = await heads.listing(connection, limit=3)
    assert Cursor.parse(str(head_cursor(first[-1]))) == head_cursor(first[-1])
    newest = run_of(RUNS - 1) | {"_id": "new", "run_id": "new", "submitted_at": START + timedelta(days=1)}
    await connection.runs.insert_one(newest)
    try:
        following = await heads.listing(connection, limit=3, after=head_cursor(first[-1]))
    finally:
        await connection.runs.delete_one({"_id": "new"})
    assert [each.run_id for each in (*first, *following)] == [f"r{number:04}" for number in range(RUNS - 1, RUNS - 7, -1)]
    for wrong in ("", "r0001", "2026-01-01/", "yesterday/r0001"):
        with pytest.raises(ConfigurationError):
            Cursor.parse(wrong)
