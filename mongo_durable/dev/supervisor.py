"""The process between `DevMongo` and its servers, which outlives a killed parent just long enough to clean up.

    parent ──stdin/stdout──> supervisor ──> mongod, mongod, …

It is the parent of the servers, so that it can signal them without a chance of hitting a stranger with a reused process id. It ends, and takes
everything with it, when its standard input ends: the kernel closes that pipe however the parent dies. A forked child of the parent may hold the pipe
open for longer, therefore it also looks whether its parent is still the same process.

The talk is one JSON object a line, each answered by one: `{"do": "start" | "signal" | "poll", …}`. Run as a script with the standard library alone.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PARENT_CHECK_S = 0.5
_SHUTDOWN_S = 20.0


def main(folder: Path, *, temporary: bool) -> None:
    """Serve one `DevMongo` until it is gone.

    Args:
        folder: Where the servers keep their data.
        temporary: Remove `folder` at the end. Otherwise the servers are asked to shut down cleanly first.
    """
    servers: dict[int, subprocess.Popen[bytes]] = {}
    # A machine that shuts down sends SIGTERM to every process: clean up then too. Leaving by an exception runs the `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for request in _requests():
            _answer(_perform(servers, request))
    except BrokenPipeError:
        pass  # the parent died while it waited for an answer: the same end as that of its requests
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _stop(servers, clean=not temporary)
        if temporary:
            shutil.rmtree(folder, ignore_errors=True)


def _requests() -> Iterator[dict[str, Any]]:
    parent = os.getppid()
    pending = b""
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], _PARENT_CHECK_S)
        if not readable:
            continue
        received = os.read(0, 65536)
        if not received:
            return
        *lines, pending = (pending + received).split(b"\n")
        for line in lines:
            yield json.loads(line)


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _perform(servers: dict[int, subprocess.Popen[bytes]], request: dict[str, Any]) -> dict[str, Any]:
    node: int = request["node"]
    match request["do"]:
        case "start":
            try:
                servers[node] = _start(request["command"], Path(request["log"]))
            except OSError as error:
                return {"error": f"{request['command'][0]}: {error.strerror}"}
            return {"pid": servers[node].pid}
        case "signal":
            servers[node].send_signal(request["signal"])
            return {}
        case "poll":
            return {"exit_code": servers[node].poll()}
        case unknown:
            return {"error": f"unknown request {unknown!r}"}


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        # Its own session: a Ctrl-C in the terminal must reach the parent alone, which then stops the servers in order.
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)


def _stop(servers: dict[int, subprocess.Popen[bytes]], *, clean: bool) -> None:
    if clean:
        for server in servers.values():
            server.send_signal(signal.SIGTERM)
            server.send_signal(signal.SIGCONT)  # a paused server gets its SIGTERM only when it goes on
        deadline = time.monotonic() + _SHUTDOWN_S
        for server in servers.values():
            try:
                server.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass  # the kill below ends it; its journal keeps the data whole
    for server in servers.values():
        server.kill()
    for server in servers.values():
        server.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), temporary=sys.argv[2] == "temporary")
