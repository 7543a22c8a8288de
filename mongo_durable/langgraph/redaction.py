"""What the history shows of an effect's input, where the application hides a part of it.

Only what people see is redacted. Digests are made of the input itself, and outcomes are stored as they are: a replay gives them back exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeAlias

from mongo_durable.langgraph.codec import Codec
from mongo_durable.protocol.events import ActivityKind

log = logging.getLogger(__name__)

Redact: TypeAlias = Callable[[str, str, Any], Any]
"""Gets kind (`TOOL`, `ACTIVITY`), name and the arguments, its own copy of them; returns what is to be shown: any value that can be stored."""


def redacted(redact: Redact, codec: Codec, kind: ActivityKind, name: str, plain: Any) -> Any:
    """The plain value to show instead of `plain`. Where the hook fails, nothing is shown but that it did: it must neither leak nor end a run."""
    try:
        return codec.encode(redact(kind.value, name, codec.decode(plain)))
    except Exception as error:  # noqa: BLE001 - the hook is the application's, and can raise anything
        log.warning("redact failed for %s %r with %s: its input is not shown", kind, name, type(error).__name__)
        return {"redacted": f"redact failed with {type(error).__name__}"}
