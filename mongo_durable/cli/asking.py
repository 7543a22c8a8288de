"""Asking a person for the answer to a question, field by field, by the question's response schema.

What a JSON Schema says is followed as far as a person can be led by it; the whole answer is then held against the schema as it is, and asked again
where it does not fit. Where there is no schema, or one that leads nobody, the answer is free JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote

from mongo_durable.cli.output import in_one_line, json_safe, line, printable

if TYPE_CHECKING:
    from rich.console import Console

    from mongo_durable.snapshots import Question

Schema = Mapping[str, Any]

LEFT_OUT: Any = object()
"""Stands where a value would: an optional field that is not given."""

_DEEPEST = 20  # `$ref`s that only lead to one another
_LEADING = {"type", "properties", "items", "const", "enum", "anyOf", "oneOf"}


class Form:
    """Asks on a terminal.

    Args:
        out: Where questions are shown.
        read: Shows a prompt and returns the line that was typed. EOFError and KeyboardInterrupt are the caller's.
    """

    def __init__(self, out: Console, read: Callable[[str], str]) -> None:
        self._out = out
        self._read = read

    def answer(self, question: Question) -> Any:
        """The answer to a question: one that fits its schema."""
        from mongo_durable.engine.schemas import schema_faults

        schema = question.response_schema
        while True:
            found = _Asking(self._out, self._read, schema).value(schema, "answer")
            faults = schema_faults(schema, found) if schema is not None else []
            if not faults:
                return found
            for fault in faults:
                self._out.print(line((f"  does not fit: {printable(fault)}", "red")))

    def agrees(self, prompt: str, *, default: bool | None = None) -> bool:
        """Whether the person says yes. Without a default an empty line is no answer."""
        choices = {True: "[Y/n]", False: "[y/N]", None: "[y/n]"}[default]
        while True:
            typed = self._read(f"{prompt} {choices} ").strip().lower()
            if typed in ("y", "yes"):
                return True
            if typed in ("n", "no"):
                return False
            if not typed and default is not None:
                return default


def show_question(out: Console, question: Question) -> None:
    """Show the whole of what is asked, for reading: what a value consists of line by line, texts as they are."""
    _show_value(out, question.value, "  ")


def _show_value(out: Console, value: Any, indent: str) -> None:
    plain = json_safe(value)
    if isinstance(plain, dict) and plain:
        for name, each in plain.items():
            if isinstance(each, dict | list) and each:
                out.print(line(indent, (printable(name), "dim"), is_whole=True))
                _show_value(out, each, indent + "  ")
            else:
                _show_text(out, f"{indent}{printable(name)}  ", each)
    elif isinstance(plain, list) and plain:
        for number, each in enumerate(plain, 1):
            if isinstance(each, dict | list) and each:
                out.print(line((f"{indent}{number}", "dim"), is_whole=True))
                _show_value(out, each, indent + "  ")
            else:
                _show_text(out, f"{indent}{number}  ", each)
    else:
        _show_text(out, indent, plain)


def _show_text(out: Console, head: str, value: Any) -> None:
    lines = value.splitlines() or [""] if isinstance(value, str) else [in_one_line(value, None)]
    for number, each in enumerate(lines):
        out.print(line((head if number == 0 else " " * len(head), "dim"), (printable(each), "bold"), is_whole=True))


class _Asking(Form):
    """Asks for one value under a root schema, in which its references lie."""

    def __init__(self, out: Console, read: Callable[[str], str], root: Any) -> None:
        super().__init__(out, read)
        self._root = root

    def value(self, given: Any, name: str) -> Any:
        """Ask for a value that a schema describes."""
        schema = self._resolved(given)
        if not schema:
            return self._free(name)
        if "const" in schema:
            self._out.print(line(f"  {printable(name)} is {in_one_line(schema['const'])}"))
            return schema["const"]
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return schema["enum"][
                self._chosen(name, [in_one_line(each) if not isinstance(each, str) else printable(each) for each in schema["enum"]])
            ]
        if (other := self._unless_null(schema)) is not None:
            return self.value(other, name) if self.agrees(f"  give {printable(name)}? (no: null)") else None
        if variants := self._variants(schema):
            return self._variant(variants, name)
        match schema.get("type"):
            case "boolean":
                return self.agrees(self._prompt(name, schema))
            case "null":
                return None
            case "integer" | "number" | "string":
                return self._scalar(schema, name)
            case "object":
                return self._object(schema, name)
            case "array":
                return self._array(schema, name)
            case _:
                return self._object(schema, name) if "properties" in schema else self._free(name, schema)

    def _resolved(self, given: Any, depth: int = 0) -> Schema:
        """The schema behind references, with what stands beside them; of an `allOf`, its parts together. An empty one leads nobody."""
        if not isinstance(given, Mapping) or depth > _DEEPEST:
            return {}
        schema: dict[str, Any] = {name: value for name, value in given.items() if name not in ("$ref", "allOf")}
        parts = [self._referred(given["$ref"])] if "$ref" in given else []
        parts += given.get("allOf", ())
        for part in parts:
            found = self._resolved(part, depth + 1)
            joined = {
                "properties": {**found.get("properties", {}), **schema.get("properties", {})},
                "required": [*found.get("required", ()), *schema.get("required", ())],
            }
            schema = {**found, **schema, **{name: value for name, value in joined.items() if value}}
        return schema

    def _referred(self, reference: Any) -> Any:
        """What a reference inside the schema points to (a JSON pointer); {} for any other."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return {}
        found = self._root
        for part in unquote(reference[1:]).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and name in found:
                found = found[name]
            elif isinstance(found, Sequence) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                return {}
        return found

    def _variants(self, schema: Schema) -> list[Schema]:
        """The schemas of which a value fits one; none where there is no choice."""
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                choices = [self._resolved(each) for each in schema[name]]
                if not any(_LEADING & each.keys() for each in choices):
                    continue  # conditions only, such as which of the fields are required together
                beside = {key: value for key, value in schema.items() if key not in (name, "title", "description", "default", "discriminator")}
                return [self._resolved({"allOf": [each], **beside}) for each in choices]
        if isinstance(schema.get("type"), list):
            return [{**schema, "type": each} for each in schema["type"]]
        return []

    def _unless_null(self, schema: Schema) -> Schema | None:
        """Of a schema that allows null and one thing else: that."""
        variants = self._variants(schema)
        others = [each for each in variants if each.get("type") != "null"]
        if len(variants) != 2 or len(others) != 1:
            return None
        return {**others[0], **{key: schema[key] for key in ("title", "description", "default") if key in schema}}

    def _variant(self, variants: list[Schema], name: str) -> Any:
        return self.value(variants[self._chosen(name, [self._described(each) for each in variants])], name)

    def _described(self, schema: Schema) -> str:
        """A few words for a schema, to choose it by."""
        if "const" in schema:
            return in_one_line(schema["const"])
        if isinstance(schema.get("enum"), list):
            return " or ".join(in_one_line(each) for each in schema["enum"])
        if schema.get("type") == "null":
            return "null (nothing)"
        fixed = {key: self._resolved(each) for key, each in schema.get("properties", {}).items()}
        marks = [f"{key} {in_one_line(each['const'])}" for key, each in fixed.items() if "const" in each]
        words = marks or [str(schema.get("title") or schema.get("type") or "any value")]
        described = f": {schema['description']}" if isinstance(schema.get("description"), str) else ""
        return printable(", ".join(words) + described)

    def _chosen(self, name: str, choices: Sequence[str]) -> int:
        if len(choices) == 1:
            self._out.print(line(f"  {printable(name)} is {choices[0]}"))
            return 0
        self._out.print(line((f"  {printable(name)}:", "bold")))
        for number, each in enumerate(choices, 1):
            self._out.print(line(f"    {number}  {each}"))
        while True:
            typed = self._read(f"  {printable(name)} (1 to {len(choices)}): ").strip()
            if typed.isdecimal() and 1 <= int(typed) <= len(choices):
                return int(typed) - 1
            if typed in choices:
                return choices.index(typed)
            self._out.print(line((f"  a number from 1 to {len(choices)}", "red")))

    def _scalar(self, schema: Schema, name: str) -> Any:
        while True:
            typed = self._read(self._prompt(name, schema))
            found = _read_as(schema["type"], typed)
            if found is LEFT_OUT:
                self._out.print(line((f"  {printable(name)} is {'an integer' if schema['type'] == 'integer' else 'a number'}", "red")))
            elif typed == "" and not self.agrees("  an empty text?", default=False):
                continue
            elif self._fits(schema, found):
                return found

    def _fits(self, schema: Schema, value: Any) -> bool:
        from mongo_durable.engine.schemas import schema_faults

        # References in it lie in the root, so it stands there.
        definitions = {key: self._root[key] for key in ("$defs", "definitions") if isinstance(self._root, Mapping) and key in self._root}
        faults = schema_faults({**definitions, **schema}, value)
        for fault in faults:
            self._out.print(line((f"  does not fit: {printable(fault)}", "red")))
        return not faults

    def _prompt(self, name: str, schema: Schema, *, hint: str = "") -> str:
        described = schema.get("description") or (schema.get("title") if str(schema.get("title", "")).lower() != name.lower() else None)
        if isinstance(described, str):
            self._out.print(line((f"  {printable(described)}", "dim"), is_whole=True))
        kind = {"string": "text", "boolean": ""}.get(schema.get("type", ""), str(schema.get("type", "")))
        terms = [str(schema["format"])] if isinstance(schema.get("format"), str) else []
        terms += [f"{word} {schema[key]}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema]
        inside = ", ".join(each for each in (" ".join([kind, *terms]).strip(), hint) if each)
        return f"  {printable(name)} ({printable(inside)}): " if inside else f"  {printable(name)}"

    def _object(self, schema: Schema, name: str) -> Any:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            return self._free(name, schema)
        required = schema.get("required", ())
        found = {}
        for field, each in properties.items():
            value = self.value(each, _below(name, field)) if field in required else self._optional(each, _below(name, field))
            if value is not LEFT_OUT:
                found[field] = value
        return found

    def _optional(self, given: Any, name: str) -> Any:
        """Ask for a field that may be left out, or has a default: an empty line takes that."""
        schema = self._resolved(given)
        schema = self._unless_null(schema) or schema
        default = schema.get("default", LEFT_OUT)
        otherwise = "empty: left out" if default is LEFT_OUT else f"empty: {in_one_line(default)}"
        if schema.get("type") == "array":
            return self._array(schema, name) or default  # none given is an empty line
        if self._variants(schema) or schema.get("type") not in ("integer", "number", "string") or "enum" in schema or "const" in schema:
            return self.value(schema, name) if self.agrees(f"  give {printable(name)}? ({otherwise})", default=False) else default
        while True:
            typed = self._read(self._prompt(name, schema, hint=f"optional, {otherwise}"))
            if typed == "":
                return default
            found = _read_as(schema["type"], typed)
            if found is LEFT_OUT:
                self._out.print(line((f"  {printable(name)} is {'an integer' if schema['type'] == 'integer' else 'a number'}", "red")))
            elif self._fits(schema, found):
                return found

    def _array(self, schema: Schema, name: str) -> list[Any]:
        leading = schema.get("prefixItems", ())
        found = [self.value(each, f"{name}[{number}]") for number, each in enumerate(leading, 1)]
        least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        if schema.get("items") is False:
            return found
        while len(found) < most:
            number = len(found) + 1
            is_wanted = number <= least or self.agrees(f"  {'add' if number > 1 else 'give'} {printable(name)}[{number}]?", default=False)
            if not is_wanted:
                return found
            found.append(self.value(schema.get("items", {}), f"{name}[{number}]"))
        return found

    def _free(self, name: str, schema: Schema | None = None) -> Any:
        if schema is not None and isinstance(schema.get("description"), str):
            self._out.print(line((f"  {printable(schema['description'])}", "dim"), is_whole=True))
        while True:
            typed = self._read(f"  {printable(name)} (JSON): ")
            try:
                return parse_json(typed)
            except ValueError as error:
                if typed.strip() and self.agrees(f"  that is not JSON ({error}): is it the text {in_one_line(typed)}?"):
                    return typed


def _below(name: str, field: str) -> str:
    return field if name == "answer" else f"{name}.{field}"


def _read_as(kind: str, typed: str) -> Any:
    """What was typed, as a value of a scalar type; LEFT_OUT if it is none."""
    if kind == "string":
        return typed
    try:
        number = parse_json(typed.strip())
    except ValueError:
        return LEFT_OUT
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return number if is_number and (kind == "number" or isinstance(number, int)) else LEFT_OUT


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: It is none: by the standard, which knows no NaN.
    """
    try:
        return json.loads(text, parse_constant=_no_such_json)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _no_such_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
