"""Which database a command works on, and the way to it."""

from __future__ import annotations

import asyncio
import difflib
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from mongo_durable.errors import ConfigurationError, DurableError, RunNotFound, StoreUnavailable

if TYPE_CHECKING:
    from mongo_durable.client import DurableClient
    from mongo_durable.store.connection import Connection, Endpoint

T = TypeVar("T")

URI_VARIABLE = "MONGO_DURABLE_URI"
DATABASE_VARIABLE = "MONGO_DURABLE_DATABASE"

Uri = Annotated[str | None, typer.Option("--uri", envvar=URI_VARIABLE, help="MongoDB URI of a replica set.", show_default=False)]
Database = Annotated[
    str | None, typer.Option("--database", envvar=DATABASE_VARIABLE, help="Database name; mongo_durable if not given.", show_default=False)
]

_PATIENCE_S = 4.0
_COMPLETION_S = 2.0
_CLOSE_S = 1.0
_LOOKED_THROUGH = 1000
_COMPLETIONS = 50


@dataclass(frozen=True, slots=True)
class Opened:
    """A database that a command works on: through the public client, and for what only the command line needs, through the store."""

    client: DurableClient
    connection: Connection
    name: str
    endpoint: Endpoint

    @property
    def is_set_up(self) -> bool:
        """Whether anybody has ever submitted a run here, or run `init`."""
        return self.connection.is_schema_set_up

    def nothing(self, what: str) -> str:
        """`what`, said of an empty listing; with a hint where the database has never been used."""
        return what if self.is_set_up else f"{what}: database {self.name} is not set up, no run was ever submitted there; is it the right one?"


def with_database(uri: str | None, database: str | None, work: Callable[[Opened], Awaitable[T]], *, within_s: float | None = None) -> T:
    """Connect, do `work`, close.

    Args:
        within_s: How long all of it may take; None: as long as it does.

    Raises:
        TimeoutError: It took longer than `within_s`.
        typer.BadParameter: No URI was given.
        DurableError: What `work` raised, or the database cannot be used.
    """
    if not uri:
        raise typer.BadParameter(f"which MongoDB? Give --uri, or set {URI_VARIABLE}.")
    given: str = uri

    async def connected() -> T:
        from mongo_durable.client import DurableClient
        from mongo_durable.encryption import cipher_from_environment
        from mongo_durable.protocol.frontier import AnswerChannel
        from mongo_durable.store.connection import DEFAULT_DATABASE, Endpoint

        name = database or DEFAULT_DATABASE
        cipher = cipher_from_environment()
        endpoint = Endpoint(given, name, cipher=cipher)
        try:
            connection = endpoint.connection()
            # One connection for both: the client uses it as an application's own.
            client = DurableClient(given, client=connection.client, database=name, channel=AnswerChannel.CLI, cipher=cipher)
            await _reach(connection, _patience_s(given))
            async with client:
                try:
                    return await work(Opened(client, connection, name, endpoint))
                except RunNotFound as error:
                    raise await _with_likely_ones(client, connection, error) from None
        finally:
            await _close(endpoint)

    async def in_time() -> T:
        async with asyncio.timeout(within_s):
            return await connected()

    return asyncio.run(in_time())


async def _close(endpoint: Endpoint) -> None:
    try:
        async with asyncio.timeout(_CLOSE_S):
            await endpoint.aclose()
    except TimeoutError:
        pass  # the driver waits for its monitor, which waits for a server that says nothing (seen in 4.20); it ends with the event loop


def _patience_s(uri: str) -> float | None:
    # What the URI says stands. Without a word of it, nobody who types a command waits for as long as a server that elects a primary may.
    return None if "serverselectiontimeoutms=" in uri.lower() else _PATIENCE_S


async def _reach(connection: Connection, within_s: float | None) -> None:
    from mongo_durable.store import schema

    try:
        async with asyncio.timeout(within_s):
            await schema.check(connection)
    except TimeoutError:
        raise StoreUnavailable(f"MongoDB did not answer within {within_s:g} s") from None


async def _with_likely_ones(client: DurableClient, connection: Connection, error: RunNotFound) -> RunNotFound:
    """The error, with the ids that may have been meant."""
    if not connection.is_schema_set_up:
        return RunNotFound(
            f"{error.message}, which is not set up: no run was ever submitted there; is it the right --database ({DATABASE_VARIABLE})?",
            run_id=error.run_id,
        )
    wanted = str(error.run_id)
    known = [each.run_id for each in await client.list_runs(limit=_LOOKED_THROUGH)]
    likely = [each for each in known if each.startswith(wanted)][:3] or difflib.get_close_matches(wanted, known)
    hint = f"; did you mean {', '.join(likely)}?" if likely else "; `mongo-durable runs` lists them"
    return RunNotFound(error.message + hint, run_id=error.run_id)


def complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids of runs that begin so, the newest first, for the shell's completion."""
    return _completed(ctx, incomplete, None)


def complete_suspended_run(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids of suspended runs that begin so, the newest first."""
    return _completed(ctx, incomplete, "suspended")


def _completed(ctx: typer.Context, incomplete: str, status: str | None) -> list[str]:
    uri = ctx.params.get("uri") or os.environ.get(URI_VARIABLE)
    if not uri:
        return []

    async def look(opened: Opened) -> list[str]:
        found = await opened.client.list_runs(status=status, limit=_LOOKED_THROUGH)
        return [each.run_id for each in found if each.run_id.startswith(incomplete) and each.run_id.isprintable()][:_COMPLETIONS]

    database = ctx.params.get("database") or os.environ.get(DATABASE_VARIABLE)
    try:
        return with_database(uri, database, look, within_s=_COMPLETION_S)
    except (DurableError, TimeoutError):
        return []  # whoever presses Tab gets no ids, and no complaint in the middle of a command line


def what_to_do(error: DurableError) -> str | None:
    """What whoever typed a command can do about an error, where its message cannot know that it is a command line."""
    if isinstance(error, StoreUnavailable):
        return f"is the server running, is the address in --uri ({URI_VARIABLE}) right, and may this machine reach it? `mongo-durable dev` starts one"
    if isinstance(error, ConfigurationError) and "URI" in error.message:
        return "a URI looks like mongodb://host:27017/?replicaSet=rs0 or, of Atlas, mongodb+srv://user:password@cluster.example.net"
    return None
