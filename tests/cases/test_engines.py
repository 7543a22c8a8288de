"""Engines that wait for what never comes: a run that nobody takes again, one that waits for itself, one whose steps look alike."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt

from mongo_durable import App
from mongo_durable.errors import RunError
from mongo_durable.protocol.events import EventType
from mongo_durable.store import claims
from mongo_durable.store.connection import Endpoint
from mongo_durable.store.failpoints import FailPoint
from tests.cases.processes import Floor, happened, input_of
from tests.cases.workshop import PATIENCE_S, Workshop, chain, echo
from tests.langgraph.kit import State

STEPS = 25


@pytest.mark.parametrize("place", [FailPoint.CLAIM_HEAD_AFTER, FailPoint.CLAIM_EVENT_AFTER, FailPoint.APPEND_AFTER, FailPoint.SUSPEND_BEFORE])
async def test_a_run_that_lost_its_process_blocks_no_queue(place: FailPoint, floor: Floor) -> None:
    """CASES 89: a process dies between two steps of the first of three runs on a thread: a runner of one at a time ends all, in their order."""
    names = [floor.workshop.run(number) for number in range(3)]
    async with floor.workshop.client() as client:
        for name in names:
            await client.submit(floor.workshop.name, input_of(name), run_id=name, thread_id=floor.workshop.run("thread"), when_busy="queue")
        assert await floor.end(floor.start(floor.job("serve", names[0], die_at=(place, 1)))) is None
        left = await client.get_run(names[0])
        assert left.status == "running"
        outs = await floor.finish(floor.job("serve", *names), concurrency=1)
        ended = [(await client.get_run(name)).ended_at for name in names]
    assert outs == [["one", "answer to sure?", "two"] * number for number in (1, 2, 3)]
    assert sorted(ended, key=str) == ended
    assert set(happened(floor.effects)) == {(name, effect) for name in names for effect in ("one", "two")}


async def test_a_run_that_its_own_process_does_not_know_is_found(workshop: Workshop) -> None:
    """CASES 89: the reply of a claim was lost, so the head names a living process that does nothing: that process finds the run and ends it."""

    async def node(state: State) -> State:
        return {"lines": [state["work"]]}

    def make(app: App) -> Any:
        return chain(node=node)

    endpoint = Endpoint(workshop.uri, workshop.database)
    async with workshop.client() as client, workshop.runner(make, concurrency=1, sweep_interval=timedelta(seconds=0.1)) as runner:
        assert runner.process is not None
        owner = (await runner.process.lease()).owner
        await client.submit("nobody's", {"lines": [], "work": 1}, run_id=workshop.run("lost"))
        await claims.claim(endpoint.connection(), workshop.run("lost"), owner)
        await endpoint.connection().runs.update_one({"_id": workshop.run("lost")}, {"$set": {"workflow.name": workshop.name}})
        await client.submit(workshop.name, {"lines": [], "work": 2}, run_id=workshop.run("next"))
        for name, attempts in (("lost", 2), ("next", 1)):
            done = await client.wait(workshop.run(name), timeout=PATIENCE_S)
            assert (done.status, done.attempt) == ("completed", attempts)
        await endpoint.connection().runs.update_one({"_id": workshop.run("lost")}, {"$set": {"workflow.name": "nobody's"}})
    await endpoint.aclose()


@pytest.mark.parametrize("way", ["its own end", "a run behind it", "in a thread"])
async def test_a_run_that_would_wait_for_itself_is_told(way: str, workshop: Workshop) -> None:
    """CASES 97: a body that waits for its own run, or for one that is queued on its thread, gets an error instead of holding the thread for ever."""
    config: Any = {"configurable": {"thread_id": workshop.run("thread")}}
    apps: list[App] = []

    def make(app: App) -> Any:
        apps.append(app)

        async def node(state: State) -> State:
            if way == "its own end":
                await app.ainvoke(None, config)
            else:
                await app.ainvoke({"lines": []}, config, run_id=workshop.run("behind"), when_busy="queue")
            return {"lines": ["not reached"]}

        def in_a_thread(state: State) -> State:
            app.invoke(None, config)
            return {"lines": ["not reached"]}

        return chain(node=in_a_thread if way == "in a thread" else node)

    options: dict[str, Any] = {"sync": True, "client": None, "uri": workshop.uri} if way == "in a thread" else {}
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(RunError, match="wait for itself"):
            await workshop.once(make, {"lines": []}, thread="thread", **options)
    async with workshop.client() as client:
        ended = await client.get_run(workshop.run())
        assert ended.status == "failed"
        assert ended.error is not None
        assert "wait for itself" in ended.error["message"]
        if way == "a run behind it":
            await client.cancel(workshop.run("behind"))
    for app in apps:
        await asyncio.to_thread(app.close)


async def test_a_suspended_run_always_waits_for_somebody(workshop: Workshop) -> None:
    """CASES 97: whatever a run does besides, while it is suspended there is an open frontier with a question that an answer brings it on from."""

    def make(app: App) -> Any:
        effect = workshop.effect(app)

        async def node(state: State) -> State:
            lines = [interrupt(f"question {number} of {state['work']}") for number in range(state["work"])]
            return {"lines": [*lines, await effect(state["work"])]}

        return chain(node=node)

    number_of_runs = 4
    async with workshop.client() as client, workshop.runner(make):
        for number in range(number_of_runs):
            await client.submit(workshop.name, {"lines": [], "work": number}, run_id=workshop.run(number))
        answered = 0
        while True:
            rests = [await client.wait(workshop.run(number), timeout=PATIENCE_S) for number in range(number_of_runs)]
            suspended = [rest for rest in rests if not rest.is_ended]
            if not suspended:
                break
            for rest in suspended:
                assert rest.frontier is not None
                assert rest.frontier.status == "open"
                assert rest.frontier.entries
                await client.resolve(rest.run_id, {each.activity_id: "yes" for each in rest.frontier.entries})
                answered += 1
        assert answered == sum(range(number_of_runs))
        assert await client.open_frontiers(workflow=workshop.name) == []


async def test_steps_that_look_alike_are_told_apart(workshop: Workshop) -> None:
    """CASES 105: the same node, effect and question, twenty-five times in a loop of the graph and of a body: the run goes to its end."""

    def make(app: App) -> Any:
        effect = workshop.effect(app)

        async def node(state: State) -> State:
            number = len(state["lines"])
            lines = [await effect("same")]
            if number % 10 == 9:
                lines.append(interrupt(f"on after {number}?"))
            return {"lines": lines}

        async def body(state: State) -> State:
            return {"lines": [await effect("same") for _ in range(STEPS)] + [interrupt("done?")]}

        graph = StateGraph(State)
        graph.add_node("node", node)
        graph.add_node("body", body)
        graph.add_edge(START, "node")
        graph.add_conditional_edges("node", lambda state: "node" if len(state["lines"]) < STEPS else "body", ["node", "body"])
        return graph

    out = await workshop.complete(make, {"lines": []}, echo)
    in_graph = STEPS - 2
    assert Counter(out["lines"])["same"] == STEPS + in_graph
    started = await workshop.history(1, EventType.ACTIVITY_STARTED)
    assert len({event.activity_id for event in started}) == len(started)
    assert workshop.ran["same"] == len([event for event in started if event.name == "effect"])
