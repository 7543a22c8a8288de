"""The shapes that a graph may have: each a function from a kit to a graph, and the input that it is run with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, HumanInTheLoopMiddleware
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph, add_messages
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, Send

from tests.langgraph.bench import Colour
from tests.langgraph.kit import Kit, Lines, State, calls

NO_LINES: dict[str, Any] = {"lines": []}
HELLO: dict[str, Any] = {"messages": [HumanMessage("hi")]}


@dataclass(frozen=True, slots=True)
class Shape:
    """A graph, what it is run with, and the colours in which it exists."""

    name: str
    make: Callable[[Kit], Any]
    given: Any
    colours: tuple[Colour, ...]
    is_interchangeable: bool = False
    """Whether concurrent effects of one body take their positions in the order in which they happen to start first."""

    def nested(self, kit: Kit, depth: int) -> Any:
        """The graph as a child node `depth` graphs deep; 0: itself."""
        graph = self.make(kit)
        if depth == 0:
            return graph
        if not isinstance(self.given, dict):
            graph = _called_in_a_body(kit, graph, self.given)
        return _around(kit, graph.compile() if isinstance(graph, StateGraph) else graph, depth)

    def given_at(self, depth: int) -> Any:
        """What the nested graph is run with."""
        return self.given if depth == 0 or isinstance(self.given, dict) else NO_LINES


class Both(State):
    """What any child graph of these tests reads and writes."""

    messages: Annotated[list[Any], add_messages]


def _around(kit: Kit, child: Any, depth: int) -> Any:
    """Graphs around a child: at each level a sibling with an effect runs in parallel, one of them asks, and a last node follows both."""
    for level in range(1, depth + 1):
        graph = StateGraph(Both)
        graph.add_node("nested", child)
        graph.add_node("sibling", kit.node(f"sibling{level}", asks=level == (depth + 1) // 2))
        graph.add_node("last", kit.node(f"last{level}"))
        graph.add_edge(START, "nested")
        graph.add_edge(START, "sibling")
        graph.add_edge(["nested", "sibling"], "last")
        child = graph.compile()
    return child


def _called_in_a_body(kit: Kit, workflow: Any, given: Any) -> Any:
    """A graph whose only node calls a workflow that no graph can have as a node."""

    async def calls_it(state: State) -> State:
        return {"lines": await kit.call(workflow, given)}

    graph = StateGraph(State)
    graph.add_node("calls_it", kit.body(calls_it))
    graph.add_edge(START, "calls_it")
    return graph


SHAPES: list[Shape] = []


def shape(name: str, given: Any, *colours: Colour, is_interchangeable: bool = False) -> Callable[[Callable[[Kit], Any]], Callable[[Kit], Any]]:
    def add(make: Callable[[Kit], Any]) -> Callable[[Kit], Any]:
        SHAPES.append(Shape(name, make, given, colours or ("async", "sync"), is_interchangeable))
        return make

    return add


@shape("parallel nodes", NO_LINES, "async", "sync", "mixed", "thread")
def _parallel(kit: Kit) -> Any:
    return kit.parallel()


TIMERS = "timers"


@shape(TIMERS, NO_LINES, "async", "sync", "mixed")
def _timers(kit: Kit) -> Any:
    """Timers beside questions, between effects, in a loop, and before a question: what a timer lets through late must not meet a frontier early."""

    async def sleeps_and_asks(state: State) -> State:
        await kit.act("t1.1")
        await kit.sleep(0.02)
        said = kit.interrupt("t1") + await kit.act("t1.2")
        return {"lines": [said]}

    async def asks_and_sleeps(state: State) -> State:
        said = kit.interrupt("t2")
        await kit.sleep(0.01)
        return {"lines": [said + await kit.act("t2.1") + kit.interrupt("t2 again")]}

    async def sleeps(state: State) -> State:
        for number in range(2):
            await kit.sleep(0.01)
            await kit.act(f"t3.{number}")
        return {"lines": ["t3"]}

    graph = StateGraph(State, output_schema=Lines)
    for name, body in (("t1", sleeps_and_asks), ("t2", asks_and_sleeps), ("t3", sleeps)):
        graph.add_node(name, kit.body(body))
        graph.add_edge(START, name)
    graph.add_node("last", kit.node("last"))
    graph.add_edge(["t1", "t2", "t3"], "last")
    return graph.compile()


@shape("loop", NO_LINES)
def _loop(kit: Kit) -> Any:
    graph = StateGraph(State)
    graph.add_node("again", kit.node("again", asks=True))
    graph.add_edge(START, "again")
    graph.add_conditional_edges("again", lambda state: "again" if len(state["lines"]) < 3 else END)
    return graph


def _nested(kit: Kit, depth: int) -> Any:
    if depth == 0:
        return kit.parallel("d0")
    graph = StateGraph(State, output_schema=Lines)
    graph.add_node("before", kit.node(f"d{depth}before", asks=True))
    graph.add_node("child", _nested(kit, depth - 1))
    graph.add_node("beside", kit.node(f"d{depth}beside", asks=True))
    graph.add_edge(START, "before")
    graph.add_edge("before", "child")
    graph.add_edge("before", "beside")
    return graph.compile()


@shape("child graph, one deep", NO_LINES)
def _child_1(kit: Kit) -> Any:
    return _nested(kit, 1)


@shape("child graph, two deep", NO_LINES, "async", "sync", "mixed")
def _child_2(kit: Kit) -> Any:
    return _nested(kit, 2)


@shape("child graph, three deep", NO_LINES)
def _child_3(kit: Kit) -> Any:
    return _nested(kit, 3)


@shape("child called in a body, once and twice", NO_LINES)
def _called(kit: Kit) -> Any:
    child = kit.parallel("c")

    async def once(state: State) -> State:
        await kit.act("once")
        return {"lines": (await kit.call(child, {"lines": []}))["lines"]}

    async def twice(state: State) -> State:
        first = await kit.call(child, {"lines": []})
        await kit.act("between")
        second = await kit.call(child, {"lines": []})
        return {"lines": first["lines"] + second["lines"]}

    graph = StateGraph(State)
    for each in (once, twice):
        graph.add_node(each.__name__, kit.body(each))
        graph.add_edge(START, each.__name__)
    return graph


def _with_beside(kit: Kit, body: Callable[..., Any]) -> Any:
    graph = StateGraph(State)
    graph.add_node("body", kit.body(body))
    graph.add_node("beside", kit.node("beside", asks=True))
    graph.add_edge(START, "body")
    graph.add_edge(START, "beside")
    return graph


@shape("three questions in one node", NO_LINES, "async", "sync", "mixed")
def _sequential(kit: Kit) -> Any:
    async def body(state: State) -> State:
        lines = []
        for number in range(3):
            lines.append((await kit.act(f"before{number}"), kit.interrupt(f"q{number}")))
        await kit.act("end")
        return {"lines": lines}

    return _with_beside(kit, body)


@shape("node metadata over LangGraph's own", NO_LINES)
def _metadata(kit: Kit) -> Any:
    graph = StateGraph(State)
    for name, path in (("left", "mine"), ("right", ("mine", "too")), ("middle", ("mine", "too"))):
        graph.add_node(name, kit.node(name, asks=True), metadata={"langgraph_path": path, "langgraph_step": 7})
        graph.add_edge(START, name)
    return graph


@shape("Send to nodes", NO_LINES)
def _send(kit: Kit) -> Any:
    async def worker(state: State) -> State:
        await kit.act(state["work"])
        await kit.pause()
        return {"lines": [state["work"] + (kit.interrupt(state["work"]) if state["work"] != "w2" else "")]}

    graph = StateGraph(State)
    graph.add_node("worker", kit.body(worker))
    graph.add_node("end", kit.node("end"))
    graph.add_conditional_edges(START, lambda state: [Send("worker", {"work": f"w{index}"}) for index in range(4)], ["worker"])
    graph.add_edge("worker", "end")
    return graph


@shape("Send to child graphs that Send", NO_LINES)
def _send_twice(kit: Kit) -> Any:
    async def leaf(state: State) -> State:
        await kit.act(state["work"])
        return {"lines": [kit.interrupt(state["work"])]}

    inner = StateGraph(State, output_schema=Lines)
    inner.add_node("leaf", kit.body(leaf))
    inner.add_node("tail", kit.node("tail", asks=True))
    inner.add_conditional_edges(START, lambda state: [Send("leaf", {"work": f"{state['work']}.{index}"}) for index in range(2)], ["leaf"])
    inner.add_edge("leaf", "tail")
    graph = StateGraph(State)
    graph.add_node("before", kit.node("before"))
    graph.add_node("child", inner.compile())
    graph.add_edge(START, "before")
    graph.add_conditional_edges("before", lambda state: [Send("child", {"work": f"W{index}"}) for index in range(3)], ["child"])
    return graph


@shape("Command(goto) and an effect in each node", NO_LINES)
def _goto(kit: Kit) -> Any:
    async def first(state: State) -> Command[str]:
        said = kit.interrupt("where?")
        return Command(goto="left" if said == "A(where?)" else "right", update={"lines": [await kit.act("first")]})

    graph = StateGraph(State)
    graph.add_node("first", kit.body(first), destinations=("left", "right"))
    graph.add_node("left", kit.node("left", asks=True))
    graph.add_node("right", kit.node("right"))
    graph.add_edge(START, "first")
    return graph


def _agent(kit: Kit, prefix: str = "call", middleware: tuple[Any, ...] = ()) -> Any:
    script = (calls("ask", "plain", "ask_twice", prefix=prefix), calls("ask", prefix=f"{prefix}-again"), AIMessage("done"))
    return create_agent(kit.model(*script), kit.tools, middleware=middleware)


@shape("create_agent as root", HELLO, "async", "sync", "mixed", "thread")
def _agent_root(kit: Kit) -> Any:
    return _agent(kit)


@shape("create_agent as two parallel nodes", HELLO)
def _agents(kit: Kit) -> Any:
    graph = StateGraph(MessagesState)
    for name in ("a1", "a2"):
        graph.add_node(name, _agent(kit, name))
        graph.add_edge(START, name)
    return graph


@shape("create_agent inside durable tools", HELLO)
def _agents_in_tools(kit: Kit) -> Any:
    script = (calls("delegate", "delegate", "ask"), AIMessage("done"))
    return create_agent(kit.model(*script), [kit.delegate(_agent(kit, "inner")), kit.ask])


def _classic(kit: Kit, tools: Any) -> Any:
    """Model and tools in turn; all calls of a response share one task."""
    model = kit.model(calls("ask", "plain", "ask_twice", "ask", "ask_twice"), calls("ask", "plain", prefix="next"), AIMessage("done"))

    async def llm(state: Any) -> Any:
        return {"messages": [await kit.call(model, state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("llm", kit.body(llm))
    graph.add_node("tools", tools)
    graph.add_edge(START, "llm")
    graph.add_conditional_edges("llm", tools_condition)
    graph.add_edge("tools", "llm")
    return graph


@shape("plain ToolNode, several asking calls in one task", HELLO, "async", "sync", "mixed")
def _plain_tool_node(kit: Kit) -> Any:
    return _classic(kit, ToolNode(kit.tools))


@shape("app.tool_node, several asking calls in one task", HELLO, "async", "sync", "mixed")
def _own_tool_node(kit: Kit) -> Any:
    return _classic(kit, kit.app.tool_node(kit.tools))


@shape("tools called in a body", NO_LINES)
def _tools_in_body(kit: Kit) -> Any:
    async def body(state: State) -> State:
        first = await kit.call(kit.plain, {"q": "1"})
        second = await kit.call(kit.ask, {"q": "2"})
        third = await kit.call(kit.ask_twice, {"q": "3"})
        return {"lines": [first, second, third, kit.interrupt("own")]}

    return _with_beside(kit, body)


@shape("effects and a question in edge functions", NO_LINES)
def _edges(kit: Kit) -> Any:
    async def begin(state: State) -> str:
        return "node" if await kit.act("begin") else END

    async def end(state: State) -> str:
        await kit.act("end")
        return END if kit.interrupt("edge?") else "node"

    graph = StateGraph(State)
    graph.add_node("node", kit.node("node", asks=True))
    graph.add_conditional_edges(START, kit.body(begin), ["node", END])
    graph.add_conditional_edges("node", kit.body(end), ["node", END])
    return graph


class _CallsModels(AgentMiddleware):
    """Every hook asks a model."""

    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self._model = kit.model(AIMessage("noted"))

    def before_model(self, state: Any, runtime: Any) -> None:
        self._model.invoke("before")

    async def abefore_model(self, state: Any, runtime: Any) -> None:
        await self._model.ainvoke("before")

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        self._model.invoke("around the model")
        return handler(request)

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        await self._model.ainvoke("around the model")
        return await handler(request)

    def wrap_tool_call(self, request: Any, handler: Any) -> Any:
        self._model.invoke(f"around {request.tool_call['id']}")
        return handler(request)

    async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
        await self._model.ainvoke(f"around {request.tool_call['id']}")
        return await handler(request)


@shape("middleware whose hooks call models", HELLO)
def _middleware(kit: Kit) -> Any:
    return _agent(kit, middleware=(_CallsModels(kit),))


def _asked_first(kit: Kit, mode: Any) -> Any:
    gate = HumanInTheLoopMiddleware(interrupt_on={"ask": True, "plain": True}, interrupt_mode=mode)
    return create_agent(kit.model(calls("ask", "plain", "ask"), AIMessage("done")), [kit.ask, kit.plain], middleware=[gate])


@shape("human in the loop, one question a response", HELLO)
def _asked_batched(kit: Kit) -> Any:
    return _asked_first(kit, "batched")


@shape("human in the loop, one question a call", HELLO)
def _asked_per_call(kit: Kit) -> Any:
    return _asked_first(kit, "per_call")


@shape("entrypoint and tasks", [1, 2])
def _functional(kit: Kit) -> Any:
    if kit.is_sync:

        @task
        def deep(number: int) -> Any:
            return kit._act(f"deep{number}")

        @task
        def outer(number: int) -> Any:
            return kit._act(number) + deep(number).result() + deep(number + 10).result()

        @entrypoint()
        def workflow(numbers: list[int]) -> Any:
            said = [future.result() for future in [outer(number) for number in numbers]]
            asked = kit.interrupt("go on?")
            return [*said, asked, kit._act("end")]

        return workflow

    @task
    async def deep_async(number: int) -> Any:
        return await kit.act(f"deep{number}")

    @task
    async def outer_async(number: int) -> Any:
        return await kit.act(number) + await deep_async(number) + await deep_async(number + 10)

    @entrypoint()
    async def workflow_async(numbers: list[int]) -> Any:
        said = [await future for future in [outer_async(number) for number in numbers]]
        asked = kit.interrupt("go on?")
        return [*said, asked, await kit.act("end")]

    return workflow_async


@shape("entrypoint that returns nothing much", [1])
def _functional_empty(kit: Kit) -> Any:
    async def workflow(numbers: list[int]) -> Any:
        await kit.act(numbers[0])
        kit.interrupt("go on?")
        return []

    return entrypoint()(kit.body(workflow))


@shape("gather of asking tools", NO_LINES, "async")
def _gather_tools(kit: Kit) -> Any:
    async def body(state: State) -> State:
        given = ((kit.ask, "1"), (kit.ask_twice, "2"), (kit.plain, "3"), (kit.ask, "4"))
        return {"lines": list(await asyncio.gather(*(kit.call(tool, {"q": q}) for tool, q in given)))}

    return _with_beside(kit, body)


@shape("gather of activities, nothing awaited before", NO_LINES, "async")
def _gather_activities(kit: Kit) -> Any:
    async def body(state: State) -> State:
        return {"lines": list(await asyncio.gather(*(kit.act(number) for number in range(5))))}

    return _with_beside(kit, body)


@shape("gather of activities after awaits", NO_LINES, "async", is_interchangeable=True)
def _gather_late(kit: Kit) -> Any:
    async def one(number: int) -> str:
        await kit.pause()
        first = await kit.act(number)
        await kit.pause()
        return first + await kit.act(f"{number}b")

    async def body(state: State) -> State:
        said = await asyncio.gather(*(one(number) for number in range(4)))
        return {"lines": [*said, kit.interrupt("after")]}

    return _with_beside(kit, body)


@shape("gather of child graphs without questions", NO_LINES, "async")
def _gather_children(kit: Kit) -> Any:
    async def only(state: State) -> State:
        return {"lines": [await kit.act(state["work"])]}

    child = StateGraph(State)
    child.add_node("only", only)
    child.add_edge(START, "only")
    compiled = child.compile()

    async def body(state: State) -> State:
        return {"lines": [each["lines"] for each in await asyncio.gather(*(compiled.ainvoke({"lines": [], "work": number}) for number in range(4)))]}

    return _with_beside(kit, body)


@shape("app.gather of everything that asks", NO_LINES, "async")
def _own_gather(kit: Kit) -> Any:
    child = kit.parallel("branch")

    async def effects() -> str:
        await kit.pause()
        return await kit.act("b1") + await kit.act("b2")

    async def question() -> Any:
        await kit.pause()
        return kit.interrupt("branch?")

    async def tool() -> Any:
        await kit.pause()
        return await kit.call(kit.ask_twice, {"q": "branch"})

    async def graph() -> Any:
        await kit.pause()
        return (await kit.call(child, {"lines": []}))["lines"]

    async def body(state: State) -> State:
        first = await kit.app.gather(effects, question, tool, graph)
        second = await kit.app.gather(effects, question)
        return {"lines": [*first, *second]}

    return _with_beside(kit, body)
