"""Questions to people: effects before them happen once, answers stand, and nothing on the way swallows them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pymongo
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    ContextEditingMiddleware,
    ModelCallLimitMiddleware,
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
    PIIMiddleware,
    TodoListMiddleware,
    ToolCallLimitMiddleware,
    ToolRetryMiddleware,
)
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.func import entrypoint, task
from langgraph.types import Command, interrupt

from mongo_durable import App
from mongo_durable.errors import FrontierExpired, ResolutionConflict, RunNotSuspended, StaleGeneration, UnsupportedGraph
from mongo_durable.protocol.events import EventType
from mongo_durable.store import frontiers
from mongo_durable.store.connection import Endpoint
from tests.cases.workshop import Workshop, chain, echo, ours, plain, replies, talk
from tests.langgraph.kit import ScriptedModel, State, calls

HELLO: dict[str, Any] = {"messages": [HumanMessage("hello", id="first")]}


async def test_an_effect_before_questions_in_a_loop_happens_once(workshop: Workshop) -> None:
    """CASES 1: a node that calls a tool and then asks three times in a loop enters its body four times, and the tool's only once."""

    def make(app: App) -> Any:
        @app.tool
        async def order(what: str) -> str:
            """Order something."""
            workshop.ran["order"] += 1
            return f"ordered {what}"

        async def node(state: State) -> State:
            workshop.ran["node"] += 1
            lines = [await order.ainvoke({"what": "desk"})]
            while len(lines) < 4:
                lines.append(interrupt(f"question {len(lines)}"))
            return {"lines": lines}

        return chain(node=node)

    out = await workshop.complete(make, {"lines": []}, echo)
    assert out["lines"] == ["ordered desk", *(f"answer to question {number}" for number in (1, 2, 3))]
    assert workshop.ran["order"] == 1
    assert workshop.ran["node"] > 4
    assert len(await workshop.history(1, EventType.ACTIVITY_STARTED)) == 1


async def test_a_question_between_effects_of_a_tool_repeats_none_of_them(workshop: Workshop) -> None:
    """CASES 1: inside a tool, too, an effect that ended before a question is not made again when its answer comes."""

    def make(app: App) -> Any:
        effect = workshop.effect(app, on_unknown_outcome="fail", idempotent=False)

        @app.tool
        async def travel(q: str) -> str:
            """Book a journey."""
            booked = [await effect("flight"), interrupt("hotel?"), await effect("hotel"), interrupt("car?"), await effect("car")]
            return ", ".join(booked)

        return talk(workshop.model(app, calls("travel"), AIMessage("done")), app.tool_node())

    out = await workshop.complete(make, HELLO, echo)
    assert replies(out) == [("call-0", "flight, answer to hotel?, hotel, answer to car?, car")]
    assert workshop.ran == {"flight": 1, "hotel": 1, "car": 1}


async def test_a_replay_gives_the_recorded_result_by_copy(workshop: Workshop) -> None:
    """CASES 3: what an activity does to its argument, and a caller to the result, is no part of the record: a replay gives the result as it was."""

    def make(app: App) -> Any:
        @app.activity(idempotent=True)
        async def fill(basket: list[str]) -> list[str]:
            workshop.ran["fill"] += 1
            basket.append("filled")
            return basket

        @task
        async def shop(basket: list[str]) -> list[str]:
            filled = await fill(basket)
            filled.append("by the caller")
            return filled

        @entrypoint()
        async def workflow(given: list[str]) -> Any:
            first = await shop(given)
            said = interrupt("pay?")
            first.append(said)
            return first

        return workflow

    suspended = await workshop.once(make, ["bag"])
    [question] = suspended["__interrupt__"]
    out = await workshop.once(make, Command(resume={question.id: "yes"}))
    assert out == ["bag", "filled", "by the caller", "yes"]
    assert workshop.ran["fill"] == 1
    started, completed = await workshop.history(1, EventType.ACTIVITY_STARTED, EventType.ACTIVITY_COMPLETED)
    assert (started.value, completed.value) == ({"basket": ["bag"]}, ["bag", "filled"])


def _asks(app: App) -> Any:
    async def node(state: State) -> State:
        return {"lines": [interrupt("sure?")]}

    return chain(node=node)


async def test_the_first_answer_stands(workshop: Workshop) -> None:
    """CASES 4: the same answer again is accepted, another one is a conflict, before and after the run went on; the run got the first."""
    await workshop.once(_asks, {"lines": []})
    async with workshop.client() as client:
        snapshot = await client.get_run(workshop.run())
        assert snapshot.frontier is not None
        question = snapshot.frontier.entries[0].activity_id
        receipt = await client.resolve(workshop.run(), {question: True})
        assert await client.resolve(workshop.run(), {question: True}) == receipt
        with pytest.raises(ResolutionConflict):
            await client.resolve(workshop.run(), {question: False})
        out = await workshop.once(_asks, None)
        with pytest.raises(ResolutionConflict):
            await client.resolve(workshop.run(), {question: False})
        assert await client.resolve(workshop.run(), {question: True}) == receipt
    assert out["lines"] == [True]


async def test_an_agent_called_in_a_node_resumes(workshop: Workshop) -> None:
    """CASES 5: a node that calls an agent whose tool asks gets its answer; its model calls and tools happen once, at places under the node."""

    def make(app: App) -> Any:
        @app.tool
        async def ask(q: str) -> str:
            """Ask a person."""
            return str(interrupt(q))

        @app.tool
        async def look(q: str) -> str:
            """Look something up."""
            workshop.ran["look"] += 1
            return f"seen {q}"

        agent = create_agent(workshop.model(app, calls("look"), calls("ask"), AIMessage("done")), [look, ask])

        async def node(state: State) -> State:
            said = await agent.ainvoke(HELLO)
            return {"lines": [content for _, content in replies(said)]}

        return chain(first=lambda state: {}, host=node)

    out = await workshop.complete(make, {"lines": []}, echo)
    assert out["lines"] == ["seen look0", "answer to ask0"]
    assert workshop.ran == {"look": 1}
    assert set(workshop.ledger.of("model").values()) == {1}
    places = {event.position.text for event in await workshop.history(1, EventType.ACTIVITY_STARTED) if event.position}
    assert len(places) == 5
    assert all(place.startswith("agent/1/host") for place in places)


@pytest.mark.parametrize("is_sync", [False, True], ids=["async", "sync"])
@pytest.mark.parametrize("node", [ours, plain])
async def test_a_wrapper_around_tool_calls_lets_questions_pass(node: Any, is_sync: bool, workshop: Workshop) -> None:
    """CASES 40: with a wrapper around each call and errors handled, a tool's question still reaches a person, and a real failure the model."""

    def make(app: App) -> Any:
        def ask(q: str) -> str:
            """Ask a person."""
            return str(interrupt(q))

        def fail(q: str) -> str:
            """Fail."""
            workshop.ran["fail"] += 1
            raise ValueError(f"no {q}")

        tools = [app.tool(ask), app.tool(fail)]

        def wrap(request: Any, handler: Any) -> Any:
            return handler(request)

        async def awrap(request: Any, handler: Any) -> Any:
            return await handler(request)

        made = node(app, tools, handle_tool_errors=True, wrap_tool_call=wrap, awrap_tool_call=awrap)
        model = workshop.model(app, calls("ask", "fail"), AIMessage("done"))
        return talk(model, made, is_sync=is_sync)

    out = await workshop.complete(make, HELLO, echo, sync=is_sync)
    answered, failed = replies(out)
    assert answered == ("call-0", "answer to ask0")
    assert failed[0] == "call-1"
    assert "no fail1" in failed[1]
    assert workshop.ran == {"fail": 1}


@pytest.mark.parametrize("node", [ours, plain])
async def test_a_wrapper_that_swallows_a_question_is_found(node: Any, workshop: Workshop) -> None:
    """CASES 40: a wrapper that catches everything cannot turn a question into a tool's answer: the run is refused, not finished wrongly."""

    def make(app: App) -> Any:
        @app.tool
        async def ask(q: str) -> str:
            """Ask a person."""
            return str(interrupt(q))

        async def awrap(request: Any, handler: Any) -> Any:
            try:
                return await handler(request)
            except Exception:  # noqa: BLE001 - what a careless wrapper does
                return ToolMessage("swallowed", tool_call_id=request.tool_call["id"])

        return talk(workshop.model(app, calls("ask"), AIMessage("done")), node(app, [ask], awrap_tool_call=awrap))

    with pytest.raises(UnsupportedGraph, match="swallowed"):
        await workshop.once(make, HELLO)
    async with workshop.client() as client:
        assert (await client.get_run(workshop.run())).status == "failed"


STOCK: dict[str, Any] = {
    "model retries": lambda: ModelRetryMiddleware(max_retries=2, initial_delay=0.0),
    "tool retries": lambda: ToolRetryMiddleware(max_retries=2, initial_delay=0.0),
    "fallbacks": lambda: ModelFallbackMiddleware(ScriptedModel(script=[AIMessage("never")], ledger=None)),
    "model limits": lambda: ModelCallLimitMiddleware(run_limit=9),
    "tool limits": lambda: ToolCallLimitMiddleware(run_limit=9),
    "context editing": ContextEditingMiddleware,
    "redaction": lambda: PIIMiddleware("email"),
    "to-do list": TodoListMiddleware,
}


@pytest.mark.parametrize("is_plain", [False, True], ids=["wrapped", "app.middleware"])
@pytest.mark.parametrize("stock", STOCK)
async def test_stock_middleware_swallows_no_question(stock: str, is_plain: bool, workshop: Workshop) -> None:
    """CASES 41: with LangChain's own middleware around it, a tool that asks is answered once and its sibling runs once."""

    def make(app: App) -> Any:
        async def ask(q: str) -> str:
            """Ask a person."""
            return str(interrupt(q))

        async def look(q: str) -> str:
            """Look something up."""
            workshop.ran["look"] += 1
            return f"seen {q}"

        script = [calls("look", "ask"), AIMessage("done")]
        middleware: list[AgentMiddleware[Any, Any, Any]] = [STOCK[stock]()]
        if is_plain:
            model = ScriptedModel(script=script, ledger=workshop.ledger)
            return create_agent(model, [tool(look), tool(ask)], middleware=[app.middleware(), *middleware])
        return create_agent(workshop.model(app, *script), [app.tool(look), app.tool(ask)], middleware=middleware)

    out = await workshop.complete(make, HELLO, echo)
    assert replies(out) == [("call-0", "seen look0"), ("call-1", "answer to ask1")]
    assert workshop.ran == {"look": 1}
    assert set(workshop.ledger.of("model").values()) == {1}


async def test_a_frontier_says_how_it_ended(workshop: Workshop) -> None:
    """CASES 56: open, resolved, expired and cancelled are four states; an answer that comes too late is told which, and changes nothing."""
    for number in range(1, 5):
        await workshop.once(_asks, {"lines": []}, number)
    async with workshop.client() as client:
        runs = [await client.get_run(workshop.run(number)) for number in range(1, 5)]
        questions = [run.frontier.entries[0].activity_id for run in runs if run.frontier is not None]
        await client.resolve(workshop.run(2), {questions[1]: "yes"})
        await _expire(workshop, workshop.run(3), {questions[2]: "nobody answered"})
        await client.cancel(workshop.run(4))
        states = [await client.frontier(workshop.run(number), 1) for number in range(1, 5)]
        assert [each.status for each in states if each is not None] == ["open", "resolved", "expired", "cancelled"]
        assert [(await client.get_run(workshop.run(number))).status for number in range(1, 5)] == ["suspended", "ready", "ready", "cancelled"]
        for number, refusal in ((2, ResolutionConflict), (3, FrontierExpired), (4, RunNotSuspended)):
            before = await client.history(workshop.run(number))
            with pytest.raises(refusal):
                await client.resolve(workshop.run(number), {questions[number - 1]: "late"})
            assert await client.history(workshop.run(number)) == before
        assert [each.run_id for each in await client.open_frontiers(workflow=workshop.name)] == [workshop.run(1)]
    outs = [await workshop.once(_asks, None, number) for number in (2, 3)]
    assert [out["lines"] for out in outs] == [["yes"], ["nobody answered"]]


async def _expire(workshop: Workshop, run_id: str, answers: dict[str, Any]) -> None:
    """Let the frontier's deadline pass."""
    with pymongo.MongoClient(workshop.uri) as client:
        past = {"$set": {"expires_at": datetime(2020, 1, 1, tzinfo=UTC)}}
        await asyncio.to_thread(client[workshop.database]["frontiers"].update_one, {"_id": f"{run_id}/1"}, past)
    endpoint = Endpoint(workshop.uri, workshop.database)
    connection = endpoint.connection()
    assert await frontiers.expire(connection, await frontiers.current(connection, run_id), answers)
    await endpoint.aclose()


async def test_an_approval_belongs_to_what_was_seen(workshop: Workshop) -> None:
    """CASES 57: an approval that names the digest of what its reviewer saw cannot approve another action that the run came to since."""

    def make(app: App) -> Any:
        async def node(state: State) -> State:
            first = interrupt({"pay": 10})
            return {"lines": [first, interrupt({"pay": 9_999 if first == "more" else 10})]}

        return chain(node=node)

    await workshop.once(make, {"lines": []})
    async with workshop.client() as client:
        seen = (await client.get_run(workshop.run())).frontier
        assert seen is not None
        with pytest.raises(StaleGeneration) as refused:
            await client.resolve(workshop.run(), {seen.entries[0].activity_id: "yes"}, digest="f" * len(seen.digest))
        assert refused.value.found == seen.digest
        await client.resolve(workshop.run(), {seen.entries[0].activity_id: "more"}, digest=seen.digest)
        await workshop.once(make, None)
        now = (await client.get_run(workshop.run())).frontier
        assert now is not None
        assert now.digest != seen.digest
        before = await client.history(workshop.run())
        for pin in ({"digest": seen.digest}, {"generation": seen.generation}):
            with pytest.raises(StaleGeneration):
                await client.resolve(workshop.run(), {now.entries[0].activity_id: "yes"}, **pin)  # type: ignore[arg-type]
        assert await client.history(workshop.run()) == before
        await client.resolve(workshop.run(), {now.entries[0].activity_id: "no"}, digest=now.digest)
    assert (await workshop.once(make, None))["lines"] == ["more", "no"]


async def test_one_question_asked_again_has_its_own_digest(workshop: Workshop) -> None:
    """CASES 57: the same words asked at another place are another question: the digest covers which question it is, not only what it says."""

    def make(app: App) -> Any:
        async def node(state: State) -> State:
            return {"lines": [interrupt("again?"), interrupt("again?")]}

        return chain(node=node)

    await workshop.once(make, {"lines": []})
    async with workshop.client() as client:
        seen = []
        for _ in range(2):
            frontier = (await client.get_run(workshop.run())).frontier
            assert frontier is not None
            seen.append(frontier)
            await client.resolve(workshop.run(), {frontier.entries[0].activity_id: "yes"}, digest=frontier.digest)
            await workshop.once(make, None)
    assert seen[0].digest != seen[1].digest
    assert seen[0].entries[0].activity_id != seen[1].entries[0].activity_id
