"""Recorded histories are replayed without a database: as far as they go, by code that fits; to the first divergence, by code that does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bson import ObjectId
from langgraph.graph import START, StateGraph

from mongo_durable import App
from mongo_durable.errors import ConfigurationError, CorruptHistory
from mongo_durable.protocol.events import Event, EventType
from mongo_durable.replaying import Replayed, areplay_history, replay_history
from mongo_durable.store import histories
from mongo_durable.store.documents import event_document
from tests.golden.histories import load
from tests.golden.record import GOLDEN, WORKFLOW, Golden
from tests.golden.test_golden import loop
from tests.langgraph.kit import Kit, Ledger, Lines, State

EACH = pytest.mark.parametrize("golden", GOLDEN, ids=[each.name for each in GOLDEN])


def lines_of(events: Sequence[Event], **header: Any) -> list[str]:
    """The events of a run as an exported history."""
    submitted = events[0]
    start = {
        histories._HEADER: histories.FORMAT,
        "run_id": submitted.run_id,
        "workflow": WORKFLOW,
        "version": "1",
        "thread_id": submitted.data["thread_id"],
        "turn": 1,
        "input": submitted.value,
        "settings": {},
        "base": None,
        **header,
    }
    return [histories._dumps(start), *(histories._dumps(event_document(each, ObjectId())) for each in events)]


def app_of(make: Callable[[Kit], Any], ledger: Ledger, *, is_sync: bool = False, name: str = WORKFLOW) -> App:
    """An app that knows no database."""
    app = App(name, sync=is_sync)
    graph = make(Kit(app, ledger, is_sync=is_sync))
    app.entrypoint(lambda: graph)
    return app


async def replayed(make: Callable[[Kit], Any], events: Sequence[Event], **options: Any) -> Replayed:
    """One run, replayed; no body may run."""
    ledger = Ledger()
    [found] = await areplay_history(app_of(make, ledger, **options), lines_of(events))
    assert ledger.ran == {}
    return found


@pytest.fixture(autouse=True)
def _no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONGO_DURABLE_URI", raising=False)


@EACH
async def test_every_prefix_of_a_history_replays(golden: Golden) -> None:
    """Wherever an export or a crash cuts a history, the code that made it replays as far as it goes: no false alarm, and no effect."""
    recorded = load(golden.name)
    app = app_of(golden.made.make, ledger := Ledger())
    lines = lines_of(recorded)
    for cut in [*random.Random(golden.name).sample(range(1, len(recorded)), 5), len(recorded)]:
        [found] = await areplay_history(app, lines[: cut + 1])
        assert (found.divergence, found.reached, found.events) == (None, expected_of(recorded[cut - 1]), cut), cut
    assert ledger.ran == {}


def expected_of(last: Event) -> str:
    """What a replay reaches whose history ends so."""
    return {EventType.ACTIVITIES_SUSPENDED: "frontier", EventType.RUN_COMPLETED: "end"}.get(last.type, "history")


@pytest.mark.parametrize(
    ("change", "position", "step"),
    [
        ({"name": "other"}, "agent/1/again@1#1", 1),
        ({"is_longer": True}, "agent/1/again@1#1", 1),
        ({"question": "what else?"}, "agent/1/again@1#!1", 1),
        ({"rounds": 2}, "agent/1/again@3#!1", 3),
        ({"rounds": 4}, "step 3", 3),
    ],
    ids=["another input", "one effect more", "another question", "ends before", "goes on behind the end"],
)
async def test_a_changed_graph_diverges(change: dict[str, Any], position: str, step: int) -> None:
    """Code that does something else than it did is found out, and where; it executes nothing either."""
    found = await replayed(lambda kit: loop(kit, **change), load("loop"))
    assert found.divergence is not None
    assert (found.divergence.position, found.divergence.step, found.reached) == (position, step, None)


async def test_an_open_frontier_has_to_be_the_same() -> None:
    """A run that waits for an answer: the question that the code asks is compared, though there is no answer to go on with."""
    recorded = load("loop")[:14]
    assert recorded[-1].type is EventType.ACTIVITIES_SUSPENDED
    assert (await replayed(loop, recorded)).reached == "frontier"
    found = await replayed(lambda kit: loop(kit, question="what else?"), recorded[:6])
    assert found.divergence is not None
    assert found.divergence.position == "agent/1/again@1#!1"


def parallel(kit: Kit, *, p3: int = 1) -> Any:
    """`Kit.parallel`, with so many effects in the third node."""

    async def third(state: State) -> State:
        line = "".join([await kit.act(f"p3.{number}") for number in range(1, p3 + 1)])
        return {"lines": [f"p3:{line}"]}

    graph = StateGraph(State, output_schema=Lines)
    for name, node in (("p1", kit.node("p1", asks=True)), ("p2", kit.node("p2", asks=True)), ("p3", kit.body(third))):
        graph.add_node(name, node)
        graph.add_edge(START, name)
    graph.add_node("last", kit.node("last"))
    graph.add_edge(("p1", "p2", "p3"), "last")
    return graph


@pytest.mark.parametrize("is_sync", [False, True], ids=["async", "sync"])
@pytest.mark.parametrize(
    ("p3", "position", "found_at"),
    [(2, "agent/1/p1@1#!1", "agent/1/p3@1#2"), (0, "agent/1/p3@1#1", None)],
    ids=["one effect more", "one effect less"],
)
async def test_a_branch_beside_others_that_changed(p3: int, position: str, found_at: str | None, is_sync: bool) -> None:
    """A new effect beside recorded work is no end of the history, but a divergence; one that is missing likewise."""
    recorded = load("parallel nodes, abandoned")
    assert (await replayed(parallel, recorded, is_sync=is_sync)).reached == "end"
    found = await replayed(lambda kit: parallel(kit, p3=p3), recorded, is_sync=is_sync)
    assert found.divergence is not None
    assert found.divergence.position == position
    assert found_at is None or found_at in found.divergence.found


async def test_another_output_is_a_divergence() -> None:
    """The end is compared too: the first difference is named, by its path, not by its value."""
    *recorded, end = load("loop")
    found = await replayed(loop, [*recorded, replace(end, value={"lines": [*end.value["lines"][:2], "secret"]})])
    assert found.divergence is not None
    assert "$.lines[2]" in found.divergence.message
    assert "secret" not in repr(found.divergence)


def failing(kit: Kit, *, fault: type[Exception] = ValueError) -> Any:
    """The loop, which fails in its second round."""

    async def again(state: State) -> State:
        line = await kit.act("again.1")
        if state["lines"]:
            raise fault("broken")
        line += kit.interrupt("again") + await kit.act("again.2")
        return {"lines": [f"again:{line}"]}

    graph = StateGraph(State)
    graph.add_node("again", again)
    graph.add_edge(START, "again")
    graph.add_conditional_edges("again", lambda state: "again")
    return graph


async def test_a_failure_is_an_end_like_others() -> None:
    """Code that fails as it did is the same; that fails otherwise, or where it did not, diverges; that is repaired goes on behind the history."""
    recorded = load("loop")[:13]
    failed = replace(recorded[-1], seq=14, type=EventType.RUN_FAILED, position=None, error={"type": "ValueError", "message": "broken"}, value=None)
    found = await replayed(failing, [*recorded, failed])
    assert (found.status, found.reached) == ("failed", "end")
    for make, history in ((lambda kit: failing(kit, fault=KeyError), [*recorded, failed]), (failing, load("loop"))):
        divergence = (await replayed(make, history)).divergence
        assert divergence is not None
        assert "failed with" in divergence.message
    assert (await replayed(loop, [*recorded, failed])).reached == "history"


def test_a_file_for_pytest(tmp_path: Path) -> None:
    """The synchronous form takes a file with several runs, of several workflows, and also replays apps whose graph runs in a thread."""
    one, two = load("loop"), load("parallel nodes, abandoned")
    file = tmp_path / "histories.jsonl"
    file.write_text("\n".join([*lines_of(one), *lines_of(two, workflow="other"), ""]), encoding="utf-8")
    ledger = Ledger()
    apps = [app_of(loop, ledger), app_of(parallel, ledger, is_sync=True, name="other")]
    assert [(each.run_id, each.reached) for each in replay_history(apps, file)] == [(one[0].run_id, "end"), (two[0].run_id, "end")]
    with pytest.raises(ConfigurationError, match="workflow 'other'"):
        replay_history(apps[0], file)
    assert ledger.ran == {}


def test_what_is_no_history_is_refused(tmp_path: Path) -> None:
    """By line, and without a guess."""
    app = app_of(loop, Ledger())
    header, *rest = lines_of(load("loop"))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        replay_history(app, tmp_path / "none.jsonl")
    for wrong, said in (([], "no history"), (rest, "line 1"), ([header, "nonsense"], "line 2"), ([header, "[1]"], "line 2")):
        with pytest.raises(ConfigurationError, match=said):
            replay_history(app, wrong)
    with pytest.raises(ConfigurationError, match="format 2"):
        replay_history(app, [header.replace('"$numberInt":"1"', '"$numberInt":"2"', 1)])
    with pytest.raises(CorruptHistory, match="another run"):
        replay_history(app, [header, *lines_of([replace(each, run_id="else") for each in load("loop")])[1:]])
    with pytest.raises(CorruptHistory, match="seq 3 follows 1"):
        replay_history(app, [header, rest[0], *rest[2:]])
