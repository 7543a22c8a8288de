"""Child graphs: they go on where they stood, and those that cannot are refused before anything runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt

from mongo_durable import App
from mongo_durable.errors import UnsupportedGraph
from mongo_durable.protocol.events import EventType
from tests.cases.workshop import Workshop, chain, echo
from tests.langgraph.kit import State


def _child(workshop: Workshop, app: App, name: str = "child") -> Any:
    """A child graph: an effect, a question, an effect."""
    effect = workshop.effect(app, name)

    def step(what: str) -> Any:
        async def node(state: State) -> State:
            return {"lines": [await effect(f"{name}.{what}")]}

        return node

    async def asks(state: State) -> State:
        return {"lines": [interrupt(name)]}

    return chain(a=step("a"), asks=asks, b=step("b")).compile()


async def test_a_child_graph_goes_on_where_it_asked(workshop: Workshop) -> None:
    """CASES 18: a child graph that asks between two effects makes each of them once, and the parent its own."""

    def make(app: App) -> Any:
        effect = workshop.effect(app)

        async def around(state: State) -> State:
            return {"lines": [await effect("around")]}

        async def host(state: State) -> State:
            return await _child(workshop, app).ainvoke({"lines": []})  # type: ignore[no-any-return]

        return chain(around=around, host=host)

    out = await workshop.complete(make, {"lines": []}, echo)
    assert out["lines"] == ["around", "child.a", "answer to child", "child.b"]
    assert workshop.ran == {"around": 1, "child.a": 1, "child.b": 1}


async def test_a_child_graph_that_is_a_node_goes_on_too(workshop: Workshop) -> None:
    """CASES 18: the same for a compiled graph that is a node of its parent."""

    def make(app: App) -> Any:
        return chain(host=_child(workshop, app))

    out = await workshop.complete(make, {"lines": []}, echo)
    assert out["lines"] == ["child.a", "answer to child", "child.b"]
    assert workshop.ran == {"child.a": 1, "child.b": 1}


async def test_a_node_after_two_asking_children_is_reached(workshop: Workshop) -> None:
    """CASES 20: two child graphs that ask one after the other, and a node after them: it is reached, once."""

    def make(app: App) -> Any:
        effect = workshop.effect(app)

        def host(name: str) -> Any:
            async def node(state: State) -> State:
                return await _child(workshop, app, name).ainvoke({"lines": []})  # type: ignore[no-any-return]

            return node

        async def last(state: State) -> State:
            return {"lines": [await effect("last")]}

        return chain(one=host("one"), two=host("two"), last=last)

    out = await workshop.complete(make, {"lines": []}, echo)
    assert out["lines"] == ["one.a", "answer to one", "one.b", "two.a", "answer to two", "two.b", "last"]
    assert set(workshop.ran.values()) == {1}
    assert len(await workshop.history(1, EventType.ACTIVITIES_SUSPENDED)) == 2


@pytest.mark.parametrize("where", ["graph", "child"])
async def test_static_pauses_are_refused(where: str, workshop: Workshop) -> None:
    """CASES 20: two static pauses, which leave no trace to resume from, are refused with what to do instead; no run exists then."""

    def make(app: App) -> Any:
        inner = chain(one=lambda state: {}, two=lambda state: {})
        paused = inner.compile(interrupt_before=["one", "two"])
        return paused if where == "graph" else chain(host=paused)

    with pytest.raises(UnsupportedGraph, match=r"static interrupts.*call interrupt\(\) in the node"):
        await workshop.once(make, {"lines": []})
    async with workshop.client() as client:
        assert await client.list_runs(workflow=workshop.name) == []


@pytest.mark.parametrize("saver", [InMemorySaver(), True], ids=["own", "inherited"])
@pytest.mark.parametrize("depth", [1, 2])
async def test_a_child_with_a_saver_of_its_own_is_refused(saver: Any, depth: int, workshop: Workshop) -> None:
    """CASES 22: a nested graph that is compiled with a saver of its own is found when the app starts, named, and nothing is stored."""

    def make(app: App) -> Any:
        graph = chain(inner=lambda state: {}).compile(checkpointer=saver)
        for _ in range(depth):
            graph = chain(nested=graph).compile()
        return graph

    with pytest.raises(UnsupportedGraph, match="checkpointer of its own") as refused:
        await workshop.once(make, {"lines": []})
    assert refused.value.node is not None
    assert refused.value.node.endswith("nested")
    with pytest.raises(UnsupportedGraph):
        await workshop.runner(make).start()
    async with workshop.client() as client:
        assert await client.list_runs(workflow=workshop.name) == []


async def test_one_name_is_one_run(workshop: Workshop) -> None:
    """CASES 23: the same request, started several times at once under one run id, is one run with one outcome, whoever executes it."""
    gate = asyncio.Event()

    def make(app: App) -> Any:
        @app.activity
        async def pay(amount: int) -> str:
            workshop.ran["pay"] += 1
            await gate.wait()
            return f"paid {amount}"

        async def node(state: State) -> State:
            return {"lines": [await pay(7)]}

        return chain(node=node)

    started = [asyncio.create_task(workshop.once(make, {"lines": []})) for _ in range(4)]
    async with workshop.client() as client:
        again = await asyncio.gather(*(client.submit(workshop.name, {"lines": []}, run_id=workshop.run()) for _ in range(4)))
        gate.set()
        outs = await asyncio.gather(*started)
        assert [run.run_id for run in await client.list_runs(workflow=workshop.name)] == [workshop.run()]
        assert [(await run.get()).output for run in again] == outs
    assert outs == [{"lines": ["paid 7"]}] * 4
    assert workshop.ran == {"pay": 1}
    assert len(await workshop.history(1, EventType.RUN_SUBMITTED)) == 1


@pytest.mark.parametrize("is_at_once", [False, True], ids=["in turn", "at once"])
async def test_a_body_calls_one_child_twice(is_at_once: bool, workshop: Workshop) -> None:
    """CASES 25: each call of a child graph in one body has places of its own, so that both ask, and both get their own answers."""

    def make(app: App) -> Any:
        child = _child(workshop, app)

        async def call() -> Any:
            return (await child.ainvoke({"lines": []}))["lines"]

        async def node(state: State) -> State:
            both = await app.gather(call, call) if is_at_once else [await call(), await call()]
            return {"lines": both}

        return chain(node=node)

    answers = iter(["first", "second"])
    asked: list[list[str]] = []
    out = await workshop.once(make, {"lines": []})
    while "__interrupt__" in out:
        asked.append([each.id for each in out["__interrupt__"]])
        out = await workshop.once(make, Command(resume={each.id: next(answers) for each in out["__interrupt__"]}))
    assert out["lines"] == [["child.a", "first", "child.b"], ["child.a", "second", "child.b"]]
    assert [len(each) for each in asked] == ([2] if is_at_once else [1, 1])
    assert len({each for frontier in asked for each in frontier}) == 2
    assert workshop.ran == {"child.a": 2, "child.b": 2}
