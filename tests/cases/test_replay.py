"""Replays: the history decides, whatever happened to anything else; identities come from places, errors from what they say."""

from __future__ import annotations

import asyncio
import random
import uuid
from typing import Any

import pymongo
import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from mongo_durable import App
from mongo_durable.errors import NondeterminismError, ResolutionError
from mongo_durable.protocol.events import EventType
from tests.cases.workshop import PATIENCE_S, RUNS, Workshop, chain, echo, replies
from tests.langgraph.kit import State, calls


async def test_message_ids_are_the_same_in_every_attempt(workshop: Workshop) -> None:
    """CASES 34: messages without ids, and with fresh ones in each attempt, mean the same to the model: one input digest, no call twice, no double."""

    def make(app: App) -> Any:
        model = workshop.model(app, AIMessage("first"), AIMessage("second"))

        async def start(state: MessagesState) -> dict[str, Any]:
            return {"messages": [SystemMessage("be brief"), HumanMessage("and kind", id=str(uuid.uuid4()))]}

        async def think(state: MessagesState) -> dict[str, Any]:
            before = [each.id for each in state["messages"][:2]]
            said = await model.ainvoke(state["messages"])
            answer = interrupt({"ids": before, "of the answer": said.id})
            again = await model.ainvoke([*state["messages"], said, HumanMessage(answer)])
            return {"messages": [said, HumanMessage(answer), again]}

        graph = StateGraph(MessagesState)
        graph.add_node("start", start)
        graph.add_node("think", think)
        graph.add_edge(START, "start")
        graph.add_edge("start", "think")
        return graph

    given = {"messages": [HumanMessage("hello")]}
    [question] = (await workshop.once(make, given))["__interrupt__"]
    assert given["messages"][0].id is None
    out = await workshop.once(make, Command(resume={question.id: "why?"}))
    assert [each.content for each in out["messages"]] == ["hello", "be brief", "and kind", "first", "why?", "second"]
    ids = [each.id for each in out["messages"]]
    assert None not in ids
    assert len(set(ids)) == 6
    assert (ids[0], ids[1], ids[3]) == (question.value["ids"][0], question.value["ids"][1], question.value["of the answer"])
    assert set(workshop.ledger.of("model").values()) == {1}
    started = await workshop.history(1, EventType.ACTIVITY_STARTED)
    assert len(started) == len({each.input_digest for each in started}) == 2


async def test_an_agent_does_not_repeat_itself_over_a_question(workshop: Workshop) -> None:
    """CASES 34: an agent over several questions calls its model once for each thing that it says, and its state has every message once."""

    def make(app: App) -> Any:
        @app.tool
        async def ask(q: str) -> str:
            """Ask a person."""
            return str(interrupt(q))

        script = [calls("ask", "ask", prefix="one"), calls("ask", prefix="two"), AIMessage("done")]
        return create_agent(workshop.model(app, *script), [ask], system_prompt="be brief")

    out = await workshop.complete(make, {"messages": [("user", "hello")]}, echo)
    assert replies(out) == [("one-0", "answer to ask0"), ("one-1", "answer to ask1"), ("two-0", "answer to ask0")]
    assert [each.type for each in out["messages"]] == ["human", "ai", "tool", "tool", "ai", "tool", "ai"]
    assert len({each.id for each in out["messages"]}) == 7
    assert sum(workshop.ledger.of("model").values()) == 3


async def test_a_resume_needs_nothing_but_the_history(workshop: Workshop, database: str) -> None:
    """CASES 44: with everything gone but events, frontiers, answers and the run's head, another process resumes to the same result."""
    workshop.database = database

    def make(app: App) -> Any:
        effect = workshop.effect(app)

        async def inside(state: State) -> State:
            return {"lines": [await effect("inside"), interrupt("inside?")]}

        async def host(state: State) -> State:
            return await chain(inside=inside).compile().ainvoke({"lines": []})  # type: ignore[no-any-return]

        async def last(state: State) -> State:
            return {"lines": [interrupt("last?"), await effect("last")]}

        return chain(host=host, last=last)

    out = await workshop.once(make, {"lines": []})
    needed = {"runs", "activity_events", "frontiers", "resolutions", "payloads"}
    with pymongo.MongoClient(workshop.uri) as client:
        while "__interrupt__" in out:
            found = set(client[database].list_collection_names(filter={"type": "collection"}))
            assert not any("checkpoint" in name for name in found)
            for name in found - needed - {"runners", "threads", "system.views"}:
                client[database][name].delete_many({})
            out = await workshop.once(make, Command(resume={each.id: echo(each.value) for each in out["__interrupt__"]}))
    assert out["lines"] == ["inside", "answer to inside?", "answer to last?", "last"]
    assert workshop.ran == {"inside": 1, "last": 1}


async def test_a_fork_starts_where_it_was_told_to(workshop: Workshop) -> None:
    """CASES 46: a fork keeps all that happened up to its place, of which nothing runs again, and does the rest anew; the original stays."""
    names = ["one", "two", "three", "four"]

    def make(app: App) -> Any:
        effect = workshop.effect(app)

        def step(name: str) -> Any:
            async def node(state: State) -> State:
                line = await effect(name)
                return {"lines": [f"{line} {interrupt('sure?')}" if name == "two" else line]}

            return node

        return chain(**{name: step(name) for name in names})

    first = await workshop.complete(make, {"lines": []}, echo)
    before = await workshop.history()
    for at in range(1, 4):
        workshop.ran.clear()
        async with workshop.client() as client:
            await client.fork(workshop.run(), at=at, new_run_id=workshop.run(f"from-{at}"))
        out = await workshop.once(make, None, f"from-{at}")
        if at < 2:
            [question] = out["__interrupt__"]
            out = await workshop.once(make, Command(resume={question.id: "changed my mind"}), f"from-{at}")
        assert workshop.ran == dict.fromkeys(names[at:], 1)
        assert out["lines"] == [line if at >= 2 else line.replace(echo("sure?"), "changed my mind") for line in first["lines"]]
    assert await workshop.history() == before


async def test_a_failure_is_what_it_says(workshop: Workshop) -> None:
    """CASES 98: a recorded failure is its type and message: raised from another depth, through other code, a replay takes it for the same."""
    depth = 0

    def deeper(left: int) -> None:
        if left:
            deeper(left - 1)
        raise LookupError("nothing there")

    def make(app: App) -> Any:
        @app.activity(idempotent=True)
        async def look() -> None:
            workshop.ran["look"] += 1
            deeper(depth)

        async def call(left: int) -> Any:
            return await (call(left - 1) if left else look())

        async def node(state: State) -> State:
            try:
                await call(depth)
            except LookupError as error:
                return {"lines": [type(error).__name__, str(error), interrupt("and now?")]}
            return {}

        return chain(node=node)

    [question] = (await workshop.once(make, {"lines": []}))["__interrupt__"]
    depth = 30
    out = await workshop.once(make, Command(resume={question.id: "go on"}))
    assert out["lines"] == ["LookupError", "nothing there", "go on"]
    assert workshop.ran == {"look": 1}
    [failed] = await workshop.history(1, EventType.ACTIVITY_FAILED)
    assert failed.error == {"type": "LookupError", "message": "nothing there"}


async def test_answers_that_overlap_replay_in_one_order(workshop: Workshop) -> None:
    """CASES 100: of rival answers to each of several questions one is recorded, in the order of the events, and every later attempt sees that."""
    seen: list[list[str]] = []

    def make(app: App) -> Any:
        async def node(state: State) -> State:
            got: list[str] = []
            seen.append(got)
            for number in range(5):
                got.append(interrupt(number))
            return {"lines": got}

        return chain(node=node)

    out = await workshop.once(make, {"lines": []})
    async with workshop.client() as client:
        while "__interrupt__" in out:
            [question] = out["__interrupt__"]

            async def say(answer: str, activity_id: str) -> bool:
                try:
                    await client.resolve(workshop.run(), {activity_id: answer})
                except ResolutionError:
                    return False
                return True

            won = await asyncio.gather(*(say(f"{question.value}{rival}", question.id) for rival in "abcdef"))
            assert sum(won) == 1
            out = await workshop.once(make, None)
    resolved = await workshop.history(1, EventType.ACTIVITIES_RESOLVED)
    recorded = [answer for event in resolved for answer in event.data["answers"].values()]
    assert out["lines"] == recorded
    assert [answer[0] for answer in recorded] == ["0", "1", "2", "3", "4"]
    assert all(got == recorded[: len(got)] for got in seen)


async def test_identities_do_not_come_from_a_stream(workshop: Workshop) -> None:
    """CASES 101: code that uses up randomness between effects, differently in each attempt, shifts no id of an effect, a message or a question."""
    attempts = 0

    def make(app: App) -> Any:
        nonlocal attempts
        attempts += 1
        effect = workshop.effect(app)
        model = workshop.model(app, AIMessage("said"))
        drawn = attempts

        async def node(state: MessagesState) -> dict[str, Any]:
            for _ in range(drawn):
                random.random()
            lines = [await effect("one")]
            for _ in range(drawn):
                uuid.uuid4()
            said = await model.ainvoke([HumanMessage("hello")])
            first = interrupt({"message": said.id})
            for _ in range(drawn):
                random.random()
            lines.append(await effect("two"))
            interrupt({"message": said.id})
            return {"messages": [said, HumanMessage(f"{first} {lines}")]}

        graph = StateGraph(MessagesState)
        graph.add_node("node", node)
        graph.add_edge(START, "node")
        return graph

    asked: list[tuple[str, Any]] = []
    out = await workshop.once(make, {"messages": [HumanMessage("hello")]})
    while "__interrupt__" in out:
        [question] = out["__interrupt__"]
        asked.append((question.id, question.value["message"]))
        out = await workshop.once(make, Command(resume={question.id: "yes"}))
    assert attempts == 3
    assert len({activity_id for activity_id, _ in asked}) == 2
    assert {message for _, message in asked} == {out["messages"][1].id}
    assert workshop.ran == {"one": 1, "two": 1}
    assert sum(workshop.ledger.of("model").values()) == 1


async def test_code_that_draws_its_path_at_random_is_found(workshop: Workshop) -> None:
    """CASES 101: where randomness decides which effect comes, the replay says where it left the history instead of taking another's record."""
    turn = iter(["heads", "tails"])

    def make(app: App) -> Any:
        effects = {name: workshop.effect(app, name) for name in ("heads", "tails")}

        async def node(state: State) -> State:
            side = next(turn)
            return {"lines": [await effects[side](side), interrupt("again?")]}

        return chain(node=node)

    [question] = (await workshop.once(make, {"lines": []}))["__interrupt__"]
    with pytest.raises(NondeterminismError) as found:
        await workshop.once(make, Command(resume={question.id: "yes"}))
    assert "heads" in str(found.value.expected)
    assert "tails" in str(found.value.found)
    assert workshop.ran == {"heads": 1}


async def test_many_replays_of_concurrent_steps(workshop: Workshop) -> None:
    """CASES 91: one run that is replayed again and again, with its concurrent steps starting in another order each time, never diverges."""
    rounds = max(3, RUNS // 5)

    def make(app: App) -> Any:
        effect = workshop.effect(app)

        def branch(name: str) -> Any:
            async def run() -> Any:
                await asyncio.sleep(random.random() * 0.005)
                return await effect(name)

            return run

        async def node(state: State) -> State:
            lines: list[Any] = []
            for number in range(rounds):
                lines.append(await app.gather(*(branch(f"{number}{name}") for name in "abcd")))
                lines.append(interrupt(number))
            return {"lines": lines}

        return chain(node=node)

    async with asyncio.timeout(PATIENCE_S):
        out = await workshop.complete(make, {"lines": []}, echo)
    expected = [[[f"{number}{name}" for name in "abcd"], echo(number)] for number in range(rounds)]
    assert out["lines"] == [each for pair in expected for each in pair]
    assert workshop.ran == {f"{number}{name}": 1 for number in range(rounds) for name in "abcd"}
