"""Resume tokens: what each of them opens, and what it does not."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import jwt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mongo_durable import SigningKeys
from mongo_durable.engine.tokens import KEYS_VARIABLE, check_grant, make_token, read_token
from mongo_durable.errors import (
    ConfigurationError,
    FrontierExpired,
    IncompleteResolution,
    InvalidAnswer,
    NotAuthorized,
    RunNotSuspended,
    TokenError,
    TokenExpired,
    TokenInvalid,
    TokenOutOfScope,
    TokenUsed,
)
from mongo_durable.store import failpoints
from mongo_durable.store.failpoints import FailPoint
from tests.trust.conftest import HOUR, KEYS, Office, question

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def token(keys: SigningKeys = KEYS, **changes: Any) -> str:
    """A token for some frontier."""
    grant = {"database": "d", "run_id": "r", "generation": 1, "digest": "0" * 32, "audience": None, "now": NOW, "expires_in": HOUR, **changes}
    return make_token(keys, **grant)


async def test_a_token_answers_its_frontier(office: Office) -> None:
    """It needs no run id beside it; who used it is recorded; the same answers again give the same receipt, also when the run has gone on."""
    frontier, _ = await office.ask()
    client, answers = office.client(), {frontier.entries[0].activity_id: "yes"}
    link = await client.resume_token(frontier, expires_in=HOUR, audience="ada")
    receipt = await client.resolve_with_token(link, answers, audience="ada", note="by mail")
    assert (receipt.run_id, receipt.resolved_by, receipt.note, receipt.channel) == (frontier.run_id, "ada", "by mail", "token")
    assert await client.resolve_with_token(link, answers, audience="ada") == receipt
    await office.ask_again(frontier.run_id, "and this?")
    assert await client.resolve_with_token(link, answers, audience="ada") == receipt
    with pytest.raises(TokenUsed):
        await client.resolve_with_token(link, {frontier.entries[0].activity_id: "no"}, audience="ada")
    assert [each.code for each in await client.refusals(frontier.run_id)] == ["token_used"]


async def test_what_is_refused_does_not_use_a_token_up(office: Office) -> None:
    """An answer that does not fit, an incomplete one, one that may not be given: the token still opens its frontier."""
    run_id = "patient"
    frontier, _ = await office.ask(question(run_id, 1, schema={"type": "boolean"}), run_id=run_id)
    asked = frontier.entries[0].activity_id
    client = office.client(authorize=lambda request: request.caller == "ada")
    link = await client.resume_token(frontier, expires_in=HOUR)
    with pytest.raises(InvalidAnswer):
        await client.resolve_with_token(link, {asked: "yes"}, resolved_by="ada")
    with pytest.raises(IncompleteResolution):
        await client.resolve_with_token(link, {}, resolved_by="ada")
    with pytest.raises(NotAuthorized):
        await client.resolve_with_token(link, {asked: True}, resolved_by="eve")
    assert (await client.resolve_with_token(link, {asked: True}, resolved_by="ada")).generation == 1


async def test_a_crash_cannot_use_a_token_up(office: Office) -> None:
    """Who dies before the commit has used nothing; who dies after it has answered, and asking again gives the receipt."""
    for point, is_in in ((FailPoint.RESOLVE_BEFORE, False), (FailPoint.RESOLVE_INSIDE, False), (FailPoint.RESOLVE_AFTER, True)):
        frontier, _ = await office.ask()
        client, answers = office.client(), {frontier.entries[0].activity_id: "yes"}
        link = await client.resume_token(frontier, expires_in=HOUR)

        async def die(reached: FailPoint, point: FailPoint = point) -> None:
            if reached is point:
                raise asyncio.CancelledError

        failpoints.handler = die
        with pytest.raises(asyncio.CancelledError):
            await client.resolve_with_token(link, answers)
        failpoints.handler = None
        assert await office.status(frontier.run_id) == ("ready" if is_in else "suspended")
        assert (await client.resolve_with_token(link, answers)).channel == "token"


async def test_each_refusal_has_its_own_error(office: Office, moved_clock: Any) -> None:
    """Expired, for somebody else, for another database, changed: four different errors, of which the first three are kept."""
    frontier, _ = await office.ask()
    client, answers = office.client(), {frontier.entries[0].activity_id: "yes"}
    link = await client.resume_token(frontier, expires_in=HOUR, audience="ada")
    for audience in ("eve", None):
        with pytest.raises(TokenOutOfScope):
            await client.resolve_with_token(link, answers, audience=audience)
    elsewhere = token(run_id=frontier.run_id, digest=frontier.digest, database="another", now=datetime.now(UTC))
    with pytest.raises(TokenOutOfScope, match="another database"):
        await client.resolve_with_token(elsewhere, answers)
    with pytest.raises(TokenInvalid):
        await client.resolve_with_token(link[:-2], answers, audience="ada")
    moved_clock(2 * HOUR)
    with pytest.raises(TokenExpired):
        await client.resolve_with_token(link, answers, audience="ada")
    assert await office.status(frontier.run_id) == "suspended"
    assert [each.code for each in await client.refusals(frontier.run_id)] == ["token_out_of_scope"] * 3 + ["token_expired"]


async def test_the_clock_is_the_servers(office: Office, moved_clock: Any) -> None:
    """A token made and used by processes whose own clocks are wrong lives as long as it was given."""
    frontier, _ = await office.ask()
    moved_clock(-24 * HOUR)
    link = await office.client().resume_token(frontier, expires_in=HOUR)
    receipt = await office.client().resolve_with_token(link, {frontier.entries[0].activity_id: "yes"})
    assert receipt.channel == "token"


async def test_a_token_of_a_question_that_is_over(office: Office) -> None:
    """Cancelled and expired are said as such, not as a fault of the token."""
    cancelled, _ = await office.ask()
    run_id = "overdue"
    overdue, _ = await office.ask(question(run_id, 1, expires_in=timedelta(milliseconds=1)), run_id=run_id)
    client = office.client()
    links = [await client.resume_token(each, expires_in=HOUR) for each in (cancelled, overdue)]
    await client.cancel(cancelled.run_id)
    with pytest.raises(RunNotSuspended):
        await client.resolve_with_token(links[0], {cancelled.entries[0].activity_id: "yes"})
    with pytest.raises(FrontierExpired):
        await client.resolve_with_token(links[1], {overdue.entries[0].activity_id: "yes"})


async def test_without_a_key_there_are_no_tokens(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no default secret; keys may come from the environment."""
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    frontier, _ = await office.ask()
    with pytest.raises(ConfigurationError, match=KEYS_VARIABLE):
        await office.client(signing_keys=None).resume_token(frontier, expires_in=HOUR)
    with pytest.raises(ConfigurationError):
        await office.client(signing_keys=None).resolve_with_token(token(), {})
    monkeypatch.setenv(KEYS_VARIABLE, f"new:{'2' * 32}, k1:{'1' * 32}")
    client = office.client(signing_keys=None)
    link = await client.resume_token(frontier, expires_in=HOUR)
    assert jwt.get_unverified_header(link)["kid"] == "new"
    old = await office.client().resume_token(frontier, expires_in=HOUR)
    assert (await client.resolve_with_token(old, {frontier.entries[0].activity_id: "yes"})).channel == "token"


@pytest.mark.parametrize("keys", [{}, {"k": "short"}, {"": "1" * 32}, {"a": "1" * 32, "b": "2" * 32}])
def test_keys_that_cannot_sign(keys: dict[str, str]) -> None:
    """No key, a short one, one without a name, two of which none is said to sign."""
    with pytest.raises(ConfigurationError):
        SigningKeys(keys)


@pytest.mark.parametrize("given", ["nonsense", "a:short", ":secret", "a"])
def test_keys_in_the_environment_that_cannot_be_read(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused, not skipped."""
    monkeypatch.setenv(KEYS_VARIABLE, given)
    with pytest.raises(ConfigurationError):
        SigningKeys.from_environment()


def test_keys_show_no_secret() -> None:
    """Neither in a log line nor in a traceback."""
    assert "1111" not in repr(KEYS)


def test_a_key_can_be_changed() -> None:
    """What the old key signed holds as long as it is known; what it signs afterwards does not hold where it was removed."""
    both = SigningKeys({"old": "a" * 32, "new": "b" * 32}, signs="new")
    old = SigningKeys({"old": "a" * 32})
    assert read_token(both, token(old)) == read_token(old, token(old))
    with pytest.raises(TokenInvalid):
        read_token(SigningKeys({"new": "b" * 32}), token(old))
    with pytest.raises(TokenInvalid):
        read_token(SigningKeys({"old": "c" * 32}), token(old))


@pytest.mark.parametrize(
    "forged",
    [
        "",
        "a.b.c",
        jwt.encode({"sub": "r"}, "1" * 32, "HS256", headers={"kid": "k1"}),
        jwt.encode({"sub": "r", "iss": "mongo_durable"}, None, "none", headers={"kid": "k1"}),
        jwt.encode({"sub": "r", "iss": "mongo_durable"}, "1" * 32, "HS256"),
        jwt.encode({"sub": "r", "iss": "x", "exp": 1, "iat": 1, "db": "d", "gen": 1, "dig": "0"}, "1" * 32, "HS256", headers={"kid": "k1"}),
        jwt.encode(
            {"sub": "r", "iss": "mongo_durable", "exp": 1, "iat": 1, "db": "d", "gen": "x", "dig": "0"}, "1" * 32, "HS256", headers={"kid": "k1"}
        ),
        jwt.encode({"sub": "r", "iss": "mongo_durable", "exp": 1}, "1" * 64, "HS512", headers={"kid": "k1"}),
    ],
)
def test_what_is_no_token_of_ours(forged: str) -> None:
    """No signature, another algorithm, another issuer, claims that are missing or of the wrong type."""
    with pytest.raises(TokenInvalid):
        read_token(KEYS, forged)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_no_change_of_a_token_is_accepted(data: st.DataObject) -> None:
    """Whatever letter is changed, left out or put in: it is no token of ours any more, or says exactly the same."""
    original = token(run_id="po-17", audience="ada")
    place = data.draw(st.integers(0, len(original) - 1))
    letter = data.draw(st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_."))
    before, after = original[:place], original[place:]
    changed = data.draw(st.sampled_from([before + letter + after[1:], before + after[1:], before + letter + after]))
    try:
        grant = read_token(KEYS, changed)
    except TokenInvalid:
        return
    # The last letter of a part holds bits that no byte needs: base64 may read two texts as the same bytes.
    assert grant == read_token(KEYS, original)


_names = st.text(min_size=1, max_size=20)


@given(_names, _names, st.integers(1, 10**6), st.one_of(st.none(), _names), st.integers(1, 10**7), st.integers(-(10**7), 10**7))
@settings(max_examples=150, deadline=None)
def test_a_grant_is_what_was_granted(database: str, run_id: str, generation: int, audience: str | None, lives_s: int, later_s: int) -> None:
    """It holds for its database, its audience and its time, and for nothing else."""
    link = token(database=database, run_id=run_id, generation=generation, audience=audience, expires_in=timedelta(seconds=lives_s))
    grant = read_token(KEYS, link)
    assert (grant.database, grant.run_id, grant.generation, grant.audience) == (database, run_id, generation, audience)
    uses = [(database, audience, NOW + timedelta(seconds=later_s)), (f"{database}x", audience, NOW), (database, f"{audience}x", NOW)]
    for where, who, when in uses:
        holds = where == database and when < NOW + timedelta(seconds=lives_s) and (audience is None or who == audience)
        if holds:
            check_grant(grant, database=where, audience=who, now=when)
        else:
            with pytest.raises(TokenError):
                check_grant(grant, database=where, audience=who, now=when)


def test_a_token_needs_a_time_to_live() -> None:
    """One that has expired when it is made is a fault of the code that makes it."""
    with pytest.raises(ConfigurationError):
        token(expires_in=timedelta())
