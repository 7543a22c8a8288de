"""The parts of a model call's input."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mongo_durable.protocol.parts import first_difference, pack, unpack

PARTS = st.lists(st.sampled_from(["aaaaaaaa", "bbbbbbbb", "cccccccc"]), max_size=6).map(tuple)


@given(PARTS, PARTS)
def test_parts_come_back(parts: tuple[str, ...], earlier: tuple[str, ...]) -> None:
    """What is stored relative to an earlier call gives the parts again."""
    assert unpack(pack(parts, "earlier", earlier), {"earlier": earlier}) == parts


def test_a_growing_conversation_is_stored_linearly() -> None:
    """Each call stores only what the one before did not have."""
    stored, earlier = 0, ()
    for length in range(1, 201):
        parts = tuple(f"{number:08x}" for number in range(length))
        stored += len(pack(parts, "earlier", earlier)["then"])
        earlier = parts
    assert stored == 200


@given(PARTS, PARTS)
def test_a_difference_is_named(recorded: tuple[str, ...], found: tuple[str, ...]) -> None:
    """Two different calls have a first difference, equal ones have none."""
    assert (first_difference(recorded, found) is None) == (recorded == found)
