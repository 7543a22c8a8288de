"""A real pseudo terminal with a command in it, as somebody sits before it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path

_PATIENCE_S = 60.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# A session leader that opens a terminal gets it as its own: then Ctrl-C reaches the command as it does from a keyboard.
_TAKE_TERMINAL = "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


class Terminal:
    """Python with these arguments, in a terminal of so many columns.

    Attributes:
        raw: All that it has printed, with what steers the terminal.
    """

    def __init__(self, *arguments: str, environment: Mapping[str, str], folder: Path, columns: int = 120) -> None:
        self.raw = ""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        kept = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}  # the terminal says how wide it is
        command = [sys.executable, "-c", _TAKE_TERMINAL, *arguments]
        self.process = subprocess.Popen(
            command, cwd=folder, env=kept, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, close_fds=True
        )
        os.close(slave)

    @property
    def text(self) -> str:
        """What it has printed, as lines of text."""
        return _ESCAPES.sub("", self.raw).replace("\r\n", "\n")

    def until(self, expected: str, *, times: int = 1) -> None:
        """Wait until it has printed something so many times."""
        deadline = time.monotonic() + _PATIENCE_S
        while self.text.count(expected) < times:
            assert time.monotonic() < deadline, f"{expected!r} was not printed: {self.text}"
            assert self._read(0.2), f"it ended without having printed {expected!r}: {self.text}"

    def answer(self, prompt: str, line: str, *, times: int = 1) -> None:
        """Wait for a prompt, and type a line."""
        self.until(prompt, times=times)
        self.type(f"{line}\n")

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._master, keys.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.type("\x03")

    def ended(self) -> int:
        """Wait for its end. Returns the exit code."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._read(0.2):
            assert time.monotonic() < deadline, f"it did not end: {self.text}"
        return self.process.wait(_PATIENCE_S)

    def close(self) -> None:
        """End it, if it runs still."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)

    def _read(self, timeout_s: float) -> bool:
        """Take in what it has printed meanwhile. False: there is nobody who could print more."""
        ready, _, _ = select.select([self._master], [], [], timeout_s)
        if not ready:
            return True
        try:
            found = os.read(self._master, 65536)
        except OSError:  # how Linux says that the last one who had the terminal is gone
            return False
        self.raw += found.decode(errors="replace")
        return bool(found)
