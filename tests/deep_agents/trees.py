"""Kinds of deep agents: each a function from a kit to a graph, and the input that it is run with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core._api.beta_decorator import suppress_langchain_beta_warning
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph

from tests.deep_agents.kit import HELLO, call, in_turn, order, researcher, researching, speaker, subagent, task
from tests.langgraph.kit import Kit, State


@dataclass(frozen=True, slots=True)
class Tree:
    """A deep agent, and what it is run with."""

    name: str
    make: Callable[[Kit], Any]
    given: Any

    def __str__(self) -> str:
        return self.name


TREES: list[Tree] = []


def tree(name: str, given: Any = HELLO) -> Callable[[Callable[[Kit], Any]], Callable[[Kit], Any]]:
    def add(make: Callable[[Kit], Any]) -> Callable[[Kit], Any]:
        TREES.append(Tree(name, make, given))
        return make

    return add


TREES.append(Tree("three researchers, each asks twice", researching(3, "ask_twice", "plain", "ask"), HELLO))
TREES.append(Tree("approval of each response inside sub-agents", researching(3, "plain", "ask", interrupt_on={"plain": True, "ask": True}), HELLO))


def _per_call() -> HumanInTheLoopMiddleware[Any, Any, Any]:
    return HumanInTheLoopMiddleware(interrupt_on={"plain": True, "ask": True}, interrupt_mode="per_call")


@tree("approval of each call inside sub-agents")
def _asked_per_call(kit: Kit) -> Any:
    return researching(2, "plain", "ask", middleware=[_per_call()])(kit)


@tree("one sub-agent asks while another has finished")
def _one_asks(kit: Kit) -> Any:
    root = in_turn(order(task("A", "quick"), task("B", "asking"), task("C", "quick")), AIMessage("done"))
    return kit.app.deep_agent(
        model=speaker(kit, "root", root),
        tools=kit.tools,
        subagents=[subagent(kit, "quick", researcher("plain")), subagent(kit, "asking", researcher("ask_twice", "ask"))],
    )


def _delegating(kit: Kit, name: str, middle: Any = None) -> Any:
    """A deep agent whose sub-agents delegate, several times in one root step."""
    lead = in_turn(
        lambda asked: order(task(f"{asked}1", "research"), task(f"{asked}2", "research"), call("plain", "own", q=f"{asked}.own")),
        lambda asked: order(task(f"{asked}3", "research"), task(f"{asked}4", "general-purpose")),
        lambda asked: AIMessage(f"lead on {asked}"),
    )
    inner = kit.app.deep_agent(
        model=speaker(kit, f"{name} lead", lambda asked, number: researcher("plain")(asked, number) if asked.endswith("4") else lead(asked, number)),
        tools=kit.tools,
        subagents=[subagent(kit, "research", researcher("plain", "ask"))],
        name=f"{name}-lead",
    )
    root = in_turn(order(task("L", "lead"), task("M", "lead")), AIMessage("done"))
    return kit.app.deep_agent(
        model=speaker(kit, f"{name} root", root),
        tools=kit.tools,
        subagents=[{"name": "lead", "description": "Leads.", "runnable": inner}],
    )


@tree("sub-agents that delegate")
def _nested(kit: Kit) -> Any:
    return _delegating(kit, "outer")


@tree("two deep agents as parallel nodes of a graph")
def _children(kit: Kit) -> Any:
    graph = StateGraph(MessagesState)
    for name in ("left", "right"):
        graph.add_node(name, researching(2, "plain", "ask")(kit))
        graph.add_edge(START, name)
    return graph.compile()


@tree("called twice in a body that asks", {"lines": []})
def _called_twice(kit: Kit) -> Any:
    root = in_turn(order(task("A", "research"), task("B", "research")), order(task("C", "research")), AIMessage("done"))
    agent = kit.app.deep_agent(model=speaker(kit, "root", root), tools=kit.tools, subagents=[subagent(kit, "research", researcher("plain", "ask"))])

    async def body(state: State) -> State:
        first = await kit.call(agent, {"messages": [("user", "one")]})
        said = kit.interrupt("between?")
        second = await kit.call(agent, {"messages": [("user", "two")]})
        return {"lines": [[str(each.content) for each in (*first["messages"], *second["messages"])], said, kit.interrupt("after?")]}

    graph = StateGraph(State)
    graph.add_node("body", kit.body(body))
    graph.add_edge(START, "body")
    return graph.compile()


@tree("forks, strangers and mistakes")
def _mistakes(kit: Kit) -> Any:
    fork = subagent(kit, "fork", researcher("plain", "ask"), mode="fork")
    del fork["system_prompt"], fork["tools"]
    root = in_turn(
        order(
            task("A", "fork"),
            task("B", "nobody"),
            call("task", "call-C", description="C", subagent_type="research", prompt="what?"),
            call("task", "call-D", subagent_type="research"),
            task("E", "research"),
            call("stranger", "call-F", q="F"),
            task("G", "fork"),
            call("ask", "call-H", q="H"),
        ),
        order(task("I", "general-purpose"), task("J", "research")),
        AIMessage("done"),
    )

    def say(asked: str, number: int) -> AIMessage:
        return root(asked, number) if asked == "go" else researcher("plain")(asked, number)

    subagents = [fork, subagent(kit, "research", researcher("ask", "plain"))]
    with suppress_langchain_beta_warning():  # forks are
        return kit.app.deep_agent(model=speaker(kit, "root", say), tools=kit.tools, subagents=subagents)


@tree("files in the state, written by all", {**HELLO, "files": {"/given.md": {"content": "given", "encoding": "utf-8"}}})
def _files(kit: Kit) -> Any:
    writer = in_turn(
        lambda asked: order(
            call("write_file", "w", file_path=f"/{asked}.md", content=f"about {asked}"),
            call("write_file", "w2", file_path=f"/more/{asked}.md", content="more"),
        ),
        lambda asked: order(call("edit_file", "e", file_path=f"/{asked}.md", old_string="about", new_string="on"), call("ask", "q", q=asked)),
        lambda asked: order(call("read_file", "r", file_path=f"/{asked}.md"), call("ls", "l", path="/"), call("grep", "g", pattern="o")),
        lambda asked: AIMessage(f"wrote {asked}"),
    )
    root = in_turn(
        order(task("A", "writer"), task("B", "writer"), call("read_file", "call-R", file_path="/given.md")),
        order(call("read_file", "call-A", file_path="/A.md"), call("delete", "call-D", file_path="/more"), call("ls", "call-L", path="/")),
        order(call("write_file", "call-W", file_path="/own.md", content="own")),
        order(call("glob", "call-G", pattern="o*.md")),
        AIMessage("done"),
    )
    return kit.app.deep_agent(model=speaker(kit, "root", root), tools=kit.tools, subagents=[subagent(kit, "writer", writer)])
