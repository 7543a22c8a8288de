"""Values that deepagents draws at random or from the clock, the same in every attempt.

Names of history files, dates in them, times of files in the state: a model can read them, and a replay must show it the same. The modules of
deepagents that draw get stand-ins for `uuid` and `datetime`, which pass everything through outside a durable run. Inside one, a random value derives
from the run, the body that draws and how often it has drawn. The time is a recorded one: when the last effect of the agent's steps before this one
had its outcome, so that of two files the later one is newer.
"""

from __future__ import annotations

import datetime as real_datetime
import importlib
import sys
import uuid as real_uuid
from types import ModuleType
from typing import Any

from mongo_durable.langgraph.clock import as_recorded
from mongo_durable.langgraph.draws import derived_bytes
from mongo_durable.langgraph.scope import Session, current_session, here
from mongo_durable.protocol.identity import ROOT_PATH

STAND_INS: dict[str, dict[str, str]] = {
    "deepagents.backends.utils": {"datetime": "clock"},
    "deepagents.middleware._message_eviction": {"uuid4": "uuid4"},
    "deepagents.middleware._overflow_clip": {"uuid": "uuid"},
    "deepagents.middleware.filesystem": {"uuid": "uuid"},
    "deepagents.middleware.summarization": {"uuid": "uuid", "datetime": "clock"},
    "deepagents.profiles.harness._nvidia_nemotron_3_ultra": {"uuid": "uuid"},
}
"""Per module, the names in it that get a stand-in."""

NO_MODEL_READS_IT = frozenset(
    {
        # Remote sub-agents and graders are refused.
        "deepagents.middleware.async_subagents",
        "deepagents.middleware.rubric",
        # Inside an operation of a backend, which is recorded whole.
        "deepagents.backends.filesystem",
        "deepagents.backends.local_shell",
        "deepagents.backends.sandbox",
        "deepagents.backends.context_hub",
        "deepagents.middleware._video",
    }
)
"""Modules that draw where it does not matter."""


def install() -> None:
    """Put the stand-ins into deepagents' modules. Again does nothing."""
    kinds: dict[str, Any] = {"clock": _Clock(), "uuid": _Uuid(), "uuid4": _uuid4}
    for name, stand_ins in STAND_INS.items():
        module = sys.modules.get(name) or importlib.import_module(name)
        for attribute, kind in stand_ins.items():
            if not getattr(getattr(module, attribute), "is_stand_in", False):
                setattr(module, attribute, kinds[kind])


class _StandIn:
    """Everything of the real thing but what is overridden."""

    is_stand_in = True

    def __init__(self, real: ModuleType | type) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Clock(_StandIn):
    def __init__(self) -> None:
        super().__init__(real_datetime.datetime)

    def now(self, tz: real_datetime.tzinfo | None = None) -> real_datetime.datetime:
        session = current_session()
        recorded = _last_time(session) if session is not None else None
        return real_datetime.datetime.now(tz) if recorded is None else recorded.astimezone(tz)


class _Uuid(_StandIn):
    def __init__(self) -> None:
        super().__init__(real_uuid)

    def uuid4(self) -> real_uuid.UUID:
        return _uuid4()


def _uuid4() -> real_uuid.UUID:
    session = current_session()
    return real_uuid.uuid4() if session is None else real_uuid.UUID(bytes=_draw(session, "uuid", 16), version=4)


_uuid4.is_stand_in = True  # type: ignore[attr-defined]


def _last_time(session: Session) -> real_datetime.datetime | None:
    """When the last effect before the step of the body that runs here had its outcome; for the first steps, when those around them had."""
    scope, history = here(), session.attempt.history
    found: real_datetime.datetime | None = None
    for depth in range(len(scope.path) - 1, len(ROOT_PATH) - 1, -1):
        now = _step_at(scope.path, scope.step, depth)
        times = [
            recorded.outcome.at
            for recorded in history.activities.values()
            if recorded.outcome is not None
            and recorded.outcome.at is not None
            and recorded.position.path[:depth] == scope.path[:depth]
            and _is_before(_step_at(recorded.position.path, recorded.position.step, depth), now)
        ]
        if times:
            found = max(times)
            break
    if found is None and history.submitted is not None:
        found = history.submitted.at
    return as_recorded(found) if found is not None else None


def _step_at(path: tuple[str, ...], step: int, depth: int) -> tuple[int, int | None]:
    """Root step, and the own step of the graph that is `depth` segments deep, or None if it is the root or does not say."""
    _, colon, own = path[depth].partition(":") if len(path) > depth else ("", "", "")
    return step, int(own) if colon and own.isdigit() else None


def _is_before(one: tuple[int, int | None], other: tuple[int, int | None]) -> bool:
    """Whether the step is over when the other begins. Of two in one root step, only what says its own step can be before."""
    return one[0] < other[0] or (one[0] == other[0] and one[1] is not None and other[1] is not None and one[1] < other[1])


def _draw(session: Session, kind: str, size: int) -> bytes:
    scope = here()
    return derived_bytes(session, scope, kind, scope.draw(kind), size)
