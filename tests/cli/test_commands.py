"""The command line as a whole."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.cli.conftest import Cli


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
    for name in ("demo", "dev", "init", "runner", "runs", "show", "frontiers", "resolve", "cancel", "retry", "mongosh-script"):
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
