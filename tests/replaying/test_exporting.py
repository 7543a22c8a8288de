"""What is exported is the whole history, exactly, and replays without the database that it came from."""

from __future__ import annotations

import json
import math
import operator
import struct
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, TypedDict

import pymongo
import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

from mongo_durable import App, DurableClient, SyncDurableClient
from mongo_durable.encryption import AesGcm
from mongo_durable.errors import DecryptionFailed, RunNotFound
from mongo_durable.protocol.events import EventType
from mongo_durable.replaying import areplay_history, replay_history
from mongo_durable.store import histories
from mongo_durable.store.payloads import INLINE_LIMIT
from tests.deep_agents.trees import TREES
from tests.langgraph.bench import Bench, Colour
from tests.langgraph.kit import Kit, Ledger
from tests.langgraph.shapes import SHAPES

BY_NAME = {each.name: each for each in SHAPES}
TREE = next(each for each in TREES if each.name == "approval of each call inside sub-agents")


@pytest.fixture(scope="module")
def bench(mongo_uri: str) -> Iterator[Bench]:
    """Runs graphs in a database of this file."""
    name = f"test_exporting_{uuid.uuid4().hex[:12]}"
    made = Bench(mongo_uri, name)
    yield made
    made.close()
    with pymongo.MongoClient(mongo_uri) as client:
        client.drop_database(name)


CASES: list[tuple[str, Colour, Callable[[Kit], Any], Any]] = [
    *(
        (name, colour, BY_NAME[name].make, BY_NAME[name].given)
        for name, colour in (("middleware whose hooks call models", "async"), ("timers", "mixed"))
    ),
    ("parallel nodes", "thread", BY_NAME["parallel nodes"].make, BY_NAME["parallel nodes"].given),
    ("deep agents", "async", TREE.make, TREE.given),
]


@pytest.mark.parametrize(("name", "colour", "make", "given"), CASES, ids=[f"{name}-{colour}" for name, colour, _, _ in CASES])
def test_a_run_that_was_exported_replays(bench: Bench, name: str, colour: Colour, make: Callable[[Kit], Any], given: Any) -> None:
    """Whole, and cut at its first frontiers, by an app that knows no database: agents with middleware, sub-agents, synchronous graphs."""
    told = bench.complete(make, given, colour, Ledger())
    with SyncDurableClient(bench.uri, database=bench.database) as client:
        lines = list(client.export(told.history.run_id))
    app = App("tested", sync=colour == "thread")
    graph = make(Kit(app, ledger := Ledger(), is_sync=colour != "async"))
    app.entrypoint(lambda: graph)
    cuts = [each.seq for each in told.events if each.type is EventType.ACTIVITIES_SUSPENDED][:2]
    found = [replay_history(app, lines[: cut + 1])[0] for cut in cuts]
    assert [(each.divergence, each.reached) for each in found] == [(None, "frontier")] * len(cuts)
    [whole] = replay_history(app, lines)
    assert (whole.divergence, whole.reached) == (None, "end")
    assert ledger.ran == {}


@dataclass
class Odd:
    """A type of the application."""

    at: datetime


class State(TypedDict, total=False):
    said: Annotated[list[Any], operator.add]


ODD: dict[str, Any] = {
    "$key.of": {1: "one", ("a", 2): b"\x00\xff"},
    "long": 2**62,
    "int": 7,
    "big": 2**80,
    "nan": struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0],
    "floats": [-0.0, math.inf, 0.1, 1.0],
    "at": datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
    "type": Odd(datetime(2026, 1, 1)),  # noqa: DTZ001 - a time without a zone comes back as one
    "line": "a\u2028b\nc\r",
    "set": {1, 2},
}


def odd_app(**where: Any) -> App:
    """Two turns on a thread; each asks, and answers with what it is given, small or large."""
    app = App("odd", types=[Odd], **where)

    @app.activity(idempotent=True)
    async def echo(value: Any) -> Any:
        return value

    async def node(state: State) -> State:
        return {"said": [await echo(state["said"][-1]), interrupt("?")]}

    graph = StateGraph(State)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    app.entrypoint(lambda: graph)
    return app


async def test_encrypted_values_stay_encrypted(mongo_uri: str, database: str) -> None:
    """A file holds no more than the database; it replays with the key, on a state of another run too, and without the key not at all."""
    secret = "a secret"  # the space is in no base64 text, where shorter or plainer words stand by chance
    cipher = AesGcm({"k": b"k" * 32})
    app = odd_app(uri=mongo_uri, database=database, cipher=cipher)
    config = {"configurable": {"thread_id": "t"}}
    for run_id in ("first", "second"):
        out = await app.ainvoke({"said": [f"{secret} {'x' * INLINE_LIMIT}"]}, config, run_id=run_id)
        await app.ainvoke(Command(resume={out["__interrupt__"][0].id: secret}), run_id=run_id)
    await app.aclose()
    async with DurableClient(mongo_uri, database=database, cipher=cipher) as client:
        lines = [line for run_id in ("first", "second") for line in [each async for each in client.export(run_id)]]
    assert not any(secret in line or "x" * 40 in line for line in lines)
    assert [each.reached for each in await areplay_history(odd_app(cipher=cipher), lines)] == ["end", "end"]
    for other in (None, AesGcm({"another": b"k" * 32})):
        with pytest.raises(DecryptionFailed):
            await areplay_history(odd_app(cipher=other), lines)


async def test_values_come_back_exactly(mongo_uri: str, database: str) -> None:
    """Ids, times, 64-bit integers, bytes, envelopes, the bits of a NaN, chunks of large values, the state that a thread's run starts from."""
    large = ["x" * INLINE_LIMIT, ODD]
    app = odd_app(uri=mongo_uri, database=database)
    config = {"configurable": {"thread_id": "t"}}
    for run_id, value in (("first", large), ("second", ODD)):
        out = await app.ainvoke({"said": [value]}, config, run_id=run_id)
        [question] = out["__interrupt__"]
        await app.ainvoke(Command(resume={question.id: large}), run_id=run_id)
    async with DurableClient(mongo_uri, database=database) as client:
        lines = {run_id: [line async for line in client.export(run_id)] for run_id in ("first", "second")}
        with pytest.raises(RunNotFound):
            [line async for line in client.export("third")]
    with pymongo.MongoClient(mongo_uri, tz_aware=True) as raw:
        stored = {run_id: list(raw[database]["activity_events"].find({"run_id": run_id}).sort("seq", 1)) for run_id in lines}
        assert raw[database]["payloads"].count_documents({}) > 0
    for run_id in lines:
        header, *found = [histories._loads(line, 0) for line in lines[run_id]]
        assert (header["run_id"], header["workflow"], header["thread_id"], header["turn"]) == (run_id, "odd", "t", 1 if run_id == "first" else 2)
        assert (header["base"] is None) == (run_id == "first")
        for line, event in zip(found, stored[run_id], strict=True):
            assert list(line) == list(event)
            small = [name for name in event if name not in ("value", "answers")]
            assert [(line[name], type(line[name])) for name in small] == [(event[name], type(event[name])) for name in small]
    await app.aclose()
    assert [each.reached for each in await areplay_history(odd_app(), [*lines["first"], *lines["second"]])] == ["end", "end"]
    [second] = histories.read(lines["second"])
    echoed = next(each for each in second.events if each.type is EventType.ACTIVITY_COMPLETED)
    given = app.codec.decode(echoed.value)
    assert struct.pack(">d", given.pop("nan")) == bytes.fromhex("fff8000000000123")
    assert given == {name: value for name, value in ODD.items() if name != "nan"}
    assert all(json.loads(line) for each in lines.values() for line in each)
