"""Every error that mongo_durable raises.

    DurableError
    ├── ConfigurationError          the set-up cannot work: what to change is in the message
    │   ├── ReplicaSetRequired
    │   └── SchemaVersionMismatch
    ├── UnsupportedGraph            a shape that cannot be made durable, found before it could run wrongly
    ├── NondeterminismError         the code did something else than the history says
    ├── PayloadError                a value that cannot be stored
    │   ├── NotJsonSafe
    │   └── PayloadTooLarge
    ├── ResolutionError             an answer that was refused: nothing was written
    │   ├── UnknownActivity
    │   ├── IncompleteResolution
    │   ├── ResolutionConflict
    │   ├── StaleGeneration
    │   ├── InvalidAnswer
    │   ├── NotAuthorized
    │   ├── DraftConflict
    │   ├── FrontierExpired
    │   └── TokenError              a resume token that opens nothing
    │       ├── TokenInvalid
    │       ├── TokenExpired
    │       ├── TokenOutOfScope
    │       └── TokenUsed
    ├── RunError                    about one run
    │   ├── RunNotFound
    │   ├── RunConflict
    │   ├── ThreadBusy
    │   ├── RunNotSuspended
    │   ├── RunNotClaimable
    │   ├── RunFailed
    │   ├── ActivityFailed
    │   ├── InterruptExpired
    │   ├── ProposalChanged
    │   ├── UnusableAnswer
    │   └── UnknownOutcome
    ├── AttemptOver                 this process is no longer the attempt; it may write nothing more
    │   ├── Superseded
    │   ├── LeaseLost
    │   ├── Draining
    │   ├── CancelRequested
    │   └── HistoryEnded
    └── StoreError                  about the database
        ├── StoreUnavailable
        ├── NotPermitted
        ├── DecryptionFailed
        ├── CommitUnknown
        └── CorruptHistory

A message says what and where (ids), what was expected and found, and what to do. It never contains a payload or a URI. The class docstring's
first paragraph is the message where the raiser has nothing to add.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, Self


class DurableError(Exception):
    """Something in mongo_durable failed.

    Attributes:
        code: Stable machine-readable name of the class, in snake case.
        run_id: The run that it is about, or None.
        retryable: Whether the same call may succeed later without a change by the caller.
        fields: What the class names besides, such as `expected` and `found`.
    """

    code: ClassVar[str] = "durable_error"
    retryable: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.code = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in cls.__name__).lstrip("_")

    def __init__(self, message: str | None = None, *, run_id: str | None = None, **fields: Any) -> None:
        self.message = message or " ".join(inspect.cleandoc(type(self).__doc__ or type(self).__name__).partition("\n\n")[0].split())
        self.run_id = run_id
        self.fields = fields
        for name, value in fields.items():
            setattr(self, name, value)
        super().__init__(self.message)

    def __str__(self) -> str:
        where = f" (run {self.run_id})" if self.run_id and self.run_id not in self.message else ""
        return f"{self.message}{where} [{self.code}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.run_id, self.fields)

    def with_run(self, run_id: str) -> Self:
        """Name the run that this error is about, where the raiser could not know it."""
        self.run_id = self.run_id or run_id
        return self


def _rebuild(cls: type[DurableError], message: str, run_id: str | None, fields: dict[str, Any]) -> DurableError:
    return cls(message, run_id=run_id, **fields)


class ConfigurationError(DurableError):
    """mongo_durable is not set up in a way that can work."""


class ReplicaSetRequired(ConfigurationError):
    """The server is a standalone: start it with --replSet and run rs.initiate(), or use Atlas. A standalone has no transactions and no change
    streams."""


class SchemaVersionMismatch(ConfigurationError):
    """A stored document was written by a newer mongo_durable: upgrade this process.

    Attributes:
        expected: Highest schema version that this release reads.
        found: Schema version of the document.
    """

    expected: int
    found: int


class UnsupportedGraph(DurableError):
    """The graph has a shape that cannot be made durable.

    Attributes:
        node: Name of the node, or None.
    """

    node: str | None = None


class NondeterminismError(DurableError):
    """The code did something else than the history of the run says.

    Attributes:
        position: Where, as text.
        expected: What the history has there.
        found: What the code did there.
    """

    position: str
    expected: Any
    found: Any


class PayloadError(DurableError):
    """A value cannot be stored."""


class NotJsonSafe(PayloadError):
    """A value is of a type that cannot be stored and read back exactly.

    Attributes:
        path: Path to the value, such as `$.items[2].when`.
        type: Qualified name of its type.
    """

    path: str
    type: str


class PayloadTooLarge(PayloadError):
    """A value is too large to be stored.

    Attributes:
        size: Its size in bytes.
        limit: The limit in bytes.
    """

    size: int
    limit: int


class ResolutionError(DurableError):
    """The answers were refused; nothing was written."""


class UnknownActivity(ResolutionError):
    """The run has no open question with this activity id.

    Attributes:
        activity_ids: The ids that are not in the open frontier.
    """

    activity_ids: list[str]


class IncompleteResolution(ResolutionError):
    """All questions of a frontier are answered at once.

    Attributes:
        missing: Activity ids without an answer.
        extra: Ids that are not in the frontier.
    """

    missing: list[str]
    extra: list[str]


class ResolutionConflict(ResolutionError):
    """The frontier was answered before, with other answers: the first ones stand."""


class StaleGeneration(ResolutionError):
    """The run has moved on since the reviewer looked: read the open frontier again.

    Attributes:
        expected: What the caller pinned (generation or digest).
        found: What the run has now.
    """

    expected: Any
    found: Any


class InvalidAnswer(ResolutionError):
    """An answer does not fit the response schema of its question.

    Attributes:
        activity_id: The question.
        errors: One text per fault, each with its path.
    """

    activity_id: str
    errors: list[str]


class FrontierExpired(ResolutionError):
    """The frontier passed its deadline before this answer came: its declared default was recorded."""


class NotAuthorized(ResolutionError):
    """Whoever answers may not give this answer.

    A hook `authorize` raises it to say why, or does not return True.
    """


class DraftConflict(ResolutionError):
    """Somebody else has answered this question otherwise, in the draft of the same frontier.

    Attributes:
        activity_id: The question.
        answered_by: Who.
    """

    activity_id: str
    answered_by: str


class TokenError(ResolutionError):
    """A resume token does not allow this answer."""


class TokenInvalid(TokenError):
    """This is no resume token of ours: it was changed, cut, or signed with a key that is not known here."""


class TokenExpired(TokenError):
    """The resume token's time is over: ask for another one."""


class TokenOutOfScope(TokenError):
    """The resume token is for another audience or database."""


class TokenUsed(TokenError):
    """The questions of this resume token were answered before, with other answers: the first ones stand."""


class RunError(DurableError):
    """A run is not in a state that allows this."""


class RunNotFound(RunError):
    """There is no run with this id in this database."""


class RunConflict(RunError):
    """A run with this id exists and is another one: its workflow, thread or input differs."""


class ThreadBusy(RunError):
    """Another run is live on this thread: wait for it, answer it or cancel it.

    Attributes:
        thread_id: The thread.
        active_run: The run that is live on it.
    """

    thread_id: str
    active_run: str


class RunNotSuspended(RunError):
    """The run waits for no answer.

    Attributes:
        status: Its status now.
    """

    status: str


class RunNotClaimable(RunError):
    """The run cannot be taken by this process now: another process has it, or it has ended or waits for answers.

    Attributes:
        status: Its status as far as known.
    """

    status: str | None = None


class RunFailed(RunError):
    """The run ended as failed, diverged or cancelled.

    Attributes:
        status: `failed`, `diverged` or `cancelled`.
        error: The recorded error: type, message, and more where known.
    """

    status: str
    error: Any


class ActivityFailed(RunError):
    """A recorded activity failed with an exception type that this process cannot rebuild; type and message are those of the original.

    Attributes:
        error_type: Qualified name of the original type.
    """

    error_type: str


class UnknownOutcome(RunError):
    """A process died inside an effect, and its policy says that the run must not guess.

    Attributes:
        position: The effect's position, as text.
        name: Its name.
    """

    position: str
    name: str


class InterruptExpired(RunError):
    """Nobody answered before the deadline, and the question has no default: raised where the code waited for the answer."""


class ProposalChanged(RunError):
    """What was approved is not what is to be done now: ask for approval again.

    Attributes:
        expected: Digest of what was approved.
        found: Digest of what is to be done.
    """

    expected: str
    found: str


class UnusableAnswer(RunError):
    """An answer that fits its question's JSON Schema is refused by the model of the code that asked: it is stored, and the run has failed.

    Attributes:
        activity_id: The question.
        name: Its name.
        errors: One text per fault, each with its path.
    """

    activity_id: str
    name: str
    errors: list[str]


OF_THE_CODE = (ActivityFailed, InterruptExpired, ProposalChanged)
"""Raised where application code runs, for it to handle: a failure of its activity like any other exception. All our other errors end the attempt."""


class AttemptOver(DurableError):
    """This attempt has ended; nothing more is written under its fence."""


class Superseded(AttemptOver):
    """Another process has taken the run over."""


class LeaseLost(AttemptOver):
    """This process was silent for longer than its lease: others may have its runs, so it starts no effect."""


class Draining(AttemptOver):
    """This process is being stopped: the attempt gives its run back before it starts another effect."""


class CancelRequested(AttemptOver):
    """The run is to be cancelled: its attempt stops at the next durable call and ends it."""


class HistoryEnded(AttemptOver):
    """A replay that executes nothing has come to the end of its history."""


class StoreError(DurableError):
    """MongoDB did not do what was asked."""


class StoreUnavailable(StoreError):
    """MongoDB cannot be reached. You may not conclude that the write was not applied."""

    retryable = True


class NotPermitted(StoreError):
    """The database user may not do this: give it a role that allows it (`mongo-durable init --roles` makes them).

    What was refused was not done. What the same call did before it stands.

    Attributes:
        action: MongoDB's name of what was refused (`insert`, `changeStream`, …), or None where the server did not say.
        collection: What it was to be done on, or None.
        roles: The roles of mongo_durable that allow it, the weakest first; empty for what only an admin does.
    """

    action: str | None = None
    collection: str | None = None
    roles: list[str] = []  # noqa: RUF012 - never changed; an instance has its own


class DecryptionFailed(StoreError):
    """A stored value is encrypted, and this process does not have the key for it, or the value was changed.

    Attributes:
        key_id: Id of the key that the value names.
    """

    key_id: str


class CommitUnknown(StoreError):
    """The answer to a commit was lost. You cannot know whether it succeeded: read, or send the same again."""

    retryable = True


class CorruptHistory(StoreError):
    """The stored history of a run breaks the protocol. Nothing was written; do not edit events by hand.

    Attributes:
        seq: Where.
    """

    seq: int | None = None
