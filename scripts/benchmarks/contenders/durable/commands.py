"""Counts the commands that an app sends."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent


@dataclass(frozen=True, slots=True)
class Command:
    """A command that was sent.

    Attributes:
        sent_at: By `time.perf_counter`.
    """

    name: str
    collection: str
    is_limited: bool
    sent_at: float


class Commands(CommandListener):
    """Notes what the thread that made it sends: not the heartbeat, nor what a change stream asks for, which go on whether there is work or not."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.sent: list[Command] = []

    def started(self, event: CommandStartedEvent) -> None:
        """Note it."""
        if threading.get_ident() != self._thread or event.command_name in ("getMore", "hello", "endSessions"):
            return
        collection: Any = event.command.get(event.command_name)
        self.sent.append(Command(event.command_name, str(collection), bool(event.command.get("limit")), time.perf_counter()))

    def succeeded(self, event: CommandSucceededEvent) -> None:
        """Of no interest."""

    def failed(self, event: CommandFailedEvent) -> None:
        """Of no interest."""
