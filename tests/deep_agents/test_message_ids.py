"""Messages of deep agents have ids that derive from tool calls: the same in every attempt, never one twice, and never set on the caller's objects."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core._api.beta_decorator import suppress_langchain_beta_warning
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langgraph.graph import START, MessagesState, StateGraph

from tests.deep_agents.kit import HELLO, Inputs, call, final_messages, in_turn, order, researcher, researching, run, speaker, subagent, task
from tests.deep_agents.test_paths import COLOURS, delegating
from tests.langgraph.bench import Bench, Colour, Make
from tests.langgraph.kit import Kit


def ids_of(inputs: Inputs, run_id: str, path: str) -> list[list[str | None]]:
    """The ids of the messages that the model under this path was given, call by call."""
    given = {position: min(each) for position, each in inputs.of(run_id).items() if position.startswith(path)}
    return [[message["id"] for message in json.loads(given[position])] for position in sorted(given)]


@pytest.mark.parametrize("colour", COLOURS)
def test_the_form_of_ids(bench: Bench, inputs: Inputs, colour: Colour) -> None:
    """CASES 34: delegated input, a tool's result in a sub-agent, its report, and a root tool's result."""
    told = run(bench, delegating(order(task("A", "research"), call("plain", "own", q="own"))), colour)
    last = ids_of(inputs, told.events[0].run_id, "agent/1/research/1/")[-1]
    assert last[1] == "durable-deep-agent-input:call-A:0"
    assert [each for each in last if str(each).startswith("durable-deep-agent-tool")] == [
        "durable-deep-agent-tool-result:call-A:plain-0",
        "durable-deep-agent-tool-result:call-A:again",
    ]
    assert [each.id for each in final_messages(bench, told) if each.type == "tool"] == [
        "durable-deep-agent-task-result:call-A",
        "durable-deep-agent-tool-result:own",
    ]


def test_models_that_give_no_ids(bench: Bench, inputs: Inputs) -> None:
    """No message of any agent reaches a model or the final state with an id that an attempt has drawn, or without one."""
    told = run(bench, researching(2, "plain", "ask"))
    seen = [each for call in ids_of(inputs, told.events[0].run_id, "agent/1/") for each in call[1:]]
    seen += [each.id for each in final_messages(bench, told)]
    assert all(str(each).startswith(("md-", "durable-deep-agent-")) for each in seen)
    assert len({each.id for each in final_messages(bench, told)}) == len(final_messages(bench, told))


@pytest.mark.parametrize("mode", ["batched", "per_call"])
@pytest.mark.parametrize("colour", COLOURS)
def test_rejections(bench: Bench, inputs: Inputs, colour: Colour, mode: Any) -> None:
    """A rejected call's message, made in a hook or around the call, has the id that the call's result would have had."""

    def make(kit: Kit) -> Any:
        gate = HumanInTheLoopMiddleware(interrupt_on={"plain": True}, interrupt_mode=mode)
        sub = in_turn(
            lambda asked: order(call("plain", "p", q=asked), call("ask_twice", "a", q=asked)), lambda asked: AIMessage(f"report on {asked}")
        )
        root = in_turn(order(task("A", "research"), call("plain", "own", q="own")), AIMessage("done"))
        return kit.app.deep_agent(
            model=speaker(kit, "root", root), tools=kit.tools, subagents=[subagent(kit, "research", sub, middleware=[gate])], middleware=[gate]
        )

    def say(question: Any) -> Any:
        if isinstance(question, dict):
            reject = {"type": "reject", "message": "no"}
            return reject if question.get("type") == "tool_approval" else {"decisions": [reject for _ in question["action_requests"]]}
        return "yes"

    told = run(bench, make, colour, say=say)
    results = {each.id: each.content for each in final_messages(bench, told) if each.type == "tool"}
    assert results.keys() == {"durable-deep-agent-task-result:call-A", "durable-deep-agent-tool-result:own"}
    assert "no" in results["durable-deep-agent-tool-result:own"]
    last = ids_of(inputs, told.events[0].run_id, "agent/1/research/1/")[-1]
    assert {"durable-deep-agent-tool-result:call-A:p", "durable-deep-agent-tool-result:call-A:a"} <= set(last)


def test_a_dangling_call_is_patched_alike(bench: Bench, inputs: Inputs) -> None:
    """The message that deepagents makes for a call that has no result, when a turn begins, has a stable id."""
    given = {
        "messages": [HumanMessage("before", id="b"), AIMessage("", id="x", tool_calls=[call("plain", "lost", q="x")]), HumanMessage("go", id="g")]
    }
    told = run(bench, researching(2, "plain"), given=given)
    ids = {each.content: each.id for each in final_messages(bench, told) if each.type == "tool"}
    [patched] = [each for text, each in ids.items() if "lost" in str(text)]
    assert patched == "durable-deep-agent-tool-result:lost"


@pytest.mark.parametrize("colour", COLOURS)
def test_forks(bench: Bench, inputs: Inputs, colour: Colour) -> None:
    """A fork's conversation begins with its parent's messages, whose ids stay; two forks at once get inputs of their own."""
    built: list[Any] = []

    def make(kit: Kit) -> Any:
        fork = subagent(kit, "fork", researcher("plain"), mode="fork")
        del fork["system_prompt"], fork["tools"]
        root = in_turn(order(task("A", "fork"), task("B", "fork")), AIMessage("done"))
        with suppress_langchain_beta_warning():
            built.append(kit.app.deep_agent(model=speaker(kit, "root", root), tools=kit.tools, subagents=[fork]))
        return built[-1]

    mine = HumanMessage("go", id="turn-1-input")
    told = run(bench, make, colour, given={"messages": [mine]})
    assert mine.id == "turn-1-input"
    assert final_messages(bench, told)[0].id == "turn-1-input"
    for index, name in enumerate("AB", 1):
        for given in ids_of(inputs, told.events[0].run_id, f"agent/1/fork/{index}/"):
            assert given[1] == "turn-1-input"
            assert f"durable-deep-agent-input:call-{name}:0" in given


@pytest.mark.parametrize("colour", COLOURS)
def test_objects_of_the_caller_stay_as_they_are(bench: Bench, colour: Colour) -> None:
    """Neither an input without an id nor a message that a tool keeps is changed."""
    kept = ToolMessage("kept", tool_call_id="own")
    given: list[BaseMessage] = [HumanMessage("go")]

    def make(kit: Kit) -> Any:
        def keeps(q: str) -> Any:
            """Give back a message that is not the agent's."""
            return kept

        root = in_turn(order(call("keeps", "own", q="x"), task("A", "research")), AIMessage("done"))
        return kit.app.deep_agent(model=speaker(kit, "root", root), tools=[keeps], subagents=[subagent(kit, "research", researcher("plain"))])

    told = run(bench, make, "mixed" if colour == "async" else "sync", given={"messages": given})
    assert (given[0].id, kept.id) == (None, None)
    assert "kept" in [each.content for each in final_messages(bench, told)]


def test_turns_of_a_thread_do_not_replace_each_other(bench: Bench, inputs: Inputs) -> None:
    """A provider that counts its ids anew in each turn: the thread keeps every message of every turn."""
    ended = []
    for turn in range(3):
        told = run(bench, delegating(order(task("A", "research", "0"), call("plain", "1", q=str(turn)))), thread_id="turns")
        ended.append(final_messages(bench, told))
    assert [len(each) for each in ended] == [5, 10, 15]
    assert len({each.id for each in ended[-1]}) == 15
    assert [each.id for each in ended[-1]][:10] == [each.id for each in ended[1]]


def _beside(first: Make, second: Make) -> Make:
    def make(kit: Kit) -> Any:
        graph = StateGraph(MessagesState)
        for name, each in (("left", first), ("right", second)):
            graph.add_node(name, each(kit))
            graph.add_edge(START, name)
        return graph.compile()

    return make


def test_agents_whose_messages_are_joined(bench: Bench, inputs: Inputs) -> None:
    """Two deep agents as nodes of one graph, with equal tool-call ids: every message of both is in the graph's state."""
    one = delegating(order(task("A", "research"), call("plain", "own", q="own")))
    told = run(bench, _beside(one, one))
    assert [each.type for each in final_messages(bench, told)].count("tool") == 4
    assert told.state == bench.plainly(_beside(one, one), HELLO, "async").state
    first = next(each.id for each in final_messages(bench, told) if each.type == "tool")
    assert first == "durable-deep-agent-task-result:agent/1/left/c1@1:call-A"
