"""`mongo-durable runs`, `show`, `cancel` and `retry`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from mongo_durable import SyncDurableClient
from tests.cli.conftest import Cli


def _listed(cli: Cli, *arguments: str) -> list[str]:
    ended = cli("runs", "--json", *arguments)
    assert ended.exit_code == 0, ended.output
    return [each["run_id"] for each in json.loads(ended.stdout)]


def test_runs_lists_newest_first_and_filters(cli: Cli, started: Callable[..., None]) -> None:
    """`runs` shows every run, newest first, or those of a status, workflow or thread, at most so many."""
    started("done-1")
    started("asks-1", questions=1, workflow="approval")
    started("done-2", thread_id="t9")
    assert _listed(cli) == ["done-2", "asks-1", "done-1"]
    assert _listed(cli, "--status", "suspended") == ["asks-1"]
    assert _listed(cli, "--workflow", "purchase") == ["done-2", "done-1"]
    assert _listed(cli, "--thread", "t9") == ["done-2"]
    assert _listed(cli, "--limit", "1") == ["done-2"]
    table = cli("runs").stdout
    assert table.index("done-2") < table.index("asks-1") < table.index("done-1")
    assert "suspended" in table


def test_no_runs_is_no_error(cli: Cli) -> None:
    """An empty listing says so; as JSON it is an empty list."""
    assert "no run" in cli("runs").stdout
    assert _listed(cli) == []


def test_a_status_that_does_not_exist_is_refused(cli: Cli) -> None:
    """A mistyped status is an error that names the right ones, not an empty list."""
    ended = cli("runs", "--status", "done")
    assert ended.exit_code == 1
    assert "completed" in ended.stderr


def test_show_tells_executed_from_recorded(cli: Cli, started: Callable[..., None], answered: Callable[..., None]) -> None:
    """`show` says for each attempt which bodies ran and which outcomes it took from the history, and who answered what."""
    started("po-17", questions=1)
    assert cli("resolve", "po-17", "--answer", '{"ok": true}', "--by", "ada", "--note", "fine").exit_code == 0
    answered("po-17")
    lines = [line.strip("│├└─ ") for line in cli("show", "po-17").stdout.splitlines()]
    assert lines[0].startswith("run po-17  purchase 1  completed")
    first, second = (next(index for index, line in enumerate(lines) if line.startswith(f"attempt {number} ")) for number in (1, 2))
    assert "suspended on frontier 1" in lines[first]
    assert re.fullmatch(r'step 1  ✓ ACTIVITY look_up  first#1  \d+ ms  {"fault": ""} → "found"', lines[first + 1])
    assert "completed" in lines[second]
    assert lines[second + 1] == "1 recorded activity replayed"
    frontier = next(index for index, line in enumerate(lines) if line.startswith("frontier 1 "))
    assert "resolved by ada (cli)" in lines[frontier]
    assert "“fine”" in lines[frontier]
    assert 'ask_1 asks {"question": "number 1"}' in lines[frontier + 1]
    assert lines[frontier + 2] == 'answer  {"ok": true}'


def test_show_as_json_has_the_same(cli: Cli, started: Callable[..., None]) -> None:
    """`show --json` is one document: the run, its input, its attempts and its frontiers with their questions."""
    started("po-17", questions=2)
    shown = json.loads(cli("show", "po-17", "--json").stdout)
    assert shown["run"]["status"] == "suspended"
    assert shown["input"] == {"fault": ""}
    assert [line["name"] for line in shown["attempts"][0]["executed"]] == ["look_up"]
    assert [entry["question"] for entry in shown["frontiers"][0]["entries"]] == [{"question": "number 1"}, {"question": "number 2"}]


def test_show_tells_why_a_run_failed(cli: Cli, started: Callable[..., None]) -> None:
    """A failed run shows its error, and the activity that failed."""
    started("po-17", fault="no such item")
    shown = cli("show", "po-17").stdout
    assert "error ValueError: no such item" in shown
    assert "✗ ACTIVITY look_up" in shown
    assert "→ ValueError: no such item" in shown


def test_stored_text_cannot_steer_the_terminal(cli: Cli, started: Callable[..., None]) -> None:
    """Control characters in what a workflow stored are shown, not sent."""
    started("po-17", fault="red \x1b[31m and \x9b31m [bold]not markup[/bold]")
    for command in (("show", "po-17"), ("runs",)):
        shown = cli(*command).stdout
        assert "\x1b" not in shown
        assert "\x9b" not in shown
    assert "[bold]not markup[/bold]" in cli("show", "po-17").stdout


def test_an_unknown_run_is_an_error_of_ours(cli: Cli) -> None:
    """A run that does not exist is one line with its code, for every command that names a run."""
    for command in (("show", "po-0"), ("cancel", "po-0"), ("retry", "po-0"), ("resolve", "po-0", "--answer", "1")):
        ended = cli(*command)
        assert ended.exit_code == 1, command
        assert "'po-0'" in ended.stderr
        assert "[run_not_found]" in ended.stderr
        assert "Traceback" not in ended.output


def test_cancel_ends_a_run_and_repeats(cli: Cli, started: Callable[..., None], client: SyncDurableClient) -> None:
    """A suspended run is cancelled with its question; cancelling again is no error."""
    started("po-17", questions=1)
    for _ in range(2):
        ended = cli("cancel", "po-17", "--reason", "not needed")
        assert ended.exit_code == 0, ended.output
        assert "po-17 is cancelled" in ended.stdout
    assert client.get_run("po-17").status == "cancelled"
    assert "cancelled" in cli("show", "po-17").stdout
    assert client.open_frontiers() == []
    assert client.history("po-17")[-1].data["reason"] == "not needed"


def test_cancel_of_what_has_ended_is_not_a_success(cli: Cli, started: Callable[..., None]) -> None:
    """Whoever cancels too late hears how the run ended, with exit code 1."""
    started("po-17")
    ended = cli("cancel", "po-17")
    assert ended.exit_code == 1
    assert "had ended as completed" in ended.stderr


def test_retry_lets_a_failed_run_go_on(cli: Cli, started: Callable[..., None], client: SyncDurableClient) -> None:
    """A failed run becomes ready; a completed one is refused."""
    started("po-17", fault="no such item")
    ended = cli("retry", "po-17", "--json")
    assert ended.exit_code == 0, ended.output
    assert json.loads(ended.stdout)["status"] == client.get_run("po-17").status == "ready"
    started("po-18")
    refused: Any = cli("retry", "po-18")
    assert refused.exit_code == 1
    assert "[run_error]" in refused.stderr
