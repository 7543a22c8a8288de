"""Answers and the JSON Schemas that they have to fit."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from ipaddress import IPv4Address, IPv6Address
from typing import Any
from uuid import UUID

import jsonschema
import referencing
from jsonschema.validators import validator_for
from pydantic import AnyUrl, TypeAdapter

from mongo_durable.errors import ConfigurationError, InvalidAnswer
from mongo_durable.protocol.values import decode

_READ_AS = {
    "date": date,
    "date-time": datetime,
    "duration": timedelta,
    "ipv4": IPv4Address,
    "ipv6": IPv6Address,
    "time": time,
    "uri": AnyUrl,
    "uuid": UUID,
}
"""What a text of a JSON Schema's `format` is read as, by Pydantic. RFC 3339, which JSON Schema goes by, would refuse times without a zone, which a
model may even demand; not to look would accept a `tomorrow` that no code can read. Other formats are not looked at."""


def _format_checker() -> jsonschema.FormatChecker:
    checker = jsonschema.FormatChecker(formats=())
    for name, kind in _READ_AS.items():
        checker.checks(name, raises=ValueError)(functools.partial(_is_text_of, TypeAdapter(kind)))
    return checker


def _is_text_of(kind: TypeAdapter[Any], value: Any) -> bool:
    """Whether a value is no text, or one that is read as this kind.

    Raises:
        ValueError: It is another text.
    """
    return not isinstance(value, str) or kind.validate_python(value) is not None


_FORMATS = _format_checker()
_NOTHING_ELSE: referencing.Registry[Any] = referencing.Registry()
"""What a schema may refer to besides itself; the library's own default would fetch addresses."""


def schema_faults(schema: Any, answer: Any) -> list[str]:
    """What of an answer does not fit a JSON Schema, as `path: message`.

    Raises:
        ConfigurationError: The schema is not valid.
    """
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)(schema, format_checker=_FORMATS, registry=_NOTHING_ELSE)
    try:
        return [f"{fault.json_path}: {fault.message}" for fault in validator.iter_errors(answer)]
    except Exception as error:  # a schema that is none makes the library raise anything
        raise ConfigurationError(f"the response schema cannot be applied ({type(error).__name__})") from error


def check_schema(schema: Any) -> None:
    """Whether answers can be checked against a JSON Schema.

    Raises:
        ConfigurationError: It is not valid.
    """
    try:
        validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigurationError(f"the response schema is not valid JSON Schema at {error.json_path} ({error.validator})") from None


def check_answer(run_id: str, activity_id: str, schema: Mapping[str, Any], answer: Any) -> None:
    """Whether an answer fits its question's schema.

    Raises:
        InvalidAnswer: It does not.
        ConfigurationError: The schema is not valid.
    """
    try:
        faults = schema_faults(decode(dict(schema)), answer)
    except ConfigurationError as error:
        raise ConfigurationError(f"run {run_id}: {activity_id} cannot be answered: {error.message}; cancel the run", run_id=run_id) from None
    if faults:
        raise InvalidAnswer(
            f"run {run_id}: the answer to {activity_id} does not fit its schema at {', '.join(fault.partition(':')[0] for fault in faults)}",
            run_id=run_id,
            activity_id=activity_id,
            errors=faults,
        )
