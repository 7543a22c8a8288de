"""A value is the same in mongosh and in Python: the same digest, the same documents, and the same verdict of a schema."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from mongo_durable.engine.schemas import schema_faults
from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.values import encode
from tests.support.mongosh import Mongosh, MongoshError

pytestmark = pytest.mark.xdist_group("mongosh")

SAME = [
    ("1", 1),
    ("1.0", 1),  # JavaScript does not know the difference
    ("Double(1)", 1.0),
    ("Double(-0)", -0.0),
    ("-0", -0.0),
    ("0.1", 0.1),
    ("1e-5", 1e-05),
    ("0.0001", 0.0001),
    ("-1.5e-300", -1.5e-300),
    ("5e-324", 5e-324),
    ("Double(1e15)", 1e15),
    ("Double(1e16)", 1e16),
    ("Double(123456789012345680)", 123456789012345680.0),
    ("Double(1e22)", 1e22),
    ("Double(1.7976931348623157e308)", 1.7976931348623157e308),
    ("NaN", float("nan")),
    ("-Infinity", float("-inf")),
    ("2147483647", 2147483647),
    ("-2147483648", -2147483648),
    ("2147483648", 2147483648),
    ("9007199254740991", 9007199254740991),
    ('Long("9223372036854775807")', 2**63 - 1),
    ('Long("5")', 5),
    ("Int32(5)", 5),
    ("5n", 5),
    ("(2n ** 63n)", 2**63),
    ("(-(2n ** 70n))", -(2**70)),
    ("(2n ** 2000n)", 2**2000),
    ("(-(2n ** 2000n))", -(2**2000)),
    ("(2n ** 2000n - 1n)", 2**2000 - 1),
    ('"ü \\u0000 \\" \\\\ \\n \\u007f \\u2028 𝄞"', 'ü \x00 " \\ \n \x7f \u2028 𝄞'),
    ("BinData(0, 'AAEC')", b"\x00\x01\x02"),
    ("{}", {}),
    ("[]", []),
    ("null", None),
    ('{"": 1, "$set": 2, "a.b": {"__type__": 3}, "\\u0000": 4}', {"": 1, "$set": 2, "a.b": {"__type__": 3}, "\x00": 4}),
    ('{"\\uffff": 1, "𝄞": 2, "z": 3, "10": 4, "9": 5}', {"\uffff": 1, "𝄞": 2, "z": 3, "10": 4, "9": 5}),
    ('{".𝄞": 1, ".\\uffff": 2, "10": [], "9": {}}', {".𝄞": 1, ".\uffff": 2, "10": [], "9": {}}),
]


def test_the_same_value_has_the_same_digest(mongosh: Mongosh) -> None:
    """Numbers of every size, texts in every script, keys that BSON cannot hold: each digest is the library's."""
    found = mongosh.value(f"[{', '.join(f'durable.internals.digest({text})' for text, _ in SAME)}]")
    assert dict(zip((text for text, _ in SAME), found, strict=True)) == {text: digest(encode(value)) for text, value in SAME}


def _random_value(randomly: random.Random, depth: int = 0) -> Any:
    kind = randomly.randrange(8 if depth < 4 else 6)
    if kind == 0:
        return randomly.choice([None, True, False])
    if kind in (1, 2):
        return randomly.randrange(-(2 ** randomly.randrange(1, 53)), 2 ** randomly.randrange(1, 53))
    if kind == 3:
        return randomly.randrange(1, 10**17) / 10 ** randomly.randrange(18, 330)  # never whole
    if kind in (4, 5):
        return _random_text(randomly)
    if kind == 6:
        return [_random_value(randomly, depth + 1) for _ in range(randomly.randrange(4))]
    return {_random_text(randomly): _random_value(randomly, depth + 1) for _ in range(randomly.randrange(5))}


def _random_text(randomly: random.Random) -> str:
    letters = ["a", "Z", "7", ".", "$", "\0", "\x1f", '"', "\\", "é", "\u2029", "\uffff", "𝄞"]
    return "".join(randomly.choices(letters, k=randomly.randrange(5)))


def test_random_values_have_the_same_digest(mongosh: Mongosh) -> None:
    """Two thousand JSON values, made at random."""
    randomly = random.Random(2027)
    texts = [json.dumps(_random_value(randomly)) for _ in range(2000)]
    found = mongosh.value(f"{json.dumps(texts)}.map((text) => durable.internals.digest(JSON.parse(text)))")
    wrong = [text for text, each in zip(texts, found, strict=True) if each != digest(encode(json.loads(text)))]
    assert wrong == []


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("undefined", "it is undefined"),
        ("{a: [1, undefined]}", r"\$\.a\[1\] .* undefined"),
        ("new Date(0)", "it is Date"),
        ("ObjectId()", "it is ObjectId"),
        ("Decimal128('1')", "it is Decimal128"),
        ("UUID()", "it is Binary"),
        ("/x/", "it is RegExp"),
        ("new Map()", "it is Map"),
        ("() => 1", "it is"),
        ("2 ** 60", "rounded"),
        ("1e300", "rounded"),
        ('"\\ud800"', "lone surrogate"),
        ('{"\\ud800": 1}', "lone surrogate"),
        ("JSON.parse('{\"__proto__\": 1}')", "__proto__"),
        ('{a: {"_bsontype": "Long"}}', "_bsontype"),
        ('{"toBSON": 1}', "toBSON"),
        ("JSON.parse('['.repeat(61) + ']'.repeat(61))", "60 levels"),
    ],
)
def test_what_cannot_be_stored_exactly_is_refused(mongosh: Mongosh, expression: str, why: str) -> None:
    """Nothing is rounded, dropped or turned into something else: the message says where it is and what to write."""
    with pytest.raises(MongoshError, match=why) as refused:
        mongosh.value(f"durable.internals.digest({expression})")
    assert refused.value.name == "NotJsonSafe"


SCHEMAS: list[dict[str, Any] | bool] = [
    True,
    False,
    {},
    {"title": "t", "description": "d", "default": 3, "examples": [], "format": "email"},
    {"type": "object"},
    {"type": ["integer", "null"]},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "string", "minLength": 1, "maxLength": 2},
    {"type": "array", "minItems": 1, "maxItems": 2},
    {"enum": [1, "a", None, [1], {"a": True}]},
    {"enum": [True, 0]},
    {"const": {"a": [1]}},
    {"const": 1.0},
    {"required": ["a"], "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    {"properties": {"a": {"type": "integer"}}, "additionalProperties": False},
    {"properties": {"a": True}, "additionalProperties": {"type": "string"}},
    {"additionalProperties": False},
    {"propertyNames": {"maxLength": 1}},
    {"minProperties": 1, "maxProperties": 1},
    {"items": {"type": "integer"}},
    {"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
    {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}},
    {"uniqueItems": True},
    {"minimum": 1, "maximum": 3},
    {"exclusiveMinimum": 0, "exclusiveMaximum": 1.5},
    {"multipleOf": 2},
    {"pattern": "^[a-z]+$"},
    {"pattern": "a|b"},
    {"allOf": [{"type": "integer"}, {"minimum": 2}]},
    {"anyOf": [{"type": "string"}, {"minimum": 2}]},
    {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
    {"not": {"type": "object"}},
    {"$defs": {"n": {"type": "integer"}, "a/b~c": {"type": "string"}}, "anyOf": [{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/a~1b~0c"}]},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "integer"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": {"type": "boolean"}},
    {"$ref": "#/$defs/n", "minimum": 2, "$defs": {"n": {"type": "integer"}}},
]

ANSWERS: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    -4,
    1.0,
    1.5,
    2**40,
    2**70,
    float("nan"),
    "",
    "a",
    "ab",
    "abc",
    "𝄞",
    "A1",
    [],
    [1],
    [1, "a"],
    ["a", 1],
    [1, 1.0],
    [1, True],
    [[1], [1]],
    {},
    {"a": 1},
    {"a": "1"},
    {"a": True},
    {"a": [1]},
    {"a": {"a": {}}},
    {"a": 1, "b": "x"},
    {"a": 1, "cc": "x"},
    {"b": True},
    {"bytes": None},
    {"constructor": 1, "a.b": 2},
]


def _javascript(value: Any) -> str:
    """A literal of the very value: whole floating-point numbers and large integers are none in JSON."""
    if isinstance(value, list):
        return f"[{', '.join(map(_javascript, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)}: {_javascript(each)}' for key, each in value.items())}}}"
    if isinstance(value, float):
        return f"Double({json.dumps(value)})"
    return f"{value}n" if type(value) is int and abs(value) > 2**53 else json.dumps(value)


def test_a_schema_has_the_same_verdict(mongosh: Mongosh) -> None:
    """Every schema with every answer: mongosh takes exactly the answers that the library takes."""
    schemas, answers = (f"[{', '.join(map(_javascript, each))}]" for each in (SCHEMAS, ANSWERS))
    check = "(schema) => answers.map((answer) => durable.internals.faults(schema, answer).length === 0)"
    found = mongosh.value(f"(() => {{ const answers = {answers}; return {schemas}.map({check}) }})()")
    for schema, verdicts in zip(SCHEMAS, found, strict=True):
        taken = [answer for answer, is_taken in zip(ANSWERS, verdicts, strict=True) if is_taken]
        assert repr(taken) == repr([answer for answer in ANSWERS if not schema_faults(schema, answer)]), schema


@pytest.mark.parametrize(
    ("schema", "answer", "what"),
    [
        ({"if": {"type": "string"}}, "a", "the keyword if"),
        ({"properties": {"a": {"patternProperties": {}}}}, {"a": {}}, "the keyword patternProperties"),
        ({"unevaluatedProperties": False}, {}, "the keyword unevaluatedProperties"),
        ({"minLenght": 3}, "a", "the keyword minLenght"),
        ({"constructor": {}}, 1, "the keyword constructor"),
        ({"$ref": "https://example.com/schema"}, 1, "a reference to"),
        ({"$ref": "#/$defs/gone"}, 1, "which is not there"),
        ({"$ref": "#"}, 1, "without end"),
        ({"$schema": "http://json-schema.org/draft-04/schema#"}, 1, "draft 2020-12"),
        ({"type": "decimal"}, 1, "the type decimal"),
        ({"items": [{}]}, [1], "older drafts"),
        ({"multipleOf": 0.1}, 1, "multipleOf"),
        ({"pattern": "(?P<x>a)"}, "a", "pattern"),
        ({"pattern": "(?i)a"}, "a", "pattern"),
        ({"pattern": "^a\\Z"}, "a", "pattern"),
        ({"pattern": "^\\w+$"}, "é", "pattern"),
        ({"pattern": "^a$"}, "a\n", "pattern"),
    ],
)
def test_what_cannot_be_checked_is_not_accepted(mongosh: Mongosh, schema: dict[str, Any], answer: Any, what: str) -> None:
    """A keyword that the script does not know, or may read in another way, refuses the answer and says where to answer instead."""
    with pytest.raises(MongoshError, match=r"cannot be checked in mongosh.*mongo-durable resolve") as refused:
        mongosh.value(f"durable.internals.faults({_javascript(schema)}, {_javascript(answer)})")
    assert (refused.value.name, refused.value.code) == ("InvalidAnswer", "invalid_answer")
    assert what in str(refused.value)
