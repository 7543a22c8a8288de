"""Replay decisions: what to do when the code reaches something, given the history.

Pure: each function takes the history and what the code did, and returns what is to be done or raises `NondeterminismError`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mongo_durable.errors import NondeterminismError
from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.events import ActivityKind, Event, EventType
from mongo_durable.protocol.history import History, RecordedActivity, RecordedFrontier
from mongo_durable.protocol.identity import Position
from mongo_durable.protocol.parts import first_difference

_REMEDY = "Run it with the code that started it, or make the change a new workflow version"

UNKNOWN_OUTCOME = "unknown_outcome"
"""Name of the frontier entry that asks whether an effect happened."""


@dataclass(frozen=True, slots=True)
class RunBody:
    """The body may run. `is_recorded`: its start stands in the history already, so nothing is written before."""

    is_recorded: bool


@dataclass(frozen=True, slots=True)
class ReturnOutcome:
    """The recorded outcome is the result; the body does not run."""

    outcome: Event


@dataclass(frozen=True, slots=True)
class StayPending:
    """The activity has questions in a frontier that this replay has not reached yet: it pends on them again, without running and without a write.

    This also holds for a finished activity: otherwise a tool that asked, was answered and completed would return at once, and the recorded frontier
    could not be matched (I8).
    """

    frontier: RecordedFrontier
    positions: tuple[Position, ...]


@dataclass(frozen=True, slots=True)
class DecideUnknown:
    """A process died inside the body, or just before its outcome was recorded. The activity's `on_unknown_outcome` policy decides.

    Attributes:
        question: Where a frontier entry that asks a person would stand.
        is_retried: An operator has let the run go on since, so failing again would lead nowhere: a person is asked.
    """

    question: Position
    is_retried: bool = False


@dataclass(frozen=True, slots=True)
class TakeVerdict:
    """A person said what happened to an effect whose outcome was unknown."""

    verdict: Any


StartDecision = RunBody | ReturnOutcome | StayPending | DecideUnknown | TakeVerdict


def decide_start(
    history: History,
    position: Position,
    kind: ActivityKind,
    name: str,
    input_digest: str,
    *,
    fence: int,
    consumed: int,
    parts: Sequence[str] = (),
) -> StartDecision:
    """What to do with the activity that the code reached at `position`.

    Args:
        fence: The attempt that asks.
        consumed: How many recorded frontiers this replay has passed.
        parts: Short digests of the messages of a model call.

    Raises:
        NondeterminismError: The history has another kind, name or input there.
    """
    recorded = history.activities.get(position.text)
    if recorded is None:
        return RunBody(is_recorded=False)
    if (recorded.kind, recorded.name, recorded.input_digest) != (kind, name, input_digest):
        raise _another_activity(history, recorded, kind, name, input_digest, parts)
    for frontier in history.frontiers[consumed:]:
        if mine := _entries_inside(frontier, position):
            return StayPending(frontier, mine)
    if recorded.outcome is not None:
        return ReturnOutcome(recorded.outcome)
    if recorded.started_fence == fence:
        return RunBody(is_recorded=True)
    asked = 0
    suspended: RecordedFrontier | None = None
    for frontier in history.frontiers[:consumed]:
        if mine := _entries_inside(frontier, position):
            suspended = frontier
            asked += any(_is_verdict(position, entry) for entry in mine)
    if suspended is None or suspended.seq < recorded.started_seq:
        return DecideUnknown(position.inside(f"?{asked + 1}"), is_retried=history.retried_seq > recorded.started_seq)
    for entry in _entries_inside(suspended, position):
        if _is_verdict(position, entry):
            if not suspended.is_closed(entry):
                return DecideUnknown(entry)  # the frontier expired for another question's sake: this one is asked again
            verdict = suspended.answer(entry)
            if isinstance(verdict, Mapping) and verdict.get("verdict") == "fail" and history.retried_seq > suspended.seq:
                return DecideUnknown(position.inside(f"?{asked + 1}"), is_retried=True)
            return TakeVerdict(verdict)
    return RunBody(is_recorded=False)


def _is_verdict(position: Position, entry: Position) -> bool:
    return entry.path == position.body_path and entry.ordinal.startswith("?")


def _entries_inside(frontier: RecordedFrontier, position: Position) -> tuple[Position, ...]:
    return tuple(entry for entry in frontier.entries if position.encloses(entry))


def _another_activity(
    history: History, recorded: RecordedActivity, kind: ActivityKind, name: str, input_digest: str, parts: Sequence[str]
) -> NondeterminismError:
    is_input = (recorded.kind, recorded.name) == (kind, name)
    difference = first_difference(recorded.parts, parts) if is_input and kind is ActivityKind.LLM else None
    if is_input:
        what = difference or ("tools or options of the call differ" if kind is ActivityKind.LLM else "the input is another one")
    else:
        what = f"the code reached {kind} {name!r}, the history has {recorded.kind} {recorded.name!r}"
    code_version = history.code_versions.get(recorded.started_fence)
    return NondeterminismError(
        f"{kind} {name!r} at {recorded.position} differs from the history: {what}. {_REMEDY} (recorded by {code_version or 'unknown code'})",
        position=recorded.position.text,
        expected={
            "kind": str(recorded.kind),
            "name": recorded.name,
            "input_digest": recorded.input_digest,
            "messages": len(recorded.parts),
            "code_version": code_version,
        },
        found={"kind": str(kind), "name": name, "input_digest": input_digest, "messages": len(parts), "difference": what},
    )


def choose_ordinal(
    history: History,
    path: tuple[str, ...],
    step: int,
    next_number: int,
    used: Collection[str],
    is_overlapping: bool,
    kind: ActivityKind,
    name: str,
    input_digest: str,
) -> str:
    """The ordinal of the effect that a body starts now.

    Effects that follow one another take the numbers in order. Effects that overlap after an await start in random order, so they are matched to
    recorded ones by kind, name and input, and new ones take the next free number. Overlapping effects with equal input are interchangeable.

    Args:
        next_number: One more than the effects that this execution of the body has started.
        used: Ordinals that this execution of the body has taken.
        is_overlapping: Whether another effect of this body is running now.
    """
    ordinal = str(next_number)
    is_matched = is_overlapping or (path, step) in history.overlapped
    if not is_matched and ordinal not in used:
        return ordinal
    for text in history.by_body.get((path, step), ()):
        recorded = history.activities[text]
        if recorded.position.ordinal in used or not recorded.position.ordinal.isdigit():
            continue
        if (recorded.kind, recorded.name, recorded.input_digest) == (kind, name, input_digest):
            return recorded.position.ordinal
    number = 1
    while str(number) in used or Position(path, step, str(number)).text in history.activities:
        number += 1
    return str(number)


@dataclass(frozen=True, slots=True)
class OpenFrontier:
    """The history has no frontier here: the run suspends on a new one."""


@dataclass(frozen=True, slots=True)
class ConsumeFrontier:
    """The next recorded frontier is this one: each answer goes to its interrupt, by position.

    Of an expired frontier only what was due has an answer (or UNANSWERED); the rest pends on.
    """

    answers: Mapping[Position, Any]


def check_frontier(recorded: RecordedFrontier, found: Mapping[Position, str]) -> None:
    """Whether the activities that pend now are exactly those of a recorded frontier (I8).

    Args:
        found: Digest of each pending entry, by position.

    Raises:
        NondeterminismError: They are others.
    """
    if dict(found) == recorded.entries:
        return
    differing = sorted(
        (position for position in found.keys() | recorded.entries.keys() if found.get(position) != recorded.entries.get(position)),
        key=lambda position: position.sort_key,
    )
    raise NondeterminismError(
        f"the code suspended on other questions than frontier {recorded.generation} of the history; first at {differing[0]}. {_REMEDY}",
        position=differing[0].text,
        expected={"generation": recorded.generation, "positions": sorted(position.text for position in recorded.entries)},
        found={"positions": sorted(position.text for position in found)},
    )


def match_frontier(history: History, consumed: int, found: Mapping[Position, str]) -> OpenFrontier | ConsumeFrontier:
    """What the activities that pend now, at rest, mean for the replay (I8: in event order, the exact set).

    Args:
        found: Digest of each pending entry, by position.

    Raises:
        NondeterminismError: The history has another frontier here.
    """
    if consumed == len(history.frontiers):
        return OpenFrontier()
    recorded = history.frontiers[consumed]
    check_frontier(recorded, found)
    if recorded.answers is None:
        raise NondeterminismError(
            f"frontier {recorded.generation} has no answers yet, but an attempt runs",
            position=next(iter(recorded.entries)).text,
            expected="a resolved or expired frontier",
            found="an open one",
        )
    return ConsumeFrontier({position: recorded.answer(position) for position in recorded.entries if recorded.is_closed(position)})


@dataclass(frozen=True, slots=True)
class SetTimer:
    """The timer is new: it is to be recorded."""


@dataclass(frozen=True, slots=True)
class AwaitTimer:
    """The timer is to fire at `until`; where `is_held`, not before the replay has passed the next recorded frontier."""

    until: datetime
    is_held: bool


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The timer has fired, and that is recorded."""


def decide_timer(history: History, position: Position, name: str, input_digest: str, *, consumed: int) -> SetTimer | AwaitTimer | TimerFired:
    """What to do with the timer that the code reached at `position`.

    A timer that had not fired when a recorded frontier opened does not fire before the replay has passed that frontier: the code behind it could
    ask something, and the frontier would not match (I8).

    Raises:
        NondeterminismError: The history has another kind, name or input there.
    """
    recorded = history.activities.get(position.text)
    if recorded is None:
        return SetTimer()
    if (recorded.kind, recorded.name, recorded.input_digest) != (ActivityKind.TIMER, name, input_digest) or recorded.until is None:
        raise _another_activity(history, recorded, ActivityKind.TIMER, name, input_digest, ())
    following = history.frontiers[consumed] if consumed < len(history.frontiers) else None
    if following is not None and recorded.started_seq < following.seq and (recorded.outcome is None or recorded.outcome.seq > following.seq):
        return AwaitTimer(recorded.until, is_held=True)
    return TimerFired() if recorded.outcome is not None else AwaitTimer(recorded.until, is_held=False)


def step_digest(positions: Iterable[str]) -> str:
    """What `step.committed` keeps of the positions of its activities."""
    return digest([*sorted(positions)])


def check_step(history: History, step: int, reached: Collection[str]) -> bool:
    """Whether root step `step` is sealed already; False means that it is to be sealed now.

    Args:
        reached: Positions, as text, of the activities that this attempt reached in that step.

    Raises:
        NondeterminismError: The attempt did not reach exactly the recorded activities.
    """
    recorded = history.by_step.get(step, [])
    if missing := sorted(set(recorded) - set(reached)):
        raise NondeterminismError(
            f"step {step} ended without reaching the recorded activity {missing[0]}. {_REMEDY}",
            position=missing[0],
            expected={"step": step, "activities": len(recorded)},
            found={"step": step, "activities": len(reached)},
        )
    seal = history.steps.get(step)
    if seal is None:
        return False
    if extra := sorted(set(reached) - set(recorded)):
        raise NondeterminismError(
            f"step {step} is sealed in the history, but the code reached {extra[0]}, which it does not have there",
            position=extra[0],
            expected={"step": step, "activities": seal.activities},
            found={"step": step, "activities": len(reached)},
        )
    return True


def check_end(history: History, consumed: int, last_step: int) -> None:
    """Whether a graph that has ended at root step `last_step` has passed everything recorded.

    Raises:
        NondeterminismError: It ended before something that the history has.
    """
    if consumed < len(history.frontiers):
        frontier = history.frontiers[consumed]
        first = min(frontier.entries, key=lambda position: position.sort_key)
        raise NondeterminismError(
            f"the graph ended before frontier {frontier.generation} of the history (first question at {first})",
            position=first.text,
            expected={"generation": frontier.generation},
            found="the end of the graph",
        )
    later = [step for step in (*history.by_step, *history.steps) if step > last_step]
    if later:
        step = max(later)
        first_text = history.by_step.get(step, [f"step {step}"])[0]
        raise NondeterminismError(
            f"the graph ended at step {last_step}, but the history goes on to step {step}",
            position=first_text,
            expected={"step": step},
            found={"step": last_step},
        )


def check_over(history: History, consumed: int, reached: Collection[str], new: Sequence[Position], found: Mapping[Position, str]) -> None:
    """Whether a replay that executes nothing, and has come to rest where the history has no answers for it, has passed everything recorded.

    Args:
        reached: Positions, as text, of what the code has reached.
        new: What the code reached that the history does not have, or of which it has no outcome.
        found: Digest of each entry that pends, by position.

    Raises:
        NondeterminismError: The history goes on otherwise.
    """
    unfinished = [position for position in new if position.text in history.activities]
    unheard = [position for position in new if position.text not in history.activities]
    if not new and consumed == len(history.frontiers) - 1:
        check_frontier(history.frontiers[consumed], found)  # the open one
        return
    if missing := _next_recorded(history, consumed, reached, unfinished, has_ended=bool(unheard) or not new):
        where, what = missing
        first = min(unheard or found or unfinished, key=lambda position: position.sort_key, default=None)
        raise NondeterminismError(
            f"the history goes on with {what}, which the code does not reach: it does something else first, at {first}. {_REMEDY}",
            position=where,
            expected=what,
            found=f"something new at {first}" if first is not None else "nothing",
        )
    if sealed := [position for position in unheard if position.step in history.steps]:
        first = min(sealed, key=lambda position: position.sort_key)
        raise NondeterminismError(
            f"step {first.step} is sealed in the history, but the code reached {first}, which it does not have there. {_REMEDY}",
            position=first.text,
            expected={"step": first.step, "activities": history.steps[first.step].activities},
            found={"step": first.step, "new": first.text},
        )


def _next_recorded(
    history: History, consumed: int, reached: Collection[str], unfinished: Sequence[Position], *, has_ended: bool
) -> tuple[str, str] | None:
    """The first thing of the history that a replay at rest has not passed: where it is, and what. What could follow on an effect of which the history
    has no outcome is not missed: in the same body, or in a later step."""
    missing: list[tuple[int, str, str]] = []
    for texts in history.by_step.values():
        for text in texts:
            recorded = history.activities[text]
            where = recorded.position
            follows = any(where.step > each.step or (where.path, where.step) == (each.path, each.step) for each in unfinished)
            if text not in reached and not follows:
                missing.append((recorded.started_seq, text, f"{recorded.kind} {recorded.name!r}"))
    for frontier in history.frontiers[consumed:]:
        first = min(frontier.entries, key=lambda position: position.sort_key)
        if not any(first.step > each.step for each in unfinished):
            missing.append((frontier.seq, first.text, f"frontier {frontier.generation}"))
    if has_ended and history.end is not None and history.end.type is EventType.RUN_COMPLETED:
        missing.append((history.end.seq, f"step {max(history.steps, default=0)}", "the end of the run"))
    if not missing:
        return None
    _, text, what = min(missing)
    return text, what
