"""Deep agents: what sub-agents do is kept under their path, asked about in every way, and never done again because another one asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from mongo_durable import App
from mongo_durable.protocol.history import fold
from tests.cases.workshop import Make, Workshop
from tests.deep_agents.kit import Say, Speaker, call, in_turn, order, task, watched_inputs

HELLO: dict[str, Any] = {"messages": [HumanMessage("hello", id="first")]}
NAMES = ("A", "B", "C")


def _team(workshop: Workshop, say: Say, *, names: tuple[str, ...] = NAMES, **policy: Any) -> Make:
    """A root with a sub-agent `research`, whose tool `buy` counts that it ran."""

    def make(app: App) -> Any:
        @app.tool
        async def buy(q: str) -> str:
            """Buy something."""
            workshop.ran[q] += 1
            return f"bought {q}"

        def model(name: str, said: Say) -> Speaker:
            return Speaker(say=said, ledger=workshop.ledger, name_=name)

        root = in_turn(order(*(task(name, "research") for name in names), call("buy", "own", q="own")), AIMessage("done"))
        inherited = {"interrupt_on": policy["root"]} if "root" in policy else {}
        own = {"interrupt_on": policy["sub"]} if "sub" in policy else {}
        sub = {"name": "research", "description": "Researches.", "system_prompt": "Research.", "model": model("research", say), **own}
        return app.deep_agent(model=model("root", root), tools=[buy], subagents=[sub], **inherited)

    return make


BUYER = in_turn(lambda asked: order(call("buy", "b", q=asked)), lambda asked: AIMessage(f"{asked} is done"))


def _deciding(decide: Callable[[str], dict[str, Any]]) -> Callable[[Any], Any]:
    return lambda question: {"decisions": [decide(each["args"]["q"]) for each in question["action_requests"]]}


def _edit(q: str) -> dict[str, Any]:
    return {"type": "edit", "edited_action": {"name": "buy", "args": {"q": f"cheaper {q}"}}}


@pytest.mark.parametrize(
    ("decide", "ran"),
    [
        (lambda q: {"type": "approve"}, {"A", "B", "C", "own"}),
        (_edit, {"cheaper A", "cheaper B", "cheaper C", "cheaper own"}),
        (lambda q: {"type": "reject", "message": "no"}, set()),
        (lambda q: {"type": "respond", "message": "we have one"}, set()),
        (lambda q: _edit(q) if q == "A" else {"type": "reject"} if q == "B" else {"type": "approve"}, {"cheaper A", "C", "own"}),
    ],
    ids=["approve", "edit", "reject", "respond", "each another"],
)
async def test_a_question_of_a_sub_agent_is_decided(decide: Any, ran: set[str], workshop: Workshop) -> None:
    """CASES 26: approve, edit, reject and respond do what they say, inside sub-agents as at the top."""
    out = await workshop.complete(_team(workshop, BUYER, root={"buy": True}), HELLO, _deciding(decide))
    assert dict(workshop.ran) == dict.fromkeys(ran, 1)
    assert out["messages"][-1].content == "done"


async def test_a_sub_agent_that_asks_reruns_nobody(workshop: Workshop) -> None:
    """CASES 28: one of three sub-agents asks; what the others did, and what it did before, ran once."""

    def say(asked: str, number: int) -> AIMessage:
        if asked != "B":
            return BUYER(asked, number)
        return in_turn(order(call("buy", "b1", q="B before")), order(call("buy", "b2", q="B")), AIMessage("B is done"))(asked, number)

    def approve_b(question: Any) -> Any:
        return {"decisions": [{"type": "approve"} for _ in question["action_requests"]]}

    def only_b(request: Any) -> bool:
        return request.tool_call["args"]["q"] == "B"

    policy = {"buy": {"allowed_decisions": ["approve"], "when": only_b}}
    out = await workshop.once(_team(workshop, say, sub=policy), HELLO)
    [question] = out["__interrupt__"]
    assert dict(workshop.ran) == dict.fromkeys(("A", "C", "own", "B before"), 1)
    await workshop.complete(_team(workshop, say, sub=policy), HELLO, approve_b)
    assert dict(workshop.ran) == dict.fromkeys(("A", "B", "C", "own", "B before"), 1)
    assert all(count == 1 for count in workshop.ledger.ran.values())
    assert question.value["action_requests"][0]["args"] == {"q": "B"}


async def test_what_a_sub_agent_does_is_found_by_its_path(workshop: Workshop) -> None:
    """CASES 30: each model and tool call of a sub-agent stands in MongoDB under its path, where a prefix query finds it."""
    await workshop.once(_team(workshop, BUYER), HELLO)
    for number, name in enumerate(NAMES, 1):
        found = workshop._client[workshop.database]["activity_events"].find(
            {"run_id": workshop.run(), "type": "activity.completed", "position": {"$regex": f"^agent/1/research/{number}/"}}
        )
        events = [event async for event in found.sort("seq", 1)]
        assert [(event["kind"], event["name"]) for event in events] == [("LLM", "Speaker"), ("TOOL", "buy"), ("LLM", "Speaker")]
        assert f"bought {name}" in str(events[1]["value"])


async def test_a_sub_agent_inherits_the_approval_policy(workshop: Workshop) -> None:
    """CASES 32: a declared sub-agent has the root's interrupt_on; one with its own has that alone."""
    asked = (await workshop.once(_team(workshop, BUYER, root={"buy": True}), HELLO))["__interrupt__"]
    assert [each.value["action_requests"][0]["args"]["q"] for each in asked] == ["own"]
    assert not workshop.ran
    out = await workshop.complete(_team(workshop, BUYER, root={"buy": True}), HELLO, _deciding(lambda q: {"type": "approve"}))
    assert out["messages"][-1].content == "done"
    history = fold(workshop.run(), await workshop.history())
    assert [len(each.entries) for each in history.frontiers] == [1, 3]
    free = await workshop.once(_team(workshop, BUYER, root={"buy": True}, sub={"buy": False}), HELLO, "free")
    [own] = free["__interrupt__"]
    assert own.value["action_requests"][0]["args"] == {"q": "own"}


async def test_models_of_sub_agents_are_given_the_same(workshop: Workshop) -> None:
    """CASES 34: in every attempt each model of each sub-agent is given the same messages, ids included."""
    with watched_inputs() as inputs:
        await workshop.complete(_team(workshop, BUYER, sub={"buy": True}), HELLO, _deciding(lambda q: {"type": "approve"}))
    given = inputs.of(workshop.run())
    assert inputs.count > len(given) == 2 + 2 * len(NAMES)
    assert {position: len(each) for position, each in given.items()} == dict.fromkeys(given, 1)
