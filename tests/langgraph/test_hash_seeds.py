"""Whether anything depends on the order of a set or on a hash: the same graphs in processes with different hash seeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.langgraph.bench import Bench
from tests.langgraph.digests import SEEDS, SHAPES_AT

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_positions_do_not_depend_on_the_hash_seed(bench: Bench) -> None:
    """Final states, frontiers and positions of effects are the same whatever PYTHONHASHSEED is, abandoned attempts or not."""
    command = [sys.executable, "-W", "error", "-m", "tests.langgraph.digests", bench.uri, bench.database]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    # Each has its runs and its lease to itself in the one database.
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=environment | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True) for seed in ("1", "2", "3")
    ]
    told = [json.loads(process.communicate()[0] or "null") for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    bench.attempts += sum(each["attempts"] for each in told)
    digests = [each["digests"] for each in told]
    assert digests[0] == digests[1] == digests[2]
    in_peace = {name: each for name, each in digests[0].items() if not name.endswith("abandoned")}
    assert in_peace == {name: digests[0][f"{name} - abandoned"] for name in in_peace}
    assert len(in_peace) == len(SHAPES_AT) + len(SEEDS)
