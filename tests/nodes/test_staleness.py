"""A marker that nobody will answer any more: it re-routes nothing, whatever turn comes, and is cleared."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.graph import START, StateGraph

from mongo_durable import App
from mongo_durable.errors import NondeterminismError
from mongo_durable.nodes import (
    ask_user_pending_is_current,
    build_ask_user_marker,
    build_interrupt_marker,
    clear_stale_markers,
    elicitation,
    interrupt,
    interrupt_condition,
    interrupt_pending_is_current,
)
from tests.nodes.stage import ASK_USER, INTERRUPT, Path, Stage, State, a_call, asked, two_paths
from tests.support.clocks import wrong_by

HOUR = 3600.0
MODULES = {"interrupt": interrupt, "elicitation": elicitation}


def _is_current(path: Path, state: Any, ttl_seconds: float | None = None) -> bool:
    return (interrupt_pending_is_current if path is INTERRUPT else ask_user_pending_is_current)(state, ttl_seconds)


def _aged(path: Path, seconds: float, **options: Any) -> dict[str, Any]:
    return {path.pending: {**path.build(**options)[path.pending], "minted_at": time.time() - seconds}}


def test_what_is_current(path: Path) -> None:
    """By run and by age: no run id passes, another one than the state's does not, and an old marker is stale whatever its run."""
    assert not _is_current(path, {})
    assert not _is_current(path, {path.pending: None})
    assert _is_current(path, {path.pending: "something else"})
    assert _is_current(path, path.build())
    assert _is_current(path, {**path.build(), "run_id": "now"})
    assert _is_current(path, {**path.build(run_id="now"), "run_id": "now"})
    assert not _is_current(path, {**path.build(run_id="old"), "run_id": "now"})
    assert not _is_current(path, path.build(run_id="old"))
    assert _is_current(path, _aged(path, 1.5 * HOUR))
    assert _is_current(path, _aged(path, 0.5 * HOUR), HOUR)
    assert not _is_current(path, _aged(path, 1.5 * HOUR), HOUR)
    assert not _is_current(path, {**_aged(path, 1.5 * HOUR, run_id="now"), "run_id": "now"}, HOUR)
    assert not _is_current(path, {**_aged(path, 0.5 * HOUR, run_id="old"), "run_id": "now"}, HOUR)
    assert _is_current(path, {path.pending: {**path.build()[path.pending], "minted_at": None}}, HOUR)


def test_where_a_state_goes() -> None:
    """A current interrupt first, then what the user is to be asked, then tool calls of the last model response."""
    approval, question = build_interrupt_marker(name="approval"), build_ask_user_marker(question="Which?")
    calling = {"messages": [HumanMessage("hello"), a_call()]}
    assert interrupt_condition({**approval, **question, **calling}) == "interrupt"
    assert interrupt_condition({**question, **calling}) == "elicitation"
    assert interrupt_condition({**build_interrupt_marker(name="approval", run_id="old"), **question}) == "elicitation"
    assert interrupt_condition(calling) == "continue"
    assert interrupt_condition({"messages": [a_call(), ToolMessage("done", tool_call_id="call-1")]}) == "continue"
    assert interrupt_condition({"messages": [a_call(), AIMessage("done")]}) == "finish"
    assert interrupt_condition({}) == "finish"


def test_the_time_to_live_is_for_both(path: Path) -> None:
    """The router passes its time to live on to both predicates."""
    state = _aged(path, 1.5 * HOUR)
    assert (interrupt_condition(state), interrupt_condition(state, HOUR)) == (path.target, "finish")
    assert (clear_stale_markers(state), clear_stale_markers(state, HOUR)) == ({}, {path.pending: None})


def test_later_turns_are_not_re_routed(stage: Stage, path: Path) -> None:
    """A turn that ends with its marker in the state leaves nothing to the next turns, which have other runs, but their own questions."""
    thread = stage.thread()
    runs = [stage.bench.new_run() for _ in range(3)]

    def leaves(_: App | None) -> StateGraph[Any]:
        graph = StateGraph(State)
        graph.add_node("first", lambda state: path.build(run_id=None if stage.is_durable else state["run_id"]))
        graph.add_edge(START, "first")
        return graph

    def given(turn: int) -> dict[str, Any]:
        return {"messages": [], "mint": None} | ({} if stage.is_durable else {"run_id": runs[turn]})

    def options(turn: int) -> dict[str, Any]:
        return {"run": runs[turn]} if stage.is_durable else {}

    left = stage.play(leaves, given(0), thread, **options(0))
    assert left[path.pending]["run_id"] == runs[0]
    out = stage.play(two_paths(), given(1), thread, **options(1))
    assert (asked(out), out[path.pending]) == ([], left[path.pending])
    make = two_paths(lambda state: path.build(run_id=None if stage.is_durable else state["run_id"]))
    out = stage.play(make, given(2), thread, **options(2))
    assert len(asked(out)) == 1
    assert stage.answer(make, out, "yes", thread)[path.response]["response"] == "yes"


def test_an_abandoned_question_ends_with_its_time_to_live(stage: Stage, path: Path) -> None:
    """Without any run id, age alone says that nobody will answer: the next turn is not asked the old question, and goes on."""
    thread = stage.thread()
    old = _aged(path, 1.5 * HOUR)
    out = stage.play(two_paths(ttl_seconds=HOUR), {"messages": [], "mint": old}, thread)
    assert (asked(out), out[path.pending]) == ([], old[path.pending])
    assert len(asked(stage.play(two_paths(), {"messages": [], "mint": old}, thread))) == 1


def test_a_node_that_is_reached_with_a_stale_marker(stage: Stage, path: Path) -> None:
    """It clears the marker and asks nothing; reached without any, it asks nothing either."""
    make = two_paths(ttl_seconds=HOUR, target=path.target)
    for mint in (_aged(path, 1.5 * HOUR), path.build(run_id="old"), None):
        out = stage.play(make, {"messages": [], "mint": mint}, stage.thread())
        assert (asked(out), out[path.pending]) == ([], None)


def test_stale_markers_are_cleared_at_the_start(stage: Stage) -> None:
    """The clearing node takes stale markers of both kinds out of the state, each by itself, and leaves a current one."""

    def make(_: App | None) -> StateGraph[Any]:
        graph = StateGraph(State)
        graph.add_node("clear", clear_stale_markers)
        graph.add_edge(START, "clear")
        return graph

    for stale, current in ((INTERRUPT, ASK_USER), (ASK_USER, INTERRUPT)):
        left = current.build(run_id="now")
        out = stage.play(make, {"messages": [], "run_id": "now", **stale.build(run_id="old"), **left}, stage.thread())
        assert (out[stale.pending], out[current.pending]) == (None, left[current.pending])


def test_a_late_answer_is_heard(stage: Stage, path: Path) -> None:
    """Who was asked in time may answer late, days after the marker's time to live: the run goes on where it was, with the answer."""
    make = two_paths(lambda _: path.build(), ttl_seconds=HOUR)
    thread = stage.thread()
    out = stage.play(make, {"messages": []}, thread)
    with wrong_by(timedelta(days=2)):
        out = stage.answer(make, out, "late", thread)
    assert (asked(out), out[path.pending], out[path.response]["response"]) == ([], None, "late")


def test_the_wall_clock_would_not_do(stage: Stage, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: by the wall clock, the same replay routes past its own question and the run ends as diverged; plain LangGraph loses the answer."""
    make = two_paths(lambda _: path.build(), ttl_seconds=HOUR)
    thread = stage.thread()
    out = stage.play(make, {"messages": []}, thread)
    monkeypatch.setattr(MODULES[path.target], "step_time", lambda: time.time())
    with wrong_by(timedelta(days=2)):
        if stage.is_durable:
            with pytest.raises(NondeterminismError):
                stage.answer(make, out, "late", thread)
        else:
            assert path.response not in stage.answer(make, out, "late", thread)
