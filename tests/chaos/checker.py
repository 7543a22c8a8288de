"""Judges the end of a chaos run: everything that stands in MongoDB, beside what people were told and what happened in the outside world.

It knows the protocol's words and nothing of how they are kept. Faults of the database itself are named as in `tests.support.invariants`; the others:

end       an accepted run has come to its right end
output    it ends with the right output, and each answer has reached its own question
asked     a question is asked once, whatever happens between it and its answer
ran       an effect runs as often as its policy and people's verdicts allow, once in an attempt, and never in an attempt after its outcome
late      no effect begins after its outcome was recorded elsewhere, or without a lease
I4        a body runs only after its start is committed
I7        a replay writes nothing that stands already
I11       runs of one kind have the same positions
once      what a transactional activity writes is there exactly once if, and only if, the activity is completed
effect    what completed has had its effect
memory    the conversation record has each entry once
told      nobody was told what may never be said
log       no process met what it did not expect
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pymongo

from mongo_durable import DurableClient
from mongo_durable.errors import CorruptHistory
from mongo_durable.protocol.events import OUTCOMES, ActivityKind, EventType, RunStatus
from mongo_durable.protocol.history import History
from mongo_durable.store.documents import event_from
from tests.chaos import outside
from tests.chaos.outside import BEGUN, HAPPENED, Line
from tests.chaos.people import Told
from tests.chaos.weather import Pause
from tests.chaos.workload import MAY_RUN_AGAIN, TRANSACTIONAL, TRIED_AGAIN, Order, expected, items_asked, lines_of, turns_of
from tests.support import invariants
from tests.support.invariants import Snapshot

Document = dict[str, Any]

_BETWEEN_CHECK_AND_BODY_S = 0.25
"""How long the way from the last look at the lease to the body's first line may take on a busy machine."""
_AFTER_STANDING_STILL_S = 1.0
"""A process that stood still on that way may begin the body when it goes on, for this long: no library can prevent it, an idempotency key can."""


@dataclass(slots=True, kw_only=True)
class Story:
    """All that is known at the end.

    Attributes:
        outputs: Of completed runs, decoded.
        ledger: What transactional activities wrote.
        rows: What idempotent tools wrote.
        memory: Ids of the conversation record's entries, by run.
        wrong: Workers that ended by themselves.
        log: What the workers' loggers said.
    """

    snapshot: Snapshot
    told: Told
    outputs: dict[str, Any]
    ledger: list[Document]
    rows: dict[str, Document]
    memory: dict[str, list[str]]
    lines: list[Line]
    pauses: list[Pause] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    log: list[Document] = field(default_factory=list)


async def gather(uri: str, database: str, told: Told, effects: Path, **known: Any) -> Story:
    """Read everything."""
    with pymongo.MongoClient(uri) as client:
        snapshot = invariants.read(client, database)
        memory = defaultdict(list)
        for each in client[database]["memory"].find({}, {"run_id": 1}):
            memory[each["run_id"]].append(each["_id"])
        ledger = list(client[database]["ledger"].find())
        rows = {each["_id"]: each for each in client[database]["rows"].find()}
    outputs = {}
    async with DurableClient(uri, database=database) as durable:
        for run_id, head in snapshot.runs.items():
            if head["status"] == RunStatus.COMPLETED:
                outputs[run_id] = (await durable.get_run(run_id)).output
    lines = list(outside.read(effects))
    return Story(snapshot=snapshot, told=told, outputs=outputs, ledger=ledger, rows=rows, memory=dict(memory), lines=lines, **known)


def faults(story: Story) -> Iterator[str]:
    """Everything that is wrong, one text a fault, each starting with its name."""
    yield from (f"told {each}" for each in story.told.wrong)
    yield from (f"log {each}" for each in story.wrong)
    yield from (f"log worker {each['pid']}, {each['logger']}: {each['text']}" for each in story.log if each["level"] in ("ERROR", "CRITICAL"))
    yield from invariants.faults(story.snapshot, story.told.promises)
    for order in story.told.accepted.values():
        yield from _faults_of_order(story, order)
    for run_id, events in story.snapshot.events.items():
        yield from _faults_of_replay(run_id, events)
    yield from _faults_of_positions(story)
    yield from faults_of_effects(story, activities(story.snapshot))
    yield from _faults_of_transactions(story)


def _faults_of_order(story: Story, order: Order) -> Iterator[str]:
    run_id = order.run_id
    head = story.snapshot.runs.get(run_id)
    if head is None:
        yield f"end {run_id}: accepted, and not there"
        return
    if head["status"] == RunStatus.CANCELLED and run_id in story.told.called_off:
        return
    if head["status"] != RunStatus.COMPLETED:
        yield f"end {run_id}: {head['status']}, {head['error']}"
        return
    asked: Counter[str] = Counter()
    words: dict[str, str] = {}
    answers = {each["generation"]: each["answers"] for each in story.snapshot.resolutions.get(run_id, [])}
    for frontier in story.snapshot.frontiers.get(run_id, []):
        for entry in frontier["entries"]:
            if entry["name"] == "unknown_outcome":
                continue
            asked[entry["value"]["ask"]] += 1
            words[entry["value"]["ask"]] = answers.get(frontier["generation"], {}).get(entry["activity_id"], {}).get("word")
    if asked != Counter(items_asked(order)):
        yield f"asked {run_id}: {dict(asked)}"
        return
    output = story.outputs[run_id]
    found, wanted = lines_of(order, output), expected(order, words)
    if found != wanted:
        yield f"output {run_id}: {found}, not {wanted}"
    if order.workflow == "desk":
        thread = [each for each in story.snapshot.runs.values() if each["thread_id"] == head["thread_id"] and each["status"] == RunStatus.COMPLETED]
        turns = [each["_id"] for each in sorted(thread, key=lambda each: int(each["turn"])) if each["turn"] <= head["turn"]]
        if turns_of(output) != turns:
            yield f"output {run_id}: it remembers the turns {turns_of(output)}, not {turns}"
    yield from _faults_of_memory(story, run_id)


def _faults_of_memory(story: Story, run_id: str) -> Iterator[str]:
    history = History(run_id)
    wanted = []
    for document in story.snapshot.events.get(run_id, []):
        known = len(history.unsaved)
        try:
            history.apply(event_from(document))
        except CorruptHistory:
            return  # that is found already
        wanted += [f"{run_id}/{entry.seq:08}/{entry.activity_id or ''}" for entry in history.unsaved[known:]]
    if sorted(story.memory.get(run_id, [])) != sorted(wanted):
        yield f"memory {run_id}: {sorted(set(story.memory.get(run_id, [])) ^ set(wanted))}"


def _faults_of_replay(run_id: str, events: list[Document]) -> Iterator[str]:
    finished: set[str] = set()
    sealed: set[int] = set()
    for each in events:
        activity_id = each.get("activity_id")
        if each["type"] == EventType.ACTIVITY_STARTED and activity_id in finished:
            yield f"I7 {run_id}: event {each['seq']} starts {activity_id}, which is finished"
        elif each["type"] in OUTCOMES:
            finished.add(str(activity_id))
        elif each["type"] == EventType.STEP_COMMITTED:
            if each["step"] in sealed:
                yield f"I7 {run_id}: event {each['seq']} seals step {each['step']} again"
            sealed.add(each["step"])


def _faults_of_positions(story: Story) -> Iterator[str]:
    known: dict[str, tuple[str, dict[str, tuple[Any, ...]]]] = {}
    for order in story.told.accepted.values():
        if order.run_id not in story.outputs:
            continue
        found: dict[str, tuple[Any, ...]] = {}
        for each in story.snapshot.events[order.run_id]:
            if each["type"] == EventType.ACTIVITY_STARTED:
                is_model = each["kind"] == ActivityKind.LLM  # its input names the run
                found[each["position"]] = (each["kind"], each["name"], None if is_model else each["input_digest"])
            elif each["type"] == EventType.ACTIVITIES_SUSPENDED:
                found |= {entry["position"]: (entry["kind"], entry["name"]) for entry in each["entries"] if entry["name"] != "unknown_outcome"}
        first, structure = known.setdefault(order.kind, (order.run_id, found))
        if found != structure:
            differing = sorted(each for each in found.keys() | structure.keys() if found.get(each) != structure.get(each))
            yield f"I11 {order.run_id}: other positions than {first}, of the same kind: {differing}"


@dataclass(slots=True)
class Activity:
    """What the history says of one activity.

    Attributes:
        fences: Of the attempts that recorded a start.
        outcome: Its terminal event.
        reruns: How often people said that it is to run again.
    """

    fences: set[int] = field(default_factory=set)
    outcome: Document | None = None
    reruns: int = 0


def activities(snapshot: Snapshot) -> dict[str, Activity]:
    """What the histories say of every activity, by its id."""
    found: dict[str, Activity] = defaultdict(Activity)
    for run_id, events in snapshot.events.items():
        asked_about = {
            entry["activity_id"]: entry["value"]["idempotency_key"]
            for frontier in snapshot.frontiers.get(run_id, [])
            for entry in frontier["entries"]
            if entry["name"] == "unknown_outcome"
        }
        for each in events:
            if each["type"] == EventType.ACTIVITY_STARTED:
                found[each["activity_id"]].fences.add(each["fence"])
            elif each["type"] in OUTCOMES:
                found[each["activity_id"]].outcome = each
            elif each["type"] == EventType.ACTIVITIES_RESOLVED:
                for activity_id, given in each["answers"].items():
                    if activity_id in asked_about and given["verdict"] == "rerun":
                        found[asked_about[activity_id]].reruns += 1
    return found


def faults_of_effects(story: Story, known: Mapping[str, Activity]) -> Iterator[str]:
    """What the outside world has seen, beside what the history says."""
    begun: dict[str, list[Line]] = defaultdict(list)
    happened: Counter[str] = Counter()
    for line in story.lines:
        if line.moment == BEGUN:
            begun[line.key].append(line)
        elif line.moment == HAPPENED:
            happened[line.key] += 1
    for key, lines in begun.items():
        name, run_id, activity = lines[0].name, lines[0].run_id, known.get(key, Activity())
        what = f"{run_id}: {name} {key}"
        fences = Counter(line.fence for line in lines)
        if name != "model" and (missing := sorted(set(fences) - activity.fences)):
            yield f"I4 {what} began in attempts {missing}, whose start is not recorded"
        if name not in TRIED_AGAIN and (twice := [fence for fence, number in fences.items() if number > 1]):
            yield f"ran {what} began more than once in attempts {twice}"
        if name not in MAY_RUN_AGAIN | TRANSACTIONAL and len(fences) > 1 + activity.reruns:
            yield f"ran {what} began in attempts {sorted(fences)}; people let it run again {activity.reruns} times"
        outcome = activity.outcome
        if outcome is not None and (after := [fence for fence in fences if fence > outcome["fence"]]):
            yield f"ran {what} began in attempts {after}, after its outcome in attempt {outcome['fence']}"
        if name not in TRANSACTIONAL:  # whose effect is its commit
            for line in lines:
                yield from _late(story, what, line, outcome)
    for key, activity in known.items():
        outcome = activity.outcome
        if (
            outcome is None
            or outcome["type"] != EventType.ACTIVITY_COMPLETED
            or outcome["kind"] == ActivityKind.LLM
            or outcome["name"] in TRANSACTIONAL
        ):
            continue
        if not happened[key]:
            yield f"effect {outcome['run_id']}: {outcome['name']} {key} is completed, and has not happened"
        if outcome["name"] == "row" and key not in story.rows:
            yield f"effect {outcome['run_id']}: row {key} is completed, and not there"


def _late(story: Story, what: str, line: Line, outcome: Document | None) -> Iterator[str]:
    if is_excused(story, line):
        return
    if line.lease_left < -_BETWEEN_CHECK_AND_BODY_S:
        yield f"late {what} began in attempt {line.fence}, whose lease was over for {-line.lease_left:.3f} s"
    recorded_at = None if outcome is None else outcome["at"].timestamp()
    if recorded_at is not None and outcome is not None and outcome["fence"] != line.fence and line.at > recorded_at + _BETWEEN_CHECK_AND_BODY_S:
        yield f"late {what} began in attempt {line.fence}, {line.at - recorded_at:.3f} s after its outcome in attempt {outcome['fence']}"


def is_excused(story: Story, line: Line) -> bool:
    """Whether the process stood still just before this line."""
    return any(pause.pid == line.pid and pause.stopped_at < line.at < pause.went_on_at + _AFTER_STANDING_STILL_S for pause in story.pauses)


def _faults_of_transactions(story: Story) -> Iterator[str]:
    written = Counter(each["key"] for each in story.ledger)
    completed = {
        each["activity_id"]: each["run_id"]
        for events in story.snapshot.events.values()
        for each in events
        if each["type"] == EventType.ACTIVITY_COMPLETED and each["name"] in TRANSACTIONAL
    }
    for key in written.keys() | completed.keys():
        if written[key] != (key in completed):
            yield f"once {completed.get(key)}: {key} is {'' if key in completed else 'not '}completed, and there {written[key]} times"
