"""Replay decisions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mongo_durable.errors import NondeterminismError
from mongo_durable.protocol.events import ActivityKind, EventType
from mongo_durable.protocol.frontier import frontier_digest, frontier_entry, in_position_order
from mongo_durable.protocol.history import History
from mongo_durable.protocol.replay import (
    UNKNOWN_OUTCOME,
    ConsumeFrontier,
    DecideUnknown,
    OpenFrontier,
    ReturnOutcome,
    RunBody,
    StartDecision,
    StayPending,
    TakeVerdict,
    check_end,
    check_step,
    choose_ordinal,
    decide_start,
    match_frontier,
)
from tests.protocol.stories import RUN, Story, asks, at


def decide(history: History, text: str, *, consumed: int = 0, name: str = "tool", digest: str = "d", fence: int | None = None) -> StartDecision:
    return decide_start(history, at(text), ActivityKind.TOOL, name, digest, fence=fence or history.fence, consumed=consumed)


def test_a_new_effect_runs() -> None:
    """What the history does not have is run, and its start written."""
    assert decide(Story().attempt().history(), "a@1#1") == RunBody(is_recorded=False)


def test_a_recorded_outcome_is_returned() -> None:
    """What has an outcome is never run again."""
    history = Story().attempt().starts("a@1#1").completes("a@1#1").attempt().history()
    assert isinstance(decide(history, "a@1#1"), ReturnOutcome)


@pytest.mark.parametrize(("name", "digest"), [("other", "d"), ("tool", "other")])
def test_something_else_diverges(name: str, digest: str) -> None:
    """Another name or input than recorded is found, with expected and found."""
    history = Story().attempt().starts("a@1#1").completes("a@1#1").attempt().history()
    with pytest.raises(NondeterminismError) as raised:
        decide(history, "a@1#1", name=name, digest=digest)
    assert raised.value.position == at("a@1#1").text
    assert raised.value.expected["name"] == "tool"
    assert raised.value.found["name"] == name


def test_an_effect_that_a_process_died_in_is_unknown() -> None:
    """Started by an earlier attempt, without outcome and without a suspension: nobody knows."""
    history = Story().attempt().starts("a@1#1").attempt().history()
    assert decide(history, "a@1#1") == DecideUnknown(at("a/1@1#?1"))
    assert decide(history, "a@1#1", fence=1) == RunBody(is_recorded=True)


def test_an_answered_tool_goes_on_with_a_new_start() -> None:
    """A tool that asked runs again when its frontier is passed; a start is written, so that a death after the answer is seen."""
    story = Story().attempt().starts("a@1#t1").suspends(asks("a/t1/body:1@1#!1")).resolves().attempt()
    assert isinstance(decide(story.history(), "a@1#t1"), StayPending)
    assert decide(story.history(), "a@1#t1", consumed=1) == RunBody(is_recorded=False)
    story.starts("a@1#t1").attempt()
    assert isinstance(decide(story.history(), "a@1#t1"), StayPending)
    assert decide(story.history(), "a@1#t1", consumed=1) == DecideUnknown(at("a/t1@1#?1"))


def test_a_finished_tool_pends_until_its_frontier_is_passed() -> None:
    """I8: a tool that asked, was answered and completed pends again until the replay has passed its frontier."""
    story = Story().attempt().starts("a@1#t1").suspends(asks("a/t1/body:1@1#!1")).resolves().attempt()
    story.starts("a@1#t1").completes("a@1#t1").attempt()
    decision = decide(story.history(), "a@1#t1")
    assert isinstance(decision, StayPending)
    assert decision.positions == (at("a/t1/body:1@1#!1"),)
    assert isinstance(decide(story.history(), "a@1#t1", consumed=1), ReturnOutcome)


def test_a_person_says_what_happened() -> None:
    """The answer to "did it happen?" decides; a death after "run it" asks again, at another position."""
    question = frontier_entry(RUN, at("a/1@1#?1"), ActivityKind.INTERRUPT, UNKNOWN_OUTCOME, {})
    verdict = {"verdict": "rerun"}
    story = Story().attempt().starts("a@1#1").attempt().suspends(question).resolves({"a/1@1#?1": verdict}).attempt()
    assert decide(story.history(), "a@1#1", consumed=1) == TakeVerdict(verdict)
    story.starts("a@1#1").attempt()
    assert decide(story.history(), "a@1#1", consumed=1) == DecideUnknown(at("a/1@1#?2"))


def test_a_retry_after_failing_asks_a_person() -> None:
    """A run that failed because nobody knew, or because a person said so, asks when an operator lets it go on: failing again leads nowhere."""
    failed = Story().attempt().starts("a@1#1").attempt().happens(EventType.RUN_FAILED)
    assert decide(failed.happens(EventType.RUN_RETRIED).attempt().history(), "a@1#1") == DecideUnknown(at("a/1@1#?1"), is_retried=True)
    question = frontier_entry(RUN, at("a/1@1#?1"), ActivityKind.INTERRUPT, UNKNOWN_OUTCOME, {})
    verdict = {"verdict": "fail"}
    told = Story().attempt().starts("a@1#1").attempt().suspends(question).resolves({"a/1@1#?1": verdict}).attempt()
    assert decide(told.history(), "a@1#1", consumed=1) == TakeVerdict(verdict)
    told.happens(EventType.RUN_FAILED).happens(EventType.RUN_RETRIED).attempt()
    assert decide(told.history(), "a@1#1", consumed=1) == DecideUnknown(at("a/1@1#?2"), is_retried=True)


ENTRIES = st.lists(st.sampled_from(["a@1#!1", "b@1#!1", "c@1#!1", "c/c1/d:2@1#!1", "[3]@1#!1"]), min_size=1, max_size=5, unique=True)


@given(ENTRIES, st.randoms(use_true_random=False))
def test_a_frontier_is_the_same_in_any_order(texts: list[str], chance: random.Random) -> None:
    """I11: order and digest of a frontier do not depend on who arrived first."""
    entries = [asks(text) for text in texts]
    shuffled = chance.sample(entries, len(entries))
    assert in_position_order(entries) == in_position_order(shuffled)
    assert frontier_digest(entries) == frontier_digest(shuffled)


@given(ENTRIES, ENTRIES, st.booleans())
def test_frontiers_match_exactly_or_not_at_all(recorded: list[str], found: list[str], is_other_question: bool) -> None:
    """I8: the pending set must be the recorded one, questions included."""
    history = Story().attempt().suspends(*(asks(text) for text in recorded)).resolves().attempt().history()
    pending = {entry.position: entry.digest for entry in (asks(text, "other" if is_other_question else "?") for text in found)}
    if set(recorded) == set(found) and not is_other_question:
        decision = match_frontier(history, 0, pending)
        assert isinstance(decision, ConsumeFrontier)
        assert {position.text for position in decision.answers} == {at(text).text for text in recorded}
    else:
        with pytest.raises(NondeterminismError):
            match_frontier(history, 0, pending)
    assert match_frontier(history, 1, pending) == OpenFrontier()


def test_an_attempt_cannot_pass_an_open_frontier() -> None:
    """Without answers nothing goes on."""
    history = Story().attempt().suspends(asks("a@1#!1")).history()
    entry = asks("a@1#!1")
    with pytest.raises(NondeterminismError):
        match_frontier(history, 0, {entry.position: entry.digest})


def test_a_sealed_step_wants_exactly_its_activities() -> None:
    """A step that leaves out or adds an activity diverges."""
    history = Story().attempt().starts("a@1#1").completes("a@1#1").seals(1, "a@1#1").attempt().history()
    assert check_step(history, 1, {at("a@1#1").text})
    with pytest.raises(NondeterminismError):
        check_step(history, 1, set())
    with pytest.raises(NondeterminismError):
        check_step(history, 1, {at("a@1#1").text, at("a@1#2").text})
    assert not check_step(history, 2, {at("a@2#1").text})


def test_the_end_must_have_passed_everything() -> None:
    """A graph that ends before a recorded frontier or step diverges."""
    story = Story().attempt().starts("a@1#1").completes("a@1#1").suspends(asks("b@2#!1")).resolves().attempt()
    check_end(story.history(), 1, 2)
    with pytest.raises(NondeterminismError, match="frontier 1"):
        check_end(story.history(), 0, 2)
    story.starts("c@3#1").completes("c@3#1")
    with pytest.raises(NondeterminismError, match="step 3"):
        check_end(story.history(), 1, 2)


@given(st.lists(st.sampled_from("xyz"), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_overlapping_effects_are_matched_by_content(inputs: list[str], chance: random.Random) -> None:
    """Effects that start in random order find their recorded places by kind, name and input."""
    story = Story().attempt()
    for number, digest in enumerate(inputs, start=1):
        story.starts(f"a@1#{number}", digest=digest, is_overlapped=True)
    history = story.history()
    used: set[str] = set()
    for number, digest in enumerate(chance.sample(inputs, len(inputs)), start=1):
        ordinal = choose_ordinal(history, at("a@1#1").path, 1, number, used, number > 1, ActivityKind.TOOL, "tool", digest)
        assert history.activities[at(f"a@1#{ordinal}").text].input_digest == digest
        assert ordinal not in used
        used.add(ordinal)
    assert choose_ordinal(history, at("a@1#1").path, 1, len(inputs) + 1, used, True, ActivityKind.TOOL, "tool", "new") == str(len(inputs) + 1)


def test_sequential_effects_are_numbered_strictly() -> None:
    """Without overlap the number is the order, so a changed order is found as a divergence."""
    history = Story().attempt().starts("a@1#1", digest="x").completes("a@1#1").starts("a@1#2", digest="y").history()
    assert choose_ordinal(history, at("a@1#1").path, 1, 1, set(), False, ActivityKind.TOOL, "tool", "y") == "1"
