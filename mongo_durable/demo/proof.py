"""What the demo claims, checked: the shop's account of what was done to it against the history in MongoDB."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mongo_durable.demo.shop import EffectLine
from mongo_durable.demo.telling import Process
from mongo_durable.protocol.events import ActivityKind, RunStatus
from mongo_durable.snapshots import RunSnapshot
from mongo_durable.timeline import AttemptLine, Timeline

MODEL = "model"
KILLED_INSIDE = "place_order"
ASKS = "request_approval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Everything that is known after the story.

    Attributes:
        effects: The shop's file.
        is_scripted: The scripted model: then every call of it is in the shop's file, and the whole course is known beforehand.
    """

    snapshot: RunSnapshot
    timeline: Timeline
    effects: Sequence[EffectLine]
    workers: Sequence[Process]
    answered_by: str
    is_scripted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """One effect in the outside world.

    Attributes:
        began: The attempts whose processes ran its body.
        happened: How many times it took effect.
        verdict: What that means, in words.
    """

    effect: str
    key: str
    began: tuple[int, ...]
    happened: int
    is_right: bool
    verdict: str


def proofs(account: Account) -> list[Proof]:
    """One for each activity that the shop knows, in the order in which they first began."""
    found = []
    for effect, key in dict.fromkeys((line.effect, line.key) for line in account.effects):
        mine = [line for line in account.effects if (line.effect, line.key) == (effect, key)]
        began = tuple(line.attempt for line in mine if line.attempt is not None)
        happened = sum(line.attempt is None for line in mine)
        is_as_expected, verdict = _expected(effect, began)
        is_right = is_as_expected and happened == 1
        found.append(Proof(effect=effect, key=key, began=began, happened=happened, is_right=is_right, verdict=verdict if is_right else "WRONG"))
    return found


def _expected(effect: str, began: tuple[int, ...]) -> tuple[bool, str]:
    """Whether the body began as often as it should, and what that means."""
    if effect == ASKS:
        # As in plain LangGraph, what stands before an interrupt() is passed again when the answer comes; what follows it runs once.
        return len(set(began)) == 2, f"asked in attempt {began[0]}; entered again in {began[-1]} to receive the answer" if began else ""
    if effect == KILLED_INSIDE:
        is_right = len(began) == 2 and len(set(began)) == 2
        return is_right, f"killed inside in attempt {began[0]}; run again in {began[-1]} with the same key: one order" if began else ""
    return len(began) == 1, "ran once"


def faults(account: Account) -> list[str]:
    """What is not as claimed; empty if everything is."""
    return [*_end_faults(account), *_process_faults(account), *_effect_faults(account), *_history_faults(account)]


def _end_faults(account: Account) -> list[str]:
    snapshot = account.snapshot
    if snapshot.status != RunStatus.COMPLETED:
        return [f"the run is {snapshot.status}, not completed: {snapshot.error}"]
    numbers = [f"PO-{line.key[-6:].upper()}" for line in account.effects if line.effect == KILLED_INSIDE and line.attempt is None]
    said = last_message(snapshot.output)
    if account.is_scripted and said != f"Bought: standing desk for 480 EUR, order {''.join(numbers[:1])}.":
        return [f"the agent said {said!r} of order {numbers}"]
    return []


def last_message(output: Any) -> str:
    """What the agent said at the end."""
    return str(output["messages"][-1].content)


def _process_faults(account: Account) -> list[str]:
    found = []
    a, b, c = account.workers
    for killed in (a, b):
        if killed.exit_code != -signal.SIGKILL:
            found.append(f"worker {killed.name} ended with {killed.exit_code}, not by SIGKILL")
    if c.exit_code != 0:
        found.append(f"worker {c.name} was told to stop and ended with {c.exit_code}, not 0")
    attempts = account.timeline.attempts
    if len(attempts) != 3:
        return [*found, f"there are {len(attempts)} attempts, not 3"]
    for attempt, worker, ending in zip(attempts, account.workers, ("suspended", None, "completed"), strict=True):
        if worker_of(attempt, account.workers) != worker:
            found.append(f"attempt {attempt.fence} is of {attempt.owner}, not of worker {worker.name} (process {worker.pid})")
        if attempt.ending != ending:
            found.append(f"attempt {attempt.fence} ended as {attempt.ending}, not as {ending}")
    return found


def worker_of(attempt: AttemptLine, workers: Sequence[Process]) -> Process | None:
    """The worker process that made an attempt: an owner's name ends in its process id and a random part."""
    _, pid, _ = attempt.owner.rsplit("-", 2)
    return next((worker for worker in workers if str(worker.pid) == pid), None)


def _effect_faults(account: Account) -> list[str]:
    found = [
        f"{each.effect} {each.key} began in attempts {list(each.began)} and took effect {each.happened} times"
        for each in proofs(account)
        if not each.is_right
    ]
    names = Counter(each.effect for each in proofs(account))
    if names[KILLED_INSIDE] != 1:
        found.append(f"{names[KILLED_INSIDE]} orders, not 1")
    expected = {MODEL: 4, "quote_price": 1, ASKS: 1, KILLED_INSIDE: 1}
    if account.is_scripted and names != expected:
        found.append(f"the effects are {dict(names)}, not {expected}")
    return found


def _history_faults(account: Account) -> list[str]:
    """The history must say exactly what the shop saw, no more and no less."""
    found = []
    history = Counter((line.name, line.activity_id, attempt.fence) for attempt in account.timeline.attempts for line in attempt.executed)
    seen = Counter((line.effect, line.key, line.attempt) for line in account.effects if line.attempt is not None)
    if not account.is_scripted:  # another model does not tell the shop of its calls
        history = Counter({each: number for each, number in history.items() if each[0] != MODEL})
    for each in history.keys() | seen.keys():
        is_same = history[each] == seen[each] if each[0] != ASKS else bool(history[each]) == bool(seen[each])
        if not is_same:
            found.append(f"{each[0]} {each[1]} in attempt {each[2]}: started {history[each]} times by the history, {seen[each]} times by the shop")
    twice = [key for key, number in Counter(_model_calls(account)).items() if number > 1]
    if twice:
        found.append(f"model calls were made again: {', '.join(twice)}")
    frontiers = account.timeline.frontiers
    if len(frontiers) != 1 or frontiers[0].status != "resolved" or frontiers[0].resolved_by != account.answered_by:
        found.append(
            f"expected one frontier, answered by {account.answered_by}; found {[(each.status.value, each.resolved_by) for each in frontiers]}"
        )
    return found


def _model_calls(account: Account) -> list[str]:
    return [line.activity_id for attempt in account.timeline.attempts for line in attempt.executed if line.kind == ActivityKind.LLM]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCalls:
    """Calls of the model.

    Attributes:
        made: By the model's own count; None where the model does not count.
        recorded: With an outcome in the history.
        spared: Times that an attempt found an outcome recorded, and did not call.
    """

    made: int | None
    recorded: int
    spared: int


def model_calls(account: Account) -> ModelCalls:
    """How often the model was called, and how often it was not."""
    attempts = account.timeline.attempts
    made = sum(line.effect == MODEL and line.attempt is not None for line in account.effects)
    recorded = {line.activity_id for attempt in attempts for line in attempt.executed if line.kind == ActivityKind.LLM and line.outcome}
    spared = sum(line.kind == ActivityKind.LLM for attempt in attempts for line in attempt.recorded)
    return ModelCalls(made=made if account.is_scripted else None, recorded=len(recorded), spared=spared)
