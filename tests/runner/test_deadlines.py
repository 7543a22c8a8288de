"""Deadlines of questions and of runs: what happens when nobody answers, and when a run takes too long."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

from mongo_durable import App, DurableClient, Runner
from mongo_durable.engine.resolving import expire
from mongo_durable.errors import ConfigurationError, FrontierExpired, InterruptExpired, RunError
from mongo_durable.protocol.events import EventType
from mongo_durable.store.connection import Endpoint
from tests.engine.workflows import PATIENCE_S, State, one_node, until_known
from tests.runner.fleets import Gate

pytestmark = pytest.mark.usefixtures("sound")

SOON = timedelta(seconds=0.5)
LATER = timedelta(hours=1)
RARELY: dict[str, Any] = {"sweep_interval": timedelta(seconds=600), "lease": timedelta(seconds=60)}
"""A runner whose sweep comes too late to help: what is due has to be known."""


@pytest.fixture
def app(mongo_uri: str, database: str) -> App:
    """A workflow without a graph yet."""
    return App("asks", uri=mongo_uri, database=database)


class Parallel(TypedDict, total=False):
    """What two nodes side by side heard."""

    heard: Annotated[list[Any], operator.add]


def side_by_side(app: App, *nodes: Callable[[Any], Any]) -> App:
    """A graph of nodes that run at once."""

    @app.entrypoint
    def build() -> StateGraph:
        graph = StateGraph(Parallel)
        for number, node in enumerate(nodes):
            graph.add_node(f"n{number}", node)
            graph.add_edge(START, f"n{number}")
        return graph

    return app


async def suspended(client: DurableClient, run_id: str, generation: int) -> Any:
    """Wait until a run asks for the so-manieth time."""

    async def is_there() -> bool:
        return (await client.get_run(run_id)).status == "suspended" and (await client.get_run(run_id)).generation == generation

    await until_known(is_there)
    return (await client.get_run(run_id)).frontier


async def types(client: DurableClient, run_id: str) -> list[str]:
    return [str(event.type) for event in await client.history(run_id)]


@pytest.mark.parametrize("place", ["node", "tool"])
async def test_a_question_past_its_deadline_gets_its_default(client: DurableClient, app: App, place: str) -> None:
    """A question that nobody answers gets its default answer at its deadline, recorded as expired, without waiting for a sweep."""

    async def ask(state: State) -> dict[str, Any]:
        return {"seen": [app.interrupt("approval", {"amount": 7}, expires_in=SOON, default={"approved": False})]}

    @app.tool
    async def approve(amount: int) -> Any:
        """Ask."""
        return app.interrupt("approval", {"amount": amount}, expires_in=SOON, default={"approved": False})

    async def call(state: State) -> dict[str, Any]:
        return {"seen": [await approve.ainvoke({"amount": 7})]}

    one_node(app, ask if place == "node" else call)
    async with Runner([app], **RARELY):
        await client.submit("asks", {"value": 1}, run_id="r")
        frontier = await suspended(client, "r", 1)
        (question,) = frontier.entries
        assert (question.name, question.value, question.default) == ("approval", {"amount": 7}, {"approved": False})
        assert question.expires_at == frontier.expires_at
        assert question.expires_at - frontier.opened_at == SOON
        done = await _ended(client, "r")
    assert done.output["seen"] == [{"approved": False}]
    assert "frontier.expired" in await types(client, "r")
    assert "activities.resolved" not in await types(client, "r")
    with pytest.raises(FrontierExpired):
        await client.resolve("r", {question.activity_id: {"approved": True}})
    closed = await client.frontier("r", 1)
    assert closed is not None
    assert closed.status == "expired"


async def _ended(client: DurableClient, run_id: str) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while not (snapshot := await client.get_run(run_id)).is_ended:  # noqa: ASYNC110 - another process's doing
            await asyncio.sleep(0.02)
    return snapshot


@pytest.mark.parametrize("is_caught", [False, True])
@pytest.mark.parametrize("place", ["node", "tool"])
async def test_a_question_without_a_default_fails_where_it_is_asked(client: DurableClient, app: App, place: str, is_caught: bool) -> None:
    """Without a default, InterruptExpired is raised where the code waits: it can be handled there; else the run fails with it."""

    def ask() -> Any:
        try:
            return app.interrupt("approval", expires_in=SOON)
        except InterruptExpired:
            if not is_caught:
                raise
            return "nobody came"

    @app.tool
    async def approve(amount: int) -> Any:
        """Ask."""
        return ask()

    async def node(state: State) -> dict[str, Any]:
        return {"seen": [ask() if place == "node" else await approve.ainvoke({"amount": 7})]}

    one_node(app, node)
    async with Runner([app], **RARELY):
        await client.submit("asks", {"value": 1}, run_id="r")
        done = await _ended(client, "r")
        history = await client.history("r")
    if is_caught:
        assert done.output["seen"] == ["nobody came"]
    else:
        failed = [event.error for event in history if event.type is EventType.ACTIVITY_FAILED]
        expected = {"type": "mongo_durable.errors.InterruptExpired", "message": f"nobody answered 'approval' within {SOON}", "fields": {}}
        assert failed == ([expected] if place == "tool" else [])  # the tool's failure, like any other
        assert done.status == "failed"
        assert done.error["type"] == "mongo_durable.errors.InterruptExpired"


@pytest.mark.parametrize("is_plain", [False, True])
async def test_what_was_not_due_is_asked_again_and_keeps_its_deadline(client: DurableClient, app: App, is_plain: bool) -> None:
    """Of two questions asked together only the one past its deadline is closed; the other is asked again, in a new frontier, until its own."""
    side_by_side(
        app,
        lambda _: {"heard": [app.interrupt("short", expires_in=SOON, default="none")]},
        lambda _: {"heard": [interrupt("long?") if is_plain else app.interrupt("long", "long?", expires_in=LATER)]},
    )
    async with Runner([app], **RARELY):
        await client.submit("asks", {}, run_id="r")
        first = await suspended(client, "r", 1)
        second = await suspended(client, "r", 2)
        assert [each.value for each in second.entries] == ["long?"]
        before = {each.activity_id: each for each in first.entries}
        (again,) = second.entries
        assert again.activity_id in before
        assert again.expires_at == before[again.activity_id].expires_at
        assert (again.expires_at is None) == is_plain
        await client.resolve("r", {again.activity_id: "yes"})
        done = await _ended(client, "r")
    assert done.output["heard"] == ["none", "yes"]


async def test_tools_side_by_side_expire_one_by_one(client: DurableClient, app: App) -> None:
    """Two tools that ask at once, with a sibling that finished: the due one goes on, the other asks again, the sibling is not run again."""
    ran: list[str] = []

    @app.tool
    async def short(amount: int) -> Any:
        """Ask."""
        return app.interrupt("short", expires_in=SOON, default="none")

    @app.tool
    async def long(amount: int) -> Any:
        """Ask."""
        return app.interrupt("long", expires_in=LATER, default="late")

    @app.tool
    async def quick(amount: int) -> Any:
        """Do."""
        ran.append("quick")
        return "done"

    async def call(tool: Any) -> dict[str, Any]:
        return {"heard": [await tool.ainvoke({"amount": 1})]}

    async def first(_: Any) -> dict[str, Any]:
        return await call(short)

    async def second(_: Any) -> dict[str, Any]:
        return await call(long)

    async def third(_: Any) -> dict[str, Any]:
        return await call(quick)

    side_by_side(app, first, second, third)
    async with Runner([app], **RARELY):
        await client.submit("asks", {}, run_id="r")
        again = await suspended(client, "r", 2)
        assert [each.name for each in again.entries] == ["long"]
        await client.resolve("r", {again.entries[0].activity_id: "answered"})
        done = await _ended(client, "r")
    assert done.output["heard"] == ["none", "answered", "done"]
    assert ran == ["quick"]


async def test_many_runners_expire_a_frontier_once(client: DurableClient, app: App, mongo_uri: str, database: str) -> None:
    """However many processes find a frontier past its deadline, one expires it; an answer at the same time is in or out."""
    one_node(app, lambda _: {"seen": [app.interrupt("approval", expires_in=timedelta(milliseconds=50), default="none")]})
    endpoint = Endpoint(mongo_uri, database)
    for number in range(5):
        out = await app.ainvoke({"value": 1}, run_id=f"r{number}")
        (question,) = out["__interrupt__"]
        await asyncio.sleep(0.03)
        found = await asyncio.gather(
            *(expire(endpoint.connection(), f"r{number}") for _ in range(5)),
            client.resolve(f"r{number}", {question.id: "just in time"}),
            return_exceptions=True,
        )
        *expired, answered = found
        is_answered = not isinstance(answered, BaseException)
        while not is_answered and expired.count(True) == 0:
            expired = [await expire(endpoint.connection(), f"r{number}")]
        assert expired.count(True) + is_answered == 1
        final = await app.ainvoke(None, run_id=f"r{number}")
        assert final["seen"] == ["just in time" if is_answered else "none"]
    await endpoint.aclose()
    await app.aclose()


async def test_a_direct_call_needs_no_runner_to_go_on_after_a_deadline(client: DurableClient, app: App) -> None:
    """Who calls for a run whose question is past its deadline goes on with the default; before that, the question is shown again."""
    one_node(app, lambda _: {"seen": [app.interrupt("approval", expires_in=SOON, default="none")]})
    first = await app.ainvoke({"value": 1}, run_id="r")
    again = await app.ainvoke(None, run_id="r")
    assert again["__interrupt__"] == first["__interrupt__"]
    await asyncio.sleep(SOON.total_seconds())  # by the server's clock there is no event to wait for
    final = await app.ainvoke(None, run_id="r")
    await app.aclose()
    assert final["seen"] == ["none"]
    assert "frontier.expired" in await types(client, "r")


async def test_a_question_before_its_deadline_takes_its_answer(client: DurableClient, app: App) -> None:
    """An answer in time is an answer like any other, checked against its schema; a default that does not fit is refused when it is asked."""
    schema = {"type": "object", "required": ["approved"]}
    one_node(app, lambda _: {"seen": [app.interrupt("approval", response_schema=schema, expires_in=LATER, default={"approved": False})]})
    out = await app.ainvoke({"value": 1}, {"configurable": {"thread_id": "t"}})
    final = await app.ainvoke(Command(resume={out["__interrupt__"][0].id: {"approved": True}}), {"configurable": {"thread_id": "t"}})
    assert final["seen"] == [{"approved": True}]
    await app.aclose()
    with pytest.raises(ConfigurationError, match="does not fit"):
        app.interrupt("approval", response_schema=schema, expires_in=LATER, default={})
    with pytest.raises(ConfigurationError, match="no deadline"):
        app.interrupt("approval", default={})
    with pytest.raises(ConfigurationError, match="passed already"):
        app.interrupt("approval", expires_in=timedelta())


@pytest.mark.parametrize("state", ["pending", "running", "suspended"])
async def test_a_run_past_its_deadline_fails_in_any_state(client: DurableClient, app: App, state: str) -> None:
    """A run that has not ended at its deadline fails with RunDeadlineExceeded, whether it waits, is executed or asks; its late outcome is refused."""
    gate = Gate()

    async def node(given: State) -> dict[str, Any]:
        if state == "suspended":
            return {"seen": [interrupt("may I?")]}
        return await gate.node(given)

    one_node(app, node)
    async with Runner([app], **RARELY):
        if state == "pending":
            await client.submit("asks", {"value": 1}, run_id="r", deadline=SOON, version="2")
        else:
            await client.submit("asks", {"value": 1}, run_id="r", deadline=SOON)
        done = await _ended(client, "r")
    assert done.status == "failed"
    assert done.error["type"] == "RunDeadlineExceeded"
    assert gate.now == 0
    with pytest.raises(RunError, match="deadline has passed"):
        await client.retry("r")
    if state == "suspended":
        closed = await client.frontier("r", 1)
        assert closed is not None
        assert closed.status == "expired"
        with pytest.raises(FrontierExpired):
            await client.resolve("r", {closed.entries[0].activity_id: "yes"})


async def test_a_run_that_ends_in_time_is_left_alone(client: DurableClient, app: App) -> None:
    """A deadline that passes after the end changes nothing."""
    one_node(app, lambda _: {})
    async with Runner([app], sweep_interval=timedelta(seconds=0.1)):
        handle = await client.submit("asks", {"value": 1}, run_id="r", deadline=SOON)
        assert (await handle.wait(PATIENCE_S)).status == "completed"
        await client.submit("asks", {"value": 1}, run_id="later", available_at=timedelta(seconds=1))
        await _ended(client, "later")
    assert (await client.get_run("r")).status == "completed"
