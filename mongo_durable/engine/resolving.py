"""Answering a frontier: pins, permission, schemas, then the one transaction. What is refused is kept as an audit event."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mongo_durable.engine.authorizing import AnswerRequest, Authorize, check_authorized
from mongo_durable.engine.process import Process
from mongo_durable.engine.schemas import check_answer
from mongo_durable.errors import ResolutionConflict, ResolutionError, RunNotSuspended, StaleGeneration, TokenUsed, UnknownActivity
from mongo_durable.protocol.canonical import digest as digest_of
from mongo_durable.protocol.frontier import UNANSWERED, FrontierEntry
from mongo_durable.protocol.values import decode
from mongo_durable.store import audit, drafts, frontiers
from mongo_durable.store.claims import Claim, Claimer
from mongo_durable.store.connection import Connection
from mongo_durable.store.documents import SOMEBODY, Answerer, Resolution, StoredFrontier

_IDENTIFIER = re.compile(r"[\w.-]{1,100}")
_MOST_IDS = 100
_ANY_TIME = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What an answer has to pass on behalf of one client or app, besides its schema.

    Attributes:
        authorize: The application's hook, or None: whoever can reach the database may answer.
        decode: Makes the application value of a plain value, for the hook.
    """

    authorize: Authorize | None = None
    decode: Callable[[Any], Any] = decode


NO_RULES = Rules()


async def resolve(
    connection: Connection,
    run_id: str,
    answers: Mapping[str, Any],
    answerer: Answerer = SOMEBODY,
    *,
    generation: int | None = None,
    digest: str | None = None,
    rules: Rules = NO_RULES,
) -> Resolution:
    """Answer the run's newest frontier, whole.

    Args:
        answers: Plain value by activity id.
        generation, digest: What the reviewer saw; None does not pin it.

    Raises:
        StaleGeneration: The run has moved on since.
        NotAuthorized: The hook refused.
        InvalidAnswer: An answer does not fit its question's schema.
        ConfigurationError: A question's schema is itself not valid: it cannot be answered.
        UnknownActivity, IncompleteResolution, ResolutionConflict, FrontierExpired, RunNotSuspended, RunNotFound: See `store.frontiers.resolve`.

    Writes: One transaction, or an audit event.
    Invariants: I6.
    """
    async with _refusals_kept(connection, run_id, answers, answerer, generation) as target:
        frontier = await frontiers.current(connection, run_id)
        if generation is not None and generation != frontier.generation:
            receipt = await frontiers.receipt(connection, run_id, generation, digest_of(dict(answers)))
            if receipt is not None:
                return receipt  # the call is repeated, and the run has gone on meanwhile
        target.generation = frontier.generation
        _check_pins(frontier, generation, digest)
        return await _resolve(connection, frontier, answers, answerer, rules)


async def resolve_and_claim(
    process: Process,
    frontier: StoredFrontier,
    answers: Mapping[str, Any],
    answerer: Answerer,
    workflow: tuple[str, str],
    code_version: str | None,
    *,
    rules: Rules = NO_RULES,
) -> Claim | None:
    """Answer a frontier that was read before, for a process that executes the run itself.

    Args:
        workflow: Name and version of what the process executes.

    Returns:
        The claim of the attempt that began with the answers; the process knows the run as its own (`Process.running`). None where the answers are
        recorded and the run is to be claimed.

    Raises:
        ResolutionError, RunError: See `resolve`.

    Writes: One transaction, or an audit event.
    Invariants: I2, I6.
    """
    connection, run_id = process.connection, frontier.run_id
    async with _refusals_kept(connection, run_id, answers, answerer, frontier.generation):
        await _check(connection, frontier, answers, answerer, rules)
        lease = process.held_lease
        if lease is None or run_id in process.running:
            # It may start nothing before it has a lease, which answers need not wait for; or the attempt that asked is not quite over in it.
            await frontiers.resolve(connection, frontier, answers, answerer)
            return None
        claimer = Claimer(owner=lease.owner, workflow=workflow, code_version=code_version)
        return await process.taking(run_id, lease, frontiers.resolve_and_claim(connection, frontier, answers, answerer, claimer))


async def resolve_once(
    connection: Connection,
    run_id: str,
    generation: int,
    digest: str,
    answers: Mapping[str, Any],
    answerer: Answerer,
    *,
    rules: Rules = NO_RULES,
) -> Resolution:
    """Answer the frontier that a resume token names, be it the newest or not.

    Raises:
        TokenUsed: Other answers were first.
        ResolutionError, RunError: See `resolve`.
    """
    async with _refusals_kept(connection, run_id, answers, answerer, generation):
        frontier = await frontiers.get(connection, run_id, generation) or await frontiers.current(connection, run_id)
        _check_pins(frontier, generation, digest)
        try:
            return await _resolve(connection, frontier, answers, answerer, rules)
        except ResolutionConflict as conflict:
            raise TokenUsed(conflict.message, run_id=run_id) from None


async def draft_answer(
    connection: Connection,
    run_id: str,
    answers: Mapping[str, Any],
    answerer: Answerer,
    *,
    generation: int | None = None,
    digest: str | None = None,
    rules: Rules = NO_RULES,
) -> drafts.StoredDraft:
    """Put somebody's answers into the draft of the run's newest frontier; see `store.drafts.add`. They pass the same checks as in `resolve`."""
    async with _refusals_kept(connection, run_id, answers, answerer, generation) as target:
        frontier = await frontiers.current(connection, run_id)
        target.generation = frontier.generation
        _check_pins(frontier, generation, digest)
        unknown = answers.keys() - {entry.activity_id for entry in frontier.entries}
        if unknown:
            raise UnknownActivity(
                f"run {run_id}: {len(unknown)} of the answered activity ids are not in its frontier {frontier.generation}",
                run_id=run_id,
                activity_ids=sorted(unknown),
            )
        await _judge(connection, frontier, answers, answerer, rules)
        return await drafts.add(connection, frontier, answers, answerer.by or "", answerer.note)


async def _resolve(connection: Connection, frontier: StoredFrontier, answers: Mapping[str, Any], answerer: Answerer, rules: Rules) -> Resolution:
    await _check(connection, frontier, answers, answerer, rules)
    return await frontiers.resolve(connection, frontier, answers, answerer)


async def _check(connection: Connection, frontier: StoredFrontier, answers: Mapping[str, Any], answerer: Answerer, rules: Rules) -> None:
    frontiers.check_complete(frontier, answers)
    await _judge(connection, frontier, answers, answerer, rules)


async def _judge(connection: Connection, frontier: StoredFrontier, answers: Mapping[str, Any], answerer: Answerer, rules: Rules) -> None:
    """May these answers be given, and do they fit?

    Raises:
        NotAuthorized, InvalidAnswer.
    """
    answered = [entry for entry in frontier.entries if entry.activity_id in answers]
    if rules.authorize is not None:
        # The clock is asked only where the audience hangs on it.
        now = await connection.server_time() if any(entry.escalates_at is not None for entry in answered) else _ANY_TIME
        for entry in answered:
            request = AnswerRequest(
                run_id=frontier.run_id,
                workflow=frontier.workflow,
                thread_id=frontier.thread_id,
                generation=frontier.generation,
                digest=frontier.digest,
                activity_id=entry.activity_id,
                name=entry.name,
                kind=entry.kind.value,
                payload=rules.decode(entry.value),
                answer=rules.decode(answers[entry.activity_id]),
                caller=answerer.by,
                channel=answerer.channel.value,
                audiences=entry.asks(now),
            )
            await check_authorized(rules.authorize, request)
    for entry in answered:
        if entry.response_schema is not None:
            check_answer(frontier.run_id, entry.activity_id, entry.response_schema, decode(answers[entry.activity_id]))


@dataclass(slots=True)
class _Target:
    """Which generation an answer turned out to be for."""

    generation: int | None


@asynccontextmanager
async def _refusals_kept(
    connection: Connection, run_id: str, answers: Mapping[str, Any], answerer: Answerer, generation: int | None
) -> AsyncIterator[_Target]:
    target = _Target(generation)
    try:
        yield target
    except (ResolutionError, RunNotSuspended) as refusal:
        named = [each for each in list(answers)[:_MOST_IDS] if _IDENTIFIER.fullmatch(each)]  # what is no id of ours could be anything
        await keep_refusal(connection, run_id, target.generation, answerer, refusal, named)
        raise


async def keep_refusal(
    connection: Connection, run_id: str, generation: int | None, answerer: Answerer, refusal: ResolutionError | RunNotSuspended, ids: list[str]
) -> None:
    """Record that an answer was refused.

    Writes: `audit`, one insert.
    """
    await audit.record_refusal(connection, run_id, generation, answerer, code=refusal.code, activity_ids=ids, message=refusal.message)


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
