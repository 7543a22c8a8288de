"""A runner prunes in the background what is past the retention of its workflow, and nothing else."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from langgraph.types import interrupt

from mongo_durable import App, DurableClient, Runner
from mongo_durable.errors import ConfigurationError
from tests.engine.workflows import State, one_node, until_known

SOON = timedelta(milliseconds=50)


async def node(state: State) -> dict[str, Any]:
    return {"seen": [interrupt("?")] if state["value"] == "asks" else []}


def apps_of(uri: str, database: str) -> list[App]:
    return [one_node(App(name, uri=uri, database=database), node) for name in ("orders", "kept")]


async def ids(client: DurableClient) -> set[str]:
    return {each.run_id for each in await client.list_runs()}


async def test_what_is_past_its_retention_goes(mongo_uri: str, database: str, client: DurableClient) -> None:
    """Ended runs of the workflow that has a retention are gone, their events too; one that lives, and those of another workflow, are whole."""
    apps = apps_of(mongo_uri, database)
    connection = await client._connection()
    for run_id, workflow, value in (("old-1", "orders", ""), ("old-2", "orders", ""), ("lives", "orders", "asks"), ("other", "kept", "")):
        await client.submit(workflow, {"value": value}, run_id=run_id)
    async with Runner(apps):  # none: without a retention nothing is pruned
        for run_id in ("old-1", "old-2", "lives", "other"):
            await client.wait(run_id, timeout=30)
    assert await ids(client) == {"old-1", "old-2", "lives", "other"}
    async with Runner(apps, retention={"orders": timedelta(days=1), "kept": timedelta(days=1)}, retention_interval=SOON):
        await client.wait((await client.submit("kept", {"value": ""}, run_id="young")).run_id, timeout=30)
    assert await ids(client) == {"old-1", "old-2", "lives", "other", "young"}
    async with Runner(apps, retention={"orders": timedelta()}, retention_interval=SOON), Runner(apps, retention={"orders": timedelta()}):

        async def is_gone() -> bool:
            return set(await connection.activity_events.distinct("run_id")) == {"lives", "other", "young"}

        await until_known(is_gone)
        [question] = (await client.get_run("lives")).frontier.entries
    assert question.value == "?"
    assert len(await client.history("other")) > 3
    assert await ids(client) == {"lives", "other", "young"}


def test_a_retention_that_makes_no_sense_is_refused(mongo_uri: str, database: str) -> None:
    """Before anything is pruned."""
    apps = apps_of(mongo_uri, database)
    for wrong in ({"retention": {"orders": -SOON}}, {"retention": {"orders": SOON}, "retention_interval": timedelta()}):
        with pytest.raises(ConfigurationError):
            Runner(apps, **wrong)
