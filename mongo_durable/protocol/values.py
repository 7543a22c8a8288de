"""Application values as plain trees that BSON holds exactly, and back.

A plain tree is made of None, bool, int of 64 bits, float, str, bytes, list, and dict with str keys. A value that is plain already is stored as it is,
so that mongosh shows it. Everything else is in an envelope, `{"__type__": <tag>, "value": <plain>}`:

    int            more than 64 bits: decimal text, or hexadecimal where the decimal text would be very long
    str            a text with lone surrogates: its bytes
    tuple, set, frozenset                 a list of the elements, for sets in canonical order
    dict           a dict with a key that a BSON document or mongosh cannot hold: a list of [key, value], in insertion order
    datetime, time text where that says all; otherwise {at}, with what it has of fold, zone, zone_name and offset
    date, timedelta, decimal, uuid
    json           what is nested deeper than MongoDB allows: the JSON text of the plain tree
    bytes, float   only inside the text of "json", which has neither bytes nor the bits of a NaN
    <name>:<name>  foreign: what `convert` made of an object (`Tagged`), for `revive` to rebuild

A type that is not named here is refused. A subclass of dict, list, str, int, float or bytes is stored as its base, except where its identity is the
point of it (enum members, named tuples, dataclasses), which only `convert` can keep.

Invariant: `decode(encode(v))` equals `v` in type, order and bits, but for those subclasses; and encoding it again gives the same digest.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
import struct
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any, Final, NoReturn, TypeAlias
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from mongo_durable.errors import NotJsonSafe, PayloadError
from mongo_durable.protocol.canonical import ENVELOPE_KEY, Plain, canonical_bytes, to_json

__all__ = ["ENVELOPE_KEY", "Plain", "Tagged", "decode", "encode"]


@dataclasses.dataclass(frozen=True, slots=True)
class Tagged:
    """A foreign value, taken apart.

    Attributes:
        type: Name of what it is, with a ':' in it (`langchain:message`): names without one belong to this module.
        value: What it is rebuilt from: application values.
    """

    type: str
    value: Any


Convert: TypeAlias = "Callable[[object], Tagged | None] | None"
Revive: TypeAlias = "Callable[[Tagged], object] | None"

# MongoDB refuses documents of more than 100 levels; ours are wrapped in an event, and the envelopes at the cut add up to five levels.
_NATURAL_LEVELS: Final = 60
# Invariant: every recursion here takes at most one stack frame for each level, so this stays well below Python's limit of 1000.
_MAX_LEVELS: Final = 500

_I64: Final = 1 << 63
# The shortest limit that sys.set_int_max_str_digits can set is 640 digits; 2000 bits are 603.
_DECIMAL_BITS: Final = 2000

_AS_IS: Final = frozenset({type(None), bool, float, bytes})
_is_plain_key = re.compile(rf"(?!\$)(?!{ENVELOPE_KEY}\Z)[^.\x00\ud800-\udfff]+").fullmatch


def encode(value: object, *, convert: Convert = None, path: str = "$") -> Plain:
    """Turn an application value into a plain tree that shares nothing mutable with it.

    Args:
        value: Any application value; it is not changed.
        convert: Takes apart an object of a type that is not built in, or returns None if it cannot either. Not asked about subclasses that are
            stored as their base.
        path: What the value is called in an error.

    Raises:
        NotJsonSafe: A part of the value cannot be stored and read back exactly, contains itself, or is nested too deeply.
    """
    try:
        plain: Plain = _plain(value, 1, _NATURAL_LEVELS, convert)
    except _Refused as refused:
        error = refused.as_error(path)
    else:
        return plain
    raise error  # out here, so that the unwinding and the containers in it are not kept as its context


def decode(plain: Plain, *, revive: Revive = None) -> Any:
    """Turn a plain tree back into the application value, made of fresh objects.

    Args:
        plain: What `encode` returned, or the same after a way through BSON.
        revive: Rebuilds a foreign value. None leaves it as a `Tagged`.

    Raises:
        PayloadError: The tree has a tag that this release does not know, or an envelope that is malformed.
    """
    return _object(plain, revive)


# --- encoding ---------------------------------------------------------------------------------------------------------------------------------------


class _Refused(Exception):
    """Unwinds the recursion, and collects on its way the containers passed and the step into each: paths cost nothing until then."""

    def __init__(self, value: object, why: str | None) -> None:
        super().__init__(why)
        self.value = value
        self.why = why  # None: nested too deeply, or without end
        self.trail: list[tuple[object, str]] = []

    def as_error(self, path: str) -> NotJsonSafe:
        steps = self.trail[::-1]
        if self.why is not None:
            where, name = path + "".join(step for _, step in steps), _type_name(self.value)
            return NotJsonSafe(f"{where} is of type {name}, which cannot be stored and read back exactly: {self.why}", path=where, type=name)
        seen: set[int] = set()
        for passed, (container, _) in enumerate(steps):
            if id(container) in seen:
                where, name = path + "".join(step for _, step in steps[:passed]), _type_name(container)
                return NotJsonSafe(f"{where} contains itself (it is a {name}): store a reference, such as an id, instead", path=where, type=name)
            seen.add(id(container))
        where, name = path + "".join(step for _, step in steps[:12]) + "…", _type_name(self.value)
        return NotJsonSafe(f"{where} is nested more than {_MAX_LEVELS} levels deep: store it flat, or as text", path=where, type=name)


def _plain(value: Any, depth: int, limit: int, convert: Convert) -> Any:
    """Encode one value.

    Args:
        depth: Level in the encoded tree that the result would have as a container; the root is 1.
        limit: `_NATURAL_LEVELS`, or `_MAX_LEVELS` inside what becomes a JSON text.
    """
    kind = type(value)
    if kind is str:
        return value if value.isascii() else _text(value)
    if kind is dict:
        if depth > limit:
            return _cut(value, depth, limit, convert)
        for key in value:
            # Before any item: an item must not be encoded a second time because a later key needs the envelope (exponential when nested).
            if type(key) is not str or not _is_plain_key(key):
                return _odd_dict(value, depth, limit, convert)
        fields: dict[str, Any] = {}
        key = ""
        try:
            for key, item in value.items():
                kind = type(item)
                if kind in _AS_IS or (kind is str and item.isascii()):
                    fields[key] = item
                else:
                    fields[key] = _plain(item, depth + 1, limit, convert)
        except _Refused as refused:
            refused.trail.append((value, _key_step(key)))
            raise
        return fields
    if kind is list:
        if depth > limit:
            return _cut(value, depth, limit, convert)
        items: list[Any] = []
        try:
            for item in value:
                kind = type(item)
                if kind in _AS_IS or (kind is str and item.isascii()):
                    items.append(item)
                else:
                    items.append(_plain(item, depth + 1, limit, convert))
        except _Refused as refused:
            refused.trail.append((value, f"[{len(items)}]"))
            raise
        return items
    if kind is int:
        return value if -_I64 <= value < _I64 else _big_int(value)
    if kind in _AS_IS:
        return value
    leaf = _LEAVES.get(kind)
    if leaf is not None:
        return {ENVELOPE_KEY: leaf[0], "value": leaf[1](value)}
    if isinstance(value, dict) and not _is_more_than_its_base(value):
        return _odd_dict(value, depth, limit, convert)
    return _other(value, kind, depth, limit, convert)


def _odd_dict(value: dict[Any, Any], depth: int, limit: int, convert: Convert) -> Any:
    """Encode a dict of a subclass, or with a key that is not a plain one; a key of a subclass of str counts as its base."""
    if depth > limit:
        return _cut(value, depth, limit, convert)
    items = [(str.__str__(key) if isinstance(key, str) and not isinstance(key, Enum) else key, item) for key, item in dict(value).items()]
    is_natural = all(type(key) is str and _is_plain_key(key) for key, _ in items)
    levels = 2 if is_natural else 3  # envelope, list, pair; a natural one counts for two because it took two stack frames
    pairs: list[Any] = []
    step = ""
    try:
        for key, item in items:
            step = f"[key {len(pairs)}]"
            name = _plain(key, depth + 3, limit, convert)
            step = _key_step(key)
            pairs.append([name, _plain(item, depth + levels, limit, convert)])
    except _Refused as refused:
        refused.trail.append((value, step))
        raise
    return dict(pairs) if is_natural else {ENVELOPE_KEY: "dict", "value": pairs}


def _other(value: Any, kind: type, depth: int, limit: int, convert: Convert) -> Any:
    """Encode a value that is neither plain nor a leaf of this module's own types."""
    if kind in _COLLECTIONS:
        if depth > limit:
            return _cut(value, depth, limit, convert)
        items: list[Any] = []
        try:
            for item in value:
                items.append(_plain(item, depth + 2, limit, convert))
        except _Refused as refused:
            refused.trail.append((value, f"[{len(items)}]" if kind is tuple else "[*]"))
            raise
        if kind is not tuple:
            items.sort(key=canonical_bytes)
        return {ENVELOPE_KEY: kind.__name__, "value": items}
    if kind is Tagged:
        tagged = value
    else:
        if not _is_more_than_its_base(value) and (base := _base(value)) is not None:
            return _through(value, base[0], depth, limit, convert)
        converted = convert(value) if convert is not None else None
        if converted is None:
            _refuse(value)
        tagged = converted
    if not isinstance(tagged.type, str) or ":" not in tagged.type or not tagged.type.isascii():
        raise _Refused(value, "its tag is not an ASCII name with a ':' in it; names without one are reserved")
    if depth > limit:
        return _cut(value, depth, limit, convert)
    return {ENVELOPE_KEY: tagged.type, "value": _through(value, tagged.value, depth, limit, convert)}


def _through(value: object, inner: object, depth: int, limit: int, convert: Convert) -> Any:
    """Encode what stands for a value, three levels on: this detour takes three stack frames, and the levels are what bounds those."""
    try:
        return _plain(inner, depth + 3, limit, convert)
    except _Refused as refused:
        refused.trail.append((value, ""))
        raise


def _cut(value: object, depth: int, limit: int, convert: Convert) -> dict[str, Any]:
    """Encode a container below the natural levels as JSON text."""
    if limit == _MAX_LEVELS:
        raise _Refused(value, None)
    tree = _plain(value, depth, _MAX_LEVELS, convert)
    text = to_json(tree)
    return {ENVELOPE_KEY: "json", "value": to_json(_with_nan_bits(tree)) if "NaN" in text else text}


def _with_nan_bits(plain: Any) -> Any:
    """Copy a plain tree with each NaN in an envelope: JSON text would lose its sign and payload."""
    if isinstance(plain, list):
        items = []
        for item in plain:
            items.append(_with_nan_bits(item))
        return items
    if isinstance(plain, dict):
        fields = {}
        for key, item in plain.items():
            fields[key] = _with_nan_bits(item)
        return fields
    if isinstance(plain, float) and math.isnan(plain):
        return {ENVELOPE_KEY: "float", "value": struct.pack(">d", plain).hex()}
    return plain


def _is_more_than_its_base(value: object) -> bool:
    return isinstance(value, (Enum, tuple)) or dataclasses.is_dataclass(value)


def _base(value: object) -> tuple[Any] | None:
    """Copy a value of a subclass to its base, in a tuple; None if it is of no such subclass. What the subclass overrides is not asked."""
    if isinstance(value, str):
        return (str.__str__(value),)
    if isinstance(value, list):
        return (list.copy(value),)
    if isinstance(value, int):
        return (int.__int__(value),)
    if isinstance(value, float):
        return (float.__float__(value),)
    if isinstance(value, bytes):
        return (bytes(memoryview(value)),)
    return None


def _text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        return {ENVELOPE_KEY: "str", "value": value.encode("utf-8", "surrogatepass")}
    return value


def _big_int(value: int) -> dict[str, str]:
    return {ENVELOPE_KEY: "int", "value": str(value) if value.bit_length() <= _DECIMAL_BITS else hex(value)}


def _moment(value: datetime | time) -> Any:
    parts: dict[str, Any] = {}
    zone = value.tzinfo
    if type(zone) is ZoneInfo and zone.key:
        parts["zone"] = zone.key
    elif type(zone) is timezone:
        offset, name = zone.utcoffset(None), zone.tzname(None)
        if name != timezone(offset).tzname(None):
            parts["zone_name"] = _text(name)
        if offset.microseconds:  # fromisoformat takes +00:00:00.000001 for UTC (seen on Python 3.11)
            parts["offset"] = _timedelta_parts(offset)
    elif zone is not None:
        raise _Refused(value, f"its zone is a {_type_name(zone)}; use datetime.timezone, or a zoneinfo.ZoneInfo with a key")
    if value.fold:
        parts["fold"] = 1
    if not parts:
        return value.isoformat()
    # With a zone the local time only: its offset is the zone's to say.
    local = value.replace(tzinfo=None, fold=0) if "zone" in parts or "offset" in parts else value.replace(fold=0)
    return {"at": local.isoformat(), **parts}


def _timedelta_parts(value: timedelta) -> dict[str, int]:
    return {"days": value.days, "seconds": value.seconds, "microseconds": value.microseconds}


def _decimal_text(value: Decimal) -> str:
    return str(value).replace("e", "E")  # a decimal context can ask for a small e; no other text of a Decimal has one


def _refuse(value: object) -> NoReturn:
    if isinstance(value, Enum):
        why = "pass its .value"
    elif isinstance(value, type):
        why = "pass its name"
    elif isinstance(value, tuple):
        why = "pass ._asdict() of a named tuple, or tuple(…) of it"
    elif dataclasses.is_dataclass(value):
        why = "pass dataclasses.asdict(…) of it"
    elif hasattr(value, "model_dump"):
        why = "pass .model_dump(mode='json') of it"
    elif isinstance(value, (date, time, timedelta, Decimal, UUID, set, frozenset)):
        why = "it is of a subclass that may hold more than its base; pass a value of the base"
    else:
        why = "pass values of Python's own types: None, bool, int, float, str, bytes, list, tuple, set, dict, datetime, Decimal, UUID"
    raise _Refused(value, why)


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _key_step(key: object) -> str:
    if isinstance(key, str):
        text = str.__str__(key)
        return f".{text}" if text.isidentifier() else f"[{text!r}]"
    # The repr of anything else may be long, or run code of the application.
    return f"[{key!r}]" if key is None or type(key) in (bool, float) or (type(key) is int and -_I64 <= key < _I64) else f"[<{_type_name(key)}>]"


_COLLECTIONS: Final = frozenset({tuple, set, frozenset})

_LEAVES: Final[dict[type, tuple[str, Callable[[Any], Any]]]] = {
    datetime: ("datetime", _moment),
    time: ("time", _moment),
    date: ("date", date.isoformat),
    timedelta: ("timedelta", _timedelta_parts),
    Decimal: ("decimal", _decimal_text),
    UUID: ("uuid", str),
}


# --- decoding ---------------------------------------------------------------------------------------------------------------------------------------


def _object(plain: Any, revive: Revive) -> Any:
    kind = type(plain)
    if kind is str or kind is int or kind in _AS_IS:
        return plain
    if isinstance(plain, list):
        items: list[Any] = []
        for item in plain:  # a loop: a comprehension would take a second stack frame for each level
            items.append(_object(item, revive))
        return items
    if isinstance(plain, dict):
        if ENVELOPE_KEY not in plain:
            fields: dict[str, Any] = {}
            for key, item in plain.items():
                fields[key] = _object(item, revive)
            return fields
        tag = plain[ENVELOPE_KEY]
        if len(plain) != 2 or "value" not in plain or not isinstance(tag, str):
            raise PayloadError(f"A stored value has a malformed envelope, tag {_shown(tag)}: it needs exactly {ENVELOPE_KEY} and value")
        if tag == "json":
            return _object(_build(tag, json.loads, plain["value"]), revive)
        value = _object(plain["value"], revive)
        if ":" in tag:
            tagged = Tagged(tag, value)
            return tagged if revive is None else revive(tagged)
        builder = _BUILDERS.get(tag)
        if builder is None:
            raise PayloadError(f"A stored value has the unknown type tag {_shown(tag)}: it may be from a newer mongo_durable; upgrade this process")
        return _build(tag, builder, value)
    if isinstance(plain, int):  # bson reads 64-bit integers as a subclass
        return int(plain)
    raise PayloadError(f"A stored value contains a {_type_name(plain)}, which mongo_durable never writes: write it as text or number")


def _build(tag: str, builder: Callable[[Any], Any], value: object) -> Any:
    try:
        return builder(value)
    except (ValueError, TypeError, KeyError, ArithmeticError, AttributeError, struct.error) as error:
        raise PayloadError(f"A stored value with the type tag {_shown(tag)} is malformed ({type(error).__name__}): it cannot be read back") from error


def _shown(tag: object) -> str:
    return repr(tag if isinstance(tag, str) and len(tag) <= 60 else type(tag).__name__)


def _collection(kind: type) -> Callable[[Any], Any]:
    def build(items: Any) -> Any:
        if type(items) is not list:
            raise TypeError(f"{kind.__name__} needs a list")
        return kind(items)

    return build


def _rebuilt_moment(kind: type[datetime] | type[time], value: Any) -> datetime | time:
    if isinstance(value, str):
        return kind.fromisoformat(value)
    moment = kind.fromisoformat(value["at"])
    zone = moment.tzinfo
    if "zone" in value:
        try:
            zone = ZoneInfo(value["zone"])
        except ZoneInfoNotFoundError as error:
            raise PayloadError(f"A stored time is in the zone {value['zone']!r}, which is not known here: install the tzdata package") from error
    elif "offset" in value or "zone_name" in value:
        offset = timedelta(**value["offset"]) if "offset" in value else zone.utcoffset(None) if zone is not None else None
        if offset is None:
            raise ValueError("a named offset without the offset")
        zone = timezone(offset, value["zone_name"]) if "zone_name" in value else timezone(offset)
    return moment.replace(tzinfo=zone, fold=value.get("fold", 0))


_BUILDERS: Final[dict[str, Callable[[Any], Any]]] = {
    "int": lambda text: int(text, 16 if "x" in text else 10),
    "str": lambda raw: raw.decode("utf-8", "surrogatepass"),
    "float": lambda bits: struct.unpack(">d", bytes.fromhex(bits))[0],
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "tuple": _collection(tuple),
    "set": _collection(set),
    "frozenset": _collection(frozenset),
    "dict": _collection(dict),
    "datetime": lambda value: _rebuilt_moment(datetime, value),
    "time": lambda value: _rebuilt_moment(time, value),
    "date": date.fromisoformat,
    "timedelta": lambda parts: timedelta(**parts),
    "decimal": Decimal,
    "uuid": UUID,
}
