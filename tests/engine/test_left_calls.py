"""A call that is left while it takes a run, or that hears of no outcome: its process lives on, and others go on with the run all the same (I9)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langgraph.types import Command, interrupt

from mongo_durable import App, DurableClient, Runner
from mongo_durable.errors import StoreUnavailable
from mongo_durable.store import failpoints
from mongo_durable.store.failpoints import FailPoint
from tests.engine.workflows import CONFIG, PATIENCE_S, State, one_node, until


async def _node(state: State) -> dict[str, Any]:
    return {"seen": [interrupt("may I?")]}


async def _submit(app: App, operator: DurableClient) -> tuple[Any, str]:
    return {"value": 1}, "suspended"


async def _claim(app: App, operator: DurableClient) -> tuple[Any, str]:
    await operator.submit("replayed", {"value": 1}, thread_id="desk", run_id="po-17")
    return None, "suspended"


async def _answer(app: App, operator: DurableClient) -> tuple[Any, str]:
    await app.ainvoke({"value": 1}, CONFIG, run_id="po-17")
    return Command(resume="yes"), "completed"


@pytest.mark.parametrize("how", ["left", "unheard"])
@pytest.mark.parametrize(
    ("prepare", "point"),
    [
        (_submit, FailPoint.SUBMIT_AFTER),
        (_claim, FailPoint.CLAIM_HEAD_AFTER),
        (_claim, FailPoint.CLAIM_EVENT_AFTER),
        (_answer, FailPoint.RESOLVE_INSIDE),
        (_answer, FailPoint.RESOLVE_AFTER),
    ],
)
async def test_others_go_on_with_a_run_that_a_call_took_and_left(
    new_app: Callable[[], App], operator: DurableClient, prepare: Any, point: FailPoint, how: str
) -> None:
    """The run is given back as soon as it is known to have been taken; nobody has to wait for the end of a process that lives."""
    app, other = one_node(new_app(), _node), one_node(new_app(), _node)
    await app.process().lease()
    given, status = await prepare(app, operator)
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def look(at: FailPoint) -> None:
        if at is point and not reached.is_set():
            reached.set()
            if how == "unheard":
                raise StoreUnavailable("the reply was lost")
            await go_on.wait()

    failpoints.handler = look
    call = asyncio.create_task(app.ainvoke(given, CONFIG, run_id="po-17"))
    await reached.wait()
    if how == "left":
        call.cancel()
    with pytest.raises((asyncio.CancelledError, StoreUnavailable)):
        await call
    go_on.set()
    await until(lambda: "po-17" not in app.process().running)
    if (prepare, point, how) == (_answer, FailPoint.RESOLVE_INSIDE, "unheard"):
        await operator.resolve("po-17", {each.activity_id: "yes" for each in (await _asked(operator))})  # nothing was accepted
    async with Runner([other]):
        assert (await operator.wait("po-17", timeout=PATIENCE_S)).status == status
    assert app.process().held_lease is not None


async def _asked(operator: DurableClient) -> Any:
    frontier = (await operator.get_run("po-17")).frontier
    assert frontier is not None
    return frontier.entries
