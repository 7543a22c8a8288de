"""An approval of one proposal is no approval of another."""

from __future__ import annotations

from typing import Any

import pytest
from langgraph.types import Command
from pydantic import BaseModel

from mongo_durable import App, check_proposal, proposal_digest
from mongo_durable.errors import NotJsonSafe, ProposalChanged
from tests.engine.workflows import State, one_node


class Purchase(BaseModel):
    """What somebody wants to buy."""

    item: str
    amount: int


@pytest.mark.parametrize(
    ("approved", "done"),
    [
        ({"amount": 10}, {"amount": 11}),
        ({"amount": 1}, {"amount": True}),
        ({"amount": 1}, {"amount": 1.5}),
        ({"amount": "1"}, {"amount": 1}),
        ([1, 2], [2, 1]),
        ({}, None),
        ({"a": 1}, {"a": 1, "b": None}),
    ],
)
def test_another_proposal_is_refused(approved: Any, done: Any) -> None:
    """Whatever differs; the error names both digests, and not what is in them."""
    check_proposal(approved, proposal_digest(approved))
    with pytest.raises(ProposalChanged) as refused:
        check_proposal(done, proposal_digest(approved))
    assert (refused.value.expected, refused.value.found) == (proposal_digest(approved), proposal_digest(done))


def test_what_a_digest_does_not_hang_on() -> None:
    """The order of keys, and whether it is a model or what the model dumps."""
    assert proposal_digest({"a": 1, "b": 2}) == proposal_digest({"b": 2, "a": 1})
    assert proposal_digest(Purchase(item="desk", amount=1)) == proposal_digest({"item": "desk", "amount": 1})
    assert proposal_digest({"item": "desk", "amount": 1}) == "ac1647dd8463382c71279306e6a47e26"
    with pytest.raises(NotJsonSafe):
        proposal_digest({"when": object()})


async def test_a_proposal_that_changes_after_its_approval_is_not_executed(mongo_uri: str, database: str) -> None:
    """The deed refuses, the refusal is recorded as its failure, and a replay refuses as well without looking again."""
    app = App("changes", uri=mongo_uri, database=database)
    done: list[Any] = []

    @app.activity(idempotent=True)
    async def buy(proposal: Any, approved_digest: str) -> str:
        check_proposal(proposal, approved_digest)
        done.append(proposal)
        return "bought"

    async def node(state: State) -> dict[str, Any]:
        proposal = {"item": "desk", "amount": 10}
        approval = {"by": app.interrupt("approve", proposal), "digest": proposal_digest(proposal)}
        try:
            await buy({**proposal, "amount": 10_000}, approval["digest"])
        except ProposalChanged as refused:
            app.interrupt("look", [refused.expected, refused.found])
        return {"value": await buy(proposal, approval["digest"])}

    one_node(app, node)
    config: Any = {"configurable": {"thread_id": "t"}}
    try:
        await app.ainvoke({"value": None}, config)
        await app.ainvoke(Command(resume="ada"), config)
        assert done == []
        assert await app.ainvoke(Command(resume="seen"), config) == {"value": "bought"}
    finally:
        await app.aclose()
    assert done == [{"item": "desk", "amount": 10}]
