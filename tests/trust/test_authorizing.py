"""Who may answer what; what is refused is kept, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
from langgraph.types import Command
from pymongo import AsyncMongoClient

from mongo_durable import AnswerRequest, App, DurableClient
from mongo_durable.errors import (
    ConfigurationError,
    IncompleteResolution,
    InvalidAnswer,
    NotAuthorized,
    ResolutionConflict,
    StaleGeneration,
    UnknownActivity,
)
from mongo_durable.protocol.frontier import Audience
from tests.engine.workflows import State, one_node
from tests.trust.conftest import HOUR, Office, question


async def test_the_hook_is_asked_about_each_answer(office: Office) -> None:
    """It hears who wants to answer what with what, and by which way, before anything is stored."""
    heard: list[AnswerRequest] = []

    async def authorize(request: AnswerRequest) -> bool:
        heard.append(request)
        return True

    frontier, _ = await office.ask({"pay": 10}, {"pay": 20})
    first, second = (entry.activity_id for entry in frontier.entries)
    receipt = await office.client(authorize=authorize).resolve(frontier.run_id, {second: "no", first: "yes"}, resolved_by="ada", note="fine")
    assert (receipt.resolved_by, receipt.note, receipt.channel, receipt.answered_by) == ("ada", "fine", "client", None)
    assert receipt.resolved_at is not None
    assert [(each.activity_id, each.payload, each.answer) for each in heard] == [(first, {"pay": 10}, "yes"), (second, {"pay": 20}, "no")]
    one = heard[0]
    assert (one.run_id, one.workflow, one.generation, one.digest) == (frontier.run_id, "procurement", 1, frontier.digest)
    assert (one.name, one.kind, one.caller, one.channel, one.audiences) == ("approval", "INTERRUPT", "ada", "client", ())


@pytest.mark.parametrize("said", [False, None, 1, "yes"])
async def test_only_true_allows(office: Office, said: Any) -> None:
    """A hook that forgets to return, or returns something like true, refuses; the refusal is kept, and nothing else is."""
    frontier, _ = await office.ask()
    client = office.client(authorize=lambda request: said)
    before = await client.history(frontier.run_id)
    with pytest.raises(NotAuthorized) as refused:
        await client.resolve(frontier.run_id, {frontier.entries[0].activity_id: "yes"}, resolved_by="eve")
    assert refused.value.run_id == frontier.run_id
    assert (await office.status(frontier.run_id), await client.history(frontier.run_id)) == ("suspended", before)
    (kept,) = await client.refusals(frontier.run_id)
    assert (kept.code, kept.by, kept.channel, kept.generation) == ("not_authorized", "eve", "client", 1)
    assert list(kept.activity_ids) == [frontier.entries[0].activity_id]


async def test_the_hook_can_say_why(office: Office) -> None:
    """Its own NotAuthorized reaches the caller with its reason, and is kept."""

    def authorize(request: AnswerRequest) -> bool:
        raise NotAuthorized("only managers approve more than 1,000")

    frontier, _ = await office.ask()
    client = office.client(authorize=authorize)
    with pytest.raises(NotAuthorized, match="only managers") as refused:
        await client.resolve(frontier.run_id, {frontier.entries[0].activity_id: "yes"})
    assert refused.value.run_id == frontier.run_id
    assert [each.message for each in await client.refusals(frontier.run_id)] == ["only managers approve more than 1,000"]


async def test_a_hook_that_fails_refuses(office: Office) -> None:
    """An error inside the hook is the caller's to see, and no answer is stored."""

    def authorize(request: AnswerRequest) -> bool:
        raise LookupError("the directory is down")

    frontier, _ = await office.ask()
    with pytest.raises(LookupError):
        await office.client(authorize=authorize).resolve(frontier.run_id, {frontier.entries[0].activity_id: "yes"})
    assert await office.status(frontier.run_id) == "suspended"


async def test_every_refusal_is_an_audit_event(office: Office) -> None:
    """Whatever the reason, one event each: who, what, when by the server's clock. What was answered is not in it."""
    frontier, _ = await office.ask(question("audited", 1, schema={"type": "boolean"}), run_id="audited")
    (entry,) = frontier.entries
    client = office.client()
    cases: list[tuple[type[Exception], dict[str, Any], dict[str, Any]]] = [
        (StaleGeneration, {entry.activity_id: True}, {"generation": 7}),
        (StaleGeneration, {entry.activity_id: True}, {"digest": "0" * 32}),
        (IncompleteResolution, {}, {}),
        (UnknownActivity, {"act_other": True, "not an id: a secret": True}, {}),
        (InvalidAnswer, {entry.activity_id: "a secret"}, {}),
    ]
    for kind, answers, pins in cases:
        with pytest.raises(kind):
            await client.resolve("audited", answers, resolved_by="eve", **pins)
    await client.resolve("audited", {entry.activity_id: True}, resolved_by="ada")
    with pytest.raises(ResolutionConflict):
        await client.resolve("audited", {entry.activity_id: False}, resolved_by="eve")
    kept = await client.refusals("audited")
    codes = ["stale_generation", "stale_generation", "incomplete_resolution", "unknown_activity", "invalid_answer", "resolution_conflict"]
    assert [each.code for each in kept] == codes
    assert {each.by for each in kept} == {"eve"}
    assert [each.at for each in kept] == sorted(each.at for each in kept)
    assert "secret" not in str(await office.connection.audit.find({"run_id": "audited"}).to_list(None))


async def test_who_answers_is_a_text(office: Office) -> None:
    """A name that is no text is refused before anything is read."""
    frontier, _ = await office.ask()
    with pytest.raises(ConfigurationError, match="a text"):
        await office.client().resolve(frontier.run_id, {frontier.entries[0].activity_id: "yes"}, resolved_by=7)  # type: ignore[arg-type]


async def test_the_same_answers_to_an_earlier_generation_give_their_receipt(office: Office) -> None:
    """A repeated call finds its receipt also when the run has gone on to other questions; other answers are told that it has."""
    frontier, _ = await office.ask()
    client, answers = office.client(), {frontier.entries[0].activity_id: "yes"}
    receipt = await client.resolve(frontier.run_id, answers, generation=1, digest=frontier.digest)
    await office.ask_again(frontier.run_id, "and this?")
    assert await client.resolve(frontier.run_id, answers, generation=1, digest=frontier.digest) == receipt
    with pytest.raises(StaleGeneration):
        await client.resolve(frontier.run_id, {frontier.entries[0].activity_id: "no"}, generation=1)


async def test_a_second_audience_is_asked_after_a_time(office: Office, moved_clock: Any) -> None:
    """Until then the list of the second is empty, and the hook hears of the first alone; then both are asked."""
    run_id = "escalates"
    asked = Audience(first="managers", then="directors", after=HOUR)
    frontier, _ = await office.ask(question(run_id, 1, audience=asked), question(run_id, 2, audience=Audience(first="clerks")), run_id=run_id)
    first = frontier.entries[0]
    assert (first.audience, first.escalates_to) == ("managers", "directors")
    assert frontier.opened_at is not None
    assert first.escalates_at == frontier.opened_at + HOUR
    heard: list[tuple[str, ...]] = []

    def authorize(request: AnswerRequest) -> bool:
        heard.append(request.audiences)
        return request.caller in request.audiences

    client = office.client(authorize=authorize)

    async def asks(audience: str) -> bool:
        return run_id in [each.run_id for each in await client.open_frontiers(audience=audience)]

    assert [await asks(each) for each in ("managers", "clerks", "directors")] == [True, True, False]
    with pytest.raises(NotAuthorized):
        await client.draft_answer(run_id, {first.activity_id: "yes"}, answered_by="directors")
    moved_clock(2 * HOUR)
    assert [await asks(each) for each in ("managers", "clerks", "directors")] == [True, True, True]
    await client.draft_answer(run_id, {first.activity_id: "yes"}, answered_by="directors")
    assert heard == [("managers",), ("managers", "directors")]


async def test_an_app_asks_its_hook_as_well(mongo_uri: str, database: str) -> None:
    """Answers by `Command(resume=…)` pass it; who answers is part of the configuration. An escalation without its parts is refused in the graph."""
    app = App("asks", uri=mongo_uri, database=database, authorize=lambda request: request.caller == "ada")

    async def node(state: State) -> State:
        with pytest.raises(ConfigurationError, match="escalation"):
            app.interrupt("approve", 1, escalate_to="directors", escalate_in=HOUR)
        return {"value": app.interrupt("approve", 1, audience="managers", escalate_to="directors", escalate_in=HOUR)}

    one_node(app, node)
    config: Any = {"configurable": {"thread_id": "t"}}
    try:
        await app.ainvoke({"value": None}, config, run_id="r")
        with pytest.raises(NotAuthorized):
            await app.ainvoke(Command(resume="yes"), config)
        named: Any = {"configurable": {"thread_id": "t", "resolved_by": "ada"}}
        assert await app.ainvoke(Command(resume="yes"), named) == {"value": "yes"}
    finally:
        await app.aclose()
    async with AsyncMongoClient(mongo_uri) as driver, DurableClient(client=driver, database=database) as client:
        assert [(each.code, each.channel) for each in await client.refusals("r")] == [("not_authorized", "app")]
        (resolution,) = await driver[database]["resolutions"].find().to_list(None)
        assert (resolution["resolved_by"], resolution["channel"]) == ("ada", "app")
