"""Replaying exported histories against the code of today: the check before an upgrade.

    from mongo_durable.replaying import replay_history

    def test_recorded_runs_still_replay() -> None:
        for replayed in replay_history(app, "histories.jsonl"):
            assert replayed.is_same, replayed.divergence

No database is needed, nothing is written, no effect is executed and no model called: what is recorded is replayed by the same driver that resumes a
run, and where the history ends, so does the replay.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from mongo_durable.engine.attempt import Attempt
from mongo_durable.engine.loop_thread import LoopThread
from mongo_durable.engine.sink import ClosedSink
from mongo_durable.errors import ConfigurationError, HistoryEnded, NondeterminismError
from mongo_durable.langgraph.app import App
from mongo_durable.langgraph.control import CONTROL_FLOW
from mongo_durable.langgraph.driver import Driver, unwrap
from mongo_durable.protocol.canonical import canonical_bytes
from mongo_durable.protocol.events import EventType
from mongo_durable.protocol.history import History, fold
from mongo_durable.protocol.identity import Position
from mongo_durable.protocol.replay import check_over
from mongo_durable.store import histories
from mongo_durable.store.histories import ExportedRun

Reached = Literal["end", "frontier", "history"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where the code did something else than the history says.

    Attributes:
        message: What happened, and what to do.
        position: Of the activity or question, as text; None where it is about the end of the run.
        step: The root step.
        expected, found: What the history has there, and what the code did.
    """

    message: str
    position: str | None
    step: int | None
    expected: Any
    found: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What became of one recorded run.

    Attributes:
        status: Of the run when it was exported.
        events: How many events its history has.
        reached: "end": the recorded end, with the recorded output or error. "frontier": the frontier that the run waits on. "history": as far as its
            history goes; behind it the code would go on with new work. None if it diverged.
        divergence: The first one, or None.
    """

    run_id: str
    workflow: str
    version: str
    status: str
    events: int
    reached: Reached | None
    divergence: Divergence | None

    @property
    def is_same(self) -> bool:
        """Whether the code did what the history says, as far as it goes."""
        return self.divergence is None


def replay_history(app: App | Sequence[App], history: str | os.PathLike[str] | Iterable[str]) -> list[Replayed]:
    """Replay every run of an exported history.

    Args:
        app: Whose workflow the runs are of; several, if they are of several. Of apps with the same name, that with the run's version replays it; one
            app replays runs of any version.
        history: A file as `mongo-durable export` writes it, or its lines.

    Raises:
        ConfigurationError: It is no history, or has runs of workflows that no app is for.
        DecryptionFailed: It is encrypted, and the app's cipher has not the key.
    """
    return list(each_replayed(app, history))


async def areplay_history(app: App | Sequence[App], history: str | os.PathLike[str] | Iterable[str]) -> list[Replayed]:
    """`replay_history` on the running event loop."""
    apps = [app] if isinstance(app, App) else app
    with _lines(history) as lines:
        return [await _replayed(_app_of(apps, run), run) for run in histories.read(lines)]


def each_replayed(app: App | Sequence[App], history: str | os.PathLike[str] | Iterable[str]) -> Iterator[Replayed]:
    """`replay_history`, one run after the other: only one is held in memory."""
    apps = [app] if isinstance(app, App) else app
    thread = LoopThread("mongo_durable-replay")
    thread.loop.set_exception_handler(_quiet)
    try:
        with _lines(history) as lines:
            for run in histories.read(lines):
                yield thread.call(_replayed(_app_of(apps, run), run))
    finally:
        thread.close()


def _quiet(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # LangGraph does not fetch the interrupts of tasks of the functional API that pend beside others; here that is every end.
    if not isinstance(context.get("exception"), CONTROL_FLOW):
        loop.default_exception_handler(context)


@contextmanager
def _lines(history: str | os.PathLike[str] | Iterable[str]) -> Iterator[Iterable[str]]:
    if not isinstance(history, str | os.PathLike):
        yield history
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(history, encoding="utf-8", newline="\n"))
        except OSError as error:
            raise ConfigurationError(f"the history {os.fspath(history)!r} cannot be read: {error.strerror}") from None
        yield file


def _app_of(apps: Sequence[App], run: ExportedRun) -> App:
    named = [app for app in apps if app.name == run.head.workflow]
    of_version = [app for app in named if app.version == run.head.version] or named
    if not of_version:
        known = ", ".join(sorted({repr(app.name) for app in apps}))
        raise ConfigurationError(f"run {run.head.run_id} is of workflow {run.head.workflow!r}; there is an app for {known} only")
    return of_version[0]


async def _replayed(app: App, run: ExportedRun) -> Replayed:
    run = histories.opened(run, app.cipher)
    history = fold(run.head.run_id, run.events)
    reached, divergence = await _compared(app, run, history)
    return Replayed(
        run_id=run.head.run_id,
        workflow=run.head.workflow,
        version=run.head.version,
        status=history.status.value,
        events=len(run.events),
        reached=reached,
        divergence=divergence,
    )


async def _compared(app: App, run: ExportedRun, history: History) -> tuple[Reached | None, Divergence | None]:
    sink = ClosedSink(run.head.run_id, history.seq)
    attempt = Attempt(run.head, history, sink)
    try:
        driver = Driver(app.graph(), attempt, app.codec, app.codec.decode(run.head.settings), None, run.state, None, app.redact)
        # A thread or a task, with a context, of its own, as every attempt has.
        if app.is_sync:
            await asyncio.get_running_loop().run_in_executor(None, contextvars.copy_context().run, driver.run)
        else:
            await asyncio.create_task(driver.run_async())
    except Exception as raised:  # noqa: BLE001 - whatever the code raises is what the report is about
        error = attempt.failure or unwrap(raised)
        if isinstance(error, HistoryEnded):
            return _at_the_end(attempt, sink)
        if isinstance(error, NondeterminismError):
            return None, _divergence(error)
        return _raised(app, history, error)
    return _ended(history, sink)


def _at_the_end(attempt: Attempt, sink: ClosedSink) -> tuple[Reached | None, Divergence | None]:
    history = attempt.history
    try:
        check_over(history, attempt.consumed, attempt.reached, sink.new, sink.pending)
    except NondeterminismError as error:
        return None, _divergence(error)
    return "frontier" if not sink.new and attempt.consumed < len(history.frontiers) else "history", None


def _ended(history: History, sink: ClosedSink) -> tuple[Reached | None, Divergence | None]:
    """The code has ended the run; that it passed everything recorded is checked by then."""
    if history.end is None or history.end.type is not EventType.RUN_COMPLETED:
        return "history", None
    recorded, found = history.end.value, sink.ending.output if sink.ending is not None else None
    if canonical_bytes(recorded) == canonical_bytes(found):
        return "end", None
    place = _first_difference(recorded, found, "$")
    message = f"the run ends with another output than the recorded one; first at {place}. Make the change a new workflow version, if it is meant"
    return None, Divergence(message=message, position=None, step=max(history.steps, default=None), expected="the recorded output", found=place)


def _raised(app: App, history: History, error: BaseException) -> tuple[Reached | None, Divergence | None]:
    described = app.codec.describe_error(error) if isinstance(error, Exception) else {"type": type(error).__name__, "message": str(error)}
    end = history.end
    if end is not None and end.error is not None and end.type is EventType.RUN_FAILED and end.error.get("type") == described["type"]:
        return "end", None
    expected = f"{end.type}" + (f" with {end.error.get('type')}" if end.error else "") if end is not None else "no failure"
    message = f"the code failed with {described['type']}, the history has {expected}: {described['message']}"
    return None, Divergence(message=message, position=None, step=None, expected=expected, found=described["type"])


def _divergence(error: NondeterminismError) -> Divergence:
    try:
        step: int | None = Position.parse(error.position).step
    except ValueError:
        step = int(error.position.removeprefix("step ")) if error.position.startswith("step ") else None
    return Divergence(message=error.message, position=error.position, step=step, expected=error.expected, found=error.found)


def _first_difference(recorded: Any, found: Any, path: str) -> str:
    """The path to where two plain values differ first. They do."""
    if isinstance(recorded, Mapping) and isinstance(found, Mapping):
        for name in [*recorded, *(each for each in found if each not in recorded)]:
            if name not in recorded or name not in found:
                return f"{path}.{name}"
            if canonical_bytes(recorded[name]) != canonical_bytes(found[name]):
                return _first_difference(recorded[name], found[name], f"{path}.{name}")
    if isinstance(recorded, list) and isinstance(found, list):
        for number, (one, other) in enumerate(zip(recorded, found, strict=False)):
            if canonical_bytes(one) != canonical_bytes(other):
                return _first_difference(one, other, f"{path}[{number}]")
        return f"{path}[{min(len(recorded), len(found))}]"
    return path
