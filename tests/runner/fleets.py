"""Several runners in one process, and nodes that wait until they may go on."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

from pymongo import AsyncMongoClient

from mongo_durable import App, Runner
from tests.engine.workflows import Commands, State, one_node


class Gate:
    """A node that waits until the gate is open, and keeps count.

    Attributes:
        now, most: How many are waiting now, and were at once.
        seen: The values of the runs, in the order in which they came.
    """

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self.now = 0
        self.most = 0
        self.seen: list[Any] = []

    def open(self) -> None:
        """Let everybody through from now on."""
        self._opened.set()

    async def node(self, state: State) -> dict[str, Any]:
        """The node."""
        self.seen.append(state["value"])
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self._opened.wait()
        finally:
            self.now -= 1
        return {}


def counted_runner(uri: str, database: str, workflow: str, node: Any, commands: Commands, **options: Any) -> tuple[Runner, AsyncMongoClient[Any]]:
    """A runner on a client of its own whose commands are listened to; close the client after it."""
    client: AsyncMongoClient[Any] = AsyncMongoClient(uri, event_listeners=[commands])
    app = one_node(App(workflow, client=client, database=database), node)
    return Runner([app], **{"sweep_interval": timedelta(seconds=2), "lease": timedelta(seconds=60), **options}), client
