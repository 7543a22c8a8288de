"""`App(redact=…)`: what people see of an input; never what the run is made of."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langgraph.types import Command

from mongo_durable import App, DurableClient
from mongo_durable.langgraph.redaction import Redact
from tests.engine.workflows import State, one_node
from tests.security.conftest import GROUP
from tests.support.secured import SecuredMongo

pytestmark = GROUP

CARD = "4711-0815"


def _hide_card(kind: str, name: str, arguments: Any) -> Any:
    assert (kind, name) == ("ACTIVITY", "pay") or (kind, name) == ("TOOL", "refund")
    arguments["card"] = "…"  # its own copy: the body gets the true one
    return arguments


def _fail(kind: str, name: str, arguments: Any) -> Any:
    raise ValueError(CARD)


def _paying(uri: str, database: str, redact: Redact | None, seen: list[str], pause: asyncio.Event | None = None) -> App:
    app = App("shop", uri=uri, database=database, redact=redact)

    @app.activity
    async def pay(card: str, amount: int) -> str:
        seen.append(card)
        if pause is not None:
            pause.set()
            await asyncio.Event().wait()
        return f"paid {amount} from {card}"

    @app.tool
    async def refund(card: str) -> str:
        """Give it back."""
        return f"refunded to {card}"

    async def node(state: State) -> dict[str, Any]:
        paid = await pay(CARD, 7)
        answer = app.interrupt("approval", "right?")
        return {"seen": [paid, answer, await refund.ainvoke({"card": CARD})]}

    return one_node(app, node)


@pytest.mark.parametrize(("redact", "shown"), [(_hide_card, "…"), (_fail, "redact failed with ValueError")], ids=["hides", "fails"])
async def test_only_the_shown_input_is_redacted(redact: Redact, shown: str, secured: SecuredMongo, database: str) -> None:
    """The start of an effect shows what the hook returned; body, digest, outcome and replay have the true values."""
    seen: list[str] = []
    plain = _paying(secured.root_uri, database, None, seen)
    await plain.ainvoke({}, {"configurable": {"thread_id": "plain"}}, run_id="plain")
    hiding = _paying(secured.root_uri, database, redact, seen)
    config = {"configurable": {"thread_id": "hidden"}}
    await hiding.ainvoke({}, config, run_id="hidden")
    out = await hiding.ainvoke(Command(resume="yes"), config)
    assert out["seen"] == [f"paid 7 from {CARD}", "yes", f"refunded to {CARD}"]
    assert seen == [CARD, CARD]
    async with DurableClient(secured.root_uri, database=database) as client:
        known, found = [
            [event for event in await client.history(run_id) if event.type == "activity.started" and event.name in ("pay", "refund")]
            for run_id in ("plain", "hidden")
        ]
    assert [event.input_digest for event in found][:1] == [event.input_digest for event in known]
    assert known[0].value == {"card": CARD, "amount": 7}
    for event in found:
        assert CARD not in str(event.value)
        assert shown in str(event.value)
    await plain.aclose()
    await hiding.aclose()


async def test_who_is_asked_whether_it_happened_sees_the_redacted_input(secured: SecuredMongo, database: str) -> None:
    """The question about an effect whose process died inside it is no way around the hook."""
    reached = asyncio.Event()
    app = _paying(secured.root_uri, database, _hide_card, [], reached)
    config = {"configurable": {"thread_id": "t"}}
    dying = asyncio.create_task(app.ainvoke({}, config))
    await asyncio.wait_for(reached.wait(), 30)
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)
    out = await app.ainvoke(None, config)
    assert out["__interrupt__"][0].value["input"] == {"card": "…", "amount": 7}
    await app.aclose()
