"""The command line as a whole."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli.conftest import Cli, Desk


def test_help_loads_neither_driver_nor_framework() -> None:
    """`mongo-durable --help` waits for no driver and no LangGraph."""
    program = (
        "import json, sys\n"
        "from mongo_durable.cli import main\n"
        "sys.argv = ['mongo-durable', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    printed = subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, capture_output=True, text=True).stdout
    loaded = set(json.loads(printed.splitlines()[-1]))
    assert not loaded & {"pymongo", "motor", "langgraph", "langchain_core", "langchain"}


def test_help_names_every_command(cli: Cli) -> None:
    """Whoever asks for help learns of every command."""
    ended = cli("--help")
    assert ended.exit_code == 0
    for name in ("demo", "dev", "init", "runner", "runs", "show", "frontiers", "resolve", "token", "cancel", "retry", "mongosh-script"):
        assert name in ended.output


@pytest.mark.parametrize("command", ["init", "runs", "frontiers"])
def test_without_a_uri_the_usage_is_wrong(cli: Cli, command: str) -> None:
    """A command that was not told where MongoDB is says how to tell it, with exit code 2."""
    ended = cli(command, MONGO_DURABLE_URI=None)
    assert ended.exit_code == 2
    assert "--uri" in ended.stderr
    assert "MONGO_DURABLE_URI" in ended.stderr


def test_a_uri_that_is_none_is_refused_without_being_shown(cli: Cli) -> None:
    """An error of ours is one line on stderr with its code and exit code 1, and never shows the URI."""
    ended = cli("runs", "--uri", "mongodb://user:secret@")
    assert ended.exit_code == 1
    assert ended.stderr.startswith("mongo-durable: ")
    assert "[configuration_error]" in ended.stderr
    assert "secret" not in ended.output
    assert len(ended.stderr.splitlines()) == 1


def test_options_go_before_the_environment(cli: Cli, database: str) -> None:
    """--database wins over MONGO_DURABLE_DATABASE."""
    ended = cli("init", "--database", database, MONGO_DURABLE_DATABASE="not_this_one")
    assert ended.exit_code == 0
    assert database in ended.stdout


def test_an_unknown_command_is_wrong_usage(cli: Cli) -> None:
    """A mistyped command ends with exit code 2."""
    assert cli("rusn").exit_code == 2


def test_exit_codes_are_those_that_are_documented(desk: Desk) -> None:
    """0 done, 1 refused, 2 wrong usage; 3 and 130 have tests of their own. Each command that prints data has --json."""
    run_id, _ = desk.ask()
    assert desk.cli("runs").exit_code == 0
    assert desk.cli("show", "nobody-has-this").exit_code == 1
    assert desk.cli("show").exit_code == 2
    for command in (["runs"], ["show", run_id], ["frontiers"], ["doctor"], ["token", run_id, "--expires-in", "1h"], ["cancel", run_id]):
        ended = desk.cli(*command, "--json")
        assert json.loads(ended.stdout) is not None, ended.output
    assert desk.cli("cancel", run_id, "--json").exit_code == 0
    assert desk.cli("resolve", run_id, "--answer", "1").exit_code == 1


def test_a_run_that_is_not_there_names_likely_ones(desk: Desk) -> None:
    """A mistyped id gets the ids that were probably meant; one that is like none is told where to look."""
    run_id, _ = desk.ask(run_id="order-of-the-likely-desk")
    for mistyped in ("order-of-the-lickely-desk", "order-of-the"):
        for command in (["show"], ["cancel"], ["resolve", "--answer", "1"]):
            ended = desk.cli(command[0], mistyped, *command[1:])
            assert (ended.exit_code, f"did you mean {run_id}?" in ended.stderr) == (1, True), ended.output
    assert "`mongo-durable runs` lists them" in desk.cli("show", "zzzzzzzzzzzz").stderr


def test_a_database_that_was_never_used_is_named(desk: Desk) -> None:
    """Whoever looks into the wrong database hears that nothing was ever there, and its name."""
    for command in (["runs"], ["frontiers"]):
        ended = desk.cli(*command, "--database", "not_this_one")
        assert ended.exit_code == 0
        assert "database not_this_one is not set up" in ended.stdout
    ended = desk.cli("show", "po-17", "--database", "not_this_one")
    assert ended.exit_code == 1
    assert "not set up" in ended.stderr


@pytest.fixture
def mute() -> Iterator[socket.socket]:
    """A server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_server_that_does_not_answer_is_given_up_soon(cli: Cli, mute: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says what to look at. What the URI says about waiting stands."""
    from mongo_durable.cli import database

    monkeypatch.setattr(database, "_PATIENCE_S", 0.3)
    uri = f"mongodb://127.0.0.1:{mute.getsockname()[1]}/?replicaSet=rs0"
    for given, is_ours in ((uri, True), (f"{uri}&serverSelectionTimeoutMS=300", False)):
        ended = cli("runs", "--uri", given)
        assert ended.exit_code == 1
        assert "[store_unavailable]" in ended.stderr
        assert "mongo-durable dev" in ended.stderr
        assert len(ended.stderr.splitlines()) == 1
        assert ("within 0.3 s" in ended.stderr) is is_ours


def test_a_uri_of_the_wrong_kind_is_told_what_one_looks_like(cli: Cli) -> None:
    """The likeliest mistakes: another scheme, a name that is no port."""
    for uri in ("http://localhost:27017", "mongodb://localhost:port"):
        ended = cli("runs", "--uri", uri)
        assert ended.exit_code == 1
        assert "mongodb://host:27017/?replicaSet=rs0" in ended.stderr


def test_ctrl_c_has_no_traceback(process: Any, mute: socket.socket) -> None:
    """Where it is no way to leave, it ends a command with exit code 130 and one line."""
    waiting = process("runs", "--uri", f"mongodb://127.0.0.1:{mute.getsockname()[1]}/?directConnection=true&serverSelectionTimeoutMS=60000")
    mute.settimeout(60)
    with mute.accept()[0]:  # it is past its imports, and waits for what this server says
        waiting.send_signal(signal.SIGINT)
        _, complaints = waiting.communicate(timeout=60)
    assert (waiting.returncode, complaints) == (130, "mongo-durable: interrupted\n")


@pytest.mark.parametrize(
    ("typed", "position", "expected"),
    [
        ("mongo-durable tok", 1, ["token"]),
        ("mongo-durable show completed-run-", 2, ["completed-run-1"]),
        ("mongo-durable resolve completed-run-", 2, ["completed-run-1"]),
        ("mongo-durable show --database not_this_one completed-", 4, []),
    ],
)
def test_the_shell_completes_commands_and_runs(desk: Desk, typed: str, position: int, expected: list[str]) -> None:
    """Tab completes a command, and the id of a run of the database that is set."""
    if not desk.cli("frontiers", "--run", "completed-run-1").stdout.startswith("run"):
        desk.ask(run_id="completed-run-1")
    ended = desk.cli(_MONGO_DURABLE_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(position))
    assert (ended.exit_code, ended.stdout.split()) == (0, expected), ended.output


def test_completion_never_complains(desk: Desk, mute: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a URI, or with one that leads nowhere, there are no ids, and no message in the middle of what somebody types."""
    from mongo_durable.cli import database

    monkeypatch.setattr(database, "_COMPLETION_S", 0.2)
    for uri in (None, f"mongodb://127.0.0.1:{mute.getsockname()[1]}/?serverSelectionTimeoutMS=60000", "http://"):
        asked = {"_MONGO_DURABLE_COMPLETE": "complete_bash", "COMP_WORDS": "mongo-durable show a", "COMP_CWORD": "2", "MONGO_DURABLE_URI": uri}
        ended = desk.cli(**asked)
        assert (ended.exit_code, ended.output.strip()) == (0, "")


def test_completion_can_be_installed(cli: Cli) -> None:
    """The script for a shell is printed, or installed by the shell's own place for it."""
    assert all(option in cli("--help").output for option in ("--install-completion", "--show-completion"))
    for shell in ("bash", "zsh", "fish"):
        ended = cli(_MONGO_DURABLE_COMPLETE=f"source_{shell}")
        assert ended.exit_code == 0, ended.output
        assert f"_MONGO_DURABLE_COMPLETE=complete_{shell}" in ended.stdout


def test_a_pipe_has_no_colours(desk: Desk) -> None:
    """What steers a terminal is for terminals."""
    run_id, _ = desk.ask()
    for command in (["runs"], ["frontiers"], ["show", run_id]):
        assert "\x1b" not in desk.cli(*command).output
