"""Faults that the server itself makes: its `failCommand` fail point, for the commands of one client only."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pymongo

Client = pymongo.MongoClient[dict[str, Any]]


@contextmanager
def failing(
    uri: str,
    commands: list[str],
    *,
    appname: str | None = None,
    namespace: str | None = None,
    mode: Any = "alwaysOn",
    **fault: Any,
) -> Iterator[Callable[[], int]]:
    """Let the server fail these commands inside the block, which is given a function that says how often it has done so.

    A server has one such fail point, so tests in other processes wait for their turn.

    Args:
        appname: Only commands of the clients with this name; else give `namespace`.
        namespace: Only commands on this `database.collection`.
        mode: The server's own: `"alwaysOn"`, or `{"times": n}`.
        fault: `errorCode`, `closeConnection`, `writeConcernError`, `blockConnection`, …
    """
    assert appname or namespace, "a fault for every client would break other tests"
    data: dict[str, Any] = {"failCommands": commands, **fault}
    if appname:
        data["appName"] = appname
    if namespace:
        data["namespace"] = namespace
    with pymongo.MongoClient(uri) as client, _turn(client):
        before = _strikes(client)
        client.admin.command("configureFailPoint", "failCommand", mode=mode, data=data)
        try:
            yield lambda: _strikes(client) - before
        finally:
            client.admin.command("configureFailPoint", "failCommand", mode="off")


def _strikes(client: Client) -> int:
    name = "failpoint.failCommand"
    return int(client.admin.command("getParameter", 1, **{name: 1})[name]["timesEntered"])


@contextmanager
def _turn(client: Client) -> Iterator[None]:
    client.admin.command("ping")
    address = client.address
    assert address is not None
    with Path(tempfile.gettempdir(), f"mongo_durable-failing-{address[1]}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
