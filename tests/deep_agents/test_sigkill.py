"""Real processes that run researchers in parallel, and real SIGKILLs: the next process goes on, and nothing that was recorded runs again."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import random
import signal
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pymongo
import pytest

from mongo_durable.store.failpoints import FailPoint
from tests.deep_agents.worker import Order, main
from tests.support.invariants import assert_invariants

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.deep_agents.worker", "mongo_durable.langgraph.deep_agents.building"])

KILLS = 2
"""At writes; one more is inside a body."""
PATIENCE_S = 100.0


def do(order: Order) -> dict[str, Any] | None:
    """Have a process follow the order: what it told, or None if it was killed."""
    pipe, theirs = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=main, args=(order, theirs), daemon=True)
    process.start()
    theirs.close()
    told = None
    with contextlib.suppress(EOFError):
        assert pipe.poll(PATIENCE_S), "the process is silent"
        told = pipe.recv()
    process.join(PATIENCE_S)
    assert process.exitcode == (0 if told is not None else -signal.SIGKILL)
    process.close()
    pipe.close()
    return told


def lines(path: Path) -> tuple[Counter[str], dict[str, set[str]], Counter[str]]:
    """What stands in the file: bodies of tools, inputs of models by position, and how often models ran."""
    bodies: Counter[str] = Counter()
    models: Counter[str] = Counter()
    inputs: dict[str, set[str]] = defaultdict(set)
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if line["kind"] == "input":
            inputs[line["name"]].add(line["given"])
        else:
            (models if line["kind"] == "LLM" else bodies)[f"{line['name']} {line['given']}"] += 1
    return bodies, inputs, models


def positions(uri: str, database: str, run_id: str) -> set[str]:
    """Where the run's effects stand."""
    with pymongo.MongoClient(uri) as client:
        return set(client[database]["activity_events"].distinct("position", {"run_id": run_id, "type": "activity.started"}))


def starts(uri: str, database: str, run_id: str) -> Counter[str]:
    """How often the start of each call of `plain` was committed."""
    with pymongo.MongoClient(uri) as client:
        found = client[database]["activity_events"].find({"run_id": run_id, "type": "activity.started", "name": "plain"})
        return Counter(f"plain {each['value']!r}" for each in found)


@pytest.mark.parametrize("is_sync", [False, True], ids=["async", "sync"])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_researchers_survive_sigkill(mongo_uri: str, database: str, tmp_path: Path, count: int, is_sync: bool) -> None:
    """Killed at writes and once inside a sub-agent's tool, again and again: the same paths, inputs and messages as a run that nobody killed."""
    seed = random.Random(f"{count}{is_sync}")

    def order(name: str, **more: Any) -> Order:
        return Order(uri=mongo_uri, database=database, effects=str(tmp_path / name), run_id=f"{name}-{count}", count=count, is_sync=is_sync, **more)

    calm = do(order("calm"))
    assert calm is not None
    appends = calm["hits"][FailPoint.APPEND_AFTER]
    killed = 0
    for number in range(KILLS):
        point = seed.choice([FailPoint.APPEND_BEFORE, FailPoint.APPEND_AFTER, FailPoint.SUSPEND_AFTER if number == 1 else FailPoint.APPEND_AFTER])
        hit = 1 if point is FailPoint.SUSPEND_AFTER else seed.randrange(1, max(2, appends // 2))
        killed += do(order("shaken", kill_at=(point, hit))) is None
    killed += do(order("shaken", die_in="Z.again")) is None
    assert killed >= 2
    end = do(order("shaken"))
    assert end is not None
    assert end["said"] == calm["said"] or _without_run(end["said"]) == _without_run(calm["said"])
    assert positions(mongo_uri, database, f"shaken-{count}") == positions(mongo_uri, database, f"calm-{count}")
    (calm_bodies, _, calm_models), (bodies, inputs, models) = lines(tmp_path / "calm"), lines(tmp_path / "shaken")
    assert {position: len(given) for position, given in inputs.items()} == dict.fromkeys(inputs, 1)
    assert set(bodies) == set(calm_bodies)
    committed = starts(mongo_uri, database, f"shaken-{count}")
    for call, ran in bodies.items():
        if call.startswith("plain"):
            assert ran <= committed[call], call
    assert set(models) == set(calm_models)
    assert sum((models - calm_models).values()) <= killed * (count + 1)
    assert_invariants(mongo_uri, database)


def _without_run(said: list[Any]) -> list[Any]:
    """Ids that derive from the run's name differ between two runs."""
    return [(kind, content, each if not str(each).startswith("md-") else "md") for kind, content, each in said]
