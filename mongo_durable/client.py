"""`DurableClient`: submit runs, look at them, answer them. It executes nothing; a `Runner` or an `App` does.

A client needs neither the graph nor LangGraph: LangChain's objects are translated when a value has some.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar

from mongo_durable.engine.loop_thread import LoopThread
from mongo_durable.engine.policy import WhenBusy, is_queued
from mongo_durable.engine.resolving import Rules, draft_answer, resolve
from mongo_durable.engine.tokens import KEYS_VARIABLE, SigningKeys, answer_with_token, make_token
from mongo_durable.errors import ConfigurationError
from mongo_durable.protocol.events import Event, EventType, FrontierStatus, RunStatus
from mongo_durable.protocol.frontier import UNANSWERED, AnswerChannel
from mongo_durable.protocol.identity import Position
from mongo_durable.protocol.memory import MemoryRole
from mongo_durable.protocol.values import Tagged, decode, encode
from mongo_durable.snapshots import Draft, DraftAnswer, Frontier, Question, RunSnapshot, Utterance
from mongo_durable.store import audit, drafts, events, forks, frontiers, heads, histories, memory, pruning, runs, schema, waiting
from mongo_durable.store.audit import Refusal
from mongo_durable.store.connection import DEFAULT_DATABASE, Connection, Endpoint
from mongo_durable.store.documents import Answerer, Resolution, RunHead, RunLimit, StoredFrontier
from mongo_durable.store.pruning import PrunedRun
from mongo_durable.store.sealing import SEALED_TYPE
from mongo_durable.store.wakeups import Wakeups

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from mongo_durable.encryption import Cipher
    from mongo_durable.engine.authorizing import Authorize
    from mongo_durable.langgraph.codec import Codec

T = TypeVar("T")

_LOOK_AGAIN_S = 5.0
_FOLLOW_S = 0.25


class RunHandle:
    """A submitted run."""

    def __init__(self, client: DurableClient, run_id: str) -> None:
        self._client = client
        self.run_id = run_id

    async def wait(self, timeout: float | None = None) -> RunSnapshot:
        """See `DurableClient.wait`."""
        return await self._client.wait(self.run_id, timeout=timeout)

    async def get(self) -> RunSnapshot:
        """The run as it is now."""
        return await self._client.get_run(self.run_id)


class DurableClient:
    """Submit, read, answer and cancel runs.

    Args:
        uri: MongoDB URI; None takes `MONGO_DURABLE_URI`.
        database: None takes `MONGO_DURABLE_DATABASE`, else `mongo_durable`.
        client: A client that the application holds, instead of a URI.
        codec: For types that the application registered with its App (`app.codec`).
        authorize: Says who may answer what; asked for each answer of this client before anything is stored. See `AnswerRequest`.
        signing_keys: For resume tokens; None takes `MONGO_DURABLE_SIGNING_KEYS`.
        channel: By what way this client's answers are recorded to have come; the command line says "cli".
        cipher: As the App has it; without its keys, values that it encrypted are shown as they are stored, and no encrypted question can be answered.
    """

    def __init__(
        self,
        uri: str | None = None,
        *,
        database: str | None = None,
        client: Any = None,
        codec: Codec | None = None,
        cipher: Cipher | None = None,
        authorize: Authorize | None = None,
        signing_keys: SigningKeys | None = None,
        channel: AnswerChannel = AnswerChannel.CLIENT,
    ) -> None:
        found = uri or (os.environ.get("MONGO_DURABLE_URI") if client is None else None)
        self._database = database or os.environ.get("MONGO_DURABLE_DATABASE", DEFAULT_DATABASE)
        self._endpoint = Endpoint(found, self._database, client, cipher)
        self._codec = codec
        self._rules = Rules(authorize=authorize, decode=self.decode)
        self._signing_keys = signing_keys
        self._channel = channel
        self._wakeups: Wakeups | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._connection()
        except BaseException:
            await self.aclose()  # there will be no __aexit__
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the change stream and the connection."""
        if self._wakeups is not None:
            await self._wakeups.aclose()
            self._wakeups = None
        await self._endpoint.aclose()

    async def submit(
        self,
        workflow: str,
        input: Any,
        *,
        version: str = "1",
        thread_id: str | None = None,
        run_id: str | None = None,
        when_busy: WhenBusy = "refuse",
        configurable: Mapping[str, Any] | None = None,
        context: Any = None,
        priority: int = 0,
        available_at: datetime | timedelta | None = None,
        deadline: datetime | timedelta | None = None,
        limit: RunLimit | None = None,
    ) -> RunHandle:
        """Accept a run for execution by a runner. When this returns it is majority-committed.

        Args:
            input: The graph's input: JSON-safe values, LangChain messages, registered types.
            run_id: The same name again is the same run; None makes one up.
            thread_id: The conversation; None gives the run one of its own.
            when_busy: What to do while another run is live on the thread: "refuse" this one, or "queue" it until the thread is free.
            configurable, context: As for LangGraph; stored with the run, so the same in every attempt.
            priority: Of the runs that wait, the highest goes first; of equal ones, the oldest.
            available_at: Not to be executed before this time (with a time zone), or this long from now by the server's clock.
            deadline: When the run fails, with RunDeadlineExceeded, if it has not ended; likewise.
            limit: How many runs with its key may be executed at once; further ones wait.

        Raises:
            ThreadBusy, RunConflict, NotJsonSafe, ConfigurationError.
        """
        for name, when in (("available_at", available_at), ("deadline", deadline)):
            if isinstance(when, datetime) and when.tzinfo is None:
                raise ConfigurationError(f"{name} needs a time zone: datetime.now(UTC) + timedelta(…), or just the timedelta")
        named = run_id or str(uuid.uuid4())
        settings = {name: value for name, value in (("configurable", configurable), ("context", context)) if value not in (None, {})}
        submission = runs.Submission(
            run_id=named,
            workflow=workflow,
            version=version,
            thread_id=thread_id or named,
            input=self.encode(input),
            settings=self.encode(settings),
            priority=priority,
            available_at=available_at,
            deadline=deadline,
            limit=limit,
        )
        connection = await self._connection()
        await schema.prepare(connection)
        await runs.submit(connection, submission, is_queued_when_busy=is_queued(when_busy))
        return RunHandle(self, named)

    async def get_run(self, run_id: str) -> RunSnapshot:
        """The run as it is now.

        Raises:
            RunNotFound: There is none.
        """
        connection = await self._connection()
        head = await heads.get(connection, run_id)
        frontier = None
        if head.status is RunStatus.SUSPENDED:
            frontier = await self.frontier(run_id, head.generation)
        return self._snapshot(head, frontier, await waiting.reasons(connection, [head]))

    async def list_runs(
        self,
        *,
        status: str | None = None,
        workflow: str | None = None,
        version: str | None = None,
        thread_id: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[RunSnapshot]:
        """Runs, newest first, without their outputs.

        Args:
            after: `RunSnapshot.cursor` of the last one of the page before: what was submitted meanwhile moves no page.
        """
        if status is not None and status not in list(RunStatus):
            raise ConfigurationError(f"status is one of {', '.join(RunStatus)}, not {status!r}")
        connection = await self._connection()
        found = await heads.listing(
            connection, status=status, workflow=workflow, version=version, thread_id=thread_id, limit=limit, after=_cursor(after)
        )
        return await self._listed(found)

    async def unserved_runs(self, *, limit: int = 100, after: str | None = None) -> list[RunSnapshot]:
        """Runs that could go on, but whose workflow and version no live runner serves; the oldest first, without their outputs."""
        return await self._listed(await waiting.unserved(await self._connection(), limit, _cursor(after)))

    async def _listed(self, found: list[RunHead]) -> list[RunSnapshot]:
        reasons = await waiting.reasons(await self._connection(), found)
        return [self._snapshot(head, None, reasons, has_output=False) for head in found]

    async def wait(self, run_id: str, *, timeout: float | None = None) -> RunSnapshot:
        """Wait until the run is at rest: ended, or suspended.

        Args:
            timeout: Seconds; None waits for ever.

        Raises:
            TimeoutError: It was not at rest in time.
        """
        connection = await self._connection()
        if self._wakeups is None:
            self._wakeups = Wakeups(self._endpoint)
        async with asyncio.timeout(timeout), self._wakeups.listen(run_id) as listener:
            while not (await heads.get(connection, run_id)).status.is_rest:
                await listener.wait(_LOOK_AGAIN_S)
            return await self.get_run(run_id)

    async def open_frontiers(
        self,
        *,
        workflow: str | None = None,
        thread_id: str | None = None,
        run_id: str | None = None,
        audience: str | None = None,
        limit: int = 1000,
        after: str | None = None,
    ) -> list[Frontier]:
        """Frontiers that wait for answers, oldest first.

        Args:
            audience: Those with a question that this audience is asked now; a second audience from the time of escalation on.
            after: `Frontier.cursor` of the last one of the page before.
        """
        found = await frontiers.open_frontiers(
            await self._connection(),
            workflow=workflow,
            thread_id=thread_id,
            run_id=run_id,
            audience=audience,
            limit=limit,
            after=_cursor(after),
        )
        return [self._frontier(each) for each in found]

    async def frontier(self, run_id: str, generation: int) -> Frontier | None:
        """One frontier of a run, open or not; None if the run never opened it."""
        stored = await frontiers.get(await self._connection(), run_id, generation)
        return self._frontier(stored) if stored is not None else None

    async def resolve(
        self,
        run_id: str,
        answers: Mapping[str, Any],
        *,
        generation: int | None = None,
        digest: str | None = None,
        resolved_by: str | None = None,
        note: str | None = None,
    ) -> Resolution:
        """Answer all questions of a run's open frontier, at once. When this returns the answers are majority-committed.

        Args:
            answers: Any JSON-safe value by activity id.
            generation, digest: What the reviewer saw (`Frontier.generation`, `.digest`); None does not pin it.
            resolved_by, note: Who answers and why; recorded, and what `authorize` is asked about.

        Returns:
            The receipt; the same answers again give the same one.

        Raises:
            ResolutionError: They were refused; nothing was written but an audit event (`refusals`). See its subclasses.
            RunNotFound, RunNotSuspended.
        """
        answerer = Answerer(by=resolved_by, note=note, channel=self._channel)
        plain = self._plain(answers)
        return await resolve(await self._connection(), run_id, plain, answerer, generation=generation, digest=digest, rules=self._rules)

    async def draft_answer(
        self,
        run_id: str,
        answers: Mapping[str, Any],
        *,
        answered_by: str,
        note: str | None = None,
        generation: int | None = None,
        digest: str | None = None,
    ) -> Draft:
        """Answer some questions of a run's open frontier, for several people who answer it together.

        The answers are kept beside the run. With the one that completes them, all go in as one resolution, in the same transaction; nothing reaches
        the run before. Who gave an answer can change it until then, nobody else can.

        Args:
            answers: Any JSON-safe value by activity id. They pass the same checks as in `resolve`.
            answered_by, note: Who answers and why; recorded with each answer.
            generation, digest: As for `resolve`.

        Returns:
            The draft; its `resolution` is the receipt if it is complete.

        Raises:
            DraftConflict: Somebody else has answered one of the questions otherwise.
            ResolutionError, RunNotFound, RunNotSuspended: As for `resolve`.
            ConfigurationError: There is no answer, or nobody answers.
        """
        if not answered_by or not answers:
            raise ConfigurationError("a draft says who answers (answered_by=) and what: give both")
        connection = await self._connection()
        answerer = Answerer(by=answered_by, note=note, channel=AnswerChannel.DRAFT)
        plain = self._plain(answers)
        stored = await draft_answer(connection, run_id, plain, answerer, generation=generation, digest=digest, rules=self._rules)
        return await self._draft(connection, stored)

    async def draft(self, run_id: str, *, generation: int | None = None) -> Draft | None:
        """The draft for a frontier of a run, the newest if none is named; None if nobody has begun one.

        Raises:
            RunNotFound, RunNotSuspended: The run never had a frontier.
        """
        connection = await self._connection()
        wanted = await _newest(connection, run_id) if generation is None else generation
        stored = await drafts.get(connection, run_id, wanted)
        return await self._draft(connection, stored) if stored is not None else None

    async def open_drafts(self, shown: Iterable[Frontier]) -> list[Draft]:
        """The drafts that people have begun for these frontiers, which are open."""
        connection = await self._connection()
        asked = {(each.run_id, each.generation): [entry.activity_id for entry in each.entries] for each in shown}
        return [self._draft_of(each, asked[each.run_id, each.generation]) for each in await drafts.of_open(connection, asked)]

    async def withdraw_answer(self, run_id: str, activity_ids: Collection[str], *, answered_by: str, generation: int | None = None) -> bool:
        """Take one's own answers out of a draft. False: they are not all there, not all one's own, or have gone in; then nothing has changed."""
        connection = await self._connection()
        wanted = await _newest(connection, run_id) if generation is None else generation
        return await drafts.withdraw(connection, run_id, wanted, list(activity_ids), answered_by)

    async def resume_token(self, frontier: Frontier, *, expires_in: timedelta, audience: str | None = None) -> str:
        """A signed token that allows to answer exactly this frontier, for a link in a mail or chat. Anybody who has it can use it.

        Args:
            frontier: As its reader is shown it: the token is bound to its run, generation and digest.
            expires_in: How long it can be used, by the server's clock.
            audience: Whom it is for: `resolve_with_token` has to name the same. None: whoever has it.

        Raises:
            ConfigurationError: There are no signing keys; there is no default one.
        """
        keys = self._keys()
        now = await (await self._connection()).server_time()
        return make_token(
            keys,
            database=self._database,
            run_id=frontier.run_id,
            generation=frontier.generation,
            digest=frontier.digest,
            audience=audience,
            now=now,
            expires_in=expires_in,
        )

    async def resolve_with_token(
        self, token: str, answers: Mapping[str, Any], *, audience: str | None = None, resolved_by: str | None = None, note: str | None = None
    ) -> Resolution:
        """Answer the frontier that a resume token is for. The same checks hold as in `resolve`.

        It can be used once, because its frontier can be answered once; an answer that is refused does not use it up.

        Args:
            audience: Who uses it, as the application has found out.
            resolved_by: Recorded; None takes the audience.

        Returns:
            The receipt; the same answers again give the same one.

        Raises:
            TokenInvalid, TokenExpired, TokenOutOfScope, TokenUsed: The token does not allow it.
            ResolutionError, RunNotFound, RunNotSuspended: As for `resolve`.
        """
        answerer = Answerer(by=resolved_by if resolved_by is not None else audience, note=note, channel=AnswerChannel.TOKEN)
        connection = await self._connection()
        return await answer_with_token(connection, self._keys(), token, self._plain(answers), answerer, audience=audience, rules=self._rules)

    async def refusals(self, run_id: str) -> list[Refusal]:
        """The answers to a run that were refused, in order: what, to whom, when and why."""
        return await audit.refusals(await self._connection(), run_id)

    def _plain(self, answers: Mapping[str, Any]) -> dict[str, Any]:
        return {activity_id: self.encode(answer) for activity_id, answer in answers.items()}

    def _keys(self) -> SigningKeys:
        if self._signing_keys is None:
            self._signing_keys = SigningKeys.from_environment()
        if self._signing_keys is None:
            raise ConfigurationError(f"resume tokens need a key to sign with: give DurableClient(signing_keys=…) or set {KEYS_VARIABLE}")
        return self._signing_keys

    async def _draft(self, connection: Connection, stored: drafts.StoredDraft) -> Draft:
        frontier = await frontiers.get(connection, stored.run_id, stored.generation)
        return self._draft_of(stored, [entry.activity_id for entry in frontier.entries] if frontier is not None else [])

    def _draft_of(self, stored: drafts.StoredDraft, asked: Collection[str]) -> Draft:
        return Draft(
            run_id=stored.run_id,
            generation=stored.generation,
            digest=stored.digest,
            answers={
                each: DraftAnswer(value=self.decode(stored.answers[each].value), by=found.by, note=found.note, at=found.at)
                for each, found in stored.answers.items()
            },
            missing=tuple(each for each in asked if each not in stored.answers),
            resolution=stored.resolution,
        )

    async def cancel(self, run_id: str, *, reason: str | None = None) -> RunSnapshot:
        """End a run as cancelled, whatever it does now. When this returns, nothing of it is executed or recorded any more."""
        await runs.cancel(await self._connection(), run_id, reason, f"canceller-{uuid.uuid4()}")
        return await self.get_run(run_id)

    async def retry(self, run_id: str) -> RunSnapshot:
        """Let a failed or diverged run go on from its history.

        Raises:
            RunError, ThreadBusy: It is in another state, or its thread has moved on.
        """
        await runs.retry(await self._connection(), run_id)
        return await self.get_run(run_id)

    async def prune(
        self,
        *,
        older_than: timedelta,
        status: str | None = None,
        workflow: str | None = None,
        thread_id: str | None = None,
        batch: int = 500,
        dry_run: bool = False,
        on_run: Callable[[PrunedRun], None] | None = None,
    ) -> list[str]:
        """Remove runs that ended long ago, with everything they own; oldest first, a few documents at a time. A run that has not ended stays, and so
        does what a later turn of its thread, or a fork, starts from: the thread's newest committed state.

        A call that was killed is continued by the next one.

        Args:
            older_than: How long ago they ended at least, by the server's clock.
            status: completed, failed, diverged or cancelled; None: all of these.
            batch: Documents a transaction.
            dry_run: Remove nothing.
            on_run: Told of each run when it is gone.

        Returns:
            Ids of the runs that were removed, or with `dry_run` would be.
        """
        selection = pruning.Selection(older_than=older_than, status=status, workflow=workflow, thread_id=thread_id)
        removed: list[str] = []
        async with aclosing(pruning.prune(await self._connection(), selection, batch=batch, is_dry_run=dry_run)) as found:
            async for each in found:
                removed.append(each.run_id)
                if on_run is not None:
                    on_run(each)
        return removed

    async def fork(self, run_id: str, *, at: int | str, new_run_id: str | None = None) -> RunHandle:
        """Make a new run that replays the beginning of a run and runs the rest anew, on a thread of its own.

        Args:
            at: A root step, up to whose seal everything is kept; or a position (`event.position.text`, `question.position`): that activity runs
                again, that question is asked again.

        Raises:
            RunNotFound, RunConflict: There is no such run or place, or the new name is taken.
        """
        try:
            place = at if isinstance(at, int) else Position.parse(at)
        except ValueError as error:
            raise ConfigurationError(f"at= is a step number or a position such as 'agent/1/plan@2#1': {error}") from None
        named = new_run_id or str(uuid.uuid4())
        await forks.fork(await self._connection(), run_id, place, named)
        return RunHandle(self, named)

    async def history(self, run_id: str) -> list[Event]:
        """The events of a run, in order, with values as they were given.

        Raises:
            RunNotFound: There is none.
        """
        connection = await self._connection()
        await heads.get(connection, run_id)
        return [self._event(event) for event in await events.read_history(connection, run_id)]

    async def events(self, run_id: str, *, follow: bool = False) -> AsyncIterator[Event]:
        """The events of a run as they come; with `follow`, until the run ends."""
        connection = await self._connection()
        await heads.get(connection, run_id)
        seen = 0
        while True:
            status = (await heads.get(connection, run_id)).status  # read before the events: what ended the run is then among them
            for event in await events.read_history(connection, run_id, after=seen):
                seen = event.seq
                yield self._event(event)
            if not follow or status.is_end:
                return
            await asyncio.sleep(_FOLLOW_S)

    async def export(self, run_id: str) -> AsyncIterator[str]:
        """The whole history of a run as lines of JSON, without line ends, one event at a time; several runs may go into one file.

        `mongo_durable.replaying.replay_history` replays them without a database.

        Raises:
            RunNotFound: There is none.
        """
        async with aclosing(histories.lines(await self._connection(), run_id)) as lines:
            async for line in lines:
                yield line

    async def transcript(self, thread_id: str) -> list[Utterance]:
        """The conversation of a thread, in order: inputs, model answers, tool results, human answers. What a run adds is there when it rests."""
        found = await memory.transcript(await self._connection(), thread_id)
        return [
            Utterance(
                run_id=each.run_id,
                turn=each.turn,
                role=each.entry.role.value,
                name=each.entry.name,
                activity_id=each.entry.activity_id,
                value=self._said(each),
                error=each.entry.error,
            )
            for each in found
        ]

    def _said(self, stored: memory.StoredMemory) -> Any:
        value = self.decode(stored.entry.value)
        # A model's outcome holds its message beside what the provider said about the call.
        return value["message"] if stored.entry.role is MemoryRole.MODEL and isinstance(value, dict) and "message" in value else value

    async def _connection(self) -> Connection:
        connection = self._endpoint.connection()
        await schema.check(connection)
        return connection

    def encode(self, value: Any) -> Any:
        """The plain value of an application value.

        Raises:
            NotJsonSafe: It cannot be stored.
        """
        return self._codec.encode(value) if self._codec is not None else encode(value, convert=_convert)

    def decode(self, plain: Any) -> Any:
        """The application value of a plain value."""
        return decode(plain, revive=self._revive)

    def _revive(self, tagged: Tagged) -> object:
        if self._codec is not None and tagged.type != SEALED_TYPE:
            return self._codec.revive(tagged)
        return _revive(tagged)

    def _snapshot(self, head: RunHead, frontier: Frontier | None, reasons: Mapping[str, str], *, has_output: bool = True) -> RunSnapshot:
        return RunSnapshot(
            run_id=head.run_id,
            workflow=head.workflow,
            version=head.version,
            thread_id=head.thread_id,
            status=head.status.value,
            generation=head.generation,
            attempt=head.fence,
            output=self.decode(head.output) if has_output and head.output is not None else None,
            error=head.error,
            frontier=frontier,
            submitted_at=head.submitted_at,
            ended_at=head.ended_at,
            waits_for=reasons.get(head.run_id),
            priority=head.priority,
            available_at=head.available_at if not head.status.is_end and head.status is not RunStatus.RUNNING else None,
            deadline_at=head.deadline_at,
        )

    def _frontier(self, stored: StoredFrontier) -> Frontier:
        return Frontier(
            run_id=stored.run_id,
            workflow=stored.workflow,
            thread_id=stored.thread_id,
            generation=stored.generation,
            digest=stored.digest,
            status=FrontierStatus(stored.status).value,
            entries=tuple(
                Question(
                    activity_id=entry.activity_id,
                    name=entry.name,
                    kind=entry.kind.value,
                    position=entry.position.text,
                    value=self.decode(entry.value),
                    response_schema=self.decode(entry.response_schema),
                    expires_at=entry.expires_at,
                    has_default=entry.default is not UNANSWERED,
                    default=None if entry.default is UNANSWERED else self.decode(entry.default),
                    audience=entry.audience.first if entry.audience is not None else None,
                    escalates_to=entry.audience.then if entry.audience is not None else None,
                    escalates_at=entry.escalates_at,
                )
                for entry in stored.entries
            ),
            opened_at=stored.opened_at,
            expires_at=stored.expires_at,
        )

    def _event(self, event: Event) -> Event:
        data = dict(event.data)
        if event.type in (EventType.ACTIVITIES_RESOLVED, EventType.FRONTIER_EXPIRED):
            data["answers"] = {activity_id: self.decode(answer) for activity_id, answer in data["answers"].items()}
        return replace(event, value=self.decode(event.value), data=data)


async def _newest(connection: Connection, run_id: str) -> int:
    return (await frontiers.current(connection, run_id)).generation


def _cursor(after: str | None) -> heads.Cursor | None:
    return heads.Cursor.parse(after) if after is not None else None


def _convert(value: object) -> Tagged | None:
    # LangChain is imported only when a value is one of its objects.
    if type(value).__module__.partition(".")[0] in ("langchain_core", "langgraph"):
        return _default_codec().tag(value)
    return None


def _revive(tagged: Tagged) -> object:
    if tagged.type.partition(":")[0] in ("langchain", "langgraph"):
        return _default_codec().revive(tagged)
    return tagged  # encrypted, or of a type that only the application knows: shown as it is stored


def _default_codec() -> Codec:
    from mongo_durable.langgraph.codec import Codec

    return Codec()


class SyncDurableClient:
    """`DurableClient` for plain scripts and notebooks: the same methods, blocking. It lives on an event loop of its own thread."""

    def __init__(self, uri: str | None = None, *, client: Any = None, **options: Any) -> None:
        if client is not None:
            raise ConfigurationError("SyncDurableClient takes a uri: an async client belongs to its own event loop")
        self._client = DurableClient(uri, **options)
        self._thread = LoopThread("mongo_durable-client")

    def __enter__(self) -> Self:
        self._call(self._client.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the thread."""
        self._call(self._client.aclose())
        self._thread.close()

    def submit(self, workflow: str, input: Any, **options: Any) -> SyncRunHandle:
        """See `DurableClient.submit`."""
        return SyncRunHandle(self, self._call(self._client.submit(workflow, input, **options)).run_id)

    def get_run(self, run_id: str) -> RunSnapshot:
        """See `DurableClient.get_run`."""
        return self._call(self._client.get_run(run_id))

    def list_runs(self, **options: Any) -> list[RunSnapshot]:
        """See `DurableClient.list_runs`."""
        return self._call(self._client.list_runs(**options))

    def unserved_runs(self, **options: Any) -> list[RunSnapshot]:
        """See `DurableClient.unserved_runs`."""
        return self._call(self._client.unserved_runs(**options))

    def wait(self, run_id: str, *, timeout: float | None = None) -> RunSnapshot:
        """See `DurableClient.wait`."""
        return self._call(self._client.wait(run_id, timeout=timeout))

    def open_frontiers(self, **options: Any) -> list[Frontier]:
        """See `DurableClient.open_frontiers`."""
        return self._call(self._client.open_frontiers(**options))

    def frontier(self, run_id: str, generation: int) -> Frontier | None:
        """See `DurableClient.frontier`."""
        return self._call(self._client.frontier(run_id, generation))

    def resolve(self, run_id: str, answers: Mapping[str, Any], **options: Any) -> Resolution:
        """See `DurableClient.resolve`."""
        return self._call(self._client.resolve(run_id, answers, **options))

    def draft_answer(self, run_id: str, answers: Mapping[str, Any], **options: Any) -> Draft:
        """See `DurableClient.draft_answer`."""
        return self._call(self._client.draft_answer(run_id, answers, **options))

    def draft(self, run_id: str, *, generation: int | None = None) -> Draft | None:
        """See `DurableClient.draft`."""
        return self._call(self._client.draft(run_id, generation=generation))

    def open_drafts(self, shown: Iterable[Frontier]) -> list[Draft]:
        """See `DurableClient.open_drafts`."""
        return self._call(self._client.open_drafts(shown))

    def withdraw_answer(self, run_id: str, activity_ids: Collection[str], **options: Any) -> bool:
        """See `DurableClient.withdraw_answer`."""
        return self._call(self._client.withdraw_answer(run_id, activity_ids, **options))

    def resume_token(self, frontier: Frontier, *, expires_in: timedelta, audience: str | None = None) -> str:
        """See `DurableClient.resume_token`."""
        return self._call(self._client.resume_token(frontier, expires_in=expires_in, audience=audience))

    def resolve_with_token(self, token: str, answers: Mapping[str, Any], **options: Any) -> Resolution:
        """See `DurableClient.resolve_with_token`."""
        return self._call(self._client.resolve_with_token(token, answers, **options))

    def refusals(self, run_id: str) -> list[Refusal]:
        """See `DurableClient.refusals`."""
        return self._call(self._client.refusals(run_id))

    def cancel(self, run_id: str, *, reason: str | None = None) -> RunSnapshot:
        """See `DurableClient.cancel`."""
        return self._call(self._client.cancel(run_id, reason=reason))

    def retry(self, run_id: str) -> RunSnapshot:
        """See `DurableClient.retry`."""
        return self._call(self._client.retry(run_id))

    def prune(self, *, older_than: timedelta, **options: Any) -> list[str]:
        """See `DurableClient.prune`."""
        return self._call(self._client.prune(older_than=older_than, **options))

    def fork(self, run_id: str, *, at: int | str, new_run_id: str | None = None) -> SyncRunHandle:
        """See `DurableClient.fork`."""
        return SyncRunHandle(self, self._call(self._client.fork(run_id, at=at, new_run_id=new_run_id)).run_id)

    def history(self, run_id: str) -> list[Event]:
        """See `DurableClient.history`."""
        return self._call(self._client.history(run_id))

    def transcript(self, thread_id: str) -> list[Utterance]:
        """See `DurableClient.transcript`."""
        return self._call(self._client.transcript(thread_id))

    def events(self, run_id: str, *, follow: bool = False) -> Iterator[Event]:
        """See `DurableClient.events`."""
        return self._each(self._client.events(run_id, follow=follow))

    def export(self, run_id: str) -> Iterator[str]:
        """See `DurableClient.export`."""
        return self._each(self._client.export(run_id))

    def _each(self, stream: AsyncIterator[T]) -> Iterator[T]:
        while True:
            try:
                yield self._call(_next(stream))
            except StopAsyncIteration:
                return

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._thread.call(coroutine)


async def _next(stream: AsyncIterator[T]) -> T:
    return await anext(stream)


class SyncRunHandle:
    """A submitted run, for synchronous code."""

    def __init__(self, client: SyncDurableClient, run_id: str) -> None:
        self._client = client
        self.run_id = run_id

    def wait(self, timeout: float | None = None) -> RunSnapshot:
        """See `DurableClient.wait`."""
        return self._client.wait(self.run_id, timeout=timeout)

    def get(self) -> RunSnapshot:
        """The run as it is now."""
        return self._client.get_run(self.run_id)
