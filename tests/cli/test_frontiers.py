"""`mongo-durable frontiers` and `resolve`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import timedelta

import pytest

from mongo_durable import SyncDurableClient
from mongo_durable.protocol.frontier import Audience
from tests.cli.conftest import Cli, Desk


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
def test_any_json_answers_the_only_question(desk: Desk, clerk: SyncDurableClient, answer: str) -> None:
    """Where there is one question, JSON alone answers it, whatever JSON it is."""
    run_id, (activity_id,) = desk.ask()
    ended = desk.cli("resolve", run_id, "--answer", answer, "--by", "ada", "--note", "why not")
    assert ended.exit_code == 0, ended.output
    assert _answers(clerk, run_id) == {activity_id: json.loads(answer)}
    assert clerk.history(run_id)[-1].data["resolved_by"] == "ada"
    assert clerk.get_run(run_id).status == "ready"


def test_each_of_several_questions_is_named(desk: Desk, clerk: SyncDurableClient) -> None:
    """Several questions are answered at once, each by its activity id; a value may have '=' in it."""
    run_id, (one, two) = desk.ask({}, {})
    ended = desk.cli("resolve", run_id, "--answer", f'{two}="x=y"', "--answer", f"{one}=null", "--json")
    assert ended.exit_code == 0, ended.output
    assert json.loads(ended.stdout)["generation"] == 1
    assert _answers(clerk, run_id) == {one: None, two: "x=y"}


def test_an_unnamed_answer_to_several_questions_is_refused(desk: Desk, clerk: SyncDurableClient) -> None:
    """Nobody guesses which question was meant: the ids are named, and nothing is written."""
    run_id, asked = desk.ask({}, {})
    ended = desk.cli("resolve", run_id, "--answer", "true")
    assert ended.exit_code == 2
    for part in asked:
        assert part[:8] in ended.stderr
    assert clerk.get_run(run_id).status == "suspended"


@pytest.mark.parametrize("answer", ["yes", "{'approved': true}", "act_x=yes", "NaN", "act_x=Infinity", "", '{"a": 1', "[" * 100_000])
def test_what_is_not_json_is_wrong_usage(desk: Desk, clerk: SyncDurableClient, answer: str) -> None:
    """An answer that is not JSON is refused before the database is asked, with exit code 2."""
    run_id, _ = desk.ask()
    ended = desk.cli("resolve", run_id, "--answer", answer)
    assert ended.exit_code == 2, ended.output
    assert "JSON" in ended.stderr
    assert clerk.get_run(run_id).status == "suspended"


def test_the_same_activity_twice_is_wrong_usage(desk: Desk, clerk: SyncDurableClient) -> None:
    """Two answers to one question are refused, not the last one taken."""
    run_id, (activity_id,) = desk.ask()
    assert desk.cli("resolve", run_id, "--answer", f"{activity_id}=1", "--answer", f"{activity_id}=2").exit_code == 2
    assert clerk.get_run(run_id).status == "suspended"


def test_refusals_say_why(desk: Desk, clerk: SyncDurableClient) -> None:
    """Unknown, missing, stale: each refusal has its code and exit code 1, and writes nothing."""
    run_id, (one, two) = desk.ask({}, {})
    both = ("--answer", f"{one}=1", "--answer", f"{two}=2")
    for code, arguments in {
        "unknown_activity": ("--answer", "act_nobody=1"),
        "incomplete_resolution": ("--answer", f"{one}=1"),
        "stale_generation": (*both, "--generation", "7"),
    }.items():
        ended = desk.cli("resolve", run_id, *arguments)
        assert (ended.exit_code, code in ended.stderr) == (1, True), ended.output
    assert "stale_generation" in desk.cli("resolve", run_id, *both, "--digest", "0" * 32).stderr
    assert clerk.get_run(run_id).status == "suspended"


def test_the_first_answer_stands(desk: Desk) -> None:
    """The same answer again gives the same receipt; another one is a conflict."""
    run_id, _ = desk.ask()
    first = desk.cli("resolve", run_id, "--answer", "1", "--by", "ada", "--json")
    again = desk.cli("resolve", run_id, "--answer", "1", "--by", "bob", "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout) == json.loads(first.stdout)
    other = desk.cli("resolve", run_id, "--answer", "2")
    assert other.exit_code == 1
    assert "[resolution_conflict]" in other.stderr


def test_a_run_that_asks_nothing_cannot_be_answered(cli: Cli, started: Callable[..., None]) -> None:
    """A run that never asked says what it is instead."""
    started("po-17")
    ended = cli("resolve", "po-17", "--answer", "1")
    assert ended.exit_code == 1
    assert "[run_not_suspended]" in ended.stderr


def test_frontiers_are_filtered_and_show_their_terms(desk: Desk) -> None:
    """By run, and by who is asked now; with audience, escalation, deadline and default."""
    hours = timedelta(hours=1)
    audience = Audience(first="clerks-of-this-test", then="managers-of-this-test", after=hours)
    run_id, (asked,) = desk.ask({"value": "Buy?", "audience": audience, "expires_in": 2 * hours, "default": {"ok": False}})
    other, _ = desk.ask()
    listed = desk.cli("frontiers", "--audience", "clerks-of-this-test").stdout
    assert listed.count("run ") == 1
    assert re.search(rf"run {run_id}  procurement  generation 1  waits for .*, until 20", listed)
    assert re.search('for clerks-of-this-test, from 20.* for managers-of-this-test as well · goes on with {"ok": false} at 20', listed)
    assert "nothing waits" in desk.cli("frontiers", "--audience", "managers-of-this-test").stdout
    (found,) = json.loads(desk.cli("frontiers", "--run", other, "--json").stdout)
    assert (found["run_id"], found["draft"]) == (other, None)
    shown = json.loads(desk.cli("show", run_id, "--json").stdout)
    (entry,) = shown["frontiers"][0]["entries"]
    assert (entry["activity_id"], entry["audience"], entry["has_default"]) == (asked, "clerks-of-this-test", True)
    assert (shown["draft"], shown["refusals"]) == (None, [])
