"""Digests of plain trees are the same in every process and release, and differ where the values do."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from decimal import Decimal
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mongo_durable.protocol.canonical import canonical_bytes, digest
from mongo_durable.protocol.values import ENVELOPE_KEY, encode

GOLDEN_VALUE: Any = {
    "z": [1, 1.0, True, None, 'é\0\n"', -0.0, 1e300, math.nan, math.inf],
    "a": {"b.c": {1, 2, "x"}, (1, 2): b"\xff", 3: Decimal("1.0")},
    "big": 2**64,
}
GOLDEN_BYTES = (
    '{"a":{"__type__":"dict","value":[["b.c",{"__type__":"set","value":["x",1,2]}],[3,{"__type__":"decimal","value":"1.0"}],'
    '[{"__type__":"tuple","value":[1,2]},{"__type__":"bytes","value":"/w=="}]]},"big":{"__type__":"int","value":"18446744073709551616"},'
    '"z":[1,1.0,true,null,"é\\u0000\\n\\"",-0.0,1e+300,NaN,Infinity]}'
).encode()
GOLDEN_DIGEST = "33a7e0a638d3bb9781b62b62370dffd2"


def deep(core: Any, levels: int = 80) -> Any:
    for _ in range(levels):
        core = [core]
    return core


def test_golden_value() -> None:
    """Bytes and digest of a value never change: histories hold digests."""
    plain = encode(GOLDEN_VALUE)
    assert canonical_bytes(plain) == GOLDEN_BYTES
    assert digest(plain) == GOLDEN_DIGEST


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_digest_does_not_depend_on_the_hash_seed(seed: str) -> None:
    """Sets of texts have one digest in every process."""
    program = (
        "from mongo_durable.protocol.canonical import digest\n"
        "from mongo_durable.protocol.values import encode\n"
        "print(digest(encode({'s': {*'abcdefgh', ('a', 'b'), frozenset('xyz')}, 'd': {frozenset('pqr'): 1, 2: 3}})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True, timeout=60
    )
    here = encode({"d": {2: 3, frozenset("pqr"): 1}, "s": {*"hgfedcba", ("a", "b"), frozenset("zyx")}})
    assert done.stdout.strip() == digest(here)


DIFFERENT: list[Any] = [
    *(1, 1.0, True, "1", None, b"1", "None", "null", 0, 0.0, -0.0, False, "", b"", "MQ=="),
    *(math.nan, "NaN", math.inf, -math.inf, 2**63, str(2**63), [], {}, (), set(), frozenset(), [[]], [1], (1,), {1}, {"1": 1}, {1: 1}, {True: 1}),
    *({ENVELOPE_KEY: "bytes", "value": "MQ=="}, {ENVELOPE_KEY: "tuple", "value": [1]}, ["a", "b"], ["b", "a"], "a,b", [b"1"], ["1"]),
    *('"__type__":"dict"', '"__type__":"json"'),
]


def test_different_values_have_different_digests() -> None:
    """Values that differ in type only still differ, at the top and inside the text of a deep tree."""
    for wrap in (lambda value: value, deep):
        digests = [digest(encode(wrap(value))) for value in DIFFERENT]
        clashes = [(DIFFERENT[i], DIFFERENT[j]) for i, j in combinations(range(len(digests)), 2) if digests[i] == digests[j]]
        assert clashes == []


def shuffled(value: Any) -> Any:
    """Copy a value with every dict in reverse order."""
    if isinstance(value, dict):
        return {key: shuffled(item) for key, item in reversed(value.items())}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


keys = st.one_of(st.text(max_size=3), st.integers(), st.none(), st.tuples(st.integers(0, 3), st.text(max_size=1)))
trees = st.recursive(
    st.one_of(st.integers(), st.text(), st.binary(max_size=3), st.floats(allow_nan=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=15,
)


@settings(deadline=None)  # a busy machine is no fault
@given(trees, st.booleans())
def test_order_of_insertion_is_not_in_the_digest(value: Any, is_deep: bool) -> None:
    """Equal dicts have equal digests, whatever the order of their keys, with keys of any type and at any depth."""
    other = shuffled(value)
    assert other == value
    wrap = deep if is_deep else lambda core: core
    assert digest(encode(wrap(other))) == digest(encode(wrap(value)))


def test_where_a_deep_tree_was_cut_is_not_in_the_digest() -> None:
    """The text of a deep tree counts as the tree that it holds."""
    plain: Any = deep({"b": [1], "a": b"x"})
    assert digest(encode(plain)) == digest(plain)


def test_digest_is_32_hexadecimal_characters_and_leaves_the_tree_alone() -> None:
    """A digest is short text, and taking it sorts nothing in the tree."""
    plain = encode({2: "b", 1: "a"})
    assert len(digest(plain)) == len(bytes.fromhex(digest(plain))) * 2 == 32
    assert plain == {ENVELOPE_KEY: "dict", "value": [[2, "b"], [1, "a"]]}


def test_what_is_not_plain_has_no_canonical_bytes() -> None:
    """A tree with a foreign object is a mistake of the caller, not a digest of its repr."""
    with pytest.raises(TypeError, match="object"):
        canonical_bytes([object()])  # type: ignore[list-item]
