"""Things that happen at once: each question has its own id, each answer its own question, and what ended is not done again."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Send, interrupt

from mongo_durable import App
from mongo_durable.errors import ConfigurationError, IncompleteResolution, ResolutionError
from mongo_durable.protocol.events import EventType
from tests.cases.workshop import PATIENCE_S, RUNS, Make, Workshop, beside, chain, echo, ours, plain, replies, talk
from tests.langgraph.kit import Lines, State, calls

HELLO: dict[str, Any] = {"messages": [HumanMessage("hello", id="first")]}
PAUSE_S = 0.05


async def pause() -> None:
    """Let others overtake, or not."""
    await asyncio.sleep(random.random() * PAUSE_S)


def _three_askers(workshop: Workshop, node: Any) -> Make:
    def make(app: App) -> Any:
        @app.tool
        async def ask(q: str) -> str:
            """Ask a person."""
            await pause()
            answer = interrupt(q)
            await pause()
            return f"{q}: {answer}"

        return talk(workshop.model(app, calls("ask", "ask", "ask"), AIMessage("done")), node(app, [ask]))

    return make


@pytest.mark.parametrize("node", [ours, plain])
async def test_calls_of_one_response_have_ids_of_their_own(node: Any, workshop: Workshop) -> None:
    """CASES 7: three calls in one tool node ask under three ids, in the order of the response, and one batch answers all."""
    make = _three_askers(workshop, node)
    asked = (await workshop.once(make, HELLO))["__interrupt__"]
    assert [each.value for each in asked] == ["ask0", "ask1", "ask2"]
    assert len({each.id for each in asked}) == 3
    with pytest.raises(IncompleteResolution):
        await workshop.once(make, Command(resume={asked[0].id: "alone"}))
    with pytest.raises(ConfigurationError, match="3 open questions"):
        await workshop.once(make, Command(resume="for whom?"))
    out = await workshop.once(make, Command(resume={each.id: each.value.upper() for each in reversed(asked)}))
    assert [content for _, content in replies(out)] == ["ask0: ASK0", "ask1: ASK1", "ask2: ASK2"]


@pytest.mark.parametrize("node", [ours, plain])
async def test_every_answer_reaches_its_own_tool(node: Any, workshop: Workshop) -> None:
    """CASES 8: whatever the order in which calls of one tool arrive at their questions, in many runs at once, no answer goes to another call."""
    workshop.ledger.ran.clear()
    async with workshop.client() as client, workshop.runner(_three_askers(workshop, node), concurrency=10):

        async def one(number: int) -> Any:
            run = await client.submit(workshop.name, HELLO, run_id=workshop.run(number))
            asked = await run.wait(timeout=PATIENCE_S)
            assert asked.frontier is not None
            answers = [(each.activity_id, echo(each.value)) for each in asked.frontier.entries]
            random.shuffle(answers)
            await client.resolve(run.run_id, dict(answers))
            return (await run.wait(timeout=PATIENCE_S)).result()

        outs = await asyncio.gather(*(one(number) for number in range(RUNS)))
    for out in outs:
        assert replies(out) == [(f"call-{number}", f"ask{number}: answer to ask{number}") for number in range(3)]


async def test_two_child_graphs_are_answered_with_one_call(workshop: Workshop) -> None:
    """CASES 10: two child graphs that ask at once pend as one frontier, and one Command answers both."""

    def make(app: App) -> Any:
        effect = workshop.effect(app)

        def child(name: str) -> Any:
            async def before(state: State) -> State:
                return {"lines": [await effect(f"{name} before")]}

            async def asks(state: State) -> State:
                return {"lines": [f"{name}: {interrupt(name)}"]}

            return _lines(chain(before=before, asks=asks))

        return beside(one=child("one"), two=child("two"))

    asked = (await workshop.once(make, {"lines": []}))["__interrupt__"]
    assert sorted(each.value for each in asked) == ["one", "two"]
    out = await workshop.once(make, Command(resume={each.id: echo(each.value) for each in asked}))
    assert out["lines"] == ["one before", "one: answer to one", "two before", "two: answer to two"]
    assert workshop.ran == {"one before": 1, "two before": 1}
    assert len(await workshop.history(1, EventType.ACTIVITIES_SUSPENDED)) == 1


def _lines(graph: StateGraph[Any]) -> Any:
    """A child graph that starts with no lines of its own: what it gives back is what it adds."""
    made: StateGraph[Any] = StateGraph(State, input_schema=Empty, output_schema=Lines)
    for name, node in graph.nodes.items():
        made.add_node(name, node.runnable)
    for start, end in graph.edges:
        made.add_edge(start, end)
    return made.compile()


class Empty(Lines, total=False):
    """What such a child graph takes: nothing that the parent has."""


async def test_the_order_of_a_frontier_is_stable(workshop: Workshop) -> None:
    """CASES 11: in many runs, branches that come to their questions in random order stand in the frontier in one order, that of their places."""

    def asker(name: str) -> Any:
        async def node(state: State) -> State:
            await pause()
            return {"lines": [interrupt(name)]}

        return node

    def make(app: App) -> Any:
        return beside(**{name: asker(name) for name in ("delta", "alpha", "charlie", "bravo")})

    orders: Counter[tuple[tuple[str, str], ...]] = Counter()
    async with workshop.client() as client, workshop.runner(make):
        runs = [await client.submit(workshop.name, {"lines": []}, run_id=workshop.run(number)) for number in range(RUNS)]
        for run in runs:
            frontier = (await run.wait(timeout=PATIENCE_S)).frontier
            assert frontier is not None
            orders[tuple((each.position, each.value) for each in frontier.entries)] += 1
            again = await client.open_frontiers(run_id=run.run_id)
            assert [each.entries for each in again] == [frontier.entries]
            await client.cancel(run.run_id)
    [order] = orders
    assert sorted(value for _, value in order) == ["alpha", "bravo", "charlie", "delta"]


async def test_branches_with_a_question_each(workshop: Workshop) -> None:
    """CASES 13: two branches that ask once each, at different depths, both go on from their own answer and meet; no branch starts again."""

    def make(app: App) -> Any:
        effect = workshop.effect(app)

        def step(name: str, *, asks: bool = False) -> Any:
            async def node(state: State) -> State:
                line = await effect(name)
                return {"lines": [f"{line} {interrupt(name)}" if asks else line]}

            return node

        graph = StateGraph(State)
        for name, node in {"a1": step("a1", asks=True), "a2": step("a2"), "b1": step("b1"), "b2": step("b2", asks=True), "end": step("end")}.items():
            graph.add_node(name, node)
        graph.add_edge(START, "a1")
        graph.add_edge("a1", "a2")
        graph.add_edge(START, "b1")
        graph.add_edge("b1", "b2")
        graph.add_edge(["a2", "b2"], "end")
        return graph

    out = await workshop.complete(make, {"lines": []}, echo)
    assert sorted(out["lines"]) == ["a1 answer to a1", "a2", "b1", "b2 answer to b2", "end"]
    assert workshop.ran == {"a1": 1, "a2": 1, "b1": 1, "b2": 1, "end": 1}


async def test_answers_are_given_under_one_kind_of_id(workshop: Workshop) -> None:
    """CASES 14: result, stream and client show the same stable id, an answer under it reaches LangGraph in its own shape, any other is refused."""

    def make(app: App) -> Any:
        async def node(state: State) -> State:
            return {"lines": [interrupt("sure?")]}

        return chain(node=node)

    [question] = (await workshop.once(make, {"lines": []}))["__interrupt__"]
    async with workshop.client() as client:
        [frontier] = await client.open_frontiers(run_id=workshop.run())
        assert [each.activity_id for each in frontier.entries] == [question.id]
    streamed = [
        chunk
        async for chunk in workshop.app(make).astream(
            None, {"configurable": {"thread_id": workshop.run()}}, run_id=workshop.run(), stream_mode="updates"
        )
    ]
    assert [each.id for chunk in streamed for each in chunk.get("__interrupt__", ())] == [question.id]
    async with workshop.client() as client:
        for other in ("0" * 32, "node:sure", question.id.upper()):
            with pytest.raises(ResolutionError):
                await client.resolve(workshop.run(), {other: "yes"})
    assert (await workshop.once(make, Command(resume={question.id: "yes"})))["lines"] == ["yes"]


@pytest.mark.parametrize("node", [ours, plain])
async def test_a_question_does_not_repeat_its_siblings(node: Any, workshop: Workshop) -> None:
    """CASES 16: of two calls in one tool node one asks, the other's effect happens once, also when the asker asks twice."""

    def make(app: App) -> Any:
        @app.tool
        async def weather(q: str) -> str:
            """Look at the sky."""
            workshop.ran["weather"] += 1
            return "rain"

        @app.tool
        async def ask_human(q: str) -> str:
            """Ask a person."""
            return f"{interrupt('go?')}, {interrupt('really?')}"

        return talk(workshop.model(app, calls("weather", "ask_human"), AIMessage("done")), node(app, [weather, ask_human]))

    out = await workshop.complete(make, HELLO, echo)
    assert replies(out) == [("call-0", "rain"), ("call-1", "answer to go?, answer to really?")]
    assert workshop.ran == {"weather": 1}
    assert set(workshop.ledger.of("model").values()) == {1}


@pytest.mark.parametrize("asks", [False, True])
async def test_fanned_out_work_keeps_its_order(asks: bool, workshop: Workshop) -> None:
    """CASES 17: five sent pieces of work that end in reverse order come back in the order in which they were sent, also after a resume."""
    ended: list[int] = []
    turns: dict[int, asyncio.Event] = {}

    def make(app: App) -> Any:
        turns.update({number: asyncio.Event() for number in range(5)})
        turns[4].set()

        @app.activity(idempotent=True)
        async def work(number: int) -> int:
            await turns[number].wait()
            ended.append(number)
            if number:
                turns[number - 1].set()
            return number

        async def worker(state: State) -> State:
            done = await work(state["work"])
            return {"lines": [f"{done} {interrupt(done)}" if asks else str(done)]}

        graph = chain(first=lambda state: {})
        graph.add_node("worker", worker)
        graph.add_conditional_edges("first", lambda state: [Send("worker", {"work": number}) for number in range(5)], ["worker"])
        return graph

    out = await workshop.complete(make, {"lines": []}, echo)
    assert ended == [4, 3, 2, 1, 0]
    assert out["lines"] == [f"{number} answer to {number}" if asks else str(number) for number in range(5)]


@pytest.mark.parametrize("is_branched", [False, True], ids=["asyncio.gather", "app.gather"])
async def test_concurrent_steps_may_start_in_any_order(is_branched: bool, workshop: Workshop) -> None:
    """CASES 91: steps of one body that start at random moments find their records again in every replay, whatever order they had then."""
    names = ["alpha", "bravo", "charlie", "delta", "echo"]

    def make(app: App) -> Any:
        effects = {name: workshop.effect(app, "same" if is_branched else name) for name in names}

        def branch(name: str) -> Any:
            async def run() -> Any:
                await pause()
                # In branches of their own even steps with equal names and arguments are told apart.
                return name, await effects[name]("equal" if is_branched else name)

            return run

        async def node(state: State) -> State:
            together = app.gather(*map(branch, names)) if is_branched else asyncio.gather(*(branch(name)() for name in names))
            done = await together
            return {"lines": [*done, interrupt("seen?")]}

        return chain(node=node)

    async with workshop.client() as client, workshop.runner(make):

        async def one(number: int) -> Any:
            run = await client.submit(workshop.name, {"lines": []}, run_id=workshop.run(number))
            asked = await run.wait(timeout=PATIENCE_S)
            assert asked.frontier is not None, asked
            await client.resolve(run.run_id, {asked.frontier.entries[0].activity_id: "yes"})
            return (await run.wait(timeout=PATIENCE_S)).result()["lines"]

        outs = await asyncio.gather(*(one(number) for number in range(RUNS)))
    expected = [(name, "equal" if is_branched else name) for name in names]
    assert all(out == [*expected, "yes"] for out in outs), outs
    assert workshop.ran == ({"equal": 5 * RUNS} if is_branched else dict.fromkeys(names, RUNS))


def _fails_and_asks(workshop: Workshop, *, is_handled: bool) -> Make:
    """Three branches at once: one fails, one asks, one ends."""

    def make(app: App) -> Any:
        @app.activity(idempotent=True)
        async def fail() -> None:
            await pause()
            raise LookupError("nothing there")

        effect = workshop.effect(app)

        async def asks() -> Any:
            await pause()
            return interrupt("may I?")

        async def node(state: State) -> State:
            try:
                await app.gather(fail, asks, lambda: effect("done"))
            except LookupError as error:
                if not is_handled:
                    raise
                return {"lines": [str(error)]}
            return {}

        return chain(node=node)

    return make


async def test_nothing_waits_without_an_end(workshop: Workshop) -> None:
    """CASES 92: steps that fail, ask and end at once bring the run to a rest, first the question, then the failure; a wait can have an end."""
    async with workshop.client() as client, workshop.runner(_fails_and_asks(workshop, is_handled=False)):
        runs = [await client.submit(workshop.name, {"lines": []}, run_id=workshop.run(number)) for number in range(5)]
        for run in runs:
            asked = await run.wait(timeout=PATIENCE_S)
            assert asked.frontier is not None
            await client.resolve(run.run_id, {asked.frontier.entries[0].activity_id: "yes"})
        errors = [(await run.wait(timeout=PATIENCE_S)).error for run in runs]
    assert errors == [{"type": "LookupError", "message": "nothing there"}] * 5
    assert workshop.ran == {"done": 5}
    async with workshop.client() as client:
        nobody = await client.submit(f"{workshop.name}-unserved", {"lines": []})
        with pytest.raises(TimeoutError):
            await nobody.wait(timeout=0.05)
        await client.cancel(nobody.run_id)


async def test_a_failed_branch_does_not_drop_its_siblings_question(workshop: Workshop) -> None:
    """CASES 92: a body that handles the failure of one branch still has the question of another asked and answered, and goes on."""
    out = await workshop.complete(_fails_and_asks(workshop, is_handled=True), {"lines": []}, echo)
    assert out["lines"] == ["nothing there"]
    assert workshop.ran == {"done": 1}
