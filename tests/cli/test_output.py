"""What commands print."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from langchain_core.messages import AIMessage

from mongo_durable.cli.output import in_one_line, json_safe, length, printable
from mongo_durable.protocol.events import RunStatus
from mongo_durable.protocol.identity import Position


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00"),
        (timedelta(minutes=1), 60.0),
        (RunStatus.READY, "ready"),
        (Position.parse("agent/1@2#1"), "agent/1@2#1"),
        (b"\x00", "AA=="),
        (float("nan"), "nan"),
        ({1: (2, {3})}, {"1": [2, [3]]}),
        ("\ud800", "\\ud800"),
        (2**70, 2**70),
    ],
)
def test_any_stored_value_becomes_json(value: object, expected: object) -> None:
    """What a history can hold can be printed as standard JSON."""
    assert json_safe(value) == expected
    json.dumps(json_safe(value), allow_nan=False).encode()


def test_a_message_shows_its_type_and_content() -> None:
    """A chat message is shown by what it says, without its empty fields."""
    assert json_safe(AIMessage("hello", id="m1")) == {"content": "hello", "type": "ai", "id": "m1"}


def test_long_values_are_cut_and_control_characters_shown() -> None:
    """One line stays one line, whatever is in it."""
    assert in_one_line("x" * 500, 20) == '"' + "x" * 18 + "…"
    assert printable("a\x1b[31m\nb") == "a\\u001b[31m\\u000ab"


def test_durations_are_short() -> None:
    """A duration is one number and its unit."""
    texts = [length(timedelta(seconds=seconds)) for seconds in (0.012, 3, 600, 36_000, 864_000)]
    assert texts == ["12 ms", "3.0 s", "10 min", "10 h", "10 d"]
