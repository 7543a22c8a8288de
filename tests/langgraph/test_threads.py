"""Turns of one thread, and its committed state."""

from __future__ import annotations

import asyncio
import operator
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt

from mongo_durable import App, DurableClient, Runner
from mongo_durable.errors import NotJsonSafe, ThreadBusy
from tests.engine.workflows import until_known
from tests.support.invariants import assert_invariants


@dataclass
class Order:
    item: str


class State(TypedDict, total=False):
    said: Annotated[list[Any], operator.add]
    order: Any


CONFIG: Any = {"configurable": {"thread_id": "t"}}


def build_app(uri: str, database: str, *, types: tuple[type, ...] = (), output: Any = State) -> App:
    app = App("turns", uri=uri, database=database, types=types)

    @app.activity(idempotent=True)
    async def count(so_far: int) -> int:
        return so_far + 1

    async def says(state: State) -> State:
        number = await count(len(state["said"]))
        if state["said"][-1] == "ask":
            return {"said": [interrupt("?")], "order": Order(str(number))}
        return {"said": [number], "order": Order(str(number))}

    @app.entrypoint
    def build() -> StateGraph[Any]:
        graph = StateGraph(State, output_schema=output)
        graph.add_node("says", says)
        graph.add_edge(START, "says")
        return graph

    return app


async def test_a_turn_starts_from_the_committed_state(mongo_uri: str, database: str) -> None:
    """The next run of a thread goes on with what the last one committed, types included, in another process too."""
    first = await build_app(mongo_uri, database, types=(Order,)).ainvoke({"said": ["a"]}, CONFIG)
    assert first == {"said": ["a", 2], "order": Order("2")}
    second = await build_app(mongo_uri, database, types=(Order,)).ainvoke({"said": ["b"]}, CONFIG)
    assert second == {"said": ["a", 2, "b", 4], "order": Order("4")}


async def test_positions_count_each_turns_own_steps(mongo_uri: str, database: str) -> None:
    """LangGraph's step numbers go on from turn to turn; positions start again, so every run reads alike."""
    app = build_app(mongo_uri, database, types=(Order,))
    for turn in ("r1", "r2"):
        await app.ainvoke({"said": [turn]}, CONFIG, run_id=turn)
    async with DurableClient(mongo_uri, database=database, codec=app.codec) as client:
        positions = [[event.position.text for event in await client.history(run) if event.position] for run in ("r1", "r2")]
    assert positions[0] == positions[1] == ["agent/1/says@1#1", "agent/1/says@1#1"]


async def test_one_run_at_a_time(mongo_uri: str, database: str) -> None:
    """A second run on a thread with a live one is refused, and nothing of it is stored."""
    app = build_app(mongo_uri, database, types=(Order,))
    await app.ainvoke({"said": ["ask"]}, CONFIG, run_id="r1")
    with pytest.raises(ThreadBusy) as busy:
        await app.ainvoke({"said": ["more"]}, CONFIG, run_id="r2")
    assert busy.value.active_run == "r1"
    async with DurableClient(mongo_uri, database=database) as client:
        assert [run.run_id for run in await client.list_runs()] == ["r1"]


async def test_people_can_look_at_a_threads_state(mongo_uri: str, database: str) -> None:
    """aget_state shows the committed values, and the questions of a suspended run with their stable ids."""
    app = build_app(mongo_uri, database, types=(Order,))
    assert (await app.aget_state(CONFIG)).values == {}
    await app.ainvoke({"said": ["a"]}, CONFIG)
    asked = await app.ainvoke({"said": ["ask"]}, CONFIG)
    state = await app.aget_state(CONFIG)
    assert state.values == {"said": ["a", 2], "order": Order("2")}
    assert [each.id for each in state.interrupts] == [each.id for each in asked["__interrupt__"]]


class Said(TypedDict):
    said: list[Any]


async def test_a_state_that_could_not_be_read_back_is_refused(mongo_uri: str, database: str) -> None:
    """A type that was not registered fails the run that would commit it, naming the type; it is never imported by name later."""
    app = build_app(mongo_uri, database, output=Said)
    with pytest.raises(NotJsonSafe, match="Order"):
        await app.ainvoke({"said": ["a"]}, CONFIG, run_id="r")
    async with DurableClient(mongo_uri, database=database) as client:
        assert (await client.get_run("r")).status == "failed"


async def test_a_state_of_more_than_16_mb_works(mongo_uri: str, database: str) -> None:
    """Nothing fails at MongoDB's limit for a document: neither input, output nor state."""
    app = build_app(mongo_uri, database, types=(Order,))
    large = "x" * 17_000_000
    await app.ainvoke({"said": [large]}, CONFIG)
    second = await app.ainvoke({"said": ["b"]}, CONFIG)
    assert second["said"][0] == large


async def test_a_run_can_wait_for_its_thread(mongo_uri: str, database: str) -> None:
    """when_busy="queue": runs of a thread follow one another in the order of their submission, each from the state that the last one committed."""
    app = build_app(mongo_uri, database, types=(Order,))
    asked = await app.ainvoke({"said": ["ask"]}, CONFIG, run_id="r1")
    waiting = [asyncio.create_task(app.ainvoke({"said": ["second"]}, CONFIG, run_id="r2", when_busy="queue"))]
    async with DurableClient(mongo_uri, database=database, codec=app.codec) as client:

        async def is_queued() -> bool:
            return any(run.run_id == "r2" for run in await client.list_runs())

        await until_known(is_queued)
        cancelled = await client.submit("turns", {"said": ["never"]}, thread_id="t", run_id="r3", when_busy="queue")
        await client.submit("turns", {"said": ["third"]}, thread_id="t", run_id="r4", when_busy="queue")
        assert (await client.cancel("r3")).status == "cancelled"
        assert [(await client.get_run(run)).status for run in ("r1", "r2", "r4")] == ["suspended", "pending", "pending"]
        async with Runner([app]):
            await client.resolve("r1", {asked["__interrupt__"][0].id: "yes"})
            last = await client.wait("r4", timeout=30)
        await asyncio.gather(*waiting)
        assert last.output["said"] == ["ask", "yes", "second", 4, "third", 6]
        assert (await cancelled.get()).status == "cancelled"
    await asyncio.to_thread(assert_invariants, mongo_uri, database)
