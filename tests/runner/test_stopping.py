"""How attempts stop: at a boundary when their process is stopped, for good when their run is cancelled, parked when they keep killing processes."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pymongo
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.types import interrupt

from mongo_durable import App, DurableClient, Runner
from mongo_durable.errors import ConfigurationError
from mongo_durable.store import claims
from mongo_durable.store.connection import Endpoint
from tests.crash.worker import ScriptedModel
from tests.engine.workflows import State, one_node, until, until_known
from tests.runner.fleets import Gate
from tests.runner.test_deadlines import _ended, side_by_side

pytestmark = pytest.mark.usefixtures("sound")

SWEEP = timedelta(seconds=0.2)


@pytest.fixture
def new_app(mongo_uri: str, database: str) -> Callable[..., App]:
    """The workflow, as of different processes."""
    return lambda **options: App("w", uri=mongo_uri, database=database, **options)


class Steps:
    """A node of ten activities, each of which waits for leave, and what ran."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.ran: list[int] = []
        self.leave = asyncio.Semaphore(0)

        @app.activity
        async def step(number: int) -> int:
            self.ran.append(number)
            await self.leave.acquire()
            return number

        async def node(state: State) -> dict[str, Any]:
            return {"seen": [await step(number) for number in range(10)]}

        one_node(app, node)


async def test_a_drained_attempt_stops_before_its_next_effect(client: DurableClient, new_app: Callable[..., App]) -> None:
    """While its process is stopped, an attempt ends the effect that runs, records it, starts no other, and gives the run back at once."""
    first, second = Steps(new_app()), Steps(new_app())
    runner = Runner([first.app], sweep_interval=SWEEP)
    await runner.start()
    await client.submit("w", {"value": 1}, run_id="r")
    first.leave.release()
    await until(lambda: first.ran == [0, 1])
    stopping = asyncio.create_task(runner.stop(timedelta(seconds=60)))
    await until(lambda: any(attempt is not None and attempt.is_draining for attempt in (runner.process.running if runner.process else {}).values()))
    first.leave.release()
    assert await stopping, "the attempt stopped by itself"
    assert first.ran == [0, 1]
    given_back = await client.get_run("r")
    assert (given_back.status, given_back.waits_for) == ("ready", "no live runner serves workflow 'w' version '1'")
    for _ in range(10):
        second.leave.release()
    async with Runner([second.app], sweep_interval=SWEEP):
        done = await _ended(client, "r")
    assert done.output["seen"] == list(range(10))
    assert second.ran == list(range(2, 10))


async def test_parallel_effects_end_before_a_drained_attempt_stops(client: DurableClient, new_app: Callable[..., App]) -> None:
    """Of effects that run side by side, none is broken off by the drain and none follows: the next attempt executes just the rest."""
    ran: list[str] = []
    gate = asyncio.Event()

    def build(app: App) -> App:
        @app.tool
        async def work(name: str) -> str:
            """Work."""
            ran.append(name)
            await gate.wait()
            return name

        def node_of(number: int) -> Any:
            async def node(_: Any) -> dict[str, Any]:
                return {"heard": [await work.ainvoke({"name": f"{number}.{each}"}) for each in range(3)]}

            return node

        return side_by_side(app, *(node_of(number) for number in range(3)))

    runner = Runner([build(new_app())], sweep_interval=SWEEP)
    await runner.start()
    await client.submit("w", {}, run_id="r")
    await until(lambda: len(ran) == 3)
    stopping = asyncio.create_task(runner.stop(timedelta(seconds=60)))
    await until(lambda: any(attempt is not None and attempt.is_draining for attempt in (runner.process.running if runner.process else {}).values()))
    gate.set()
    assert await stopping
    assert sorted(ran) == ["0.0", "1.0", "2.0"]
    async with Runner([build(new_app())], sweep_interval=SWEEP):
        assert (await _ended(client, "r")).status == "completed"
    assert sorted(ran) == [f"{number}.{each}" for number in range(3) for each in range(3)]


async def test_a_drain_does_not_wait_inside_a_tool(client: DurableClient, new_app: Callable[..., App]) -> None:
    """A tool that runs may call its model to the end: the drain stops what comes after it, not what is inside it."""
    app = new_app()
    entered, gate = asyncio.Event(), asyncio.Event()
    model = app.llm(ScriptedModel(script=[AIMessage("done")]))

    @app.tool
    async def research(topic: str) -> str:
        """Look."""
        entered.set()
        await gate.wait()
        return str((await model.ainvoke([HumanMessage(topic)])).content)

    async def node(state: State) -> dict[str, Any]:
        return {"seen": [await research.ainvoke({"topic": "x"})]}

    one_node(app, node)
    runner = Runner([app], sweep_interval=SWEEP)
    await runner.start()
    await client.submit("w", {"value": 1}, run_id="r")
    await entered.wait()
    stopping = asyncio.create_task(runner.stop(timedelta(seconds=60)))
    await until(lambda: any(attempt is not None and attempt.is_draining for attempt in (runner.process.running if runner.process else {}).values()))
    gate.set()
    assert await stopping
    assert (await client.get_run("r")).output["seen"] == ["done"]


@pytest.mark.parametrize("state", ["pending", "running", "suspended"])
async def test_cancel_reaches_a_run_in_any_state(client: DurableClient, new_app: Callable[..., App], state: str) -> None:
    """A run that waits, is executed or asks is cancelled at once; an attempt that runs is broken off and what it would record is refused."""
    gate = Gate()

    async def node(given: State) -> dict[str, Any]:
        if state == "suspended":
            return {"seen": [interrupt("may I?")]}
        return await gate.node(given)

    runner = Runner([one_node(new_app(), node)], sweep_interval=timedelta(seconds=60))
    async with runner:
        await client.submit("w", {"value": 1}, run_id="r", version="2" if state == "pending" else "1")

        async def is_there() -> bool:
            return (await client.get_run("r")).status == state and (state != "running" or gate.now == 1)

        await until_known(is_there)
        snapshot = await client.cancel("r", reason="no longer needed")
        assert snapshot.status == "cancelled"
        await until(lambda: gate.now == 0 and not runner.running)
    last = (await client.history("r"))[-1]
    assert (last.type, last.data["reason"]) == ("run.cancelled", "no longer needed")


async def test_an_attempt_that_is_given_back_is_held_back_for_longer_each_time(client: DurableClient, mongo_uri: str, database: str) -> None:
    """A release for trouble doubles the pause by the server's clock, up to a minute; one without trouble costs none; progress forgets it."""

    endpoint = Endpoint(mongo_uri, database)
    connection = endpoint.connection()
    await client.submit("w", {"value": 1}, run_id="r")
    with pymongo.MongoClient(mongo_uri, tz_aware=True) as raw:
        heads = raw[database]["runs"]
        pauses = []
        for _ in range(10):
            heads.update_one({"_id": "r"}, [{"$set": {"available_at": "$$NOW"}}])
            claimed = await claims.claim(connection, "r", "p")
            await claims.release(connection, claimed, held_back="StoreUnavailable")
            head = heads.find_one({"_id": "r"})
            pauses.append(round((head["available_at"] - claimed.head.claimed_at).total_seconds(), 1))
        with pytest.raises(claims.RunNotClaimable):
            await claims.claim(connection, "r", "p")
        heads.update_one({"_id": "r"}, [{"$set": {"available_at": "$$NOW"}}])
        await claims.release(connection, await claims.claim(connection, "r", "p"))
        assert (await claims.claim(connection, "r", "p")).head.held_back is None
    floors = [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert all(floor <= pause < floor + 1 for floor, pause in zip(floors, pauses, strict=True)), pauses
    await endpoint.aclose()


POISON = """
import asyncio, os, sys
from mongo_durable import App, Runner
from datetime import timedelta
from tests.engine.workflows import one_node

app = App("w", uri=sys.argv[1], database=sys.argv[2], max_crashes=3)

@app.activity(idempotent=True)
async def crash(value: int) -> int:
    os._exit(7) if value == 0 else None
    return value

async def node(state):
    return {"seen": [await crash(state["value"])]}

one_node(app, node)
asyncio.run(Runner([app], lease=timedelta(seconds=1), sweep_interval=timedelta(seconds=0.1)).run_forever())
"""


async def test_a_run_that_kills_its_process_is_parked(client: DurableClient, mongo_uri: str, database: str, new_app: Callable[..., App]) -> None:
    """After so many processes that died in a row, the run is parked with the reason and kills no more; a retry gives it as many again."""
    await client.submit("w", {"value": 0}, run_id="poison")
    exits: list[int] = []

    def executed() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", POISON, mongo_uri, database], cwd=Path(__file__).parents[2])

    worker = executed()

    async def is_parked() -> bool:
        nonlocal worker
        if (code := worker.poll()) is not None:
            exits.append(code)
            worker = executed()
        return (await client.get_run("poison")).status == "failed"

    try:
        await until_known(is_parked)
        parked = await client.get_run("poison")
        assert parked.error is not None
        assert parked.error["type"] == "RunParked"
        assert re.search("[34] processes died in a row", parked.error["message"])
        assert "ACTIVITY 'crash'" in parked.error["message"]
        assert set(exits) == {7}
        assert len(exits) in (2, 3)  # a process that is slow to prove that it lives counts as dead, too
        good = await client.submit("w", {"value": 1}, run_id="good")
        assert (await good.wait(60)).output["seen"] == [1]
        await client.retry("poison")
        assert (await client.get_run("poison")).status in ("ready", "running")
        await until_known(is_parked)
        assert 4 <= len(exits) <= 6
    finally:
        worker.kill()
        worker.wait()


async def test_a_run_that_gets_on_is_not_parked(client: DurableClient, new_app: Callable[..., App], mongo_uri: str, database: str) -> None:
    """A run whose processes die again and again, but which records something new each time, goes on for ever: it is no poison."""
    endpoint = Endpoint(mongo_uri, database)
    app = new_app(max_crashes=2)
    ran: list[int] = []
    is_dying = True

    @app.activity(idempotent=True)
    async def step(number: int) -> int:
        ran.append(number)
        return number

    @app.activity(idempotent=True)
    async def crash(number: int) -> int:
        if is_dying and number == len(deaths):
            deaths.append(number)
            await asyncio.Event().wait()  # as a process that was killed here
        return number

    deaths: list[int] = []

    async def node(state: State) -> dict[str, Any]:
        for number in range(6):
            await step(number)
            await crash(number)
        return {"seen": ran}

    one_node(app, node)
    await client.submit("w", {"value": 1}, run_id="r")
    tasks = []
    with pymongo.MongoClient(mongo_uri) as raw:
        for number in range(5):
            process = new_app(max_crashes=2)
            process._build, process.codec = app._build, app.codec
            tasks.append(asyncio.create_task(process.ainvoke(None, run_id="r")))
            await until(lambda number=number: len(deaths) == number + 1)
            raw[database]["runners"].update_many({}, {"$set": {"state": "dead"}})
        is_dying = False
        assert raw[database]["runs"].find_one({"_id": "r"})["crashes"] == 4
    out = await app.ainvoke(None, run_id="r")
    assert out["seen"] == list(range(6))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await app.aclose()
    await endpoint.aclose()


def test_parking_needs_a_number(new_app: Callable[..., App]) -> None:
    """A limit of no crash at all is refused."""
    with pytest.raises(ConfigurationError, match="at least 1"):
        new_app(max_crashes=0)
