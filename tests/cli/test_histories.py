"""`mongo-durable export`, `replay` and `prune`; pages of `runs` and `frontiers`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mongo_durable import SyncDurableClient
from tests.cli.conftest import Cli

CODE = """
from tests.cli.conftest import asking_app

{name} = asking_app("purchase", "mongodb://nowhere.invalid", "none", {questions})
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`code("same", questions=1)`: names the code of the runs that `started` starts, or of changed ones, which knows no database."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, *, questions: int) -> str:
        (tmp_path / f"code_{name}.py").write_text(CODE.format(name=name, questions=questions))
        return f"code_{name}:{name}"

    return write


def test_what_is_exported_replays_or_diverges(
    cli: Cli, started: Callable[..., None], code: Callable[..., str], tmp_path: Path, client: SyncDurableClient
) -> None:
    """A file of several runs: exit code 0 with the code that made them, 1 with another, which is told where it differs; no database is asked."""
    started("po-1", questions=1)
    started("po-2", questions=1)
    started("other", workflow="approval")
    file = tmp_path / "runs.jsonl"
    exported = cli("export", "po-1", "po-2", "-o", str(file))
    assert (exported.exit_code, exported.stdout) == (0, ""), exported.output
    assert "2 runs exported" in exported.stderr
    assert file.read_text().splitlines() == [line for run_id in ("po-1", "po-2") for line in client.export(run_id)]
    nowhere: Any = {"MONGO_DURABLE_URI": None, "MONGO_DURABLE_DATABASE": None}
    same = cli("replay", str(file), code("same", questions=1), **nowhere)
    assert (same.exit_code, same.stdout.count("replays to the frontier")) == (0, 2), same.output
    changed = cli("replay", str(file), code("changed", questions=0), **nowhere)
    assert changed.exit_code == 1
    assert "2 of 2 runs diverge" in changed.stderr
    [first, _] = json.loads(cli("replay", str(file), "code_changed:changed", "--json", **nowhere).stdout)
    assert (first["run_id"], first["is_same"], first["status"]) == ("po-1", False, "suspended")
    assert first["divergence"]["position"] in changed.stdout


def test_runs_are_selected_for_an_export(cli: Cli, started: Callable[..., None], tmp_path: Path) -> None:
    """By workflow, status, age and number, newest first; nothing that matches is no file."""
    started("po-1")
    started("po-2", questions=1)
    started("other", workflow="approval")

    def names(*options: str) -> list[str]:
        ended = cli("export", *options)
        return [found["run_id"] for line in ended.stdout.splitlines() if "workflow" in (found := json.loads(line)) and "input" in found]

    assert names("--workflow", "purchase") == ["po-2", "po-1"]
    assert names("--status", "completed", "--since", "1h") == ["other", "po-1"]
    assert names("--limit", "1") == ["other"]
    assert names("--since", "0") == []
    none = cli("export", "--workflow", "none", "-o", str(tmp_path / "none.jsonl"))
    assert (none.exit_code, list(tmp_path.iterdir())) == (1, [])
    assert cli("export").exit_code == 2
    assert cli("export", "po-1", "--status", "failed").exit_code == 2
    assert cli("export", "po-9").exit_code == 1


def test_prune_removes_what_ended(cli: Cli, started: Callable[..., None], client: SyncDurableClient) -> None:
    """A dry run says which and removes nothing; then they are gone, and what waits for an answer is not touched."""
    started("done-1")
    started("asks-1", questions=1)
    started("broken-1", fault="no")
    assert json.loads(cli("prune", "--older-than", "1h", "--json").stdout)["runs"] == []
    tried = cli("prune", "--older-than", "0", "--dry-run")
    assert tried.stdout.splitlines() == ["done-1", "broken-1", "2 runs would be removed"]
    assert len(client.list_runs()) == 3
    assert json.loads(cli("prune", "--older-than", "0", "--status", "failed", "--json").stdout)["runs"] == ["broken-1"]
    assert cli("prune", "--older-than", "0s").stdout.startswith("1 run removed, ")
    assert [each.run_id for each in client.list_runs()] == ["asks-1"]
    for wrong in ((), ("--older-than", "soon"), ("--older-than", "9" * 30 + "d")):
        assert cli("prune", *wrong).exit_code == 2


def test_pages_follow_one_another(cli: Cli, started: Callable[..., None]) -> None:
    """A full page names what the next one goes on behind; so do its rows as JSON."""
    for number in range(3):
        started(f"po-{number}", questions=1)
    for command, expected in (("runs", ["po-2", "po-1", "po-0"]), ("frontiers", ["po-0", "po-1", "po-2"])):
        first = cli(command, "--json", "--limit", "2")
        rows = json.loads(first.stdout)
        assert f"--after {rows[-1]['cursor']}" in first.stderr
        rest = cli(command, "--json", "--limit", "2", "--after", rows[-1]["cursor"])
        assert [each["run_id"] for each in (*rows, *json.loads(rest.stdout))] == expected
        assert rest.stderr == ""
        assert cli(command, "--after", "nonsense").exit_code == 1
