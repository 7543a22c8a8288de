"""The janitor: prunes what is past its retention, beside the work of a runner."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from contextlib import aclosing
from datetime import timedelta

from mongo_durable.errors import ConfigurationError, DurableError
from mongo_durable.store.connection import Connection
from mongo_durable.store.pruning import Selection, prune
from mongo_durable.telemetry import count

log = logging.getLogger(__name__)

_RUNS_AT_ONCE = 100
_DOCUMENTS_AT_ONCE = 200
_PAUSE_S = 0.5
"""Between two helpings of a workflow that has more than one: the runs that are executed go first."""


class Janitor:
    """Prunes ended runs past the retention of their workflow. Any number of processes may have one.

    Args:
        retention: How long the runs of a workflow are kept after their end, by its name.
        interval: How often to look.
    """

    def __init__(self, retention: Mapping[str, timedelta], interval: timedelta) -> None:
        if interval <= timedelta():
            raise ConfigurationError("retention_interval is longer than nothing")
        self._selections = [Selection(older_than=age, workflow=workflow) for workflow, age in retention.items()]
        self._interval_s = interval.total_seconds()

    @property
    def has_work(self) -> bool:
        """Whether any workflow has a retention."""
        return bool(self._selections)

    async def run(self, connection: Connection) -> None:
        """Look now and then, until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s * random.uniform(0.5, 1.0))  # so that a fleet does not sweep in step
            for selection in self._selections:
                try:
                    while True:
                        if await self._some(connection, selection) < _RUNS_AT_ONCE:
                            break
                        await asyncio.sleep(_PAUSE_S)
                except DurableError as error:
                    log.warning("runs of workflow %s could not be pruned now: %s", selection.workflow, error)
                except Exception:
                    # What is not known here must not end the cleaning of a runner that works.
                    log.exception("pruning runs of workflow %s failed in a way that is not expected", selection.workflow)

    async def _some(self, connection: Connection, selection: Selection) -> int:
        """Prune a few runs; returns how many."""
        removed = 0
        async with aclosing(prune(connection, selection, batch=_DOCUMENTS_AT_ONCE)) as pruned:
            async for each in pruned:
                removed += 1
                count("runs.pruned", workflow=each.workflow)
                log.info("run %s: pruned, %d documents", each.run_id, sum(each.documents.values()))
                if removed == _RUNS_AT_ONCE:
                    break
        return removed
