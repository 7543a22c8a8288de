"""Durable timers: nobody sits a long wait out, and it ends once."""

from __future__ import annotations

import asyncio
import operator
import threading
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypedDict

import pymongo
import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt

from mongo_durable import App, DurableClient, Runner
from mongo_durable.errors import ConfigurationError, UnsupportedGraph
from mongo_durable.protocol.events import ActivityKind
from tests.engine.workflows import PATIENCE_S, State, one_node, until, until_known
from tests.runner.test_deadlines import RARELY, _ended, side_by_side, suspended

pytestmark = pytest.mark.usefixtures("sound")

LONG_S = 3.0
"""Longer than what is waited out in the process."""


@pytest.fixture
def app(mongo_uri: str, database: str) -> App:
    """A workflow without a graph yet."""
    return App("sleeps", uri=mongo_uri, database=database)


async def asleep(client: DurableClient, runner: Runner) -> None:
    """Wait until the run `r` sleeps and its runner has nothing to do."""

    async def is_asleep() -> bool:
        return (await client.get_run("r")).status == "ready" and not runner.running

    await until_known(is_asleep)


class Diary:
    """A node that does something before and after a sleep, and what ran."""

    def __init__(self, app: App, **when: Any) -> None:
        self.ran: list[str] = []

        @app.activity
        async def note(what: str) -> str:
            self.ran.append(what)
            return what

        async def node(state: State) -> dict[str, Any]:
            await note("before")
            await app.sleep(**when)
            return {"seen": [await note("after")]}

        one_node(app, node)


async def test_a_long_sleep_holds_no_process(client: DurableClient, app: App) -> None:
    """While a run sleeps, no runner has it; it goes on when the time has come, with two attempts, each effect once, and fires once."""
    diary = Diary(app, seconds=LONG_S)
    async with Runner([app], **RARELY) as runner:
        await client.submit("sleeps", {"value": 1}, run_id="r")
        await asleep(client, runner)
        sleeping = await client.get_run("r")
        assert sleeping.waits_for is not None
        assert "not to go on before" in sleeping.waits_for
        done = await _ended(client, "r")
    assert diary.ran == ["before", "after"]
    history = await client.history("r")
    timer = [event for event in history if event.kind is ActivityKind.TIMER or event.name == "sleep"]
    assert [str(event.type) for event in timer] == ["activity.started", "activity.completed"]
    assert done.attempt == 2
    until_ = timer[0].data["until"]
    assert sleeping.available_at is not None
    assert abs(sleeping.available_at - until_) < timedelta(milliseconds=2)
    assert done.ended_at is not None
    assert done.ended_at >= until_


async def test_a_short_sleep_is_waited_out(client: DurableClient, app: App) -> None:
    """A sleep of less than two seconds costs no new attempt."""
    diary = Diary(app, seconds=0.3)
    async with Runner([app], **RARELY):
        await client.submit("sleeps", {"value": 1}, run_id="r")
        done = await _ended(client, "r")
    assert (done.attempt, diary.ran) == (1, ["before", "after"])
    assert done.ended_at - done.submitted_at >= timedelta(seconds=0.3)


async def test_a_sleep_survives_every_process(client: DurableClient, app: App, mongo_uri: str, database: str) -> None:
    """The process that set the timer is gone; another one fires it, at the time that was recorded, whatever its own code computes now."""
    Diary(app, seconds=LONG_S)
    async with Runner([app], **RARELY) as runner:
        await client.submit("sleeps", {"value": 1}, run_id="r")
        await asleep(client, runner)
    other = App("sleeps", uri=mongo_uri, database=database)
    diary = Diary(other, until=datetime.now(UTC) + timedelta(days=1))
    async with Runner([other], **RARELY):
        done = await _ended(client, "r")
    assert (done.status, diary.ran) == ("completed", ["after"])


async def test_until_a_time_that_has_passed_fires_at_once(client: DurableClient, app: App) -> None:
    """A time in the past is no wait at all, and is recorded like any other."""
    Diary(app, until=datetime(2000, 1, 1, tzinfo=UTC))
    out = await app.ainvoke({"value": 1}, run_id="r")
    await app.aclose()
    assert out["seen"] == ["after"]
    assert (await client.get_run("r")).attempt == 1


@pytest.mark.parametrize("colour", ["ainvoke", "invoke", "astream", "stream"])
def test_a_caller_waits_through_the_sleep(mongo_uri: str, database: str, colour: str) -> None:
    """Who calls the app directly gets the result after the sleep, in every colour, and a stream goes on where it stopped."""
    app = App("sleeps", uri=mongo_uri, database=database)

    async def before(state: State) -> dict[str, Any]:
        return {"seen": ["before"]}

    async def nap_async(state: State) -> dict[str, Any]:
        await app.sleep(seconds=2.5)
        return {"seen": ["after"]}

    def nap(state: State) -> dict[str, Any]:
        app.sleep(seconds=2.5)
        return {"seen": ["after"]}

    @app.entrypoint
    def build() -> StateGraph:
        graph = StateGraph(State)
        graph.add_node("before", before if colour.startswith("a") else lambda _: {"seen": ["before"]})
        graph.add_node("nap", nap_async if colour.startswith("a") else nap)
        graph.add_edge(START, "before")
        graph.add_edge("before", "nap")
        return graph

    async def calls() -> Any:
        if colour == "ainvoke":
            found = (await app.ainvoke({"value": 1}, run_id="r"))["seen"]
        else:
            found = [chunk async for chunk in app.astream({"value": 1}, run_id="r", stream_mode="updates")]
        await app.aclose()
        return found

    if colour.startswith("a"):
        found = asyncio.run(calls())
    elif colour == "invoke":
        found = app.invoke({"value": 1}, run_id="r")["seen"]
    else:
        found = list(app.stream({"value": 1}, run_id="r", stream_mode="updates"))
    assert found == (["after"] if "invoke" in colour else [{"before": {"seen": ["before"]}}, {"nap": {"seen": ["after"]}}])


async def test_a_sync_node_sleeps_without_a_thread(client: DurableClient, mongo_uri: str, database: str) -> None:
    """A runner's synchronous graph gives its thread back while it sleeps."""
    app = App("sleeps", uri=mongo_uri, database=database, sync=True)
    inside: list[int] = []

    def node(state: State) -> dict[str, Any]:
        inside.append(threading.get_ident())
        try:
            app.sleep(seconds=LONG_S)
        finally:
            inside.pop()
        return {"seen": ["after"]}

    one_node(app, node)
    async with Runner([app], **RARELY) as runner:
        await client.submit("sleeps", {"value": 1}, run_id="r")
        await asleep(client, runner)
        assert not inside
        assert (await _ended(client, "r")).output["seen"] == ["after"]


async def test_a_timer_beside_a_question_waits_for_its_answer(client: DurableClient, app: App) -> None:
    """A sleeping branch beside one that asks: the question is open at once; after the answer and the time both go on, each thing once."""
    ran: list[str] = []

    @app.activity
    async def note(what: str) -> str:
        ran.append(what)
        return what

    async def sleeper(_: Any) -> dict[str, Any]:
        await app.sleep(seconds=LONG_S)
        await note("woke")
        return {"heard": [interrupt("and now?")]}

    async def asker(_: Any) -> dict[str, Any]:
        return {"heard": [interrupt("first?")]}

    side_by_side(app, sleeper, asker)
    async with Runner([app], **RARELY):
        await client.submit("sleeps", {}, run_id="r")
        first = await suspended(client, "r", 1)
        assert [each.value for each in first.entries] == ["first?"]
        await client.resolve("r", {first.entries[0].activity_id: "one"})
        second = await suspended(client, "r", 2)
        assert [each.value for each in second.entries] == ["and now?"]
        await client.resolve("r", {second.entries[0].activity_id: "two"})
        done = await _ended(client, "r")
    assert sorted(done.output["heard"]) == ["one", "two"]
    assert ran == ["woke"]


async def test_timers_side_by_side_and_in_sequence(client: DurableClient, app: App) -> None:
    """Parallel timers wait at the same time, timers in a loop one after the other, and a replay waits for none of them again."""

    class Log(TypedDict, total=False):
        heard: Annotated[list[Any], operator.add]

    async def loop(_: Any) -> dict[str, Any]:
        for _number in range(3):
            await app.sleep(seconds=0.2)
        return {"heard": ["loop"]}

    async def long(_: Any) -> dict[str, Any]:
        await app.sleep(seconds=LONG_S)
        return {"heard": ["long"]}

    side_by_side(app, loop, long, long)
    async with Runner([app], **RARELY):
        await client.submit("sleeps", {}, run_id="r")
        done = await _ended(client, "r")
    assert sorted(done.output["heard"]) == ["long", "long", "loop"]
    assert done.ended_at - done.submitted_at < timedelta(seconds=2 * LONG_S)
    fired = [event for event in await client.history("r") if event.name == "sleep" and event.type == "activity.completed"]
    assert len(fired) == 5


async def test_a_sleeping_run_can_be_cancelled(client: DurableClient, app: App) -> None:
    """Cancel reaches a run that sleeps; it never wakes."""
    diary = Diary(app, seconds=LONG_S)
    async with Runner([app], **RARELY) as runner:
        await client.submit("sleeps", {"value": 1}, run_id="r")
        await asleep(client, runner)
        assert (await client.cancel("r")).status == "cancelled"
        await client.submit("sleeps", {"value": 1}, run_id="witness", available_at=timedelta(seconds=LONG_S))
        await until(lambda: diary.ran.count("before") == 2)
    assert diary.ran == ["before", "before"]


async def test_where_a_timer_cannot_be_is_refused(app: App, mongo_uri: str, database: str) -> None:
    """A sleep inside a tool or activity is refused, naming what to do; wrong arguments are too; outside a run it is a plain sleep."""

    @app.activity
    async def nap() -> None:
        await app.sleep(seconds=10)

    async def node(state: State) -> dict[str, Any]:
        await nap()
        return {}

    one_node(app, node)
    with pytest.raises(UnsupportedGraph, match="call it in the node"):
        await app.ainvoke({"value": 1}, run_id="r")
    await app.aclose()
    for wrong in ({}, {"seconds": 1, "until": datetime.now(UTC)}, {"seconds": -1}, {"until": datetime(2030, 1, 1)}):  # noqa: DTZ001 - refused
        with pytest.raises(ConfigurationError):
            app.sleep(**wrong)
    await app.sleep(seconds=0.001)
    await asyncio.to_thread(app.sleep, seconds=0.001)


async def test_a_timer_set_by_a_clock_that_is_wrong_counts_by_the_server(
    client: DurableClient, app: App, mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall clock of the process that sets a relative timer plays no part in it."""
    from mongo_durable.engine import attempt as engine

    class WrongClock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) - timedelta(hours=1)

    monkeypatch.setattr(engine, "datetime", WrongClock)
    Diary(app, seconds=0.1)
    async with asyncio.timeout(PATIENCE_S):
        await app.ainvoke({"value": 1}, run_id="r")
    await app.aclose()
    (until_,) = (event.data["until"] for event in await client.history("r") if "until" in event.data)
    with pymongo.MongoClient(mongo_uri, tz_aware=True) as raw:
        claimed_at = raw[database]["runs"].find_one({"_id": "r"})["claimed_at"]
    assert timedelta(seconds=0.1) <= until_ - claimed_at < timedelta(seconds=30)
