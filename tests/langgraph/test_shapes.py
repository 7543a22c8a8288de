"""Every shape of graph, in every colour, against an oracle: the same graph in plain LangGraph, its questions answered on the spot."""

from __future__ import annotations

import math
import random
import zlib
from collections import Counter

import pytest

from mongo_durable.errors import NondeterminismError
from mongo_durable.protocol.events import EventType
from tests.langgraph.bench import ATTEMPTS, Bench, Colour, Killer, Told
from tests.langgraph.kit import ASKING, Ledger
from tests.langgraph.shapes import SHAPES, Shape

ROWS = [(shape, colour) for shape in SHAPES for colour in shape.colours]


@pytest.mark.parametrize(("shape", "colour"), ROWS, ids=[f"{shape.name} - {colour}" for shape, colour in ROWS])
def test_a_graph_ends_as_if_it_had_never_stopped(bench: Bench, shape: Shape, colour: Colour) -> None:
    """Final state and effects are the oracle's, whatever attempts are abandoned; each recorded effect ran once, at the same position in every run."""
    state, expected = bench.oracle(shape.make, shape.given, colour)
    seed = zlib.crc32(f"{shape.name}{colour}".encode())

    ledger = Ledger()
    calm = bench.complete(shape.make, shape.given, colour, ledger, order=random.Random(seed))
    assert calm.state == state
    assert_same_effects(calm, expected)
    assert ledger.without(*ASKING) == expected.without(*ASKING), "without a crash no body runs twice"

    attempts = calm.attempts
    while attempts < math.ceil(ATTEMPTS / len(ROWS)):
        seed += 1
        ledger = Ledger()
        try:
            shaken = bench.complete(shape.make, shape.given, colour, ledger, killer=Killer(random.Random(seed)), order=random.Random(seed))
        except NondeterminismError:
            # A crash before two of them overlapped leaves nothing that says they may: the run diverges, aloud. app.gather is the remedy.
            assert shape.is_interchangeable
            attempts += 1
            continue
        attempts += shaken.attempts
        assert shaken.state == state
        assert_same_effects(shaken, expected)
        assert shaken.frontiers == calm.frontiers
        if not shape.is_interchangeable:
            assert shaken.positions == calm.positions
        assert set(ledger.ran) == set(expected.ran)
        assert_no_body_without_a_start(shaken, ledger)


def assert_same_effects(told: Told, expected: Ledger) -> None:
    """The effects in the history are those that the oracle's bodies noted: a model's input is not stored, so for it their number counts."""
    models = sum(count for (kind, _, _), count in expected.ran.items() if kind == "LLM")
    assert sum(count for (kind, _, _), count in told.started.items() if kind == "LLM") == models
    assert _others(told.started) == _others(expected.ran)


def assert_no_body_without_a_start(told: Told, ledger: Ledger) -> None:
    """I4: a body of an activity runs after its start was committed, and once for each."""
    starts = Counter(repr(each.value["x"]) for each in told.events if each.type is EventType.ACTIVITY_STARTED and each.name == "act")
    for (_, _, given), count in ledger.of("act").items():
        assert count <= starts[given], given


def _others(effects: Counter[tuple[str, str, str]]) -> Counter[tuple[str, str, str]]:
    return Counter({key: count for key, count in effects.items() if key[0] != "LLM"})
