"""What commands print: tables and trees for people, JSON for programs. Colours only on a terminal."""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import math
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

After = Annotated[str | None, typer.Option(metavar="CURSOR", help="The next page: behind this, which the last page named.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]

_WIDTH_WITHOUT_TERMINAL = 220
_WIDTH_OF_ANYTHING = 10_000_000
STYLES = {
    "completed": "green",
    "resolved": "green",
    "running": "cyan",
    "ready": "cyan",
    "pending": "cyan",
    "suspended": "yellow",
    "open": "yellow",
    "failed": "red",
    "diverged": "red",
    "cancelled": "dim",
    "expired": "dim",
}
"""Colour of a status."""


def console(*, is_whole: bool = False) -> Console:
    """Standard output. In a pipe a line is as long as it has to be, so that an id is never cut in two.

    Args:
        is_whole: Nothing is cut: in a pipe a line has no end but its own.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH_OF_ANYTHING if is_whole else _WIDTH_WITHOUT_TERMINAL
    return Console(width=width, highlight=False, soft_wrap=False)


def line(*parts: str | tuple[str, str], is_whole: bool = False) -> Text:
    """One line, of texts and of (text, style): cut to the width, or with `is_whole` folded."""
    from rich.text import Text

    return Text.assemble(*parts, no_wrap=not is_whole, overflow="fold" if is_whole else "ellipsis")


class JsonLines(logging.Formatter):
    """Log records as one JSON object a line, with the fields that `telemetry.about` gives them."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: getattr(record, name) for name in ("run_id", "fence", "position") if hasattr(record, name)}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def complain(message: str) -> None:
    """Say on stderr what is wrong."""
    typer.echo(f"mongo-durable: {message}", err=True)


def say_next(cursor: str) -> None:
    """Say on stderr how to see what follows on a full page."""
    typer.echo(f"there may be more: --after {printable(cursor)}", err=True)


def print_json(value: Any) -> None:
    """Print any value of ours as one JSON document."""
    typer.echo(json.dumps(json_safe(value), indent=2, ensure_ascii=False, allow_nan=False))


def print_json_line(value: Any) -> None:
    """Print any value of ours as JSON on a line of its own, at once."""
    print(json.dumps(json_safe(value), ensure_ascii=False, allow_nan=False), flush=True)


def in_one_line(value: Any, longest: int | None = 120) -> str:
    """A value as JSON on one line, cut where it gets too long for a person; None cuts nothing."""
    return _cut(json.dumps(json_safe(value), ensure_ascii=False, allow_nan=False), longest)


def in_brief(value: Any, longest: int | None = 500) -> str:
    """A value on one line as a person would tell it: what chat messages say, of several the last one; anything else as JSON. None: all of it."""
    return in_one_line(value, None) if longest is None else _cut(_told(value), longest)


def _told(value: Any) -> str:
    if _is_message(value):
        return _said(value)
    if isinstance(value, Mapping) and len(value) == 1 and _is_message(value.get("message")):
        return _said(value["message"])  # what is recorded of a model call
    if isinstance(value, list) and value and all(_is_message(each) for each in value):
        return f"{len(value)} messages, the last: {_said(value[-1])}" if len(value) > 1 else _said(value[0])
    if isinstance(value, Mapping) and any(isinstance(each, list) and each and _is_message(each[-1]) for each in value.values()):
        return "; ".join(f"{name}: {_told(each)}" for name, each in value.items())
    return json.dumps(json_safe(value), ensure_ascii=False, allow_nan=False)


def _is_message(value: Any) -> bool:
    # By what it has: LangChain is loaded only where a value is one of its objects.
    return all(hasattr(value, name) for name in ("content", "type", "model_dump"))


def _said(message: Any) -> str:
    content = message.content
    if isinstance(content, list):  # blocks: text, images, thoughts
        content = " ".join(each if isinstance(each, str) else str(each.get("text") or f"[{each.get('type')}]") for each in content)
    calls = [f"{each['name']}({json.dumps(json_safe(each['args']), ensure_ascii=False)})" for each in getattr(message, "tool_calls", None) or ()]
    said = [f"“{content}”"] if content else []
    return " ".join([*said, f"calls {', '.join(calls)}"] if calls else said) or "“”"


def _cut(text: str, longest: int | None) -> str:
    return printable(text if longest is None or len(text) <= longest else f"{text[: longest - 1]}…")


def printable(text: str) -> str:
    """`text` without what could steer a terminal: names and values come from workflows."""
    return "".join(each if each.isprintable() else f"\\u{ord(each):04x}" for each in text)


def moment(at: datetime | None) -> str:
    """A time for people, in UTC."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}" if at is not None else "-"


def age(since: datetime | None, until: datetime | None = None) -> str:
    """How long ago something was, or how long it took, for people."""
    # The server's clock and this one may differ a little: nothing is younger than now.
    return length(max((until or datetime.now(UTC)) - since, timedelta())) if since is not None else "-"


def length(duration: timedelta | None) -> str:
    """A duration for people."""
    if duration is None:
        return "-"
    seconds = duration.total_seconds()
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} d"


def json_safe(value: Any) -> Any:
    """What JSON can hold of `value`: times as ISO 8601, durations as seconds, bytes as base64, what is unknown as text."""
    from mongo_durable.protocol.identity import Position

    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, Enum):
        return json_safe(value.value)
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()  # a lone surrogate can be stored, and not printed
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Position):
        return value.text
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): json_safe(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_safe(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: json_safe(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if hasattr(value, "model_dump"):  # LangChain's messages, Pydantic models
        return json_safe(value.model_dump(exclude_defaults=True) | ({"type": value.type} if hasattr(value, "type") else {}))
    return str(value)
