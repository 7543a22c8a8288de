"""Application values come back exactly, through BSON, or are refused with the path to what is wrong."""

from __future__ import annotations

import copy
import dataclasses
import enum
import math
import struct
from collections import OrderedDict, defaultdict, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import bson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mongo_durable.errors import NotJsonSafe, PayloadError
from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.values import ENVELOPE_KEY, Tagged, decode, encode


class Color(enum.Enum):
    RED = 1


class Word(enum.StrEnum):
    YES = "yes"


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Order:
    item: str


@dataclasses.dataclass
class DictOrder(dict[str, Any]):
    item: str = ""


def exact(value: Any) -> Any:
    """Describe a value so that two descriptions are equal only for values of one type, order and bits."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack(">d", value)
    if kind in (list, tuple):
        return kind, [exact(item) for item in value]
    if kind in (set, frozenset):
        return kind, sorted((exact(item) for item in value), key=repr)
    if kind is dict:
        return kind, [(exact(key), exact(item)) for key, item in value.items()]
    if kind in (datetime, time):
        zone = value.tzinfo
        parts = zone.key if isinstance(zone, ZoneInfo) else (zone.utcoffset(None), zone.tzname(None)) if zone else None
        return kind, value.replace(tzinfo=None, fold=0).isoformat(), value.fold, type(zone), parts
    if kind is Decimal:
        return kind, value.as_tuple()
    if kind is Tagged:
        return kind, value.type, exact(value.value)
    return kind, value


def through_bson(plain: Any) -> Any:
    return bson.decode(bson.encode({"v": plain}))["v"]


def assert_exact_trip(value: Any) -> None:
    plain = encode(value)
    assert exact(decode(plain)) == exact(value)
    assert exact(decode(through_bson(plain))) == exact(value)
    assert digest(through_bson(plain)) == digest(plain)


def levels(plain: Any) -> int:
    children = plain.values() if isinstance(plain, dict) else plain if isinstance(plain, list) else None
    return 0 if children is None else 1 + max(map(levels, children), default=0)


def nested(depth: int, kind: type = list, core: Any = 0) -> Any:
    value = core
    for _ in range(depth):
        value = {"k": value} if kind is dict else kind([value])
    return value


BERLIN = ZoneInfo("Europe/Berlin")
zones = st.one_of(
    st.none(),
    st.sampled_from([UTC, BERLIN, ZoneInfo("America/New_York"), ZoneInfo("UTC")]),
    st.builds(timezone, st.timedeltas(timedelta(hours=-23, minutes=-59), timedelta(hours=23, minutes=59))),
    st.builds(timezone, st.timedeltas(timedelta(hours=-12), timedelta(hours=12)), st.text(max_size=5)),
)
moments = st.one_of(
    st.builds(lambda at, zone, fold: at.replace(tzinfo=zone, fold=fold), st.datetimes(), zones, st.sampled_from([0, 1])),
    st.builds(lambda at, zone, fold: at.replace(tzinfo=zone, fold=fold), st.times(), zones, st.sampled_from([0, 1])),
)
any_text = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates and NUL as well
hashable_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**66), 2**66),
    st.floats(),
    any_text,
    st.sampled_from(["", "a.b", "$x", "\0", ENVELOPE_KEY, "$ref", "value"]),
    st.binary(max_size=8),
    moments,
    st.dates(),
    st.timedeltas(),
    st.decimals().filter(lambda number: not number.is_snan()),  # a signaling NaN has no hash
    st.uuids(),
)
hashables = st.recursive(
    hashable_leaves, lambda inner: st.one_of(st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)), max_leaves=5
)
values = st.recursive(
    st.one_of(hashables, st.decimals()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("abc_", min_size=1), inner, max_size=4),
        st.dictionaries(hashables, inner, max_size=4),
        st.sets(hashables, max_size=4),
        st.builds(Tagged, st.sampled_from(["x:y", "langchain:message"]), inner),
    ),
    max_leaves=20,
)


@settings(deadline=None)  # a busy machine is no fault
@given(values)
def test_round_trip_is_exact_also_through_bson(value: Any) -> None:
    """Every value of the built-in types comes back with its type, order and bits, and BSON changes neither it nor its digest."""
    assert_exact_trip(value)


@settings(deadline=None)  # a busy machine is no fault
@given(values, st.sampled_from([list, tuple, dict]), st.integers(50, 150))
def test_round_trip_is_exact_at_any_depth(value: Any, kind: type, depth: int) -> None:
    """A value below the level at which MongoDB stops is as exact as one above."""
    assert_exact_trip(nested(depth, kind, value))


@settings(deadline=None)  # a busy machine is no fault
@given(values)
def test_encoding_is_deterministic_and_leaves_the_value_alone(value: Any) -> None:
    """Encoding twice, or what was decoded, gives the same digest; the input is not changed."""
    before = exact(copy.deepcopy(value))
    first = encode(value)
    assert exact(first) == exact(encode(value))
    assert digest(encode(decode(first))) == digest(first)
    assert exact(value) == before


CASES: list[tuple[Any, Any]] = [
    (
        {"a.b": 1, "$x": 2, "": 3, "\0": 4},
        {ENVELOPE_KEY: "dict", "value": [["a.b", 1], ["$x", 2], ["", 3], ["\0", 4]]},
    ),
    (2**70, {ENVELOPE_KEY: "int", "value": "1180591620717411303424"}),
    (-(2**63), -(2**63)),
    (2**63, {ENVELOPE_KEY: "int", "value": "9223372036854775808"}),
    (math.nan, math.nan),
    (-0.0, -0.0),
    (b"\x00\xff", b"\x00\xff"),
    ("NUL \0 is fine", "NUL \0 is fine"),
    ("\ud800", {ENVELOPE_KEY: "str", "value": b"\xed\xa0\x80"}),
    ((1, "a"), {ENVELOPE_KEY: "tuple", "value": [1, "a"]}),
    ({3, 1, 2}, {ENVELOPE_KEY: "set", "value": [1, 2, 3]}),
    (frozenset(), {ENVELOPE_KEY: "frozenset", "value": []}),
    ({1: "a", None: "b", True is None: "c"}, {ENVELOPE_KEY: "dict", "value": [[1, "a"], [None, "b"], [False, "c"]]}),
    ({ENVELOPE_KEY: "tuple", "value": []}, {ENVELOPE_KEY: "dict", "value": [[ENVELOPE_KEY, "tuple"], ["value", []]]}),
    ({ENVELOPE_KEY + "s": 1}, {ENVELOPE_KEY + "s": 1}),
    (datetime(2024, 5, 6, 7, 8, 9, 10), {ENVELOPE_KEY: "datetime", "value": "2024-05-06T07:08:09.000010"}),  # noqa: DTZ001 - naive is the case
    (datetime(2024, 5, 6, tzinfo=UTC), {ENVELOPE_KEY: "datetime", "value": "2024-05-06T00:00:00+00:00"}),
    (
        datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=1),
        {ENVELOPE_KEY: "datetime", "value": {"at": "2024-10-27T02:30:00", "zone": "Europe/Berlin", "fold": 1}},
    ),
    (
        time(1, 2, tzinfo=timezone(timedelta(hours=2), "EET")),
        {ENVELOPE_KEY: "time", "value": {"at": "01:02:00+02:00", "zone_name": "EET"}},
    ),
    (
        time(1, 2, tzinfo=timezone(timedelta(microseconds=1))),
        {ENVELOPE_KEY: "time", "value": {"at": "01:02:00", "offset": {"days": 0, "seconds": 0, "microseconds": 1}}},
    ),
    (date(2024, 2, 29), {ENVELOPE_KEY: "date", "value": "2024-02-29"}),
    (timedelta(days=-1, microseconds=5), {ENVELOPE_KEY: "timedelta", "value": {"days": -1, "seconds": 0, "microseconds": 5}}),
    (Decimal("-sNaN12"), {ENVELOPE_KEY: "decimal", "value": "-sNaN12"}),
    (Decimal("1.50"), {ENVELOPE_KEY: "decimal", "value": "1.50"}),
    (UUID(int=5), {ENVELOPE_KEY: "uuid", "value": "00000000-0000-0000-0000-000000000005"}),
    (Tagged("app:point", (1,)), {ENVELOPE_KEY: "app:point", "value": {ENVELOPE_KEY: "tuple", "value": [1]}}),
]


@pytest.mark.parametrize(("value", "plain"), CASES, ids=[repr(value)[:40] for value, _ in CASES])
def test_stored_form(value: Any, plain: Any) -> None:
    """The stored form of each type is fixed, because histories hold it."""
    assert exact(encode(value)) == exact(plain)
    assert_exact_trip(value)


@pytest.mark.parametrize("bits", ["7ff8000000000000", "fff8000000000000", "7ff8000000000001"])
@pytest.mark.parametrize("depth", [1, 80])
def test_bits_of_nan(bits: str, depth: int) -> None:
    """A NaN keeps its sign and payload at any depth, and its digest is that of every NaN."""
    value = nested(depth, core=[struct.unpack(">d", bytes.fromhex(bits))[0], {"a.b": math.inf}])
    assert_exact_trip(value)
    assert digest(encode(value)) == digest(encode(nested(depth, core=[math.nan, {"a.b": math.inf}])))


@pytest.mark.parametrize("digits", [603, 604, 5000])
def test_very_long_int(digits: int) -> None:
    """An int is exact at any length, also past Python's limit for decimal text."""
    assert_exact_trip(10**digits)
    assert_exact_trip(-(10**digits))


def test_zone_is_the_same_object() -> None:
    """A zone comes back as the zone that the process has for its key."""
    back = decode(encode(datetime(2024, 1, 1, tzinfo=BERLIN)))
    assert back.tzinfo is BERLIN


@pytest.mark.parametrize(
    ("value", "base"),
    [
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (type("L", (list,), {})([1]), [1]),
        (Text("é"), "é"),
        (type("I", (int,), {})(7), 7),
        (type("F", (float,), {})(0.5), 0.5),
        (type("B", (bytes,), {})(b"x"), b"x"),
        ({Text("a"): 1}, {"a": 1}),
    ],
)
def test_subclass_is_stored_as_its_base(value: Any, base: Any) -> None:
    """A subclass of a plain type is stored as if it were the base, and `convert` is not asked."""

    def convert(asked: object) -> Tagged:
        raise AssertionError(asked)

    assert exact(encode(value, convert=convert)) == exact(base)


def test_ordered_dict_keeps_its_own_order() -> None:
    """The order of an OrderedDict is the one that it shows, also after a move."""
    value = OrderedDict(a=1, b=2)
    value.move_to_end("a")
    assert list(encode(value)) == ["b", "a"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        ({"items": [1, 2, {"when": Color.RED}]}, "$.items[2].when", f"{__name__}.Color"),
        ({"a.b": object()}, "$['a.b']", "object"),
        ({"a b": {1: complex(1)}}, "$['a b'][1]", "complex"),
        ({"a": {Word.YES: 1}}, "$.a[key 0]", f"{__name__}.Word"),
        ({"a": {(1,): bytearray()}}, "$.a[<tuple>]", "bytearray"),
        ((1, [Level.LOW]), "$[1][0]", f"{__name__}.Level"),
        ({"s": {Point(1, 2)}}, "$.s[*]", f"{__name__}.Point"),
        ([Order("x")], "$[0]", f"{__name__}.Order"),
        ([DictOrder("x")], "$[0]", f"{__name__}.DictOrder"),
        (Word.YES, "$", f"{__name__}.Word"),
        (Tagged("app:x", {"y": object}), "$.y", "type"),
        ([Tagged("tuple", [1])], "$[0]", f"{Tagged.__module__}.Tagged"),
        (OrderedDict(x=iter(())), "$.x", "tuple_iterator"),
        (nested(70, core={"z": object()}), "$" + "[0]" * 70 + ".z", "object"),
    ],
)
def test_refusal_names_path_and_type(value: Any, path: str, kind: str) -> None:
    """What cannot be stored is refused with its path, its type and what to do."""
    with pytest.raises(NotJsonSafe) as caught:
        encode(value)
    assert (caught.value.path, caught.value.type) == (path, kind)
    assert path in str(caught.value)
    assert kind in str(caught.value)
    assert caught.value.__context__ is None


def test_path_starts_where_the_caller_says() -> None:
    """The root of the path is the caller's name for the value."""
    with pytest.raises(NotJsonSafe) as caught:
        encode([object()], path="$.input")
    assert caught.value.path == "$.input[0]"


def test_a_foreign_zone_is_refused() -> None:
    """A time in a zone that has no key is refused rather than stored with its offset alone."""

    class Local(timezone.__base__):  # type: ignore[misc, name-defined]
        pass

    with pytest.raises(NotJsonSafe, match="zoneinfo"):
        encode({"at": datetime(2024, 1, 1, tzinfo=Local())})


def test_convert_and_revive_keep_what_this_module_cannot() -> None:
    """An object goes out through `convert` and comes back through `revive`, wherever it is, a dict key included."""

    def convert(value: object) -> Tagged | None:
        if isinstance(value, Color):
            return Tagged("app:color", value.value)
        if isinstance(value, Order):
            return Tagged("app:order", {"item": value.item})
        return Tagged("app:point", tuple(value)) if isinstance(value, Point) else None

    def revive(tagged: Tagged) -> object:
        return {"app:color": Color, "app:order": lambda parts: Order(**parts), "app:point": lambda pair: Point(*pair)}[tagged.type](tagged.value)

    value = {Color.RED: [Order("x"), (Point(1, 2), {Color.RED})]}
    plain = through_bson(encode(value, convert=convert))
    assert decode(plain, revive=revive) == value
    assert decode(encode(Color.RED, convert=convert)) == Tagged("app:color", 1)
    with pytest.raises(NotJsonSafe):
        encode([object()], convert=convert)


def test_refusal_inside_a_converted_object_names_the_path() -> None:
    """A converted object is transparent to the path."""
    with pytest.raises(NotJsonSafe) as caught:
        encode([Order("x")], convert=lambda value: Tagged("app:order", {"raw": iter("x")}) if isinstance(value, Order) else None)
    assert caught.value.path == "$[0].raw"


def test_cycle_is_refused() -> None:
    """A value that contains itself is refused where it does so for the first time."""
    inner: dict[str, Any] = {}
    inner["again"] = [inner]
    with pytest.raises(NotJsonSafe, match="contains itself") as caught:
        encode({"x": [1, inner]})
    assert (caught.value.path, caught.value.type) == ("$.x[1].again[0]", "dict")
    order = Order("x")
    with pytest.raises(NotJsonSafe, match="contains itself"):
        encode(order, convert=lambda value: Tagged("app:order", [value]))
    ordered: OrderedDict[str, Any] = OrderedDict()
    ordered["a"] = (ordered,)
    with pytest.raises(NotJsonSafe, match="contains itself"):
        encode(ordered)


def test_sharing_is_not_a_cycle() -> None:
    """The same object in two places is stored twice."""
    shared = [1]
    assert encode({"a": shared, "b": [shared, shared]}) == {"a": [1], "b": [[1], [1]]}


@pytest.mark.parametrize("kind", [list, dict, tuple, frozenset, OrderedDict, Tagged, "odd"])
def test_depth_has_an_end(kind: Any) -> None:
    """Every kind of nesting fits MongoDB or is refused, never a recursion error, with half of Python's stack in use already."""

    def wrap(value: Any) -> Any:
        if kind in (list, tuple, frozenset):
            return kind([value])
        return Tagged("a:b", value) if kind is Tagged else {"a.b": value} if kind == "odd" else kind(k=value)

    def at_stack_depth(frames: int, value: Any) -> Any:
        if frames:
            return at_stack_depth(frames - 1, value)
        plain = encode(value)
        digest(plain)
        return plain, decode(plain)

    deepest = {list: 500, dict: 500, tuple: 250, frozenset: 250, OrderedDict: 250, Tagged: 167, "odd": 167}[kind]
    value: Any = 1
    for _ in range(deepest):
        value = wrap(value)
    plain, back = at_stack_depth(350, value)
    assert levels(plain) <= 66
    assert digest(encode(back)) == digest(plain)
    with pytest.raises(NotJsonSafe, match="levels deep") as caught:
        at_stack_depth(350, wrap(value))
    assert len(str(caught.value)) < 500


def test_bad_keys_at_every_level_take_linear_time() -> None:
    """A value with an odd key on each level is encoded once, not once more for each level above it."""
    calls = 0

    def convert(value: object) -> Tagged:
        nonlocal calls
        calls += 1
        return Tagged("app:leaf", None)

    value: Any = Color.RED
    for _ in range(30):
        value = {"a": value, "x.y": 1}
    encode(value, convert=convert)
    assert calls == 1


def test_decode_returns_fresh_objects() -> None:
    """Changing a decoded value does not change the stored tree."""
    plain = encode({"a": [1, {"b": []}]})
    decode(plain)["a"][1]["b"].append(1)
    assert plain == {"a": [1, {"b": []}]}


@pytest.mark.parametrize(
    ("plain", "names"),
    [
        ({ENVELOPE_KEY: "matrix", "value": []}, "matrix"),
        ({ENVELOPE_KEY: "tuple"}, "tuple"),
        ({ENVELOPE_KEY: "tuple", "value": [], "more": 1}, "tuple"),
        ({ENVELOPE_KEY: "tuple", "value": "abc"}, "tuple"),
        ({ENVELOPE_KEY: 5, "value": "abc"}, "int"),
        ({ENVELOPE_KEY: "set", "value": [[]]}, "set"),
        ({ENVELOPE_KEY: "dict", "value": [[1]]}, "dict"),
        ({ENVELOPE_KEY: "int", "value": "1.5"}, "int"),
        ({ENVELOPE_KEY: "int", "value": 3}, "int"),
        ({ENVELOPE_KEY: "str", "value": "x"}, "str"),
        ({ENVELOPE_KEY: "datetime", "value": "yesterday"}, "datetime"),
        ({ENVELOPE_KEY: "datetime", "value": {"at": "2024-01-01", "zone": "Mars/Base"}}, "Mars/Base"),
        ({ENVELOPE_KEY: "decimal", "value": "one"}, "decimal"),
        ({ENVELOPE_KEY: "json", "value": "{"}, "json"),
        ({ENVELOPE_KEY: "uuid", "value": "1"}, "uuid"),
        ({ENVELOPE_KEY: "float", "value": "00"}, "float"),
        ({ENVELOPE_KEY: "bytes", "value": "?"}, "bytes"),
        ([bson.ObjectId()], "ObjectId"),
        ({"when": datetime(2024, 1, 1, tzinfo=UTC)}, "datetime"),
    ],
)
def test_malformed_tree_is_a_payload_error(plain: Any, names: str) -> None:
    """A tree that `encode` cannot have written is an error that names the tag or type, never another value."""
    with pytest.raises(PayloadError, match=names):
        decode(plain)


def test_revive_errors_are_its_own() -> None:
    """An error in `revive` reaches the caller unchanged."""

    def revive(tagged: Tagged) -> object:
        raise LookupError(tagged.type)

    with pytest.raises(LookupError):
        decode([encode((Tagged("app:x", 1),))], revive=revive)
