"""A newcomer's first hour: the commands of the README, as they stand there, in three terminals."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mongo_durable import SyncDurableClient
from tests.docs.test_readme import README, blocks_of
from tests.support import mongosh

PORT = "27018"
_PATIENCE_S = 60.0

pytestmark = pytest.mark.xdist_group("mongosh")


def _terminals() -> list[list[str]]:
    _, _, rest = README.read_text(encoding="utf-8").partition("\n## The first hour\n")
    blocks = re.findall(r"^```sh\n(.*?)^```", rest.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    return [block.splitlines() for block in blocks]


class Terminal:
    """A shell of its own, in the newcomer's folder."""

    def __init__(self, folder: Path, port: str) -> None:
        self._folder = folder
        self._port = port
        self._exports: list[str] = []
        path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MONGO_DURABLE_")}
        self._environment = {**kept, "PATH": path, "PYTHONPATH": os.pathsep.join([str(README.parent), str(folder)]), "PYTHONWARNINGS": "error"}

    def type(self, line: str) -> str:
        """Run a line, and return what it printed.

        Raises:
            AssertionError: It failed.
        """
        if line.startswith("export "):
            self._exports.append(line)
            return ""
        ran = subprocess.run(
            self._shell(line), env=self._environment, cwd=self._folder, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
        assert ran.returncode == 0, f"{line}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout

    @contextmanager
    def left_running(self, line: str) -> Iterator[Callable[[], str]]:
        """Run a line until the block ends; Ctrl-C ends it. Gives what waits for its next line of output."""
        with subprocess.Popen(self._shell(f"exec {line}"), env=self._environment, cwd=self._folder, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield process.stdout.readline
            finally:
                process.terminate()
                process.communicate(timeout=_PATIENCE_S)

    def _shell(self, line: str) -> list[str]:
        return ["bash", "-c", "\n".join([*self._exports, line]).replace(PORT, self._port)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the newcomer works: the two programs, and mongosh on the path."""
    (tmp_path / "procurement.py").write_text(blocks_of("One example")[0], encoding="utf-8")
    (tmp_path / "submit.py").write_text(blocks_of("The first hour")[0], encoding="utf-8")
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / "mongosh"
    wrapper.write_text(f'#!/bin/sh\nexec {" ".join(mongosh.command())} "$@"\n', encoding="utf-8")
    wrapper.chmod(0o755)
    return tmp_path


def test_the_commands_of_the_readme_do_what_they_say(folder: Path) -> None:
    """Dev server, init, runner in one process, submit from another, look and answer from mongosh, show, export, replay, prune."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    [server], second, third = _terminals()
    uri = second[0].partition('"')[2].rstrip('"').replace(PORT, port)
    one, two, three = (Terminal(folder, port) for _ in range(3))
    with one.left_running(server) as printed:
        assert printed().startswith(f"mongodb://127.0.0.1:{port}/")
        *before, runner = second
        for line in before:
            two.type(line)
        with two.left_running(runner), SyncDurableClient(uri) as client:
            said = {}
            for line in third:
                said[line] = three.type(line)
                if "durable.answer" in line:
                    assert client.wait("po-17", timeout=_PATIENCE_S).status == "completed"
            _, submitted, listed, looked, answered, shown, _, replayed, pruned = said.values()
            assert submitted == "{'question': 'Buy desk for 28?'}\n"
            for text in (listed, looked):
                assert "po-17" in text
                assert "Buy desk for 28?" in text
            assert "generation 1 is answered" in answered
            assert "resolved by ada" in shown
            assert "desk for 28 (act_" in shown
            assert (folder / "po-17.jsonl").stat().st_size > 0
            assert "replays to its recorded end" in replayed
            assert pruned.startswith("1 run removed")
            assert client.list_runs() == []
