"""Drafts: answers of several people to one frontier, kept until it is whole. Then they go in as one resolution; nothing reaches the run before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pymongo import ReturnDocument
from pymongo.errors import DuplicateKeyError

from mongo_durable.errors import DraftConflict, RunNotFound
from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.events import FrontierStatus
from mongo_durable.protocol.frontier import AnswerChannel
from mongo_durable.store import frontiers
from mongo_durable.store.connection import Connection, Session
from mongo_durable.store.documents import (
    SCHEMA_VERSION,
    Answerer,
    Document,
    Resolution,
    StoredFrontier,
    check_version,
    frontier_id,
    resolution_from,
)
from mongo_durable.store.failpoints import FailPoint, reach
from mongo_durable.store.faults import store_call
from mongo_durable.store.heads import Lost
from mongo_durable.store.payloads import bring_in, move_out_each
from mongo_durable.store.sealing import require_open


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDraftAnswer:
    """One answer of a draft.

    Attributes:
        value: Plain value.
        at: The server's clock.
    """

    value: Any
    by: str
    note: str | None
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDraft:
    """The answers to a frontier so far, by activity id; and the resolution, once they have gone in."""

    run_id: str
    generation: int
    digest: str
    answers: Mapping[str, StoredDraftAnswer]
    resolution: Resolution | None


@store_call
async def add(connection: Connection, frontier: StoredFrontier, answers: Mapping[str, Any], by: str, note: str | None) -> StoredDraft:
    """Put somebody's answers into the draft of a frontier. The one that makes it whole resolves the frontier in the same transaction.

    Args:
        answers: Plain value by activity id, already validated: some of the frontier's.

    Raises:
        DraftConflict: Somebody else has answered one of the questions otherwise.
        ResolutionConflict, FrontierExpired, StaleGeneration, RunNotSuspended: The frontier is not open any more.
        DecryptionFailed: As in `frontiers.resolve`.

    Writes: `drafts`; with the last answer `runs`, `frontiers`, `resolutions`, `activity_events` as well, in one transaction.
    Invariants: I6, I10.
    """
    draft_id = frontier.id
    require_open(frontier.run_id, [entry.value for entry in frontier.entries])
    digests = {activity_id: digest(answer) for activity_id, answer in answers.items()}
    stored = await move_out_each(connection, frontier.run_id, answers)
    await _make(connection, frontier, draft_id)

    async def body(session: Session) -> tuple[Document, Document | None]:
        # The draft is written before the head: it is no part of the run's state, and so those who answer at once meet here.
        draft: Document | None = await connection.drafts.find_one({"_id": draft_id}, session=session)
        if draft is None:
            raise Lost  # removed with its run
        news = [each for each in answers if not _stands(draft, each, digests[each], by)]
        if news:
            values = {each: {"value": stored[each], "digest": digests[each], "by": by, "note": note} for each in news}
            dated = {f"answers.{each}": {**_literally(value), "at": "$$NOW"} for each, value in values.items()}
            draft = await connection.drafts.find_one_and_update(
                {"_id": draft_id}, [{"$set": dated}], return_document=ReturnDocument.AFTER, session=session
            )
        if draft is not None and len(draft["answers"]) == len(frontier.entries):
            return draft, await _accept(connection, session, frontier, draft["answers"])
        still_open = {"_id": draft_id, "status": FrontierStatus.OPEN.value, "$expr": frontiers.IN_TIME}
        if draft is None or await connection.frontiers.find_one(still_open, session=session) is None:
            raise Lost
        return draft, None

    await reach(FailPoint.DRAFT_BEFORE)
    try:
        draft, resolution = await connection.transaction(body)
    except (Lost, DuplicateKeyError):
        draft, resolution = await _after_loss(connection, frontier, answers, digests, by)
    else:
        if resolution is not None:
            frontiers.measure_age(frontier, FrontierStatus.RESOLVED, resolution["at"])
    await reach(FailPoint.DRAFT_AFTER)
    return await _from_document(connection, draft, resolution)


def _literally(document: Document) -> Document:
    return {name: {"$literal": value} for name, value in document.items()}  # in a pipeline, a `$` in a value would be an expression


async def _make(connection: Connection, frontier: StoredFrontier, draft_id: str) -> None:
    """The frontier has a draft, be it an empty one."""
    empty = {
        "run_id": frontier.run_id,
        "schema_version": SCHEMA_VERSION,
        "generation": frontier.generation,
        "digest": frontier.digest,
        "answers": {},
    }
    try:
        await connection.drafts.update_one({"_id": draft_id}, {"$setOnInsert": empty}, upsert=True)
    except DuplicateKeyError:
        pass  # two people began at once: the other one has made it


def _stands(draft: Document, activity_id: str, answer_digest: str, by: str) -> bool:
    """Whether the draft has exactly this answer, whoever gave it.

    Raises:
        DraftConflict: It has another one, of somebody else.
    """
    there = draft["answers"].get(activity_id)
    if there is None or (there["digest"] != answer_digest and there["by"] == by):
        return False
    if there["digest"] == answer_digest:
        return True
    raise DraftConflict(
        f"run {draft['run_id']}: {there['by']!r} has answered {activity_id} otherwise: talk; who was first can change or withdraw that answer",
        run_id=draft["run_id"],
        activity_id=activity_id,
        answered_by=there["by"],
    )


async def _accept(connection: Connection, session: Session, frontier: StoredFrontier, answers: Mapping[str, Document]) -> Document:
    """Resolve the frontier with the whole draft, in the transaction that completed it."""
    plain = await bring_in(connection, frontier.run_id, [answer["value"] for answer in answers.values()])
    people = sorted({answer["by"] for answer in answers.values()})
    signature = {
        **Answerer(by=", ".join(people), channel=AnswerChannel.DRAFT).document,
        "answered_by": {each: {name: answer[name] for name in ("by", "note", "at")} for each, answer in answers.items()},
    }
    stored = {each: answer["value"] for each, answer in answers.items()}
    return await frontiers.accept(connection, session, frontier, stored, digest(dict(zip(answers, plain, strict=True))), signature)


async def _after_loss(
    connection: Connection, frontier: StoredFrontier, answers: Mapping[str, Any], digests: Mapping[str, str], by: str
) -> tuple[Document, Document | None]:
    """The frontier takes no answers any more. If these are among those that it got, this call was repeated; else say why they are not.

    Raises:
        ResolutionError, RunError: They are not.
    """
    draft = await connection.drafts.find_one({"_id": frontier.id})
    resolution = await connection.resolutions.find_one({"_id": frontier.id})
    there = draft["answers"] if draft is not None else {}
    is_in = resolution is not None and resolution.get("channel") == AnswerChannel.DRAFT
    if draft is not None and is_in and all(_stands(draft, each, digests[each], by) for each in answers):
        return draft, resolution
    plain = await bring_in(connection, frontier.run_id, [answer["value"] for answer in there.values()])
    whole = dict(zip(there, plain, strict=True)) | dict(answers)
    await frontiers.why_lost(connection, frontier, digest(whole))  # returns if just these were recorded, by whatever way
    if draft is None:
        raise RunNotFound(f"run {frontier.run_id} is gone", run_id=frontier.run_id)
    return draft, resolution


@store_call
async def get(connection: Connection, run_id: str, generation: int) -> StoredDraft | None:
    """The draft of a frontier, or None if nobody has begun one."""
    draft_id = frontier_id(run_id, generation)
    document = await connection.drafts.find_one({"_id": draft_id})
    if document is None:
        return None
    resolution = await connection.resolutions.find_one({"_id": draft_id, "channel": AnswerChannel.DRAFT.value})
    return await _from_document(connection, document, resolution)


@store_call
async def of_open(connection: Connection, frontiers_shown: Iterable[tuple[str, int]]) -> list[StoredDraft]:
    """The drafts of these frontiers (run and generation), in one query, as they are while their frontiers are open: without resolutions."""
    wanted = [frontier_id(run_id, generation) for run_id, generation in frontiers_shown]
    documents = await connection.drafts.find({"_id": {"$in": wanted}}).to_list(None)
    return [await _from_document(connection, each, None) for each in documents]


@store_call
async def withdraw(connection: Connection, run_id: str, generation: int, activity_ids: Sequence[str], by: str) -> bool:
    """Take somebody's own answers out of a draft. False: they were not all there, or not all theirs, or the draft has gone in; nothing changed.

    Writes: `drafts`, one update.
    """
    draft_id = frontier_id(run_id, generation)
    theirs = {f"answers.{each}.by": by for each in activity_ids}

    async def body(session: Session) -> bool:
        if await connection.resolutions.find_one({"_id": draft_id}, session=session) is not None:
            return False
        # What resolves the frontier writes the draft as well: of the two, one comes first.
        changed = await connection.drafts.update_one(
            {"_id": draft_id, **theirs}, {"$unset": {f"answers.{each}": "" for each in activity_ids}}, session=session
        )
        return bool(changed.matched_count)

    return await connection.transaction(body)


async def _from_document(connection: Connection, document: Mapping[str, Any], resolution: Mapping[str, Any] | None) -> StoredDraft:
    check_version(document)
    answers = document["answers"]
    values = await bring_in(connection, document["run_id"], [answer["value"] for answer in answers.values()])
    return StoredDraft(
        run_id=document["run_id"],
        generation=document["generation"],
        digest=document["digest"],
        answers={
            each: StoredDraftAnswer(value=value, by=answer["by"], note=answer["note"], at=answer["at"])
            for (each, answer), value in zip(answers.items(), values, strict=True)
        },
        resolution=resolution_from(resolution) if resolution is not None else None,
    )
