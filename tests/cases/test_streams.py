"""Change streams that lose their place, fail, fall silent, or that too many wait on: a hint may be lost, never the work that it hinted at."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from statistics import median
from typing import Any

import pymongo
import pytest
from langgraph.types import interrupt
from pymongo import AsyncMongoClient

from mongo_durable import App, DurableClient, Runner
from mongo_durable.protocol.events import EventType
from tests.cases.workshop import PATIENCE_S, Workshop, chain
from tests.engine.workflows import Commands, until, until_known
from tests.langgraph.kit import State
from tests.support.change_streams import cursors
from tests.support.invariants import assert_invariants
from tests.support.server_faults import failing

NO_SWEEP: dict[str, Any] = {"lease": timedelta(minutes=20), "sweep_interval": timedelta(minutes=10)}


class Stage:
    """A database of one test's own, so that faults can be made for its change streams alone, and a runner in it that no sweep helps.

    Attributes:
        ran: How often each run's effect happened.
        commands: What the runner sent, its stream included.
    """

    def __init__(self, uri: str, database: str, client: DurableClient, runner: Runner, commands: Commands, ran: Counter[str]) -> None:
        self.uri = uri
        self.database = database
        self.client = client
        self.runner = runner
        self.commands = commands
        self.ran = ran

    def failing(self, commands: list[str], **fault: Any) -> Any:
        """The server fails these commands on the heads."""
        return failing(self.uri, commands, namespace=f"{self.database}.runs", **fault)

    async def ask(self, *run_ids: str) -> None:
        """Submit runs and wait for their questions."""
        for run_id in run_ids:
            await self.client.submit("asks", {"lines": [], "work": run_id}, run_id=run_id)
        await self.until_all("suspended", *run_ids)

    async def answer(self, run_id: str) -> None:
        """Say yes."""
        frontier = (await self.client.get_run(run_id)).frontier
        assert frontier is not None
        await self.client.resolve(run_id, {frontier.entries[0].activity_id: "yes"})

    async def write(self) -> None:
        """Something happens elsewhere in the database."""
        async with AsyncMongoClient(self.uri) as other:
            await other[self.database]["noise"].insert_one({})

    async def until_all(self, status: str, *run_ids: str) -> None:
        """Look, without a stream, until these runs have come to a status."""
        async with asyncio.timeout(PATIENCE_S):
            while not {run.run_id for run in await self.client.list_runs(status=status)} >= set(run_ids):  # noqa: ASYNC110 - it is other processes' doing
                await asyncio.sleep(0.02)


@asynccontextmanager
async def stage_of(uri: str, database: str, **options: Any) -> AsyncIterator[Stage]:
    """A runner of a workflow that asks and then has an effect."""
    commands, ran = Commands(), Counter[str]()
    async with AsyncMongoClient(uri, event_listeners=[commands]) as held:
        app = App("asks", client=held, database=database)

        @app.activity(idempotent=True)
        async def act(run_id: str) -> str:
            ran[run_id] += 1
            return run_id

        async def node(state: State) -> State:
            answer = interrupt("sure?")
            return {"lines": [answer, await act(state["work"])]}

        graph = chain(node=node)
        app.entrypoint(lambda: graph)
        async with DurableClient(uri, database=database) as client, Runner([app], **{**NO_SWEEP, **options}) as runner:
            await until(lambda: any(name == "getMore" for name, _, _ in commands.sent))  # its stream is open
            yield Stage(uri, database, client, runner, commands, ran)
    assert_invariants(uri, database)


@pytest.fixture
async def stage(mongo_uri: str, database: str) -> AsyncIterator[Stage]:
    """A stage with the usual options."""
    async with stage_of(mongo_uri, database) as made:
        yield made


@pytest.mark.parametrize("code", [286, 136, 280])
async def test_an_answer_that_came_while_history_was_lost_is_found(code: int, stage: Stage) -> None:
    """CASES 76: the stream loses its history, again and again, while a run is answered: it goes on once, though no sweep is due for minutes."""
    await stage.ask("run")
    with stage.failing(["getMore"], errorCode=code) as strikes:
        await until(lambda: strikes() >= 2)
        await stage.answer("run")
        await stage.write()  # the answer is not the last thing that happened: a stream from now on does not bring it
        struck = strikes()
        await until(lambda: strikes() > struck)
    await stage.until_all("completed", "run")
    assert stage.ran == {"run": 1}
    assert Counter(event.type for event in await stage.client.history("run"))[EventType.ATTEMPT_STARTED] == 2
    await stage.ask("later")  # the stream is well again


async def test_a_storm_of_stream_faults_loses_and_doubles_nothing(stage: Stage) -> None:
    """CASES 76: half of all reads of the stream fail, in several ways in turn, while runs come and are answered: each effect happens once."""
    runs = [f"run-{number}" for number in range(12)]
    for number, fault in enumerate(({"errorCode": 286}, {"closeConnection": True}, {"errorCode": 11601})):
        part = runs[number::3]
        with stage.failing(["getMore", "aggregate"], mode={"activationProbability": 0.5}, **fault) as strikes:
            await stage.ask(*part)
            for run_id in part:
                await stage.answer(run_id)
            await until(lambda: strikes() > 0)
        await stage.until_all("completed", *part)
    assert stage.ran == Counter(runs)


async def test_a_lost_place_is_never_asked_for_again(stage: Stage) -> None:
    """CASES 77: after two lost histories the stream is opened twice more, from the server's time and never by a token, and then stays open."""
    first = stage.commands.change_streams()
    with stage.failing(["getMore"], errorCode=286, mode={"times": 2}) as strikes:
        await until(lambda: strikes() == 2)
        await until(lambda: stage.commands.change_streams() == first + 2)
    await stage.ask("run")
    await stage.answer("run")
    await stage.until_all("completed", "run")
    opened = [each["pipeline"][0]["$changeStream"] for each in stage.commands.of("aggregate", "runs") if "$changeStream" in each["pipeline"][0]]
    assert len(opened) == first + 2
    assert all("startAtOperationTime" in each and not {"resumeAfter", "startAfter"} & set(each) for each in opened)


async def test_a_blind_stream_shows_and_the_sweep_does_its_work(mongo_uri: str, database: str) -> None:
    """CASES 79: the stream goes blind without an error: its lag grows for everybody to see, and runs are taken and resumed all the same."""
    async with stage_of(mongo_uri, database, lease=timedelta(seconds=4), sweep_interval=timedelta(seconds=0.1)) as stage:
        process = stage.runner.process
        assert process is not None
        with stage.failing(["getMore"], blockConnection=True, blockTimeMS=6_000) as strikes:
            await until(lambda: strikes() > 0)
            await stage.ask("run")
            await stage.answer("run")
            await stage.until_all("completed", "run")
            await until(lambda: (process.wakeups.lag or timedelta(0)) > timedelta(seconds=2))
        await until(lambda: (process.wakeups.lag or timedelta.max) < timedelta(seconds=1.5))


async def test_a_thousand_waits_share_one_stream_and_hold_nobody_up(workshop: Workshop) -> None:
    """CASES 80, 81: a thousand waits through a pool of ten have one cursor and keep none of its connections: a call beside them is quick."""

    async def node(state: State) -> State:
        return {"lines": ["done"]}

    def open_now() -> int:
        with pymongo.MongoClient(workshop.uri) as administration:
            return len(cursors(administration, workshop.database))

    async def are_two_open() -> bool:
        # The pool's, and that of the runner, whose app has another client. One that has just been closed may be there for a moment.
        return await asyncio.to_thread(open_now) <= 2

    def make(app: App) -> Any:
        return chain(node=node)

    async with AsyncMongoClient(workshop.uri, maxPoolSize=10) as pool, DurableClient(client=pool, database=workshop.database) as client:
        waiting = [(await client.submit("nobody's", {}, run_id=workshop.run(f"waiting-{number}"))).run_id for number in range(20)]
        waits = [asyncio.create_task(client.wait(waiting[number % 20], timeout=PATIENCE_S)) for number in range(1000)]
        took = []
        async with workshop.runner(make):
            for number in range(5):
                started = time.monotonic()
                run = await client.submit(workshop.name, {"lines": []}, run_id=workshop.run(number))
                assert (await run.wait(PATIENCE_S)).output == {"lines": ["done"]}
                took.append(time.monotonic() - started)
            await until_known(are_two_open)
        assert not any(wait.done() for wait in waits)
        assert min(took) < 1
        for run_id in waiting:
            await client.cancel(run_id)
        assert Counter(each.status for each in await asyncio.gather(*waits)) == {"cancelled": 1000}


async def test_writes_elsewhere_do_not_delay_the_hints(stage: Stage) -> None:
    """CASES 82: while another collection is written without a pause, runs are taken and resumed at once, by one stream that reads none of it."""
    writing = asyncio.Event()

    async def write() -> None:
        async with AsyncMongoClient(stage.uri) as other:
            noise = other[stage.database]["noise"]
            while True:
                await noise.insert_many([{"status": "pending", "n": number} for number in range(500)])
                writing.set()

    writer = asyncio.create_task(write())
    await writing.wait()
    read, took = sum(name == "getMore" for name, _, _ in stage.commands.sent), []
    for number in range(5):
        started = time.monotonic()
        await stage.ask(f"run-{number}")
        await stage.answer(f"run-{number}")
        await stage.until_all("completed", f"run-{number}")
        took.append(time.monotonic() - started)
    read = sum(name == "getMore" for name, _, _ in stage.commands.sent) - read
    writer.cancel()
    await asyncio.wait([writer])
    assert median(took) < 5
    assert stage.commands.change_streams() == 1
    assert read <= 5 * 6 + sum(took) + 5
