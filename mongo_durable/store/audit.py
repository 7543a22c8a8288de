"""Audit events: what was refused, and to whom. Insert only, outside any run's history, because a refusal changes nothing of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from bson import ObjectId

from mongo_durable.store.connection import Connection
from mongo_durable.store.documents import SCHEMA_VERSION, Answerer, Document, check_version
from mongo_durable.store.faults import store_call

_REFUSED = "answer.refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An answer that was refused.

    Attributes:
        code: Of the error that its caller got, such as `not_authorized` or `resolution_conflict`.
        generation: That the answer was for, as far as known.
        by, channel: Who answered, and how.
        activity_ids: The questions that it answered.
        message: Of the error; no payload.
        at: The server's clock.
    """

    run_id: str
    generation: int | None
    code: str
    by: str | None
    channel: str
    activity_ids: Sequence[str]
    message: str
    at: datetime


@store_call
async def record_refusal(
    connection: Connection, run_id: str, generation: int | None, answerer: Answerer, *, code: str, activity_ids: Sequence[str], message: str
) -> None:
    """Keep that an answer was refused.

    Writes: `audit`, one insert.
    """
    document: Document = {
        "_id": ObjectId(),
        "run_id": run_id,
        "schema_version": SCHEMA_VERSION,
        "type": _REFUSED,
        "generation": generation,
        "code": code,
        "by": answerer.by,
        "channel": answerer.channel.value,
        "activity_ids": list(activity_ids),
        "message": message,
        "at": await connection.server_time(),
    }
    await connection.audit.insert_one(document)


@store_call
async def refusals(connection: Connection, run_id: str) -> list[Refusal]:
    """The refused answers of a run, in order."""
    documents = await connection.audit.find({"run_id": run_id, "type": _REFUSED}).sort([("at", 1), ("_id", 1)]).to_list(None)
    for document in documents:
        check_version(document)
    return [
        Refusal(
            run_id=document["run_id"],
            generation=document["generation"],
            code=document["code"],
            by=document["by"],
            channel=document["channel"],
            activity_ids=tuple(document["activity_ids"]),
            message=document["message"],
            at=document["at"],
        )
        for document in documents
    ]
