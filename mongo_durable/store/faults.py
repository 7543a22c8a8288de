"""Driver errors become mongo_durable's own: no driver exception leaves the store, and no message carries a payload or a URI."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from bson.errors import BSONError
from pymongo import errors

from mongo_durable.errors import (
    CommitUnknown,
    ConfigurationError,
    CorruptHistory,
    DurableError,
    PayloadError,
    PayloadTooLarge,
    StoreError,
    StoreUnavailable,
)

P = ParamSpec("P")
T = TypeVar("T")

_NOT_ALLOWED = {13, 18, 8000}  # Unauthorized, AuthenticationFailed, Atlas' own "not allowed"
_TOO_LARGE = {10334, 17280}
_VALIDATION = 121
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
    if error.code in _NOT_ALLOWED:
        return ConfigurationError(f"MongoDB refused the operation (code {error.code}): the user lacks a right, or name and password are wrong")
    if error.code in _TOO_LARGE:
        return PayloadTooLarge("a document would be larger than 16 MB, the limit of MongoDB", size=0, limit=16 * 1024 * 1024)
    if error.code == _VALIDATION:
        return CorruptHistory("MongoDB's validator refused a document: the database was set up by another release; run `mongo-durable init`")
    if error.code in _MAJORITY_LOST or error.has_error_label("RetryableWriteError") or error.has_error_label("TransientTransactionError"):
        return StoreUnavailable()
    return StoreError(f"MongoDB refused the operation with code {error.code}")


@contextmanager
def no_driver_errors() -> Iterator[None]:
    """Translate what the driver raises inside."""
    try:
        yield
    except (errors.PyMongoError, BSONError, OverflowError, UnicodeEncodeError) as error:  # the last two are how BSON refuses numbers and texts
        raise translate(error) from error


def store_call(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Mark a public coroutine function of the store: it raises mongo_durable's errors only."""

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with no_driver_errors():
            return await function(*args, **kwargs)

    return call
