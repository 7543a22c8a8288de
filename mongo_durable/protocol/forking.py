"""Forking: the part of a history that a new run starts with.

The new run replays that part and runs the rest anew. An activity that had not finished at the cut is run anew, whole. A fork at a question starts
suspended on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mongo_durable.errors import RunConflict
from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.events import ENDS, OUTCOMES, Event, EventType
from mongo_durable.protocol.history import History
from mongo_durable.protocol.identity import Position, activity_id
from mongo_durable.protocol.memory import MemoryEntry


def prefix(events: Sequence[Event], at: int | Position, new_run_id: str) -> list[Event]:
    """The events of a new run that starts as the one of `events` did.

    Args:
        at: A root step: everything up to its seal is kept. The position of an activity: everything before its start. The position of a question:
            everything before the answers of its frontier.

    Raises:
        RunConflict: The history has no such place.
    """
    kept = list(events[: _cut(events, at)])
    unfinished = _unfinished(kept)
    return _readdressed([event for event in kept if not _belongs_to(event, unfinished)], new_run_id)


def saved_memory(run_id: str, events: Sequence[Event]) -> list[MemoryEntry]:
    """The entries of the conversation that the transactions of these events had saved."""
    history = History(run_id)
    saved: list[MemoryEntry] = []
    for event in events:
        if event.type is EventType.ACTIVITIES_SUSPENDED or event.type in ENDS:
            saved += history.unsaved
        history.apply(event)
    return saved


def _cut(events: Sequence[Event], at: int | Position) -> int:
    for index, event in enumerate(events):
        if isinstance(at, int):
            if event.type is EventType.STEP_COMMITTED and event.data["step"] == at:
                return index + 1
        elif event.type is EventType.ACTIVITY_STARTED and event.position == at:
            return index
        elif event.type is EventType.ACTIVITIES_SUSPENDED and at.text in (entry["position"] for entry in event.data["entries"]):
            return index + 1
    what = f"sealed step {at}" if isinstance(at, int) else f"activity or question at {at}"
    raise RunConflict(f"run {events[0].run_id} has no {what}: choose one from its history", run_id=events[0].run_id)


def _unfinished(events: Sequence[Event]) -> dict[str, int]:
    """Seq of each start, by position, that has neither an outcome nor a suspension behind it."""
    ended: set[str] = set()
    unfinished: dict[str, int] = {}
    for event in reversed(events):
        if event.type is EventType.ACTIVITIES_SUSPENDED:
            for entry in event.data["entries"]:
                ended.update(each.text for each in Position.parse(entry["position"]).enclosing())
        elif event.position is not None and event.type in OUTCOMES:
            ended.add(event.position.text)
        elif event.position is not None and event.position.text not in ended:
            unfinished[event.position.text] = event.seq
    return unfinished


def _belongs_to(event: Event, unfinished: Mapping[str, int]) -> bool:
    """Whether `event` is of an unfinished activity, or of one inside it, since its start."""
    if event.position is None:
        return False
    around = (event.position, *event.position.enclosing())
    return any(unfinished.get(each.text, event.seq + 1) <= event.seq for each in around)


def _readdressed(events: Iterable[Event], run_id: str) -> list[Event]:
    """The events as those of another run: activity ids derive from the run."""
    new_ids: dict[str, str] = {}
    addressed: list[Event] = []
    for seq, event in enumerate(events, start=1):
        data: dict[str, Any] = dict(event.data)
        if event.type is EventType.RUN_SUBMITTED:
            data.setdefault("origin", event.run_id)  # recorded values hold ids that derive from it, and the replay has to derive the same
        elif event.type is EventType.ACTIVITIES_SUSPENDED:
            for entry in data["entries"]:
                new_ids[entry["activity_id"]] = activity_id(run_id, Position.parse(entry["position"]))
            data["entries"] = [{**entry, "activity_id": new_ids[entry["activity_id"]]} for entry in data["entries"]]
            data["digest"] = digest([[entry["activity_id"], entry["digest"]] for entry in data["entries"]])
        elif "answers" in data:
            data["answers"] = {new_ids[each]: answer for each, answer in data["answers"].items()}
            if "unanswered" in data:
                data["unanswered"] = [new_ids[each] for each in data["unanswered"]]
        own_id = activity_id(run_id, event.position) if event.position is not None else None
        addressed.append(replace(event, run_id=run_id, seq=seq, activity_id=own_id, data=data))
    return addressed
