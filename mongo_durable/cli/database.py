"""Which database a command works on, and the way to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from mongo_durable.client import DurableClient
    from mongo_durable.store.connection import Connection

T = TypeVar("T")

URI_VARIABLE = "MONGO_DURABLE_URI"
DATABASE_VARIABLE = "MONGO_DURABLE_DATABASE"

Uri = Annotated[str | None, typer.Option("--uri", envvar=URI_VARIABLE, help="MongoDB URI of a replica set.", show_default=False)]
Database = Annotated[
    str | None, typer.Option("--database", envvar=DATABASE_VARIABLE, help="Database name; mongo_durable if not given.", show_default=False)
]


@dataclass(frozen=True, slots=True)
class Opened:
    """A database that a command works on: through the public client, and for what only the command line needs, through the store."""

    client: DurableClient
    connection: Connection
    name: str


def with_database(uri: str | None, database: str | None, work: Callable[[Opened], Awaitable[T]]) -> T:
    """Connect, do `work`, close.

    Raises:
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
            async with DurableClient(given, client=connection.client, database=name, channel=AnswerChannel.CLI, cipher=cipher) as client:
                return await work(Opened(client, connection, name))
        finally:
            await endpoint.aclose()

    return asyncio.run(connected())
