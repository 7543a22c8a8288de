"""What the body of an activity can know about itself."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import dataclass

from mongo_durable.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentActivity:
    """The activity whose body runs.

    Attributes:
        activity_id: The same in every attempt: give it to the outside system as idempotency key.
        position: Where it stands in the run, as text.
        attempt: The number (fence) of the attempt that runs it.
    """

    activity_id: str
    run_id: str
    position: str
    attempt: int


_current: contextvars.ContextVar[CurrentActivity | None] = contextvars.ContextVar("mongo_durable_activity", default=None)


def current_activity() -> CurrentActivity:
    """The activity whose body runs now.

    Raises:
        ConfigurationError: No activity runs here.
    """
    found = _current.get()
    if found is None:
        raise ConfigurationError("current_activity() was called outside the body of a durable tool or activity")
    return found


def running_activity(run_id: str) -> CurrentActivity | None:
    """The activity of this run whose body runs now, or None. (The body of one run's tool may execute another run.)"""
    found = _current.get()
    return found if found is not None and found.run_id == run_id else None


def set_current_activity(activity: CurrentActivity) -> Callable[[], None]:
    """Make `activity` the current one until the returned function is called."""
    token = _current.set(activity)
    return lambda: _current.reset(token)
