"""What mongo_durable tells those who watch it: OpenTelemetry spans and metrics where `opentelemetry-api` is installed, and fields of log records.

Spans: `mongo_durable.attempt` around an attempt, `mongo_durable.activity` around each body that runs (a replayed outcome has none). Their attributes,
like those of the metrics and the extra fields of log records, are names and ids; never a payload.

| metric | what | attributes |
|---|---|---|
| mongo_durable.attempts | attempts begun | workflow |
| mongo_durable.runs.ended | runs that an attempt here has ended | workflow, status |
| mongo_durable.runs.pruned | runs that a runner here has pruned | workflow |
| mongo_durable.activities | activities that the code reached | kind, how: executed or replayed |
| mongo_durable.activity.duration | seconds in the body of an activity | kind, outcome |
| mongo_durable.frontier.age | seconds from a frontier's opening to its answers or its expiry | status |
| mongo_durable.append.batch | events in one insert | |
| mongo_durable.stream.lag | seconds since the change stream last gave a sign of life, at each sweep; an idle server gives one every 10 s | |
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

try:
    from opentelemetry import metrics, trace
except ModuleNotFoundError:
    IS_AVAILABLE = False
else:
    IS_AVAILABLE = True

if TYPE_CHECKING:
    from opentelemetry.metrics import Counter, Histogram, Meter
    from opentelemetry.trace import Tracer

_SCOPE = "mongo_durable"


@functools.cache
def _meter() -> Meter:
    return metrics.get_meter(_SCOPE)


@functools.cache
def _tracer() -> Tracer:
    return trace.get_tracer(_SCOPE)


@functools.cache
def _counter(name: str) -> Counter:
    return _meter().create_counter(f"{_SCOPE}.{name}")


@functools.cache
def _histogram(name: str, unit: str) -> Histogram:
    return _meter().create_histogram(f"{_SCOPE}.{name}", unit=unit)


def count(name: str, /, **attributes: str) -> None:
    """One more of a counted thing."""
    if IS_AVAILABLE:
        _counter(name).add(1, attributes)


def measure(name: str, value: float, /, unit: str = "s", **attributes: str) -> None:
    """One value of a distribution."""
    if IS_AVAILABLE:
        _histogram(name, unit).record(value, attributes)


_is_traced = False


def look_for_tracer() -> None:
    """Notice whether the process has a tracer by now: without one no spans are made. Called for each attempt, because looking takes longer than an
    activity should."""
    global _is_traced
    # The API alone has a provider that records nothing, at some length.
    _is_traced = IS_AVAILABLE and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def span(name: str, /, **attributes: str | int) -> AbstractContextManager[Any]:
    """What runs in it is one span, the current one in this context."""
    if not _is_traced:
        return nullcontext()
    described = {f"{_SCOPE}.{key}": value for key, value in attributes.items()}
    return _tracer().start_as_current_span(f"{_SCOPE}.{name}", attributes=described, record_exception=False)


def about(run_id: str, fence: int | None = None, position: str | None = None) -> dict[str, Any]:
    """The `extra` of a log record: what it is about, for formatters that know fields."""
    named = {"run_id": run_id, "fence": fence, "position": position}
    return {name: value for name, value in named.items() if value is not None}
