"""The parts of an activity's input: the messages of a model call, by short digests, so that a divergence can say which one differs.

A conversation grows by a few messages from call to call, so what is stored of a call are only the parts that an earlier call did not have: bytes stay
linear in the length of the conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

DIGEST_LENGTH = 8


def shorten(digests: Sequence[str]) -> tuple[str, ...]:
    """Digests as they are kept: long enough to tell two messages of one place apart."""
    return tuple(each[:DIGEST_LENGTH] for each in digests)


def pack(parts: Sequence[str], like: str | None, earlier: Sequence[str]) -> dict[str, Any]:
    """What is stored of `parts`, given the call at position `like` with the parts `earlier`."""
    same = 0
    while same < min(len(parts), len(earlier)) and parts[same] == earlier[same]:
        same += 1
    return {"like": like if same else None, "same": same, "then": list(parts[same:])}


def unpack(stored: Mapping[str, Any], parts_of: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The inverse of `pack`; `parts_of` has the parts of earlier calls by position."""
    begin = parts_of.get(stored["like"], ())[: stored["same"]] if stored["like"] is not None else ()
    return (*begin, *stored["then"])


def first_difference(recorded: Sequence[str], found: Sequence[str]) -> str | None:
    """What differs first, for people: counted from 1. None if the parts are the same."""
    for number, (one, other) in enumerate(zip(recorded, found, strict=False), start=1):
        if one != other:
            return f"message {number} of {len(found)} is another one"
    if len(recorded) != len(found):
        return f"there are {len(found)} messages, {len(recorded)} were recorded"
    return None
