"""The conversation record of threads: written with the transaction that suspends or ends a run, so under its fence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mongo_durable.protocol.memory import MemoryEntry, MemoryRole
from mongo_durable.store.connection import Connection, Session
from mongo_durable.store.documents import SCHEMA_VERSION, Document, RunHead, check_version
from mongo_durable.store.faults import store_call
from mongo_durable.store.payloads import bring_in, move_out_all
from mongo_durable.store.sealing import open_error, seal_error


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMemory:
    """An entry as stored, with the run and turn that it belongs to."""

    run_id: str
    turn: int
    entry: MemoryEntry


async def documents(connection: Connection, head: RunHead, entries: Sequence[MemoryEntry]) -> list[Document]:
    """The documents of `entries`; large values are moved out first, before any transaction.

    A run that was cancelled before its thread was free has had no turn, and is no part of the conversation.
    """
    if head.turn == 0:
        return []
    values = await move_out_all(connection, head.run_id, [entry.value for entry in entries])
    return [
        {
            "_id": f"{head.run_id}/{entry.seq:08}/{entry.activity_id or ''}",
            "run_id": head.run_id,
            "thread_id": head.thread_id,
            "turn": head.turn,
            "seq": entry.seq,
            "schema_version": SCHEMA_VERSION,
            "role": entry.role.value,
            "name": entry.name,
            "activity_id": entry.activity_id,
            "value": value,
            "error": seal_error(connection.cipher, head.run_id, entry.error),
        }
        for entry, value in zip(entries, values, strict=True)
    ]


async def save(connection: Connection, session: Session, found: Sequence[Document]) -> None:
    """Write entries in the caller's transaction. None of them is there yet: they stem from events behind the last suspension, whose transaction saved
    the ones before."""
    if found:
        await connection.memory.insert_many(found, session=session)


@store_call
async def transcript(connection: Connection, thread_id: str) -> list[StoredMemory]:
    """The conversation of a thread, in order, with large values brought in."""
    found: list[Document] = await connection.memory.find({"thread_id": thread_id}).sort([("turn", 1), ("seq", 1), ("_id", 1)]).to_list(None)
    values: dict[str, list[Any]] = {}
    for run_id in dict.fromkeys(document["run_id"] for document in found):
        values[run_id] = await bring_in(connection, run_id, [document["value"] for document in found if document["run_id"] == run_id])
    return [_stored(connection, document, values[document["run_id"]].pop(0)) for document in found]


def _stored(connection: Connection, document: Document, value: Any) -> StoredMemory:
    check_version(document)
    entry = MemoryEntry(
        seq=document["seq"],
        role=MemoryRole(document["role"]),
        name=document["name"],
        activity_id=document["activity_id"],
        value=value,
        error=open_error(connection.cipher, document["run_id"], document["error"]),
    )
    return StoredMemory(run_id=document["run_id"], turn=document["turn"], entry=entry)
