"""The driver: runs a graph as one attempt, from its original input to its end or to a frontier without answers.

    run the graph ─> at rest: what pends? ─┬─ nothing: the end
          ^                                ├─ the next recorded frontier: hand each answer to its interrupt, by position ──┐
          │                                └─ something new: suspend                                                       │
          └────────────────────────────────────────────────────────────────────────────────────────────────────────────────┘

`Driver.rest` decides; the loops around it differ only in colour.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.pregel import Pregel
from langgraph.types import Command, Interrupt, StateSnapshot

from mongo_durable import telemetry
from mongo_durable.engine.attempt import Answered, Attempt, Pending, Suspended
from mongo_durable.errors import DurableError, UnsupportedGraph
from mongo_durable.langgraph.codec import Codec
from mongo_durable.langgraph.committed import committed_state, seed
from mongo_durable.langgraph.control import DurableSignal, is_marker
from mongo_durable.langgraph.crossing import await_on_loop
from mongo_durable.langgraph.messages import stamp
from mongo_durable.langgraph.questions import delivered, native_interrupts, public_interrupts, question_entry, unusable_answer
from mongo_durable.langgraph.redaction import Redact
from mongo_durable.langgraph.scope import ROOT_MARK_KEY, Session, enter_session
from mongo_durable.langgraph.seams import STRICT_RESUME_KEY, is_unsaved_child, with_handler
from mongo_durable.langgraph.streaming import StreamFilter, StreamRequest
from mongo_durable.protocol.events import EventType
from mongo_durable.protocol.identity import Position
from mongo_durable.store.documents import StoredFrontier
from mongo_durable.store.runs import Ending, ThreadState


@dataclass(frozen=True, slots=True)
class Ended:
    """The graph has ended with this output; the run is completed."""

    output: Any


@dataclass(frozen=True, slots=True)
class AtFrontier:
    """The run is suspended; `output` is what LangGraph returned so far."""

    output: Any
    frontier: StoredFrontier


@dataclass(frozen=True, slots=True)
class Asleep:
    """The run waits for its timers, the first of which fires at `until`; nobody has it until then."""

    until: datetime
    output: Any = None


@dataclass(frozen=True, slots=True)
class _GoOn:
    command: Command[Any] | None


class Driver:
    """One attempt's run of a graph.

    Args:
        graph: A checked compiled graph; it is copied, never changed.
        settings: The run's own configuration: `configurable`, `context`, `recursion_limit`; stored with the run, so the same in every attempt.
        local: What only this process has: callbacks, tags, metadata, max_concurrency.
        base: The thread's committed state, as the graph's saver wrote it, or None.
        request: What the caller wants streamed; None streams nothing.
        redact: See `App`.
    """

    def __init__(
        self,
        graph: Pregel[Any, Any, Any, Any],
        attempt: Attempt,
        codec: Codec,
        settings: Mapping[str, Any],
        local: RunnableConfig | None = None,
        base: ThreadState | None = None,
        request: StreamRequest | None = None,
        redact: Redact | None = None,
    ) -> None:
        self.attempt = attempt
        self.session = Session(attempt, redact)
        self._codec = codec
        self._saver = self.session.root.saver
        self._graph = graph.copy({"checkpointer": self._saver})
        thread_id = attempt.head.thread_id
        configurable = {
            **settings.get("configurable", {}),
            "thread_id": thread_id,
            STRICT_RESUME_KEY: True,
            ROOT_MARK_KEY: self.session.root.mark,
        }
        self.config: RunnableConfig = {**(local or {}), "configurable": configurable}
        self.config["callbacks"] = with_handler(self.config.get("callbacks"), self.session.watch)
        if settings.get("recursion_limit") is not None:
            self.config["recursion_limit"] = settings["recursion_limit"]
        self._context = settings.get("context")
        self._given_up: frozenset[str] = frozenset()
        self._request = request
        self._filter = StreamFilter(request, attempt) if request is not None else None
        if base is not None:
            seed(self._saver, thread_id, base, codec)

    def first_input(self) -> Any:
        """The run's original input, as our own copy with stable message ids."""
        graph_input = self._codec.decode(self.attempt.history.submitted.value if self.attempt.history.submitted else None)
        stamp(graph_input, f"{self.attempt.run_id}:input")
        return graph_input

    async def run_async(self, emit: Callable[[Any], None] | None = None) -> Ended | AtFrontier | Asleep:
        """Run the graph on the engine's own loop.

        Args:
            emit: Gets the chunks of the stream, if one was requested.

        Raises:
            DurableError, Exception: What ended the attempt; `App` gives the run the end that it means.
        """
        with self._span():
            return await self._drive_async(emit)

    async def _drive_async(self, emit: Callable[[Any], None] | None) -> Ended | AtFrontier | Asleep:
        enter_session(self.session)
        given = self.first_input()
        while True:
            self._begin_pass()
            if self._filter is None or emit is None:
                output = await self._graph.ainvoke(given, self.config, context=self._context, durability="sync")
            else:
                output = await self._stream_pass_async(given, self._filter, emit)
            await self.session.settle_async()
            snapshot = await self._graph.aget_state(self.config, subgraphs=True) if self.session.watch.has_stopped else None
            decision = await self.rest(snapshot, output)
            if not isinstance(decision, _GoOn):
                for chunk in self._last_chunks(decision):
                    if emit is not None:
                        emit(chunk)
                return decision
            given = decision.command

    def _begin_pass(self) -> None:
        self.session.pending.clear()
        self.session.timers.clear()
        self.session.watch.has_stopped = False

    async def _stream_pass_async(self, given: Any, chunks: StreamFilter, emit: Callable[[Any], None]) -> Any:
        chunks.begin_pass()
        async for chunk in self._graph.astream(given, self.config, **self._stream_options(chunks)):
            for each in chunks.take(_whole(chunk)):
                emit(each)
        return chunks.output

    def run(self, emit: Callable[[Any], None] | None = None) -> Ended | AtFrontier | Asleep:
        """Run the graph in this thread, which must not be the engine's.

        Args:
            emit: Gets the chunks of the stream, if one was requested.
        """
        steps = self.stream()
        while True:
            try:
                chunk = next(steps)
            except StopIteration as stopped:
                reached: Ended | AtFrontier | Asleep = stopped.value
                return reached
            if emit is not None:
                emit(chunk)

    def stream(self) -> Generator[Any, None, Ended | AtFrontier | Asleep]:
        """The same, yielding the chunks of the stream, if one was requested."""
        with self._span():
            return (yield from self._drive())

    def _span(self) -> AbstractContextManager[None]:
        head = self.attempt.head
        telemetry.look_for_tracer()
        return telemetry.span("attempt", workflow=head.workflow, version=head.version, run_id=head.run_id, fence=head.fence)

    def _drive(self) -> Generator[Any, None, Ended | AtFrontier | Asleep]:
        enter_session(self.session)
        given = self.first_input()
        while True:
            self._begin_pass()
            if self._filter is None:
                output = self._graph.invoke(given, self.config, context=self._context, durability="sync")
            else:
                self._filter.begin_pass()
                for chunk in self._graph.stream(given, self.config, **self._stream_options(self._filter)):
                    yield from self._filter.take(_whole(chunk))
                output = self._filter.output
            self.session.settle()
            snapshot = self._graph.get_state(self.config, subgraphs=True) if self.session.watch.has_stopped else None
            decision = await_on_loop(self.attempt.loop, self.rest(snapshot, output), "the durable driver")
            if not isinstance(decision, _GoOn):
                yield from self._last_chunks(decision)
                return decision
            given = decision.command

    def _stream_options(self, chunks: StreamFilter) -> dict[str, Any]:
        request = chunks.request
        return {"stream_mode": request.native_modes, "subgraphs": request.has_subgraphs, "context": self._context, "durability": "sync"}

    def _last_chunks(self, reached: Ended | AtFrontier | Asleep) -> Iterator[Any]:
        if self._request is not None and isinstance(reached, AtFrontier):
            yield from self._request.at_rest(reached.output)

    async def rest(self, snapshot: StateSnapshot | None, output: Any) -> Ended | AtFrontier | Asleep | _GoOn:
        """The graph has come to rest: what now?

        Args:
            snapshot: Its state; None if no graph has stopped, so that nothing pends.
        """
        attempt, root = self.attempt, self.session.root
        attempt.check()
        interrupts = native_interrupts(snapshot) if snapshot is not None else []
        native = [each for each in interrupts if not is_marker(each.id)]
        pending: dict[Position, Pending] = dict(self.session.pending)
        timers = dict(self.session.timers)
        if (pending or timers) and not interrupts:
            raise self._refuse("an interrupt of a durable tool was swallowed by user code (an `except Exception` around the call): let it pass")
        if self.session.lost_interrupts():
            raise self._refuse("an interrupt was raised in a child graph called with its own thread_id: call it without, it belongs to this run")
        if repeated := self._given_up & {each.id for each in native}:
            raise self._refuse(f"{len(repeated)} answers did not reach their interrupts (a child graph with checkpointer=False?)")
        for each in native:
            position = root.native.get(each.id)
            if position is None:
                raise self._refuse("an interrupt pends whose place in the graph is not known")
            if position in pending:
                raise self._refuse(f"two interrupts at one position ({position})")
            entry = question_entry(attempt.run_id, self._codec, position, root.asked[position], each)
            pending[position] = Pending(entry.digest, entry)
        if timers and not pending:
            return await self._sleep(timers)
        if not pending:
            if snapshot is not None and snapshot.next:
                raise self._refuse(f"the graph stopped before {', '.join(snapshot.next)} without an interrupt")
            return await self._end(output)
        reached = await attempt.rest(pending)
        if isinstance(reached, Suspended):
            return AtFrontier(self._with_questions(output, reached.frontier), reached.frontier)
        return self._go_on(native, reached)

    async def _sleep(self, timers: Mapping[Position, datetime]) -> Asleep | _GoOn:
        """Nothing but timers is left to wait for."""
        attempt = self.attempt
        if attempt.consumed < len(attempt.history.frontiers):
            await attempt.rest({})  # the history has questions here: the code diverged
        until = min(timers.values())
        if until <= attempt.now():
            return _GoOn(None)
        await attempt.release(until=until)
        return Asleep(until)

    def _go_on(self, native: list[Interrupt], reached: Answered) -> _GoOn:
        root = self.session.root
        answers = {
            each.id: delivered(self._codec, reached.answers[root.native[each.id]]) for each in native if root.native[each.id] in reached.answers
        }
        self._given_up = frozenset(answers)
        # By id always: a bare value, `{}` or None would be misread. Without native ones, running on re-enters the pending tools.
        return _GoOn(Command(resume=answers) if answers else None)

    def _with_questions(self, output: Any, frontier: StoredFrontier) -> Any:
        interrupts = public_interrupts(self._codec, frontier)
        values = {name: value for name, value in output.items() if name != "__interrupt__"} if isinstance(output, dict) else {}
        return {**values, "__interrupt__": interrupts}

    async def _end(self, output: Any) -> Ended:
        self.attempt.check_end(self._saver.last_root_step)
        state = committed_state(self._saver, self.attempt.head.thread_id, self._codec)
        await self.attempt.end(Ending(type=EventType.RUN_COMPLETED, output=self._codec.encode(output), thread_state=state))
        return Ended(output)

    def _refuse(self, why: str) -> DurableError:
        return self.attempt.remember(UnsupportedGraph(f"run {self.attempt.run_id}: {why}", run_id=self.attempt.run_id))


def _whole(chunk: tuple[Any, ...]) -> tuple[Any, ...]:
    """A native chunk with its namespace, which LangGraph leaves out when no child graphs are streamed."""
    return chunk if len(chunk) == 3 else ((), *chunk)


def unwrap(error: BaseException) -> BaseException:
    """The error that a signal carries, or the error itself; LangGraph's failures on a child graph without a saver and on an answer by their names."""
    if is_unsaved_child(error):
        return UnsupportedGraph("a child graph is compiled with checkpointer=False: compile it without it, its checkpoints are scratch here")
    if (unusable := unusable_answer(error)) is not None:
        return unusable
    return error.error if isinstance(error, DurableSignal) else error
