"""What a runner has to know at a look, beside what it can claim: what is due by the server's clock, who is to be stopped, which limits are full.

A head's `available_at` says when its run goes on by itself: a waiting one not before it, a suspended one at its frontier's deadline. So nothing but
`runs` has to be asked, and that in one command.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from mongo_durable.protocol.events import RunStatus
from mongo_durable.store.connection import Connection
from mongo_durable.store.documents import RunLimit
from mongo_durable.store.faults import store_call
from mongo_durable.store.heads import NOT_ENDED

_WAITING = [RunStatus.PENDING.value, RunStatus.READY.value, RunStatus.SUSPENDED.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """What is to be done now, and when to look again.

    Attributes:
        stopped: Running runs of this process that somebody has marked to be stopped; who marked them may have died after that.
        expired: Suspended runs whose frontier is past its deadline, the earliest first.
        overdue: Runs that have not ended at their deadline.
        full: Keys of limits of which every place is taken.
        wait: Until the next run goes on by itself, or the next deadline; None: nothing is due.
    """

    stopped: Sequence[str]
    expired: Sequence[str]
    overdue: Sequence[str]
    full: Sequence[str]
    wait: timedelta | None


@store_call
async def due(connection: Connection, owner: str, limit: int) -> Due:
    """What this process has to know now.

    Args:
        limit: At most so many of each kind.
    """
    found: dict[str, list[Any]] = {"stopped": [], "expired": [], "overdue": [], "place": [], "wait": []}
    for each in await connection.aggregate(connection.runs, _pipeline(owner, limit)):
        found[each["what"]].append(each["is"])
    return Due(
        stopped=found["stopped"],
        expired=found["expired"],
        overdue=found["overdue"],
        full=_full(found["place"]),
        wait=timedelta(milliseconds=min(found["wait"])) if found["wait"] else None,
    )


@store_call
async def full_limits(connection: Connection) -> list[str]:
    """Keys of limits of which every place is taken."""
    return _full([each["is"] for each in await connection.aggregate(connection.runs, _told("place", _PLACES, "$limit"))])


def _full(held: Sequence[dict[str, Any]]) -> list[str]:
    count: Counter[str] = Counter()
    most: dict[str, int] = {}
    for each in held:
        limit = RunLimit(**each)
        count[limit.key] += 1
        most[limit.key] = max(most.get(limit.key, 0), limit.running)
    return [key for key, number in count.items() if number >= most[key]]


_PLACES: list[dict[str, Any]] = [{"$match": {"place": {"$type": "string"}}}]


def _pipeline(owner: str, limit: int) -> list[dict[str, Any]]:
    stopped = [{"$match": {"status": RunStatus.RUNNING.value, "owner": owner, "cancel": {"$ne": None}}}]
    others = [
        _told("expired", [*_at("available_at", [RunStatus.SUSPENDED.value], "$lte"), {"$limit": limit}]),
        _told("overdue", [*_at("deadline_at", NOT_ENDED, "$lte"), {"$limit": limit}]),
        _told("place", _PLACES, "$limit"),
        _told("wait", [*_at("available_at", _WAITING, "$gt"), {"$limit": 1}], {"$subtract": ["$available_at", "$$NOW"]}),
        _told("wait", [*_at("deadline_at", NOT_ENDED, "$gt"), {"$limit": 1}], {"$subtract": ["$deadline_at", "$$NOW"]}),
    ]
    return [*_told("stopped", stopped), *({"$unionWith": {"coll": "runs", "pipeline": each}} for each in others)]


def _at(field: str, statuses: Sequence[str], comparison: str) -> list[dict[str, Any]]:
    """Heads of these statuses whose time is past or to come, the earliest first."""
    return [
        {"$match": {"status": {"$in": list(statuses)}, field: {"$type": "date"}, "$expr": {comparison: [f"${field}", "$$NOW"]}}},
        {"$sort": {field: 1}},
    ]


def _told(what: str, stages: Sequence[dict[str, Any]], value: Any = "$_id") -> list[dict[str, Any]]:
    return [*stages, {"$project": {"_id": 0, "what": {"$literal": what}, "is": value}}]
