"""The parent's hold on its worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

from mongo_durable.errors import DurableError

T = TypeVar("T")

OUTSIDE = "outside"
"""Name of the file that plays the outside world, in the folder of a stage."""

_LOG_LINES = 15


class DemoFailed(DurableError):
    """The demo did not go as it is meant to."""


class Worker:
    """One worker process.

    Attributes:
        name: A, B, C.
        exit_code: Once it has ended; negative for a signal.
    """

    def __init__(self, name: str, process: Process, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended, or None while it runs."""
        return self._process.returncode

    async def kill(self) -> None:
        """SIGKILL: it can do nothing about it, not even notice."""
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM: it drains."""
        self._process.send_signal(signal.SIGTERM)
        await self._process.wait()

    async def says(self, expected: str) -> None:
        """Wait for a line on its standard output."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if line.decode().strip() == expected:
                return
        raise self._failed(f"ended without saying {expected!r}")

    async def until(self, what: str, expected: Coroutine[Any, Any, T], timeout: float) -> T:
        """Wait for `expected` while the process lives.

        Raises:
            DemoFailed: It ended first, or nothing happened in time; the end of its log is in the message.
        """
        waiting = asyncio.create_task(expected)
        ended = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({waiting, ended}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            if ended.done():
                raise self._failed(f"ended with exit code {ended.result()} before {what}")
            raise self._failed(f"did not come to {what} within {timeout:.0f} s")
        finally:
            for task in (waiting, ended):
                task.cancel()
            await asyncio.gather(waiting, ended, return_exceptions=True)

    def _failed(self, how: str) -> DemoFailed:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return DemoFailed("\n  ".join([f"worker {self.name} (process {self.pid}) {how}; the end of its log:", *lines]))


class Workers:
    """Starts workers, and lets none outlive the block.

    Args:
        folder: For the file that plays the outside world, and for the workers' logs.
        agent, arguments: Of `python -m mongo_durable.demo.worker`.
    """

    def __init__(self, uri: str, database: str, folder: Path, lease_s: float, agent: str, *arguments: str) -> None:
        # The environment, not the command line, which every user of the machine can read: a URI may hold a password.
        self._environment = {**os.environ, "MONGO_DURABLE_URI": uri, "MONGO_DURABLE_DATABASE": database}
        self._folder = folder
        self._arguments = [agent, "--outside", str(folder / OUTSIDE), "--lease", str(lease_s), *arguments]
        self._ends = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._ends.aclose()

    async def start(self, name: str, *, hold: str | None = None) -> Worker:
        """Start a worker; with `hold`, one whose effect of this name never returns."""
        log = self._folder / f"worker-{name}.log"
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "mongo_durable.demo.worker"),
                *self._arguments,
                *(["--hold", hold] if hold is not None else []),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
                env=self._environment,
            )
        worker = Worker(name, process, log)
        self._ends.push_async_callback(_end, worker)
        return worker


async def _end(worker: Worker) -> None:
    if worker.exit_code is None:
        await worker.kill()
