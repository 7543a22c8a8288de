"""The outside world: a file to which every effect adds a line. What really happened is read from here, not from what mongo_durable recorded.

began <effect> <key> <attempt>      a body began to run: a tool's, or a call of the model
<effect> <key> <details as JSON>    it took effect
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PRICES = {"standing desk": 480, "office chair": 310, "desk lamp": 45}
_OTHER_PRICE = 99


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectLine:
    """One line of the file.

    Attributes:
        effect: Name of the tool, or `model`.
        key: The activity's id, which the shop is given as idempotency key.
        attempt: On a beginning, the attempt whose process ran the body; None on an effect.
        details: Of an effect.
    """

    effect: str
    key: str
    attempt: int | None = None
    details: Any = None


class Shop:
    """A shop that sells office equipment, and can be told twice of the same order."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note_beginning(self, effect: str, key: str, attempt: int) -> None:
        """A body begins to run."""
        self._add(f"began {effect} {key} {attempt}")

    def note(self, effect: str, key: str, **details: Any) -> None:
        """An effect happened."""
        self._add(f"{effect} {key} {json.dumps(details)}")

    def price(self, item: str) -> int:
        """What an item costs."""
        return _PRICES.get(item.lower(), _OTHER_PRICE)

    def place_order(self, key: str, item: str, amount: int) -> str:
        """Order an item. The same key again is the same order: nothing is ordered, and its number is returned as before."""
        self.note_once("place_order", key, item=item, amount=amount)
        return f"PO-{key[-6:].upper()}"

    def note_once(self, effect: str, key: str, **details: Any) -> None:
        """An effect happened, unless it has happened under this key before: an outside system that takes idempotency keys."""
        if not any(line.effect == effect and line.key == key and line.attempt is None for line in self.lines()):
            self.note(effect, key, **details)

    def lines(self) -> list[EffectLine]:
        """Everything that happened, in order."""
        if not self._path.exists():
            return []
        return [_parse(line) for line in self._path.read_text(encoding="utf-8").splitlines()]

    def _add(self, line: str) -> None:
        # One write in append mode, on disk before it is believed: the process may be killed at the next instruction.
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, f"{line}\n".encode())
            os.fsync(file)
        finally:
            os.close(file)


def _parse(line: str) -> EffectLine:
    first, second, rest = line.split(" ", 2)
    if first == "began":
        key, attempt = rest.split(" ")
        return EffectLine(effect=second, key=key, attempt=int(attempt))
    return EffectLine(effect=first, key=second, details=json.loads(rest))
