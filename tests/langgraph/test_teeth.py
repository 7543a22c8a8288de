"""The suite of shapes has teeth: with one mechanism of the adapter switched off, a shape that needs it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mongo_durable.engine import attempt as attempts
from mongo_durable.errors import DurableError
from mongo_durable.langgraph import scope as scopes
from mongo_durable.langgraph import tools
from tests.langgraph.bench import Bench, Colour
from tests.langgraph.shapes import SHAPES
from tests.langgraph.test_shapes import Row, check_row

TRIES = 10


def _check_again_and_again(bench: Bench, row: Row) -> None:
    # Some faults need an unlucky order of threads to show.
    for _ in range(TRIES):
        check_row(bench, row)


def _numbers_by_arrival(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attempts, "choose_ordinal", lambda history, path, step, next_number, *_: str(next_number))


def _one_scope_for_all_executions(patch: pytest.MonkeyPatch) -> None:
    enter = scopes.Root.enter

    def same(self: scopes.Root, info: Any, config: Any) -> scopes.Scope:
        known = self._executions.get(info.checkpoint_ns)
        if known is None:
            return enter(self, info, config)
        known.info = info
        return known

    patch.setattr(scopes.Root, "enter", same)


def _no_places_for_tool_calls(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scopes.Root, "reserve", lambda self, namespace, messages: None)


def _each_call_raises_for_itself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tools._Call, "_calls_of_this_task", lambda self: 0)


def _finished_tools_return_at_once(patch: pytest.MonkeyPatch) -> None:
    decide = attempts.decide_start

    def forgetful(history: Any, *args: Any, consumed: int, **options: Any) -> Any:
        return decide(history, *args, consumed=len(history.frontiers), **options)

    patch.setattr(attempts, "decide_start", forgetful)


@pytest.mark.parametrize(
    ("switch_off", "shape", "colour"),
    [
        (_numbers_by_arrival, "gather of activities after awaits", "async"),
        (_one_scope_for_all_executions, "loop", "async"),
        (_no_places_for_tool_calls, "app.tool_node, several asking calls in one task", "sync"),
        (_each_call_raises_for_itself, "plain ToolNode, several asking calls in one task", "sync"),
        (_finished_tools_return_at_once, "create_agent as root", "async"),
    ],
    ids=lambda each: each.__name__.strip("_") if callable(each) else None,
)
def test_each_mechanism_is_needed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, switch_off: Callable[[pytest.MonkeyPatch], None], shape: str, colour: Colour
) -> None:
    """Comparing attempts with one another would miss some of these: the oracle, or a divergence, does not."""
    [chosen] = [each for each in SHAPES if each.name == shape]
    switch_off(monkeypatch)
    row = Row(chosen, colour, 0, "call")
    with pytest.raises((AssertionError, DurableError)):  # each is the suite's way to say no
        _check_again_and_again(bench, row)
