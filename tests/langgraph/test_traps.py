"""What people get wrong about state, edges and resuming: each as LangGraph alone has it, and as it is here.

Where both are the same, a test is run in both ways. Where they differ, it shows first what LangGraph does, so that it is seen if that changes.
"""

from __future__ import annotations

import asyncio
import operator
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Annotated, Any, Literal, TypedDict

import pymongo
import pytest
from langchain_core.messages import AnyMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import InvalidUpdateError
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, interrupt
from pymongo import AsyncMongoClient

from mongo_durable import App
from mongo_durable.errors import NondeterminismError, RunNotFound, UnsupportedGraph
from mongo_durable.protocol.events import EventType
from tests.cases.workshop import Workshop, chain
from tests.langgraph.kit import State

SOON = timedelta(milliseconds=50)
EMPTY: State = {"lines": []}


@pytest.fixture(scope="module")
def shared_database(mongo_uri: str) -> Iterator[str]:
    """One database for all tests of this file, whose names keep their runs apart."""
    name = f"test_traps_{uuid.uuid4().hex[:12]}"
    yield name
    with pymongo.MongoClient(mongo_uri) as client:
        client.drop_database(name)


@pytest.fixture
async def workshop(mongo_uri: str, shared_database: str, request: pytest.FixtureRequest) -> AsyncIterator[Workshop]:
    """The durable runs of one test."""
    async with AsyncMongoClient(mongo_uri) as client:
        made = Workshop(mongo_uri, shared_database, request.node.originalname.removeprefix("test_")[:60], client)
        yield made
        await made.aclose()


def on(thread: object) -> Any:
    """LangGraph's configuration that names a thread."""
    return {"configurable": {"thread_id": str(thread)}}


Way = Literal["plain", "durable"]


async def run(way: Way, workshop: Workshop, make: Callable[..., Any], given: Any) -> Any:
    """Run a graph that asks nothing: as LangGraph does, or durably."""
    if way == "durable":
        return await workshop.once(make, given)
    return await make(None).compile().ainvoke(given)


both_ways = pytest.mark.parametrize("way", ["plain", "durable"])


class Notes(TypedDict, total=False):
    """Three lists, which are combined in three ways."""

    replaced: list[str]
    added: Annotated[list[str], operator.add]
    messages: Annotated[list[AnyMessage], add_messages]


@both_ways
async def test_an_update_replaces_unless_a_reducer_combines(way: Way, workshop: Workshop) -> None:
    """A list that a node returns takes the place of the old one; with `operator.add` it is added, also where it corrects; with `add_messages` a
    message of a known id takes the place of that message."""

    def make(app: App | None) -> Any:
        async def correct(state: Notes) -> Notes:
            return {"replaced": ["new"], "added": ["new"], "messages": [HumanMessage("new", id="first"), HumanMessage("next", id="second")]}

        graph = StateGraph(Notes)
        graph.add_node("correct", correct)
        graph.add_edge(START, "correct")
        return graph

    out = await run(way, workshop, make, {"replaced": ["old"], "added": ["old"], "messages": [HumanMessage("old", id="first")]})
    assert (out["replaced"], out["added"]) == (["new"], ["old", "new"])
    assert [(each.id, each.content) for each in out["messages"]] == [("first", "new"), ("second", "next")]


@both_ways
async def test_a_field_without_a_reducer_takes_one_update_a_step(way: Way, workshop: Workshop) -> None:
    """Two nodes side by side that both set it are refused; neither silently wins."""

    def make(app: App | None) -> Any:
        async def left(state: Notes) -> Notes:
            return {"replaced": ["left"]}

        async def right(state: Notes) -> Notes:
            return {"replaced": ["right"]}

        graph = StateGraph(Notes)
        for name, node in (("left", left), ("right", right)):
            graph.add_node(name, node)
            graph.add_edge(START, name)
        return graph

    with pytest.raises(InvalidUpdateError):
        await run(way, workshop, make, {"replaced": []})


@both_ways
@pytest.mark.parametrize("chosen_by", ["edge", "command"])
async def test_an_unconditional_edge_is_followed_as_well(way: Way, chosen_by: str, workshop: Workshop) -> None:
    """Neither a conditional edge nor `Command(goto=…)` cancels a fixed edge beside it: what should have been one of two is both."""

    def make(app: App | None) -> Any:
        async def decide(state: State) -> Any:
            return Command(goto="rejected") if chosen_by == "command" else {}

        async def execute(state: State) -> State:
            return {"lines": ["executed"]}

        async def reject(state: State) -> State:
            return {"lines": ["rejected"]}

        graph = StateGraph(State)
        graph.add_node("decide", decide, destinations=("rejected",) if chosen_by == "command" else None)
        graph.add_node("executed", execute)
        graph.add_node("rejected", reject)
        graph.add_edge(START, "decide")
        graph.add_edge("decide", "executed")
        if chosen_by == "edge":
            graph.add_conditional_edges("decide", lambda state: "no", {"no": "rejected", "yes": "executed", "review": END})
        return graph

    assert sorted((await run(way, workshop, make, EMPTY))["lines"]) == ["executed", "rejected"]


def _approval(effect: Callable[[str], Any]) -> StateGraph[Any]:
    """An effect, a question, and what follows the answer."""

    async def ask(state: State) -> State:
        await effect("before")
        return {"lines": [interrupt("buy?")]}

    async def execute(state: State) -> State:
        await effect("after")
        return {"lines": ["executed"]}

    return chain(ask=ask, execute=execute)


class Plain:
    """A graph of LangGraph alone, and how often its effects ran."""

    def __init__(self, saver: InMemorySaver | None = None) -> None:
        self.ran: list[str] = []
        self.graph = _approval(self._effect).compile(saver or InMemorySaver())

    async def _effect(self, what: str) -> None:
        self.ran.append(what)


def durable(workshop: Workshop) -> Callable[[App], Any]:
    """The same graph with its effect as an activity."""
    return lambda app: _approval(workshop.effect(app))


async def test_an_effect_before_a_question_repeats_with_the_answer(workshop: Workshop) -> None:
    """LangGraph enters the node again from its first line, and the effect runs twice; as an activity it runs once."""
    plain = Plain()
    await plain.graph.ainvoke(EMPTY, on(1))
    out = await plain.graph.ainvoke(Command(resume="yes"), on(1))
    assert (out["lines"], plain.ran) == (["yes", "executed"], ["before", "before", "after"])

    out = await workshop.complete(durable(workshop), EMPTY, lambda question: "yes")
    assert (out["lines"], workshop.ran) == (["yes", "executed"], {"before": 1, "after": 1})


async def test_an_answer_on_another_thread_resumes_nothing(workshop: Workshop) -> None:
    """LangGraph takes it for a new execution, which does the first effect anew and asks again; here it is refused. The question stays open."""
    plain = Plain()
    await plain.graph.ainvoke(EMPTY, on(1))
    out = await plain.graph.ainvoke(Command(resume="yes"), on(2))
    assert [each.value for each in out["__interrupt__"]] == ["buy?"]
    assert plain.ran == ["before", "before"]
    assert (await plain.graph.aget_state(on(1))).next == ("ask",)

    await workshop.once(durable(workshop), EMPTY)
    app = workshop.app(durable(workshop))
    with pytest.raises(RunNotFound):
        await app.ainvoke(Command(resume="yes"), on(workshop.run("other")))
    assert workshop.ran == {"before": 1}
    async with workshop.client() as client:
        assert (await client.get_run(workshop.run())).status == "suspended"
        assert [each.run_id for each in await client.list_runs(workflow=workshop.name)] == [workshop.run()]


async def test_a_saver_in_memory_forgets_with_its_process(workshop: Workshop) -> None:
    """With a new InMemorySaver, as after a restart, LangGraph begins anew without the input; here a process that knows nothing goes on."""
    await Plain().graph.ainvoke(EMPTY, on(1))
    restarted = Plain()
    assert (await restarted.graph.aget_state(on(1))).next == ()
    out = await restarted.graph.ainvoke(Command(resume="yes"), on(1))
    assert [each.value for each in out["__interrupt__"]] == ["buy?"]

    await workshop.once(durable(workshop), EMPTY)
    assert (await workshop.once(durable(workshop), Command(resume="yes")))["lines"] == ["yes", "executed"]


def _carelessly(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception:  # noqa: BLE001 - that is the trap
        return "nobody objects"


def _swallowing(place: str, ran: list[str]) -> Callable[[App | None], Any]:
    """A graph that swallows a question somewhere, and then executes."""

    def make(app: App | None) -> Any:
        async def in_a_node(state: State) -> State:
            return {"lines": [_carelessly(lambda: interrupt("buy?"))]}

        def in_a_plain_node(state: State) -> State:
            return {"lines": [_carelessly(lambda: interrupt("buy?"))]}

        async def by_name(state: State) -> State:
            asking = app or App("alone")
            return {"lines": [_carelessly(lambda: asking.interrupt("buy"))]}

        async def in_a_branch(state: State) -> State:
            async def branch() -> Any:
                return _carelessly(lambda: interrupt("buy?"))

            asking = app or App("alone")
            return {"lines": await asking.gather(branch)}

        async def in_a_tool(state: State) -> State:
            async def ask(q: str) -> str:
                """Ask a person."""
                return str(_carelessly(lambda: interrupt(q)))

            return {"lines": [await (app or App("alone")).tool(ask).ainvoke({"q": "buy?"})]}

        async def the_second(state: State) -> State:
            return {"lines": [interrupt("which?"), _carelessly(lambda: interrupt("buy?"))]}

        async def execute(state: State) -> State:
            ran.append("executed")
            return {}

        nodes = {each.__name__: each for each in (in_a_node, in_a_plain_node, by_name, in_a_branch, in_a_tool, the_second)}
        if place == "in_a_child_graph":
            return chain(child=chain(ask=in_a_node).compile(), execute=execute)
        return chain(ask=nodes[place], execute=execute)

    return make


@pytest.mark.parametrize("place", ["in_a_node", "in_a_plain_node", "by_name", "in_a_branch", "in_a_tool", "in_a_child_graph", "the_second"])
async def test_a_broad_except_swallows_a_question(place: str, workshop: Workshop) -> None:
    """LangGraph goes on as if somebody had answered; here the run fails, and nothing that follows is executed."""
    ran: list[str] = []
    make = _swallowing(place, ran)
    graph = make(None).compile(InMemorySaver())
    out = await graph.ainvoke(EMPTY, on(1))
    if place == "the_second":
        out = await graph.ainvoke(Command(resume="nobody objects"), on(1))
    assert set(out["lines"]) == {"nobody objects"}
    assert ran == ["executed"]

    if place == "the_second":
        await workshop.once(make, EMPTY, place)
    with pytest.raises(UnsupportedGraph, match="swallowed"):
        await workshop.once(make, Command(resume="this") if place == "the_second" else EMPTY, place)
    assert ran == ["executed"]
    async with workshop.client() as client:
        assert (await client.get_run(workshop.run(place))).status == "failed"


def _questions(*names: str) -> Callable[[App | None], Any]:
    """A graph whose one node asks these questions, one after the other."""

    def make(app: App | None) -> Any:
        async def ask(state: State) -> State:
            return {"lines": [{name: interrupt(name) for name in names}]}

        return chain(ask=ask)

    return make


async def test_a_new_order_of_questions_does_not_mix_up_answers(workshop: Workshop) -> None:
    """LangGraph pairs answers with questions by their place in the node, so that new code gets the answer to another question; here it diverges, and
    the old code can still go on."""
    old, new = _questions("amount?", "account?"), _questions("account?", "amount?")
    saver = InMemorySaver()
    await old(None).compile(saver).ainvoke(EMPTY, on(1))
    await old(None).compile(saver).ainvoke(Command(resume="10 EUR"), on(1))
    assert await new(None).compile(saver).ainvoke(Command(resume="DE1"), on(1)) == {"lines": [{"account?": "10 EUR", "amount?": "DE1"}]}

    await workshop.once(old, EMPTY)
    await workshop.once(old, Command(resume="10 EUR"))
    with pytest.raises(NondeterminismError, match="other questions"):
        await workshop.once(new, Command(resume="DE1"))
    async with workshop.client() as client:
        assert (await client.get_run(workshop.run())).status == "diverged"
        await client.retry(workshop.run())
    assert await workshop.once(old, None) == {"lines": [{"amount?": "10 EUR", "account?": "DE1"}]}


async def test_a_jump_is_no_answer(workshop: Workshop) -> None:
    """`Command(goto=…)` is what a node returns. As input LangGraph lets it jump past the question; here it is refused, and the question stays."""
    plain = Plain()
    await plain.graph.ainvoke(EMPTY, on(1))
    out = await plain.graph.ainvoke(Command(goto="execute"), on(1))
    assert out["lines"] == ["executed"]
    assert "after" in plain.ran, "executed, and nobody has approved it"

    await workshop.once(durable(workshop), EMPTY)
    with pytest.raises(UnsupportedGraph):
        await workshop.once(durable(workshop), Command(goto="execute"))
    assert workshop.ran == {"before": 1}
    assert (await workshop.once(durable(workshop), Command(resume="yes")))["lines"] == ["yes", "executed"]


async def test_an_answer_is_no_jump(workshop: Workshop) -> None:
    """`Command(resume=…)` is what a caller gives. A node that returns it answers nothing: the question of the next node is asked all the same."""

    def make(app: App | None) -> Any:
        async def decide(state: State) -> Command[Literal["ask"]]:
            return Command(update={"lines": ["decided"]}, goto="ask", resume="yes")

        async def ask(state: State) -> State:
            return {"lines": [interrupt("buy?")]}

        graph = StateGraph(State)
        graph.add_node("decide", decide)
        graph.add_node("ask", ask)
        graph.add_edge(START, "decide")
        return graph

    out = await make(None).compile(InMemorySaver()).ainvoke(EMPTY, on(1))
    assert [each.value for each in out["__interrupt__"]] == ["buy?"]
    out = await workshop.once(make, EMPTY)
    assert [each.value for each in out["__interrupt__"]] == ["buy?"]
    assert (await workshop.once(make, Command(resume="no")))["lines"] == ["decided", "no"]


async def test_a_question_is_no_time_limit(workshop: Workshop) -> None:
    """LangGraph's interrupt waits for whoever resumes it. Here a question can have a deadline, after which it gets its declared default."""

    def make(app: App | None) -> Any:
        asking = app or App("alone")

        async def ask(state: State) -> State:
            return {"lines": [asking.interrupt("buy", expires_in=SOON, default="no")]}

        return chain(ask=ask)

    graph = make(None).compile(InMemorySaver())
    await graph.ainvoke(EMPTY, on(1))
    await workshop.once(make, EMPTY)
    await asyncio.sleep(SOON.total_seconds())  # by the server's clock there is no event to wait for
    assert [each.value for each in (await graph.ainvoke(None, on(1)))["__interrupt__"]] == [None]
    assert (await workshop.once(make, None))["lines"] == ["no"]
    assert len(await workshop.history(1, EventType.FRONTIER_EXPIRED)) == 1


async def test_a_failure_beside_a_node_that_ended_does_not_repeat_it(workshop: Workshop) -> None:
    """LangGraph keeps the writes of the node that ended; whether its effect reached the outside exactly once is not its concern. Here the effect is
    recorded, and a retry runs what failed alone."""

    def make(app: App) -> Any:
        effect = workshop.effect(app)

        async def ends(state: State) -> State:
            return {"lines": [await effect("paid")]}

        async def fails(state: State) -> State:
            workshop.ran["tries"] += 1
            if workshop.ran["tries"] == 1:
                raise ConnectionError("the network is down")
            return {"lines": ["reported"]}

        graph = StateGraph(State)
        for name, node in (("ends", ends), ("fails", fails)):
            graph.add_node(name, node)
            graph.add_edge(START, name)
        return graph

    with pytest.raises(ConnectionError):
        await workshop.once(make, EMPTY)
    async with workshop.client() as client:
        await client.retry(workshop.run())
    assert (await workshop.once(make, None))["lines"] == ["paid", "reported"]
    assert workshop.ran == {"paid": 1, "tries": 2}
