"""Records the golden histories: `python -m tests.golden.record [name …]`, with `MONGO_DURABLE_URI` naming a replica set.

To be run by hand, for a shape that has no file yet: without names it records those that are missing, and leaves the others as they are.
"""

from __future__ import annotations

import os
import random
import sys
import uuid
from dataclasses import dataclass

import pymongo

from tests.golden.histories import FOLDER, dump, path_of, run_id_of
from tests.langgraph.bench import Bench, Killer, fragile_attempts
from tests.langgraph.kit import Ledger
from tests.langgraph.shapes import SHAPES, Shape

WORKFLOW = "tested"
BY_NAME = {each.name: each for each in SHAPES}


@dataclass(frozen=True, slots=True)
class Golden:
    """A history to record: of which shape, and whether its attempts are abandoned now and then (a seed)."""

    shape: str
    seed: int | None = None

    @property
    def name(self) -> str:
        """Of the file."""
        return self.shape if self.seed is None else f"{self.shape}, abandoned"

    @property
    def made(self) -> Shape:
        """The shape itself."""
        return BY_NAME[self.shape]


GOLDEN = [
    Golden("parallel nodes", seed=3),
    Golden("loop"),
    Golden("child graph, two deep"),
    Golden("three questions in one node", seed=5),
    Golden("Send to nodes"),
    Golden("Command(goto) and an effect in each node"),
    Golden("create_agent as root", seed=7),
    Golden("create_agent inside durable tools"),
    Golden("tools called in a body"),
    Golden("effects and a question in edge functions"),
    Golden("human in the loop, one question a call"),
    Golden("entrypoint and tasks"),
    Golden("app.gather of everything that asks"),
    Golden("timers"),
]


class Recorder(Bench):
    """A bench whose next run has a name that is known."""

    run_id = ""

    def new_run(self) -> str:
        """The run to record."""
        return self.run_id


def record(uri: str, golden: list[Golden]) -> None:
    """Run these and write their histories."""
    database = f"golden_{uuid.uuid4().hex[:12]}"
    bench = Recorder(uri, database)
    try:
        with fragile_attempts():
            for each in golden:
                bench.run_id = run_id_of(each.name)
                killer = Killer(random.Random(each.seed)) if each.seed is not None else None
                told = bench.complete(each.made.make, each.made.given, "async", Ledger(), killer=killer, pause_s=0)
                size = dump(each.name, told.events)
                print(f"{path_of(each.name).name}: {len(told.events)} events, {told.attempts} attempts, {size} bytes")
        bench.close()
    finally:
        with pymongo.MongoClient(uri) as client:
            client.drop_database(database)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    named = sys.argv[1:]
    record(os.environ["MONGO_DURABLE_URI"], [each for each in GOLDEN if (each.name in named if named else not path_of(each.name).exists())])
