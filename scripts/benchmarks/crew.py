"""The hold that a process has on a worker: it tells it what to do, one thing at a time, and waits for the answer."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

from scripts.benchmarks.servers import Addresses

Samples = dict[str, list[float]]
"""What was measured, by series."""

_CHECKOUT = Path(__file__).parents[2]
_LOG_LINES = 25
_LONGEST_LINE = 16 * 1024 * 1024
_STOP_S = 20.0


class WorkFailed(Exception):
    """A contender could not do what it was asked."""


class Worker:
    """A process that is one contender; see `worker`. It ends with this process, however that dies."""

    def __init__(self, contender: str, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self.contender = contender
        self._process = process
        self._log = log

    @classmethod
    async def start(cls, contender: str, addresses: Addresses) -> Self:
        """Start it, and wait until it is ready.

        Raises:
            WorkFailed: It ended instead.
        """
        log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the worker, which closes it
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "scripts.benchmarks.worker", contender, json.dumps(addresses.as_json())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            cwd=_CHECKOUT,
            limit=_LONGEST_LINE,
            start_new_session=True,  # a Ctrl-C reaches the parent alone, which then ends its workers in order
        )
        worker = cls(contender, process, log)
        try:
            await worker._answer()
        except BaseException:
            await worker.kill()
            raise
        return worker

    async def ask(self, workload: str, parameters: Mapping[str, Any]) -> Samples:
        """Have it do one workload once.

        Raises:
            WorkFailed: It could not; what it says about it is in the message.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": workload, "with": dict(parameters)}).encode() + b"\n")
            await self._process.stdin.drain()
        except ConnectionError:
            pass  # it has ended: so has its output, which is said below
        return await self._answer()

    async def _answer(self) -> Samples:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise WorkFailed(f"{self.contender}: the process has ended; the end of its log:\n{self._log_end()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkFailed(f"{self.contender}: {answer['error']}")
        samples: Samples = answer["samples"]
        return samples

    async def kill(self) -> None:
        """SIGKILL: it can do nothing about it, not even notice."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        self._log.close()

    async def stop(self) -> None:
        """Let it clean up and end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            pass  # it hangs: the databases that it leaves behind go with their server
        await self.kill()

    def _log_end(self) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-_LOG_LINES:])
