"""What happens by itself when its time comes: delayed runs, deadlines of questions and of runs. The server's clock decides.

A head's `available_at` says when its run goes on by itself: a waiting one not before it, a suspended one at its frontier's deadline. So the sweep
needs no collection but `runs`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from mongo_durable.protocol.events import RunStatus
from mongo_durable.store.connection import Connection
from mongo_durable.store.faults import store_call

_NOT_ENDED = [status.value for status in RunStatus if not status.is_end]
_WAITING = [RunStatus.PENDING.value, RunStatus.READY.value, RunStatus.SUSPENDED.value]
_A_PAST_TIME = {"$lte": ["$available_at", "$$NOW"]}


@store_call
async def expired_suspensions(connection: Connection, limit: int) -> list[str]:
    """Suspended runs whose frontier is past its deadline, the earliest first."""
    past = {"status": RunStatus.SUSPENDED.value, "available_at": {"$type": "date"}, "$expr": _A_PAST_TIME}
    return [each["_id"] async for each in connection.runs.find(past, {"_id": 1}).sort("available_at", 1).limit(limit)]


@store_call
async def overdue_runs(connection: Connection, limit: int) -> list[str]:
    """Runs that have not ended at their deadline."""
    past = {"status": {"$in": _NOT_ENDED}, "deadline_at": {"$type": "date"}, "$expr": {"$lte": ["$deadline_at", "$$NOW"]}}
    return [each["_id"] async for each in connection.runs.find(past, {"_id": 1}).limit(limit)]


@store_call
async def next_due(connection: Connection) -> timedelta | None:
    """How long until the next run goes on by itself, or until the next deadline of a run; None: nothing is due. One command."""
    waits = [each["wait_ms"] for each in await connection.aggregate(connection.runs, _NEXT_DUE)]
    return timedelta(milliseconds=min(waits)) if waits else None


@store_call
async def server_time(connection: Connection) -> datetime:
    """The server's clock."""
    now: datetime = (await connection.client.admin.command("hello"))["localTime"]
    return now if now.tzinfo is not None else now.replace(tzinfo=UTC)


def _soonest(field: str, statuses: list[str]) -> list[dict[str, Any]]:
    return [
        {"$match": {"status": {"$in": statuses}, field: {"$type": "date"}, "$expr": {"$gt": [f"${field}", "$$NOW"]}}},
        {"$sort": {field: 1}},
        {"$limit": 1},
        {"$project": {"_id": 0, "wait_ms": {"$subtract": [f"${field}", "$$NOW"]}}},
    ]


_NEXT_DUE: list[dict[str, Any]] = [
    *_soonest("available_at", _WAITING),
    {"$unionWith": {"coll": "runs", "pipeline": _soonest("deadline_at", _NOT_ENDED)}},
]
