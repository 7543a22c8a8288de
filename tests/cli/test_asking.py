"""Asking for an answer by a response schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from io import StringIO
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from rich.console import Console

from mongo_durable.cli.asking import Form, show_question
from mongo_durable.engine.schemas import schema_faults
from mongo_durable.snapshots import Question


class Colour(Enum):
    """One of two."""

    RED = "red"
    BLUE = "blue"


class Item(BaseModel):
    """What is bought."""

    name: str = Field(min_length=2)
    price: float = Field(ge=0, le=100)


class Approve(BaseModel):
    """Yes."""

    type: Literal["approve"]


class Edit(BaseModel):
    """Yes, but."""

    type: Literal["edit"]
    item: Item


class Review(BaseModel):
    """Answers of each sort."""

    approved: bool
    colour: Colour
    limit: int | None = None
    note: str = "fine"
    tags: list[str] = []
    decisions: list[Approve | Edit] = Field(min_length=1)


class Tree(BaseModel):
    """A schema that contains itself."""

    name: str
    child: Tree | None = None


class Person:
    """Types the lines, one at each prompt."""

    def __init__(self, *lines: str) -> None:
        self._lines: Iterator[str] = iter(lines)
        self.prompts: list[str] = []
        self.out = Console(file=StringIO(), width=100)

    def read(self, prompt: str) -> str:
        self.prompts.append(prompt)
        try:
            return next(self._lines)
        except StopIteration:
            raise EOFError from None

    def asked(self, schema: Any, value: Any = "may I?") -> Any:
        return Form(self.out, self.read).answer(question(value, schema))

    @property
    def shown(self) -> str:
        file = self.out.file
        assert isinstance(file, StringIO)
        return file.getvalue()


def question(value: Any, schema: Any = None) -> Question:
    return Question(activity_id="act_a", name="approval", kind="INTERRUPT", position="agent/1/ask@1#!1", value=value, response_schema=schema)


NULLABLE = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
POINT = {"$defs": {"n/m": {"type": "integer"}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/n~1m"}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("schema", "lines", "expected"),
    [
        ({"type": "boolean"}, ["perhaps", "", "y"], True),
        ({"type": "boolean"}, ["no"], False),
        ({"enum": ["red", 7, None]}, ["0", "x", "2"], 7),
        ({"enum": ["red", 7, None]}, ["red"], "red"),
        ({"const": "go"}, [], "go"),
        ({"type": "integer", "minimum": 3}, ["x", "2.5", "true", "", "2", "3"], 3),
        ({"type": "number"}, ["NaN", "1e2"], 100.0),
        ({"type": "string"}, ["true"], "true"),
        ({"type": "string", "pattern": "^a"}, ["b", "ab"], "ab"),
        ({"type": "string"}, ["", "n", "", "y"], ""),
        ({"type": "null"}, [], None),
        (NULLABLE, ["n"], None),
        (NULLABLE, ["y", "4"], 4),
        ({"type": ["string", "integer", "null"]}, ["2", "4"], 4),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, ["1", "y", "2"], [1, 2]),
        ({"type": "array", "items": {"type": "integer"}}, [""], []),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False}, ["1", "b"], [1, "b"]),
        (POINT, ["4"], {"x": 4}),
        ({"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "boolean", "default": True}}}, ["", ""], {"b": True}),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "anyOf": [{"required": ["a"]}]}, ["", "x"], {"a": "x"}),
        ({"type": "object"}, ['{"any": [1]}'], {"any": [1]}),
        ({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]}, ["1"], {"a": 1}),
        ({"description": "Whatever you like."}, ["1"], 1),
        (Tree.model_json_schema(), ["top", "y", "below", "n"], {"name": "top", "child": {"name": "below", "child": None}}),
        (None, ["yes", "n", "yes", "y"], "yes"),
        (None, ['"yes"'], "yes"),
        (None, ["[1, null]"], [1, None]),
    ],
)
def test_an_answer_is_asked_by_its_schema(schema: Any, lines: list[str], expected: Any) -> None:
    """What is typed becomes a value of the schema; what does not fit is asked again; a text that is not JSON is one only if the person says so."""
    person = Person(*lines)
    found = person.asked(schema)
    assert found == expected
    assert type(found) is type(expected)
    assert len(person.prompts) == len(lines)


def test_a_model_is_asked_field_by_field() -> None:
    """Required fields, an enum, what may be left out with its default, a list of one of several models, by what marks them."""
    lines = ["y", "2", "", "careful", "y", "office", "n", "2", "x", "desk", "101", "90", "n"]
    person = Person(*lines)
    found = person.asked(Review.model_json_schema())
    assert found == {
        "approved": True,
        "colour": "blue",
        "limit": None,
        "note": "careful",
        "tags": ["office"],
        "decisions": [{"type": "edit", "item": {"name": "desk", "price": 90}}],
    }
    assert Review.model_validate(found)
    assert len(person.prompts) == len(lines)
    assert any('empty: "fine"' in prompt for prompt in person.prompts)
    for expected in ('type "approve"', 'type "edit"', "does not fit: $: 'x' is too short", "greater than the maximum of 100"):
        assert expected in person.shown


def test_the_whole_answer_is_held_against_its_schema() -> None:
    """What no single field shows (here: no two alike) is said at the end, and everything is asked again."""
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    person = Person("1", "1", "1", "2")
    assert person.asked(schema) == [1, 2]
    assert "does not fit: $: [1, 1] has non-unique elements" in person.shown
    assert not schema_faults(schema, [1, 2])


def test_leaving_is_the_callers() -> None:
    """Whoever ends the input in the middle of an answer has not answered."""
    for schema, lines in ((Review.model_json_schema(), ["y", "2"]), ({"type": "string"}, []), (None, ["not JSON"])):
        with pytest.raises(EOFError):
            Person(*lines).asked(schema)


def test_a_question_is_shown_for_reading() -> None:
    """Each part on a line of its own, texts with their lines; nothing that could steer the terminal."""
    out = Console(file=StringIO(), width=60)
    show_question(out, question({"question": "Buy?\nReally?", "lines": [{"item": "desk", "price": 28}], "none": None, "evil": "\x1b[2J"}))
    assert isinstance(out.file, StringIO)
    assert out.file.getvalue().splitlines() == [
        "  question  Buy?",
        "            Really?",
        "  lines",
        "    1",
        "      item  desk",
        "      price  28",
        "  none  null",
        "  evil  \\u001b[2J",
    ]


@pytest.mark.parametrize("read", [lambda _: "y", lambda _: " YES "])
def test_yes_is_yes(read: Callable[[str], str]) -> None:
    """Of whatever case."""
    assert Form(Console(file=StringIO()), read).agrees("send?")
