"""Answering a frontier: pins, schemas, then the one transaction."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from ipaddress import IPv4Address, IPv6Address
from typing import Any
from uuid import UUID

import jsonschema
from jsonschema.validators import validator_for
from pydantic import AnyUrl, TypeAdapter

from mongo_durable.errors import ConfigurationError, InvalidAnswer, StaleGeneration
from mongo_durable.protocol.frontier import UNANSWERED, FrontierEntry
from mongo_durable.protocol.values import decode
from mongo_durable.store import frontiers
from mongo_durable.store.connection import Connection
from mongo_durable.store.documents import Resolution, StoredFrontier

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


async def resolve(
    connection: Connection,
    run_id: str,
    answers: Mapping[str, Any],
    *,
    generation: int | None = None,
    digest: str | None = None,
    resolved_by: str | None = None,
    note: str | None = None,
) -> Resolution:
    """Answer the run's newest frontier, whole.

    Args:
        answers: Plain value by activity id.
        generation, digest: What the reviewer saw; None does not pin it.

    Raises:
        StaleGeneration: The run has moved on since.
        InvalidAnswer: An answer does not fit its question's schema.
        ConfigurationError: A question's schema is itself not valid: it cannot be answered.
        UnknownActivity, IncompleteResolution, ResolutionConflict, FrontierExpired, RunNotSuspended, RunNotFound: See `store.frontiers.resolve`.

    Writes: One transaction, or nothing.
    Invariants: I6.
    """
    frontier = await frontiers.current(connection, run_id)
    _check_pins(frontier, generation, digest)
    return await resolve_frontier(connection, frontier, answers, resolved_by=resolved_by, note=note)


async def resolve_frontier(
    connection: Connection, frontier: StoredFrontier, answers: Mapping[str, Any], *, resolved_by: str | None = None, note: str | None = None
) -> Resolution:
    """Answer a frontier that was read before. See `resolve`."""
    for entry in frontier.entries:
        if entry.response_schema is not None and entry.activity_id in answers:
            _check_answer(frontier.run_id, entry.activity_id, entry.response_schema, decode(answers[entry.activity_id]))
    return await frontiers.resolve(connection, frontier, answers, resolved_by=resolved_by, note=note)


async def expire(connection: Connection, run_id: str) -> bool:
    """Close the run's frontier if it is past its deadline: each entry that is due gets its default, or is marked as never to be answered.

    Returns:
        Whether this call did it.

    Writes: One transaction, or nothing.
    Invariants: I6.
    """
    frontier = await frontiers.current(connection, run_id)
    due = [entry for entry in frontier.entries if _is_due(entry, frontier)]
    answers = {entry.activity_id: entry.default for entry in due if entry.default is not UNANSWERED}
    return await frontiers.expire(connection, frontier, answers, [entry.activity_id for entry in due if entry.activity_id not in answers])


def _is_due(entry: FrontierEntry, frontier: StoredFrontier) -> bool:
    # By the frontier's own deadline, not by a clock: whoever expires it closes the same entries.
    return entry.expires_at is not None and frontier.expires_at is not None and entry.expires_at <= frontier.expires_at


def _check_pins(frontier: StoredFrontier, generation: int | None, digest: str | None) -> None:
    for what, expected, found in (("generation", generation, frontier.generation), ("digest", digest, frontier.digest)):
        if expected is not None and expected != found:
            raise StaleGeneration(
                f"run {frontier.run_id}: the answers are for {what} {expected}, the run has {what} {found}: read its open frontier again",
                run_id=frontier.run_id,
                expected=expected,
                found=found,
            )


def schema_faults(schema: Any, answer: Any) -> list[str]:
    """What of an answer does not fit a JSON Schema, as `path: message`.

    Raises:
        ConfigurationError: The schema is not valid.
    """
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)(schema, format_checker=_FORMATS)
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


def _check_answer(run_id: str, activity_id: str, schema: Mapping[str, Any], answer: Any) -> None:
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
