"""`frontiers --watch` and `runs --watch`: the real command, in a terminal and in a pipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Desk
from tests.support.terminal import Terminal


@pytest.fixture
def piped(desk: Desk, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`piped("runs", "--watch")`: the command line with pipes."""
    begun: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, **desk.environment, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-W", "error", "-m", "mongo_durable.cli", *arguments]
        begun.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return begun[-1]

    yield start
    for each in begun:
        each.kill()
        each.communicate()


def test_a_terminal_shows_frontiers_as_they_change(desk: Desk, terminal: Callable[..., Terminal]) -> None:
    """A new frontier and an answered one are seen as they come; Ctrl-C leaves with exit code 0 and gives the cursor back."""
    workflow_run, (asked,) = desk.ask({"value": "watched?", "name": "watched"})
    screen = terminal("frontiers", "--watch", "--run", workflow_run)
    screen.until("watched asks")
    assert desk.cli("resolve", workflow_run, "--answer", f"{asked}=1").exit_code == 0
    screen.until("nothing waits for an answer")
    screen.interrupt()
    assert screen.ended() == 0
    assert "Traceback" not in screen.text
    assert screen.raw.rfind("\x1b[?25h") > screen.raw.rfind("\x1b[?25l") >= 0


def test_a_pipe_gets_a_line_for_each_change(desk: Desk, piped: Callable[..., subprocess.Popen[str]]) -> None:
    """What is open, what becomes of it, and drafts: one line each, as JSON with --json; runs likewise; Ctrl-C is exit code 0."""
    run_id, (one, two) = desk.ask({"value": "one?"}, {"value": "two?"})
    lines = piped("frontiers", "--run", run_id, "--watch")
    documents = piped("frontiers", "--run", run_id, "--json", "--watch")
    runs = piped("runs", "--watch")
    for each in (lines, documents, runs):
        assert each.stdout is not None
    assert f"open       run {run_id}  generation 1" in lines.stdout.readline()
    assert json.loads(documents.stdout.readline())["change"] == "open"
    assert desk.cli("resolve", run_id, "--draft", "--by", "ada", "--answer", f"{one}=1").exit_code == 0
    assert f"draft      run {run_id}  generation 1  ada says 1 to {one}" in lines.stdout.readline()
    assert json.loads(documents.stdout.readline())["frontier"]["draft"]["missing"] == [two]
    assert desk.cli("resolve", run_id, "--answer", f"{one}=1", "--answer", f"{two}=2").exit_code == 0
    assert "resolved   run" in lines.stdout.readline()
    assert json.loads(documents.stdout.readline())["change"] == "resolved"
    while f"run {run_id}  procurement 1  ready" not in runs.stdout.readline():
        pass
    for each in (lines, documents, runs):
        each.send_signal(signal.SIGINT)
        _, complaints = each.communicate(timeout=60)
        assert (each.returncode, complaints) == (0, "")
