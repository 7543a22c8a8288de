"""Positions and activity ids."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mongo_durable.protocol.identity import Position, activity_id, segment

NAMES = st.text(min_size=1, max_size=12).filter(lambda name: not any(0xD800 <= ord(character) <= 0xDFFF for character in name))
ORDINALS = st.from_regex(r"[t!?]?[1-9][0-9]{0,2}(\.[2-9])?", fullmatch=True)
POSITIONS = st.builds(
    Position,
    path=st.lists(NAMES.map(segment), min_size=1, max_size=4).map(lambda names: ("agent", "1", *names)),
    step=st.integers(0, 500),
    ordinal=ORDINALS,
)


@given(POSITIONS)
def test_text_round_trips(position: Position) -> None:
    """A position and its text are the same thing, whatever the nodes are called."""
    assert Position.parse(position.text) == position


@given(POSITIONS, POSITIONS)
def test_different_positions_have_different_ids(one: Position, other: Position) -> None:
    """Two positions share an activity id only if they are one."""
    assert (activity_id("run", one) == activity_id("run", other)) == (one == other)


@given(POSITIONS)
def test_ids_are_speakable_and_belong_to_the_run(position: Position) -> None:
    """An activity id is short, URL-safe, and another one in every run."""
    assert re.fullmatch(r"act_[a-z2-7]{16}", activity_id("run", position))
    assert activity_id("run", position) != activity_id("other", position)


def test_activity_ids_never_change() -> None:
    """Ids in stored histories stay valid: the derivation is fixed for ever."""
    assert activity_id("po-17", Position(("agent", "1", "plan"), 2, "1")) == "act_ldxi2ru66b4h6zov"


@given(POSITIONS, ORDINALS, ORDINALS)
def test_a_body_encloses_what_starts_inside_it(position: Position, inner: str, innermost: str) -> None:
    """An effect encloses the effects of its body at any depth, and not itself."""
    child = position.inside(inner)
    assert position.encloses(child)
    assert position.encloses(child.inside(innermost))
    assert not position.encloses(position)
    assert not child.encloses(position)


def test_positions_sort_as_people_count() -> None:
    """Position order is by step, path and ordinal, numbers as numbers."""
    texts = ["agent/1/a@10#1", "agent/1/a@2#10", "agent/1/a@2#9", "agent/1/[10]@2#1", "agent/1/[9]@2#1"]
    ordered = sorted((Position.parse(text) for text in texts), key=lambda position: position.sort_key)
    assert [position.text for position in ordered] == ["agent/1/[9]@2#1", "agent/1/[10]@2#1", "agent/1/a@2#9", "agent/1/a@2#10", "agent/1/a@10#1"]


@pytest.mark.parametrize(
    "text", ["", "agent/1/a", "agent/1/a@x#1", "agent/1/a@1", "a@1#1#2", "a@1@1#1", "a@1#1@2", "a@01#1", "a@+1#1", "a@--1#1", "a@٣#1", "@1#1", "a@1#"]
)
def test_what_is_no_position_is_refused(text: str) -> None:
    """Text that is no position does not become one."""
    with pytest.raises(ValueError, match="not a position"):
        Position.parse(text)
