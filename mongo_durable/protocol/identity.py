"""Positions and activity ids: the addresses of effects.

A position is `operation path @ step # ordinal`, for example `agent/1/plan@2#1`: the first effect of node `plan` in root superstep 2. It comes from
the structure of the graph alone (I11), so it is the same in every attempt. Segments of the path, from the outside in:

    agent/1          the run's root graph
    plan             a task of the root graph (its superstep is the position's step)
    [2]              a Send worker: its index among the Sends of its producer
    c1               the first child graph that the body around it called
    leaf:3           a task of a child graph, at that child's own step 3
    t2  or  1        the effect whose body encloses this one, by its ordinal
    g1.2             the second branch of the body's first `gather`

Ordinals:

    1, 2, …          effects of a body, in the order in which the body started them
    t1, t2, …        tool calls of one model response, in the response's order; `t1.2` when the same call is made again in one body
    !1, !2, …        interrupts of one task, in the order in which they were reached
    ?1, ?2, …        the question whether an effect happened, asked after a process died inside it
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import quote

ROOT_PATH = ("agent", "1")
_DIGITS = re.compile(r"(\d+)")


def segment(name: str) -> str:
    """A node name as a path segment: characters that have a meaning in a position are percent-encoded."""
    return quote(name, safe=" ._-~()$")


@dataclass(frozen=True, slots=True)
class Position:
    """The stable address of an activity.

    Attributes:
        path: Segments from the outside in, escaped; starts with `agent`, `1`.
        step: Root superstep, counted from the run's start.
        ordinal: Which effect of the innermost body; see the module docstring.
        text: The position as people read it; `parse` is its inverse.
    """

    path: tuple[str, ...]
    step: int
    ordinal: str
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", f"{'/'.join(self.path)}@{self.step}#{self.ordinal}")

    def __str__(self) -> str:
        return self.text

    @staticmethod
    @lru_cache(maxsize=1024)  # a start and its outcome name the same one
    def parse(text: str) -> Position:
        """The position that `text` stands for.

        Raises:
            ValueError: `text` is no position.
        """
        place, _, ordinal = text.rpartition("#")
        path, _, step = place.rpartition("@")
        if path and ordinal and step.removeprefix("-").isdecimal() and "#" not in path and "@" not in path and "@" not in ordinal:
            position = Position(tuple(path.split("/")), int(step), ordinal)
            if position.text == text:
                return position
        raise ValueError(f"not a position: {text!r}")

    def inside(self, ordinal: str) -> Position:
        """The position of effect `ordinal` of this effect's own body."""
        return Position(self.body_path, self.step, ordinal)

    @property
    def body_path(self) -> tuple[str, ...]:
        """The path of effects that start inside this effect's body."""
        return (*self.path, self.ordinal)

    def encloses(self, other: Position) -> bool:
        """Whether `other` lies inside this effect's body, at any depth."""
        inner = self.body_path
        return other.step == self.step and other.path[: len(inner)] == inner

    def enclosing(self) -> Iterator[Position]:
        """Positions whose bodies this one could lie in, from the outside in: those of them that are activities enclose it."""
        for depth in range(len(ROOT_PATH), len(self.path)):
            yield Position(self.path[:depth], self.step, self.path[depth])

    @property
    def sort_key(self) -> tuple[object, ...]:
        """Natural order: by step, then path, then ordinal, numbers as numbers."""
        return (self.step, tuple(_natural(part) for part in self.path), _natural(self.ordinal))


def _natural(part: str) -> tuple[tuple[int, int, str], ...]:
    return tuple((0, int(piece), "") if piece.isdigit() else (1, 0, piece) for piece in _DIGITS.split(part) if piece)


@lru_cache(maxsize=1024)  # asked for with the start, in the body and with the outcome
def activity_id(run_id: str, position: Position) -> str:
    """The public id of the activity at `position`: deterministic, opaque, URL-safe, short enough to read aloud (16 letters and digits)."""
    hashed = hashlib.blake2b(f"{run_id}\0{position.text}".encode(), digest_size=10).digest()
    return "act_" + base64.b32encode(hashed).decode().lower()
