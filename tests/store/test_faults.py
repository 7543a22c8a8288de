"""No driver error leaves the store, and no message carries a payload or a URI."""

from __future__ import annotations

import inspect
from typing import Any

import bson
import bson.errors
import pymongo.errors
import pytest

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
from mongo_durable.store import payloads
from mongo_durable.store.connection import Connection
from mongo_durable.store.faults import store_call, translate

SECRET = "mongodb://user:hunter2@db.example.com/?x=1 {'card': '4711'}"


def _public(module: Any) -> list[type[Exception]]:
    found = [value for name, value in vars(module).items() if inspect.isclass(value) and issubclass(value, Exception) and not name.startswith("_")]
    return [each for each in found if each.__module__ == module.__name__]


def _made(kind: type[Exception]) -> Exception:
    """An error as the driver makes it, with secrets wherever it has room for text."""
    errors = pymongo.errors
    if issubclass(kind, errors.BulkWriteError | errors.ClientBulkWriteException):
        fault = {"index": 0, "code": 11000, "errmsg": SECRET, "op": {"_id": SECRET}}
        results: dict[str, Any] = {"writeErrors": [fault], "writeConcernErrors": [], "error": None}
        return kind(results, True) if issubclass(kind, errors.ClientBulkWriteException) else kind(results)
    if issubclass(kind, errors.EncryptedCollectionError):
        return kind(ValueError(SECRET), {"document": SECRET})
    if issubclass(kind, errors.EncryptionError):
        return kind(ValueError(SECRET))
    if issubclass(kind, errors.OperationFailure):
        return kind(SECRET, 1, {"errmsg": SECRET, "keyValue": {"name": SECRET}})
    return kind(SECRET)


ALL = [*_public(pymongo.errors), *_public(bson.errors)]


def test_all_driver_errors_are_known() -> None:
    """The list is that of the installed driver, and everything in it has one of the roots that the store catches."""
    assert len(ALL) >= 25
    assert all(issubclass(each, pymongo.errors.PyMongoError | bson.errors.BSONError) for each in ALL)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
async def test_every_driver_error_is_translated(kind: type[Exception]) -> None:
    """Each public error of PyMongo and of BSON becomes one of ours, with the driver's as its cause and none of its text."""
    original = _made(kind)

    @store_call
    async def failing_call() -> None:
        raise original

    with pytest.raises(DurableError) as raised:
        await failing_call()
    assert raised.value.__cause__ is original
    for part in ("hunter2", "4711", "example.com"):
        assert part not in str(raised.value)
        assert part not in repr(raised.value)


@pytest.mark.parametrize(
    ("original", "expected"),
    [
        (pymongo.errors.ServerSelectionTimeoutError("x"), StoreUnavailable),
        (pymongo.errors.AutoReconnect("x"), StoreUnavailable),
        (pymongo.errors.NetworkTimeout("x"), StoreUnavailable),
        (pymongo.errors.NotPrimaryError("x"), StoreUnavailable),
        (pymongo.errors.ExecutionTimeout("x", 50), StoreUnavailable),
        (pymongo.errors.WTimeoutError("x", 64), StoreUnavailable),
        (pymongo.errors.WaitQueueTimeoutError("x"), StoreUnavailable),
        (pymongo.errors.OperationFailure("x", 11602), StoreUnavailable),
        (pymongo.errors.OperationFailure("x", 13), NotPermitted),
        (pymongo.errors.OperationFailure("x", 18), ConfigurationError),
        (pymongo.errors.OperationFailure("x", 8000), NotPermitted),
        (pymongo.errors.OperationFailure("bad auth : authentication failed", 8000), ConfigurationError),
        (pymongo.errors.ConfigurationError("x"), ConfigurationError),
        (pymongo.errors.InvalidURI("x"), ConfigurationError),
        (pymongo.errors.OperationFailure("x", 10334), PayloadTooLarge),
        (pymongo.errors.DocumentTooLarge("x"), PayloadTooLarge),
        (pymongo.errors.DuplicateKeyError("x", 11000), CorruptHistory),
        (pymongo.errors.WriteError("x", 121), CorruptHistory),
        (bson.errors.InvalidDocument("x"), PayloadError),
        (OverflowError("x"), PayloadError),
        (pymongo.errors.OperationFailure("x", 59), StoreError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else type(value).__name__,
)
def test_what_a_caller_may_conclude(original: Exception, expected: type[DurableError]) -> None:
    """Which error it becomes says what the caller can do: try again, change the set-up, change the value, or look into the database."""
    assert type(translate(original)) is expected


_COMMAND = 'not authorized on shop to execute command {{ {0}, ordered: true, documents: [ {{ card: "4711" }} ] }}'


@pytest.mark.parametrize(
    ("code", "said", "action", "collection", "roles"),
    [
        (13, _COMMAND.format('insert: "resolutions"'), "insert", "resolutions", ["approver", "runner"]),
        (13, _COMMAND.format('findAndModify: "runs"'), "update", "runs", ["approver", "submitter", "runner"]),
        (13, _COMMAND.format('delete: "activity_events"'), "remove", "activity_events", ["janitor"]),
        (13, _COMMAND.format('aggregate: "runs", pipeline: [ { $changeStream: {} } ]'), "changeStream", "runs", ["viewer", "approver"]),
        (13, _COMMAND.format('update: "activity_events"'), "update", "activity_events", []),
        (13, _COMMAND.format('insert: "orders"'), "insert", "orders", []),
        (13, _COMMAND.format("serverStatus: 1"), "serverStatus", None, []),
        (8000, "user is not allowed to do action [insert] on [shop.resolutions]", "insert", "resolutions", ["approver", "runner"]),
        (8000, "user is not allowed to do action [CHANGE_STREAM] on [shop.runs]", "changeStream", "runs", ["viewer", "approver"]),
        (8000, "$where is not allowed in this atlas tier", None, None, []),
    ],
)
def test_a_missing_right_is_named(code: int, said: str, action: str | None, collection: str | None, roles: list[str]) -> None:
    """What a user may not do becomes NotPermitted: action, collection, and the roles that allow it; of the command's values nothing."""
    error = translate(pymongo.errors.OperationFailure(said, code, {"errmsg": said}))
    assert isinstance(error, NotPermitted)
    assert (error.action, error.collection) == (action, collection)
    assert error.roles[: len(roles)] == roles
    assert bool(error.roles) == bool(roles)
    assert not error.retryable
    assert "4711" not in str(error)
    for name in (action, collection):
        assert name is None or name in str(error)


def test_the_unknown_result_of_a_commit_has_its_own_name() -> None:
    """A commit whose answer was lost is neither a success nor a failure, whatever driver error says so."""
    error = pymongo.errors.OperationFailure("x", 64)
    error._add_error_label("UnknownTransactionCommitResult")
    assert type(translate(error)) is CommitUnknown
    assert translate(error).retryable


def test_an_error_of_ours_stays_what_it_is() -> None:
    """Translating twice changes nothing."""
    error = StoreUnavailable()
    assert translate(error) is error


@pytest.mark.parametrize("value", [{1}, 1 << 70, object()], ids=["set", "large int", "object"])
async def test_a_value_that_was_not_encoded_is_a_payload_error(value: Any, connection: Connection, run_id: str) -> None:
    """Also the errors that the BSON encoder takes from Python itself become ours."""
    with pytest.raises(PayloadError):
        await payloads.move_out(connection, run_id, value)
