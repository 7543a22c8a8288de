"""Two processes want one run; one of them has it."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pymongo
import pytest

from mongo_durable.errors import DraftConflict, LeaseLost, ResolutionConflict, Superseded, TokenUsed
from tests.crash.processes import Worker, World
from tests.crash.worker import PATIENCE_S
from tests.support.invariants import Received, assert_invariants

IN_TURN = {"workflow": "purchase-in-turn"}


def stop(worker: Worker) -> None:
    """Stop a process, and wait until it stands still."""
    worker.signal(signal.SIGSTOP)
    state = Path("/proc", str(worker.pid), "stat")
    until = time.monotonic() + PATIENCE_S
    while state.read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < until
        os.sched_yield()


@pytest.mark.parametrize("role", ["invoke", "work"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_process_that_stood_still_past_its_lease_writes_nothing_more(role: str, moment: str, world: World) -> None:
    """A process is stopped inside an effect until another has finished the run: when it goes on, it records nothing, and knows why (I2)."""
    if role == "work":
        world.do("submit", **IN_TURN)
    loser = world.start(role, body=("quote", moment, "wait"), **IN_TURN)
    loser.until_in_body()
    stop(loser)
    if role == "invoke":
        assert world.run().status == "running"
    end = world.finish(**IN_TURN)
    events = world.events()
    loser.signal(signal.SIGCONT)
    loser.go_on()
    report = loser.end()
    assert report is not None
    if role == "invoke":
        assert isinstance(report.error, Superseded | LeaseLost)
    else:
        assert any("[superseded]" in line or "[lease_lost]" in line for line in report.log)
        assert report.result == {"status": "completed"}
    assert end.status == "completed"
    assert world.events() == events
    rival_started = next(event["seq"] for event in events if event["type"] == "attempt.started" and event["fence"] > 1)
    assert {event["fence"] for event in events if event["seq"] > rival_started}.isdisjoint({1})
    # Its body, which may run again, did; nothing that it would have come to next.
    assert world.lines() == {"quote": 2, "book": 1, "approve": 1}
    assert_invariants(world.uri, world.database)


@pytest.mark.parametrize("role", ["invoke", "work"])
def test_a_process_that_lost_its_run_meanwhile_stops_at_the_next_write(role: str, world: World) -> None:
    """The rival is still at work when the stopped process goes on: the loser's next write is refused, and the rival is not disturbed."""
    if role == "work":
        world.do("submit", **IN_TURN)
    loser = world.start(role, body=("quote", "before", "wait"), **IN_TURN)
    loser.until_in_body()
    stop(loser)
    rival = world.start("work", body=("book", "before", "wait"), **IN_TURN)
    rival.until_in_body()
    events = world.events()
    loser.signal(signal.SIGCONT)
    loser.go_on()
    if role == "invoke":
        report = loser.end()
        assert report is not None
        assert isinstance(report.error, Superseded | LeaseLost)
        assert world.events() == events
    rival.go_on()
    assert rival.end() is not None
    if role == "work":
        report = loser.end()
        assert report is not None
        assert any("[superseded]" in line or "[lease_lost]" in line for line in report.log)
    later = [event["fence"] for event in world.events() if event["seq"] > events[-1]["seq"]]
    assert 1 not in later
    assert world.finish(**IN_TURN).status == "completed"
    assert world.lines() == {"quote": 2, "book": 1, "approve": 1}
    assert_invariants(world.uri, world.database)


def test_one_of_fifty_answers_wins(world: World) -> None:
    """Fifty tasks of five processes answer one frontier at once, by client, token, draft and command line: one answer stands; the same one gets its
    receipt, others a conflict (I6)."""
    world.do("submit")
    world.do("work")
    workers = [world.start("resolve often") for _ in range(5)]
    for worker in workers:
        worker.until_in_body()
    for worker in workers:
        worker.go_on()
    results: list[dict[str, Any]] = []
    for worker in workers:
        report = worker.end()
        assert report is not None
        results.append(report.result)
    receipts = [each for result in results for each in result["receipts"]]
    errors = Counter(type(each) for result in results for each in result["errors"])
    assert len(receipts) == 25
    assert errors.total() == 25
    assert errors.keys() <= {ResolutionConflict, TokenUsed, DraftConflict}
    assert len({(each.answers_digest, each.resolved_by, each.resolved_at) for each in receipts}) == 1
    snapshot = assert_invariants(
        world.uri, world.database, [Received(run_id=each.run_id, generation=each.generation, answers_digest=each.answers_digest) for each in receipts]
    )
    assert len(snapshot.resolutions["po-17"]) == 1
    assert world.finish().status == "completed"


def test_what_was_accepted_is_executed(world: World) -> None:
    """A process dies as soon as `submit` has returned: a runner that starts later executes the run (I10)."""
    assert world.kill_in("submit and die") is None
    with pymongo.MongoClient(world.uri) as client:
        assert client[world.database]["runs"].count_documents({"status": "pending"}) == 1
    assert world.finish().status == "completed"
    assert world.lines() == {"quote": 1, "approve": 1, "book": 1}
    assert_invariants(world.uri, world.database)
