"""Streams of deep agents: what a caller sees of all attempts together is what plain deepagents shows, once."""

from __future__ import annotations

import random

import pytest

from tests.deep_agents.kit import HELLO, Inputs, researching, run, without_times
from tests.deep_agents.test_paths import COLOURS
from tests.langgraph.bench import Bench, Colour, Drive, Killer
from tests.langgraph.test_shapes import assert_streamed_once


@pytest.mark.parametrize("drive", ["values", "modes"])
@pytest.mark.parametrize("colour", COLOURS)
def test_nothing_of_the_root_is_shown_twice(bench: Bench, inputs: Inputs, colour: Colour, drive: Drive) -> None:
    """Sub-agents that ask, attempt after attempt: the root's values and updates come once; a caller who goes away changes nothing."""
    make = researching(2, "plain", "ask_twice")
    expected = bench.plainly(make, HELLO, colour, drive)
    calm = run(bench, make, colour, drive=drive)
    assert_streamed_once(calm, expected, drive)
    shaken = run(bench, make, colour, drive=drive, killer=Killer(random.Random(f"{colour}{drive}")))
    assert without_times(shaken.state) == without_times(calm.state) == without_times(expected.state)
    assert (shaken.positions, shaken.frontiers) == (calm.positions, calm.frontiers)
