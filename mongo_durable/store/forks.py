"""Forking a run: a new run whose history is the beginning of another's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bson import ObjectId
from pymongo.errors import DuplicateKeyError

from mongo_durable.errors import RunConflict, RunNotFound
from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.events import Event, EventType, FrontierStatus, RunStatus
from mongo_durable.protocol.forking import prefix, saved_memory
from mongo_durable.protocol.history import fold
from mongo_durable.protocol.identity import Position
from mongo_durable.store import heads, memory
from mongo_durable.store.connection import Connection, Session
from mongo_durable.store.documents import SCHEMA_VERSION, Document, RunHead, event_document, frontier_id, head_from
from mongo_durable.store.events import read_history, require_readable
from mongo_durable.store.failpoints import FailPoint, reach
from mongo_durable.store.faults import store_call
from mongo_durable.store.payloads import bring_in, move_out, move_out_all, move_out_each
from mongo_durable.store.sealing import require_open

_PASSED = {EventType.ACTIVITIES_RESOLVED: FrontierStatus.RESOLVED, EventType.FRONTIER_EXPIRED: FrontierStatus.EXPIRED}


@store_call
async def fork(connection: Connection, run_id: str, at: int | Position, new_run_id: str) -> RunHead:
    """Make a run that replays the beginning of `run_id` and runs the rest anew. It has a thread of its own, named like the run.

    Args:
        at: See `protocol.forking.prefix`.

    Raises:
        RunNotFound, RunConflict: There is no such run or place, or `new_run_id` is taken.

    Writes: `runs` (the origin's head and the new one), `threads`, `frontiers`, `resolutions`, `memory`, `activity_events` in one transaction; payload
    chunks before it.
    """
    origin = await heads.get(connection, run_id)
    recorded = await read_history(connection, run_id)
    require_readable(run_id, recorded)
    events = prefix(recorded, at, new_run_id)
    history = fold(new_run_id, events)
    stored = [await _with_stored_values(connection, event) for event in events]
    frontiers = await _frontiers(connection, run_id, new_run_id, stored)
    resolutions = [
        await _resolution(connection, run_id, event, kept)
        for event, kept in zip(events, stored, strict=True)
        if event.type is EventType.ACTIVITIES_RESOLVED
    ]
    stored_input = await move_out(connection, new_run_id, origin.input)
    document: Document = {
        "_id": new_run_id,
        "run_id": new_run_id,
        "schema_version": SCHEMA_VERSION,
        "status": (RunStatus.SUSPENDED if history.status is RunStatus.SUSPENDED else RunStatus.READY).value,
        "fence": history.fence,
        "attempt": None,
        "owner": None,
        "generation": history.generation,
        "workflow": {"name": origin.workflow, "version": origin.version},
        "thread_id": new_run_id,
        "turn": 1,
        "base_thread": origin.base_thread,
        "base_turn": origin.base_turn,
        "input": stored_input,
        "input_digest": origin.input_digest,
        "settings": await move_out(connection, new_run_id, origin.settings),
        "output": None,
        "error": None,
        "priority": origin.priority,
        **({} if history.status is RunStatus.SUSPENDED else {"news": f"{origin.workflow}\n{origin.version}\n"}),
        **({"limit": {"key": origin.limit.key, "running": origin.limit.running}} if origin.limit is not None else {}),
        "forked_from": {"run_id": run_id, "at": at if isinstance(at, int) else at.text},
    }

    async def body(session: Session) -> Document:
        # A write, so that nobody prunes the origin, and with it the state that both start from, before the fork is there.
        await heads.move_head(connection, session, {"_id": run_id, "pruned_at": None}, {"forks": {"$add": [{"$ifNull": ["$forks", 0]}, 1]}})
        await connection.runs.insert_one({**document, "available_at": events[0].at, "submitted_at": events[0].at}, session=session)
        await reach(FailPoint.FORK_INSIDE)
        # A question that is open at the fork's place waits for ever, whatever deadline it had.
        available_at = None if history.status is RunStatus.SUSPENDED else "$$NOW"
        head = await heads.move_head(connection, session, {"_id": new_run_id}, {"available_at": available_at, "submitted_at": "$$NOW"})
        thread = {"_id": new_run_id, "run_id": new_run_id, "schema_version": SCHEMA_VERSION, "active_run": new_run_id, "turn": 1, "committed_turn": 0}
        await connection.threads.insert_one(thread, session=session)
        if frontiers:
            frontiers[-1]["opened_at"] = head["submitted_at"]  # the last one may be open: its time begins now
            await connection.frontiers.insert_many(frontiers, session=session)
        if resolutions:
            await connection.resolutions.insert_many(resolutions, session=session)
        await memory.save(connection, session, remembered)
        await connection.activity_events.insert_many([event_document(event, ObjectId(), connection.cipher) for event in stored], session=session)
        return head

    remembered = await memory.documents(connection, head_from({**document, "submitted_at": None}), saved_memory(new_run_id, events))
    await reach(FailPoint.FORK_BEFORE)
    try:
        created = await connection.transaction(body)
    except heads.Lost:
        raise RunNotFound(f"run {run_id!r} has been pruned meanwhile", run_id=run_id) from None
    except DuplicateKeyError:
        raise RunConflict(f"run {new_run_id!r} or a thread of that name exists already: choose another name", run_id=new_run_id) from None
    await reach(FailPoint.FORK_AFTER)
    return head_from(created)


async def _with_stored_values(connection: Connection, event: Event) -> Event:
    data: dict[str, Any] = dict(event.data)
    if "answers" in data:
        data["answers"] = await move_out_each(connection, event.run_id, data["answers"])
    return replace(event, value=await move_out(connection, event.run_id, event.value), data=data)


async def _resolution(connection: Connection, run_id: str, event: Event, stored: Event) -> Document:
    """The document of answers that the new run starts with."""
    generation = event.data["generation"]
    origin = await connection.resolutions.find_one({"_id": frontier_id(run_id, generation)}) or {}
    return {
        "_id": frontier_id(event.run_id, generation),
        "run_id": event.run_id,
        "schema_version": SCHEMA_VERSION,
        "generation": generation,
        "seq": event.seq,
        "answers": stored.data["answers"],
        "answers_digest": digest(dict(event.data["answers"])),
        "resolved_by": origin.get("resolved_by"),
        "note": origin.get("note"),
        "channel": origin.get("channel"),
        "at": origin.get("at", event.at),
    }


async def _frontiers(connection: Connection, run_id: str, new_run_id: str, events: list[Event]) -> list[Document]:
    """The documents of the frontiers that the new run has passed already, and of the one that it starts suspended on."""
    passed = {event.data["generation"]: _PASSED[event.type] for event in events if event.type in _PASSED}
    documents: list[Document] = []
    for event in events:
        if event.type is not EventType.ACTIVITIES_SUSPENDED:
            continue
        generation = event.data["generation"]
        origin = await connection.frontiers.find_one({"_id": frontier_id(run_id, generation)})
        if origin is None:
            continue
        ids = {entry["position"]: entry["activity_id"] for entry in event.data["entries"]}
        values, defaults = [
            await _values(connection, run_id, new_run_id, [entry.get(name) for entry in origin["entries"]]) for name in ("value", "default")
        ]
        closed_at = origin.pop("closed_at", event.at)
        documents.append(
            {
                **origin,
                **({"closed_at": closed_at} if generation in passed else {}),
                "_id": frontier_id(new_run_id, generation),
                "run_id": new_run_id,
                "thread_id": new_run_id,
                "seq": event.seq,
                "status": passed.get(generation, FrontierStatus.OPEN).value,
                "expires_at": origin["expires_at"] if generation in passed else None,
                "digest": event.data["digest"],
                "entries": [
                    {
                        **entry,
                        "activity_id": ids[entry["position"]],
                        "value": value,
                        **({"default": default} if "default" in entry else {}),
                        "expires_at": entry.get("expires_at") if generation in passed else None,
                    }
                    for entry, value, default in zip(origin["entries"], values, defaults, strict=True)
                ],
            }
        )
    return documents


async def _values(connection: Connection, run_id: str, new_run_id: str, stored: list[Any]) -> list[Any]:
    values = await bring_in(connection, run_id, stored)
    require_open(run_id, values)
    return await move_out_all(connection, new_run_id, values)
