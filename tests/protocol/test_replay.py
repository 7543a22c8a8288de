"""Replay decisions."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mongo_durable.errors import CorruptHistory, NondeterminismError
from mongo_durable.protocol.events import ActivityKind, EventType
from mongo_durable.protocol.frontier import UNANSWERED, frontier_digest, frontier_entry, in_position_order
from mongo_durable.protocol.history import History
from mongo_durable.protocol.replay import (
    UNKNOWN_OUTCOME,
    AwaitTimer,
    ConsumeFrontier,
    DecideUnknown,
    OpenFrontier,
    ReturnOutcome,
    RunBody,
    SetTimer,
    StartDecision,
    StayPending,
    TakeVerdict,
    TimerFired,
    check_end,
    check_step,
    choose_ordinal,
    decide_start,
    decide_timer,
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


# -- deadlines ----------------------------------------------------------------------------------------------------------------------------------


def test_an_expired_frontier_closes_what_was_due() -> None:
    """I8: it is consumed like any other; what was due has its default or UNANSWERED, and what was not has nothing and pends on."""
    entries = [asks("a@1#!1"), asks("b@1#!1"), asks("c@1#!1")]
    story = Story().attempt().suspends(*entries).expires({"a@1#!1": "default"}, unanswered=["b@1#!1"]).attempt()
    found = {entry.position: entry.digest for entry in entries}
    assert match_frontier(story.history(), 0, found) == ConsumeFrontier({at("a@1#!1"): "default", at("b@1#!1"): UNANSWERED})
    assert match_frontier(story.history(), 1, {at("c@1#!1"): found[at("c@1#!1")]}) == OpenFrontier()


def test_a_tool_whose_question_was_not_due_asks_it_again() -> None:
    """A tool beside one that expired runs again to its question; the frontier that then opens has it at the same position."""
    story = Story().attempt().starts("a@1#t1").starts("a@1#t2").suspends(asks("a/t1/body:1@1#!1"), asks("a/t2/body:1@1#!1"))
    story.expires({"a/t1/body:1@1#!1": "default"}).attempt()
    assert decide(story.history(), "a@1#t2", consumed=1) == RunBody(is_recorded=False)
    story.starts("a@1#t2").suspends(asks("a/t2/body:1@1#!1")).resolves().attempt()
    assert isinstance(decide(story.history(), "a@1#t2", consumed=1), StayPending)
    assert decide(story.history(), "a@1#t2", consumed=2) == RunBody(is_recorded=False)


def test_whether_something_happened_is_asked_again_too() -> None:
    """A question about an unknown outcome, in a frontier that expired for another one's sake, stands again where it stood."""
    question = frontier_entry(RUN, at("a/t1@1#?1"), ActivityKind.INTERRUPT, UNKNOWN_OUTCOME, "did it?")
    story = Story().attempt().starts("a@1#t1").attempt().suspends(question, asks("b@1#!1")).expires({"b@1#!1": "default"}).attempt()
    assert decide(story.history(), "a@1#t1", consumed=1) == DecideUnknown(at("a/t1@1#?1"))


@pytest.mark.parametrize(
    "expired",
    [
        lambda story: story.expires({}),
        lambda story: story.expires({"z@1#!1": 1}),
        lambda story: story.expires({}, unanswered=["z@1#!1"]),
    ],
)
def test_an_expiry_closes_questions_of_its_frontier_and_at_least_one(expired: Callable[[Story], Story]) -> None:
    """I6: an expiry that closes nothing, or something that was not asked, is no history of a correct writer."""
    with pytest.raises(CorruptHistory):
        expired(Story().attempt().suspends(asks("a@1#!1"))).history()


# -- timers -------------------------------------------------------------------------------------------------------------------------------------

UNTIL = datetime(2030, 1, 1, tzinfo=UTC)


def timer(history: History, text: str, consumed: int = 0) -> SetTimer | AwaitTimer | TimerFired:
    return decide_timer(history, at(text), "sleep", "d", consumed=consumed)


def sets(story: Story, text: str) -> Story:
    return story.starts(text, ActivityKind.TIMER, "sleep", until=UNTIL)


def test_a_timer_is_set_once_and_fires_once() -> None:
    """A new timer is set; one that is set waits for its time, whoever asks; one that fired has fired for ever."""
    story = Story().attempt()
    assert timer(story.history(), "a@1#1") == SetTimer()
    sets(story, "a@1#1").attempt()
    assert timer(story.history(), "a@1#1") == AwaitTimer(UNTIL, is_held=False)
    story.completes("a@1#1", None).attempt()
    assert timer(story.history(), "a@1#1") == TimerFired()


def test_a_timer_does_not_fire_before_the_frontiers_that_came_first() -> None:
    """I8: what had not fired when a frontier opened is held until the replay has passed it, also if it has fired since."""
    story = sets(Story().attempt(), "a@1#1").suspends(asks("b@1#!1")).resolves().attempt()
    assert timer(story.history(), "a@1#1") == AwaitTimer(UNTIL, is_held=True)
    assert timer(story.history(), "a@1#1", consumed=1) == AwaitTimer(UNTIL, is_held=False)
    story.completes("a@1#1", None).suspends(asks("a@1#!1")).resolves().attempt()
    assert timer(story.history(), "a@1#1") == AwaitTimer(UNTIL, is_held=True)
    assert timer(story.history(), "a@1#1", consumed=1) == TimerFired()


def test_a_timer_that_fired_before_a_frontier_does_not_wait_for_it() -> None:
    """I8: the code behind it may be what asked."""
    story = sets(Story().attempt(), "a@1#1").completes("a@1#1", None).suspends(asks("a@1#!1")).resolves().attempt()
    assert timer(story.history(), "a@1#1") == TimerFired()


def test_something_else_in_the_place_of_a_timer_diverges() -> None:
    """Another kind than recorded is found, on both sides."""
    story = Story().attempt().starts("a@1#1").attempt()
    with pytest.raises(NondeterminismError):
        timer(story.history(), "a@1#1")
    with pytest.raises(NondeterminismError):
        decide(sets(Story().attempt(), "a@1#1").attempt().history(), "a@1#1")
