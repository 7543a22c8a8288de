"""Histories that were recorded once are replayed by the code of today, for ever."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pymongo
import pytest
from langgraph.graph import END, START, StateGraph

from mongo_durable import App, DurableClient
from mongo_durable.errors import NondeterminismError
from mongo_durable.protocol.events import ActivityKind, Event, EventType
from mongo_durable.protocol.history import fold
from mongo_durable.protocol.identity import Position, activity_id
from mongo_durable.store import schema
from mongo_durable.store.connection import Endpoint
from mongo_durable.store.documents import event_from
from tests.golden.histories import FOLDER, load, path_of, put, run_id_of
from tests.golden.record import GOLDEN, WORKFLOW, Golden
from tests.langgraph.kit import ASKING, Kit, Ledger, State

EACH = pytest.mark.parametrize("golden", GOLDEN, ids=[each.name for each in GOLDEN])


@dataclass(frozen=True, slots=True)
class Shelf:
    """The database that the histories are put into, one after the other."""

    uri: str
    name: str
    database: pymongo.database.Database[dict[str, Any]]

    def events(self, run_id: str) -> list[Event]:
        """What stands there of a run."""
        return [event_from(each) for each in self.database["activity_events"].find({"run_id": run_id}).sort("seq", 1)]

    async def go_on(self, run_id: str, make: Callable[[Kit], Any]) -> Ledger:
        """The code of today goes on with a run; returns which bodies ran."""
        ledger = Ledger()
        app = App(WORKFLOW, uri=self.uri, database=self.name)
        graph = make(Kit(app, ledger, is_sync=False))
        app.entrypoint(lambda: graph)
        try:
            await app.ainvoke(None, run_id=run_id)
        finally:
            await app.aclose()
        return ledger


@pytest.fixture(scope="module")
def shelf(mongo_uri: str) -> Iterator[Shelf]:
    """A database for this file; each test puts its history in the place of what the last one left of it."""
    name = f"test_golden_{uuid.uuid4().hex[:12]}"

    async def prepare() -> None:
        endpoint = Endpoint(mongo_uri, name)
        await schema.ensure_schema(endpoint.connection())
        await endpoint.aclose()

    asyncio.run(prepare())
    with pymongo.MongoClient(mongo_uri, tz_aware=True) as client:
        yield Shelf(mongo_uri, name, client[name])
        client.drop_database(name)


@EACH
async def test_a_finished_history_runs_nothing(shelf: Shelf, golden: Golden) -> None:
    """I7: a run that lacks only its end gets the recorded one, message ids included; no body runs, nothing but the attempt's start is written."""
    recorded = load(golden.name)
    put(shelf.database, recorded[:-1])
    ledger = await shelf.go_on(run_id_of(golden.name), golden.made.make)
    assert ledger.ran == {}
    *_, started, completed = found = shelf.events(run_id_of(golden.name))
    assert [each.type for each in found[:-2]] == [each.type for each in recorded[:-1]]
    assert (started.type, completed.type) == (EventType.ATTEMPT_STARTED, EventType.RUN_COMPLETED)
    assert completed.value == recorded[-1].value


@EACH
async def test_a_history_that_was_just_answered_goes_on(shelf: Shelf, golden: Golden) -> None:
    """A run with its last answers runs what is not recorded, each effect once, at the recorded positions, and comes to the recorded output."""
    recorded = load(golden.name)
    cut = 1 + max(index for index, each in enumerate(recorded) if each.type is EventType.ACTIVITIES_RESOLVED)
    put(shelf.database, recorded[:cut])
    run_id = run_id_of(golden.name)
    ledger = await shelf.go_on(run_id, golden.made.make)
    found = shelf.events(run_id)
    before, expected, after = fold(run_id, recorded[:cut]), fold(run_id, recorded), fold(run_id, found)
    assert set(after.activities) == set(expected.activities)
    assert after.steps == expected.steps
    assert after.generation == expected.generation
    assert found[-1].value == recorded[-1].value
    missing = {text for text in expected.activities if text not in before.activities or before.activities[text].outcome is None}
    wanted = Counter(shown(each) for each in starts(recorded) if each.position and each.position.text in missing)
    assert set(ran(ledger)) == set(wanted)
    assert without_asking(ran(ledger)) == without_asking(wanted)


def without_asking(effects: Counter[tuple[str, str, str]]) -> Counter[tuple[str, str, str]]:
    """The body of a tool that asks is entered again with its answer."""
    return Counter({key: count for key, count in effects.items() if key[1] not in ASKING})


def starts(events: list[Event]) -> list[Event]:
    """The first start of each activity."""
    first = {each.activity_id: each for each in reversed(events) if each.type is EventType.ACTIVITY_STARTED}
    return list(first.values())


def shown(start: Event) -> tuple[str, str, str]:
    """A start as the ledger notes its body; a model's messages are not stored."""
    given = {ActivityKind.ACTIVITY: lambda: repr(start.value["x"]), ActivityKind.LLM: lambda: ""}.get(start.kind, lambda: repr(start.value))
    return (str(start.kind), str(start.name), given())


def ran(ledger: Ledger) -> Counter[tuple[str, str, str]]:
    """What the ledger has, a model's messages left out."""
    found: Counter[tuple[str, str, str]] = Counter()
    for (kind, name, given), count in ledger.ran.items():
        found[(kind, name, "" if kind == "LLM" else given)] += count
    return found


@EACH
def test_activity_ids_are_for_ever(golden: Golden) -> None:
    """I11: the id of a recorded position is today's: people and outside systems hold such ids."""
    recorded = load(golden.name)
    run_id = run_id_of(golden.name)
    entries = [entry for each in recorded if each.type is EventType.ACTIVITIES_SUSPENDED for entry in each.data["entries"]]
    known = {each.position.text: each.activity_id for each in recorded if each.position} | {each["position"]: each["activity_id"] for each in entries}
    assert known == {text: activity_id(run_id, Position.parse(text)) for text in known}


def loop(kit: Kit, *, name: str = "again", question: str = "again", is_longer: bool = False, rounds: int = 3) -> Any:
    """The shape "loop", which can be changed."""

    async def again(state: State) -> State:
        if is_longer:
            await kit.act("more")
        line = await kit.act(f"{name}.1")
        line += kit.interrupt(question) + await kit.act(f"{name}.2")
        return {"lines": [f"again:{line}"]}

    graph = StateGraph(State)
    graph.add_node("again", again)
    graph.add_edge(START, "again")
    graph.add_conditional_edges("again", lambda state: "again" if len(state["lines"]) < rounds else END)
    return graph


@pytest.mark.parametrize(
    ("change", "position"),
    [
        ({"name": "other"}, "agent/1/again@1#1"),
        ({"is_longer": True}, "agent/1/again@1#1"),
        ({"question": "what else?"}, "agent/1/again@1#!1"),
        ({"rounds": 2}, "agent/1/again@3#!1"),
    ],
    ids=["another input", "one effect more", "another question", "ends before"],
)
async def test_a_changed_graph_diverges(shelf: Shelf, change: dict[str, Any], position: str) -> None:
    """Code that a history does not fit runs nothing and ends the run as diverged, saying where; the code that fits goes on after a retry."""
    recorded = load("loop")
    run_id = run_id_of("loop")
    put(shelf.database, recorded[:-1])
    with pytest.raises(NondeterminismError) as raised:
        await shelf.go_on(run_id, lambda kit: loop(kit, **change))
    assert raised.value.position == position
    assert [each.type for each in shelf.events(run_id)[len(recorded) - 1 :]] == [EventType.ATTEMPT_STARTED, EventType.RUN_DIVERGED]
    async with DurableClient(shelf.uri, database=shelf.name) as client:
        assert (await client.get_run(run_id)).status == "diverged"
        await client.retry(run_id)
    ledger = await shelf.go_on(run_id, loop)
    assert ledger.ran == {}
    assert shelf.events(run_id)[-1].value == recorded[-1].value


def test_every_file_is_replayed() -> None:
    """No golden history lies there unread, and together they stay small."""
    files = set(FOLDER.iterdir())
    assert files == {path_of(each.name) for each in GOLDEN}
    assert sum(each.stat().st_size for each in files) < 120_000
