"""The conversation record: what of a run's events belongs to the memory of its thread.

An entry is a pure function of one acknowledged event, so writing it again changes nothing and a replay adds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class MemoryRole(StrEnum):
    """Who said it."""

    INPUT = "input"
    MODEL = "model"
    TOOL = "tool"
    HUMAN = "human"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEntry:
    """One entry of a thread's conversation.

    Attributes:
        seq: Of the event that it stems from; several answers of one resolution share it.
        name: Model, tool or question; None for the input.
        activity_id: Of the activity; None for the input.
        value: Plain value: the input, the result or the answer.
        error: Of a failed tool or model call, instead of a value.
    """

    seq: int
    role: MemoryRole
    name: str | None
    activity_id: str | None
    value: Any
    error: Any = None
