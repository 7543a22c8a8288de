"""The tests of this folder have teeth: without what makes a deep agent durable, they fail."""

from __future__ import annotations

import itertools
import os
import uuid
from typing import Any

import pytest
from deepagents.backends import StateBackend
from langchain_core.messages import BaseMessage

from mongo_durable.errors import NondeterminismError
from mongo_durable.langgraph.deep_agents import building, delegation, draws, identity
from mongo_durable.protocol.identity import segment
from tests.deep_agents.kit import LastFirst, order, researching, run, task, watched_inputs, where
from tests.deep_agents.test_effects import summarizing
from tests.deep_agents.test_kill_matrix import At
from tests.deep_agents.test_paths import delegating
from tests.langgraph.bench import Bench


def test_ordinals_by_arrival_are_found_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sub-agents numbered as they start do not stand where the model ordered them."""
    arrived = itertools.count(1)

    def by_arrival(scope: Any, named: str, *_: Any) -> tuple[str, ...]:
        return (*scope.path[:-1], segment(named), str(9 - next(arrived)))

    monkeypatch.setattr(delegation, "_path", by_arrival)
    with watched_inputs() as inputs:
        told = run(bench, delegating(order(task("A", "research"), task("B", "research")), turns=lambda: LastFirst("A", "B")))
    assert [where(told, inputs)[name] for name in "AB"] != ["agent/1/research/1", "agent/1/research/2"]


def test_ids_that_an_attempt_draws_are_found_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that get a fresh id in each attempt are not the same to the byte."""

    def drawn(message: BaseMessage, *_: Any) -> BaseMessage:
        return message if message.id is not None else message.model_copy(update={"id": str(uuid.uuid4())})

    monkeypatch.setattr(identity, "_stamped", drawn)
    with watched_inputs() as inputs:
        run(bench, researching(2, "ask"))
    assert any(len(given) > 1 for given in inputs.seen.values())


def test_values_that_deepagents_draws_are_found_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A history file with a random name reaches a model's input: the next attempt diverges."""
    monkeypatch.setattr(draws, "_draw", lambda session, kind, size: os.urandom(size))
    with pytest.raises(NondeterminismError):
        run(bench, summarizing(StateBackend()), killer=At(100))


def test_models_that_are_not_wrapped_are_found_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sub-agent whose model stays plain has no place in the history."""
    monkeypatch.setattr(building._Parts, "subagent", lambda self, spec, of_root: spec)
    with pytest.raises(building.ConfigurationError, match="would not be durable"):
        run(bench, researching(2, "plain"))
