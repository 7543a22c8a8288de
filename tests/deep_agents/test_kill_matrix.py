"""Deep agents whose attempts are abandoned at every point end as if they had never stopped: the same paths, inputs, outcomes and state."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from typing import Any

import pytest

from mongo_durable.protocol.events import EventType
from tests.deep_agents.kit import HELLO, Inputs, researching, without_times
from tests.deep_agents.trees import TREES, Tree
from tests.langgraph.bench import ATTEMPTS, Bench, Colour, Killer, Told
from tests.langgraph.kit import ASKING, Ledger, answer
from tests.langgraph.test_shapes import assert_no_body_without_a_start, assert_same_effects

COLOURS: tuple[Colour, ...] = ("async", "sync")
POINTS = max(5, ATTEMPTS // 400)
"""At so many points, evenly spread, the parallel researchers of each number and colour die; at all of them when there are no more."""
DEATHS = max(4, ATTEMPTS // 500)
"""So many attempts of a tree's run are abandoned at most."""
SHARE = max(5, ATTEMPTS // 400)
"""Abandoned and other attempts of each tree in each colour, at least."""


class At(Killer):
    """Abandons the attempt of a run that makes these calls of the engine, counted over all its attempts.

    Attributes:
        spent: How many there have been.
    """

    def __init__(self, *points: int) -> None:
        super().__init__(random.Random(0))
        self._points = sorted(points)
        self.spent = 0

    def budget(self) -> Any:
        """Itself: every attempt takes from it."""
        return self

    def __isub__(self, calls: int) -> At:
        self.spent += calls
        return self

    def __lt__(self, _: int) -> bool:
        """Whether the attempt is over with this call."""
        is_over = bool(self._points) and self.spent > self._points[0]
        if is_over:
            self._points.pop(0)
        return is_over

    def chunks(self) -> int | None:
        """Nobody goes away."""
        return None

    def delay_s(self) -> float | None:
        """Nothing is cancelled."""
        return None

    @property
    def is_done(self) -> bool:
        """Whether all of them were reached."""
        return not self._points


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_parallel_researchers_that_die_at_every_point(bench: Bench, inputs: Inputs, count: int, colour: Colour) -> None:
    """Two, three and five sub-agents at once: whatever the point at which the process dies, each recorded call ran once, at the same place."""
    make = researching(count, "plain", "ask", "plain")
    expected = bench.plainly(make, HELLO, colour)
    ledger = Ledger()
    counting = At()
    calm = bench.complete(make, HELLO, colour, ledger, killer=counting, order=random.Random(count))
    assert without_times(calm.state) == without_times(expected.state)
    assert_same_effects(calm, expected.ledger)
    assert ledger.without(*ASKING) == expected.ledger.without(*ASKING), "without a crash no body runs twice"
    for point in points(counting.spent, count + len(colour)):
        ledger = Ledger()
        # Sometimes a second death soon after, during the replay after the first.
        deaths = [point] if point % 3 else [point, point + 9]
        killer = At(*deaths)
        shaken = bench.complete(make, HELLO, colour, ledger, killer=killer, order=random.Random(point))
        assert killer.is_done
        assert shaken.attempts == calm.attempts + len(deaths)
        assert without_times(shaken.state) == without_times(calm.state)
        assert (shaken.positions, shaken.frontiers) == (calm.positions, calm.frontiers)
        assert_same_effects(shaken, expected.ledger)
        assert set(ledger.ran) == set(expected.ledger.ran)
        assert_ran_once(shaken, ledger, expected.ledger, len(deaths) * (count + 1))


def points(calls: int, offset: int) -> range:
    """Before and after each start and each completion an attempt can be abandoned: at so many of these calls, in all stages of the run."""
    stride = max(1, calls // POINTS)
    return range(offset % stride, calls, stride)


def assert_ran_once(told: Told, ledger: Ledger, expected: Ledger, caught: int) -> None:
    """What is recorded never runs again: a tool's body once for each committed start; a model once, and again only if a process died in it.

    Args:
        caught: How many calls of models may have been running when processes died.
    """
    starts = Counter((str(each.kind), str(each.name), repr(each.value)) for each in told.events if each.type is EventType.ACTIVITY_STARTED)
    for key, count in ledger.of("plain").items():
        assert count <= starts[key], key
    models = [Counter({key: count for key, count in each.ran.items() if key[0] == "LLM"}) for each in (ledger, expected)]
    assert sum((models[0] - models[1]).values()) <= caught


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_a_tree_ends_as_if_it_had_never_stopped(bench: Bench, inputs: Inputs, tree: Tree, colour: Colour) -> None:
    """Every kind of delegation, interrupt and nesting: final state and effects are those of plain deepagents, however often it dies."""
    expected = bench.plainly(tree.make, tree.given, colour)
    ledger = Ledger()
    seed = zlib.crc32(f"{tree} {colour}".encode())
    calm = bench.complete(tree.make, tree.given, colour, ledger, say=answer, order=random.Random(seed))
    assert without_times(calm.state) == without_times(expected.state)
    assert_same_effects(calm, expected.ledger)
    assert ledger.without(*ASKING) == expected.ledger.without(*ASKING)
    attempts, is_shaken = 0, False
    while attempts < SHARE or not is_shaken:
        seed, is_shaken = seed + 1, True
        ledger = Ledger()
        killer = Killer(random.Random(seed), left=DEATHS)
        shaken = bench.complete(tree.make, tree.given, colour, ledger, say=answer, killer=killer, order=random.Random(seed))
        attempts += shaken.attempts
        assert without_times(shaken.state) == without_times(expected.state)
        assert (shaken.positions, shaken.frontiers) == (calm.positions, calm.frontiers)
        assert_same_effects(shaken, expected.ledger)
        assert set(ledger.ran) == set(expected.ledger.ran)
        assert_no_body_without_a_start(shaken, ledger)
