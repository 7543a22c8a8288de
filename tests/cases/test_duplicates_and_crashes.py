"""Nothing happens twice and nothing is lost: rivals, repeated requests, and processes that are killed or stand still at the worst moment."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pymongo
import pytest
from langchain_core.messages import AIMessage
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt

from mongo_durable import App, DurableClient, Runner
from mongo_durable.dev import DevMongo
from mongo_durable.errors import AttemptOver, LeaseLost, ResolutionConflict, RunFailed, Superseded, ThreadBusy
from mongo_durable.protocol.events import EventType
from mongo_durable.store import failpoints
from mongo_durable.store.failpoints import FailPoint
from tests.cases.processes import Floor, Job, Process, app_of, happened, input_of
from tests.cases.workshop import PATIENCE_S, RUNS, Workshop, chain, echo, ours, replies, talk
from tests.engine.workflows import until, until_known
from tests.langgraph.kit import State, calls
from tests.support.invariants import assert_invariants


async def test_a_process_may_die_at_any_write(floor: Floor) -> None:
    """CASES 47: killed before, inside or after any write, a run goes on to the same end, and no effect whose outcome was recorded happens again."""
    name = floor.workshop.run
    told = await floor.end(floor.start(floor.job("invoke", name("whole"))))
    assert told is not None
    places = [(point, hit) for point, hits in told["hits"].items() for hit in range(1, hits + 1)]
    assert {point for point, _ in places} >= {FailPoint.SUBMIT_INSIDE, FailPoint.APPEND_BEFORE, FailPoint.APPEND_AFTER, FailPoint.SUSPEND_INSIDE}
    jobs = [floor.job("invoke", name(f"{point.value}-{hit}"), die_at=(point, hit)) for point, hit in places]
    for batch in range(0, len(jobs), 4):
        ends = await asyncio.gather(*(floor.end(floor.start(job)) for job in jobs[batch : batch + 4]))
        # How many events go in one insert depends on how fast they come: a process may end without having come to its place.
        assert all(
            end is None or end["hits"].get(job.die_at[0], 0) < job.die_at[1] for end, job in zip(ends, jobs[batch:], strict=False) if job.die_at
        )
    before = happened(floor.effects)
    recorded = await _recorded(floor, [job.runs[0] for job in jobs])
    async with floor.workshop.client() as client:
        for job in jobs:
            await client.submit(job.workflow, input_of(job.runs[0]), run_id=job.runs[0], thread_id=job.runs[0])
    outs = await floor.finish(floor.job("serve", *(job.runs[0] for job in jobs)))
    assert outs == [["one", "answer to sure?", "two"]] * len(jobs)
    after = happened(floor.effects)
    for job in jobs:
        [run] = job.runs
        for effect in ("one", "two"):
            assert 1 <= after[(run, effect)] <= 2
            if (run, effect) in recorded:
                assert after[(run, effect)] == before[(run, effect)] == 1


async def _recorded(floor: Floor, runs: list[str]) -> set[tuple[str, str]]:
    """Effects whose outcome is in the database."""

    def read() -> set[tuple[str, str]]:
        with pymongo.MongoClient(floor.workshop.uri) as client:
            found = client[floor.workshop.database]["activity_events"].find({"run_id": {"$in": runs}, "type": "activity.completed"})
            return {(event["run_id"], event["value"]) for event in found}

    return await asyncio.to_thread(read)


async def test_an_accepted_run_does_not_vanish(floor: Floor) -> None:
    """CASES 48: the process dies as soon as it has heard that runs are accepted, or before it came to the first node: another executes them."""
    name = floor.workshop.run
    submitted = floor.job("submit", name(1), name(2))
    invoked = floor.job("invoke", name(3), die_at=(FailPoint.SUBMIT_AFTER, 1))
    assert [await floor.end(each) for each in (floor.start(submitted), floor.start(invoked))] == [None, None]
    async with floor.workshop.client() as client:
        assert sorted(run.run_id for run in await client.list_runs(workflow=floor.workshop.name)) == sorted(submitted.runs + invoked.runs)
    assert happened(floor.effects) == {}
    outs = await floor.finish(floor.job("serve", *submitted.runs, *invoked.runs))
    assert outs == [["one", "answer to sure?", "two"]] * 3
    assert set(happened(floor.effects).values()) == {1}


async def test_a_handled_failure_survives_the_crash(floor: Floor) -> None:
    """CASES 50: a failure that was recorded and handled before the process died is the same failure after it, and its handling happens once."""
    job = floor.job("invoke", floor.workshop.run(), shape="stumbles", die_in=("last", 1))
    assert await floor.end(floor.start(job)) is None
    assert await floor.finish(job) == [["nothing there: remedy", "last"]]
    [run] = job.runs
    assert happened(floor.effects) == {(run, "fails"): 1, (run, "remedy"): 1, (run, "last"): 2}
    assert [event.error for event in await floor.workshop.history(1, EventType.ACTIVITY_FAILED)] == [
        {"type": "LookupError", "message": "nothing there"}
    ]


@pytest.mark.parametrize("does", ["invoke", "serve"])
async def test_a_process_that_stood_still_adds_nothing(does: str, floor: Floor) -> None:
    """CASES 51, 52, 104: a process stands still inside an effect until another has ended the run: what it brings is refused, the chain is one."""
    job = floor.job(does, floor.workshop.run(), wait_in="one")
    if does == "serve":
        async with floor.workshop.client() as client:
            await client.submit(job.workflow, input_of(job.runs[0]), run_id=job.runs[0])
    paused = floor.start(job)
    await asyncio.to_thread(paused.until_in_effect)
    await asyncio.to_thread(paused.stop)
    outs = await floor.finish(job)
    history = await floor.workshop.history()
    paused.go_on()
    told = await floor.end(paused)
    assert told is not None
    if does == "invoke":
        assert isinstance(told["error"], Superseded | LeaseLost)
    assert outs == [["one", "answer to sure?", "two"]]
    assert await floor.workshop.history() == history
    [run] = job.runs
    assert happened(floor.effects) == {(run, "one"): 2, (run, "two"): 1}
    fences = [event.fence for event in history]
    assert fences == sorted(fences)


async def test_runs_of_a_thread_do_not_overwrite_each_other(workshop: Workshop) -> None:
    """CASES 52: of runs that want one thread at once one has it and the others are refused or wait; the state has what each added, in turn."""

    def make(app: App) -> Any:
        effect = workshop.effect(app)

        async def node(state: State) -> State:
            return {"lines": [f"{await effect(state['work'])} after {len(state['lines'])}"]}

        return chain(node=node)

    async with workshop.client() as client:
        await client.submit(workshop.name, {"work": "first"}, run_id=workshop.run(0), thread_id=workshop.run("thread"))
        refused = await asyncio.gather(
            *(client.submit(workshop.name, {"work": "refused"}, thread_id=workshop.run("thread")) for _ in range(5)), return_exceptions=True
        )
        assert {type(each) for each in refused} == {ThreadBusy}
        queued = [
            await client.submit(workshop.name, {"work": f"run {number}"}, thread_id=workshop.run("thread"), when_busy="queue") for number in range(4)
        ]
        async with workshop.runner(make), workshop.runner(make):
            outs = [(await run.wait(timeout=PATIENCE_S)).result() for run in queued]
    assert outs[-1]["lines"] == ["first after 0", *(f"run {number} after {number + 1}" for number in range(4))]
    assert set(workshop.ran.values()) == {1}
    assert "refused" not in workshop.ran


async def test_one_of_many_answers_wins(workshop: Workshop) -> None:
    """CASES 53: fifty resolves at once, of several clients and two minds: one wins, its like get its receipt, the rest a conflict."""

    def make(app: App) -> Any:
        effect = workshop.effect(app)

        async def node(state: State) -> State:
            return {"lines": [await effect(f"after {interrupt('sure?')}")]}

        return chain(node=node)

    async with workshop.runner(make), workshop.runner(make), workshop.client() as one, workshop.client() as other:
        run = await one.submit(workshop.name, {"lines": []}, run_id=workshop.run())
        frontier = (await run.wait(timeout=PATIENCE_S)).frontier
        assert frontier is not None
        question = frontier.entries[0].activity_id
        told = await asyncio.gather(
            *(
                (one if number % 3 else other).resolve(run.run_id, {question: "yes" if number % 2 else "no"}, note=str(number))
                for number in range(50)
            ),
            return_exceptions=True,
        )
        out = (await run.wait(timeout=PATIENCE_S)).result()["lines"]
    receipts = [each for each in told if not isinstance(each, BaseException)]
    assert Counter(type(each) for each in told if isinstance(each, BaseException)) == {ResolutionConflict: 25}
    assert len({(each.answers_digest, each.resolved_at, each.note) for each in receipts}) == 1
    assert len(receipts) == 25
    assert len(await workshop.history(1, EventType.ACTIVITIES_RESOLVED)) == 1
    assert workshop.ran in ({"after yes": 1}, {"after no": 1})
    assert out == list(workshop.ran)


async def test_every_occurrence_has_an_id_of_its_own(workshop: Workshop) -> None:
    """CASES 54: the same effect in loops of the graph, of a body and of a tool has one id for each occurrence, the same in every attempt."""
    ids: dict[str, set[str]] = {}

    def make(app: App) -> Any:
        @app.activity(idempotent=True)
        async def act(where: str) -> str:
            workshop.ran[where] += 1
            return where

        @app.tool(idempotent=True)
        async def again(q: str) -> str:
            """Do it twice, and ask between."""
            return f"{await act('tool')}, {interrupt(q)}, {await act('tool')}"

        async def node(state: State) -> State:
            lines = [await act("same") for _ in range(3)]
            lines.append(interrupt("once more?"))
            lines.append(await again.ainvoke({"q": "in the tool?"}))
            return {"lines": lines}

        graph = StateGraph(State)
        graph.add_node("node", node)
        graph.add_edge(START, "node")
        graph.add_conditional_edges("node", lambda state: "node" if len(state["lines"]) < 10 else "__end__", ["node", "__end__"])
        return graph

    out = await workshop.complete(make, {"lines": []}, echo)
    assert len(out["lines"]) == 10
    assert workshop.ran == {"same": 6, "tool": 4}
    history = await workshop.history()
    for event in history:
        if event.position is not None and event.activity_id is not None:
            ids.setdefault(event.position.text, set()).add(event.activity_id)
    assert all(len(each) == 1 for each in ids.values())
    assert len({activity_id for each in ids.values() for activity_id in each}) == len(ids)
    outcomes = Counter(event.activity_id for event in history if event.type is EventType.ACTIVITY_COMPLETED)
    assert set(outcomes.values()) == {1}
    assert len(outcomes) == 6 + 4 + 2


async def test_calls_with_equal_ids_are_told_apart(workshop: Workshop) -> None:
    """CASES 54: a model that uses one call id again in its next response does not get the earlier call's result."""

    def make(app: App) -> Any:
        @app.tool
        async def count(q: str) -> str:
            """Count."""
            workshop.ran["count"] += 1
            return str(workshop.ran["count"])

        return talk(workshop.model(app, calls("count"), calls("count"), AIMessage("done")), ours(app, [count]))

    out = await workshop.once(make, {"messages": [("user", "hello")]})
    assert [content for _, content in replies(out)] == ["1", "2"]
    assert workshop.ran == {"count": 2}


async def test_a_database_that_dies_while_runs_are_taken_over(tmp_path: Path) -> None:
    """CASES 86: a process with three runs is killed; while another claims them the database is killed too and comes back: every run ends."""
    effects = tmp_path / "effects"
    server = DevMongo()
    with server as uri:
        job = Job(
            uri=uri, database="cases", effects=str(effects), workflow="steps", does="serve", runs=("run-1", "run-2", "run-3"), die_in=("one", 3)
        )
        async with DurableClient(uri, database="cases") as client:
            for run_id in job.runs:
                await client.submit(job.workflow, input_of(run_id), run_id=run_id)
        assert await asyncio.to_thread(Process(job).end) is None
        died = asyncio.Event()
        claims = 0

        async def die(point: FailPoint) -> None:
            nonlocal claims
            if point is FailPoint.CLAIM_HEAD_BEFORE:
                claims += 1
                if claims == 2:
                    await asyncio.to_thread(server.kill, 0)
                    died.set()

        failpoints.handler = die
        try:
            async with Runner([app_of(replace(job, die_in=None))], lease=timedelta(seconds=5), sweep_interval=timedelta(seconds=0.2)):
                await died.wait()
                await asyncio.to_thread(server.restart, 0)
                async with DurableClient(uri, database="cases") as client:
                    for run_id in job.runs:
                        frontier = (await client.wait(run_id, timeout=PATIENCE_S)).frontier
                        assert frontier is not None
                        await client.resolve(run_id, {frontier.entries[0].activity_id: "yes"})
                    assert [(await client.wait(run_id, timeout=PATIENCE_S)).status for run_id in job.runs] == ["completed"] * 3
        finally:
            failpoints.handler = None
        assert_invariants(uri, "cases")
    counts = happened(effects)
    assert [counts[(run_id, "two")] for run_id in job.runs] == [1, 1, 1]
    assert all(1 <= counts[(run_id, "one")] <= 2 for run_id in job.runs)


@pytest.mark.parametrize(("policy", "tries"), [("rerun", 4), ("suspend", 2), ("fail", 2)])
async def test_a_crash_between_tries_is_a_legal_state(policy: str, tries: int, floor: Floor) -> None:
    """CASES 94: a process that dies in the second try of an effect leaves a start without an outcome, and the effect's policy says what follows."""
    job = floor.job("invoke", floor.workshop.run(), shape=f"retries, {policy}", die_in=("try", 2))
    assert await floor.end(floor.start(job)) is None
    history = await floor.workshop.history()
    assert history[-1].type is EventType.ACTIVITY_STARTED
    if policy == "fail":
        with pytest.raises(RunFailed) as failed:
            await floor.finish(job)
        assert failed.value.error["type"].endswith("UnknownOutcome")
    else:
        assert await floor.finish(job, lambda _: {"verdict": "completed", "result": "done"}) == [["done"]]
    assert happened(floor.effects).total() == tries


class Till:
    """A workflow of one effect, which ends when it is told to."""

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self.gate = asyncio.Event()

    def make(self, app: App) -> Any:
        """Its graph."""

        @app.activity
        async def pay() -> str:
            self.workshop.ran["pay"] += 1
            await self.gate.wait()
            return "paid"

        async def node(state: State) -> State:
            return {"lines": [await pay()]}

        return chain(node=node)

    async def is_paying(self) -> None:
        """Wait until the effect is under way."""
        await until(lambda: self.workshop.ran["pay"] == 1)


async def test_a_run_that_this_process_executes_is_not_taken_over(workshop: Workshop) -> None:
    """CASES 95: runners that start, sweep and stop in the process that executes a run leave it alone; other callers wait for its outcome."""
    till = Till(workshop)
    app = workshop.app(till.make)
    config: Any = {"configurable": {"thread_id": workshop.run()}}
    first = asyncio.create_task(app.ainvoke({"lines": []}, config, run_id=workshop.run()))
    await till.is_paying()
    others = [asyncio.create_task(app.ainvoke(None, config)), asyncio.create_task(workshop.once(till.make, {"lines": []}))]
    for _ in range(2):
        async with workshop.runner(till.make, sweep_interval=timedelta(seconds=0.02)):
            done, _ = await asyncio.wait([first, *others], timeout=0.3)
            assert not done
    till.gate.set()
    assert await first == {"lines": ["paid"]}
    assert await asyncio.gather(*others) == [{"lines": ["paid"]}] * 2
    assert workshop.ran == {"pay": 1}
    async with workshop.client() as client:
        assert (await client.get_run(workshop.run())).attempt == 1


async def test_a_runner_that_stops_leaves_its_apps_calls_alone(workshop: Workshop) -> None:
    """CASES 95: a runner of an app that is executing a run already starts and stops beside it, and the run ends as if it had not been there."""
    till = Till(workshop)
    app = workshop.app(till.make)
    first = asyncio.create_task(app.ainvoke({"lines": []}, {"configurable": {"thread_id": workshop.run()}}, run_id=workshop.run()))
    await till.is_paying()
    async with Runner([app], sweep_interval=timedelta(seconds=0.02)):
        await asyncio.wait([first], timeout=0.1)
    till.gate.set()
    assert await first == {"lines": ["paid"]}
    assert workshop.ran == {"pay": 1}


async def test_a_result_that_comes_too_late_is_refused(workshop: Workshop) -> None:
    """CASES 104: a run is cancelled while its effect is under way: what it then returns, or raises, is recorded nowhere and starts nothing."""
    late: Counter[str] = Counter()

    def make(app: App) -> Any:
        @app.activity
        async def pay(number: int) -> str:
            workshop.ran["pay"] += 1
            await gate.wait()
            late["returned"] += 1
            if number % 2:
                raise ConnectionError("gave up")
            return "paid"

        effect = workshop.effect(app)

        async def node(state: State) -> State:
            return {"lines": [await pay(state["work"]), await effect("after")]}

        return chain(node=node)

    number_of_runs = max(4, RUNS // 4)
    gate = asyncio.Event()
    tasks = [asyncio.create_task(workshop.once(make, {"lines": [], "work": number}, number)) for number in range(number_of_runs)]
    await until(lambda: workshop.ran["pay"] == number_of_runs)
    async with workshop.client() as client:
        ends = await asyncio.gather(*(client.cancel(workshop.run(number), reason="took too long") for number in range(number_of_runs)))
        assert {each.status for each in ends} == {"cancelled"}
        before = [await client.history(workshop.run(number)) for number in range(number_of_runs)]
        gate.set()
        told = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, AttemptOver | RunFailed) for each in told), told
        assert [await client.history(workshop.run(number)) for number in range(number_of_runs)] == before

        async def is_quiet() -> bool:
            return await client.open_frontiers(workflow=workshop.name) == []

        await until_known(is_quiet)
    assert "after" not in workshop.ran
