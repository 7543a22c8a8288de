"""Retry policies of effects, where a process loses the run between two tries."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

import pymongo
import pytest
from langgraph.graph import START, StateGraph

from mongo_durable import App, RetryPolicy
from mongo_durable.errors import LeaseLost
from mongo_durable.langgraph.scope import current_session
from mongo_durable.store.heartbeat import Lease
from tests.langgraph.kit import State

LEASE = timedelta(seconds=0.4)
PATIENCE_S = 30.0
QUICK = RetryPolicy(max_attempts=5, initial_interval=timedelta(0), jitter=timedelta(0))


def _lease() -> Lease:
    """The lease of the attempt whose body runs here."""
    session = current_session()
    assert session is not None
    return session.attempt._lease


def _wait_until_lost(lease: Lease) -> None:
    until = time.monotonic() + PATIENCE_S
    while not lease.is_lost:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("colour", ["async", "sync"])
async def test_who_was_declared_dead_tries_no_body_again(colour: str, mongo_uri: str, database: str) -> None:
    """Another process may have the run by now: a retry policy does not go on with an effect for an attempt that has lost its lease."""
    app = App("retries", uri=mongo_uri, database=database, sync=colour == "sync", lease=LEASE)
    tries = 0

    def declared_dead() -> Lease:
        nonlocal tries
        tries += 1
        with pymongo.MongoClient(mongo_uri) as client:
            client[database]["runners"].update_many({}, {"$set": {"state": "dead"}})
        return _lease()

    @app.activity(idempotent=True, retry=QUICK)
    async def act() -> str:
        await asyncio.to_thread(_wait_until_lost, declared_dead())
        raise ConnectionError("not yet")

    @app.activity(idempotent=True, retry=QUICK)
    def act_sync() -> str:
        _wait_until_lost(declared_dead())
        raise ConnectionError("not yet")

    async def node(state: State) -> dict[str, Any]:
        return {"lines": [await act()]}

    def node_sync(state: State) -> dict[str, Any]:
        return {"lines": [act_sync()]}

    @app.entrypoint
    def build() -> StateGraph[State]:
        graph = StateGraph(State)
        graph.add_node("node", node_sync if colour == "sync" else node)
        graph.add_edge(START, "node")
        return graph

    config: Any = {"configurable": {"thread_id": "t"}}
    call = asyncio.to_thread(app.invoke, {"lines": []}, config) if colour == "sync" else app.ainvoke({"lines": []}, config)
    with pytest.raises(LeaseLost):
        await call
    assert tries == 1
    await app.aclose() if colour == "async" else await asyncio.to_thread(app.close)
    with pymongo.MongoClient(mongo_uri) as client:
        assert client[database]["activity_events"].count_documents({"outcome": True}) == 0
