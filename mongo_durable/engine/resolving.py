"""Answering a frontier: pins, schemas, then the one transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonschema
from jsonschema.validators import validator_for

from mongo_durable.errors import InvalidAnswer, StaleGeneration
from mongo_durable.protocol.frontier import UNANSWERED, FrontierEntry
from mongo_durable.protocol.values import decode
from mongo_durable.store import frontiers
from mongo_durable.store.connection import Connection
from mongo_durable.store.documents import Resolution, StoredFrontier


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
    """What of an answer does not fit a JSON Schema, as `path: message`."""
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    return [f"{fault.json_path}: {fault.message}" for fault in validator.iter_errors(answer)]


def _check_answer(run_id: str, activity_id: str, schema: Mapping[str, Any], answer: Any) -> None:
    faults = schema_faults(decode(dict(schema)), answer)
    if faults:
        raise InvalidAnswer(
            f"run {run_id}: the answer to {activity_id} does not fit its schema at {', '.join(fault.partition(':')[0] for fault in faults)}",
            run_id=run_id,
            activity_id=activity_id,
            errors=faults,
        )
