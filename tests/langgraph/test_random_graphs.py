"""Random graphs against the oracle: what no table thought of."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Send

from tests.langgraph.bench import ATTEMPTS, Bench, Colour, Drive, Killer
from tests.langgraph.kit import ASKING, Kit, Ledger, Lines, State, calls
from tests.langgraph.test_shapes import DRIVES, SHARE, assert_no_body_without_a_start, assert_same_effects, assert_streamed_once

GRAPHS = max(14, ATTEMPTS // 150)
DEPTH = 3
_SIZE = 14
"""About how many bodies, agents and steps a graph has."""
_WORK = 26
"""How many of them run at most, each as often as loops, Sends and calls have it."""

COLOURS: tuple[Colour, ...] = ("async", "sync")
ATTEMPTS_A_GRAPH = math.ceil((1 - SHARE) * ATTEMPTS / GRAPHS / len(COLOURS))

BODY_STEPS = ("act", "question", "plain", "ask", "ask_twice", "model", "gather", "branches", "call", "call_twice")
NODES = ("body", "child", "agent", "tools", "own_tools", "delegating")
LAYERS = ("parallel", "loop", "send", "edge")


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
        """Up to three layers; at each depth some of its nodes, workers or bodies may have graphs below."""
        layers = []
        for _ in range(self.random.choice([1, 2, 2, 3])):
            what = self.random.choices(LAYERS, [5, 2, 2, 2])[0]
            count = self.random.choice([1, 1, 2, 3]) if what == "parallel" else 1
            nodes = tuple(self._node(depth) if what == "parallel" else self._body(depth) for _ in range(count))
            if what == "send" and depth and self.random.random() < 0.6:
                nodes = (Node("child", self._name("child"), child=self.graph(depth - 1)),)
            layers.append(Layer(what, self._name(what), nodes, self.random.choice([2, 3])))
            if self._names >= _SIZE:
                break
        return layers

    def _name(self, prefix: str) -> str:
        self._names += 1
        return f"{prefix}{self._names}"

    def _node(self, depth: int) -> Node:
        deeper = 4 if depth and self._names < _SIZE else 0
        what = self.random.choices(NODES, [6, deeper, 1, 1, 1, 1])[0]
        if what == "body":
            return self._body(depth)
        if what == "child":
            return Node(what, self._name(what), child=self.graph(depth - 1))
        return Node(
            what, self._name(what), tools=tuple(self.random.choice(["ask", "ask_twice", "plain"]) for _ in range(self.random.choice([1, 2, 3])))
        )

    def _body(self, depth: int) -> Node:
        deeper = 1 if depth and self._names < _SIZE else 0
        steps = []
        for _ in range(self.random.choice([0, 1, 1, 2, 3])):
            what = self.random.choices(BODY_STEPS, [5, 4, 2, 2, 1, 2, 1, 1, deeper, deeper])[0]
            steps.append(Step(what, self._name("s"), self.graph(depth - 1) if what.startswith("call") else None))
        return Node("body", self._name("body"), steps=tuple(steps))


def invented_for(seed: int) -> list[Layer]:
    """The graph of a seed, nested to a depth of one to three: the first of many that is so deep and does not do too much."""
    depth = 1 + seed % DEPTH
    for number in itertools.count():
        invented = Inventor(random.Random(f"{seed}.{number}")).graph(depth)
        if f"depth {depth}" in kinds(invented) and work(invented) <= _WORK:
            return invented
    raise AssertionError


def work(layers: list[Layer]) -> int:
    """How many nodes and steps run."""
    return sum(sum(_work_of(node) for node in layer.nodes) * (layer.count if layer.what in ("loop", "send") else 1) for layer in layers)


def _work_of(node: Node) -> int:
    below = sum((work(step.child) if step.child else 0) * (2 if step.what == "call_twice" else 1) for step in node.steps)
    return 1 + below + len(node.steps) + 2 * len(node.tools) + (work(node.child) if node.child else 0)


def drive_for(seed: int) -> Drive:
    """How it is driven: each depth meets each drive."""
    return DRIVES[(seed // DEPTH) % len(DRIVES)]


def kinds(layers: list[Layer], depth: int = 0) -> Iterator[str]:
    """What a graph has, as `what` and `what in where`, where the where of a graph is its depth."""
    yield f"depth {depth}"
    for layer in layers:
        yield layer.what
        if layer.what == "edge" and layer.count == 2:
            yield "question in edge"
        for node in layer.nodes:
            yield from (node.what, f"{node.what} in {layer.what}")
            yield from node.tools
            for step in node.steps:
                yield from (step.what, f"{step.what} in {layer.what}", f"{step.what} in depth {depth}")
                yield from kinds(step.child or [], depth + 1) if step.child else ()
            yield from kinds(node.child or [], depth + 1) if node.child else ()


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
        if node.what == "delegating":
            outer = kit.model(calls(f"{node.name}_delegate", "ask", prefix=f"{node.name}-outer"), AIMessage("done"))
            return create_agent(outer, [kit.delegate(create_agent(model, kit.tools), f"{node.name}_delegate"), kit.ask])

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

        async def asked(name: str) -> Any:
            return kit.interrupt(f"{name}c")

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
                case "gather" | "branches" if kit.is_sync:
                    return [await kit.act(f"{name}a"), await kit.call(kit.ask, {"q": f"{name}b"}), kit.interrupt(f"{name}c")]
                case "gather":
                    return [*await asyncio.gather(kit.act(f"{name}a"), kit.call(kit.ask, {"q": f"{name}b"}), kit.act(f"{name}c"))]
                case "branches":
                    return await kit.app.gather(lambda: kit.act(f"{name}a"), lambda: kit.call(kit.ask, {"q": f"{name}b"}), lambda: asked(name))
            times = 2 if step.what == "call_twice" else 1
            return [len((await kit.call(children[step.name], {"lines": []}))["lines"]) for _ in range(times)]

        async def body(state: State) -> State:
            name = f"{node.name}{state.get('work') or ''}"
            said = [await one(step, f"{name} {step.name}") for step in node.steps]
            return {"lines": [f"{node.name}:{said}"]}

        return kit.body(body)


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("seed", range(GRAPHS))
def test_an_invented_graph_ends_as_if_it_had_never_stopped(bench: Bench, seed: int, colour: Colour) -> None:
    """State, effects, frontiers and streams of a random graph are the oracle's, abandoned attempts or not."""
    invented, drive = invented_for(seed), drive_for(seed)

    def make(kit: Kit) -> Any:
        return Builder(kit).graph(invented)

    given = {"lines": []}
    expected = bench.plainly(make, given, colour, drive)
    ledger = Ledger()
    calm = bench.complete(make, given, colour, ledger, drive=drive, order=random.Random(seed))
    assert calm.state == expected.state
    assert_same_effects(calm, expected.ledger)
    assert ledger.without(*ASKING) == expected.ledger.without(*ASKING)
    assert_streamed_once(calm, expected, drive)

    attempts, order, is_shaken = calm.attempts, random.Random(seed), False
    while attempts < ATTEMPTS_A_GRAPH or not is_shaken:
        ledger, is_shaken = Ledger(), True
        shaken = bench.complete(make, given, colour, ledger, drive=drive, killer=Killer(random.Random(order.random())), order=order)
        attempts += shaken.attempts
        assert shaken.state == expected.state
        assert_same_effects(shaken, expected.ledger)
        assert (shaken.frontiers, shaken.positions) == (calm.frontiers, calm.positions)
        assert set(ledger.ran) == set(expected.ledger.ran)
        assert_no_body_without_a_start(shaken, ledger)


def test_what_is_invented() -> None:
    """The graphs have everything that a graph may have, deep inside others as well as at the root, and are driven in every way."""
    found = Counter(kind for seed in range(GRAPHS) for kind in kinds(invented_for(seed)))
    effects = {f"{what} in {where}" for what in ("act", "question") for where in (*LAYERS, *(f"depth {depth}" for depth in range(DEPTH + 1)))}
    expected = {*BODY_STEPS, *NODES, *LAYERS, "child in send", "child in parallel", "question in edge", f"depth {DEPTH}", *effects}
    assert expected - set(found) == set()
    assert {drive_for(seed) for seed in range(GRAPHS)} == set(DRIVES)
