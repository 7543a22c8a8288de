"""One byte representation of a plain tree, for digests.

A *plain* tree is what `values.encode` returns. Its canonical bytes are UTF-8 JSON without white space and with sorted keys, where

- bytes are the envelope `{"__type__":"bytes","value":<base64>}`, so that they differ from every text,
- the pairs of a "dict" envelope are sorted by their own canonical text: the order of insertion is kept in the value, but two dicts that are equal
  have one digest,
- a "json" envelope stands for the tree in its text: where a deep tree was cut is not part of what it means,
- floats are as Python's shortest `repr`, with `NaN`, `Infinity`, `-Infinity` and `-0.0`. All NaNs are one.

Invariant: these bytes never change between releases, because digests of them are stored in histories.
"""

from __future__ import annotations

import base64
import json
import math
from hashlib import sha256
from typing import Any, Final, TypeAlias

Plain: TypeAlias = "bool | int | float | str | bytes | list[Plain] | dict[str, Plain] | None"

ENVELOPE_KEY: Final = "__type__"
_LENGTH: Final = 32

# Neither text can occur inside a JSON string, where its quotes would be escaped: found means that there is such an envelope.
_REORDERED: Final = (f'"{ENVELOPE_KEY}":"dict"', f'"{ENVELOPE_KEY}":"json"')


def canonical_bytes(plain: Plain) -> bytes:
    """Represent a plain tree as bytes that are the same in every process and release.

    Raises:
        TypeError: The tree is not plain.
    """
    text = _sorted_json(plain)
    if _REORDERED[0] in text or _REORDERED[1] in text:
        text = _sorted_json(_reordered(plain))
    return text.encode()


def digest(plain: Plain) -> str:
    """Digest a plain tree to 32 hexadecimal characters: the first half of a SHA-256, which every client, also mongosh, can compute."""
    return sha256(canonical_bytes(plain)).hexdigest()[:_LENGTH]


def to_json(plain: Plain) -> str:
    """Write a plain tree as JSON text, keys in insertion order and bytes in their envelope."""
    return _json(plain)


def _bytes_envelope(value: object) -> dict[str, str]:
    if not isinstance(value, bytes):
        raise TypeError(f"not a plain tree: it contains a {type(value).__qualname__}")
    return {ENVELOPE_KEY: "bytes", "value": base64.b64encode(value).decode()}


def _reordered(plain: Any) -> Any:
    """Copy a plain tree with "json" envelopes opened and the pairs of "dict" envelopes sorted."""
    if isinstance(plain, list):
        items = []
        for item in plain:  # a loop: a comprehension would take a second stack frame for each level
            items.append(_reordered(item))
        return items
    if not isinstance(plain, dict):
        return plain
    tag = plain.get(ENVELOPE_KEY)
    if tag == "json":
        return _reordered(json.loads(plain["value"]))
    if tag == "float":  # the bits of a NaN in such a text
        return math.nan
    copy = {}
    for key, item in plain.items():
        copy[key] = _reordered(item)
    if tag == "dict":
        copy["value"].sort(key=_sorted_json)
    return copy


# No check for cycles: a plain tree has none, and looking costs time for each container.
_json = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"), default=_bytes_envelope).encode
_sorted_json = json.JSONEncoder(ensure_ascii=False, check_circular=False, sort_keys=True, separators=(",", ":"), default=_bytes_envelope).encode
