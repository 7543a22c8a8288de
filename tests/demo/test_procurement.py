"""The procurement workflow: every way through its graph, each call by a process of its own; and `mongo-durable demo --procurement`."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pymongo
import pytest
from langgraph.types import Command
from pymongo import AsyncMongoClient
from typer.testing import CliRunner

from mongo_durable import AnswerRequest, DurableClient, proposal_digest
from mongo_durable.cli.commands import app as commands
from mongo_durable.demo.procurement import ACCEPTED_UP_TO, MANAGERS_UP_TO, NEVER_ABOVE, Request, Terms, authorize, build_app
from mongo_durable.demo.procurement_story import CASES, CHAIRS, COFFEE, DESKS, LAMP, PLANTS, RACK, Account, Case, Course, faults
from mongo_durable.demo.supplier import Order, Supplier
from mongo_durable.demo.telling import Process
from mongo_durable.errors import FrontierExpired, InvalidAnswer, NotAuthorized
from mongo_durable.protocol.events import ActivityKind, Event, EventType
from mongo_durable.snapshots import RunSnapshot
from mongo_durable.store.audit import Refusal
from tests.support.databases import shared_by
from tests.support.demos import demo

YES = {"approved": True}
NO = {"approved": False, "reason": "too dear"}
SOON = timedelta(milliseconds=100)


@pytest.fixture(scope="module")
def shared_database(mongo_uri: str) -> Iterator[str]:
    """One database for all tests of this file, which each have purchases of their own."""
    with shared_by("procurement", mongo_uri) as name:
        yield name


class Purchasing:
    """One purchase, executed by an app that is made anew for each call, as by another process.

    Attributes:
        id: Of the request, the run and the thread.
        supplier: What the outside world says.
        terms: How long people have.
    """

    def __init__(self, supplier: Supplier, client: DurableClient) -> None:
        self.id = f"po-{uuid.uuid4().hex[:8]}"
        self.supplier = supplier
        self.client = client
        self.terms = Terms()

    def costs(self, amount: int) -> None:
        """The supplier's price, from now on."""
        self.supplier.set_price("desk", amount)

    async def request(self, by: str = "eve") -> Any:
        """Execute up to the first question, or to the end."""
        request: Request = {"request_id": self.id, "item": "desk", "requested_by": by}
        return await self.call({"request": request}, run_id=self.id)

    async def call(self, given: Any = None, *, by: str | None = None, **options: Any) -> Any:
        """Go on, or answer in LangGraph's own way."""
        app = build_app(self.supplier, self.terms)
        configurable = {"thread_id": self.id, **({"resolved_by": by} if by is not None else {})}
        try:
            return await app.ainvoke(given, {"configurable": configurable}, **options)
        finally:
            await app.aclose()

    async def asked(self) -> dict[str | None, str]:
        """The questions that wait, by whom they are asked of."""
        frontier = (await self.client.get_run(self.id)).frontier
        return {each.audience: each.activity_id for each in frontier.entries} if frontier is not None else {}

    async def answer(self, answer: Any, *, by: str) -> Any:
        """One person answers the one question, and the run goes on."""
        (asked,) = (await self.asked()).values()
        await self.client.resolve(self.id, {asked: answer}, resolved_by=by)
        return await self.call()

    def sold(self) -> list[tuple[int, int]]:
        """What the supplier has sold for this request: amount, and how often it was asked for."""
        return [(each.amount, each.calls) for each in self.supplier.orders() if each.request_id == self.id]


@pytest.fixture
async def purchase(mongo_uri: str, shared_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Purchasing]:
    """A purchase of this test's own."""
    monkeypatch.setenv("MONGO_DURABLE_URI", mongo_uri)
    monkeypatch.setenv("MONGO_DURABLE_DATABASE", shared_database)
    async with AsyncMongoClient(mongo_uri) as driver, DurableClient(client=driver, authorize=authorize) as client:
        yield Purchasing(Supplier(tmp_path / "supplier"), client)


@pytest.mark.parametrize(
    ("amount", "outcome", "asked"),
    [
        (ACCEPTED_UP_TO, "accepted", []),
        (ACCEPTED_UP_TO + 1, "review", ["managers"]),
        (MANAGERS_UP_TO, "review", ["managers"]),
        (MANAGERS_UP_TO + 1, "review", ["directors", "finance"]),
        (NEVER_ABOVE, "review", ["directors", "finance"]),
        (NEVER_ABOVE + 1, "rejected", []),
    ],
)
async def test_policy_has_three_outcomes(purchase: Purchasing, amount: int, outcome: str, asked: list[str]) -> None:
    """Accepted is ordered, rejected is at its end, and a review asks those whose decision it is, all at once."""
    purchase.costs(amount)
    out = await purchase.request()
    assert out["outcome"] == outcome
    assert list(await purchase.asked()) == asked
    assert purchase.sold() == ([(amount, 1)] if outcome == "accepted" else [])
    if not asked:
        assert (out["order"] is not None) == (outcome == "accepted")
        assert "__interrupt__" not in out


@pytest.mark.parametrize("answer", [YES, NO], ids=["approved", "declined"])
async def test_a_person_decides(purchase: Purchasing, answer: Any) -> None:
    """Approved is ordered, once; declined is not. The decision is kept with the digest of what was shown, and with its reason."""
    purchase.costs(1000)
    await purchase.request()
    out = await purchase.answer(answer, by="ada")
    is_approved = answer["approved"]
    reasons = [] if is_approved else ["too dear"]
    assert out["approval"] == {"approved": is_approved, "proposal_digest": proposal_digest(out["proposal"]), "reasons": reasons}
    assert (out["order"] is not None) == is_approved
    assert purchase.sold() == ([(1000, 1)] if is_approved else [])
    assert out["trail"][:3] == ["desk: 1000 EUR", "policy: review", "approved" if is_approved else "declined: too dear"]


@pytest.mark.parametrize(
    ("amount", "requested_by", "person", "why"),
    [
        (1000, "eve", "eve", "not of the managers"),
        (1000, "eve", "dora", "not of the managers"),
        (1000, "max", "max", "has requested this"),
    ],
)
async def test_who_may_not_decide_is_refused(purchase: Purchasing, amount: int, requested_by: str, person: str, why: str) -> None:
    """By the client and by LangGraph's own way alike, and the refusal is recorded; the run waits as before, and the right one can decide."""
    purchase.costs(amount)
    await purchase.request(by=requested_by)
    before = await purchase.client.history(purchase.id)
    with pytest.raises(NotAuthorized, match=why):
        await purchase.answer(YES, by=person)
    with pytest.raises(NotAuthorized, match=why):
        await purchase.call(Command(resume=YES), by=person)
    assert await purchase.client.history(purchase.id) == before
    refused = await purchase.client.refusals(purchase.id)
    assert [(each.code, each.by, each.channel) for each in refused] == [("not_authorized", person, "client"), ("not_authorized", person, "app")]
    assert purchase.sold() == []
    await purchase.call(Command(resume=YES), by="ada")
    assert purchase.sold() == [(amount, 1)]


def _answer_request(caller: str | None, amount: int, *audiences: str, name: str = "purchase_approval") -> AnswerRequest:
    proposal = {"request_id": "po-1", "item": "desk", "requested_by": "max", "amount": amount}
    return AnswerRequest(
        run_id="po-1",
        workflow="procurement",
        thread_id="po-1",
        generation=1,
        digest="d",
        activity_id="act_1",
        name=name,
        kind="INTERRUPT",
        payload=proposal,
        answer=YES,
        caller=caller,
        channel="client",
        audiences=audiences,
    )


@pytest.mark.parametrize(
    ("request_", "is_allowed"),
    [
        (_answer_request("ada", MANAGERS_UP_TO, "managers"), True),
        (_answer_request("ada", MANAGERS_UP_TO + 1, "managers"), False),
        (_answer_request("dora", 1000, "managers", "directors"), True),
        (_answer_request("dora", 1000, "managers"), False),
        (_answer_request("dora", 20_000, "directors"), True),
        (_answer_request("finn", 20_000, "directors"), False),
        (_answer_request("finn", 20_000, "finance"), True),
        (_answer_request("max", 1000, "managers"), False),
        (_answer_request(None, 1000, "managers"), False),
        (_answer_request("nobody", 1000), False),
        (_answer_request("ada", 1000, "managers", name="another question"), False),
    ],
)
def test_who_may_decide_what(request_: AnswerRequest, is_allowed: bool) -> None:
    """By office, amount and time, and never one's own request; where the code says nobody in particular, nobody may."""
    try:
        assert authorize(request_) is is_allowed
    except NotAuthorized:
        assert not is_allowed


async def test_an_answer_has_a_form(purchase: Purchasing) -> None:
    """What is no decision is refused before it is stored."""
    purchase.costs(1000)
    await purchase.request()
    for answer in ({"approved": "certainly"}, {}, "yes", {**YES, "amount": 1}):
        with pytest.raises(InvalidAnswer):
            await purchase.answer(answer, by="ada")
    assert list(await purchase.asked()) == ["managers"]


@pytest.mark.parametrize(
    ("new_price", "asked"),
    [(1200, ["managers"]), (8000, ["directors", "finance"]), (400, []), (60_000, [])],
    ids=["asked", "others", "accepted", "rejected"],
)
async def test_what_was_approved_is_what_is_ordered(purchase: Purchasing, new_price: int, asked: list[str]) -> None:
    """A price that has changed since is another proposal: execution refuses it, and policy and people decide anew about what it costs now."""
    purchase.costs(1000)
    await purchase.request()
    (question,) = (await purchase.asked()).values()
    await purchase.client.resolve(purchase.id, {question: YES}, resolved_by="ada")
    purchase.costs(new_price)
    out = await purchase.call()
    failed = [each for each in await purchase.client.history(purchase.id) if each.type is EventType.ACTIVITY_FAILED]
    assert [(each.error or {})["type"] for each in failed] == ["mongo_durable.errors.ProposalChanged"]
    assert list(await purchase.asked()) == asked
    assert out["trail"][3] == f"now {new_price} EUR: not what was approved"
    assert purchase.sold() == ([(400, 1)] if new_price == 400 else [])
    if asked == ["managers"]:
        out = await purchase.answer(YES, by="ada")
        assert purchase.sold() == [(1200, 1)]
        assert out["approval"]["proposal_digest"] == proposal_digest(out["proposal"])


async def test_an_order_whose_record_was_lost_is_one_order(purchase: Purchasing, tmp_path: Path) -> None:
    """The caller ends between order and record; the price has risen when another one goes on. It asks again under the same request id, for what was
    approved."""
    reached = asyncio.Event()

    async def hang(request_id: str) -> None:
        reached.set()
        await asyncio.Event().wait()

    purchase.costs(1000)
    await purchase.request()
    (question,) = (await purchase.asked()).values()
    await purchase.client.resolve(purchase.id, {question: YES}, resolved_by="ada")
    whole, purchase.supplier = purchase.supplier, Supplier(tmp_path / "supplier", hang)
    dying = asyncio.create_task(purchase.call())
    await reached.wait()
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)
    assert purchase.sold() == [(1000, 1)]
    purchase.supplier = whole
    purchase.costs(3000)
    out = await purchase.call()
    assert purchase.sold() == [(1000, 2)]
    assert out["trail"] == ["desk: 1000 EUR", "policy: review", "approved", f"ordered: {out['order']}"]


async def test_two_offices_decide_together(purchase: Purchasing) -> None:
    """Nothing reaches the run before both have answered; one refusal declines it."""
    purchase.costs(20_000)
    await purchase.request()
    asked = await purchase.asked()
    with pytest.raises(NotAuthorized):
        await purchase.client.draft_answer(purchase.id, {asked["finance"]: YES}, answered_by="dora")
    await purchase.client.draft_answer(purchase.id, {asked["directors"]: YES}, answered_by="dora")
    assert await purchase.asked() == asked
    draft = await purchase.client.draft_answer(purchase.id, {asked["finance"]: NO}, answered_by="finn")
    assert draft.resolution is not None
    out = await purchase.call()
    assert (out["approval"]["approved"], out["approval"]["reasons"]) == (False, ["too dear"])
    assert purchase.sold() == []


async def test_nobody_decides(purchase: Purchasing) -> None:
    """After its time a purchase is declined by its declared default, once; an answer that comes later is told so."""
    purchase.terms = Terms(decide_in=SOON)
    purchase.costs(1000)
    await purchase.request()
    (question,) = (await purchase.asked()).values()
    await asyncio.sleep(SOON.total_seconds())  # by the server's clock there is no event to wait for
    out = await purchase.call()
    assert out["trail"][-1] == "declined: nobody decided in time"
    with pytest.raises(FrontierExpired):
        await purchase.client.resolve(purchase.id, {question: YES}, resolved_by="ada", generation=1)
    assert purchase.sold() == []


async def test_a_request_is_one_run(purchase: Purchasing) -> None:
    """Sent twice it is the same purchase, with one order."""
    purchase.costs(100)
    first = await purchase.request()
    assert await purchase.request() == first
    assert purchase.sold() == [(100, 1)]


async def test_the_next_purchase_of_a_thread_takes_nothing_over(purchase: Purchasing) -> None:
    """Fields are replaced, so an approval of an earlier purchase is gone; the trail is added to, so it tells both."""
    purchase.costs(100)
    first = await purchase.request()
    purchase.costs(60_000)
    request: Request = {"request_id": f"{purchase.id}-b", "item": "desk", "requested_by": "eve"}
    second = await purchase.call({"request": request}, run_id=f"{purchase.id}-b")
    assert first["approval"]["approved"] is True
    assert (second["outcome"], second["approval"], second["order"]) == ("rejected", None, None)
    assert second["trail"] == [*first["trail"], "desk: 60000 EUR", "policy: rejected"]


async def test_the_supplier_knows_a_request(tmp_path: Path) -> None:
    """The same order again is the same order; another one under the same request is refused."""
    supplier = Supplier(tmp_path / "supplier")
    assert await supplier.order("po-1", "desk", 10) == await supplier.order("po-1", "desk", 10)
    with pytest.raises(ValueError, match="before"):
        await supplier.order("po-1", "desk", 11)
    assert [(each.amount, each.calls) for each in supplier.orders()] == [(10, 3)]
    with pytest.raises(LookupError):
        await supplier.quote("a yacht")


# -- the demo -------------------------------------------------------------------------------------------------------------------------------------


def test_the_procurement_demo_proves_its_claims(mongo_uri: str) -> None:
    """Seven purchases, two killed workers, five orders, and a check of the database and the supplier that finds nothing wrong."""
    ended = demo(mongo_uri, "--procurement")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    printed = ended.stdout
    assert "proved: killed twice, one order a request" in printed
    assert "eve: not_authorized: eve is not of the managers" in printed
    assert re.search(r"^po-desks +.* ada \(token\) +3 +2 × +4800 EUR", printed, re.MULTILINE)
    assert re.search(r"^po-chairs +.* ada \(client\), ada \(client\) +3 +1 × +3400 EUR", printed, re.MULTILINE)
    assert re.search(r"^po-rack +.* dora, finn \(draft\) +2 +1 × +12000 EUR", printed, re.MULTILINE)
    assert re.search(r"^po-plants +.*declined: nobody decided in time +expired +2 +0 × +none", printed, re.MULTILINE)
    named = re.search(r"^in database (\S+)$", printed, re.MULTILINE)
    assert named is not None
    with pymongo.MongoClient(mongo_uri) as client:
        assert named[1] not in client.list_database_names(), "its database is dropped"


@pytest.mark.parametrize("other", ["--deep", "--model=openai:gpt-5"])
def test_the_procurement_demo_goes_with_no_other(other: str) -> None:
    """It is a story of its own, without a model: wrong usage, before anything starts."""
    ended = CliRunner().invoke(commands, ["demo", "--procurement", other])
    assert ended.exit_code == 2
    assert "--procurement" in ended.output


def _event(request_id: str, seq: int, event_type: EventType, fence: int, **fields: Any) -> Event:
    return Event(run_id=request_id, seq=seq, fence=fence, type=event_type, **fields)


def _course(request_id: str, case: Case) -> Course:
    """The course of a purchase as it should be, as far as the check looks at it."""
    events: list[Event] = []

    def add(event_type: EventType, fence: int, **fields: Any) -> None:
        events.append(_event(request_id, len(events) + 1, event_type, fence, **fields))

    def order(fence: int, key: str, end: EventType | None, **fields: Any) -> None:
        add(EventType.ACTIVITY_STARTED, fence, activity_id=key, name="place_order", kind=ActivityKind.ACTIVITY)
        if end is not None:
            add(end, fence, activity_id=key, name="place_order", **fields)

    add(EventType.ATTEMPT_STARTED, 1, data={"owner": "host-1-x"})
    add(EventType.ACTIVITY_STARTED, 1, activity_id="quote", name="quote", kind=ActivityKind.ACTIVITY)
    for fence, (way, who) in enumerate(case.answers, 1):
        add(EventType.ACTIVITIES_SUSPENDED, fence, data={"generation": fence, "entries": []})
        closed = EventType.FRONTIER_EXPIRED if way == "expired" else EventType.ACTIVITIES_RESOLVED
        add(closed, fence, data={"generation": fence, "answers": {}, "channel": way, "resolved_by": who})
        add(EventType.ATTEMPT_STARTED, fence + 1, data={"owner": f"host-{fence + 1}-x"})
        if request_id == CHAIRS and fence == 1:
            order(fence + 1, "first", EventType.ACTIVITY_FAILED, error={"type": "mongo_durable.errors.ProposalChanged", "message": "changed"})
    if case.ordered_at is not None:
        last = len(case.answers) + 1
        if case.calls == 2:
            order(last, "order", None)
            last += 1
            add(EventType.ATTEMPT_STARTED, last, data={"owner": f"host-{last}-x"})
        order(last, "order", EventType.ACTIVITY_COMPLETED)
        add(EventType.RUN_COMPLETED, last)
    snapshot = RunSnapshot(
        run_id=request_id,
        workflow=case.workflow,
        version="1",
        thread_id=request_id,
        status="completed",
        generation=len(case.answers),
        attempt=1,
        output={"outcome": case.outcome, "order": "SO" if case.ordered_at is not None else None, "trail": []},
        error=None,
        frontier=None,
        submitted_at=None,
        ended_at=None,
    )
    return Course(snapshot=snapshot, history=events, refusals=[_refusal(request_id, each) for each in case.refused])


def _refusal(request_id: str, by: str) -> Refusal:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    return Refusal(run_id=request_id, generation=1, code="not_authorized", by=by, channel="client", activity_ids=(), message="no", at=at)


def _account() -> Account:
    return Account(
        courses={request_id: _course(request_id, case) for request_id, case in CASES.items()},
        orders=[
            Order(request_id=request_id, item=case.item, amount=case.ordered_at, calls=case.calls)
            for request_id, case in CASES.items()
            if case.ordered_at is not None
        ],
        workers=[Process(name=name, pid=pid, exit_code=code) for name, pid, code in (("A", 1, -9), ("B", 2, -9), ("C", 3, 0))],
    )


def test_the_procurement_story_as_it_should_be_has_no_fault() -> None:
    """What the demo claims is accepted when it is so."""
    assert faults(_account()) == []


def _changed(account: Account, request_id: str, **changes: Any) -> Account:
    return replace(account, courses={**account.courses, request_id: replace(account.courses[request_id], **changes)})


def _without(history: Sequence[Event], event_type: EventType) -> list[Event]:
    return [each for each in history if each.type is not event_type]


_FALSE: dict[str, Callable[[Account], Account]] = {
    "a second order": lambda it: replace(it, orders=[*it.orders, it.orders[0]]),
    "an order of what was declined": lambda it: replace(it, orders=[*it.orders, Order(request_id=PLANTS, item="plants", amount=700, calls=1)]),
    "an order at the old price": lambda it: replace(
        it, orders=[replace(each, amount=3100) if each.request_id == CHAIRS else each for each in it.orders]
    ),
    "a missing order": lambda it: replace(it, orders=it.orders[1:]),
    "an order that was asked for once more": lambda it: replace(it, orders=[replace(it.orders[0], calls=2), *it.orders[1:]]),
    "a worker that was not killed": lambda it: replace(it, workers=[*it.workers[:1], replace(it.workers[1], exit_code=0), it.workers[2]]),
    "a run that failed": lambda it: _changed(it, RACK, snapshot=replace(it.courses[RACK].snapshot, status="failed")),
    "another outcome": lambda it: _changed(it, LAMP, snapshot=replace(it.courses[LAMP].snapshot, output={"outcome": "review", "order": "SO"})),
    "a refusal that nobody recorded": lambda it: _changed(it, DESKS, refusals=it.courses[DESKS].refusals[:1]),
    "an answer by somebody else": lambda it: _changed(
        it, COFFEE, history=_course(COFFEE, replace(CASES[COFFEE], answers=[("client", "eve")])).history
    ),
    "an approval that was asked once": lambda it: _changed(
        it, CHAIRS, history=_course(CHAIRS, replace(CASES[CHAIRS], answers=[("client", "ada")])).history
    ),
    "a change that nobody saw": lambda it: _changed(it, CHAIRS, history=_without(it.courses[CHAIRS].history, EventType.ACTIVITY_FAILED)),
    "an effect that ran again": lambda it: _changed(it, LAMP, history=[*it.courses[LAMP].history, it.courses[LAMP].history[1]]),
    "an attempt of another process": lambda it: replace(it, workers=[replace(each, pid=each.pid + 6) for each in it.workers]),
}


@pytest.mark.parametrize("lie", list(_FALSE))
def test_a_false_procurement_story_is_found_out(lie: str) -> None:
    """Each claim of the demo fails when it is not so."""
    assert faults(_FALSE[lie](_account()))
