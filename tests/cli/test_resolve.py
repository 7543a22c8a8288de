"""`mongo-durable resolve` on a terminal, into a draft and with a token; and `token`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from mongo_durable import SyncDurableClient
from tests.cli.conftest import Desk
from tests.support.terminal import Terminal

APPROVAL = {
    "type": "object",
    "properties": {"approved": {"type": "boolean"}, "limit": {"type": "integer", "minimum": 1}, "note": {"type": "string", "default": "fine"}},
    "required": ["approved", "limit"],
}


def _answers(clerk: SyncDurableClient, run_id: str) -> Any:
    return clerk.history(run_id)[-1].data["answers"]


def test_answers_are_asked_on_a_terminal(desk: Desk, terminal: Callable[..., Terminal], clerk: SyncDurableClient) -> None:
    """Each question is shown and asked by its schema, a wrong value again; the whole is shown and sent only after a yes."""
    run_id, (one, two) = desk.ask({"value": {"question": "Buy a desk?"}, "schema": APPROVAL}, {"value": "Which colour?"})
    screen = terminal("resolve", run_id, "--by", "ada")
    screen.until("Buy a desk?")
    screen.answer("approved [y/n] ", "y")
    screen.answer("limit (integer from 1): ", "0")
    screen.answer("limit (integer from 1): ", "28", times=2)
    screen.answer('note (text, optional, empty: "fine"): ', "")
    screen.until("Which colour?")
    screen.answer("answer (JSON): ", "red")
    screen.answer('is it the text "red"? [y/n] ', "y")
    screen.until(f'{one}  approval  {{"approved": true, "limit": 28, "note": "fine"}}')
    assert clerk.get_run(run_id).status == "suspended"
    screen.answer(f"send to run {run_id}? [y/n] ", "y")
    assert screen.ended() == 0
    assert "does not fit: $: 0 is less than the minimum of 1" in screen.text
    assert "\x1b[1m" in screen.raw
    assert _answers(clerk, run_id) == {one: {"approved": True, "limit": 28, "note": "fine"}, two: "red"}
    assert clerk.history(run_id)[-1].data["resolved_by"] == "ada"


def test_who_thinks_better_of_it_sends_nothing(desk: Desk, terminal: Callable[..., Terminal], clerk: SyncDurableClient) -> None:
    """A no at the end is exit code 1, Ctrl-C in the middle 130; neither has a traceback, and nothing was written. NO_COLOR is heard."""
    run_id, _ = desk.ask({"schema": {"type": "boolean"}})
    refusing, leaving = terminal("resolve", run_id, NO_COLOR="1"), terminal("resolve", run_id)
    refusing.answer("answer [y/n] ", "y")
    refusing.answer("? [y/n] ", "n")
    leaving.until("answer [y/n] ")
    leaving.interrupt()
    assert (refusing.ended(), leaving.ended()) == (1, 130)
    for screen in (refusing, leaving):
        assert "nothing was sent" in screen.text
        assert "Traceback" not in screen.text
    assert "\x1b[36m" in leaving.raw
    assert "\x1b[36m" not in refusing.raw
    assert clerk.get_run(run_id).status == "suspended"
    assert clerk.refusals(run_id) == []


def test_what_was_shown_is_what_is_answered(desk: Desk, monkeypatch: pytest.MonkeyPatch, clerk: SyncDurableClient) -> None:
    """Where the frontier was answered while the person thought, the answer is refused: it is pinned to generation and digest."""
    from mongo_durable.cli import resolve

    run_id, (asked,) = desk.ask({"schema": {"type": "boolean"}})
    sent: list[Any] = []

    def somebody_is_faster(_: Any, frontier: Any, *__: Any) -> dict[str, Any]:
        clerk.resolve(run_id, {asked: False}, resolved_by="eve")
        return {asked: True}

    send = resolve._send

    async def seen(opened: Any, named: str, answers: Any, options: Any) -> Any:
        sent.append((options.generation, options.digest))
        return await send(opened, named, answers, options)

    frontier = clerk.get_run(run_id).frontier
    assert frontier is not None
    monkeypatch.setattr(resolve, "_check", lambda *_, **__: None)  # standard input is no terminal here
    monkeypatch.setattr(resolve, "_asked", somebody_is_faster)
    monkeypatch.setattr(resolve, "_send", seen)
    ended = desk.cli("resolve", run_id)
    assert ended.exit_code == 1
    assert "[resolution_conflict]" in ended.stderr
    assert sent == [(1, frontier.digest)]
    assert _answers(clerk, run_id) == {asked: False}


def test_without_a_terminal_nobody_is_asked(desk: Desk, clerk: SyncDurableClient) -> None:
    """In a pipe the answers have to be given: wrong usage, and how to give them."""
    run_id, _ = desk.ask()
    ended = desk.cli("resolve", run_id)
    assert ended.exit_code == 2
    assert "no terminal" in ended.stderr
    assert "--answer" in ended.stderr
    assert clerk.get_run(run_id).status == "suspended"


@pytest.mark.parametrize(
    "arguments",
    [(), ("r", "--draft", "--answer", "1"), ("r", "--audience", "a", "--answer", "1"), ("--token", "t", "--draft", "--by", "a", "--answer", "1")],
)
def test_what_does_not_go_together_is_wrong_usage(desk: Desk, arguments: tuple[str, ...]) -> None:
    """No run, a draft of nobody, an audience without a token, a token into a draft."""
    assert desk.cli("resolve", *arguments).exit_code == 2


def test_what_does_not_fit_is_told_to_whom_typed_it(desk: Desk) -> None:
    """A refused value is named with its path and why."""
    run_id, _ = desk.ask({"schema": APPROVAL})
    ended = desk.cli("resolve", run_id, "--answer", '{"approved": 1, "limit": 3}')
    assert ended.exit_code == 1
    assert "[invalid_answer]" in ended.stderr
    assert "$.approved: 1 is not of type 'boolean'" in ended.stderr


def test_a_draft_is_whole_with_its_last_answer(desk: Desk, clerk: SyncDurableClient) -> None:
    """Answers of several people; `frontiers` and `show` say who gave which; the last one sends all."""
    run_id, (one, two) = desk.ask({"value": "one?"}, {"value": "two?"})
    begun = desk.cli("resolve", run_id, "--draft", "--by", "ada", "--answer", f"{one}=true", "--note", "cheap")
    assert begun.exit_code == 0, begun.output
    assert "1 question left to answer" in begun.stdout
    assert clerk.get_run(run_id).status == "suspended"
    listed = desk.cli("frontiers", "--run", run_id).stdout
    assert "1 of 2 answered in the draft" in listed
    assert "draft: ada says true" in listed
    (shown,) = json.loads(desk.cli("frontiers", "--run", run_id, "--json").stdout)
    assert (shown["draft"]["answers"][one]["by"], shown["draft"]["missing"]) == ("ada", [two])
    assert "in the draft: ada says  true  “cheap”" in desk.cli("show", run_id).stdout
    other = desk.cli("resolve", run_id, "--draft", "--by", "bob", "--answer", f"{one}=false")
    assert (other.exit_code, "[draft_conflict]" in other.stderr) == (1, True)
    ended = desk.cli("resolve", run_id, "--draft", "--by", "bob", "--answer", f"{two}=7", "--json")
    assert json.loads(ended.stdout)["resolution"]["resolved_by"] == "ada, bob"
    assert _answers(clerk, run_id) == {one: True, two: 7}
    told = desk.cli("show", run_id).stdout
    assert "resolved by ada, bob (draft)" in told
    assert "answer of bob  7" in told
    assert "refused  draft_conflict  an answer of bob (draft)" in told
    as_document = json.loads(desk.cli("show", run_id, "--json").stdout)
    assert [each["code"] for each in as_document["refusals"]] == ["draft_conflict"]
    assert as_document["frontiers"][0]["answered_by"][two]["by"] == "bob"


def test_a_token_answers_its_frontier(desk: Desk, clerk: SyncDurableClient) -> None:
    """`token` prints one and nothing else; `resolve --token` needs no run beside it, and the audience that it names."""
    run_id, (asked,) = desk.ask()
    printed = desk.cli("token", run_id, "--expires-in", "2h", "--audience", "ada")
    assert printed.exit_code == 0, printed.output
    token = printed.stdout.strip()
    assert len(printed.stdout.splitlines()) == 1
    refused = desk.cli("resolve", "--token", token, "--answer", "1")
    assert (refused.exit_code, "[token_out_of_scope]" in refused.stderr) == (1, True)
    assert desk.cli("resolve", "another-run", "--token", token, "--audience", "ada", "--answer", "1").exit_code == 2
    ended = desk.cli("resolve", "--token", token, "--audience", "ada", "--answer", "1", "--json")
    assert ended.exit_code == 0, ended.output
    assert json.loads(ended.stdout)["channel"] == "token"
    assert _answers(clerk, run_id) == {asked: 1}
    again = desk.cli("resolve", "--token", token, "--audience", "ada", "--answer", "2")
    assert (again.exit_code, "[token_used]" in again.stderr) == (1, True)


def test_a_token_is_asked_for_on_a_terminal(desk: Desk, terminal: Callable[..., Terminal], clerk: SyncDurableClient) -> None:
    """With a token, the questions that it is for are shown and asked; where standard output is JSON, the talk is on standard error."""
    run_id, (asked,) = desk.ask({"value": "Buy?", "schema": {"type": "boolean"}})
    frontier = clerk.get_run(run_id).frontier
    assert frontier is not None
    token = json.loads(desk.cli("token", run_id, "--expires-in", "90", "--json").stdout)
    assert (token["generation"], token["expires_in"]) == (1, 90.0)
    screen = terminal("resolve", "--token", token["token"], "--json")
    screen.answer("answer [y/n] ", "n")
    screen.answer("? [y/n] ", "y")
    assert screen.ended() == 0
    assert '"channel": "token"' in screen.text
    assert _answers(clerk, run_id) == {asked: False}


def test_tokens_need_keys_a_time_and_a_question(desk: Desk) -> None:
    """Without signing keys, with a duration that is none, for a run that asks nothing: refused with what to do."""
    run_id, _ = desk.ask()
    unsigned = desk.cli("token", run_id, "--expires-in", "2h", MONGO_DURABLE_SIGNING_KEYS=None)
    assert (unsigned.exit_code, "MONGO_DURABLE_SIGNING_KEYS" in unsigned.stderr) == (1, True)
    assert desk.cli("token", run_id, "--expires-in", "soon").exit_code == 2
    assert desk.cli("token", run_id, "--expires-in", "0").exit_code == 1
    desk.cli("resolve", run_id, "--answer", "1")
    assert "[run_not_suspended]" in desk.cli("token", run_id, "--expires-in", "2h").stderr
    forged = desk.cli("resolve", "--token", "e30.e30.e30", "--answer", "1")
    assert (forged.exit_code, "[token_invalid]" in forged.stderr) == (1, True)
