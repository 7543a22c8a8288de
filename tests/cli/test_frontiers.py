"""`mongo-durable frontiers` and `resolve`."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from mongo_durable import SyncDurableClient
from tests.cli.conftest import Cli


def _ids(client: SyncDurableClient, run_id: str) -> list[str]:
    frontier = client.get_run(run_id).frontier
    assert frontier is not None
    return [entry.activity_id for entry in frontier.entries]


def _answers(client: SyncDurableClient, run_id: str) -> object:
    return client.history(run_id)[-1].data["answers"]


def test_frontiers_lists_every_open_question(cli: Cli, started: Callable[..., None], client: SyncDurableClient) -> None:
    """`frontiers` shows each question with its activity id, what is asked and by whom; or those of one workflow."""
    started("asks-2", questions=2)
    started("asks-1", questions=1, workflow="approval")
    table = cli("frontiers").stdout
    for activity_id in (*_ids(client, "asks-2"), *_ids(client, "asks-1")):
        assert activity_id in table
    assert '{"question": "number 2"}' in table
    found = json.loads(cli("frontiers", "--workflow", "approval", "--json").stdout)
    assert [(each["run_id"], each["generation"], len(each["entries"])) for each in found] == [("asks-1", 1, 1)]
    assert found[0]["digest"]


def test_no_open_question_is_no_error(cli: Cli) -> None:
    """An empty listing says so; as JSON it is an empty list."""
    assert "nothing waits" in cli("frontiers").stdout
    assert json.loads(cli("frontiers", "--json").stdout) == []


@pytest.mark.parametrize("answer", ["null", "false", "0", '""', "[]", "{}", '"a=b"', '{"act_x": 1}', "-1.5"])
def test_any_json_answers_the_only_question(cli: Cli, started: Callable[..., None], client: SyncDurableClient, answer: str) -> None:
    """Where there is one question, JSON alone answers it, whatever JSON it is."""
    started("po-17", questions=1)
    (activity_id,) = _ids(client, "po-17")
    ended = cli("resolve", "po-17", "--answer", answer, "--by", "ada", "--note", "why not")
    assert ended.exit_code == 0, ended.output
    assert _answers(client, "po-17") == {activity_id: json.loads(answer)}
    assert client.history("po-17")[-1].data["resolved_by"] == "ada"
    assert client.get_run("po-17").status == "ready"


def test_each_of_several_questions_is_named(cli: Cli, started: Callable[..., None], client: SyncDurableClient) -> None:
    """Several questions are answered at once, each by its activity id; a value may have '=' in it."""
    started("po-17", questions=2)
    one, two = _ids(client, "po-17")
    ended = cli("resolve", "po-17", "--answer", f'{two}="x=y"', "--answer", f"{one}=null", "--json")
    assert ended.exit_code == 0, ended.output
    assert json.loads(ended.stdout)["generation"] == 1
    assert _answers(client, "po-17") == {one: None, two: "x=y"}


def test_an_unnamed_answer_to_several_questions_is_refused(cli: Cli, started: Callable[..., None], client: SyncDurableClient) -> None:
    """Nobody guesses which question was meant: the ids are named, and nothing is written."""
    started("po-17", questions=2)
    ended = cli("resolve", "po-17", "--answer", "true")
    assert ended.exit_code == 2
    for part in _ids(client, "po-17"):
        assert part[:8] in ended.stderr
    assert client.get_run("po-17").status == "suspended"


@pytest.mark.parametrize("answer", ["yes", "{'approved': true}", "act_x=yes", "NaN", "act_x=Infinity", "", '{"a": 1', "[" * 100_000])
def test_what_is_not_json_is_wrong_usage(cli: Cli, started: Callable[..., None], client: SyncDurableClient, answer: str) -> None:
    """An answer that is not JSON is refused before the database is asked, with exit code 2."""
    started("po-17", questions=1)
    ended = cli("resolve", "po-17", "--answer", answer)
    assert ended.exit_code == 2, ended.output
    assert "JSON" in ended.stderr
    assert client.get_run("po-17").status == "suspended"


def test_the_same_activity_twice_is_wrong_usage(cli: Cli, started: Callable[..., None], client: SyncDurableClient) -> None:
    """Two answers to one question are refused, not the last one taken."""
    started("po-17", questions=1)
    (activity_id,) = _ids(client, "po-17")
    assert cli("resolve", "po-17", "--answer", f"{activity_id}=1", "--answer", f"{activity_id}=2").exit_code == 2
    assert client.get_run("po-17").status == "suspended"


def test_refusals_say_why(cli: Cli, started: Callable[..., None], client: SyncDurableClient) -> None:
    """Unknown, missing, stale: each refusal has its code and exit code 1, and writes nothing."""
    started("po-17", questions=2)
    one, two = _ids(client, "po-17")
    both = ("--answer", f"{one}=1", "--answer", f"{two}=2")
    for code, arguments in {
        "unknown_activity": ("--answer", "act_nobody=1"),
        "incomplete_resolution": ("--answer", f"{one}=1"),
        "stale_generation": (*both, "--generation", "7"),
    }.items():
        ended = cli("resolve", "po-17", *arguments)
        assert (ended.exit_code, code in ended.stderr) == (1, True), ended.output
    assert "stale_generation" in cli("resolve", "po-17", *both, "--digest", "0" * 32).stderr
    assert client.get_run("po-17").status == "suspended"


def test_the_first_answer_stands(cli: Cli, started: Callable[..., None]) -> None:
    """The same answer again gives the same receipt; another one is a conflict."""
    started("po-17", questions=1)
    first = cli("resolve", "po-17", "--answer", "1", "--by", "ada", "--json")
    again = cli("resolve", "po-17", "--answer", "1", "--by", "bob", "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout) == json.loads(first.stdout)
    other = cli("resolve", "po-17", "--answer", "2")
    assert other.exit_code == 1
    assert "[resolution_conflict]" in other.stderr


def test_a_run_that_asks_nothing_cannot_be_answered(cli: Cli, started: Callable[..., None]) -> None:
    """A run that never asked says what it is instead."""
    started("po-17")
    ended = cli("resolve", "po-17", "--answer", "1")
    assert ended.exit_code == 1
    assert "[run_not_suspended]" in ended.stderr
