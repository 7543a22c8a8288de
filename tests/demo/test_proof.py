"""The demo's own check: it must see every way in which a claim could be false."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from langchain_core.messages import AIMessage

from mongo_durable.demo.proof import Account, faults, model_calls
from mongo_durable.demo.shop import EffectLine
from mongo_durable.demo.telling import Process
from mongo_durable.protocol.events import ActivityKind, Event, EventType
from mongo_durable.protocol.identity import Position
from mongo_durable.snapshots import RunSnapshot
from mongo_durable.timeline import timeline

# What each attempt starts, and whether its outcome is recorded there.
_STARTED = {
    1: [("model", "m1", True), ("quote_price", "quote1", True), ("model", "m2", True), ("request_approval", "approve", False)],
    2: [("request_approval", "approve", True), ("model", "m3", True), ("place_order", "order1", False)],
    3: [("place_order", "order1", True), ("model", "m4", True)],
}


def _account() -> Account:
    events: list[Event] = []
    effects: list[EffectLine] = []

    def add(event_type: EventType, fence: int, **fields: Any) -> None:
        events.append(Event(run_id="r", seq=len(events) + 1, fence=fence, type=event_type, at=datetime.now(UTC), **fields))

    add(EventType.RUN_SUBMITTED, 0)
    for fence, started in _STARTED.items():
        add(EventType.ATTEMPT_STARTED, fence, data={"owner": f"host-{fence}-abc"})
        for name, key, is_finished in started:
            kind = ActivityKind.LLM if name == "model" else ActivityKind.TOOL
            activity: dict[str, Any] = {"activity_id": key, "name": name, "kind": kind, "position": Position.parse(f"agent/1/{key}@1#1")}
            add(EventType.ACTIVITY_STARTED, fence, **activity)
            effects.append(EffectLine(effect=name, key=key, attempt=fence))
            if is_finished:
                add(EventType.ACTIVITY_COMPLETED, fence, **activity)
        if fence == 1:
            add(EventType.ACTIVITIES_SUSPENDED, fence, data={"generation": 1, "entries": [{"activity_id": "ask", "name": "request_approval"}]})
            add(EventType.ACTIVITIES_RESOLVED, fence, data={"generation": 1, "answers": {"ask": True}, "resolved_by": "ada", "note": None})
    add(EventType.RUN_COMPLETED, 3)
    effects += [EffectLine(effect=effect, key=key) for effect, key in dict.fromkeys((line.effect, line.key) for line in effects)]
    return Account(
        snapshot=RunSnapshot(
            run_id="r",
            workflow="purchase",
            version="1",
            thread_id="r",
            status="completed",
            generation=1,
            attempt=3,
            output={"messages": [AIMessage("Bought: standing desk for 480 EUR, order PO-ORDER1.")]},
            error=None,
            frontier=None,
            submitted_at=None,
            ended_at=None,
        ),
        timeline=timeline(events),
        effects=effects,
        workers=[
            Process(name="A", pid=1, exit_code=-signal.SIGKILL),
            Process(name="B", pid=2, exit_code=-signal.SIGKILL),
            Process(name="C", pid=3, exit_code=0),
        ],
        answered_by="ada",
        is_scripted=True,
    )


def test_the_story_as_it_should_be_has_no_fault() -> None:
    """What the demo claims is accepted when it is so."""
    account = _account()
    assert faults(account) == []
    calls = model_calls(account)
    assert (calls.made, calls.recorded, calls.spared) == (4, 4, 5)


_FALSE: dict[str, Callable[[Account], Account]] = {
    "a second order": lambda it: replace(it, effects=[*it.effects, EffectLine(effect="place_order", key="order1")]),
    "another order": lambda it: replace(
        it, effects=[*it.effects, EffectLine(effect="place_order", key="order2", attempt=3), EffectLine(effect="place_order", key="order2")]
    ),
    "no order": lambda it: replace(it, effects=[line for line in it.effects if line.effect != "place_order"]),
    "a quote that ran again": lambda it: replace(it, effects=[*it.effects, EffectLine(effect="quote_price", key="quote1", attempt=2)]),
    "a model call that was made again": lambda it: replace(it, effects=[*it.effects, EffectLine(effect="model", key="m1", attempt=3)]),
    "an effect that the history does not know": lambda it: replace(it, effects=[*it.effects, EffectLine(effect="model", key="m9", attempt=3)]),
    "a worker that was not killed": lambda it: replace(it, workers=[it.workers[0], replace(it.workers[1], exit_code=0), it.workers[2]]),
    "a worker that did not drain": lambda it: replace(it, workers=[*it.workers[:2], replace(it.workers[2], exit_code=3)]),
    "one process for two attempts": lambda it: replace(it, workers=[it.workers[0], replace(it.workers[1], pid=3), it.workers[2]]),
    "a run that failed": lambda it: replace(it, snapshot=replace(it.snapshot, status="failed")),
    "another answer of the agent": lambda it: replace(it, snapshot=replace(it.snapshot, output={"messages": [AIMessage("Done.")]})),
    "an answer by somebody else": lambda it: replace(it, answered_by="bob"),
}


@pytest.mark.parametrize("lie", list(_FALSE))
def test_a_false_story_is_found_out(lie: str) -> None:
    """Each claim of the demo fails when it is not so."""
    assert faults(_FALSE[lie](_account()))


def test_a_missing_attempt_is_found_out() -> None:
    """Three attempts means three."""
    account = _account()
    del account.timeline.attempts[2]
    assert faults(account)
