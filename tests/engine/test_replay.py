"""An attempt that finds a history takes what is recorded, writes nothing of it again, and says where the code differs from it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pymongo
import pytest
from langgraph.types import Command, interrupt

from mongo_durable import App, DurableClient, RetryPolicy
from mongo_durable.errors import ActivityFailed, NondeterminismError, RunFailed, Superseded
from mongo_durable.store import failpoints
from mongo_durable.store.failpoints import FailPoint
from tests.engine.workflows import CONFIG, Commands, Purchase, State, one_node, until

ONCE = {"model": 1, "pay": 1, "count": 10}
SEEN = ["go on", "paid 7", 10]


def check_replay(commands: Commands, *, tries: int = 1) -> None:
    """What was sent since is one claim (after so many tries), with the one read of the history, and the end."""
    assert len(commands.of("find", "activity_events")) == 1
    inserted = [[event["type"] for event in events] for events in commands.inserts()]
    assert inserted[0] == ["attempt.started"]
    assert inserted[-1][-1] == "run.completed"
    assert [kind for events in inserted[1:] for kind in events if kind != "step.committed"] == ["run.completed"]
    assert commands.counted()["findAndModify", "runs"] == tries + 1


async def test_a_retried_run_takes_everything_from_its_history(new_app: Callable[[], App], commands: Commands, operator: DurableClient) -> None:
    """I7: the replay of a failed run reads its history with one query, runs no recorded effect and writes nothing but its start and its end."""
    first = Purchase(new_app(), is_broken=True)
    with pytest.raises(ValueError, match="broken"):
        await first.app.ainvoke({"value": 1}, CONFIG, run_id="po-17")
    assert first.ran == ONCE
    await operator.retry("po-17")
    second = Purchase(new_app())
    second.app.graph()
    commands.sent.clear()
    out = await second.app.ainvoke(None, CONFIG, run_id="po-17")
    assert out["seen"] == SEEN
    assert second.ran == {}
    check_replay(commands)


async def test_a_run_lost_before_its_end_takes_everything_from_its_history(
    new_app: Callable[[], App], commands: Commands, mongo_uri: str, database: str
) -> None:
    """I7: so does the run of a process that was lost after its last effect and before the run's end."""
    is_lost = False

    async def lose(point: FailPoint) -> None:
        nonlocal is_lost
        if point is FailPoint.END_BEFORE and not is_lost:
            is_lost = True
            await asyncio.Event().wait()

    failpoints.handler = lose
    first = Purchase(new_app())
    lost = asyncio.create_task(first.app.ainvoke({"value": 1}, CONFIG, run_id="po-17"))
    await until(lambda: is_lost)
    with pymongo.MongoClient(mongo_uri) as client:
        client[database]["runners"].update_many({}, {"$set": {"state": "dead"}})
    second = Purchase(new_app())
    second.app.graph()
    commands.sent.clear()
    out = await second.app.ainvoke(None, CONFIG, run_id="po-17")
    assert out["seen"] == SEEN
    assert second.ran == {}
    check_replay(commands, tries=2)  # the first found that another process, dead as it turned out, had the run
    lost.cancel()
    await asyncio.wait([lost])


@pytest.mark.parametrize("why", ["broken", "diverged"])
async def test_a_verdict_that_could_not_be_recorded_gives_way(new_app: Callable[[], App], operator: DurableClient, why: str) -> None:
    """Who loses the run while it fails or diverges hears that it is lost: how the run ends is not this attempt's to say any more."""
    first = Changeable(new_app(), "pay", 1, is_broken=True)
    with pytest.raises(ValueError, match="broken"):
        await first.app.ainvoke({"value": 1}, CONFIG, run_id="po-17")
    await operator.retry("po-17")

    async def lose(point: FailPoint) -> None:
        if point is FailPoint.END_BEFORE:
            failpoints.handler = None
            await operator.cancel("po-17")

    failpoints.handler = lose
    second = Changeable(new_app(), "pay", 1, is_broken=True) if why == "broken" else Changeable(new_app(), "book", 1)
    with pytest.raises(Superseded) as lost:
        await second.app.ainvoke(None, CONFIG, run_id="po-17")
    assert ("ValueError" if why == "broken" else "NondeterminismError") in "".join(lost.value.__notes__)
    assert (await operator.get_run("po-17")).status == "cancelled"


# -- other code -------------------------------------------------------------------------------------------------------------------------------


class Changeable:
    """A workflow of one node with one effect; its code can be another one."""

    def __init__(self, app: App, effect: str, argument: int, *, is_broken: bool = False) -> None:
        self.app = app
        self.ran = 0

        @app.activity
        async def pay(amount: int) -> int:
            self.ran += 1
            return amount

        @app.activity(name="book")
        async def book(amount: int) -> int:
            self.ran += 1
            return amount

        @app.tool
        async def pay_by_tool(amount: int) -> int:
            """Pay."""
            self.ran += 1
            return amount

        async def node(state: State) -> dict[str, Any]:
            match effect:
                case "pay":
                    result = await pay(argument)
                case "book":
                    result = await book(argument)
                case _:
                    result = await pay_by_tool.ainvoke({"amount": argument})
            if is_broken:
                raise ValueError("broken")
            return {"seen": [result]}

        one_node(app, node)


@pytest.mark.parametrize(
    ("effect", "argument", "differs"),
    [("pay", 8, "input_digest"), ("book", 7, "name"), ("tool", 7, "kind")],
    ids=["input", "name", "kind"],
)
async def test_other_code_diverges(effect: str, argument: int, differs: str, new_app: Callable[[], App], operator: DurableClient) -> None:
    """Code that does something else than the history says runs nothing; the run diverges, says where and what, and goes on with the old code."""
    with pytest.raises(ValueError, match="broken"):
        await Changeable(new_app(), "pay", 7, is_broken=True).app.ainvoke({"value": 1}, CONFIG, run_id="po-17")
    await operator.retry("po-17")
    other = Changeable(new_app(), effect, argument)
    with pytest.raises(NondeterminismError) as caught:
        await other.app.ainvoke(None, CONFIG, run_id="po-17")
    assert caught.value.run_id == "po-17"
    assert other.ran == 0
    run = await operator.get_run("po-17")
    assert run.status == "diverged"
    assert run.error is not None
    assert run.error["type"] == "NondeterminismError"
    assert run.error["position"] == caught.value.position == "agent/1/node@1#1"
    expected, found = run.error["expected"], run.error["found"]
    assert (expected, found) == (caught.value.expected, caught.value.found)
    assert expected[differs] != found[differs]
    assert (await operator.retry("po-17")).status == "ready"
    right = Changeable(new_app(), "pay", 7)
    assert (await right.app.ainvoke(None, CONFIG, run_id="po-17"))["seen"] == [7]
    assert right.ran == 0


async def test_code_that_stops_short_diverges(new_app: Callable[[], App], operator: DurableClient) -> None:
    """Code that no longer reaches a recorded effect diverges, and names the effect."""
    with pytest.raises(ValueError, match="broken"):
        await Purchase(new_app(), is_broken=True).app.ainvoke({"value": 1}, CONFIG, run_id="po-17")
    await operator.retry("po-17")

    async def node(state: State) -> dict[str, Any]:
        return {"seen": []}

    with pytest.raises(NondeterminismError):
        await one_node(new_app(), node).ainvoke(None, CONFIG, run_id="po-17")
    run = await operator.get_run("po-17")
    assert run.status == "diverged"
    assert run.error is not None
    assert run.error["position"].startswith("agent/1/node@1#")


# -- failures ---------------------------------------------------------------------------------------------------------------------------------


class OddError(Exception):
    """A type that no process can rebuild by its name."""


class Failing:
    """A workflow of one node whose effects fail; the node looks at how."""

    def __init__(self, app: App, *, is_broken: bool = False) -> None:
        self.app = app
        self.ran = 0
        self.caught: list[Exception] = []

        @app.tool
        async def wrong(amount: int) -> str:
            """Fail."""
            self.ran += 1
            raise ValueError(f"not {amount}")

        @app.activity
        async def odd() -> None:
            self.ran += 1
            raise OddError("very")

        async def node(state: State) -> dict[str, Any]:
            for effect in (lambda: wrong.ainvoke({"amount": 7}), odd):
                try:
                    await effect()
                except (ValueError, ActivityFailed) as error:
                    self.caught.append(error)
            if is_broken:
                raise RuntimeError("broken")
            return {"seen": [str(error) for error in self.caught]}

        one_node(app, node)


async def test_a_recorded_failure_is_raised_again(new_app: Callable[[], App], operator: DurableClient) -> None:
    """A recorded failure replays as the same type and message; a type that cannot be rebuilt as ActivityFailed, in the first attempt too."""
    first = Failing(new_app(), is_broken=True)
    with pytest.raises(RuntimeError, match="broken"):
        await first.app.ainvoke({"value": 1}, CONFIG, run_id="po-17")
    await operator.retry("po-17")
    second = Failing(new_app())
    await second.app.ainvoke(None, CONFIG, run_id="po-17")
    assert (first.ran, second.ran) == (2, 0)
    for caught in (first.caught, second.caught):
        assert [type(error) for error in caught] == [ValueError, ActivityFailed]
        assert str(caught[0]) == "not 7"
        assert isinstance(caught[1], ActivityFailed)
        assert caught[1].error_type.endswith("OddError")
        assert "very" in str(caught[1])
    assert str(first.caught[1]) == str(second.caught[1])


async def test_tries_are_inside_one_activity(new_app: Callable[[], App], operator: DurableClient) -> None:
    """A retry policy tries again before the outcome is recorded: one start and one outcome, and only for the errors it names."""
    app = new_app()
    tries: Counter[str] = Counter()
    policy = RetryPolicy(max_attempts=3, initial_interval=timedelta(0), jitter=timedelta(0), retry_on=ConnectionError)

    @app.activity(retry=policy)
    async def flaky() -> str:
        tries["flaky"] += 1
        if tries["flaky"] < 3:
            raise ConnectionError("busy")
        return "done"

    @app.activity(retry=policy)
    async def never() -> str:
        tries["never"] += 1
        raise ConnectionError("gone")

    @app.activity(retry=policy)
    async def wrong() -> str:
        tries["wrong"] += 1
        raise ValueError("no")

    async def node(state: State) -> dict[str, Any]:
        seen: list[Any] = [await flaky()]
        with pytest.raises(ConnectionError, match="gone"):
            await never()
        with pytest.raises(ValueError, match="no"):
            await wrong()
        return {"seen": seen}

    assert (await one_node(app, node).ainvoke({"value": 1}, CONFIG, run_id="po-17"))["seen"] == ["done"]
    assert tries == {"flaky": 3, "never": 3, "wrong": 1}
    kinds = Counter((event.type.value, event.name) for event in await operator.history("po-17") if event.name)
    assert kinds == {
        ("activity.started", "flaky"): 1,
        ("activity.completed", "flaky"): 1,
        ("activity.started", "never"): 1,
        ("activity.failed", "never"): 1,
        ("activity.started", "wrong"): 1,
        ("activity.failed", "wrong"): 1,
    }


async def test_a_failed_run_says_why(new_app: Callable[[], App], operator: DurableClient) -> None:
    """A run whose graph raised has failed with the error's type and message, for everybody who asks."""
    with pytest.raises(ValueError, match="broken"):
        await Purchase(new_app(), is_broken=True).app.ainvoke({"value": 1}, CONFIG, run_id="po-17")
    run = await operator.get_run("po-17")
    assert (run.status, run.error) == ("failed", {"type": "ValueError", "message": "broken"})
    with pytest.raises(RunFailed):
        run.result()


# -- answers in the process that executes the run ------------------------------------------------------------------------------------------


async def test_a_process_without_a_lease_answers_first(new_app: Callable[[], App], commands: Commands, operator: DurableClient) -> None:
    """Answers wait for no lease: they are recorded, and then the run is claimed."""
    first, second = new_app(), new_app()

    async def node(state: State) -> dict[str, Any]:
        return {"seen": [interrupt("may I?")]}

    for app in (first, second):
        one_node(app, node)
    await first.ainvoke({"value": 1}, CONFIG, run_id="po-17")
    commands.sent.clear()
    assert (await second.ainvoke(Command(resume="yes"), CONFIG))["seen"] == ["yes"]
    order = [name for name, collection, _ in commands.sent if collection in ("resolutions", "runners")]
    assert order[:2] == ["insert", "update"]
    assert [event.fence for event in await operator.history("po-17") if event.type == "attempt.started"] == [1, 2]


async def test_two_calls_of_one_process_answer_alike(new_app: Callable[[], App], operator: DurableClient) -> None:
    """One of them goes on with the run, and the other waits for what comes of it; so do two calls that start the same run."""
    app = new_app()
    ran = 0

    @app.activity
    async def act() -> str:
        nonlocal ran
        ran += 1
        await begun.wait()
        return "done"

    async def node(state: State) -> dict[str, Any]:
        return {"seen": [await act(), interrupt("may I?")]}

    begun = asyncio.Event()
    one_node(app, node)
    await app.process().lease()
    starts = [asyncio.create_task(app.ainvoke({"value": 1}, CONFIG, run_id="po-17")) for _ in range(2)]
    await until(lambda: ran == 1)
    await until(lambda: any(listener.run_id == "po-17" for listener in app.process().wakeups._listeners))
    begun.set()
    one, other = await asyncio.gather(*starts)
    assert one["__interrupt__"] == other["__interrupt__"]
    answers = [app.ainvoke(Command(resume="yes"), CONFIG, run_id="po-17") for _ in range(2)]
    assert await asyncio.gather(*answers) == [{"value": 1, "seen": ["done", "yes"]}] * 2
    assert ran == 1
    assert [event.fence for event in await operator.history("po-17") if event.type == "attempt.started"] == [1, 2]
