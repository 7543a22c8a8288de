"""The outside world of the chaos suite: a file to which every effect appends where its body begins and where its effect has happened.

One line is one `write` to a file opened with O_APPEND, so processes share it, and what was written before a SIGKILL stays.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mongo_durable import current_activity

BEGUN, HAPPENED = "begun", "happened"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One moment of one execution of a body.

    Attributes:
        moment: `begun`, the first thing that a body does, or `happened`, its effect.
        key: The activity's id, which an outside system would take as idempotency key.
        fence: Of the attempt that executes the body.
        at: The machine's clock, in seconds.
        lease_left: Seconds that the executing attempt's lease was still valid for.
        result: What the effect gives back; None at the beginning.
    """

    moment: str
    name: str
    key: str
    run_id: str
    fence: int
    pid: int
    at: float
    lease_left: float
    result: str | None = None


class Outside:
    """The outside world, as one process acts on it.

    Args:
        lease_left: For a run, how many seconds the lease of the attempt that executes it here is still valid.
    """

    def __init__(self, path: Path, lease_left: Callable[[str], float]) -> None:
        self._path = path
        self._lease_left = lease_left

    def begin(self, name: str) -> None:
        """The body of the current activity has been entered."""
        self._write(BEGUN, name, None)

    def happen(self, name: str, result: str) -> str:
        """The effect of the current activity happens."""
        self._write(HAPPENED, name, result)
        return result

    def _write(self, moment: str, name: str, result: str | None) -> None:
        activity = current_activity()
        line = {
            "moment": moment,
            "name": name,
            "key": activity.activity_id,
            "run_id": activity.run_id,
            "fence": activity.attempt,
            "pid": os.getpid(),
            "at": time.time(),
            "lease_left": self._lease_left(activity.run_id),
            "result": result,
        }
        append(self._path, line)


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a line to a file that other processes write too."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)


def read(path: Path, start: int = 0) -> Iterator[Line]:
    """All lines from byte `start` on, in the order in which they were written."""
    if path.exists():
        with path.open() as lines:
            lines.seek(start)
            for line in lines:
                yield Line(**json.loads(line))


class Witness:
    """Somebody who looks at the outside world again and again, to see what has happened since."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen_to = 0
        self._happened: dict[str, Line] = {}

    def happened(self) -> dict[str, Line]:
        """The effects that have happened by now, by the activity's id."""
        seen_to = self._path.stat().st_size if self._path.exists() else 0
        for line in read(self._path, self._seen_to):
            if line.moment == HAPPENED:
                self._happened[line.key] = line
        self._seen_to = seen_to  # what was added meanwhile is seen once more
        return self._happened
