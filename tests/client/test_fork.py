"""Forking a run."""

from __future__ import annotations

import asyncio
import operator
from collections import Counter
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

from mongo_durable import App, DurableClient
from mongo_durable.errors import ConfigurationError, RunConflict
from tests.support.invariants import assert_invariants

CONFIG: Any = {"configurable": {"thread_id": "t"}}


class State(TypedDict, total=False):
    said: Annotated[list[str], operator.add]


def build_app(uri: str, database: str, ran: Counter[str]) -> App:
    app = App("forks", uri=uri, database=database)

    @app.activity(idempotent=True)
    async def effect(name: str) -> str:
        ran[name] += 1
        return f"{name}{ran[name]}"

    @app.tool(idempotent=True)
    async def confirm(what: str) -> str:
        """Ask."""
        return f"{await effect('inside')}:{interrupt(what)}"

    def node(name: str) -> Any:
        async def run(_: State) -> State:
            if name == "asks":
                return {"said": [await effect(name), interrupt("?"), await confirm.ainvoke({"what": "sure?"})]}
            return {"said": [await effect(name)]}

        return run

    @app.entrypoint
    def build() -> StateGraph[Any]:
        graph = StateGraph(State)
        names = ["first", "asks", "last"]
        for name, before in zip(names, [START, *names], strict=False):
            graph.add_node(name, node(name))
            graph.add_edge(before, name)
        return graph

    return app


async def finish(app: App, thread: str, answers: list[str], out: Any) -> Any:
    for answer in answers:
        assert "__interrupt__" in out
        out = await app.ainvoke(Command(resume=answer), {"configurable": {"thread_id": thread}})
    return out["said"]


@pytest.mark.parametrize(
    ("at", "answers", "again"),
    [
        (1, ["x", "y"], {"asks", "inside", "last"}),
        (2, [], {"last"}),
        ("agent/1/asks@2#1", ["x", "y"], {"asks", "inside", "last"}),
        ("agent/1/asks@2#!1", ["x", "y"], {"inside", "last"}),
        ("agent/1/asks/2/body:1@2#!1", ["y"], {"last"}),
        ("agent/1/asks/2/body:1@2#1", ["y"], {"inside", "last"}),
        ("agent/1/last@3#1", [], {"last"}),
    ],
)
async def test_the_prefix_replays_and_the_rest_runs_anew(mongo_uri: str, database: str, at: int | str, answers: list[str], again: set[str]) -> None:
    """CASES 46: a fork executes only what comes after its place, asks again what had not been answered before it, and leaves the origin as it was."""
    ran: Counter[str] = Counter()
    app = build_app(mongo_uri, database, ran)
    said = await finish(app, "t", ["a", "b"], await app.ainvoke({"said": []}, CONFIG, run_id="origin"))
    assert said == ["first1", "asks1", "a", "inside1:b", "last1"]
    before = Counter(ran)
    async with DurableClient(mongo_uri, database=database) as client:
        history = await client.history("origin")
        fork = await client.fork("origin", at=at, new_run_id="fork")
        forked = await finish(app, "fork", answers, await app.ainvoke(None, {"configurable": {"thread_id": "fork"}}))
        assert {name for name in ran if ran[name] > before[name]} == again
        expected = {"first": "first1", "asks": "asks1", "first_answer": "a", "second": "inside1:b"}
        if len(answers) == 2:
            expected |= {"first_answer": "x", "second": f"inside{ran['inside']}:y"}
        elif answers:
            expected["second"] = f"inside{ran['inside']}:y"
        assert forked == [expected["first"], f"asks{ran['asks'] if 'asks' in again else 1}", expected["first_answer"], expected["second"], "last2"]
        assert (await fork.get()).status == "completed"
        assert await client.history("origin") == history
        roles = [each.role for each in await client.transcript("fork")]
        assert roles.count("human") == 2
    await asyncio.to_thread(assert_invariants, mongo_uri, database)


async def test_what_cannot_be_forked_is_refused(mongo_uri: str, database: str) -> None:
    """A place that the history does not have, a taken name and nonsense are refused, and nothing is stored."""
    app = build_app(mongo_uri, database, Counter())
    await app.ainvoke({"said": []}, CONFIG, run_id="origin")
    async with DurableClient(mongo_uri, database=database) as client:
        for at, error in ((7, RunConflict), ("agent/1/none@2#1", RunConflict), ("nonsense", ConfigurationError)):
            with pytest.raises(error):
                await client.fork("origin", at=at)
        with pytest.raises(RunConflict):
            await client.fork("origin", at=1, new_run_id="origin")
        assert [run.run_id for run in await client.list_runs()] == ["origin"]
