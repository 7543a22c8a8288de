"""Histories for the protocol's tests, told in the protocol's verbs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mongo_durable.protocol.events import ActivityKind, Event, EventType
from mongo_durable.protocol.frontier import FrontierEntry, frontier_digest, frontier_entry
from mongo_durable.protocol.history import History, fold
from mongo_durable.protocol.identity import Position, activity_id
from mongo_durable.protocol.replay import step_digest

RUN = "run-1"


def at(text: str) -> Position:
    """A position by its text, without the root."""
    return Position.parse(f"agent/1/{text}")


def asks(text: str, question: Any = "?") -> FrontierEntry:
    """An interrupt at a position."""
    return frontier_entry(RUN, at(text), ActivityKind.INTERRUPT, "ask", question)


class Story:
    """Events of one run, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.fence = 0
        self.generation = 0
        self.entries: tuple[FrontierEntry, ...] = ()
        self.happens(EventType.RUN_SUBMITTED)

    def happens(self, event_type: EventType, **fields: Any) -> Story:
        self.events.append(Event(run_id=RUN, seq=len(self.events) + 1, fence=self.fence, type=event_type, **fields))
        return self

    def attempt(self) -> Story:
        self.fence += 1
        return self.happens(EventType.ATTEMPT_STARTED)

    def starts(self, text: str, kind: ActivityKind = ActivityKind.TOOL, name: str = "tool", digest: str = "d", **data: Any) -> Story:
        return self.happens(EventType.ACTIVITY_STARTED, position=at(text), kind=kind, name=name, input_digest=digest, data=data)

    def completes(self, text: str, value: Any = 1) -> Story:
        return self.happens(EventType.ACTIVITY_COMPLETED, position=at(text), value=value)

    def seals(self, step: int, *positions: str) -> Story:
        digest = step_digest(at(text).text for text in positions)
        return self.happens(EventType.STEP_COMMITTED, data={"step": step, "activities": len(positions), "digest": digest})

    def suspends(self, *entries: FrontierEntry) -> Story:
        self.generation += 1
        self.entries = entries
        listed = [
            {"activity_id": entry.activity_id, "position": entry.position.text, "kind": "INTERRUPT", "name": entry.name, "digest": entry.digest}
            for entry in entries
        ]
        data = {"generation": self.generation, "digest": frontier_digest(entries), "entries": listed}
        return self.happens(EventType.ACTIVITIES_SUSPENDED, data=data)

    def resolves(self, answers: Mapping[str, Any] | None = None, *, event_type: EventType = EventType.ACTIVITIES_RESOLVED) -> Story:
        given = answers if answers is not None else {entry.position.text.removeprefix("agent/1/"): "yes" for entry in self.entries}
        by_id = {activity_id(RUN, at(text)): answer for text, answer in given.items()}
        return self.happens(event_type, data={"generation": self.generation, "answers": by_id})

    def expires(self, answers: Mapping[str, Any], *, unanswered: Sequence[str] = ()) -> Story:
        by_id = {activity_id(RUN, at(text)): answer for text, answer in answers.items()}
        data = {"generation": self.generation, "answers": by_id, "unanswered": [activity_id(RUN, at(text)) for text in unanswered]}
        return self.happens(EventType.FRONTIER_EXPIRED, data=data)

    def history(self) -> History:
        return fold(RUN, self.events)
