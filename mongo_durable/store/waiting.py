"""Why a run waits: what `get_run`, `list_runs` and `doctor` tell people about runs that could go on and do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from mongo_durable.protocol.events import RunStatus
from mongo_durable.store import claims
from mongo_durable.store.connection import Connection
from mongo_durable.store.documents import RunHead, head_from
from mongo_durable.store.due import full_limits
from mongo_durable.store.faults import store_call
from mongo_durable.store.heads import Cursor, paged, versions

_WAITING = (RunStatus.PENDING, RunStatus.READY)


@store_call
async def reasons(connection: Connection, heads: Iterable[RunHead]) -> Mapping[str, str]:
    """By run id, what each of these runs waits for that is neither an answer nor its turn. No queries where none waits."""
    waiting = [head for head in heads if head.status in _WAITING]
    if not waiting:
        return {}
    served = await _served(connection)
    full = await full_limits(connection) if any(head.limit is not None for head in waiting) else []
    found = ((head.run_id, _reason(head, served, full)) for head in waiting)
    return {run_id: reason for run_id, reason in found if reason is not None}


async def _served(connection: Connection) -> set[tuple[str, str]]:
    return {workflow for runner in await claims.live_runners(connection) for workflow in runner.serves}


def _reason(head: RunHead, served: Iterable[tuple[str, str]], full: Iterable[str]) -> str | None:
    if head.is_queued:
        return f"another run is live on thread {head.thread_id!r}"
    if head.available_at is not None and head.available_at > datetime.now(UTC):
        until = f"{head.available_at:%Y-%m-%d %H:%M:%SZ}"
        return f"held back until {until}: {head.held_back}" if head.held_back is not None else f"not to go on before {until}"
    if (head.workflow, head.version) not in served:
        return f"no live runner serves workflow {head.workflow!r} version {head.version!r}"
    if head.limit is not None and head.limit.key in full:
        return f"all {head.limit.running} places of limit {head.limit.key!r} are taken"
    return None


@store_call
async def unserved(connection: Connection, limit: int, after: Cursor | None = None) -> list[RunHead]:
    """Runs that could go on, but whose workflow and version no live runner serves; the oldest first.

    Args:
        after: Where the page before ended.
    """
    served = await _served(connection)
    names: list[str] = await connection.runs.distinct("workflow.name")
    orphaned = [
        {"workflow.name": name, "workflow.version": version, "status": status.value, "pruned_at": None}
        for name in names
        for version in await versions(connection, name)
        if (name, version) not in served
        for status in _WAITING
    ]
    if not orphaned:
        return []
    page = paged(orphaned, "submitted_at", after, is_newest_first=False)
    found = await connection.runs.find(page).sort([("submitted_at", 1), ("_id", 1)]).limit(limit).to_list(None)
    return [head_from(each) for each in found]
