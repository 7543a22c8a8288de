"""A history as people read it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from mongo_durable.protocol.events import ActivityKind, Event, EventType, FrontierStatus
from mongo_durable.protocol.identity import Position
from mongo_durable.timeline import Timeline, timeline

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Writing:
    """A history, one event a second."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.fence = 0
        self.add(EventType.RUN_SUBMITTED)

    def add(self, event_type: EventType, **fields: Any) -> Writing:
        seq = len(self.events) + 1
        at = NOON + timedelta(seconds=seq)
        self.events.append(Event(run_id="r", seq=seq, fence=self.fence, type=event_type, at=at, **fields))
        return self

    def attempt(self) -> Writing:
        self.fence += 1
        return self.add(EventType.ATTEMPT_STARTED, data={"owner": f"host-{self.fence}"})

    def activity(self, name: str, event_type: EventType, **fields: Any) -> Writing:
        position = Position.parse(f"agent/1/{name}@1#1")
        return self.add(event_type, activity_id=f"act_{name}", name=name, kind=ActivityKind.TOOL, position=position, **fields)

    def suspended(self) -> Writing:
        return self.add(EventType.ACTIVITIES_SUSPENDED, data={"generation": 1, "entries": [{"activity_id": "act_q", "name": "q"}]})

    def read(self) -> Timeline:
        return timeline(self.events)


def test_an_attempt_that_died_says_who_went_on() -> None:
    """An attempt without a recorded end names the one that followed; what it finished is found recorded there, what it did not is not."""
    history = Writing().attempt()
    for name, is_finished in (("quote", True), ("order", False)):
        history.activity(name, EventType.ACTIVITY_STARTED)
        if is_finished:
            history.activity(name, EventType.ACTIVITY_COMPLETED, value="10 EUR")
    history.attempt().activity("order", EventType.ACTIVITY_STARTED)
    first, second = history.read().attempts
    assert (first.ending, first.taken_over_by, second.taken_over_by) == (None, 2, None)
    assert [(line.name, line.outcome, line.duration) for line in first.executed] == [
        ("quote", "completed", timedelta(seconds=1)),
        ("order", None, None),
    ]
    assert [(line.name, line.is_executed, line.attempt, line.result) for line in second.recorded] == [("quote", False, 1, "10 EUR")]
    assert [line.name for line in second.executed] == ["order"]


def test_what_a_person_said_of_an_effect_is_not_an_execution() -> None:
    """Where a person said that an effect happened, its outcome stands in the attempt that recorded it, and no body ran there."""
    history = Writing().attempt().activity("order", EventType.ACTIVITY_STARTED).attempt().suspended()
    history.add(EventType.ACTIVITIES_RESOLVED, data={"generation": 1, "answers": {"act_q": {"verdict": "completed"}}, "resolved_by": "ada"})
    history.attempt().activity("order", EventType.ACTIVITY_COMPLETED, value="PO-1")
    (line,) = history.read().attempts[2].executed
    assert (line.is_executed, line.outcome, line.result) == (False, "completed", "PO-1")


def test_a_cancelled_question_is_not_a_cancelled_attempt() -> None:
    """Cancelling a suspended run closes its frontier; the attempt that asked had ended before."""
    history = Writing().attempt().suspended().add(EventType.RUN_CANCELLED, data={"reason": None}).read()
    assert history.attempts[0].ending == "suspended"
    assert (history.frontiers[0].status, history.frontiers[0].answers) == (FrontierStatus.CANCELLED, None)


def test_expired_is_another_word_than_resolved() -> None:
    """A frontier that passed its deadline has its default answers, and nobody's name."""
    history = Writing().attempt().suspended().add(EventType.FRONTIER_EXPIRED, data={"generation": 1, "answers": {"act_q": "no"}}).read()
    frontier = history.frontiers[0]
    assert (frontier.status, frontier.answers, frontier.resolved_by) == (FrontierStatus.EXPIRED, {"act_q": "no"}, None)


def test_a_retried_run_keeps_its_failed_attempt() -> None:
    """After a retry the failed attempt still says that it failed."""
    history = Writing().attempt().add(EventType.RUN_FAILED, error={"type": "ValueError", "message": ""}).add(EventType.RUN_RETRIED)
    history.attempt().add(EventType.RUN_COMPLETED)
    assert [attempt.ending for attempt in history.read().attempts] == ["failed", "completed"]
