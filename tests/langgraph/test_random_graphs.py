"""Random graphs against the oracle: what no table thought of."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Send

from tests.langgraph.bench import ATTEMPTS, Bench, Colour, Killer
from tests.langgraph.kit import ASKING, Kit, Ledger, Lines, State, calls
from tests.langgraph.test_shapes import assert_no_body_without_a_start, assert_same_effects

GRAPHS = max(6, ATTEMPTS // 50)


@dataclass(frozen=True, slots=True)
class Step:
    """What a body does next."""

    what: str
    name: str
    child: list[Layer] | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A node: a body, a compiled child graph, an agent, or a model with a tool node."""

    what: str
    name: str
    steps: tuple[Step, ...] = ()
    child: list[Layer] | None = None
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Layer:
    """Nodes that follow the layer before."""

    what: str
    name: str
    nodes: tuple[Node, ...]
    count: int = 1


@dataclass(slots=True)
class Inventor:
    """Makes up a graph: pure data, the same for the same seed."""

    random: random.Random
    _names: int = field(default=0)

    def graph(self, depth: int) -> list[Layer]:
        """Up to three layers."""
        layers = []
        for _ in range(self.random.choice([1, 2, 2, 3])):
            what = self.random.choices(["parallel", "loop", "send", "edge"], [5, 2, 2, 1])[0]
            count = self.random.choice([1, 1, 2, 3]) if what == "parallel" else 1
            nodes = tuple(self._node(depth) if what == "parallel" else self._body(depth if what == "loop" else 0) for _ in range(count))
            if what == "send" and depth and self.random.random() < 0.5:
                nodes = (Node("child", self._name("child"), child=self.graph(0)),)
            layers.append(Layer(what, self._name(what), nodes, self.random.choice([2, 3])))
        return layers

    def _name(self, prefix: str) -> str:
        self._names += 1
        return f"{prefix}{self._names}"

    def _node(self, depth: int) -> Node:
        what = self.random.choices(["body", "child", "agent", "tools", "own_tools"], [6, 2 if depth else 0, 1, 1, 1])[0]
        if what == "body":
            return self._body(depth)
        if what == "child":
            return Node(what, self._name(what), child=self.graph(depth - 1))
        return Node(
            what, self._name(what), tools=tuple(self.random.choice(["ask", "ask_twice", "plain"]) for _ in range(self.random.choice([1, 2, 3])))
        )

    def _body(self, depth: int) -> Node:
        kinds = ["act", "question", "plain", "ask", "ask_twice", "model", "branches", "call", "call_twice"]
        weights = [6, 4, 2, 2, 1, 2, 1, 1 if depth else 0, 1 if depth else 0]
        steps = []
        for _ in range(self.random.choice([0, 1, 1, 2, 3])):
            what = self.random.choices(kinds, weights)[0]
            steps.append(Step(what, self._name("s"), self.graph(depth - 1) if what.startswith("call") else None))
        return Node("body", self._name("body"), steps=tuple(steps))


class Builder:
    """Builds an invented graph of a kit's effects."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit

    def graph(self, layers: list[Layer]) -> Any:
        """The compiled graph."""
        graph = StateGraph(State, output_schema=Lines)
        before: list[str] = [START]
        for layer in layers:
            before = self._add(graph, layer, before)
        return graph.compile()

    def _add(self, graph: Any, layer: Layer, before: list[str]) -> list[str]:
        """Add a layer; the names of its last nodes."""
        first, end = layer.nodes[0], f"{layer.name}_end"

        def link(name: str) -> None:
            graph.add_edge(before if len(before) > 1 else before[0], name)

        if layer.what == "parallel":
            for node in layer.nodes:
                graph.add_node(node.name, self._node(node))
                link(node.name)
            return [node.name for node in layer.nodes]
        graph.add_node(end, lambda state: {})
        graph.add_node(first.name, self._node(first))
        if layer.what == "loop":
            link(first.name)

            def again(state: State) -> str:
                return first.name if sum(str(line).startswith(f"{first.name}:") for line in state["lines"]) < layer.count else end

            graph.add_conditional_edges(first.name, again, [first.name, end])
        elif layer.what == "send":
            graph.add_node(layer.name, lambda state: {})
            link(layer.name)
            work = [Send(first.name, {"lines": [], "work": f"w{index}"}) for index in range(layer.count)]
            graph.add_conditional_edges(layer.name, lambda state: work, [first.name])
            graph.add_edge(first.name, end)
        else:
            link(first.name)

            async def edge(state: State) -> str:
                await self._kit.act(f"{layer.name} edge")
                if layer.count == 2:
                    self._kit.interrupt(f"{layer.name} edge?")
                return end

            graph.add_conditional_edges(first.name, self._kit.body(edge), [end])
        return [end]

    def _node(self, node: Node) -> Any:
        if node.what == "child":
            return self.graph(node.child or [])
        if node.what == "body":
            return self._body(node)
        agent = self._agent(node)

        async def delegates(state: State) -> State:
            said = await self._kit.call(agent, {"messages": [("user", node.name)]})
            return {"lines": [[str(each.content) for each in said["messages"]]]}

        return self._kit.body(delegates)

    def _agent(self, node: Node) -> Any:
        kit = self._kit
        model = kit.model(calls(*node.tools, prefix=node.name), AIMessage("done"))
        if node.what == "agent":
            return create_agent(model, kit.tools)

        async def llm(state: Any) -> Any:
            return {"messages": [await kit.call(model, state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("llm", kit.body(llm))
        graph.add_node("tools", kit.app.tool_node(kit.tools) if node.what == "own_tools" else ToolNode(kit.tools))
        graph.add_edge(START, "llm")
        graph.add_conditional_edges("llm", tools_condition)
        graph.add_edge("tools", "llm")
        return graph.compile()

    def _body(self, node: Node) -> Callable[..., Any]:
        kit = self._kit
        children = {step.name: self.graph(step.child) for step in node.steps if step.child is not None}
        model = kit.model(AIMessage("said"))

        async def one(step: Step, name: str) -> Any:
            match step.what:
                case "act":
                    return await kit.act(name)
                case "question":
                    return kit.interrupt(name)
                case "plain" | "ask" | "ask_twice" as tool:
                    return await kit.call(getattr(kit, tool), {"q": name})
                case "model":
                    return (await kit.call(model, name)).content
                case "branches" if kit.is_sync:
                    return [await kit.act(f"{name}a"), await kit.call(kit.ask, {"q": f"{name}b"})]
                case "branches":
                    return await kit.app.gather(lambda: kit.act(f"{name}a"), lambda: kit.call(kit.ask, {"q": f"{name}b"}))
            times = 2 if step.what == "call_twice" else 1
            return [len((await kit.call(children[step.name], {"lines": []}))["lines"]) for _ in range(times)]

        async def body(state: State) -> State:
            name = f"{node.name}{state.get('work') or ''}"
            said = [await one(step, f"{name} {step.name}") for step in node.steps]
            return {"lines": [f"{node.name}:{said}"]}

        return kit.body(body)


@pytest.mark.parametrize("colour", ["async", "sync"])
@pytest.mark.parametrize("seed", range(GRAPHS))
def test_an_invented_graph_ends_as_if_it_had_never_stopped(bench: Bench, seed: int, colour: Colour) -> None:
    """State, effects and frontiers of a random graph are the oracle's, abandoned attempts or not."""
    invented = Inventor(random.Random(seed)).graph(1 + seed % 2)

    def make(kit: Kit) -> Any:
        return Builder(kit).graph(invented)

    given = {"lines": []}
    state, expected = bench.oracle(make, given, colour)
    ledger = Ledger()
    calm = bench.complete(make, given, colour, ledger, order=random.Random(seed))
    assert calm.state == state
    assert_same_effects(calm, expected)
    assert ledger.without(*ASKING) == expected.without(*ASKING)

    ledger = Ledger()
    shaken = bench.complete(make, given, colour, ledger, killer=Killer(random.Random(seed)), order=random.Random(seed))
    assert shaken.state == state
    assert_same_effects(shaken, expected)
    assert (shaken.frontiers, shaken.positions) == (calm.frontiers, calm.positions)
    assert set(ledger.ran) == set(expected.ran)
    assert_no_body_without_a_start(shaken, ledger)
