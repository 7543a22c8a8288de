"""The time that code in a graph may decide by.

A replay runs nodes and routers again, days later perhaps. What they decide by the wall clock would then come out otherwise than recorded, and the run
would diverge. So inside a durable run the time is one that stands in the history: it stands still while a step, or the body of a tool, runs.
"""

from __future__ import annotations

import time
from datetime import datetime

from mongo_durable.langgraph.current import running_activity
from mongo_durable.langgraph.scope import Session, current_session
from mongo_durable.langgraph.seams import step_checkpoint_time


def recorded_now() -> float:
    """Seconds since 1970: inside a durable run when the running activity, or else the running root step, began; elsewhere the wall clock."""
    session = current_session()
    return time.time() if session is None else _recorded(session)


def step_time() -> float:
    """The same for what a step decides: in plain LangGraph, too, the time stands still when the step is resumed, at the step's checkpoint."""
    session = current_session()
    if session is not None:
        return _recorded(session)
    made = step_checkpoint_time()
    return time.time() if made is None else made


def as_recorded(moment: datetime) -> datetime:
    """A time as the history has it: MongoDB keeps milliseconds, and one that this very attempt has noted may have more."""
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def _recorded(session: Session) -> float:
    attempt = session.attempt
    activity = running_activity(attempt.run_id)
    began = attempt.history.activities[activity.position].started_at if activity is not None else attempt.step_began_at
    assert began is not None  # every writer sets it
    return as_recorded(began).timestamp()
