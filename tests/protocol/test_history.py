"""The history fold: what a correct writer can write is folded, everything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mongo_durable.errors import CorruptHistory
from mongo_durable.protocol.events import EventType, FrontierStatus, RunStatus
from mongo_durable.protocol.history import fold
from tests.protocol.stories import RUN, Story, asks, at


def whole_life() -> Story:
    return (
        Story()
        .attempt()
        .starts("plan@1#1")
        .completes("plan@1#1")
        .seals(1, "plan@1#1")
        .starts("buy@2#1")
        .suspends(asks("buy/1/body:1@2#!1"), asks("ask@2#!1"))
        .resolves()
        .attempt()
        .starts("buy@2#1")
        .completes("buy@2#1")
        .seals(2, "buy@2#1")
        .happens(EventType.RUN_COMPLETED)
    )


def test_a_whole_life_folds_to_its_head() -> None:
    """Status, fence and generation of a run follow from its events."""
    history = whole_life().history()
    assert (history.status, history.fence, history.generation, history.attempts) == (RunStatus.COMPLETED, 2, 1, 2)
    assert history.frontiers[0].status is FrontierStatus.RESOLVED
    assert history.activities[at("buy@2#1").text].started_seq == 10


@pytest.mark.parametrize(
    ("told", "status"),
    [
        (lambda: Story(), RunStatus.PENDING),
        (lambda: Story().attempt(), RunStatus.RUNNING),
        (lambda: Story().attempt().suspends(asks("a@1#!1")), RunStatus.SUSPENDED),
        (lambda: Story().attempt().suspends(asks("a@1#!1")).resolves(), RunStatus.READY),
        (lambda: Story().attempt().suspends(asks("a@1#!1")).resolves(event_type=EventType.FRONTIER_EXPIRED), RunStatus.READY),
        (lambda: Story().attempt().suspends(asks("a@1#!1")).happens(EventType.RUN_CANCELLED), RunStatus.CANCELLED),
        (lambda: Story().attempt().happens(EventType.RUN_FAILED), RunStatus.FAILED),
        (lambda: Story().attempt().suspends(asks("a@1#!1")).happens(EventType.RUN_FAILED), RunStatus.FAILED),
        (lambda: Story().attempt().happens(EventType.RUN_DIVERGED).happens(EventType.RUN_RETRIED), RunStatus.READY),
        (lambda: Story().happens(EventType.RUN_CANCELLED), RunStatus.CANCELLED),
    ],
)
def test_every_status_has_its_events(told: Callable[[], Story], status: RunStatus) -> None:
    """Each arrow of the life of a run is an event."""
    assert told().history().status is status


@pytest.mark.parametrize(
    "told",
    [
        lambda: Story().starts("a@1#1"),
        lambda: Story().attempt().completes("a@1#1"),
        lambda: Story().attempt().starts("a@1#1").completes("a@1#1").completes("a@1#1"),
        lambda: Story().attempt().starts("a@1#1").completes("a@1#1").starts("a@1#1"),
        lambda: Story().attempt().suspends(),
        lambda: Story().attempt().suspends(asks("a@1#!1")).starts("a@1#1"),
        lambda: Story().attempt().suspends(asks("a@1#!1")).attempt(),
        lambda: Story().attempt().suspends(asks("a@1#!1"), asks("b@1#!1")).resolves({"a@1#!1": 1}),
        lambda: Story().attempt().suspends(asks("a@1#!1")).resolves().resolves(),
        lambda: Story().attempt().suspends(asks("a@1#!1")).happens(EventType.RUN_COMPLETED),
        lambda: Story().attempt().happens(EventType.RUN_COMPLETED).happens(EventType.RUN_CANCELLED),
        lambda: Story().attempt().happens(EventType.RUN_COMPLETED).happens(EventType.RUN_RETRIED),
        lambda: Story().attempt().happens(EventType.RUN_COMPLETED).attempt(),
        lambda: Story().attempt().seals(1).seals(1),
        lambda: Story().attempt().happens(EventType.RUN_SUBMITTED),
    ],
)
def test_what_no_correct_writer_writes_is_refused(told: Callable[[], Story]) -> None:
    """I1, I2, I3, I5, I6: an event that cannot follow what came before makes the history corrupt."""
    with pytest.raises(CorruptHistory):
        told().history()


@given(st.integers(1, 12))
def test_a_hole_is_found(missing: int) -> None:
    """I1: a history without one of its events is refused."""
    events = [event for event in whole_life().events if event.seq != missing]
    with pytest.raises(CorruptHistory):
        fold(RUN, events)


@given(st.integers(2, 13), st.sampled_from([-1, 1]))
def test_a_foreign_fence_is_found(seq: int, change: int) -> None:
    """I2: an event under another fence than its attempt's is refused."""
    events = [replace(event, fence=event.fence + change) if event.seq == seq else event for event in whole_life().events]
    if events[seq - 1].type is EventType.ATTEMPT_STARTED and change == 1:
        events = events[:seq]
        if fold(RUN, events).fence == events[-1].fence:
            return  # skipping a fence is legal: a claimer died between its two writes
    with pytest.raises(CorruptHistory):
        fold(RUN, events)


def test_effects_inside_another_are_not_listed_with_the_step() -> None:
    """A replay that returns a tool's outcome never reaches the effects inside it, so a sealed step does not ask for them."""
    history = Story().attempt().starts("tools@1#t1").starts("tools/t1/body:1@1#1").completes("tools/t1/body:1@1#1").history()
    assert history.by_step[1] == [at("tools@1#t1").text]
