"""Runs a graph durably to its end, attempt after attempt, some of them abandoned at a random point; and the same graph plainly, as the oracle."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import random
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from langchain.agents.middleware import human_in_the_loop
from langchain_core.messages import BaseMessage
from langgraph.types import Command

from mongo_durable import App
from mongo_durable.engine.attempt import ActivityCall, Attempt, StartResult
from mongo_durable.engine.process import Process
from mongo_durable.errors import AttemptOver
from mongo_durable.langgraph.app import _engine_loop
from mongo_durable.protocol.events import Event, EventType, RunStatus
from mongo_durable.protocol.history import History, fold
from mongo_durable.store import events, heads
from mongo_durable.store.connection import Endpoint
from tests.langgraph.kit import Kit, Ledger, answer

Colour = Literal["async", "sync", "mixed", "thread"]
"""Async bodies and callers; synchronous ones; synchronous bodies under an async caller; the same where the graph runs in a thread."""

Drive = Literal["call", "values", "modes"]
"""(a)invoke; (a)stream of values; (a)stream of a list of modes, with those of child graphs."""

MODES = ("values", "updates", "messages", "custom", "tasks")

ATTEMPTS = int(os.environ.get("MONGO_DURABLE_ATTEMPTS", "2000"))
"""How many attempts the graphs of this folder make, at least."""

_PAUSE_S = 0.003
_ABANDONED_AT_MOST = 8
"""After so many abandoned attempts a run is left in peace."""


@dataclass(slots=True)
class Killer:
    """When the attempts of one run are abandoned."""

    random: random.Random
    left: int = _ABANDONED_AT_MOST

    def budget(self) -> int | None:
        """After how many calls of the engine the next attempt is over; None: it is left in peace."""
        if self.left <= 0 or self.random.random() < 0.3:
            return None
        self.left -= 1
        return int(24 * self.random.random() ** 2)

    def chunks(self) -> int | None:
        """After how many chunks the next caller of a stream goes away; None: it stays."""
        if self.left <= 0 or self.random.random() < 0.7:
            return None
        self.left -= 1
        return self.random.randrange(1, 8)

    def delay_s(self) -> float | None:
        """After how long the next call of the app is cancelled and its attempt stopped; None: it is not."""
        if self.left <= 0 or self.random.random() < 0.7:
            return None
        self.left -= 1
        return self.random.random() * 0.1


class WentAway(Exception):
    """The caller of a stream went away before its end."""


_killers: dict[str, Killer] = {}


class FragileAttempt(Attempt):
    """An attempt that is abandoned before or after one of its calls, as its run's killer says."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        killer = _killers.get(self.run_id)
        self._budget = killer.budget() if killer is not None else None

    def _spend(self) -> None:
        if self._budget is not None:
            self._budget -= 1
            if self._budget < 0:
                raise self.stop(AttemptOver("abandoned by the test"))

    async def start(self, call: ActivityCall) -> StartResult:
        """As it says; abandoned before it, or after it was recorded."""
        self._spend()
        result = await super().start(call)
        self._spend()
        return result

    async def complete(self, call: ActivityCall, value: Any) -> None:
        """As it says; abandoned before it, or after it was recorded."""
        self._spend()
        await super().complete(call, value)
        self._spend()


@contextmanager
def fragile_attempts() -> Iterator[None]:
    """Let killers have their way with every attempt that begins."""
    real = Attempt.__dict__["begin"]
    Attempt.begin = classmethod(lambda cls, *args: real.__func__(FragileAttempt, *args))  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Attempt.begin = real  # type: ignore[method-assign]


def normalised(value: Any) -> Any:
    """A final state for comparing: messages without ids, tuples as lists."""
    if isinstance(value, BaseMessage):
        asked = [(each["name"], each["id"]) for each in getattr(value, "tool_calls", [])]
        return (value.type, str(value.content), asked, getattr(value, "status", None), getattr(value, "artifact", None))
    if isinstance(value, Mapping):
        return {name: normalised(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [normalised(each) for each in value]
    return value


@dataclass(slots=True)
class Told:
    """What a run has come to, and all that its history says.

    Attributes:
        state: The final state, normalised.
        started: How often each effect (kind, name, input) stands in the history, each position once.
        positions: Of all effects.
        frontiers: Per frontier, the question's digest by position.
        attempts: How many there were.
        streamed: The chunks (namespace, mode, payload) of all calls of the app, in order; none if it was not streamed.
    """

    state: Any
    started: Counter[tuple[str, str, str]]
    positions: list[str]
    frontiers: list[dict[str, str]]
    attempts: int
    events: list[Event] = field(repr=False)
    history: History = field(repr=False)
    streamed: list[Chunk] = field(default_factory=list, repr=False)


Chunk = tuple[tuple[str, ...], str, Any]
"""Namespace, mode and payload."""


def root_values(chunks: Iterable[Chunk]) -> list[Any]:
    """The states of the root, normalised, each once when it is shown again at once."""
    states = [normalised(payload) for namespace, mode, payload in chunks if not namespace and mode == "values" and not _is_rest(payload)]
    return [each for each, _ in itertools.groupby(states)]


def shown(chunks: Iterable[Chunk], mode: str, *, of_root: bool) -> Counter[str]:
    """What a mode shows of the root, or of child graphs by the names of the nodes that they are: the ids of their tasks are random."""
    found: Counter[str] = Counter()
    for namespace, each_mode, payload in chunks:
        if each_mode == mode and (not namespace) == of_root and not _is_rest(payload):
            # A number tells child graphs apart that one body calls: at once, in no certain order.
            names = [each.partition(":")[0] for each in namespace if not each.isdigit()]
            found[repr((names, normalised(payload)))] += 1
    return found


def _is_rest(payload: Any) -> bool:
    return isinstance(payload, dict) and "__interrupt__" in payload


@dataclass(frozen=True, slots=True)
class Oracle:
    """What plain LangGraph makes of a graph: its final state, normalised, the bodies that ran, and the stream of values and updates, if asked for."""

    state: Any
    ledger: Ledger
    streamed: list[Chunk] = field(repr=False)


Make = Callable[[Kit], Any]


class Bench:
    """Runs graphs of one database. Every attempt has an App of its own, as in another process; they share one connection and lease."""

    def __init__(self, uri: str, database: str) -> None:
        self.engine = _engine_loop()
        self.endpoint = Endpoint(uri, database)
        self.uri, self.database = uri, database
        self.attempts = 0
        self._process: Process | None = None
        self._open = AsyncExitStack()
        self._runs = itertools.count(1)

    def call(self, coroutine: Any) -> Any:
        """Await something on the engine's loop."""
        return self.engine.call(coroutine)

    @property
    def process(self) -> Process:
        """What all apps of this bench share on the engine's loop."""
        if self._process is None:

            async def make() -> Process:
                process = Process(self.endpoint)
                # The change stream stays open, as it does in a process with a runner.
                await self._open.enter_async_context(process.wakeups.listen())
                return process

            self._process = self.call(make())
        return self._process

    def close(self) -> None:
        """Give up lease and connection."""

        async def close() -> None:
            await self._open.aclose()
            if self._process is not None:
                await self._process.aclose()
            await self.endpoint.aclose()

        self.call(close())

    def app(self, name: str = "tested", *, is_sync: bool = False, **options: Any) -> App:
        """An app that shares the bench's process."""
        # Attempts are abandoned again and again here: that is no reason to park a run.
        app = App(name, uri=self.uri, database=self.database, sync=is_sync, max_crashes=1_000_000, **options)
        process = self.process

        async def share() -> None:
            app.use_process(process)

        self.call(share())
        return app

    def built(self, make: Make, ledger: Ledger, colour: Colour, pause_s: float = 0.0, **options: Any) -> App:
        """An app whose graph `make` builds."""
        app = self.app(is_sync=colour == "thread", **options)
        graph = make(Kit(app, ledger, is_sync=colour != "async", pause_s=pause_s))
        app.entrypoint(lambda: graph)
        return app

    def new_run(self) -> str:
        """A run id that nobody has."""
        return f"run-{next(self._runs)}-{uuid.uuid4().hex[:8]}"

    def once(
        self,
        app: App,
        colour: Colour,
        given: Any,
        config: Any = None,
        *,
        run_id: str | None = None,
        drive: Drive = "call",
        chunks: list[Chunk] | None = None,
        leave_after: int | None = None,
        cancel_after_s: float | None = None,
    ) -> Any:
        """One call of the app, in a colour.

        Args:
            chunks: Gets what is streamed.
            leave_after: The caller of a stream goes away after so many chunks.
            cancel_after_s: The task of an async call is cancelled after so long.

        Returns:
            What an invocation returned; of a stream the last chunk.
        """
        options: dict[str, Any] = {} if drive == "call" else {"stream_mode": list(MODES), "subgraphs": True} if drive == "modes" else {}
        seen: list[Chunk] = chunks if chunks is not None else []

        def see(number: int, chunk: Any) -> None:
            seen.append(chunk if drive == "modes" else ((), "values", chunk))
            if number == leave_after:
                raise WentAway

        if colour == "sync":
            if drive == "call":
                return app.invoke(given, config, run_id=run_id)
            with contextlib.closing(app.stream(given, config, run_id=run_id, **options)) as steps:
                for number, chunk in enumerate(steps, 1):
                    see(number, chunk)
            return seen[-1][2] if seen else None

        async def run() -> Any:
            if drive == "call":
                return await app.ainvoke(given, config, run_id=run_id)
            number = 0
            async with contextlib.aclosing(app.astream(given, config, run_id=run_id, **options)) as steps:
                async for chunk in steps:
                    number += 1
                    see(number, chunk)
            return seen[-1][2] if seen else None

        async def call() -> Any:
            task = asyncio.ensure_future(run())
            if cancel_after_s is not None:
                await asyncio.wait([task], timeout=cancel_after_s)
                # Only a running attempt: PyMongo leaves a socket open behind a connection whose making is cancelled.
                attempt = self.process.running.get(str(run_id))
                if attempt is not None and not task.done():
                    attempt.stop(AttemptOver("abandoned by the test"))
                    task.cancel()
            return await task

        return self.call(call())

    def complete(
        self,
        make: Make,
        given: Any,
        colour: Colour,
        ledger: Ledger,
        *,
        drive: Drive = "call",
        killer: Killer | None = None,
        say: Callable[[Any], Any] = answer,
        order: random.Random | None = None,
        pause_s: float = _PAUSE_S,
        thread_id: str | None = None,
    ) -> Told:
        """Run to the end, through as many attempts as it takes. Each frontier is answered at once, in random order."""
        run_id, order = self.new_run(), order or random.Random(0)
        config = {"configurable": {"thread_id": thread_id or run_id}}
        if killer is not None:
            _killers[run_id] = killer
        answers: Command[Any] | None = None
        chunks: list[Chunk] = []
        try:
            while True:
                app = self.built(make, ledger, colour, pause_s)
                delay = killer.delay_s() if killer is not None and colour != "sync" else None
                leave = killer.chunks() if killer is not None and drive != "call" else None
                try:
                    # The same input under the same run id is the same run: it goes on.
                    out = self.once(
                        app,
                        colour,
                        given if answers is None else answers,
                        config,
                        run_id=run_id,
                        drive=drive,
                        chunks=chunks,
                        leave_after=leave,
                        cancel_after_s=delay,
                    )
                except (AttemptOver, WentAway, asyncio.CancelledError, concurrent.futures.CancelledError):
                    answers = None
                    continue
                head = self.call(heads.get(self.process.connection, run_id))
                if head.status is RunStatus.COMPLETED:
                    # A caller of streams who joins at the end sees nothing that others saw: the output is in the run.
                    told = self.told(run_id, out if drive == "call" else app.codec.decode(head.output))
                    told.streamed = chunks
                    return told
                assert head.status is RunStatus.SUSPENDED, head.status
                asked = list(out["__interrupt__"])
                order.shuffle(asked)
                answers = Command(resume={each.id: say(each.value) for each in asked})
        finally:
            _killers.pop(run_id, None)

    def told(self, run_id: str, out: Any) -> Told:
        """What the history of a run says."""
        recorded = self.call(events.read_history(self.process.connection, run_id))
        history = fold(run_id, recorded)
        first_start = {each.position.text: each for each in reversed(recorded) if each.type is EventType.ACTIVITY_STARTED and each.position}
        started: Counter[tuple[str, str, str]] = Counter()
        for each in first_start.values():
            shown = each.value["x"] if each.name == "act" else each.value
            started[(str(each.kind), str(each.name), repr(shown))] += 1
        self.attempts += history.attempts
        return Told(
            state=normalised(out),
            started=started,
            positions=sorted(first_start),
            frontiers=[{position.text: digest for position, digest in each.entries.items()} for each in history.frontiers],
            attempts=history.attempts,
            events=recorded,
            history=history,
        )

    def oracle(self, make: Make, given: Any, colour: Colour) -> tuple[Any, Ledger]:
        """Final state and ledger of the same graph in plain LangGraph."""
        plain = self.plainly(make, given, colour)
        return plain.state, plain.ledger

    def plainly(self, make: Make, given: Any, colour: Colour, drive: Drive = "call") -> Oracle:
        """The same graph in plain LangGraph, every question answered on the spot: none of our mechanisms takes part."""
        ledger = Ledger()
        app = App("oracle", uri=self.uri, database=self.database)
        graph = make(Kit(app, ledger, is_sync=colour != "async", is_oracle=True))
        graph = graph.compile() if hasattr(graph, "compile") else graph
        is_sync = colour in ("sync", "thread")
        chunks: list[Chunk] = []
        with _answered_on_the_spot():
            if drive == "call":
                out = graph.invoke(given) if is_sync else self.call(_ainvoke(graph, given))
            else:
                options = {"stream_mode": ["values", "updates"], "subgraphs": True}
                chunks = list(graph.stream(given, **options)) if is_sync else self.call(_astream(graph, given, options))
                out = [payload for namespace, mode, payload in chunks if not namespace and mode == "values"][-1]
        return Oracle(normalised(out), ledger, chunks)


async def _ainvoke(graph: Any, given: Any) -> Any:
    return await graph.ainvoke(given)


async def _astream(graph: Any, given: Any, options: dict[str, Any]) -> list[Chunk]:
    return [chunk async for chunk in graph.astream(given, **options)]


@contextmanager
def _answered_on_the_spot() -> Iterator[None]:
    real = human_in_the_loop.interrupt
    human_in_the_loop.interrupt = lambda question, **_: answer(question)
    try:
        yield
    finally:
        human_in_the_loop.interrupt = real
