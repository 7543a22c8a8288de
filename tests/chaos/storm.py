"""One chaos run: servers, workers, people, weather; then calm, and the judgement."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from mongo_durable.dev import DevMongo
from mongo_durable.protocol.events import EventType, RunStatus
from tests.chaos import checker
from tests.chaos.checker import Story
from tests.chaos.outside import BEGUN
from tests.chaos.people import People
from tests.chaos.weather import Crew, Weather, forecast
from tests.chaos.worker import Post
from tests.chaos.workload import TRANSACTIONAL, orders

DATABASE = "chaos"
LEASE = timedelta(seconds=2)
_MORE_THAN_ANYBODY_ORDERS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it.

    Attributes:
        faults: Everything that is wrong; none is well.
        table: Name and figure of what happened.
    """

    seed: int
    faults: list[str]
    table: list[tuple[str, str]]

    def as_markdown(self) -> str:
        """The table, for people."""
        return "\n".join(["| what | how often |", "|---|---|", *(f"| {name} | {figure} |" for name, figure in self.table)])


class Clock:
    """Prints what is said, with the seconds since it was made."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, text: str) -> None:
        """Print."""
        print(f"{time.monotonic() - self._started:6.1f} s  {text}", flush=True)


async def storm(
    *,
    seed: int,
    duration_s: float,
    patience_s: float,
    workers: int = 3,
    at_once: int = 12,
    nodes: int = 3,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Let chaos rage over a three-node replica set and a few workers, and judge what is left.

    Args:
        seed: Of the orders and the faults.
        duration_s: How long there are faults.
        patience_s: How long everything that was accepted may take to end, once there are no faults any more.
        workers: Processes that execute runs.
        at_once: Runs that are live at a time.
    """
    mongo = DevMongo(nodes=nodes, test_commands=True)
    uri = await asyncio.to_thread(mongo.start)
    try:
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            post = Post(uri=uri, database=DATABASE, effects=Path(folder, "effects"), log=Path(folder, "log"), lease=LEASE)
            crew = Crew(post, workers)
            people = People(uri, DATABASE, orders(seed, _MORE_THAN_ANYBODY_ORDERS), post.effects, at_once=at_once, seed=seed)
            weather = Weather(mongo, crew, say)
            faults = forecast(seed, duration_s, LEASE.total_seconds())
            try:
                await asyncio.to_thread(weather.prepare_all)
                await _live_through(people, weather.rage(faults), patience_s, say)
                crew.fill()  # to hear of those who have just ended
            finally:
                crew.close()
            log = [json.loads(line) for line in post.log.read_text().splitlines()] if post.log.exists() else []
            story = await checker.gather(uri, DATABASE, people.told, post.effects, pauses=crew.pauses, wrong=crew.wrong, log=log)
    finally:
        await asyncio.to_thread(mongo.stop)
    found = list(checker.faults(story))
    return Outcome(seed=seed, faults=found, table=_table(story, weather.happened, crew, found))


async def _live_through(people: People, rage: Coroutine[Any, Any, None], patience_s: float, say: Callable[[str], None]) -> None:
    """Let people live while faults rage, and then until everything that they were promised is done, or for as long as anybody waits."""
    living, raging = asyncio.create_task(people.live_and_let_live()), asyncio.create_task(rage)
    try:
        await asyncio.wait([living, raging], return_when=asyncio.FIRST_COMPLETED)
        if living.done():
            living.result()  # too early, so by an error
        await raging
        say(f"calm; {len(people.live)} runs are live")
        people.close_for_orders()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await living
        say(f"{len(people.live)} runs have not ended")
    finally:
        for task in (raging, living):
            task.cancel()
        await asyncio.gather(raging, living, return_exceptions=True)


def _table(story: Story, happened: Counter[str], crew: Crew, found: list[str]) -> list[tuple[str, str]]:
    events = Counter(each["type"] for events in story.snapshot.events.values() for each in events)
    ends = Counter(head["status"] for head in story.snapshot.runs.values())
    activities = checker.activities(story.snapshot).values()
    outcomes = [each for each in activities if each.outcome is not None]
    lease_s = crew.post.lease.total_seconds()
    long = sum(pause.went_on_at - pause.stopped_at > lease_s for pause in crew.pauses)
    reopened = sum(each["logger"].endswith("wakeups") for each in story.log)
    late = [line for line in story.lines if line.moment == BEGUN and line.lease_left < 0 and line.name not in TRANSACTIONAL]
    asked = [{entry["name"] for entry in each["entries"]} for frontiers in story.snapshot.frontiers.values() for each in frontiers]
    too_late = sum(number for what, number in story.told.heard.items() if what.startswith("resolve: ") and "receipt" not in what)
    again = sum(number for what, number in story.told.heard.items() if what.startswith("asked again"))
    rows: list[tuple[str, Any]] = [
        ("workers killed (SIGKILL)", happened["kill"]),
        ("workers stopped and continued, of these longer than the lease", f"{len(crew.pauses)}, {long}"),
        ("workers drained (SIGTERM)", happened["drain"]),
        ("primaries killed and started again", happened["primary killed"]),
        ("primaries stepped down", happened["primary steps down"]),
        ("primaries stopped and continued", happened["primary stands still"]),
        ("series of failed commands", happened["command"]),
        ("runs accepted", len(story.told.accepted)),
        ("runs completed, cancelled", f"{ends[RunStatus.COMPLETED]}, {ends[RunStatus.CANCELLED]}"),
        ("attempts", events[EventType.ATTEMPT_STARTED]),
        ("events", sum(events.values())),
        ("activities with an outcome", len(outcomes)),
        ("activities begun again by a later attempt", sum(len(each.fences) > 1 for each in activities)),
        ("transactional activities", len(story.ledger)),
        ("frontiers resolved", events[EventType.ACTIVITIES_RESOLVED]),
        ("people asked what had happened", sum("unknown_outcome" in names for names in asked)),
        ("answers that came too late", too_late),
        ("commands asked again, their answer lost", again),
        ("change streams opened again", reopened),
        ("effects begun under a lease that had just run out", len(late)),
        ("violations", len(found)),
    ]
    return [(name, str(figure)) for name, figure in rows]
