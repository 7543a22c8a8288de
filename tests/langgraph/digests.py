"""Prints what some graphs come to, as digests: for comparing processes that differ in nothing but the order of their sets.

Run as `python -m tests.langgraph.digests URI DATABASE`.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tests.langgraph.bench import Bench, Colour, Drive, Killer, Told, fragile_attempts
from tests.langgraph.kit import Kit, Ledger
from tests.langgraph.shapes import NO_LINES, SHAPES
from tests.langgraph.test_random_graphs import Builder, invented_for

SHAPES_AT = {"Send to child graphs that Send": 1, "create_agent as root": 0, "entrypoint and tasks": 1, "app.gather of everything that asks": 0}
"""Names of shapes, and how deep they are nested."""
SEEDS = (5, 8)
"""Of random graphs."""


def digested(told: Told) -> dict[str, str]:
    """Final state, frontiers and positions of effects."""
    shown = {"state": told.state, "frontiers": told.frontiers, "positions": told.positions}
    return {name: hashlib.sha256(json.dumps(each, sort_keys=True, default=repr).encode()).hexdigest() for name, each in shown.items()}


def cases() -> Iterator[tuple[str, Callable[[Kit], Any], Any, Colour, Drive]]:
    """Each graph with what it is run with and how."""
    for shape in SHAPES:
        if shape.name in SHAPES_AT:
            depth = SHAPES_AT[shape.name]
            yield shape.name, lambda kit, shape=shape, depth=depth: shape.nested(kit, depth), shape.given_at(depth), shape.colours[-1], "call"
    for seed in SEEDS:
        invented = invented_for(seed)
        yield f"random {seed}", lambda kit, invented=invented: Builder(kit).graph(invented), NO_LINES, "async", "modes"


def main(uri: str, database: str) -> None:
    """Run all cases, in peace and with abandoned attempts."""
    bench = Bench(uri, database)
    found = {}
    with fragile_attempts():
        for name, make, given, colour, drive in cases():
            for killer in (None, Killer(random.Random(name))):
                told = bench.complete(make, given, colour, Ledger(), drive=drive, killer=killer, order=random.Random(name))
                found[f"{name}{' - abandoned' if killer else ''}"] = digested(told)
    bench.close()
    print(json.dumps({"digests": found, "attempts": bench.attempts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
