"""One connection to MongoDB per event loop, whichever driver the application uses.

PyMongo's async client belongs to the loop on which it was first used, so an `Endpoint` keeps the URI and makes one client per running loop. A client
that the application already holds (`AsyncMongoClient`, or Motor's `AsyncIOMotorClient`) is used as it is. The few calls whose shape differs between
the two drivers (sessions, aggregation, change streams) are made here and nowhere else.

Whatever the client's own settings say, the store writes with `w: majority`, reads from the primary with majority read concern, and gives its
transactions explicit options: a user's `secondaryPreferred` would make every transaction fail.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

import pymongo
from bson.codec_options import CodecOptions
from pymongo import AsyncMongoClient, MongoClient, ReadPreference, WriteConcern
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.read_concern import ReadConcern

from mongo_durable.encryption import Cipher
from mongo_durable.errors import ConfigurationError
from mongo_durable.store.faults import no_driver_errors

T = TypeVar("T")
Session = AsyncClientSession
Document = dict[str, Any]

MAJORITY = WriteConcern("majority")
DEFAULT_DATABASE = "mongo_durable"
_CODEC: CodecOptions[Document] = CodecOptions(document_class=dict, tz_aware=True, tzinfo=UTC)
_WITHOUT_ZONES: CodecOptions[Document] = CodecOptions(document_class=dict)
# What the user has set stands. With the last two, commands on a connection that died without a word fail after 15 seconds, not after the driver's 30.
_OWN_CLIENT_OPTIONS: dict[str, Any] = {
    "appname": "mongo_durable",
    "serverSelectionTimeoutMS": 10_000,
    "connectTimeoutMS": 10_000,
    "heartbeatFrequencyMS": 5_000,
}
_CLOSE_S = 5.0
"""How long a client may take to say good-bye to the server: on a dead connection nobody listens."""


class Endpoint:
    """Where the database is: a URI, or a client that the application holds.

    Args:
        uri: A MongoDB URI. May be None when a client is given; then the change stream and the heartbeat use copies of that client's settings.
        client: A PyMongo `AsyncMongoClient` or a Motor `AsyncIOMotorClient`. It is never closed by mongo_durable.
        database: Name of the database.
        cipher: What encrypts values; None stores them as they are.
    """

    def __init__(self, uri: str | None, database: str = DEFAULT_DATABASE, client: Any = None, cipher: Cipher | None = None) -> None:
        if uri is None and client is None:
            raise ConfigurationError("no MongoDB: pass uri= or client=, or set MONGO_DURABLE_URI")
        if client is not None and not hasattr(client, "get_database"):
            raise ConfigurationError(f"client= takes an AsyncMongoClient or an AsyncIOMotorClient, not {type(client).__name__}")
        if isinstance(client, MongoClient):
            raise ConfigurationError("client= takes an async client (AsyncMongoClient or AsyncIOMotorClient), not the synchronous MongoClient")
        self.uri = uri
        self.client = client
        self.database = database
        self.cipher = cipher
        self._connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Connection] = weakref.WeakKeyDictionary()

    def connection(self) -> Connection:
        """The connection of the running event loop, made on first use and closed with the loop or by `aclose`."""
        loop = asyncio.get_running_loop()
        found = self._connections.get(loop)
        if found is None or found.is_closed:
            client = self.client if self.client is not None else self._new_async_client()
            found = Connection(client, self.database, is_owned=self.client is None, cipher=self.cipher)
            self._connections[loop] = found
        return found

    def dedicated_connection(self) -> Connection:
        """A further connection on a client of its own, for a change stream. The caller closes it."""
        return Connection(self._new_async_client(), self.database, is_owned=True)

    def sync_client(self) -> MongoClient[Document]:
        """A synchronous client of its own, for the heartbeat's thread. The caller closes it."""
        return MongoClient(**self._settings_of_client()) if self.uri is None else _client(MongoClient, self.uri)

    def _new_async_client(self) -> AsyncMongoClient[Document]:
        return AsyncMongoClient(**self._settings_of_client()) if self.uri is None else _client(AsyncMongoClient, self.uri)

    def _settings_of_client(self) -> dict[str, Any]:
        # PyMongo keeps the constructor's arguments for its own duplicates (seen in 4.15 to 4.20; a contract test watches it). Motor wraps a
        # MongoClient.
        # Asked by module, not by attribute: a PyMongo client answers to every name, with a database of that name.
        inner = self.client.delegate if type(self.client).__module__.startswith("motor.") else self.client
        settings = getattr(inner, "_init_kwargs", None)
        if settings is None:
            raise ConfigurationError("the settings of client= cannot be read with this driver version: pass uri= beside it")
        kept = {name: value for name, value in settings.items() if name not in ("_connect", "connect", "document_class", "tz_aware", "type_registry")}
        return {**_OWN_CLIENT_OPTIONS, **kept, "appname": _OWN_CLIENT_OPTIONS["appname"]}

    async def aclose(self) -> None:
        """Close this loop's connection, if it was made here."""
        found = self._connections.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await found.aclose()


def _client(driver: Callable[..., T], uri: str) -> T:
    options = uri.rpartition("?")[2].lower()  # an argument would overrule what the URI says
    try:
        with no_driver_errors():
            return driver(uri, **{name: value for name, value in _OWN_CLIENT_OPTIONS.items() if f"{name}=".lower() not in options})
    except ValueError:  # how PyMongo refuses a host or port; its text may quote the URI
        raise ConfigurationError("the MongoDB URI cannot be read: check its host and port; a password in it has to be percent-encoded") from None


class Connection:
    """The collections of one database, on one client, for one event loop.

    Attributes:
        cipher: What encrypts values on their way, or None.
    """

    def __init__(self, client: Any, database: str, *, is_owned: bool, cipher: Cipher | None = None) -> None:
        self.client = client
        self.cipher = cipher
        self.is_owned = is_owned
        self.is_motor = type(client).__module__.startswith("motor.")
        self.is_closed = False
        self.is_server_checked = False
        self.is_schema_set_up = False
        self.database = client.get_database(
            database, codec_options=_CODEC, write_concern=MAJORITY, read_concern=ReadConcern("majority"), read_preference=ReadPreference.PRIMARY
        )
        self.runs = self.database["runs"]
        self.activity_events = self.database["activity_events"]
        self.histories = self.database.get_collection("activity_events", codec_options=_WITHOUT_ZONES)
        """The events, for reading many at once: the driver takes as long for the zone of a time as for the rest of an event. `event_from` adds it."""
        self.frontiers = self.database["frontiers"]
        self.resolutions = self.database["resolutions"]
        self.runners = self.database["runners"]
        self.threads = self.database["threads"]
        self.thread_states = self.database["thread_states"]
        self.memory = self.database["memory"]
        self.payloads = self.database["payloads"]
        self.drafts = self.database["drafts"]
        self.audit = self.database["audit"]
        self._on_close: list[Callable[[], Awaitable[None]]] = []
        self._close_with_loop: AsyncIterator[None] | None = None

    def on_close(self, action: Callable[[], Awaitable[None]]) -> None:
        """Run `action` before the client is closed."""
        self._on_close.append(action)

    async def watch_loop(self) -> None:
        """Close this connection when the loop shuts down, so that `asyncio.run` leaves no open client behind."""
        if self._close_with_loop is None:
            self._close_with_loop = _close_when_loop_shuts_down(self)
            _open_connections.setdefault(asyncio.get_running_loop(), set()).add(self)
            await anext(self._close_with_loop)

    async def aclose(self) -> None:
        """Stop what runs on this connection and close its client, if it was made here. Calling again does nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        _open_connections.get(asyncio.get_running_loop(), set()).discard(self)
        for action in self._on_close:
            await action()
        if self.is_owned:
            with pymongo.timeout(_CLOSE_S):
                await self.client.close()

    async def transaction(self, body: Callable[[Session], Awaitable[T]]) -> T:
        """Run `body` in one transaction: snapshot reads, majority commit, primary.

        The body may run more than once; it must not catch driver errors.

        Raises:
            StoreUnavailable, CommitUnknown: The database could not be reached, or the commit's answer was lost.
        """
        async with self._session() as session:
            return await session.with_transaction(
                body, read_concern=ReadConcern("snapshot"), write_concern=MAJORITY, read_preference=ReadPreference.PRIMARY
            )

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Session]:
        started = self.client.start_session()
        session = (await started) if self.is_motor else started  # Motor awaits start_session, PyMongo does not
        async with session:
            yield session

    async def aggregate(self, collection: Any, pipeline: Sequence[Mapping[str, Any]]) -> list[Document]:
        """All results of an aggregation."""
        cursor = collection.aggregate(pipeline)
        if not self.is_motor:
            cursor = await cursor
        found: list[Document] = await cursor.to_list(None)
        return found

    @asynccontextmanager
    async def change_stream(self, collection: Any, pipeline: Sequence[Mapping[str, Any]], **options: Any) -> AsyncIterator[Any]:
        """An open change stream on `collection`."""
        opened = collection.watch(pipeline, **options)
        if not self.is_motor:
            opened = await opened
        async with opened as stream:
            yield stream

    async def server_time(self) -> datetime:
        """The server's clock, for what is judged outside a write."""
        now: datetime = (await self.database.command("hello", codec_options=_CODEC))["localTime"]
        return now

    async def operation_time(self) -> Any:
        """Up to when a majority read sees everything now: where a change stream has to start so that it and a sweep made after it miss nothing."""
        async with self._session() as session:
            # A majority read, whose operation time is the commit point. That of a ping includes writes which are on the primary alone: a sweep would
            # not see them yet, and a stream from there would leave them out (seen in 6.0).
            await self.runs.find_one({"_id": ""}, session=session)
            return session.operation_time


# The connections to close with their loop. Kept here, because an application may drop its App or client long before that.
_open_connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, set[Connection]] = weakref.WeakKeyDictionary()


async def _close_when_loop_shuts_down(connection: Connection) -> AsyncIterator[None]:
    # asyncio.run closes open async generators after it has cancelled the tasks: the one hook that a library has for the end of a loop.
    try:
        yield
    finally:
        with no_driver_errors():
            await connection.aclose()
