"""A process loses the run between the start of an effect, which is recorded, and the body."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pymongo
import pytest
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatResult
from langgraph.graph import START, StateGraph

from mongo_durable import App, RetryPolicy
from mongo_durable.engine.attempt import ActivityCall, Attempt, StartResult
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
    return session.attempt._sink.lease


def _wait_until_lost(lease: Lease) -> None:
    until = time.monotonic() + PATIENCE_S
    while not lease.is_lost:
        assert time.monotonic() < until
        time.sleep(0.01)


async def _lose(app: App, node: Any) -> None:
    """Call a graph of this one node, and see it lose its run."""

    @app.entrypoint
    def build() -> StateGraph[State]:
        graph = StateGraph(State)
        graph.add_node("node", node)
        graph.add_edge(START, "node")
        return graph

    config: Any = {"configurable": {"thread_id": "t"}}
    call = asyncio.to_thread(app.invoke, {"lines": []}, config) if app.is_sync else app.ainvoke({"lines": []}, config)
    with pytest.raises(LeaseLost):
        await call
    await asyncio.to_thread(app.close) if app.is_sync else await app.aclose()


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

    await _lose(app, node_sync if app.is_sync else node)
    assert tries == 1
    with pymongo.MongoClient(mongo_uri) as client:
        assert client[database]["activity_events"].count_documents({"outcome": True}) == 0


@pytest.mark.parametrize("colour", ["async", "sync"])
async def test_who_stood_still_before_a_tool_does_not_begin_it(colour: str, mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool's body has a graph of its own, which takes time to start: a lease that runs out meanwhile is noticed before the body."""
    app = App("tools", uri=mongo_uri, database=database, sync=colour == "sync")  # with a lease so long that no heartbeat comes in between
    begun = 0
    start = Attempt.start

    async def start_and_stand_still(attempt: Attempt, call: ActivityCall) -> StartResult:
        decided = await start(attempt, call)
        attempt._sink.lease._valid_until = 0.0
        return decided

    monkeypatch.setattr(Attempt, "start", start_and_stand_still)

    @app.tool
    async def act(item: str) -> str:
        """Act."""
        nonlocal begun
        begun += 1
        return item

    @app.tool
    def act_sync(item: str) -> str:
        """Act."""
        nonlocal begun
        begun += 1
        return item

    async def node(state: State) -> dict[str, Any]:
        return {"lines": [await act.ainvoke({"item": "desk"})]}

    def node_sync(state: State) -> dict[str, Any]:
        return {"lines": [act_sync.invoke({"item": "desk"})]}

    await _lose(app, node_sync if app.is_sync else node)
    assert begun == 0
    with pymongo.MongoClient(mongo_uri) as client:
        assert client[database]["activity_events"].count_documents({"type": "activity.started"}) == 1


class _Busy(ThreadPoolExecutor):
    """Has so much to do that the lease runs out before a body gets its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.leases: list[Lease] = []

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        for lease in self.leases:
            lease._valid_until = 0.0
        return super().submit(*args, **kwargs)


@pytest.mark.parametrize("kind", ["activity", "model", "tool"])
async def test_who_waited_for_a_thread_does_not_begin(kind: str, mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A synchronous body of an asynchronous graph waits for a thread: a lease that runs out meanwhile is noticed before the body."""
    app = App("threads", uri=mongo_uri, database=database)
    busy = _Busy()
    asyncio.get_running_loop().set_default_executor(busy)
    begun = 0
    start = Attempt.start

    async def start_and_remember(attempt: Attempt, call: ActivityCall) -> StartResult:
        decided = await start(attempt, call)
        busy.leases.append(attempt._sink.lease)
        return decided

    monkeypatch.setattr(Attempt, "start", start_and_remember)

    def act(item: str) -> str:
        """Act."""
        nonlocal begun
        begun += 1
        return item

    class Model(GenericFakeChatModel):
        def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
            act("desk")
            return super()._generate(*args, **kwargs)

    activity, tool, model = app.activity(act), app.tool(act), app.llm(Model(messages=iter([AIMessage("desk")])))

    async def node(state: State) -> dict[str, Any]:
        match kind:
            case "activity":
                await activity("desk")
            case "model":
                await model.ainvoke("desk")
            case _:
                await tool.ainvoke({"item": "desk"})
        return {"lines": ["done"]}

    await _lose(app, node)
    assert busy.leases
    assert begun == 0
