"""A fault in one path cannot reach the other."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType
from typing import Any

import pytest

from mongo_durable.nodes import elicitation, interrupt
from mongo_durable.nodes.interrupt import INTERRUPT_ACK_SENTINEL
from tests.nodes.stage import ASK_USER, INTERRUPT, Path, Stage, asked, two_paths

OF_BOTH = {
    ("mongo_durable.errors", "ConfigurationError"),
    ("mongo_durable.langgraph.clock", "recorded_now"),
    ("mongo_durable.langgraph.clock", "step_time"),
    ("mongo_durable.langgraph.draws", "current_runs"),
    ("mongo_durable.langgraph.draws", "draw_id"),
    ("mongo_durable.langgraph.questions", "ask"),
    ("mongo_durable.langgraph.questions", "json_schema"),
    ("mongo_durable.protocol.frontier", "UNANSWERED"),
}
"""What both take from the library: the durable run's time and ids, and how a question is asked."""


def _ours(module: ModuleType) -> set[tuple[str, str]]:
    imports = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {(node.module or "", alias.name) for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names}
    names |= {(alias.name, "") for node in imports if isinstance(node, ast.Import) for alias in node.names}
    return {each for each in names if each[0].partition(".")[0] == "mongo_durable"}


def test_they_share_no_code_of_their_own() -> None:
    """Each imports nothing of the package of nodes, and of the library only what a question needs."""
    assert _ours(interrupt) == _ours(elicitation) == OF_BOTH


def test_they_understand_the_same_sentinel() -> None:
    """What `resume_with` makes is for both, so the two copies of its key are equal."""
    assert elicitation._ACK_SENTINEL == INTERRUPT_ACK_SENTINEL


def _broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken")


@pytest.mark.parametrize(("broken", "working"), [(INTERRUPT, ASK_USER), (ASK_USER, INTERRUPT)], ids=["interrupt breaks", "ask_user breaks"])
def test_one_breaks_and_the_other_works(stage: Stage, broken: Path, working: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every function of one module raises: the graph with both still asks, and hears, what is asked through the other."""
    module = interrupt if broken is INTERRUPT else elicitation
    for name, value in list(vars(module).items()):
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("create_"):
            monkeypatch.setattr(module, name, _broken)
    thread = stage.thread()
    make = two_paths(lambda _: working.build())
    out = stage.answer(make, stage.play(make, {"messages": []}, thread), "yes", thread)
    assert (asked(out), out[working.response]["response"]) == ([], "yes")
    marker = {broken.pending: {"name": "approval", "question": "Which?"}}
    with pytest.raises(RuntimeError, match="broken"):
        stage.play(two_paths(), {"messages": [], "mint": marker}, stage.thread())
