"""Durations as options take them."""

from __future__ import annotations

import re
from datetime import timedelta

import typer

_UNITS = {"": "seconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")


def duration(text: str, option: str) -> timedelta:
    """What `text` says: a number of seconds, or one with s, m, h or d.

    Raises:
        typer.BadParameter: It says nothing of that kind; `option` is where it was given.
    """
    match = _DURATION.fullmatch(text.strip())
    try:
        if match is not None:
            return timedelta(**{_UNITS[match[2]]: float(match[1])})
    except OverflowError:
        pass  # longer than any time is as wrong as no number
    raise typer.BadParameter(f"{option} is a number of seconds, or one with s, m, h or d such as 30d, not {text!r}")
