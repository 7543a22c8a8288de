"""Driver errors become mongo_durable's own: no driver exception leaves the store, and no message carries a payload or a URI."""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from bson.errors import BSONError
from pymongo import errors

from mongo_durable.errors import (
    CommitUnknown,
    ConfigurationError,
    CorruptHistory,
    DurableError,
    NotPermitted,
    PayloadError,
    PayloadTooLarge,
    StoreError,
    StoreUnavailable,
)
from mongo_durable.store.roles import TABLE, roles_allowing

P = ParamSpec("P")
T = TypeVar("T")

UNAUTHORIZED = 13
_AUTHENTICATION_FAILED = 18
_ATLAS = 8000  # Atlas' own refusals, of users and of commands

# What a refusal says of itself: the server names the command and would quote all of it, Atlas names the action and the collection.
_REFUSED_COMMAND = re.compile(r"^not authorized on (\S+) to execute command \{ (\w+): (?:\"([\w.$-]+)\")?")
_REFUSED_ON_ATLAS = re.compile(r"^user is not allowed to do action \[(\w+)\] on \[([^.\]]+)\.?([\w.$-]*)\]")
_ACTIONS = {
    "find": "find",
    "aggregate": "find",
    "count": "find",
    "distinct": "find",
    "insert": "insert",
    "update": "update",
    "findAndModify": "update",
    "delete": "remove",
    "create": "createCollection",
    "createIndexes": "createIndex",
    "collMod": "collMod",
    "listIndexes": "listIndexes",
}
"""Commands that name a collection, and the right that they need."""
_TOO_LARGE = {10334, 17280}
_VALIDATION = 121
_DUPLICATE_KEY = 11000
_MAJORITY_LOST = {64, 91, 189, 10107, 13435, 11600, 11602, 13436}


def translate(error: Exception) -> DurableError:
    """The error to raise instead of the driver's `error`."""
    if isinstance(error, DurableError):
        return error
    if isinstance(error, errors.PyMongoError) and error.has_error_label("UnknownTransactionCommitResult"):
        return CommitUnknown()
    if isinstance(error, errors.DocumentTooLarge):
        return PayloadTooLarge("a document would be larger than 16 MB, the limit of MongoDB", size=0, limit=16 * 1024 * 1024)
    if isinstance(error, errors.ConnectionFailure | errors.ExecutionTimeout | errors.WTimeoutError | errors.WaitQueueTimeoutError):
        return StoreUnavailable()
    if isinstance(error, errors.PyMongoError) and error.timeout:
        return StoreUnavailable()
    if isinstance(error, errors.DuplicateKeyError):
        return CorruptHistory("a document that this write was to create exists already with other content")
    if isinstance(error, errors.OperationFailure):
        return _translate_code(error)
    if isinstance(error, errors.InvalidURI | errors.ConfigurationError | errors.InvalidOperation):
        return ConfigurationError(f"the MongoDB driver refused its settings ({type(error).__name__}): check the URI and the client's options")
    if isinstance(error, BSONError | OverflowError | UnicodeEncodeError | errors.InvalidName):
        return PayloadError(f"a value cannot be stored as BSON ({type(error).__name__})")
    return StoreError(f"MongoDB failed with {type(error).__name__}")


def _translate_code(error: errors.OperationFailure) -> DurableError:
    if error.code == _AUTHENTICATION_FAILED or (error.code == _ATLAS and "authentication failed" in str(error)):
        return ConfigurationError("MongoDB refused the user: name or password is wrong, or authSource= names another database than the user's")
    if error.code in (UNAUTHORIZED, _ATLAS):
        return _not_permitted(error)
    if error.code in _TOO_LARGE:
        return PayloadTooLarge("a document would be larger than 16 MB, the limit of MongoDB", size=0, limit=16 * 1024 * 1024)
    if error.code == _VALIDATION:
        return CorruptHistory("MongoDB's validator refused a document: the database was set up by another release; run `mongo-durable init`")
    if error.code in _MAJORITY_LOST or error.has_error_label("RetryableWriteError") or error.has_error_label("TransientTransactionError"):
        return StoreUnavailable()
    return StoreError(f"MongoDB refused the operation with code {error.code}")


def _not_permitted(error: errors.OperationFailure) -> NotPermitted:
    # Only names are taken from the server's text: the rest of it is the command, with its values.
    text = str((error.details or {}).get("errmsg", ""))
    action = collection = None
    if found := _REFUSED_COMMAND.match(text):
        command = found[2]
        action = _ACTIONS.get(command, command)
        if command == "aggregate" and "$changeStream" in text:
            action = "changeStream"
        elif action == "update" and "upsert: true" in text:
            action = "insert"  # it takes both, and who may insert may update
        collection = found[3] if command in _ACTIONS else None
    elif found := _REFUSED_ON_ATLAS.match(text):
        first, *rest = found[1].split("_")  # CHANGE_STREAM there, changeStream everywhere else
        action = "".join([first.lower(), *(part.title() for part in rest)]) if first.isupper() else found[1]
        collection = found[3] or None
    if action is None:
        return NotPermitted(
            f"MongoDB refused the operation (code {error.code}): the user lacks a right for it; `mongo-durable init --roles` makes roles"
        )
    roles = list(roles_allowing(action, collection)) if collection is not None else []
    what = f"{action} on {collection}" if collection is not None else action
    if roles:
        remedy = f"give it the role {' or '.join(roles)} (`mongo-durable init --roles` makes them)"
    elif collection is None or collection in TABLE:
        remedy = "that takes an admin"
    else:
        remedy = "the collection is not mongo_durable's; grant the user this right"
    return NotPermitted(f"this database user may not {what}: {remedy}", action=action, collection=collection, roles=roles)


def is_duplicate(error: errors.BulkWriteError) -> bool:
    """Whether documents were refused, and each of them because its key is taken."""
    refused = (error.details or {}).get("writeErrors", [])
    return bool(refused) and all(each["code"] == _DUPLICATE_KEY for each in refused)


_DRIVER_ERRORS = (errors.PyMongoError, BSONError, OverflowError, UnicodeEncodeError)  # the last two are how BSON refuses numbers and texts


class no_driver_errors:
    """Translate what the driver raises inside. A class, because each event passes here: a generator takes several times as long."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, _DRIVER_ERRORS):
            raise translate(error) from error


def store_call(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Mark a public coroutine function of the store: it raises mongo_durable's errors only."""

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with no_driver_errors():
            return await function(*args, **kwargs)

    return call
