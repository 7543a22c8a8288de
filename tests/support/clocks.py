"""A wall clock that is wrong, as a process has it whose machine's clock is."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, tzinfo
from typing import Any


class _AsDatetime(type(datetime)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, datetime)


@contextmanager
def wrong_by(skew: timedelta) -> Iterator[None]:
    """`time.time()`, and `datetime.now()` as mongo_durable sees it, are wrong by `skew` inside the block. Clocks that only count are not touched."""

    class Wrong(datetime, metaclass=_AsDatetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime.now(tz) + skew

    now, modules = time.time, [each for name, each in sys.modules.items() if name.partition(".")[0] == "mongo_durable"]
    clocks = [each for each in modules if vars(each).get("datetime") is datetime]
    assert clocks
    for each in clocks:
        each.datetime = Wrong  # type: ignore[attr-defined]
    time.time = lambda: now() + skew.total_seconds()  # type: ignore[assignment]
    try:
        yield
    finally:
        time.time = now
        for each in clocks:
            each.datetime = datetime  # type: ignore[attr-defined]
