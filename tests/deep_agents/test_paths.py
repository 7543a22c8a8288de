"""Where sub-agents stand: the model's order decides, whoever starts or ends first; no two of a run ever share a path in a root step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents.middleware import AgentMiddleware, hook_config
from langchain.tools import ToolRuntime
from langchain_core.messages import AIMessage

from mongo_durable.errors import UnsupportedGraph
from tests.deep_agents.kit import (
    HELLO,
    Inputs,
    LastFirst,
    Speaker,
    call,
    final_messages,
    in_turn,
    order,
    positions_of,
    researcher,
    run,
    speaker,
    subagent,
    task,
    where,
)
from tests.deep_agents.trees import TREES
from tests.langgraph.bench import Bench, Colour, Make
from tests.langgraph.kit import Kit, Ledger

COLOURS: tuple[Colour, ...] = ("async", "sync")


def delegating(*answers: AIMessage, turns: Callable[[], LastFirst] | None = None) -> Make:
    """A root that says these messages, with a researcher."""

    def make(kit: Kit) -> Any:
        model = Speaker(say=researcher("plain"), ledger=kit.ledger, name_="research", turns=turns() if turns is not None else None)
        return kit.app.deep_agent(
            model=speaker(kit, "root", in_turn(*answers, AIMessage("done"))),
            tools=kit.tools,
            subagents=[subagent(kit, "research", researcher("plain")) | {"model": model}],
        )

    return make


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_model_orders(bench: Bench, inputs: Inputs, colour: Colour, count: int) -> None:
    """Sub-agents whose first answers come last first stand in the order of the model's calls."""
    names = [chr(ord("A") + index) for index in range(count)]
    told = run(bench, delegating(order(*(task(name, "research") for name in names)), turns=lambda: LastFirst(*names)), colour)
    places = where(told, inputs)
    assert [places[name] for name in names] == [f"agent/1/research/{index}" for index in range(1, count + 1)]


def test_types_have_orders_of_their_own(bench: Bench, inputs: Inputs) -> None:
    """Each type counts from 1, also among other calls and mistakes."""
    told = run(
        bench,
        delegating(
            order(
                call("plain", "p", q="p"),
                task("A", "general-purpose"),
                task("B", "research"),
                task("?", "nobody"),
                task("C", "general-purpose"),
                task("D", "research"),
            )
        ),
    )
    places = where(told, inputs)
    assert [places[name] for name in "BD"] == ["agent/1/research/1", "agent/1/research/2"]
    assert [places[name] for name in "AC"] == ["agent/1/general-purpose/1", "agent/1/general-purpose/2"]
    assert not any("nobody" in position for position in told.positions)


def test_each_root_step_counts_anew(bench: Bench) -> None:
    """Two responses of the root: the same path in two root steps, two positions."""
    told = run(bench, delegating(order(task("A", "research")), order(call("plain", "between", q="x")), order(task("B", "research"))))
    first = [position for position in positions_of(told) if position.startswith("agent/1/research/1/model:2@")]
    assert len(first) == len(set(first)) == 2


@pytest.mark.parametrize("colour", COLOURS)
def test_sub_agents_that_delegate_count_on(bench: Bench, inputs: Inputs, colour: Colour) -> None:
    """Several responses of a sub-agent in one root step: its own sub-agents count on, and no path occurs twice."""
    [tree] = [each for each in TREES if each.name == "sub-agents that delegate"]
    places = where(run(bench, tree.make, colour), inputs)
    for name, lead in (("L", "agent/1/lead/1"), ("M", "agent/1/lead/2")):
        assert [places[f"{name}{number}"] for number in "1234"] == [
            f"{lead}/research/1",
            f"{lead}/research/2",
            f"{lead}/research/3",
            f"{lead}/general-purpose/1",
        ]
    assert len(set(places.values())) == len(places)


def test_a_name_cannot_forge_a_path(bench: Bench, inputs: Inputs) -> None:
    """A sub-agent's name with the signs of a position is one segment."""

    def make(kit: Kit) -> Any:
        odd = "a/1@2#3:4"
        return kit.app.deep_agent(
            model=speaker(kit, "root", in_turn(order(task("A", odd), task("B", odd)), AIMessage("done"))),
            tools=kit.tools,
            subagents=[subagent(kit, odd, researcher("plain"))],
        )

    places = where(run(bench, make), inputs)
    assert [places[name] for name in "AB"] == ["agent/1/a%2F1%402%233%3A4/1", "agent/1/a%2F1%402%233%3A4/2"]


@pytest.mark.parametrize("colour", COLOURS)
def test_an_id_twice_in_one_response(bench: Bench, inputs: Inputs, colour: Colour) -> None:
    """A provider that gives two calls one id: each runs at its own place, and both reports are kept, in order."""
    same = order(task("A", "research", "same"), call("plain", "same", q="own"), task("B", "research", "same"))
    told = run(bench, delegating(same, turns=lambda: LastFirst("A", "B")), colour)
    places = where(told, inputs)
    assert [places[name] for name in "AB"] == ["agent/1/research/1", "agent/1/research/2"]
    results = [(each.content, each.id) for each in final_messages(bench, told) if each.type == "tool"]
    assert results == [
        ("report on A", "durable-deep-agent-task-result:same"),
        ("plain:own", "durable-deep-agent-tool-result:same"),
        ("report on B", "durable-deep-agent-task-result:same~2"),
    ]


@pytest.mark.parametrize("colour", COLOURS)
def test_an_id_again_in_a_later_response(bench: Bench, inputs: Inputs, colour: Colour) -> None:
    """A provider that counts its ids anew in each response: no report replaces an earlier one, in the root or below."""

    def make(kit: Kit) -> Any:
        again = in_turn(
            lambda asked: order(call("plain", "0", q=f"{asked}.1"), task("deep", "general-purpose", "1")),
            lambda asked: order(call("plain", "0", q=f"{asked}.2"), task("deeper", "general-purpose", "1")),
            lambda asked: AIMessage(f"report on {asked}"),
        )

        def say(asked: str, number: int) -> AIMessage:
            return AIMessage(f"{asked} done") if asked.startswith("deep") else again(asked, number)

        lead = kit.app.deep_agent(model=speaker(kit, "lead", say), tools=kit.tools)
        root = in_turn(
            order(task("A", "lead", "0"), task("B", "lead", "1")), order(task("C", "lead", "0"), task("D", "lead", "1")), AIMessage("done")
        )
        return kit.app.deep_agent(model=speaker(kit, "root", root), subagents=[{"name": "lead", "description": "Leads.", "runnable": lead}])

    told = run(bench, make, colour)
    results = [each for each in final_messages(bench, told) if each.type == "tool"]
    assert [each.content for each in results] == [f"report on {name}" for name in "ABCD"]
    assert [each.id for each in results] == [f"durable-deep-agent-task-result:{number}" for number in ("0", "1", "0~2", "1~2")]
    assert told.state == bench.plainly(make, HELLO, colour).state


@pytest.mark.parametrize("id", [None, ""])
@pytest.mark.parametrize("colour", COLOURS)
def test_a_sub_agent_ordered_without_an_id(bench: Bench, colour: Colour, id: str | None) -> None:
    """Refused, and said: its report could not be told from another's."""
    missing = order(task("A", "research"), call("task", id, description="B", subagent_type="research"))
    with pytest.raises(UnsupportedGraph, match="without a tool-call id"):
        run(bench, delegating(missing), colour)


class _Jumps(AgentMiddleware[Any, Any, Any]):
    """Sends all calls of a response into one tools task."""

    @hook_config(can_jump_to=["tools"])
    def after_model(self, state: Any, runtime: Any) -> Any:
        return {"jump_to": "tools"} if state["messages"][-1].tool_calls else None


@pytest.mark.parametrize(("names", "is_refused"), [("A", False), ("AB", True)])
def test_calls_that_share_a_tools_task(bench: Bench, inputs: Inputs, names: str, is_refused: bool) -> None:
    """One task call in a shared tools task is right; two are refused: LangGraph would tell their sub-agents apart by arrival."""

    def make(kit: Kit) -> Any:
        root = in_turn(order(*(task(name, "research") for name in names), call("plain", "own", q="own")), AIMessage("done"))
        return kit.app.deep_agent(
            model=speaker(kit, "root", root), tools=kit.tools, subagents=[subagent(kit, "research", researcher("plain"))], middleware=[_Jumps()]
        )

    if is_refused:
        with pytest.raises(UnsupportedGraph, match="share one tools task"):
            run(bench, make)
    else:
        assert where(run(bench, make), inputs)["A"] == "agent/1/research/1"


def test_a_task_call_inside_another_effect(bench: Bench) -> None:
    """A task tool that somebody calls from inside a tool has no place in the model's order: refused."""

    def make(kit: Kit) -> Any:
        async def through(q: str, runtime: Any) -> str:
            """Call the task tool oneself."""
            [tool] = [each for each in runtime.tools if each.name == "task"]
            arguments = {"description": q, "subagent_type": "research", "runtime": runtime}
            await tool.ainvoke({"name": "task", "args": arguments, "id": "mine", "type": "tool_call"})
            return "never"

        through.__annotations__["runtime"] = ToolRuntime
        root = in_turn(order(call("through", "t", q="A")), AIMessage("done"))
        return kit.app.deep_agent(model=speaker(kit, "root", root), tools=[through], subagents=[subagent(kit, "research", researcher("plain"))])

    with pytest.raises(UnsupportedGraph, match="place in the order is not known"):
        run(bench, make)


def test_outside_a_run_it_is_a_plain_deep_agent(bench: Bench) -> None:
    """Without an attempt nothing is recorded, stamped or placed: the graph is what deepagents makes."""
    ledger = Ledger()
    graph = delegating(order(task("A", "research"), task("B", "nobody")))(Kit(bench.app("plain"), ledger, is_sync=True))
    said = graph.invoke(HELLO)["messages"]
    assert next(each.content for each in said if each.type == "tool") == "report on A"
    assert not any(str(each.id).startswith("durable-deep-agent") for each in said)
    assert sum(count for (kind, _, _), count in ledger.ran.items() if kind == "LLM") == 5
