"""Versions of a workflow side by side: a run belongs to the one that started it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from langgraph.types import interrupt

from mongo_durable import App, DurableClient, Runner
from mongo_durable.errors import RunError
from tests.engine.workflows import PATIENCE_S, State, one_node, until_known

SWEEP = timedelta(seconds=0.2)


@pytest.fixture
def release(mongo_uri: str, database: str) -> Callable[[str], App]:
    """The application at a version: each asks, and says which one has gone on with the answer."""

    def make(version: str) -> App:
        app = App("orders", version=version, uri=mongo_uri, database=database)

        async def node(state: State) -> dict[str, Any]:
            return {"seen": [interrupt(f"may I, asks version {version}"), version]}

        return one_node(app, node)

    return make


async def test_a_rolling_deployment(client: DurableClient, release: Callable[[str], App]) -> None:
    """Version 2 comes beside version 1; each takes its own runs, old and new; a run of version 1 that is left over is shown, and waits for it."""
    old, new = Runner([release("1")], sweep_interval=SWEEP), Runner([release("2")], sweep_interval=SWEEP)
    await old.start()
    for number in range(3):
        await client.submit("orders", {"value": number}, run_id=f"old-{number}")

    async def are_asked() -> bool:
        return len(await client.open_frontiers(workflow="orders")) == 3

    await until_known(are_asked)
    await new.start()
    await client.submit("orders", {"value": 0}, run_id="new-0", version="2")
    assert (await client.wait("new-0", timeout=PATIENCE_S)).status == "suspended"
    for run in ("old-0", "old-1", "new-0"):
        ((question,),) = [each.entries for each in await client.open_frontiers(run_id=run)]
        await client.resolve(run, {question.activity_id: "yes"})

        async def is_ended(run: str = run) -> bool:
            return (await client.get_run(run)).is_ended

        await until_known(is_ended)
        snapshot = await client.get_run(run)
        assert (snapshot.status, snapshot.output["seen"]) == ("completed", ["yes", "2" if run == "new-0" else "1"])
    assert [each.run_id for each in await client.list_runs(workflow="orders", version="1", status="suspended")] == ["old-2"]
    # Version 1 goes too early: its last run waits for somebody who has it, and says so.
    await old.stop()
    ((question,),) = [each.entries for each in await client.open_frontiers(run_id="old-2")]
    await client.resolve("old-2", {question.activity_id: "late"})
    (left,) = await client.unserved_runs()
    assert (left.run_id, left.waits_for) == ("old-2", "no live runner serves workflow 'orders' version '1'")
    assert (await client.get_run("old-2")).status == "ready"
    await new.stop()
    # One process may serve both.
    async with Runner([release("1"), release("2")], sweep_interval=SWEEP):

        async def is_done() -> bool:
            return (await client.get_run("old-2")).is_ended

        await until_known(is_done)
    assert (await client.get_run("old-2")).output["seen"] == ["late", "1"]
    assert await client.unserved_runs() == []


async def test_another_version_is_not_taken_by_a_direct_call(client: DurableClient, release: Callable[[str], App]) -> None:
    """An app that is called for a run of another version refuses, and the run is left as it was."""
    await client.submit("orders", {"value": 1}, run_id="r")
    app = release("2")
    with pytest.raises(RunError, match="belongs to workflow 'orders' version '1'"):
        await app.ainvoke(None, run_id="r")
    await app.aclose()
    assert (await client.get_run("r")).attempt == 0
