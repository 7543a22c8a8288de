"""Questions inside sub-agents: asked once, shown so that a person can decide, answered by place, whatever else runs or dies."""

from __future__ import annotations

import random
from typing import Any

import pytest
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import AIMessage
from langgraph.types import Command

from mongo_durable.errors import InvalidAnswer
from mongo_durable.store import frontiers
from tests.deep_agents.kit import (
    HELLO,
    Inputs,
    LastFirst,
    Speaker,
    call,
    final_messages,
    in_turn,
    order,
    researcher,
    researching,
    run,
    speaker,
    subagent,
    task,
    where,
)
from tests.deep_agents.test_effects import completed
from tests.deep_agents.test_kill_matrix import At
from tests.deep_agents.test_paths import COLOURS
from tests.langgraph.bench import Bench, Colour, Make
from tests.langgraph.kit import Kit, Ledger, answer

MODES = ("batched", "per_call")


def gated(mode: Any, **options: Any) -> Make:
    """Two researchers and the root, whose calls of `plain` a person decides on."""

    def make(kit: Kit) -> Any:
        gate = HumanInTheLoopMiddleware(interrupt_on={"plain": True}, interrupt_mode=mode)
        sub = in_turn(
            lambda asked: order(call("plain", "p", q=asked), call("ask", "a", q=f"ask {asked}")),
            lambda asked: AIMessage(f"report on {asked}"),
        )
        root = in_turn(order(task("A", "research"), task("B", "research")), order(call("plain", "own", q="own")), AIMessage("done"))
        return kit.app.deep_agent(
            model=speaker(kit, "root", root),
            tools=kit.tools,
            subagents=[subagent(kit, "research", sub, middleware=[gate])],
            middleware=[gate],
            **options,
        )

    return make


def deciding(decision: dict[str, Any]) -> Any:
    """A person who decides the same on every call, and answers other questions."""

    def say(question: Any) -> Any:
        if not isinstance(question, dict):
            return answer(question)
        if question.get("type") == "tool_approval":
            return _edited(decision, question["args"])
        return {"decisions": [_edited(decision, request["args"]) for request in question["action_requests"]]}

    return say


def _edited(decision: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    if decision["type"] != "edit":
        return decision
    return {"type": "edit", "edited_action": {"name": "plain", "args": {"q": f"edited {arguments['q']}"}}}


DECISIONS = {
    "approve": ({"type": "approve"}, {"A", "B", "own"}),
    "edit": ({"type": "edit"}, {"edited A", "edited B", "edited own"}),
    "reject": ({"type": "reject", "message": "not now"}, set()),
    "respond": ({"type": "respond", "message": "I say"}, set()),
}


@pytest.mark.parametrize(
    ("decision", "mode", "colour"),
    [(decision, mode, COLOURS[(number + turn) % 2]) for turn, decision in enumerate(DECISIONS) for number, mode in enumerate(MODES)],
)
def test_every_decision_in_sub_agents_and_at_the_top(bench: Bench, inputs: Inputs, decision: str, mode: str, colour: Colour) -> None:
    """CASES 26: approve, edit, reject and respond do what they say, nested and at the top; a death on the way changes nothing."""
    said, ran = DECISIONS[decision]
    ledger = Ledger()
    calm = run(bench, gated(mode), colour, say=deciding(said), ledger=ledger)
    assert {given for _, _, given in ledger.of("plain")} == {repr({"q": each}) for each in ran}
    ledger = Ledger()
    killer = At(random.Random(f"{decision}{mode}{colour}").randrange(1, 50))
    shaken = run(bench, gated(mode), colour, say=deciding(said), ledger=ledger, killer=killer)
    assert killer.is_done
    assert shaken.state == calm.state
    assert (shaken.frontiers, shaken.positions) == (calm.frontiers, calm.positions)
    assert {given for _, _, given in ledger.of("plain")} == {repr({"q": each}) for each in ran}
    own = next(each for each in final_messages(bench, calm) if each.type == "tool" and each.id == "durable-deep-agent-tool-result:own")
    expected = {"approve": "plain:own", "edit": "plain:edited own", "reject": "not now", "respond": "I say"}
    assert expected[decision] in str(own.content)


@pytest.mark.parametrize("mode", MODES)
def test_what_a_person_sees(bench: Bench, mode: str) -> None:
    """A question names the sub-agent's path, the tool, its arguments and a description; the questions of both stand in one frontier."""
    run_id = bench.new_run()
    make = gated(mode)
    app = bench.built(make, Ledger(), "async")
    bench.once(app, "async", HELLO, {"configurable": {"thread_id": run_id}}, run_id=run_id)
    frontier = bench.call(frontiers.current(bench.process.connection, run_id))
    approvals = [each for each in frontier.entries if isinstance(app.codec.decode(each.value), dict)]
    assert [each.position.text.split("/")[2:4] for each in approvals] == [["research", "1"], ["research", "2"]]
    for entry, name in zip(approvals, "AB", strict=True):
        value = app.codec.decode(entry.value)
        request = value if mode == "per_call" else value["action_requests"][0]
        assert (request["name"], request["args"]) == ("plain", {"q": name})
        assert "requires approval" in request["description"]
        assert entry.response_schema is not None


@pytest.mark.parametrize("colour", COLOURS)
def test_two_ask_at_once_one_later_one_never(bench: Bench, inputs: Inputs, colour: Colour) -> None:
    """CASES 28: one frontier for all that ask at once, in the order of their places, although they ask last first; who has ended is not run again."""
    names = ("A", "B", "C", "D")

    def make(kit: Kit) -> Any:
        turns = LastFirst(*names)
        kinds = {"A": ("ask", "ask_twice"), "B": ("ask",), "C": ("plain",), "D": ("ask",)}

        def say(asked: str, number: int) -> AIMessage:
            return researcher(*kinds[asked])(asked, number)

        model = Speaker(say=say, ledger=kit.ledger, name_="research", turns=turns)
        root = in_turn(order(*(task(name, "research") for name in names)), AIMessage("done"))
        return kit.app.deep_agent(model=speaker(kit, "root", root), tools=kit.tools, subagents=[subagent(kit, "research", say) | {"model": model}])

    ledger = Ledger()
    told = run(bench, make, colour, ledger=ledger)
    first = list(told.frontiers[0])
    assert [position.split("/")[2:4] for position in first] == [["research", number] for number in ("1", "1", "2", "4")]
    assert len(told.frontiers) == 2, "ask_twice asks again, alone"
    assert ledger.ran[("TOOL", "plain", repr({"q": "C.0"}))] == 1
    assert all(count == 1 for (kind, _, _), count in ledger.ran.items() if kind == "LLM")


@pytest.mark.parametrize("colour", COLOURS)
def test_a_sub_agent_that_asks_again_and_again(bench: Bench, inputs: Inputs, colour: Colour) -> None:
    """Interrupts, resumes and interrupts again: later in the same tool, in a later tool, and at its gate; each answer reaches its own question."""

    def make(kit: Kit) -> Any:
        gate = HumanInTheLoopMiddleware(interrupt_on={"plain": True})
        sub = in_turn(
            lambda asked: order(call("ask_twice", "a", q=f"{asked}1")),
            lambda asked: order(call("plain", "p", q=f"{asked}2")),
            lambda asked: order(call("plain", "p", q=f"{asked}3")),
            lambda asked: AIMessage(f"report on {asked}"),
        )
        root = in_turn(order(task("A", "research"), task("B", "research")), AIMessage("done"))
        return kit.app.deep_agent(model=speaker(kit, "root", root), tools=kit.tools, subagents=[subagent(kit, "research", sub, middleware=[gate])])

    told = run(bench, make, colour)
    assert [len(frontier) for frontier in told.frontiers] == [2, 2, 2, 2]
    assert len({position for frontier in told.frontiers for position in frontier}) == 8
    assert told.state == bench.plainly(make, HELLO, colour).state


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("colour", COLOURS)
def test_a_person_sends_a_task_elsewhere(bench: Bench, inputs: Inputs, colour: Colour, mode: Any) -> None:
    """Approval of the task tool itself: a rejected call runs nothing, an edited one stands under the sub-agent that ran, and no path occurs twice."""

    def make(kit: Kit) -> Any:
        gate = HumanInTheLoopMiddleware(interrupt_on={"task": True}, interrupt_mode=mode)
        root = in_turn(order(task("A", "research"), task("B", "research"), task("C", "other"), task("D", "research")), AIMessage("done"))
        agents = [subagent(kit, name, researcher("ask")) for name in ("research", "other")]
        return kit.app.deep_agent(model=speaker(kit, "root", root), tools=kit.tools, subagents=agents, middleware=[gate])

    def decide(arguments: dict[str, Any]) -> dict[str, Any]:
        if arguments["description"] == "A":
            return {"type": "edit", "edited_action": {"name": "task", "args": {"description": "A2", "subagent_type": "other"}}}
        return {"type": "reject", "message": "no B"} if arguments["description"] == "B" else {"type": "approve"}

    def say(question: Any) -> Any:
        if not isinstance(question, dict):
            return answer(question)
        if question.get("type") == "tool_approval":
            return decide(question["args"])
        return {"decisions": [decide(each["args"]) for each in question["action_requests"]]}

    told = run(bench, make, colour, say=say)
    places = where(told, inputs)
    assert "B" not in places
    assert places["D"] == "agent/1/research/" + ("2" if mode == "batched" else "3")
    # Asked about in one question, the edits are known when the ordinals are given; asked about as each call starts, they are not.
    assert (places["A2"], places["C"]) == (("agent/1/other/1", "agent/1/other/2") if mode == "batched" else ("agent/1/other/e1", "agent/1/other/1"))
    contents = [str(each.content) for each in final_messages(bench, told) if each.type == "tool"]
    assert any("no B" in each for each in contents)
    assert any("report on A2" in each for each in contents)


def test_an_edit_that_names_another_tool(bench: Bench, inputs: Inputs) -> None:
    """A reviewer who sends a call to another tool: that tool's call is recorded like any other, although it was given plainly."""

    def make(kit: Kit) -> Any:
        def other(q: str) -> str:
            """Do something else."""
            kit.ledger.note("TOOL", "other", {"q": q})
            return f"other {q}"

        root = in_turn(order(call("plain", "p", q="1")), order(call("ask", "a", q="2")), AIMessage("done"))
        return kit.app.deep_agent(model=speaker(kit, "root", root), tools=[kit.plain, kit.ask, other], interrupt_on={"plain": True})

    def say(question: Any) -> Any:
        return {"decisions": [{"type": "edit", "edited_action": {"name": "other", "args": {"q": "x"}}}]} if isinstance(question, dict) else "yes"

    ledger = Ledger()
    told = run(bench, make, "mixed", say=say, ledger=ledger)
    assert ledger.ran[("TOOL", "other", repr({"q": "x"}))] == 1
    assert completed(told, "TOOL")["other"] == 1


@pytest.mark.parametrize("is_own", [False, True])
def test_whose_policy_holds(bench: Bench, is_own: bool) -> None:
    """CASES 32: declared sub-agents and general-purpose have the root's interrupt_on, unless they have their own."""

    def make(kit: Kit) -> Any:
        root = in_turn(order(task("A", "research"), task("B", "general-purpose")), AIMessage("done"))

        def say(asked: str, number: int) -> AIMessage:
            return root(asked, number) if asked == "go" else researcher("plain")(asked, number)

        own = {"interrupt_on": {"plain": False}} if is_own else {}
        agents = [subagent(kit, "research", researcher("plain"), **own)]
        return kit.app.deep_agent(model=speaker(kit, "root", say), tools=kit.tools, subagents=agents, interrupt_on={"plain": True})

    told = run(bench, make)
    asking = {"/".join(position.split("/")[2:4]) for frontier in told.frontiers for position in frontier}
    assert asking == ({"general-purpose/1"} if is_own else {"research/1", "general-purpose/1"})


def test_answers_by_place_not_by_arrival(bench: Bench, inputs: Inputs) -> None:
    """Answers given in any order, by another process, reach the sub-agents that asked."""
    told = run(bench, researching(5, "ask"), order=random.Random(7))
    texts = [str(each.content) for each in final_messages(bench, told)]
    for name in "ABCDE":
        assert f"report on {name}" in texts
    recorded = {str(each.value) for each in told.events if each.kind == "TOOL" and each.name == "ask" and each.type == "activity.completed"}
    assert all(any(f"e(pre-{name}.0)A({name}.0)e(post-{name}.0)" in value for value in recorded) for name in "ABCDE")


def test_an_answer_that_the_gate_refuses(bench: Bench) -> None:
    """Approval of each call has a response schema: a wrong decision is refused before it is stored, and the question stays open."""
    run_id = bench.new_run()
    config = {"configurable": {"thread_id": run_id}}
    app = bench.built(gated("per_call"), Ledger(), "async")
    out = bench.once(app, "async", HELLO, config, run_id=run_id)
    answers = {each.id: {"type": "dance"} if isinstance(each.value, dict) else "yes" for each in out["__interrupt__"]}
    with pytest.raises(InvalidAnswer):
        bench.once(app, "async", Command(resume=answers), config, run_id=run_id)
    assert len(bench.call(frontiers.current(bench.process.connection, run_id)).entries) == len(answers)
