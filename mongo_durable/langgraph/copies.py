"""Values of an attempt's scratch, kept as copies instead of bytes.

LangGraph's own serialisation gives tuples back as lists and refuses integers past 64 bits, so a state would not be the same before and after a rest.
Scratch never leaves the process: a copy is exact, and cheaper.
"""

from __future__ import annotations

import copy
from typing import Any

from langchain_core.messages import BaseMessage

ATOMS = frozenset({str, int, float, bool, bytes, type(None)})
"""Types whose values are shared: nothing can change them."""


class Copies:
    """A serialiser for savers in memory whose "serialised" form is a copy."""

    def dumps_typed(self, obj: Any) -> tuple[str, Any]:
        """A copy of `obj` as it is now."""
        return "copy", copied(obj)

    def loads_typed(self, data: tuple[str, Any]) -> Any:
        """A copy of what was kept: who gets it may change it."""
        return copied(data[1])


class AsKept(Copies):
    """For a reader that changes nothing."""

    def loads_typed(self, data: tuple[str, Any]) -> Any:
        """What was kept itself."""
        return data[1]


def copied(value: Any) -> Any:
    """A copy in which nothing mutable is shared, except objects that cannot be copied (a lock, a connection): scratch may hold those."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is list:
        return [copied(each) for each in value]
    if kind is dict:
        return {key: copied(each) for key, each in value.items()}
    if kind is tuple:
        return tuple(copied(each) for each in value)
    if isinstance(value, BaseMessage):
        fields = {name: copied(each) for name, each in vars(value).items() if type(each) not in ATOMS}
        return value.model_copy(update=fields)
    try:
        return copy.deepcopy(value)
    except (TypeError, copy.Error):
        return value
