"""`DevMongo` in the foreground, for a terminal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from mongo_durable.dev.replica_set import DevMongo

_LOOK_S = 0.5


def _print_line(text: str) -> None:
    print(text, flush=True)  # flushed: whoever started this in a pipe waits for the line


def serve(
    *,
    nodes: int = 1,
    path: str | os.PathLike[str] | None = None,
    port: int | None = None,
    test_commands: bool = False,
    announce: Callable[[str], None] = _print_line,
) -> None:
    """Run a `DevMongo` until Ctrl-C or SIGTERM. Call it from the main thread.

    Args:
        nodes: As for `DevMongo`.
        path: As for `DevMongo`.
        port: As for `DevMongo`.
        test_commands: As for `DevMongo`.
        announce: Is called once with the connection string when the set takes writes. Prints it by default.

    Raises:
        ConfigurationError: It could not be started, or a server ended by itself.
    """
    earlier = signal.signal(signal.SIGTERM, _interrupt)
    mongo = DevMongo(nodes=nodes, path=path, port=port, test_commands=test_commands)
    try:
        announce(mongo.start())
        while True:
            time.sleep(_LOOK_S)
            mongo.raise_if_dead()
    except KeyboardInterrupt:
        pass  # how this is meant to end
    finally:
        mongo.stop()
        signal.signal(signal.SIGTERM, earlier)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
