"""From a call to an attempt, and from an attempt's end to the run's: how an app gets the right to a run, executes it, and gives it its end."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph.types import Command

from mongo_durable.engine.attempt import Attempt
from mongo_durable.engine.policy import is_queued
from mongo_durable.engine.process import Process
from mongo_durable.engine.resolving import Rules, expire, keep_refusal, resolve_and_claim
from mongo_durable.errors import (
    AttemptOver,
    CancelRequested,
    ConfigurationError,
    CorruptHistory,
    Draining,
    DurableError,
    InvalidAnswer,
    NondeterminismError,
    RunError,
    RunFailed,
    RunNotClaimable,
    RunNotFound,
    StoreError,
)
from mongo_durable.langgraph.driver import Asleep, AtFrontier, Driver, Ended, unwrap
from mongo_durable.langgraph.questions import public_interrupts
from mongo_durable.langgraph.scope import current_session
from mongo_durable.langgraph.streaming import StreamRequest
from mongo_durable.langgraph.topology import check_call
from mongo_durable.protocol.events import EventType, RunStatus
from mongo_durable.protocol.frontier import AnswerChannel
from mongo_durable.store import frontiers, heads, runs, schema
from mongo_durable.store.claims import Claim, claim, dead_owners, release
from mongo_durable.store.documents import Answerer, RunHead, StoredFrontier
from mongo_durable.store.payloads import bring_in
from mongo_durable.store.sealing import require_open
from mongo_durable.store.wakeups import Listener
from mongo_durable.telemetry import about

if TYPE_CHECKING:
    from mongo_durable.langgraph.app import App

log = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_AGAIN_S = 2.0
_SOONEST_S = 0.02
_GRAPH_THREADS = 256
_LOCAL_CONFIG = frozenset({"callbacks", "tags", "metadata", "max_concurrency", "run_name"})
"""What of a call's configuration only this process has; the rest is stored with the run."""


@functools.cache
def _graph_threads() -> ThreadPoolExecutor:
    # Not the loop's default executor: graphs that wait for the engine could fill it, and sync tools of async graphs need it.
    return ThreadPoolExecutor(_GRAPH_THREADS, thread_name_prefix="mongo_durable-graph")


def _pause(head: RunHead) -> float:
    """How long to wait before looking at a run again, in seconds. Only how soon, never whether, hangs on this machine's clock."""
    if head.status.is_rest or head.status is RunStatus.RUNNING or head.available_at is None:
        return _LOOK_AGAIN_S
    return min(max((head.available_at - datetime.now(UTC)).total_seconds(), _SOONEST_S), _LOOK_AGAIN_S)


def _named(thread_id: Any) -> str:
    if thread_id is None:
        raise ConfigurationError("config needs configurable.thread_id (or give run_id=) to say which run goes on")
    return str(thread_id)


def _live(thread_id: Any, found: T | None) -> T:
    if found is None:
        raise RunNotFound(f"no run is live on thread {thread_id!r}: give an input to start one")
    return found


_WORDS: Mapping[type, str] = {Ended: RunStatus.COMPLETED.value, AtFrontier: RunStatus.SUSPENDED.value, Asleep: "asleep"}


@dataclass(frozen=True, slots=True)
class Work:
    """A claimed attempt with its driver, ready to run in either colour."""

    process: Process
    attempt: Attempt
    driver: Driver
    local: RunnableConfig | None
    request: StreamRequest | None


class Executor:
    """Executes the runs of one app."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def execute(self, process: Process, claimed: Claim) -> str:
        """Run one attempt of a claimed run to its rest; for a runner.

        Returns:
            What it came to: `completed`, `suspended`, `asleep`, `failed`, `diverged`; or `stopped`, where the run was to be cancelled, was past its
            deadline, or is parked, and nothing was executed.

        Raises:
            DurableError: The attempt is over without having brought the run to a rest.
        """
        work = await self._begin(process, claimed, None)
        if work is None:
            return "stopped"
        try:
            return _WORDS[type(await self.run(work))]
        except (AttemptOver, StoreError):
            raise
        except Exception as error:
            # The run has failed or diverged: that is recorded, and no concern of the runner.
            log.info("run %s ended with an error", claimed.head.run_id, exc_info=True, extra=about(claimed.head.run_id, claimed.head.fence))
            return RunStatus.DIVERGED.value if isinstance(error, NondeterminismError) else RunStatus.FAILED.value

    async def open(
        self,
        graph_input: Any,
        config: RunnableConfig | None,
        context: Any,
        run_id: str | None,
        options: Mapping[str, Any],
        request: StreamRequest | None = None,
        when_busy: str = "refuse",
    ) -> Work | Any:
        """What a call in LangGraph's shape means: an attempt to run now, or the result of a run that is at rest or that another process executes.

        Args:
            graph_input: A new input, a Command with answers, or None to go on.
            options: Options of the call that are not ours; all of them are refused.
        """
        config = config or {}
        check_call(graph_input, options, config)
        if unknown := sorted(name for name in options if options[name] is not None):
            raise ConfigurationError(f"unknown option {unknown[0]!r}")
        self._app.graph()
        process = self._app.process()
        await schema.prepare(process.connection)
        thread_id = config.get("configurable", {}).get("thread_id")
        local: RunnableConfig = {name: value for name, value in config.items() if name in _LOCAL_CONFIG}  # type: ignore[assignment]
        if graph_input is None:
            return await self._take(process, await self._active_run(process, thread_id, run_id), local, request)
        if isinstance(graph_input, Command):
            answerer = Answerer(by=config.get("configurable", {}).get("resolved_by"), channel=AnswerChannel.APP)
            frontier = await self._asked(process, thread_id, run_id)
            return await self._answer(process, frontier, graph_input.resume, answerer, local, request)
        run = run_id or str(uuid.uuid4())
        submission = self._submission(run, graph_input, str(thread_id) if thread_id is not None else run, config, context)
        return await self._submit(process, submission, local, request, is_queued_when_busy=is_queued(when_busy))

    async def _submit(
        self,
        process: Process,
        submission: runs.Submission,
        local: RunnableConfig,
        request: StreamRequest | None,
        *,
        is_queued_when_busy: bool,
    ) -> Work | Any:
        """Accept a run and begin its first attempt, in one transaction."""
        lease = await process.lease()
        run = submission.run_id
        if run in process.running:
            # The same run is called twice in this process: it stays the other call's.
            await runs.submit(process.connection, submission, is_queued_when_busy=is_queued_when_busy)
            return await self._take(process, run, local, request)
        submitted = runs.submit(
            process.connection,
            submission,
            owner=lease.owner,
            code_version=self._app.code_version,
            is_queued_when_busy=is_queued_when_busy,
        )
        accepted = await process.taking(run, lease, submitted)
        if isinstance(accepted, Claim):
            return await self._go_on(process, accepted, local, request)
        return await self._take(process, run, local, request)

    async def _answer(
        self, process: Process, frontier: StoredFrontier, resume: Any, answerer: Answerer, local: RunnableConfig, request: StreamRequest | None
    ) -> Work | Any:
        """Answer a frontier, and begin the attempt that goes on from it: in one transaction, if nothing speaks against it."""
        try:
            answers = self._answers(frontier, resume)
        except InvalidAnswer as refusal:
            await keep_refusal(process.connection, frontier.run_id, frontier.generation, answerer, refusal, [refusal.activity_id])
            raise
        rules = Rules(authorize=self._app.authorize, decode=self._app.codec.decode)
        workflow = (self._app.name, self._app.version)
        claimed = await resolve_and_claim(process, frontier, answers, answerer, workflow, self._app.code_version, rules=rules)
        if claimed is not None:
            return await self._go_on(process, claimed, local, request)
        return await self._take(process, frontier.run_id, local, request)

    async def _go_on(self, process: Process, claimed: Claim, local: RunnableConfig, request: StreamRequest | None) -> Work | Any:
        """Be the attempt that began in the transaction which the call stood for."""
        work = await self._begin_or_forget(process, claimed, local, request)
        return work if work is not None else await self._take(process, claimed.head.run_id, local, request)

    async def _begin_or_forget(self, process: Process, claimed: Claim, local: RunnableConfig, request: StreamRequest | None) -> Work | None:
        """See `_begin`; where it fails, this process does not have the run any more."""
        try:
            return await self._begin(process, claimed, local, request)
        except BaseException:
            process.running.pop(claimed.head.run_id, None)
            raise

    def _submission(
        self, run_id: str, graph_input: Any, thread_id: str, config: RunnableConfig | None = None, context: Any = None
    ) -> runs.Submission:
        """What is stored of a new run.

        Raises:
            NotJsonSafe: Something in input, `configurable` or context cannot be stored.
        """
        config = config or {}
        configurable = {name: value for name, value in config.get("configurable", {}).items() if name != "thread_id" and not name.startswith("__")}
        settings = {"configurable": configurable, "context": context, "recursion_limit": config.get("recursion_limit")}
        return runs.Submission(
            run_id=run_id,
            workflow=self._app.name,
            version=self._app.version,
            thread_id=thread_id,
            input=self._app.codec.encode(graph_input),
            settings=self._app.codec.encode({name: value for name, value in settings.items() if value not in (None, {})}),
            topology=self._app.topology,
        )

    async def _active_run(self, process: Process, thread_id: Any, run_id: str | None) -> str:
        if run_id is not None:
            return run_id
        return _live(thread_id, await runs.active_run(process.connection, _named(thread_id)))

    async def _asked(self, process: Process, thread_id: Any, run_id: str | None) -> StoredFrontier:
        """The frontier that an answer is for."""
        if run_id is not None:
            return await frontiers.current(process.connection, run_id)
        return _live(thread_id, await frontiers.current_of_thread(process.connection, _named(thread_id)))

    def _answers(self, frontier: StoredFrontier, answer: Any) -> dict[str, Any]:
        if isinstance(answer, Mapping) and answer and all(isinstance(key, str) and key.startswith("act_") for key in answer):
            given = dict(answer)
        elif len(frontier.entries) == 1:
            given = {frontier.entries[0].activity_id: answer}
        else:
            raise ConfigurationError(
                f"run {frontier.run_id} has {len(frontier.entries)} open questions: "
                "answer all of them with Command(resume={activity_id: answer, …})"
            )
        for entry in frontier.entries:
            if entry.activity_id in given:
                given[entry.activity_id] = self._app.interrupt_types.json_answer(frontier.run_id, entry, given[entry.activity_id])
        return {key: self._app.codec.encode(value) for key, value in given.items()}

    async def _take(self, process: Process, run_id: str, local: RunnableConfig, request: StreamRequest | None) -> Work | Any:
        """Claim a run, or wait until whoever has it brings it to a rest."""
        async with AsyncExitStack() as stack:
            listener: Listener | None = None
            gone: list[str] = []
            while True:
                try:
                    work = await self._claim(process, run_id, gone, local, request)
                    if work is not None:
                        return work
                except RunNotClaimable:
                    pass
                head = await heads.get(process.connection, run_id)
                if (head.workflow, head.version) != (self._app.name, self._app.version):
                    raise RunError(
                        f"run {run_id} belongs to workflow {head.workflow!r} version {head.version!r}; "
                        f"this app is {self._app.name!r} {self._app.version!r}",
                        run_id=run_id,
                    )
                if head.status is RunStatus.SUSPENDED and head.available_at is not None and await expire(process.connection, run_id):
                    continue  # nobody answered in time, and there need not be a runner that sees to it
                if head.status.is_rest:
                    return await self._result(process, head)
                # Somebody else has it, dead or alive; only now is a change stream worth its connection.
                is_first_look = listener is None
                if listener is None:
                    await self._refuse_to_wait_for_itself(process, head)
                    listener = await stack.enter_async_context(process.wakeups.listen(run_id))
                gone = [*await dead_owners(process.connection), (await process.lease()).owner]
                if not is_first_look:
                    await listener.wait(_pause(head))

    async def _refuse_to_wait_for_itself(self, process: Process, head: RunHead) -> None:
        """A body that waits for its own run, or for one that is queued behind it, would wait for ever and hold the thread."""
        session = current_session()
        if session is not None and await runs.active_run(process.connection, head.thread_id) == session.attempt.run_id:
            raise RunError(
                f"run {session.attempt.run_id} would wait for itself: its body waits for run {head.run_id}, which is of the same thread; "
                "give the other run a thread of its own, or submit it with a DurableClient and do not wait",
                run_id=head.run_id,
            )

    async def _claim(self, process: Process, run_id: str, gone: Sequence[str], local: RunnableConfig, request: StreamRequest | None) -> Work | None:
        """Become the run's attempt.

        Args:
            gone: Owners whose run may be taken: dead ones, and this process itself for a run that it does not know it has.

        Raises:
            RunNotClaimable: Not now.
        """
        lease = await process.lease()
        if run_id in process.running:
            raise RunNotClaimable(f"run {run_id} is executed by this process already", run_id=run_id)
        served = {(self._app.name, self._app.version): self._app.code_version}
        claimed = await process.taking(run_id, lease, claim(process.connection, run_id, lease.owner, workflows=served, dead_owners=gone))
        return await self._begin_or_forget(process, claimed, local, request)

    async def _result(self, process: Process, head: RunHead) -> Any:
        """What a caller gets for a run that another process brought to its rest."""
        if head.status is RunStatus.COMPLETED:
            return self._app.codec.decode(head.output)
        if head.status is RunStatus.SUSPENDED:
            frontier = await frontiers.current(process.connection, head.run_id)
            return {"__interrupt__": public_interrupts(self._app.codec, frontier)}
        error = head.error or {}
        raise RunFailed(
            f"run {head.run_id} is {head.status}: {error.get('type', 'no error recorded')}",
            run_id=head.run_id,
            status=str(head.status),
            error=dict(error),
        )

    async def _begin(self, process: Process, claimed: Claim, local: RunnableConfig | None, request: StreamRequest | None = None) -> Work | None:
        """Prepare a claimed attempt; None if its run was to be stopped, or is one that kills its processes, and now has ended."""
        if claimed.head.is_cancel_requested:
            await runs.end_stopped(process.connection, claimed)
            process.running.pop(claimed.head.run_id, None)
            return None
        try:
            attempt = await Attempt.begin(process, await process.lease(), claimed)
            base = await runs.thread_state(process.connection, claimed.head.base_thread, claimed.head.base_turn)
        except BaseException as error:
            # Nothing was executed; others, or a later release of the code, may read it.
            await release(process.connection, claimed, held_back=_why_held_back(error))
            raise
        if claimed.head.crashes >= self._app.max_crashes and attempt.history.fruitless_attempts > self._app.max_crashes:
            await self._park(attempt)
            process.running.pop(claimed.head.run_id, None)
            return None
        process.running[claimed.head.run_id] = attempt
        try:
            (stored,) = await bring_in(process.connection, claimed.head.run_id, [claimed.head.settings])
            require_open(claimed.head.run_id, [stored])
            settings = self._app.codec.decode(stored)
            driver = Driver(self._app.graph(), attempt, self._app.codec, settings, local, base, request, self._app.redact)
            return Work(process, attempt, driver, local, request)
        except BaseException as error:  # noqa: BLE001 - raised again, after the run has got the end that it means
            raise await self.conclude(attempt, error) from None

    async def _park(self, attempt: Attempt) -> None:
        """End a run whose attempts have killed their processes one after the other, so that it kills no more."""
        open_ones = [f"{each.kind} {each.name!r} at {each.position}" for each in attempt.history.activities.values() if each.outcome is None]
        crashes = attempt.head.crashes
        message = (
            f"{crashes} processes died in a row while they executed this run, and recorded nothing more; "
            f"unfinished: {', '.join(open_ones) or 'no activity'}; find out why, then retry it"
        )
        log.error("run %s is parked: %s", attempt.run_id, message, extra=about(attempt.run_id, attempt.fence))
        await attempt.end(runs.Ending(type=EventType.RUN_FAILED, error={"type": runs.PARKED, "message": message}))

    async def follow(self, work: Work | Any, emit: Callable[[Any], None] | None = None) -> Any:
        """Run an attempt, and after each sleep of the run the next one, to the run's rest; for a caller who waits.

        Args:
            work: What `open` returned.
            emit: Gets the chunks of a stream.

        Returns:
            What LangGraph's invoke would return.

        Raises:
            BaseException: Whatever ended the attempt; the run has got the end that it means.
        """
        request = work.request if isinstance(work, Work) else None
        while isinstance(work, Work):
            reached = await self.run(work, emit)
            if not isinstance(reached, Asleep):
                return reached.output
            work = await self.after_sleep(work)
        if request is not None and emit is not None:
            for chunk in request.of_result(work):
                emit(chunk)
        return work

    async def after_sleep(self, work: Work) -> Work | Any:
        """The run's next attempt, for a caller who waits; or the result, if another process went on with it."""
        return await self._take(work.process, work.attempt.run_id, work.local or {}, work.request)

    async def run(self, work: Work, emit: Callable[[Any], None] | None = None) -> Ended | AtFrontier | Asleep:
        """Run an attempt to its end, on this loop or, for a synchronous app, in a thread.

        Args:
            emit: Gets the chunks of a stream.

        Raises:
            BaseException: Whatever ended the attempt; the run has got the end that it means.
        """
        try:
            running: asyncio.Future[Ended | AtFrontier | Asleep]
            # A task, or a thread with a context, of its own: context variables must not reach the caller's.
            if self._app.is_sync:
                running = asyncio.get_running_loop().run_in_executor(
                    _graph_threads(), contextvars.copy_context().run, work.driver.run, _from_thread(emit)
                )
            else:
                running = asyncio.create_task(work.driver.run_async(emit))
            try:
                reached = await running
            except asyncio.CancelledError:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                raise
        except BaseException as error:  # noqa: BLE001 - raised again, after the run has got the end that it means
            raise await asyncio.shield(asyncio.ensure_future(self.conclude(work.attempt, error))) from None
        finally:
            work.process.running.pop(work.attempt.run_id, None)
        return reached

    async def conclude(self, attempt: Attempt, raised: BaseException) -> BaseException:
        """Give the run the end that the attempt's failure means, and return what the caller is to see: where that end could not be recorded, why."""
        error: BaseException = unwrap(raised)
        if attempt.failure is not None:
            error = attempt.failure  # the verdict stands, whatever user code made of it
        try:
            match error:
                case CancelRequested():
                    await attempt.end_as_stopped()
                case Draining():
                    await attempt.release()
                case CorruptHistory() | AttemptOver():
                    pass
                case StoreError():
                    await attempt.release(held_back=_why_held_back(error))
                case asyncio.CancelledError() | KeyboardInterrupt() | SystemExit() | GeneratorExit():
                    await attempt.release()
                case NondeterminismError():
                    described = {"type": type(error).__name__, "message": error.message}
                    data = {"position": error.position, "expected": error.expected, "found": error.found, "code_version": self._app.code_version}
                    await attempt.end(runs.Ending(type=EventType.RUN_DIVERGED, error=described | data, data=data))
                case Exception():
                    await attempt.end(runs.Ending(type=EventType.RUN_FAILED, error=self._app.codec.describe_error(error)))
        except (AttemptOver, StoreError) as failure:
            named = about(attempt.run_id, attempt.fence)
            log.warning("run %s: attempt %d could not record its end: %s", attempt.run_id, attempt.fence, failure, extra=named)
            if isinstance(error, Exception):
                failure.add_note(f"This attempt would have ended with {type(error).__name__}: {error}")
                error = failure
        attempt.stop(error if isinstance(error, DurableError) else AttemptOver(f"run {attempt.run_id}: the attempt has ended"))
        return error


def _why_held_back(error: BaseException) -> str | None:
    """What the head says of an attempt that gave its run back; None if it was only stopped."""
    if not isinstance(error, Exception):
        return None
    return f"{type(error).__name__}: {error}" if isinstance(error, DurableError) else type(error).__name__  # a message of others could hold values


def _from_thread(emit: Callable[[Any], None] | None) -> Callable[[Any], None] | None:
    """What a graph in a thread calls to emit on the running loop."""
    if emit is None:
        return None
    loop, on_loop = asyncio.get_running_loop(), emit

    def emit_there(chunk: Any) -> None:
        loop.call_soon_threadsafe(on_loop, chunk)

    return emit_there
