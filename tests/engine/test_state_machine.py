"""The engine on the real store, driven at random, against the pure protocol as the model.

A machine has three processes and one run at a time. The run's code is a small program, drawn at the start, that every attempt follows from its
beginning (`Machine.walk`), as a graph would. Beside the database stands the `Model`: the events that must be there, written down before it looks.
What an attempt must answer is asked of the protocol's pure functions over the model's events. After each rule the database must hold exactly the
model's events, the head must say the same as they do, and `tests.support.invariants` must find no fault.

`MONGO_DURABLE_EXAMPLES` says how many machines are tried, new ones each time, and `MONGO_DURABLE_STEPS` how many rules each. Without it the test
tries the same few each time: whether a change passes must not depend on luck.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pymongo
import pytest
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from mongo_durable.engine import attempt as engine
from mongo_durable.engine.process import Process
from mongo_durable.engine.resolving import resolve
from mongo_durable.errors import (
    AttemptOver,
    FrontierExpired,
    IncompleteResolution,
    LeaseLost,
    NondeterminismError,
    ResolutionConflict,
    RunConflict,
    RunError,
    RunNotClaimable,
    RunNotSuspended,
    StaleGeneration,
    Superseded,
    UnknownActivity,
    UnknownOutcome,
)
from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.events import ActivityKind, Event, EventType, FrontierStatus, RunStatus
from mongo_durable.protocol.frontier import frontier_digest, frontier_entry, in_position_order
from mongo_durable.protocol.history import History, fold
from mongo_durable.protocol.identity import Position, activity_id
from mongo_durable.protocol.replay import (
    DecideUnknown,
    OpenFrontier,
    ReturnOutcome,
    RunBody,
    StayPending,
    TakeVerdict,
    check_step,
    decide_start,
    match_frontier,
    step_digest,
)
from mongo_durable.protocol.values import encode
from mongo_durable.store import claims, failpoints, frontiers, runs, schema
from mongo_durable.store.appender import Appender
from mongo_durable.store.claims import Claim
from mongo_durable.store.connection import Endpoint
from mongo_durable.store.documents import Answerer, RunHead, event_from
from mongo_durable.store.failpoints import FailPoint
from mongo_durable.store.heartbeat import Lease, acquire
from mongo_durable.store.runs import Ending, Submission
from tests.support import invariants
from tests.support.invariants import Cancelled, Promise, Received, assert_invariants

EXAMPLES = int(os.environ.get("MONGO_DURABLE_EXAMPLES", "0"))
"""How many new machines; 0: the same 50 each time."""
STEPS = int(os.environ.get("MONGO_DURABLE_STEPS", "25"))

ANSWERS = [{}, None, 0, "", False, [], "yes", {"act_x": 1}, {"type": "approve"}, [1, {"a.b": None}]]
"""Every JSON value is a legal answer."""
LIVE = (RunStatus.PENDING, RunStatus.READY, RunStatus.RUNNING)
A_LONG_LEASE = timedelta(hours=1)


# -- the program ----------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Effect:
    """One effect of a step. A tool may ask `questions` one after the other before it is done."""

    kind: ActivityKind
    on_unknown_outcome: Any
    questions: int
    is_failing: bool


@dataclass(frozen=True, slots=True)
class Step:
    """A root step: effects one after the other, and questions of nodes beside them."""

    effects: tuple[Effect, ...]
    questions: int


EFFECTS = st.builds(
    lambda kind, policy, questions, is_failing: Effect(kind, policy, questions if kind is ActivityKind.TOOL else 0, is_failing),
    st.sampled_from([ActivityKind.TOOL, ActivityKind.TOOL, ActivityKind.LLM, ActivityKind.ACTIVITY]),
    st.sampled_from(["rerun", "suspend", "suspend", "fail"]),
    st.sampled_from([0, 0, 1, 2]),
    st.booleans(),
)
PROGRAMS = st.lists(st.builds(Step, st.lists(EFFECTS, min_size=1, max_size=2).map(tuple), st.sampled_from([0, 0, 1, 2, 3])), min_size=1, max_size=3)


def call_of(step: int, number: int, effect: Effect, name: str = "effect") -> engine.ActivityCall:
    """The call that the code makes for effect `number` of a step."""
    given = encode({"step": step, "number": number})
    return engine.ActivityCall(
        position=Position(("agent", "1", "work"), step, str(number)),
        kind=effect.kind,
        name=name,
        input_digest=digest(given),
        input=given,
        on_unknown_outcome=effect.on_unknown_outcome,
        is_start_awaited=effect.kind is not ActivityKind.LLM,
    )


# -- the world ------------------------------------------------------------------------------------------------------------------------------------


class RunEnded(Exception):
    """An attempt has ended its run."""


class World:
    """What the machines of one test share: the loop, the database, the promises that were made to callers."""

    def __init__(self, uri: str, database: str) -> None:
        self.uri, self.database = uri, database
        self.runner = asyncio.Runner()
        self.client: pymongo.MongoClient[dict[str, Any]] = pymongo.MongoClient(uri, tz_aware=True)
        self.tables = self.client[database]
        self.promises: list[Promise] = []
        self.endpoint = Endpoint(uri, database)

        async def open_connection() -> Any:
            connection = self.endpoint.connection()
            await schema.ensure_schema(connection)
            return connection

        self.connection = self.call(open_connection())

    def call(self, coroutine: Any) -> Any:
        """Await something on the one loop."""
        return self.runner.run(coroutine)

    def close(self) -> None:
        """Close what was opened."""
        self.call(self.endpoint.aclose())
        self.runner.close()
        self.client.close()

    def snapshot(self, run_id: str) -> invariants.Snapshot:
        """What stands of one run, whose thread has its name."""
        tables, found = self.tables, invariants.Snapshot()
        with self.client.start_session(snapshot=True) as session:
            found.runs = {each["_id"]: each for each in tables["runs"].find({"_id": run_id}, session=session)}
            found.events[run_id] = list(tables["activity_events"].find({"run_id": run_id}, session=session).sort("seq", 1))
            found.frontiers[run_id] = list(tables["frontiers"].find({"run_id": run_id}, session=session).sort("generation", 1))
            found.resolutions[run_id] = list(tables["resolutions"].find({"run_id": run_id}, session=session))
            found.threads = {each["_id"]: each for each in tables["threads"].find({"_id": run_id}, session=session)}
        return found


@dataclass(slots=True, eq=False)
class Actor:
    """An attempt, the code that it runs, and what it may know.

    Attributes:
        until: Of the model's events, how many precede its rival's start; None while it is the run's attempt.
        following: What the code does next.
        is_lease_lost: Its process knows that it was declared dead.
    """

    attempt: engine.Attempt
    until: int | None = None
    following: str = ""
    is_lease_lost: bool = False
    walk: Any = None

    @property
    def is_stale(self) -> bool:
        return self.until is not None


@dataclass(slots=True)
class Model:
    """One run as it must be."""

    run_id: str
    program: list[Step]
    events: list[Event] = field(default_factory=list)
    status: RunStatus = RunStatus.PENDING
    fence: int = 0
    generation: int = 0
    owner: str | None = None
    is_past: bool = False
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, event_type: EventType, **fields: Any) -> None:
        """This event must be the next one."""
        where = fields.get("position")
        named = {"activity_id": activity_id(self.run_id, where)} if where is not None else {}
        self.events.append(Event(run_id=self.run_id, seq=len(self.events) + 1, fence=self.fence, type=event_type, **named, **fields))

    def history(self, actor: Actor | None = None) -> History:
        """What the events say; of an actor: those that it can know."""
        return fold(self.run_id, self.events[: actor.until] if actor else self.events)


def comparable(event: Event) -> Event:
    """An event without what only its writer knows: clock and random ids."""
    hidden = ("attempt",) if event.type is EventType.ATTEMPT_STARTED else ("thread_id", "turn", "base_turn", "workflow")
    data = {name: value for name, value in event.data.items() if event.type not in _PARTLY or name not in hidden}
    return replace(event, at=None, data=data)


_PARTLY = (EventType.ATTEMPT_STARTED, EventType.RUN_SUBMITTED)


# -- the machine ----------------------------------------------------------------------------------------------------------------------------------

WHO = st.integers(0, 2)
PICK = st.integers(0, 5)
SAID = st.sampled_from(ANSWERS)
VERDICTS = [{"verdict": "rerun"}, {"verdict": "completed", "result": 7}, {"verdict": "completed", "result": None}, {"verdict": "fail"}]
VERDICT = st.sampled_from(VERDICTS)


class Machine(RuleBasedStateMachine):
    """Three processes and a run; when it has ended for good, another one."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.workflow = f"w-{uuid.uuid4().hex[:12]}"
        self.numbers = itertools.count(1)
        self.actors: list[Actor] = []
        self.dead: set[str] = set()
        self.bodies: Counter[str] = Counter()
        self.model: Model = Model("", [])
        self.processes = self.world.call(self._open())
        self.leases: list[Lease | None] = [None, None, None]

    async def _open(self) -> list[Process]:
        processes = [Process(self.world.endpoint) for _ in range(3)]
        for process in processes:
            # One appender each: a real process's events share flights with nobody else's.
            process._appender = Appender(self.world.connection)
        return processes

    # -- what rules share --

    def do(self, coroutine: Any) -> Any:
        """Await a call, and then everything that is still in the air."""

        async def settled() -> Any:
            try:
                return await coroutine
            finally:
                for actor in self.actors:
                    await actor.attempt._sink.channel.idle.wait()

        return self.world.call(settled())

    def saw(self, what: str) -> None:
        """Keep count of what the examples reach: `pytest --hypothesis-show-statistics` tells."""
        event(what)

    def is_current(self, actor: Actor) -> bool:
        return not actor.is_stale and self.model.status is RunStatus.RUNNING

    def actors_that(self, *following: str) -> list[Actor]:
        return [actor for actor in self.actors if not following or actor.following in following]

    async def lease(self, who: int) -> Lease:
        lease = self.leases[who]
        if lease is None:
            lease = self.leases[who] = await acquire(self.world.connection, A_LONG_LEASE)
        return lease

    async def began(self, who: int, claimed: Claim) -> None:
        """A claim has succeeded: the model has its start, whoever had the run before can write nothing more."""
        model, lease = self.model, await self.lease(who)
        for actor in self.actors:
            if not actor.is_stale:
                actor.until = len(model.events)
        model.fence += 1
        model.status, model.owner = RunStatus.RUNNING, lease.owner
        model.add(EventType.ATTEMPT_STARTED, data={"owner": lease.owner, "code_version": f"code-{who}"})
        assert (claimed.seq, claimed.head.fence) == (len(model.events), model.fence)
        actor = Actor(await engine.Attempt.begin(self.processes[who], lease, claimed))
        actor.walk = self.walk(actor)
        self.actors.append(actor)
        actor.following = await anext(actor.walk)

    def over(self, actor: Actor) -> None:
        self.actors.remove(actor)

    def writes_no_more(self, actor: Actor) -> None:
        """Whatever the code of an attempt that is over does now, it hears why, and nothing is written."""
        with pytest.raises((AttemptOver, UnknownOutcome)):
            self.do(actor.attempt.complete(call_of(1, 1, EFFECT), None))

    # -- the code of a run --

    async def walk(self, actor: Actor) -> AsyncGenerator[str, None]:
        """Follow the program from its beginning, as every attempt does; before each call of the engine, say which."""
        for number, step in enumerate(self.model.program, start=1):
            asking: list[tuple[engine.ActivityCall, Effect]] = []
            pending: dict[Position, engine.Pending] = {}
            calls = [(call_of(number, index, effect), effect) for index, effect in enumerate(step.effects, start=1)]
            for call, effect in calls:
                yield "start"
                found = await self.start(actor, call)
                async for each in self.went_on(actor, call, effect, found, pending):
                    yield each
                if any(call.position.encloses(each) for each in pending):
                    asking.append((call, effect))
            for index in range(step.questions):
                self.ask(Position(("agent", "1", f"ask{index}"), number, "!1"), f"question {index}", pending)
            while pending:
                yield "rest"
                if not await self.rest(actor, pending):
                    return
                pending = {}
                again, asking = asking, []
                for call, effect in again:
                    yield "start"
                    found = await self.start(actor, call)
                    async for each in self.went_on(actor, call, effect, found, pending):
                        yield each
                    if any(call.position.encloses(each) for each in pending):
                        asking.append((call, effect))
            yield "finalize"
            await self.finalize(actor, number, [call.position.text for call, _ in calls])
        yield "end"
        await self.end(actor, EventType.RUN_COMPLETED)

    def ask(self, position: Position, question: str, pending: dict[Position, engine.Pending]) -> None:
        entry = frontier_entry(self.model.run_id, position, ActivityKind.INTERRUPT, "approval", encode(question))
        pending[position] = engine.Pending(entry.digest, entry)

    async def went_on(
        self, actor: Actor, call: engine.ActivityCall, effect: Effect, found: engine.StartResult, pending: dict[Position, engine.Pending]
    ) -> AsyncGenerator[str, None]:
        """What the code does after a start: nothing, pend, run its body to its next question, or record how it ended."""
        match found:
            case engine.Recorded():
                return
            case engine.Pend(questions):
                pending.update(questions)
            case engine.Happened(result):
                yield "record"
                await self.record(actor, call, result, None)
            case engine.Execute():
                answered = sum(each.ordinal.startswith("!") for each in actor.attempt.answers if call.position.encloses(each))
                if answered < effect.questions:
                    self.ask(call.position.inside(f"!{answered + 1}"), f"{call.position} asks {answered + 1}", pending)
                    return
                yield "record"
                error = {"type": "ValueError", "message": f"no {call.position}"} if effect.is_failing else None
                await self.record(actor, call, None if error else encode({"done": call.position.text}), error)

    # -- each call of the engine, beside what the protocol says of it --

    async def written(self, actor: Actor, call: Awaitable[Any]) -> Any:
        """A call that writes and awaits it: refused if another has the run."""
        if not actor.is_stale:
            return await call
        with pytest.raises(Superseded):
            await call
        raise Superseded("as it must be", run_id=self.model.run_id)

    async def start(self, actor: Actor, call: engine.ActivityCall) -> engine.StartResult:
        history, model = self.model.history(actor), self.model
        decision = decide_start(
            history, call.position, call.kind, call.name, call.input_digest, fence=actor.attempt.fence, consumed=actor.attempt.consumed
        )
        if actor.is_stale:
            # It may live in its past until it has to write: `check` sees what got through.
            try:
                return await actor.attempt.start(call)
            except UnknownOutcome:
                return await self.end_with(actor, EventType.RUN_FAILED)
        is_new, verdict = decision == RunBody(is_recorded=False), None
        match decision:
            case DecideUnknown(_, is_retried):
                is_new = call.on_unknown_outcome == "rerun"
                if call.on_unknown_outcome == "fail" and not is_retried:
                    return await self.refused(actor, call)
            case TakeVerdict(verdict):
                is_new = verdict["verdict"] == "rerun"
                if verdict["verdict"] == "fail":
                    return await self.refused(actor, call)
        found = await actor.attempt.start(call)
        if is_new:
            model.add(
                EventType.ACTIVITY_STARTED,
                position=call.position,
                kind=call.kind,
                name=call.name,
                input_digest=call.input_digest,
                value=call.input,
            )
        match decision:
            case StayPending(_, positions):
                assert isinstance(found, engine.Pend)
                assert set(found.pending) == set(positions)
            case ReturnOutcome(outcome):
                assert isinstance(found, engine.Recorded)
                assert comparable(found.outcome) == outcome
                self.saw("an outcome replayed")
            case DecideUnknown(question, _) if not is_new:
                assert isinstance(found, engine.Pend)
                assert set(found.pending) == {question}
                self.saw("an unknown outcome asked")
            case TakeVerdict() if not is_new:
                assert found == engine.Happened(verdict["result"])
                self.saw("a verdict taken")
            case _:
                assert found == engine.Execute()
                await self.body_runs(actor, call)
        return found

    async def refused(self, actor: Actor, call: engine.ActivityCall) -> engine.StartResult:
        with pytest.raises(UnknownOutcome):
            await actor.attempt.start(call)
        self.saw("an unknown outcome failed")
        return await self.end_with(actor, EventType.RUN_FAILED)

    async def body_runs(self, actor: Actor, call: engine.ActivityCall) -> None:
        """A body may run now."""
        text, recorded = call.position.text, self.model.history().activities[call.position.text]
        assert recorded.outcome is None, f"I7: {text} has an outcome and its body runs"
        if call.is_start_awaited:
            found = await self.world.connection.activity_events.find_one({"run_id": self.model.run_id, "seq": recorded.started_seq})
            assert found is not None, f"I4: the body of {text} runs and its start is not committed"
            assert (found["type"], found["position"], found["fence"]) == ("activity.started", text, actor.attempt.fence)
            self.bodies[text] += 1

    async def record(self, actor: Actor, call: engine.ActivityCall, value: Any, error: Mapping[str, Any] | None) -> None:
        if error is None:
            await self.written(actor, actor.attempt.complete(call, value))
            self.model.add(EventType.ACTIVITY_COMPLETED, position=call.position, kind=call.kind, name=call.name, value=value)
        else:
            await self.written(actor, actor.attempt.fail(call, error))
            self.model.add(EventType.ACTIVITY_FAILED, position=call.position, kind=call.kind, name=call.name, error=error)

    async def finalize(self, actor: Actor, step: int, reached: list[str]) -> None:
        is_sealed = check_step(self.model.history(actor), step, reached)
        actor.attempt.finalize_step(step)
        if not actor.is_stale and not is_sealed:
            data = {"step": step, "activities": len(reached), "digest": step_digest(reached)}
            self.model.add(EventType.STEP_COMMITTED, data=data)

    async def rest(self, actor: Actor, pending: dict[Position, engine.Pending]) -> bool:
        """At rest: whether the code goes on."""
        model, history = self.model, self.model.history(actor)
        decision = match_frontier(history, actor.attempt.consumed, {position: each.digest for position, each in pending.items()})
        call = actor.attempt.rest(pending)
        if not isinstance(decision, OpenFrontier):
            assert await call == engine.Answered(decision.answers)
            self.saw("a frontier replayed")
            return True
        found = await self.written(actor, call)
        entries = in_position_order(each.entry for each in pending.values() if each.entry is not None)
        assert isinstance(found, engine.Suspended)
        assert (found.frontier.entries, found.frontier.status) == (entries, FrontierStatus.OPEN)
        model.status, model.owner, model.generation, model.is_past = RunStatus.SUSPENDED, None, model.generation + 1, False
        listed = [
            {"activity_id": each.activity_id, "position": each.position.text, "kind": str(each.kind), "name": each.name, "digest": each.digest}
            for each in entries
        ]
        data = {"generation": model.generation, "digest": frontier_digest(entries), "entries": listed}
        model.add(EventType.ACTIVITIES_SUSPENDED, data=data)
        self.saw("suspended")
        return False

    async def end(self, actor: Actor, kind: EventType) -> None:
        actor.attempt.check_end(len(self.model.program))
        await self.end_with(actor, kind)

    async def end_with(self, actor: Actor, kind: EventType) -> Any:
        output = encode({"ok": True}) if kind is EventType.RUN_COMPLETED else None
        error = None if kind is EventType.RUN_COMPLETED else {"type": "ValueError", "message": str(kind)}
        await self.written(actor, actor.attempt.end(Ending(type=kind, output=output, error=error)))
        self.model.status, self.model.owner = RunStatus(kind.value.removeprefix("run.")), None
        self.model.add(kind, value=output, error=error)
        self.saw(kind.value)
        raise RunEnded

    def advance(self, actor: Actor) -> None:
        """One call of the engine. Whoever has lost the run finds out at the latest when it writes, and hears it ever after."""
        ended: Exception
        try:
            self.do(self.step(actor))
            assert not actor.is_lease_lost, "an attempt goes on without its lease"
            return
        except (Superseded, LeaseLost, StopAsyncIteration, RunEnded) as error:
            ended = error
        self.over(actor)
        if isinstance(ended, AttemptOver):
            assert actor.is_stale or actor.is_lease_lost, ended
            self.writes_no_more(actor)
            self.saw(f"a stale attempt was refused with {type(ended).__name__}")

    # -- rules: the life of a run --

    @initialize(program=PROGRAMS)
    def first(self, program: list[Step]) -> None:
        self.submit(program, 3, False)

    @precondition(lambda self: self.model.status in (RunStatus.COMPLETED, RunStatus.CANCELLED))
    @rule(program=PROGRAMS, who=st.integers(0, 3), is_repeated=st.booleans())
    def submit(self, program: list[Step], who: int, is_repeated: bool) -> None:
        """Accepted once, whoever asks how often; process 3 stands for somebody who does not execute it."""
        self.actors.clear()
        self.bodies.clear()
        model = self.model = Model(f"{self.workflow}-{next(self.numbers)}", program)

        def submission(value: Any) -> Submission:
            return Submission(run_id=model.run_id, workflow=self.workflow, version="1", thread_id=model.run_id, input=encode(value))

        async def submit() -> None:
            owner = (await self.lease(who)).owner if who < 3 else None
            accepted = await runs.submit(self.world.connection, submission(1), owner=owner, code_version=f"code-{who}")
            model.add(EventType.RUN_SUBMITTED, value=1)
            if isinstance(accepted, Claim):
                await self.began(who, accepted)
            assert isinstance(accepted, Claim) == (who < 3)
            if is_repeated:
                again = await runs.submit(self.world.connection, submission(1), owner=owner)
                assert isinstance(again, RunHead)
                assert again.status is model.status
                with pytest.raises(RunConflict):
                    await runs.submit(self.world.connection, submission(2), owner=owner)

        self.do(submit())

    @rule(who=WHO)
    def claim(self, who: int) -> None:
        """Only a run that waits, or whose process is dead, can be claimed."""
        model = self.model
        is_orphaned = model.status is RunStatus.RUNNING and model.owner in self.dead

        async def claim() -> None:
            lease = await self.lease(who)
            dead = await claims.dead_owners(self.world.connection)
            assert (model.owner in dead) == is_orphaned
            found = await claims.claimable(self.world.connection, [(self.workflow, "1")], lease.owner, [model.run_id], [], 9)
            orphans = await claims.claimable(self.world.connection, [(self.workflow, "1")], "nobody", [], dead, 9)
            is_waiting = model.status in (RunStatus.PENDING, RunStatus.READY)
            assert [each.run_id for each in found] == ([model.run_id] if is_waiting else []), "I9"
            assert [each.run_id for each in orphans] == ([model.run_id] if is_waiting or is_orphaned else []), "I9"
            attempted = claims.claim(self.world.connection, model.run_id, lease.owner, dead_owners=dead, code_version=f"code-{who}")
            if is_waiting or is_orphaned:
                await self.began(who, await attempted)
                self.saw("a takeover" if is_orphaned else "a claim")
            else:
                with pytest.raises(RunNotClaimable):
                    await attempted

        self.do(claim())

    @precondition(lambda self: self.actors_that("start"))
    @rule(pick=PICK)
    def start_activity(self, pick: int) -> None:
        """A start is decided by the history, and committed before the body."""
        self._advance_one(pick, "start")

    @precondition(lambda self: self.actors_that("record"))
    @rule(pick=PICK)
    def record_outcome(self, pick: int) -> None:
        """An outcome is recorded once."""
        self._advance_one(pick, "record")

    @precondition(lambda self: self.actors_that("finalize"))
    @rule(pick=PICK)
    def finalize_step(self, pick: int) -> None:
        """A step is sealed once, and compared ever after."""
        self._advance_one(pick, "finalize")

    @precondition(lambda self: self.actors_that("rest"))
    @rule(pick=PICK)
    def come_to_rest(self, pick: int) -> None:
        """A rest is the next recorded frontier, or a new one."""
        self._advance_one(pick, "rest")

    @precondition(lambda self: self.actors_that("end"))
    @rule(pick=PICK)
    def complete_run(self, pick: int) -> None:
        """A run ends once."""
        self._advance_one(pick, "end")

    @precondition(lambda self: self.actors)
    @rule(pick=PICK, calls=st.integers(2, 8))
    def go_on(self, pick: int, calls: int) -> None:
        """Several calls of one attempt."""
        actor = self.actors[pick % len(self.actors)]
        for _ in range(calls):
            if actor in self.actors:
                self.advance(actor)

    def _advance_one(self, pick: int, following: str) -> None:
        ready = self.actors_that(following)
        self.advance(ready[pick % len(ready)])

    @precondition(lambda self: self.actors)
    @rule(pick=PICK)
    def fail_run(self, pick: int) -> None:
        """The code raises: the run fails, if it is still this attempt's."""
        self._end_abruptly(self.actors[pick % len(self.actors)], EventType.RUN_FAILED)

    @precondition(lambda self: any(self.is_current(each) and not each.is_lease_lost for each in self.actors))
    @rule(how=st.sampled_from(["name", "kind", "input", "frontier", "step"]))
    def diverge(self, how: str) -> None:
        """Code that does something else than the history says is found, writes nothing, and hears it ever after (I8 for a frontier)."""
        (actor,) = [each for each in self.actors if self.is_current(each)]
        attempt, history = actor.attempt, self.model.history()

        async def diverge() -> None:
            match how:
                case "frontier":
                    if attempt.consumed == len(history.frontiers):
                        return
                    recorded = history.frontiers[attempt.consumed]
                    first = min(recorded.entries, key=lambda each: each.sort_key)
                    wrong = {each: engine.Pending(known) for each, known in recorded.entries.items() if each != first}
                    await attempt.rest(wrong or {first: engine.Pending("another")})
                case "step":
                    if not (missing := [step for step in history.by_step if not attempt._reached.get(step)]):
                        return
                    attempt.finalize_step(missing[0])
                case _:
                    if not (known := list(history.activities.values())):
                        return
                    call = replace(call_of(known[0].position.step, int(known[0].position.ordinal), EFFECT), kind=known[0].kind)
                    other = {"name": replace(call, name="other"), "kind": replace(call, kind=_ANOTHER[call.kind])}
                    await attempt.start(other.get(how) or replace(call, input_digest="other"))

        found = self.do(_caught(diverge(), NondeterminismError))
        if found is None:
            assert attempt.failure is None
            return
        assert found.run_id == self.model.run_id
        with pytest.raises(NondeterminismError):
            attempt.check()
        self.saw(f"another {how} diverged")
        self._end_abruptly(actor, EventType.RUN_DIVERGED)

    def _end_abruptly(self, actor: Actor, kind: EventType) -> None:
        ended = self.do(_caught(self.end_with(actor, kind), RunEnded, Superseded))
        assert isinstance(ended, Superseded) == actor.is_stale
        self.over(actor)

    @precondition(lambda self: self.model.status.is_end or self.model.generation)
    @rule()
    def retry(self) -> None:
        """Only failed and diverged runs can be retried."""
        model = self.model
        if model.status in (RunStatus.FAILED, RunStatus.DIVERGED):
            self.do(runs.retry(self.world.connection, model.run_id))
            model.status = RunStatus.READY
            model.add(EventType.RUN_RETRIED)
            self.saw("a retry")
        else:
            with pytest.raises(RunError):
                self.do(runs.retry(self.world.connection, model.run_id))

    @rule(is_meant=st.sampled_from([False, False, True]), reason=st.sampled_from([None, "no longer needed"]))
    def cancel(self, is_meant: bool, reason: str | None) -> None:
        """A run is cancelled in any state but an end, with its frontier; its attempt writes nothing more."""
        model = self.model
        if not is_meant and not model.status.is_end:
            return
        before = model.status
        head = self.do(runs.cancel(self.world.connection, model.run_id, reason, "a canceller"))
        if not before.is_end:
            if before is not RunStatus.SUSPENDED:
                for actor in self.actors:
                    actor.until = len(model.events) if actor.until is None else actor.until
                model.fence += 1
                model.add(EventType.ATTEMPT_STARTED, data={"owner": "a canceller", "code_version": None})
            model.status, model.owner = RunStatus.CANCELLED, None
            model.add(EventType.RUN_CANCELLED, data={"reason": reason})
            self.world.promises.append(Cancelled(run_id=model.run_id))
            self.saw(f"cancelled while {before}")
        assert head.status is model.status

    # -- rules: processes --

    @precondition(lambda self: any(lease is not None for lease in self.leases))
    @rule(pick=PICK, how=st.sampled_from(["gone", "paused", "aware"]))
    def crash_some(self, pick: int, how: str) -> None:
        """A process is declared dead, rather one that has an attempt."""
        known = [who for who, lease in enumerate(self.leases) if lease is not None]
        at_work = [who for who in known if any(actor.attempt._sink.lease is self.leases[who] for actor in self.actors)]
        chosen = at_work or known
        self.crash(chosen[pick % len(chosen)], how)

    def crash(self, who: int, how: str) -> None:
        """A process is declared dead without having released anything. It may be gone; or paused, and go on later without knowing; or know."""
        lease, self.leases[who] = self.leases[who], None
        assert lease is not None
        self.dead.add(lease.owner)
        self.world.tables["runners"].update_one({"_id": lease.owner}, {"$set": {"state": "dead"}})
        lease.is_lost = how == "aware"
        for actor in [each for each in self.actors if each.attempt._sink.lease is lease]:
            self.saw(f"a process with an attempt is {how}")
            actor.is_lease_lost = how == "aware"
            if how == "aware":
                self.advance(actor)
            elif how == "gone":
                self.over(actor)

    @precondition(lambda self: self.model.status is RunStatus.RUNNING)
    @rule(who=WHO, calls=st.integers(1, 3))
    def take_over(self, who: int, calls: int) -> None:
        """The run's process pauses, another takes the run over and goes on, and what the first one writes then is refused."""
        (*_, owner) = [index for index, lease in enumerate(self.leases) if lease and lease.owner == self.model.owner] or [None]
        old = [actor for actor in self.actors if self.is_current(actor)]
        if owner is not None:
            self.crash(owner, "paused")
        self.claim(who)
        for _ in range(calls):
            for actor in [each for each in self.actors if self.is_current(each)]:
                self.advance(actor)
            self.check()
            for actor in old:
                if actor in self.actors:
                    self.advance(actor)
            self.check()

    @precondition(lambda self: any(self.is_current(each) and not each.is_lease_lost for each in self.actors_that("start", "record", "finalize")))
    @rule(who=WHO, moment=st.sampled_from(["between the claim's two writes", "in the air during the claim"]))
    def race(self, who: int, moment: str) -> None:
        """A paused process wakes while another claims: its event stands before the claim's, or nowhere, and it knows which."""
        (old,) = [actor for actor in self.actors if self.is_current(actor)]
        for index, lease in enumerate(self.leases):
            if lease is not None and lease.owner == self.model.owner:
                self.crash(index, "paused")
        model, known = self.model, len(self.model.events)
        is_claimed = asyncio.Event()
        went: list[asyncio.Future[Any]] = []

        async def old_goes_on() -> None:
            went.append(asyncio.ensure_future(_caught(self.step(old), Superseded, StopAsyncIteration)))

        async def meet(point: FailPoint) -> None:
            # Held at fail points, so that the order is the one that was drawn: Hypothesis must see the same in a repetition.
            if moment.startswith("between") and point is FailPoint.CLAIM_EVENT_BEFORE and not went:
                await old_goes_on()
                await went[0]
                await old.attempt._sink.channel.idle.wait()
            elif moment.startswith("in the air") and point is FailPoint.CLAIM_HEAD_BEFORE:
                await old_goes_on()
            elif moment.startswith("in the air") and point in (FailPoint.APPEND_BEFORE, FailPoint.END_BEFORE):
                await is_claimed.wait()

        async def claim() -> Claim:
            lease = await self.lease(who)
            dead = await claims.dead_owners(self.world.connection)
            failpoints.handler = meet
            try:
                claimed = await claims.claim(self.world.connection, model.run_id, lease.owner, dead_owners=dead, code_version=f"code-{who}")
                is_claimed.set()
                await went[0]
                await old.attempt._sink.channel.idle.wait()
                return claimed
            finally:
                failpoints.handler = None

        claimed = self.do(claim())
        expected, written = len(model.events) - known, claimed.seq - 1 - known
        if moment.startswith("between"):
            assert written == expected
        else:
            assert written == 0
            del model.events[known:]  # events that nobody awaits were noted when they were sent
            if expected or isinstance(went[0].result(), Superseded):
                assert isinstance(old.attempt.failure or old.attempt._sink.channel.ended, Superseded)
        if went[0].result() is not None:
            self.over(old)
            self.writes_no_more(old)
        self.do(self.began(who, claimed))
        self.saw(f"an event {moment}")

    async def step(self, actor: Actor) -> None:
        """One call of the engine."""
        actor.following = await anext(actor.walk)

    @precondition(lambda self: self.actors)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        """An attempt gives its run back; one that has lost it gives nothing back."""
        actor = self.actors[pick % len(self.actors)]
        try:
            self.do(actor.attempt.release())
        except Superseded:
            assert actor.is_stale
        else:
            if not actor.is_stale:
                self.model.status, self.model.owner = RunStatus.READY, None
                self.saw("released")
        self.over(actor)
        self.writes_no_more(actor)

    # -- rules: answers --

    def right_answers(self, said: Any, verdict: Any) -> dict[str, Any]:
        recorded = self.model.history().frontiers[-1]
        verdicts = {recorded.activity_ids[each] for each in recorded.entries if each.ordinal.startswith("?")}
        return {each: encode(verdict if each in verdicts else said) for each in recorded.activity_ids.values()}

    async def resolve(self, answers: Mapping[str, Any], **pins: Any) -> Any:
        return await resolve(self.world.connection, self.model.run_id, answers, Answerer(by="a person"), **pins)

    def resolved(self, answers: dict[str, Any], event_type: EventType = EventType.ACTIVITIES_RESOLVED) -> None:
        """The frontier has these answers."""
        model = self.model
        data: dict[str, Any] = {"generation": model.generation, "answers": answers}
        if event_type is EventType.ACTIVITIES_RESOLVED:
            data |= {"resolved_by": "a person", "note": None, "channel": "client"}
            model.answers[model.generation] = answers
            self.world.promises.append(Received(run_id=model.run_id, generation=model.generation, answers_digest=digest(answers)))
        else:
            data |= {"unanswered": []}
        model.add(event_type, data=data)
        model.status = RunStatus.READY
        self.saw(event_type.value)

    @precondition(lambda self: self.model.status is RunStatus.SUSPENDED)
    @rule(said=SAID, verdict=VERDICT, how_often=st.integers(1, 2))
    def resolve_right(self, said: Any, verdict: Any, how_often: int) -> None:
        """All answers at once are accepted; the same ones again give the same receipt."""
        answers = self.right_answers(said, verdict)
        if self.model.is_past:
            with pytest.raises(FrontierExpired):
                self.do(self.resolve(answers))
            return
        receipts = [self.do(self.resolve(answers, generation=self.model.generation)) for _ in range(how_often)]
        assert len({receipt.answers_digest for receipt in receipts}) == 1
        assert all(receipt == receipts[0] for receipt in receipts)
        self.resolved(answers)

    @precondition(lambda self: self.model.status is RunStatus.SUSPENDED and not self.model.is_past)
    @rule(texts=st.lists(st.integers(0, 2), min_size=2, max_size=5), verdict=VERDICT)
    def resolve_concurrently(self, texts: list[int], verdict: Any) -> None:
        """Of several people who answer at once, one has their answers stand; those who say the same have the same receipt, the others a conflict."""
        given = [self.right_answers(f"answer {text}", {**verdict, **({"result": text} if "result" in verdict else {})}) for text in texts]

        async def all_at_once() -> list[Any]:
            return await asyncio.gather(*(self.resolve(each) for each in given), return_exceptions=True)

        found = self.do(all_at_once())
        receipts = [each for each in found if not isinstance(each, BaseException)]
        assert receipts
        assert all(receipt == receipts[0] for receipt in receipts)
        for answers, each in zip(given, found, strict=True):
            if digest(answers) == receipts[0].answers_digest:
                assert each == receipts[0]
            else:
                assert isinstance(each, ResolutionConflict)
        self.resolved(next(answers for answers in given if digest(answers) == receipts[0].answers_digest))
        self.saw("several answered at once")

    @precondition(lambda self: self.model.status is RunStatus.SUSPENDED)
    @rule(how=st.sampled_from(["unknown", "incomplete", "more", "generation", "digest"]), said=SAID)
    def resolve_wrong(self, how: str, said: Any) -> None:
        """Other ids, fewer, more, or answers to what the reviewer did not see are refused whole."""
        answers = self.right_answers(said, {"verdict": "rerun"})
        refused: type[Exception] = IncompleteResolution
        pins: dict[str, Any] = {}
        match how:
            case "unknown":
                answers, refused = {"act_unknown": encode(said)}, UnknownActivity
            case "incomplete":
                answers.popitem()
            case "more":
                answers["act_unknown"] = encode(said)
            case _:
                pins, refused = {how: self.model.generation + 1 if how == "generation" else "another"}, StaleGeneration
        with pytest.raises(refused):
            self.do(self.resolve(answers, **pins))

    @precondition(lambda self: self.model.generation and self.model.status is not RunStatus.SUSPENDED)
    @rule(is_same=st.booleans())
    def resolve_again(self, is_same: bool) -> None:
        """A frontier that is closed keeps what it has: the first answers, its expiry, its cancellation."""
        frontier = self.model.history().frontiers[-1]
        first = self.model.answers.get(frontier.generation)
        if first is not None and is_same:
            assert self.do(self.resolve(first)).answers_digest == digest(first)
            return
        other = self.right_answers("another answer", {"verdict": "fail", "reason": "another"})
        closed = {FrontierStatus.RESOLVED: ResolutionConflict, FrontierStatus.EXPIRED: FrontierExpired, FrontierStatus.CANCELLED: RunNotSuspended}
        # A cancelled frontier whose deadline has passed has expired for who answers it: both say that nothing was taken.
        with pytest.raises((closed[frontier.status], FrontierExpired) if frontier.status is FrontierStatus.CANCELLED else closed[frontier.status]):
            self.do(self.resolve(other))

    @precondition(lambda self: self.model.status is RunStatus.SUSPENDED)
    @rule()
    def pass_deadline(self) -> None:
        """The deadline of the open frontier passes."""
        past = datetime(2000, 1, 1, tzinfo=UTC)
        self.world.tables["frontiers"].update_one({"_id": f"{self.model.run_id}/{self.model.generation}"}, {"$set": {"expires_at": past}})
        self.model.is_past = True

    @precondition(lambda self: self.model.generation)
    @rule(count=st.integers(1, 3))
    def expire(self, count: int) -> None:
        """A frontier past its deadline is expired by exactly one process, with the default answers; one that is not stays open."""
        answers = self.right_answers("the default", {"verdict": "rerun"})

        async def all_at_once() -> list[bool]:
            frontier = await frontiers.current(self.world.connection, self.model.run_id)
            return list(await asyncio.gather(*(frontiers.expire(self.world.connection, frontier, answers) for _ in range(count))))

        won = self.do(all_at_once())
        is_due = self.model.status is RunStatus.SUSPENDED and self.model.is_past
        assert won.count(True) == is_due
        if is_due:
            self.resolved(answers, EventType.FRONTIER_EXPIRED)

    # -- what always holds --

    @invariant()
    def check(self) -> None:
        """The database holds exactly what the model says, and nothing that a correct writer would not write."""
        model = self.model
        if not model.run_id:
            return
        snapshot = self.world.snapshot(model.run_id)
        head, stored = snapshot.runs[model.run_id], [event_from(each) for each in snapshot.events[model.run_id]]
        assert [comparable(each) for each in stored] == [comparable(each) for each in model.events]
        found, expected = fold(model.run_id, stored), model.history()
        for name in ("status", "generation", "fence", "frontiers", "steps", "attempts"):
            assert getattr(found, name) == getattr(expected, name)
        told = (RunStatus(head["status"]), head["fence"], head["generation"], head["owner"])
        assert told == (model.status, model.fence, model.generation, model.owner)
        faults = list(invariants.faults(snapshot))
        assert not faults, faults
        starts = Counter(each.position.text for each in stored if each.type is EventType.ACTIVITY_STARTED and each.position)
        assert all(count <= starts[text] for text, count in self.bodies.items()), "I4"

    def teardown(self) -> None:
        """In the end a sweep brings the run to its end, whatever had happened: each effect once, and every other attempt refused."""
        try:
            if self.model.run_id:
                self._bring_to_rest()
        finally:
            self.world.call(self._close())

    async def _close(self) -> None:
        for process in self.processes:
            await process.appender.aclose()

    def _bring_to_rest(self) -> None:
        model = self.model
        for _ in range(60):
            if model.status in (RunStatus.COMPLETED, RunStatus.CANCELLED):
                break
            if model.status in (RunStatus.FAILED, RunStatus.DIVERGED):
                self.retry()  # an effect whose outcome is unknown and whose policy is to fail is asked about after a retry
            elif model.status is RunStatus.SUSPENDED and model.is_past:
                self.expire(1)
            elif model.status is RunStatus.SUSPENDED:
                self.resolve_right("at last", {"verdict": "rerun"}, 1)
            else:
                if model.status is RunStatus.RUNNING:
                    for who, lease in enumerate(self.leases):
                        if lease is not None and lease.owner == model.owner:
                            self.crash(who, "paused")
                self.claim(0)
                while current := [each for each in self.actors if self.is_current(each)]:
                    self.advance(current[0])
        else:
            raise AssertionError(f"the run does not come to an end: {model.status}")
        for actor in list(self.actors):
            while actor in self.actors:
                self.advance(actor)
        self.check()
        if model.status is RunStatus.COMPLETED:
            recorded = model.history().activities
            assert len(recorded) == sum(len(step.effects) for step in model.program)
            assert all(each.outcome is not None for each in recorded.values())


async def _caught(call: Awaitable[Any], *kinds: type[Exception]) -> Any:
    """The error of one of these kinds that a call raises, or None."""
    try:
        await call
    except kinds as error:
        return error
    return None


EFFECT = Effect(ActivityKind.TOOL, "rerun", 0, False)
_ANOTHER: defaultdict[ActivityKind, ActivityKind] = defaultdict(lambda: ActivityKind.TOOL, {ActivityKind.TOOL: ActivityKind.LLM})


@pytest.fixture
def world(mongo_uri: str, database: str) -> Iterator[World]:
    """One loop and one database for all machines."""
    made = World(mongo_uri, database)
    yield made
    made.close()


SETTINGS = settings(
    max_examples=EXAMPLES or 50,
    derandomize=not EXAMPLES,
    database=None,
    stateful_step_count=STEPS,
    deadline=None,
    print_blob=True,
    # Explaining takes as long as all examples together, and shrinking minutes: only who looks for faults waits for that.
    phases=[phase for phase in Phase if phase is not Phase.explain and (EXAMPLES or phase is not Phase.shrink)],
    # A step is several round trips to a server, so Hypothesis's idea of too slow does not apply; preconditions are meant to refuse often.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


@pytest.mark.timeout(600 + EXAMPLES * 5)  # Hypothesis shrinks for five minutes at most
def test_the_engine_does_what_the_protocol_says(world: World) -> None:
    """I1-I12: whatever is submitted, claimed, crashed, answered, cancelled or retried, in any order, database and protocol agree after each step."""
    machine: Callable[[], Machine] = type("BoundMachine", (Machine,), {"world": world})
    run_state_machine_as_test(machine, settings=SETTINGS)
    assert_invariants(world.uri, world.database, world.promises)
