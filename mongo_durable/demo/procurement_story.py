"""The story of the procurement workflow: seven purchases, three workers of which two are killed, several people, and five orders."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.text import Text

from mongo_durable.demo.procurement import WORKFLOW, Request, Terms, authorize
from mongo_durable.demo.proof import worker_of
from mongo_durable.demo.supplier import Order, Supplier
from mongo_durable.demo.telling import LEASE_S, Process, Telling, ended, on_a_stage, table_of
from mongo_durable.demo.worker import HOLDING
from mongo_durable.demo.workers import DemoFailed, Worker
from mongo_durable.engine.tokens import SigningKeys
from mongo_durable.errors import NotAuthorized
from mongo_durable.protocol.events import Event, EventType, RunStatus
from mongo_durable.snapshots import Frontier, RunSnapshot
from mongo_durable.store.audit import Refusal
from mongo_durable.timeline import timeline

URGENT = "procurement-urgent"
TERMS = {
    WORKFLOW: Terms(escalate_in=timedelta(seconds=2)),
    URGENT: Terms(escalate_in=timedelta(seconds=1), decide_in=timedelta(seconds=3)),
}
"""By workflow, how long people have: in this story, very little."""

LAMP, CAR, DESKS, CHAIRS, COFFEE, RACK, PLANTS = "po-lamp", "po-car", "po-desks", "po-chairs", "po-coffee", "po-rack", "po-plants"
NEW_PRICE = 3_400
YES = {"approved": True}
_LOOK_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One purchase, and what has to become of it.

    Attributes:
        price: EUR, when it is requested.
        outcome: The last one of the policy.
        answers: How each frontier was closed: the way by which the answers came, or `expired`, and who gave them.
        ordered_at: What the supplier sold it for; None: nothing was ordered.
        calls: How often the supplier was asked for the order.
        refused: Who tried to answer, and may not.
    """

    item: str
    price: int
    requested_by: str
    outcome: str
    answers: Sequence[tuple[str, str]] = ()
    ordered_at: int | None = None
    calls: int = 1
    refused: Sequence[str] = ()
    workflow: str = WORKFLOW


CASES: Mapping[str, Case] = {
    LAMP: Case(item="desk lamp", price=45, requested_by="eve", outcome="accepted", ordered_at=45),
    CAR: Case(item="company car", price=68_000, requested_by="eve", outcome="rejected"),
    DESKS: Case(
        item="ten desks",
        price=4_800,
        requested_by="max",
        outcome="review",
        answers=[("token", "ada")],
        ordered_at=4_800,
        calls=2,
        refused=["eve", "max"],
    ),
    CHAIRS: Case(
        item="ten chairs",
        price=3_100,
        requested_by="eve",
        outcome="review",
        answers=[("client", "ada"), ("client", "ada")],
        ordered_at=NEW_PRICE,
    ),
    COFFEE: Case(item="coffee machine", price=1_900, requested_by="eve", outcome="review", answers=[("client", "dora")], ordered_at=1_900),
    RACK: Case(item="server rack", price=12_000, requested_by="max", outcome="review", answers=[("draft", "dora, finn")], ordered_at=12_000),
    PLANTS: Case(item="office plants", price=700, requested_by="eve", outcome="review", answers=[("expired", "")], workflow=URGENT),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What MongoDB says of one run."""

    snapshot: RunSnapshot
    history: Sequence[Event]
    refusals: Sequence[Refusal] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Everything that is known after the story.

    Attributes:
        courses: By request id.
        orders: The supplier's own account.
    """

    courses: Mapping[str, Course]
    orders: Sequence[Order]
    workers: Sequence[Process] = field(default_factory=list)


async def tell(console: Console, uri: str, *, is_kept: bool = False) -> list[str]:
    """Play the story on a database of its own, print it, and check it.

    Args:
        is_kept: Leave the database, to look at it.

    Returns:
        What is not as claimed; empty if everything is.
    """
    keys = SigningKeys({"demo": secrets.token_urlsafe(32)})
    async with on_a_stage(console, uri, f"show {CHAIRS}", is_kept=is_kept, authorize=authorize, signing_keys=keys) as stage:
        account = await _tell(Telling(stage))
        found = faults(account)
        _print_account(console, account, found)
    return found


async def _tell(telling: Telling) -> Account:
    stage, client = telling.stage, telling.stage.client
    supplier = Supplier(stage.outside)
    async with stage.workers("procurement") as workers:
        for request_id, case in CASES.items():
            supplier.set_price(case.item, case.price)
            request: Request = {"request_id": request_id, "item": case.item, "requested_by": case.requested_by}
            await client.submit(case.workflow, {"request": request}, run_id=request_id)
        telling.say(f"{len(CASES)} purchases are requested; each run has the name of its request")

        a = await telling.start(workers, "A")
        await _at_rest(telling, a, *CASES)
        telling.say(f"policy: {LAMP} is accepted and ordered, {CAR} is rejected; the others wait for people")
        desks = await _open_frontier(telling, DESKS)
        for person in CASES[DESKS].refused:
            await _try_in_vain(telling, desks, person)
        refused = [f"{each.by}: {each.code}: {each.message}" for each in await client.refusals(DESKS)]
        telling.show(f'mongosh> db.audit.find({{run_id: "{DESKS}"}}, {{_id: 0, by: 1, code: 1, message: 1}})', *refused)
        await a.kill()
        telling.say("worker A gets SIGKILL: no process is left, only MongoDB; questions, answers and times do not need one")

        await _answer_by_link(telling, desks)
        await _answer(telling, CHAIRS, "ada")
        supplier.set_price(CASES[CHAIRS].item, NEW_PRICE)
        telling.say(f"… and after that the supplier raises their price from {CASES[CHAIRS].price} to {NEW_PRICE} EUR")
        await _answer_in_a_draft(telling)
        await _answer_after_escalation(telling)

        b = await telling.start(workers, "B", hold=DESKS)
        await b.until(f"the order of {DESKS}", b.says(f"{HOLDING} {DESKS}"), telling.patience_s)
        await _at_rest(telling, b, CHAIRS, COFFEE, RACK, PLANTS)
        telling.say(f"{COFFEE} and {RACK} are ordered; {CHAIRS} is not what was approved any more, and is asked again")
        telling.say(f"{PLANTS} was decided by nobody within {TERMS[URGENT].decide_in.seconds} s: its declared default declines it")
        await b.kill()
        telling.say(f"worker B gets SIGKILL after it has ordered {DESKS}, and before that is recorded")
        await _answer(telling, CHAIRS, "ada")

        c = await telling.start(workers, "C")
        telling.say(f"once B's lease of {LEASE_S:g} s is over, C takes {DESKS} over, and orders again under the same request id")
        await _at_rest(telling, c, *CASES)
        telling.say("all runs have ended")
        await c.stop()
        processes = [ended(worker) for worker in (a, b, c)]
    courses = {
        each: Course(snapshot=await client.get_run(each), history=await client.history(each), refusals=await client.refusals(each)) for each in CASES
    }
    return Account(courses=courses, orders=supplier.orders(), workers=processes)


async def _at_rest(telling: Telling, worker: Worker, *request_ids: str) -> None:
    """Wait until these runs have ended or wait for people, while the worker lives."""
    client = telling.stage.client

    async def all_of_them() -> None:
        await asyncio.gather(*(client.wait(each) for each in request_ids))

    await worker.until("the end of its work", all_of_them(), telling.patience_s)


async def _open_frontier(telling: Telling, request_id: str) -> Frontier:
    run = await telling.stage.client.get_run(request_id)
    if run.frontier is None:
        raise DemoFailed(f"run {request_id} is {run.status} instead of waiting for people: {run.error}")
    return run.frontier


async def _try_in_vain(telling: Telling, frontier: Frontier, person: str) -> None:
    try:
        await telling.stage.client.resolve(frontier.run_id, {frontier.entries[0].activity_id: YES}, resolved_by=person)
    except NotAuthorized:
        telling.say(f"{person} tries to approve {frontier.run_id}: refused, recorded, and nothing else has happened")
    else:
        raise DemoFailed(f"{person} could approve {frontier.run_id}")


async def _answer_by_link(telling: Telling, frontier: Frontier) -> None:
    """A manager answers by a link: a signed token, for exactly what was shown."""
    client = telling.stage.client
    token = await client.resume_token(frontier, expires_in=timedelta(hours=8), audience="ada")
    telling.say(f"ada, a manager, gets a link for what is asked of {frontier.run_id}, and approves by it")
    telling.show(f"https://purchasing.example/decide?token={token[:24]}…  bound to run, generation and digest")
    await client.resolve_with_token(token, {frontier.entries[0].activity_id: YES}, audience="ada")


async def _answer(telling: Telling, request_id: str, person: str) -> None:
    """A person decides what is shown: generation and digest say what that was."""
    seen = await _open_frontier(telling, request_id)
    (entry,) = seen.entries
    telling.say(f"{person} approves {request_id} at {entry.value['amount']} EUR")
    await telling.stage.client.resolve(request_id, {entry.activity_id: YES}, generation=seen.generation, digest=seen.digest, resolved_by=person)


async def _answer_in_a_draft(telling: Telling) -> None:
    """Two people answer one frontier of two questions. Nothing reaches the run before both have."""
    client = telling.stage.client
    seen = await _open_frontier(telling, RACK)
    by_office = {entry.audience: entry.activity_id for entry in seen.entries}
    draft = await client.draft_answer(RACK, {by_office["directors"]: YES}, answered_by="dora", digest=seen.digest)
    status = (await client.get_run(RACK)).status
    telling.say(f"dora, a director, approves {RACK}; {len(draft.missing)} answer is missing, and the run is still {status}")
    draft = await client.draft_answer(RACK, {by_office["finance"]: YES}, answered_by="finn", digest=seen.digest)
    if status != RunStatus.SUSPENDED or draft.resolution is None:
        raise DemoFailed(f"run {RACK} was {status} with one of two answers; with both: {draft}")
    telling.say("finn, of finance, approves it as well: both answers go in together")


async def _answer_after_escalation(telling: Telling) -> None:
    """Managers are silent; after a while directors are asked as well."""
    client = telling.stage.client
    async with asyncio.timeout(telling.patience_s):
        while COFFEE not in [each.run_id for each in await client.open_frontiers(audience="directors")]:  # noqa: ASYNC110 - time passes, no event is set
            await asyncio.sleep(_LOOK_AGAIN_S)
    telling.say(f"no manager has decided {COFFEE} within {TERMS[WORKFLOW].escalate_in.seconds} s: it is on the directors' list now")
    await _answer(telling, COFFEE, "dora")


def faults(account: Account) -> list[str]:
    """What is not as claimed; empty if everything is."""
    found = [f"{request_id}: {fault}" for request_id, case in CASES.items() for fault in _case_faults(case, account.courses[request_id])]
    sold = {each.request_id: (each.amount, each.calls) for each in account.orders}
    expected = {request_id: (case.ordered_at, case.calls) for request_id, case in CASES.items() if case.ordered_at is not None}
    if sold != expected or len(account.orders) != len(expected):
        found.append(f"the supplier has sold {sold}, not {expected} (amount, calls)")
    if [each.exit_code for each in account.workers] != [-signal.SIGKILL, -signal.SIGKILL, 0]:
        found.append(f"the workers ended with {[each.exit_code for each in account.workers]}")
    attempts = timeline(account.courses[DESKS].history).attempts
    owners = [worker_of(each, account.workers) for each in attempts]
    if [each.ending for each in attempts] != ["suspended", None, "completed"] or owners != list(account.workers):
        found.append(f"{DESKS}: its attempts ended as {[each.ending for each in attempts]}, in {owners}")
    changed = [each for each in account.courses[CHAIRS].history if each.type is EventType.ACTIVITY_FAILED]
    if [(each.name, (each.error or {}).get("type")) for each in changed] != [("place_order", "mongo_durable.errors.ProposalChanged")]:
        found.append(f"{CHAIRS}: the changed proposal was not refused: {changed}")
    return found


def _case_faults(case: Case, course: Course) -> list[str]:
    snapshot, found = course.snapshot, []
    if snapshot.status != RunStatus.COMPLETED:
        return [f"it is {snapshot.status}, not completed: {snapshot.error}"]
    output = snapshot.output
    if output["outcome"] != case.outcome or (output["order"] is not None) != (case.ordered_at is not None):
        found.append(f"policy says {output['outcome']}, and the order is {output['order']}")
    if answers_of(course.history) != list(case.answers):
        found.append(f"the frontiers were closed by {answers_of(course.history)}, not {list(case.answers)}")
    if [(each.code, each.by) for each in course.refusals] != [("not_authorized", person) for person in case.refused]:
        found.append(f"refused were {[(each.code, each.by) for each in course.refusals]}")
    started = Counter((each.name, each.activity_id) for each in course.history if each.type is EventType.ACTIVITY_STARTED)
    again = [name for (name, _), count in started.items() if count != (case.calls if name == "place_order" else 1)]
    if again:
        found.append(f"effects ran again: {', '.join(str(name) for name in again)}")
    return found


def answers_of(history: Sequence[Event]) -> list[tuple[str, str]]:
    """How each frontier of a run was closed, and by whom."""
    closed = [each for each in history if each.type in (EventType.ACTIVITIES_RESOLVED, EventType.FRONTIER_EXPIRED)]
    return [
        ("expired", "") if each.type is EventType.FRONTIER_EXPIRED else (str(each.data["channel"]), str(each.data["resolved_by"])) for each in closed
    ]


def _print_account(console: Console, account: Account, found: list[str]) -> None:
    table = table_of("What MongoDB and the supplier say", "request", "what happened", "answered by", "attempts", "supplier asked", "orders")
    orders: dict[str, list[Order]] = {}
    for order in account.orders:
        orders.setdefault(order.request_id, []).append(order)
    for request_id, course in account.courses.items():
        mine = orders.get(request_id, [])
        trail: Any = course.snapshot.output["trail"] if course.snapshot.output is not None else [course.snapshot.status]
        cells = (
            request_id,
            "; ".join(trail),
            ", ".join(f"{who} ({way})" if who else way for way, who in answers_of(course.history)) or "nobody: not asked",
            str(course.snapshot.attempt),
            f"{sum(each.calls for each in mine)} ×",
            ", ".join(f"{each.amount} EUR" for each in mine) or "none",
        )
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    if not found:
        sold = "one order a request that was approved or accepted, none for any other"
        console.print(
            Text(f"\nproved: killed twice, {sold}; whoever may not answer was refused, and what was changed after its approval as well", "green")
        )
