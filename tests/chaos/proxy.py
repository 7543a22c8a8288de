"""A TCP proxy between a process and MongoDB, whose network can be broken in the ways that networks break."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

_CHUNK = 64 * 1024
SLOW_S = 0.15
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time: close() sends RST


class Network(StrEnum):
    """How the network is."""

    WELL = "well"
    SLOW = "slow"
    """Every chunk takes its time."""
    HALF_OPEN = "half open"
    """Connections stand and are accepted, nothing gets through; what was sent is delivered when the network is well again."""
    ONE_WAY = "one way"
    """Requests arrive, their replies get lost."""
    FORGOTTEN = "forgotten"
    """The connections of before are dead without a word, as behind a firewall that has forgotten them; new ones are well."""
    CUT = "cut"
    """Every connection is reset, old or new."""


@dataclass(eq=False, slots=True)
class _Link:
    """One connection, both ways. `is_lame`: something of it has got lost, so it can never be well again."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    is_lame: bool = False
    is_forgotten: bool = False
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class Proxy:
    """Forwards a port of its own to a server, on a thread of its own.

    Args:
        host, port: Of the server.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._network = Network.WELL
        self._links: set[_Link] = set()
        self._changed: asyncio.Condition
        self.lost = 0
        """Chunks that never arrived."""
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def become(self, network: Network) -> None:
        """Break or mend the network."""
        self._call(self._become(network))

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        called: Future[None] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        called.result()

    async def _start(self) -> None:
        self._changed = asyncio.Condition()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._server.close()
        for link in list(self._links):
            await self._reset(link)

    async def _become(self, network: Network) -> None:
        self._network = network
        for link in list(self._links):
            if network is Network.CUT or (network is Network.WELL and link.is_lame and not link.is_forgotten):
                await self._reset(link)
            if network is Network.FORGOTTEN:
                link.is_forgotten = True
        async with self._changed:
            self._changed.notify_all()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._network is Network.CUT:
            _abort(writer)
            return
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            _abort(writer)
            return
        link = _Link(writer, server_writer)
        self._links.add(link)
        there = asyncio.create_task(self._forward(link, reader, server_writer, is_reply=False))
        back = asyncio.create_task(self._forward(link, server_reader, writer, is_reply=True))
        link.tasks = [there, back]

    async def _forward(self, link: _Link, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_reply: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await source.read(_CHUNK):
                async with self._changed:
                    await self._changed.wait_for(lambda: self._network is not Network.HALF_OPEN)
                if self._network is Network.SLOW:
                    await asyncio.sleep(SLOW_S)
                link.is_lame |= is_reply and self._network is Network.ONE_WAY
                if link.is_forgotten or (is_reply and link.is_lame):
                    self.lost += 1
                    continue
                target.write(chunk)
                await target.drain()
        # One side has hung up: the other hears of it, unless the network keeps it.
        if not link.is_forgotten:
            await self._reset(link)

    async def _reset(self, link: _Link) -> None:
        if link not in self._links:
            return
        self._links.discard(link)
        _abort(link.client)
        _abort(link.server)
        me = asyncio.current_task()
        for task in link.tasks:
            if task is not me:
                task.cancel()
        await asyncio.gather(*(task for task in link.tasks if task is not me), return_exceptions=True)


def _abort(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
