"""Values that deepagents draws at random or from the clock, the same in every attempt.

Names of history files, dates in them, times of files in the state: a model can read them, and a replay must show it the same. The modules of
deepagents that draw get stand-ins for `uuid` and `datetime`, which pass everything through outside a durable run. Inside one, a random value derives
from the run, the body that draws and how often it has drawn; the time is that of the run's submission, which the history has.
"""

from __future__ import annotations

import datetime as real_datetime
import hashlib
import importlib
import sys
import uuid as real_uuid
import weakref
from collections import Counter
from types import ModuleType
from typing import Any

from mongo_durable.langgraph.scope import Scope, Session, current_session, here

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

_drawn: weakref.WeakKeyDictionary[Scope, Counter[str]] = weakref.WeakKeyDictionary()


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
        submitted = session.attempt.history.submitted if session is not None else None
        return submitted.at.astimezone(tz) if submitted is not None and submitted.at is not None else real_datetime.datetime.now(tz)


class _Uuid(_StandIn):
    def __init__(self) -> None:
        super().__init__(real_uuid)

    def uuid4(self) -> real_uuid.UUID:
        return _uuid4()


def _uuid4() -> real_uuid.UUID:
    session = current_session()
    return real_uuid.uuid4() if session is None else real_uuid.UUID(bytes=_draw(session, "uuid", 16), version=4)


_uuid4.is_stand_in = True  # type: ignore[attr-defined]


def _draw(session: Session, kind: str, size: int) -> bytes:
    scope = here()
    with scope.lock:
        drawn = _drawn.setdefault(scope, Counter())
        drawn[kind] += 1
        number = drawn[kind]
    where = f"{session.attempt.run_id}\0{'/'.join(scope.path)}@{scope.step}\0{kind}\0{number}"
    return hashlib.blake2b(where.encode(), digest_size=size).digest()
