"""`mongo-durable doctor`, and what the other commands say of runs that wait."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any

import pymongo

from mongo_durable import App, Runner, SyncDurableClient
from tests.cli.conftest import Cli
from tests.engine.workflows import State, one_node


def test_a_healthy_database_needs_no_doctor(cli: Cli) -> None:
    """With nothing that waits in vain the exit code is 0, and it says so."""
    ended = cli("doctor")
    assert ended.exit_code == 0, ended.output
    assert "0 runners live" in ended.stdout
    assert "0 runs unserved" in ended.stdout


def test_what_goes_nowhere_is_shown_with_its_reason(cli: Cli, client: SyncDurableClient, mongo_uri: str, database: str) -> None:
    """Runs that nobody serves, that are held back or that were parked are listed, each with why; the exit code is 1."""
    client.submit("orders", {}, run_id="nobody-has-it", version="9")
    client.submit("orders", {}, run_id="held")
    client.submit("orders", {}, run_id="parked")
    with pymongo.MongoClient[Any](mongo_uri) as raw:
        heads = raw[database]["runs"]
        later = {"status": "ready", "news": "of it", "held_back": "CorruptHistory: broken", "available_at": {"$add": ["$$NOW", 60_000]}}
        heads.update_one({"_id": "held"}, [{"$set": later}])
        parked = {"status": "failed", "ended_at": "$$NOW", "error": {"type": "RunParked", "message": "5 processes died in a row"}}
        heads.update_one({"_id": "parked"}, [{"$set": parked}])

    async def serve() -> None:
        app = one_node(App("orders", uri=mongo_uri, database=database), lambda _: {})
        async with Runner([app]):
            found = await asyncio.to_thread(cli, "doctor", "--json")
            assert found.exit_code == 1, found.output
            shown = json.loads(found.stdout)
            assert [each["serves"] for each in shown["runners"]] == [["orders 1"]]
            assert [(each["run_id"], each["why"]) for each in shown["unserved"]] == [
                ("nobody-has-it", "no live runner serves workflow 'orders' version '9'")
            ]
            (held,) = shown["held_back"]
            assert held["run_id"] == "held"
            assert held["why"].endswith("CorruptHistory: broken")
            assert [(each["run_id"], each["why"]) for each in shown["parked"]] == [("parked", "5 processes died in a row")]
            said = (await asyncio.to_thread(cli, "doctor")).stdout
            assert "1 runner live" in said
            assert "parked: 5 processes died in a row" in said

    asyncio.run(serve())
    unserved = json.loads(cli("runs", "--unserved", "--json").stdout)
    assert {each["run_id"] for each in unserved} == {"nobody-has-it", "held"}
    assert "no live runner serves" in cli("runs", "--version", "9").stdout
    assert "waits: no live runner serves" in cli("show", "nobody-has-it").stdout
    assert cli("runs", "--unserved", "--status", "ready").exit_code == 2


def test_show_tells_of_timers_and_defaults(cli: Cli, client: SyncDurableClient, mongo_uri: str, database: str) -> None:
    """`show` says when a timer fires, that it fired, and that a question got its default."""
    app = App("naps", uri=mongo_uri, database=database)

    async def node(state: State) -> dict[str, Any]:
        await app.sleep(seconds=2.5)
        return {"seen": [app.interrupt("approval", "may I?", expires_in=timedelta(seconds=0.2), default="no")]}

    one_node(app, node)

    async def run() -> None:
        async with Runner([app], sweep_interval=timedelta(seconds=0.2)):
            await asyncio.to_thread(client.submit, "naps", {"value": 1}, run_id="po-17")

            def is_ended() -> bool:
                return client.get_run("po-17").is_ended

            async with asyncio.timeout(60):
                while not await asyncio.to_thread(is_ended):
                    pass

    asyncio.run(run())
    lines = [line.strip("│├└─ ") for line in cli("show", "po-17").stdout.splitlines()]
    first, second = (next(line for line in lines if line.startswith(f"attempt {number} ")) for number in (1, 2))
    assert "gave the run back until" in first
    assert "suspended on frontier 1" in second
    timers = [line for line in lines if " TIMER " in line]
    assert "sleeps until" in timers[0]
    assert timers[1].endswith("fired")
    assert any("frontier 1" in line and "expired" in line for line in lines)
    assert 'default  "no"' in lines
