"""Every shape of graph, in every colour, nested and driven in every way, against an oracle: the same graph in plain LangGraph, its questions answered
on the spot."""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, get_args

import pytest

from mongo_durable.engine import attempt as engine
from mongo_durable.errors import NondeterminismError
from mongo_durable.protocol.events import EventType
from tests.langgraph.bench import ATTEMPTS, Bench, Colour, Drive, Killer, Oracle, Told, root_values, shown
from tests.langgraph.kit import ASKING, Kit, Ledger
from tests.langgraph.shapes import SHAPES, TIMERS, Shape

DEPTHS = (0, 1, 3)
DRIVES: tuple[Drive, ...] = get_args(Drive)
ALL_FROM = 8_000
"""From so many attempts on, every combination has a row of its own."""


@dataclass(frozen=True, slots=True)
class Row:
    """A shape in one colour, so deep in other graphs, driven so."""

    shape: Shape
    colour: Colour
    depth: int
    drive: Drive

    def __str__(self) -> str:
        nesting = f"nested {self.depth}" if self.depth else "flat"
        return f"{self.shape.name} - {self.colour} - {nesting} - {self.drive}"

    def make(self, kit: Kit) -> Any:
        """The graph."""
        return self.shape.nested(kit, self.depth)

    @property
    def given(self) -> Any:
        """What it is run with."""
        return self.shape.given_at(self.depth)


def rows_for(attempts: int) -> list[Row]:
    """The rows among which so many attempts are shared out: all combinations, or per shape and colour each depth with another drive, in rotation."""
    rows = []
    for number, (shape, colour) in enumerate((each, colour) for each in SHAPES for colour in each.colours):
        combinations = list(itertools.product(DEPTHS, DRIVES))
        if attempts < ALL_FROM:
            combinations = [(depth, DRIVES[(index + number) % len(DRIVES)]) for index, depth in enumerate(DEPTHS)]
        rows += [Row(shape, colour, depth, drive) for depth, drive in combinations]
    return rows


ROWS = rows_for(ATTEMPTS)
SHARE = 0.8
"""Of all attempts; random graphs have the rest."""
ATTEMPTS_A_ROW = math.ceil(SHARE * ATTEMPTS / len(ROWS))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_graph_ends_as_if_it_had_never_stopped(bench: Bench, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Final state and effects are the oracle's, whatever attempts are abandoned; each recorded effect ran once, at the same position in every run."""
    if row.shape.name == TIMERS:
        monkeypatch.setattr(engine, "_SHORT_WAIT", timedelta())  # so that each sleep gives the run back
    check_row(bench, row)


def check_row(bench: Bench, row: Row) -> None:
    """Run a row calmly, and with abandoned attempts until it has had its share of them."""
    expected = bench.plainly(row.make, row.given, row.colour, row.drive)
    seed = zlib.crc32(str(row).encode())

    ledger = Ledger()
    calm = bench.complete(row.make, row.given, row.colour, ledger, drive=row.drive, order=random.Random(seed))
    assert calm.state == expected.state
    assert_same_effects(calm, expected.ledger)
    assert ledger.without(*ASKING) == expected.ledger.without(*ASKING), "without a crash no body runs twice"
    assert_streamed_once(calm, expected, row.drive)

    attempts, is_shaken = calm.attempts, False
    while attempts < ATTEMPTS_A_ROW or not is_shaken:
        seed, is_shaken = seed + 1, True
        killer, order = Killer(random.Random(seed)), random.Random(seed)
        ledger = Ledger()
        try:
            shaken = bench.complete(row.make, row.given, row.colour, ledger, drive=row.drive, killer=killer, order=order)
        except NondeterminismError:
            # A crash before two of them overlapped leaves nothing that says they may: the run diverges, aloud. app.gather is the remedy.
            assert row.shape.is_interchangeable
            attempts += 1
            bench.attempts += 1
            continue
        attempts += shaken.attempts
        assert shaken.state == expected.state
        assert_same_effects(shaken, expected.ledger)
        if row.shape.name == TIMERS:
            # Whether a question comes up before or after a timer beside it has fired is a matter of time: which are asked is not.
            assert _asked(shaken) == _asked(calm)
        else:
            assert shaken.frontiers == calm.frontiers
        if not row.shape.is_interchangeable:
            assert shaken.positions == calm.positions
        assert set(ledger.ran) == set(expected.ledger.ran)
        assert_no_body_without_a_start(shaken, ledger)


@pytest.mark.parametrize("attempts", [ATTEMPTS, 0, ALL_FROM])
def test_each_shape_meets_each_nesting_and_each_drive(attempts: int) -> None:
    """However many attempts there are to share out, no shape is left untried in a nesting, in a drive or in a colour."""
    rows = rows_for(attempts)
    for shape in SHAPES:
        for colour in shape.colours:
            of_it = [row for row in rows if row.shape is shape and row.colour == colour]
            assert {row.depth for row in of_it} == set(DEPTHS)
            assert {row.drive for row in of_it} == set(DRIVES)
    assert len(ROWS) * ATTEMPTS_A_ROW >= SHARE * ATTEMPTS


def assert_same_effects(told: Told, expected: Ledger) -> None:
    """The effects in the history are those that the oracle's bodies noted: a model's input is not stored, so for it their number counts."""
    models = sum(count for (kind, _, _), count in expected.ran.items() if kind == "LLM")
    assert sum(count for (kind, _, _), count in told.started.items() if kind == "LLM") == models
    assert _others(told.started) == _others(expected.ran)


def assert_streamed_once(told: Told, expected: Oracle, drive: Drive) -> None:
    """The streams of the calls of a calm run, one after the other, are the oracle's: nothing of the root is missing or shown twice."""
    if drive == "call":
        return
    assert root_values(told.streamed) == root_values(expected.streamed)
    if drive == "modes":
        assert shown(told.streamed, "updates", of_root=True) == shown(expected.streamed, "updates", of_root=True)
        # Graphs inside durable tools are part of a recorded effect: not every update of a child graph is shown, but none twice.
        assert shown(told.streamed, "updates", of_root=False) <= shown(expected.streamed, "updates", of_root=False)


def assert_no_body_without_a_start(told: Told, ledger: Ledger) -> None:
    """I4: a body of an activity runs after its start was committed, and once for each."""
    starts = Counter(repr(each.value["x"]) for each in told.events if each.type is EventType.ACTIVITY_STARTED and each.name == "act")
    for (_, _, given), count in ledger.of("act").items():
        assert count <= starts[given], given


def _asked(told: Told) -> Counter[tuple[Any, Any]]:
    return Counter(entry for frontier in told.frontiers for entry in frontier.items())


def _others(effects: Counter[tuple[str, str, str]]) -> Counter[tuple[str, str, str]]:
    return Counter({key: count for key, count in effects.items() if key[0] not in ("LLM", "TIMER")})
