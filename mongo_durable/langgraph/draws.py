"""Ids that code elsewhere draws at random: inside a durable run they derive from where they are drawn, so they are the same in every attempt."""

from __future__ import annotations

import hashlib
import uuid

from mongo_durable.langgraph.current import running_activity
from mongo_durable.langgraph.isolation import BODY_SEGMENT
from mongo_durable.langgraph.scope import Scope, Session, current_session, here
from mongo_durable.protocol.identity import Position, activity_id

_ID = "id"


def derived_bytes(session: Session, scope: Scope, kind: str, number: int, size: int) -> bytes:
    """The bytes that stand for the `number`th random value of a kind in this body. In a fork they are what they were in its origin."""
    where = f"{session.attempt.history.origin}\0{'/'.join(scope.path)}@{scope.step}\0{kind}\0{number}"
    return hashlib.blake2b(where.encode(), digest_size=size).digest()


def draw_id() -> str:
    """An id of 12 hexadecimal digits behind `i-`; the first one in the body of a tool or activity is that activity's own id."""
    session = current_session()
    if session is None:
        return f"i-{uuid.uuid4().hex[:12]}"
    scope = here()
    number = scope.draw(_ID)
    activity = running_activity(session.attempt.run_id)
    if activity is not None and number == 1:
        position = Position.parse(activity.position)
        if scope.path in (position.body_path, (*position.body_path, BODY_SEGMENT)):
            return activity_id(session.attempt.history.origin, position)
    return f"i-{derived_bytes(session, scope, _ID, number, 6).hex()}"


def current_runs() -> tuple[str, ...]:
    """The ids that mean the durable run which is executed here: its own and, of a fork, its origin's. Empty outside any.

    The first one is what to record: a fork replays what its origin recorded.
    """
    session = current_session()
    return () if session is None else tuple(dict.fromkeys((session.attempt.history.origin, session.attempt.run_id)))
