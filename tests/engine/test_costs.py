"""What each thing costs: the commands that are sent for it, which do not depend on the machine.

A second in which a runner has nothing to do is in `tests/runner/test_counts.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt
from pymongo import AsyncMongoClient

from mongo_durable import App, DurableClient
from mongo_durable.store import failpoints
from mongo_durable.store.failpoints import FailPoint
from tests.engine.workflows import CONFIG, Commands, Purchase, State, one_node

_WHENEVER_THEY_LIKE = frozenset({"getMore", "hello", "aggregate"})
"""The change stream's commands."""


def events_of(commands: Commands) -> list[list[str]]:
    """The types of the events of each insert. Seals of steps are left out: one that has waited long enough travels alone."""
    sent = [[event["type"] for event in events if event["type"] != "step.committed"] for events in commands.inserts()]
    return [events for events in sent if events]


def sent_by(commands: Commands) -> Counter[tuple[str, str]]:
    """What was sent, with the transactions that were committed; seals that travel alone, heartbeats and the change stream aside."""
    counted = Counter({key: number for key, number in commands.counted().items() if key[0] not in _WHENEVER_THEY_LIKE and key[1] != "runners"})
    counted["insert", "activity_events"] = len(events_of(commands))
    if commits := counted.pop(("commitTransaction", "1"), 0):
        counted["commit", ""] = commits
    return counted


def asking(app: App, questions: int) -> App:
    """A workflow that asks so many questions at once."""

    def ask(number: int) -> Any:
        async def node(state: State) -> dict[str, Any]:
            return {"seen": [interrupt(f"may I {number}?")]}

        return node

    graph: StateGraph[Any] = StateGraph(State)
    for number in range(questions):
        graph.add_node(f"ask{number}", ask(number))
        graph.add_edge(START, f"ask{number}")
    app.entrypoint(lambda: graph)
    return app


async def test_what_a_run_costs(new_app: Callable[[], App], commands: Commands) -> None:
    """A run that does nothing is two transactions, and each writes its events with one insert."""
    app = new_app()

    async def node(state: State) -> dict[str, Any]:
        return {"seen": []}

    one_node(app, node).graph()
    await app.ainvoke({"value": 1}, {"configurable": {"thread_id": "first"}})  # what a process does once
    commands.sent.clear()
    await app.ainvoke({"value": 1}, CONFIG, run_id="po-17")
    assert sent_by(commands) == {
        ("findAndModify", "threads"): 2,
        ("findAndModify", "runs"): 2,
        ("update", "thread_states"): 1,
        ("insert", "memory"): 1,
        ("insert", "activity_events"): 2,
        ("commit", ""): 2,
    }
    assert events_of(commands) == [["run.submitted", "attempt.started"], ["run.completed"]]


@pytest.mark.parametrize("questions", [1, 8])
async def test_what_a_suspension_costs(new_app: Callable[[], App], commands: Commands, questions: int) -> None:
    """A suspension is one transaction of the same few writes, however many questions there are."""
    app = asking(new_app(), questions)

    async def look(point: FailPoint) -> None:
        if point is FailPoint.SUSPEND_BEFORE:
            commands.sent.clear()

    failpoints.handler = look
    assert len((await app.ainvoke({"value": 1}, CONFIG))["__interrupt__"]) == questions
    assert sent_by(commands) == {
        ("findAndModify", "runs"): 1,
        ("insert", "frontiers"): 1,
        ("insert", "memory"): 1,
        ("insert", "activity_events"): 1,
        ("commit", ""): 1,
    }
    (frontier,) = commands.of("insert", "frontiers")
    assert [len(each["entries"]) for each in frontier["documents"]] == [questions]
    assert events_of(commands) == [["activities.suspended"]]


@pytest.mark.parametrize("questions", [1, 8])
async def test_what_a_resolution_costs(
    new_app: Callable[[], App], commands: Commands, listened: AsyncMongoClient[Any], database: str, questions: int
) -> None:
    """The answers to a frontier are a read of it and one transaction of the same few writes, however many there are."""
    app = asking(new_app(), questions)
    asked = (await app.ainvoke({"value": 1}, CONFIG, run_id="po-17"))["__interrupt__"]
    async with DurableClient(client=listened, database=database) as client:
        commands.sent.clear()
        await client.resolve("po-17", {each.id: True for each in asked})
    assert sent_by(commands) == {
        ("find", "frontiers"): 1,
        ("findAndModify", "runs"): 1,
        ("update", "frontiers"): 1,
        ("insert", "resolutions"): 1,
        ("insert", "activity_events"): 1,
        ("commit", ""): 1,
    }
    assert events_of(commands) == [["activities.resolved"]]


async def test_what_an_effect_costs(new_app: Callable[[], App], commands: Commands) -> None:
    """A tool call is two inserts, a model call at most two: nobody waits for its start (I4)."""
    purchase = Purchase(new_app())
    await purchase.app.ainvoke({"value": 1}, CONFIG, run_id="po-17")
    of = {
        kind: [[event["type"] for event in events if event.get("kind") == kind] for events in commands.inserts()]
        for kind in ("TOOL", "LLM", "ACTIVITY")
    }
    assert [each for each in of["TOOL"] if each] == [["activity.started"], ["activity.completed"]]
    assert [kind for each in of["LLM"] for kind in each] == ["activity.started", "activity.completed"]
    assert len([each for each in of["ACTIVITY"] if each]) == 20
    # Nothing of the run's head is written for an effect: its turn at submission, its end.
    assert commands.counted()["findAndModify", "runs"] == 2
    assert commands.counted()["update", "runs"] == 0


async def test_what_a_claim_costs(new_app: Callable[[], App], commands: Commands, operator: DurableClient) -> None:
    """A claim is one compare-and-set of the head, one read of the history, which the attempt does not repeat, and one insert."""
    app = new_app()

    async def node(state: State) -> dict[str, Any]:
        return {"seen": []}

    one_node(app, node).graph()
    await operator.submit("replayed", {"value": 1}, thread_id="desk", run_id="po-17")
    await app.ainvoke({"value": 1}, {"configurable": {"thread_id": "other"}})  # so that the process has its lease
    commands.sent.clear()
    claimed: Counter[tuple[str, str]] = Counter()

    async def look(point: FailPoint) -> None:
        if point is FailPoint.CLAIM_HEAD_BEFORE:
            commands.sent.clear()
        if point is FailPoint.CLAIM_EVENT_AFTER:
            claimed.update(sent_by(commands))

    failpoints.handler = look
    await app.ainvoke(None, CONFIG, run_id="po-17")
    assert claimed == {("findAndModify", "runs"): 1, ("find", "activity_events"): 1, ("insert", "activity_events"): 1}
    assert commands.counted()["find", "activity_events"] == 1


async def test_what_an_answer_costs_until_its_node_goes_on(new_app: Callable[[], App], commands: Commands, operator: DurableClient) -> None:
    """In the process that executes the run, an answer is one read, one transaction that begins the attempt too, and one read of the history."""
    app = new_app()

    async def node(state: State) -> dict[str, Any]:
        answer = interrupt("may I?")
        sent.append(sent_by(commands))
        return {"seen": [answer]}

    sent: list[Counter[tuple[str, str]]] = []
    one_node(app, node)
    await app.ainvoke({"value": 1}, CONFIG, run_id="po-17")
    commands.sent.clear()
    assert (await app.ainvoke(Command(resume="yes"), CONFIG))["seen"] == ["yes"]
    (until_then,) = sent
    assert until_then == {
        ("findAndModify", "runs"): 1,
        ("update", "frontiers"): 1,
        ("insert", "resolutions"): 1,
        ("insert", "activity_events"): 1,
        ("find", "activity_events"): 1,
        ("commit", ""): 1,
    }
    assert len(commands.of("aggregate", "threads")) == 1
    started = [event.fence for event in await operator.history("po-17") if event.type == "attempt.started"]
    assert started == [1, 2]
