"""The procurement workflow, to copy: a purchase is drafted, judged by policy, approved by people where that is needed, and ordered once.

START ─> intake ─> policy ─┬─ accepted ───────────────────> execution ─┬─ ordered ─> END
                     ^     ├─ review ─> approval ─ approved ─^         │
                     │     │                └───── declined ─> END     │
                     │     └─ rejected ─> END                          │
                     └───────────────────────────── changed ───────────┘

- Where the graph goes on depends on fields of the state alone, and each field has one meaning. `trail` is added to, all others are replaced.
- A node with a conditional edge has no other edge: both would be followed.
- What changes something outside is an activity. Nodes may be entered again; an activity that has an outcome is not.
- An approval is for one proposal, kept as its digest. Execution looks at that, not at `approved` alone: the world may have changed since.
- Who may approve is judged where answers come in, by `authorize`. That the graph waits at the right place gives nobody the right to answer.
- A run has the name of its request: `client.submit("procurement", {"request": request}, run_id=request["request_id"])` may be sent twice.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Literal, Protocol, TypedDict

from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel, ConfigDict

from mongo_durable import AnswerRequest, App, check_proposal, proposal_digest
from mongo_durable.errors import NotAuthorized, ProposalChanged

WORKFLOW = "procurement"
APPROVAL = "purchase_approval"

ACCEPTED_UP_TO = 500
MANAGERS_UP_TO = 5_000
NEVER_ABOVE = 50_000
"""EUR."""

STAFF: Mapping[str, str] = {"ada": "managers", "max": "managers", "dora": "directors", "finn": "finance"}
"""Who decides, and for which office. A real application asks its directory; others are employees."""


class Request(TypedDict):
    """What an employee asks for."""

    request_id: str
    item: str
    requested_by: str


class Proposal(BaseModel):
    """What is to be bought, and what people are shown. Whoever approves it approves exactly this.

    Attributes:
        amount: EUR.
    """

    model_config = ConfigDict(frozen=True)

    request_id: str
    item: str
    requested_by: str
    amount: int


class Decision(BaseModel):
    """The answer of one person."""

    model_config = ConfigDict(extra="forbid")

    approved: bool
    reason: str | None = None


class Approval(TypedDict):
    """What became of a review.

    Attributes:
        proposal_digest: Of the proposal that was shown to the people who decided.
    """

    approved: bool
    proposal_digest: str
    reasons: list[str]


Outcome = Literal["accepted", "rejected", "review"]


class Purchase(TypedDict, total=False):
    """The state. Nodes return the fields that they change; a field is replaced, unless it says how it is combined.

    Attributes:
        request: Given, and never changed: its id is the supplier's deduplication key.
        proposal: Replaced as a whole.
        outcome: Of the policy.
        approval: Of people, or of the policy where it accepts; None: not decided.
        order: The supplier's number; None: nothing is ordered.
        trail: What happened, in words; every node adds its lines.
    """

    request: Request
    proposal: Proposal
    outcome: Outcome
    approval: Approval | None
    order: str | None
    trail: Annotated[list[str], operator.add]


class Supplier(Protocol):
    """The outside system."""

    async def quote(self, item: str) -> int:
        """What an item costs now, in EUR."""

    async def order(self, request_id: str, item: str, amount: int) -> str:
        """Order an item. The same request again is the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How long people have.

    Attributes:
        escalate_in: After this time, directors are asked what managers have not decided.
        decide_in: After this time, a purchase that nobody has decided is declined.
    """

    escalate_in: timedelta = timedelta(hours=8)
    decide_in: timedelta = timedelta(days=3)


def judge(proposal: Proposal) -> Outcome:
    """The policy."""
    if proposal.amount > NEVER_ABOVE:
        return "rejected"
    return "accepted" if proposal.amount <= ACCEPTED_UP_TO else "review"


def approvers(proposal: Proposal) -> list[str]:
    """The offices that all have to approve."""
    return ["managers"] if proposal.amount <= MANAGERS_UP_TO else ["directors", "finance"]


def authorize(request: AnswerRequest) -> bool:
    """Who may decide. It is asked about every answer, by whatever way it comes, before anything is stored.

    Give it to the App and to every DurableClient: `DurableClient(authorize=authorize)`.

    Raises:
        NotAuthorized: With the reason, which is recorded with the refusal.
    """
    if request.name != APPROVAL:
        return False
    caller, proposal = request.caller, Proposal.model_validate(request.payload)
    office = STAFF.get(caller or "")
    if office not in request.audiences:
        raise NotAuthorized(f"{caller or 'nobody'} is not of the {' or '.join(request.audiences)}")
    if caller == proposal.requested_by:
        raise NotAuthorized(f"{caller} has requested this purchase, and cannot decide it")
    if office == "managers" and proposal.amount > MANAGERS_UP_TO:
        raise NotAuthorized(f"managers decide up to {MANAGERS_UP_TO} EUR")
    return True


def build_app(supplier: Supplier, terms: Terms | None = None, *, workflow: str = WORKFLOW) -> App:
    """The durable workflow. Its database is named by the environment."""
    app = App(workflow, authorize=authorize, types=[Proposal])
    times = terms or Terms()
    late = Decision(approved=False, reason="nobody decided in time")
    app.interrupt_type(APPROVAL, payload=Proposal, response=Decision, expires_in=times.decide_in, default=late)

    @app.activity(idempotent=True)
    async def quote(item: str) -> int:
        return await supplier.quote(item)

    # A process may die between the order and the record of it. The call is then made again, and the supplier knows the request.
    @app.activity(idempotent=True)
    async def place_order(proposal: Proposal, approved_digest: str) -> str:
        check_proposal(proposal, approved_digest)
        return await supplier.order(proposal.request_id, proposal.item, proposal.amount)

    async def intake(state: Purchase) -> Purchase:
        request = state["request"]
        proposal = Proposal(**request, amount=await quote(request["item"]))
        # What an earlier purchase of the same thread has left is not of this one.
        return {"proposal": proposal, "approval": None, "order": None, "trail": [f"{proposal.item}: {proposal.amount} EUR"]}

    async def policy(state: Purchase) -> Purchase:
        proposal = state["proposal"]
        outcome = judge(proposal)
        accepted: Approval = {"approved": True, "proposal_digest": proposal_digest(proposal), "reasons": ["by policy"]}
        return {"outcome": outcome, "approval": accepted if outcome == "accepted" else None, "trail": [f"policy: {outcome}"]}

    async def ask(proposal: Proposal, office: str) -> Decision:
        # Directors stand in for managers. Where two offices decide there is nobody to stand in: one person could then give both answers.
        stands_in: dict[str, Any] = {"escalate_to": "directors", "escalate_in": times.escalate_in} if office == "managers" else {}
        decision: Decision = app.interrupt(APPROVAL, proposal, audience=office, **stands_in)
        return decision

    async def approval(state: Purchase) -> Purchase:
        # Entered again with the answers: everything up to here only reads the state. The questions of all offices make one frontier.
        proposal = state["proposal"]
        decisions: list[Decision] = await app.gather(*(partial(ask, proposal, office) for office in approvers(proposal)))
        is_approved = all(decision.approved for decision in decisions)
        reasons = [decision.reason for decision in decisions if decision.reason]
        return {
            "approval": {"approved": is_approved, "proposal_digest": proposal_digest(proposal), "reasons": reasons},
            "trail": [": ".join(["approved" if is_approved else "declined", *reasons])],
        }

    async def execution(state: Purchase) -> Purchase:
        request, approved = state["request"], state["approval"]
        assert approved is not None  # both edges that lead here say so
        # The price is asked before the order, in an activity of its own: an order that is made again is made at the same price.
        proposal = Proposal(**request, amount=await quote(request["item"]))
        try:
            order = await place_order(proposal, approved["proposal_digest"])
        except ProposalChanged:
            # Another purchase than the one that was approved: policy, and people, decide about this one.
            return {"proposal": proposal, "approval": None, "trail": [f"now {proposal.amount} EUR: not what was approved"]}
        return {"order": order, "trail": [f"ordered: {order}"]}

    def after_policy(state: Purchase) -> Outcome:
        return state["outcome"]

    def after_approval(state: Purchase) -> Literal["approved", "declined"]:
        approval = state["approval"]
        return "approved" if approval is not None and approval["approved"] else "declined"

    def after_execution(state: Purchase) -> Literal["ordered", "changed"]:
        return "changed" if state["order"] is None else "ordered"

    @app.entrypoint
    def build() -> Any:
        graph = StateGraph(Purchase)
        graph.add_node("intake", intake)
        graph.add_node("policy", policy)
        graph.add_node("approval", approval)
        graph.add_node("execution", execution)
        graph.add_edge(START, "intake")
        graph.add_edge("intake", "policy")
        graph.add_conditional_edges("policy", after_policy, {"accepted": "execution", "rejected": END, "review": "approval"})
        graph.add_conditional_edges("approval", after_approval, {"approved": "execution", "declined": END})
        graph.add_conditional_edges("execution", after_execution, {"ordered": END, "changed": "policy"})
        return graph

    return app
