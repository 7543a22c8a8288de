"""What the nodes leave in a durable run: the same in every attempt, whatever process dies; and what people see of it."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from datetime import datetime, timedelta
from typing import Any

import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import Command

from mongo_durable import DurableClient
from mongo_durable.errors import AttemptOver, InterruptExpired, InvalidAnswer
from mongo_durable.langgraph.clock import recorded_now
from mongo_durable.langgraph.scope import current_session
from mongo_durable.nodes import build_ask_user_marker, build_interrupt_marker, create_elicitation_node, create_interrupt_node, interrupt_condition
from mongo_durable.protocol.events import Event, EventType
from mongo_durable.protocol.identity import Position, activity_id
from mongo_durable.store import failpoints
from mongo_durable.store.failpoints import FailPoint
from tests.langgraph.bench import Bench, Colour, Killer, Told
from tests.langgraph.kit import Kit, Ledger
from tests.nodes.stage import INTERRUPT, Path, Stage, State, asked, two_paths

ENDS = {"interrupt": "interrupt", "elicitation": "elicitation", "continue": "last", "finish": "last"}


class Mints:
    """Every marker that any attempt has built, by the place that built it."""

    def __init__(self) -> None:
        self.of: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)

    def interrupt(self, place: str) -> dict[str, Any]:
        """A marker of one kind."""
        return self._keep(place, build_interrupt_marker(name="approval", payload={"place": place}))

    def ask_user(self, place: str) -> dict[str, Any]:
        """A marker of the other kind."""
        return self._keep(place, build_ask_user_marker(question=place))

    def _keep(self, place: str, update: dict[str, Any]) -> dict[str, Any]:
        self.of[place].append(next(iter(update.values())))
        return update


def _minting(mints: Mints) -> Any:
    """A graph that mints in a node after an effect, in a tool and in a graph inside it, in an activity and in a router; it asks twice on its way."""

    def make(kit: Kit) -> Any:
        async def inner(_: State) -> State:
            mints.interrupt("inside the tool's graph")
            return {}

        child = StateGraph(State)
        child.add_node("inner", kit.body(inner))
        child.add_edge(START, "inner")
        child_graph = child.compile()

        async def order(q: str) -> Any:
            """Mint in a tool."""
            update = mints.interrupt("tool")
            mints.ask_user("second in the tool")
            await kit.act(f"in the tool {q}")
            await kit.call(child_graph, {"messages": []})
            await kit.act("behind the graph")
            return update

        async def look(what: str) -> Any:
            return mints.ask_user("activity")

        order_tool = kit.tool(order)
        look_activity = kit.app.activity(idempotent=True)(kit.body(look))

        async def first(_: State) -> State:
            await kit.act("before")
            mints.interrupt("node")
            mints.interrupt("node again")
            return await kit.call(order_tool, {"q": "desk"})

        async def second(_: State) -> State:
            update = look_activity("shelf") if kit.is_sync else await look_activity("shelf")
            await kit.act("after")
            return update

        async def last(_: State) -> State:
            await kit.act("last")
            return {}

        def router(state: State) -> str:
            mints.interrupt("router")
            return interrupt_condition(state, 3600)

        graph = StateGraph(State)
        graph.add_node("first", kit.body(first))
        graph.add_node("second", kit.body(second))
        graph.add_node("last", kit.body(last))
        graph.add_node("interrupt", create_interrupt_node(3600))
        graph.add_node("elicitation", create_elicitation_node(3600))
        graph.add_edge(START, "first")
        graph.add_conditional_edges("first", router, ENDS)
        graph.add_edge("interrupt", "second")
        graph.add_conditional_edges("second", interrupt_condition, ENDS)
        graph.add_edge("elicitation", "last")
        return graph

    return make


def _say(question: Any) -> Any:
    return {"said to": question.get("question", question.get("payload"))}


class EveryCall(Killer):
    """Abandons two attempts after n calls of the engine, for n from 0, until one needs fewer."""

    attempt = -1

    def budget(self) -> int | None:
        """See `Killer`."""
        self.attempt += 1
        return self.attempt // 2

    def delay_s(self) -> float | None:
        """No call is cancelled."""
        return None


@pytest.mark.parametrize("colour", ["async", "sync", "mixed", "thread"])
def test_every_attempt_mints_the_same(bench: Bench, colour: Colour) -> None:
    """However often its processes die, a run's markers have one id, one time and one run, wherever they are built; no two places share an id."""
    mints = Mints()
    told = bench.complete(_minting(mints), {"messages": []}, colour, Ledger(), killer=EveryCall(random.Random(0)), say=_say)
    assert len(told.frontiers) == 2
    assert told.state["_interrupt_response"]["response"] == {"said to": {"place": "tool"}}
    assert told.state["_ask_user_response"]["response"] == {"said to": "activity"}
    for place, markers in mints.of.items():
        # Nothing is called inside the activity's body, where an attempt could be abandoned.
        assert len(markers) > 1 or place == "activity", place
        assert [each for each in markers if each != markers[0]] == [], place
    assert len({markers[0]["interrupt_id"] for markers in mints.of.values()}) == len(mints.of) == 7
    _check_times_and_ids(told, mints)


def _check_times_and_ids(told: Told, mints: Mints) -> None:
    starts = {each.position.text: each for each in reversed(told.events) if each.type is EventType.ACTIVITY_STARTED and each.position}
    seals = {each.data["step"]: each for each in told.events if each.type is EventType.STEP_COMMITTED}
    tool, activity = starts["agent/1/first@1#2"], starts["agent/1/second@3#1"]
    begun: dict[str, Event] = {"activity": activity, "node": seals[0], "node again": seals[0], "router": seals[0]}
    begun |= {place: tool for place in ("tool", "second in the tool", "inside the tool's graph")}
    for place, [marker, *_] in mints.of.items():
        assert begun[place].at is not None
        assert datetime.fromtimestamp(marker["minted_at"], begun[place].at.tzinfo) == begun[place].at, place
        assert marker["run_id"] == told.history.run_id
    assert mints.of["tool"][0]["interrupt_id"] == tool.activity_id
    assert mints.of["activity"][0]["interrupt_id"] == activity.activity_id


class Planned(Killer):
    """Abandons the second attempt when the start of its effect is recorded, and no other."""

    attempt = 0

    def budget(self) -> int | None:
        """See `Killer`."""
        self.attempt += 1
        return 1 if self.attempt == 2 else None

    def delay_s(self) -> float | None:
        """No call is cancelled."""
        return None


def test_a_step_whose_seal_was_lost(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may have another time in the next attempt only where its seal, and so everything behind it, was lost; once recorded, it stands."""
    times: list[float] = []
    is_over = False

    async def lose_the_first_flight(point: FailPoint) -> None:
        if point is FailPoint.APPEND_BEFORE and not is_over:
            while not is_over:  # noqa: ASYNC110 - the body that ends it runs on this loop too
                await asyncio.sleep(0.001)
            raise ConnectionError("the process died with what it had queued")

    def make(kit: Kit) -> Any:
        async def first(_: State) -> State:
            return {}

        async def second(_: State) -> State:
            nonlocal is_over
            times.append(recorded_now())
            if not is_over:
                session = current_session()
                assert session is not None
                is_over = True
                raise session.attempt.stop(AttemptOver("abandoned by the test"))
            await kit.act("effect")
            return {}

        graph = StateGraph(State)
        graph.add_node("first", first)
        graph.add_node("second", second)
        graph.add_edge(START, "first")
        graph.add_edge("first", "second")
        return graph

    monkeypatch.setattr(failpoints, "handler", lose_the_first_flight)
    told = bench.complete(make, {"messages": []}, "async", Ledger(), killer=Planned(random.Random(0)))
    assert told.attempts == 3
    sealed = next(each for each in told.events if each.type is EventType.STEP_COMMITTED and each.data["step"] == 1)
    assert sealed.fence == 2
    assert sealed.at is not None
    assert times[1:] == [sealed.at.timestamp()] * 2
    assert times[0] != times[1]


def test_a_state_with_a_run_id_of_its_own(durable: Stage, path: Path) -> None:
    """A marker without a given run belongs to the durable run, also where the state's `run_id` says something else; an old one still does not."""
    thread = durable.thread()
    make = two_paths(lambda _: path.build())
    out = durable.play(make, {"messages": [], "run_id": "turn-1"}, thread)
    assert durable.answer(make, out, "yes", thread)[path.response]["response"] == "yes"
    assert asked(durable.play(two_paths(lambda _: path.build(run_id="turn-0")), {"messages": [], "run_id": "turn-1"}, durable.thread())) == []


def test_a_run_inside_the_tool_of_another(bench: Bench) -> None:
    """A tool whose body executes another run lends that run neither its time nor its id."""
    mints, inner_run, inner_app = Mints(), bench.new_run(), bench.app("inner")

    def outer(kit: Kit) -> Any:
        async def inner_node(_: State) -> State:
            mints.interrupt("inner")
            return {}

        async def hand_on(q: str) -> str:
            """Let another run do it."""
            graph = StateGraph(State)
            graph.add_node("node", inner_node)
            graph.add_edge(START, "node")
            inner_app.entrypoint(lambda: graph)
            await inner_app.ainvoke({"messages": []}, {"configurable": {"thread_id": inner_run}}, run_id=inner_run)
            mints.interrupt("outer")
            return q

        tool = kit.tool(hand_on)

        async def node(_: State) -> State:
            await kit.call(tool, {"q": "desk"})
            return {}

        graph = StateGraph(State)
        graph.add_node("node", node)
        graph.add_edge(START, "node")
        return graph

    told = bench.complete(outer, {"messages": []}, "async", Ledger())
    [inner], [outer_marker] = mints.of["inner"], mints.of["outer"]
    assert (inner["run_id"], outer_marker["run_id"]) == (inner_run, told.history.run_id)
    assert outer_marker["interrupt_id"] == activity_id(told.history.run_id, Position.parse("agent/1/node@1#1"))
    assert inner["interrupt_id"].startswith("i-")
    assert inner["minted_at"] > outer_marker["minted_at"]


def test_turns_of_a_thread_have_ids_of_their_own(durable: Stage, path: Path) -> None:
    """The same place in another run is another question."""
    thread = durable.thread()
    make = two_paths(lambda _: path.build())
    ids = set()
    for _ in range(2):
        out = durable.play(make, {"messages": []}, thread)
        ids.add(asked(out)[0].value["interrupt_id"])
        durable.answer(make, out, "yes", thread)
    assert len(ids) == 2


def test_the_frontier_has_the_name(durable: Stage, path: Path) -> None:
    """People see the interrupt's name and its value, not the node's name; an answer that does not fit its schema is refused."""
    thread, run = durable.thread(), durable.bench.new_run()
    make = two_paths(lambda _: path.build(interrupt_id="i-1", response_schema={"enum": ["this", "that"]}))

    async def look() -> Any:
        async with DurableClient(durable.bench.uri, database=durable.bench.database) as client:
            return (await client.get_run(run)).frontier

    out = durable.play(make, {"messages": []}, thread, run=run)
    [entry] = durable.bench.call(look()).entries
    assert (entry.name, entry.value["type"]) == (("approval", "interrupt") if path is INTERRUPT else ("ask_user", "ask_user"))
    assert entry.value["interrupt_id"] == "i-1"
    assert entry.response_schema == {"enum": ["this", "that"]}
    with pytest.raises(InvalidAnswer):
        durable.answer(make, out, "neither", thread)
    assert durable.answer(make, out, "that", thread)[path.response]["response"] == "that"


def test_a_question_with_a_deadline(durable: Stage, path: Path) -> None:
    """Nobody answers in time: the run goes on with the default, None too; without one it fails."""
    at_once: dict[str, Any] = {"expires_in": timedelta(milliseconds=1)}
    for default in ({"approved": False}, None):
        thread = durable.thread()
        make = two_paths(lambda _, default=default: path.build(default=default, **at_once))
        out = durable.play(make, {"messages": []}, thread)
        assert len(asked(out)) == 1
        assert _went_on(durable, make, thread)[path.response]["response"] == default
    thread = durable.thread()
    make = two_paths(lambda _: path.build(**at_once))
    durable.play(make, {"messages": []}, thread)
    with pytest.raises(InterruptExpired):
        _went_on(durable, make, thread)


def _went_on(durable: Stage, make: Any, thread: str) -> Any:
    while asked(out := durable.play(make, None, thread)):
        pass  # the server's clock has not passed the deadline yet
    return out


@pytest.mark.parametrize("at", [2, Position(("agent", "1", "first"), 1, "2")], ids=["behind the tool", "before the tool"])
def test_a_fork(bench: Bench, at: int | Position) -> None:
    """A fork replays the markers that its origin recorded, with their ids and their run: it routes as the origin did, and asks the rest anew."""
    mints, ledger = Mints(), Ledger()
    make = _minting(mints)
    told = bench.complete(make, {"messages": []}, "async", ledger, say=_say)
    origin, fork = told.history.run_id, bench.new_run()

    async def forked() -> None:
        async with DurableClient(bench.uri, database=bench.database) as client:
            await client.fork(origin, at=at if isinstance(at, int) else at.text, new_run_id=fork)

    bench.call(forked())
    config = {"configurable": {"thread_id": fork}}
    out = bench.once(bench.built(make, ledger, "async"), "async", None, config)
    for questions in ("interrupt", "ask_user") if isinstance(at, Position) else ("ask_user",):
        [question] = asked(out)
        assert question.value["type"] == questions
        out = bench.once(bench.built(make, ledger, "async"), "async", Command(resume={question.id: _say(question.value)}), config)
    assert asked(out) == []
    assert out["_ask_user_response"] == told.state["_ask_user_response"]
    for place, markers in mints.of.items():
        assert {each["interrupt_id"] for each in markers} == {markers[0]["interrupt_id"]}, place
        assert {each["run_id"] for each in markers} == {origin}, place
    assert mints.of["tool"][0]["interrupt_id"] == activity_id(origin, Position.parse("agent/1/first@1#2"))


def test_outside_any_run_ids_are_random(path: Path) -> None:
    """In plain code there is nothing to derive from: each marker has an id of its own, and no run."""
    markers = [path.build()[path.pending] for _ in range(3)]
    assert len({each["interrupt_id"] for each in markers}) == 3
    assert {each["run_id"] for each in markers} == {None}
    assert path.build(interrupt_id="mine", run_id="r")[path.pending]["interrupt_id"] == "mine"
