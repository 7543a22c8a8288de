"""Several people answer one frontier: their answers wait for one another, and go in together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mongo_durable.errors import (
    ConfigurationError,
    DraftConflict,
    FrontierExpired,
    InvalidAnswer,
    NotAuthorized,
    ResolutionConflict,
    RunNotSuspended,
    StaleGeneration,
    UnknownActivity,
)
from mongo_durable.protocol.events import EventType
from mongo_durable.store import frontiers
from mongo_durable.store.payloads import INLINE_LIMIT
from tests.trust.conftest import Office, question


async def test_answers_go_in_together(office: Office) -> None:
    """Nothing reaches the run until all are there; then all of them do, in one resolution that says who gave which."""
    frontier, _ = await office.ask("a?", "b?", "c?")
    a, b, c = (entry.activity_id for entry in frontier.entries)
    client, run_id = office.client(), frontier.run_id
    assert await client.draft(run_id) is None
    before = await client.history(run_id)
    draft = await client.draft_answer(run_id, {b: "B"}, answered_by="bob", note="mine")
    assert (draft.missing, draft.resolution) == ((a, c), None)
    draft = await client.draft_answer(run_id, {c: "C", a: "A"}, answered_by="ada", digest=frontier.digest, generation=1)
    assert await client.draft(run_id) == draft
    assert draft.missing == ()
    assert {each: (answer.value, answer.by, answer.note) for each, answer in draft.answers.items()} == {
        a: ("A", "ada", None),
        b: ("B", "bob", "mine"),
        c: ("C", "ada", None),
    }
    receipt = draft.resolution
    assert receipt is not None
    assert (receipt.resolved_by, receipt.channel) == ("ada, bob", "draft")
    assert receipt.answered_by is not None
    assert {each: given["by"] for each, given in receipt.answered_by.items()} == {a: "ada", b: "bob", c: "ada"}
    assert receipt.answered_by[b]["at"] == draft.answers[b].at
    *earlier, event = await client.history(run_id)
    assert earlier == before
    assert (event.type, event.data["answers"], event.data["channel"]) == (EventType.ACTIVITIES_RESOLVED, {a: "A", b: "B", c: "C"}, "draft")
    assert await office.status(run_id) == "ready"
    assert await client.resolve(run_id, {a: "A", b: "B", c: "C"}) == receipt


async def test_an_answer_can_be_changed_by_who_gave_it(office: Office) -> None:
    """Nobody else can change it, the same answer of somebody else changes nothing, and who gave it can take it back."""
    frontier, _ = await office.ask("a?", "b?")
    a, b = (entry.activity_id for entry in frontier.entries)
    client, run_id = office.client(), frontier.run_id
    await client.draft_answer(run_id, {a: 1}, answered_by="ada")
    with pytest.raises(DraftConflict) as refused:
        await client.draft_answer(run_id, {a: True}, answered_by="bob")  # 1 and true are not the same answer
    assert (refused.value.activity_id, refused.value.answered_by) == (a, "ada")
    assert (await client.draft_answer(run_id, {a: 1}, answered_by="bob")).answers[a].by == "ada"
    assert (await client.draft_answer(run_id, {a: 2}, answered_by="ada")).answers[a].value == 2
    assert not await client.withdraw_answer(run_id, [a], answered_by="bob")
    assert not await client.withdraw_answer(run_id, [a, b], answered_by="ada")
    assert await client.withdraw_answer(run_id, [a], answered_by="ada")
    draft = await client.draft_answer(run_id, {a: 3, b: 4}, answered_by="bob")
    assert draft.resolution is not None
    assert not await client.withdraw_answer(run_id, [a], answered_by="bob")
    assert [each.code for each in await client.refusals(run_id)] == ["draft_conflict"]


async def test_a_draft_is_checked_like_a_resolution(office: Office) -> None:
    """Schema, permission, pins and ids are looked at before anything is kept; who answers has to be said."""
    run_id = "strict"
    frontier, _ = await office.ask(question(run_id, 1, schema={"type": "boolean"}), question(run_id, 2), run_id=run_id)
    first = frontier.entries[0].activity_id
    client = office.client(authorize=lambda request: request.caller != "eve")
    for kind, answers, options in (
        (InvalidAnswer, {first: "yes"}, {}),
        (NotAuthorized, {first: True}, {"answered_by": "eve"}),
        (StaleGeneration, {first: True}, {"generation": 2}),
        (StaleGeneration, {first: True}, {"digest": "0" * 32}),
        (UnknownActivity, {first: True, "act_other": 1}, {}),
    ):
        with pytest.raises(kind):
            await client.draft_answer(run_id, answers, **{"answered_by": "ada", **options})  # type: ignore[arg-type]
    for by, answers in (("", {first: True}), ("ada", {})):
        with pytest.raises(ConfigurationError):
            await client.draft_answer(run_id, answers, answered_by=by)
    assert await client.draft(run_id) is None


async def test_a_draft_of_a_frontier_that_is_over(office: Office) -> None:
    """Answered otherwise, expired, cancelled: who drafts is told which. An answer that stands in the draft that went in is none too late."""
    client = office.client()
    answered, _ = await office.ask("a?", "b?")
    a, b = (entry.activity_id for entry in answered.entries)
    await client.draft_answer(answered.run_id, {a: 1}, answered_by="ada")
    await client.resolve(answered.run_id, {a: 2, b: 2})
    for answers in ({a: 1}, {b: 2}):
        with pytest.raises(ResolutionConflict):
            await client.draft_answer(answered.run_id, answers, answered_by="ada")
    whole, _ = await office.ask("a?", "b?")
    a, b = (entry.activity_id for entry in whole.entries)
    await client.draft_answer(whole.run_id, {a: 1}, answered_by="ada")
    await client.draft_answer(whole.run_id, {b: 2}, answered_by="bob")
    late = await client.draft_answer(whole.run_id, {a: 1}, answered_by="ada")
    assert late.resolution is not None
    with pytest.raises(DraftConflict):
        await client.draft_answer(whole.run_id, {a: 3}, answered_by="bob")
    cancelled, _ = await office.ask("a?", "b?")
    await client.cancel(cancelled.run_id)
    with pytest.raises(RunNotSuspended):
        await client.draft_answer(cancelled.run_id, {cancelled.entries[0].activity_id: 1}, answered_by="ada")
    expired, _ = await office.ask("a?", "b?")
    ids = [entry.activity_id for entry in expired.entries]
    await client.draft_answer(expired.run_id, {ids[0]: 1}, answered_by="ada")
    past = {"$set": {"expires_at": expired.opened_at}}
    await office.connection.frontiers.update_one({"_id": f"{expired.run_id}/1"}, past)
    with pytest.raises(FrontierExpired):
        await client.draft_answer(expired.run_id, {ids[1]: 1}, answered_by="bob")
    stored = await frontiers.current(office.connection, expired.run_id)
    assert await frontiers.expire(office.connection, stored, {}, ids)
    assert await office.status(expired.run_id) == "ready"
    draft = await client.draft(expired.run_id)
    assert draft is not None
    assert draft.resolution is None


@pytest.mark.parametrize("value", ["x" * (INLINE_LIMIT + 1), {"a.b": {"$x": 2**70}}, None, {}, "$$NOW", {"$literal": 1}])
async def test_any_value_can_be_drafted(office: Office, value: Any) -> None:
    """Large ones, those that BSON cannot hold, and those that look like an expression come back exactly."""
    frontier, _ = await office.ask("a?", "b?")
    a, b = (entry.activity_id for entry in frontier.entries)
    client = office.client()
    assert (await client.draft_answer(frontier.run_id, {a: value}, answered_by="ada")).answers[a].value == value
    draft = await client.draft_answer(frontier.run_id, {b: value}, answered_by="bob")
    assert draft.resolution is not None
    assert await client.resolve(frontier.run_id, {a: value, b: value}) == draft.resolution


_steps = st.lists(st.tuples(st.sampled_from(["ada", "bob", "cleo"]), st.sampled_from([0, 1, 2]), st.sampled_from([1, 2, "withdraw"])), max_size=12)


@given(_steps)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order_of_answers_is_like_one_at_a_time(database_of_all: str, mongo_uri: str, steps: list[tuple[str, int, Any]]) -> None:
    """Whatever people draft, change and withdraw: the draft is what a dictionary would hold, and goes in exactly when it is whole."""
    asyncio.run(_follow(mongo_uri, database_of_all, steps))


async def _follow(uri: str, database: str, steps: list[tuple[str, int, Any]]) -> None:
    from pymongo import AsyncMongoClient

    from mongo_durable.store.connection import Connection

    async with AsyncMongoClient(uri) as driver:
        office = Office(uri, database, Connection(driver, database, is_owned=False))
        frontier, _ = await office.ask("a?", "b?", "c?")
        client, ids = office.client(), [entry.activity_id for entry in frontier.entries]
        model: dict[str, tuple[str, Any]] = {}
        is_in = False
        for who, index, value in steps:
            asked = ids[index]
            mine = asked in model and model[asked][0] == who
            if value == "withdraw":
                assert await client.withdraw_answer(frontier.run_id, [asked], answered_by=who) == (mine and not is_in)
                if mine and not is_in:
                    del model[asked]
                continue
            same = asked in model and model[asked][1] == value
            if same or (not is_in and (mine or asked not in model)):
                draft = await client.draft_answer(frontier.run_id, {asked: value}, answered_by=who)
                model.setdefault(asked, (who, value))
                if mine:
                    model[asked] = (who, value)
                is_in = len(model) == len(ids)
                assert (draft.resolution is not None) == is_in
            else:
                with pytest.raises((DraftConflict, ResolutionConflict)):
                    await client.draft_answer(frontier.run_id, {asked: value}, answered_by=who)
            found = await client.draft(frontier.run_id)
            assert found is not None
            assert {each: (answer.by, answer.value) for each, answer in found.answers.items()} == model
        assert await office.status(frontier.run_id) == ("ready" if is_in else "suspended")
        await office.connection.aclose()
