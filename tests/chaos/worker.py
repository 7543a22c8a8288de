"""A process of the chaos suite that executes runs until it is killed, or drains on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from pymongo import AsyncMongoClient

from mongo_durable import App, Runner
from mongo_durable.errors import StoreError
from mongo_durable.store.heartbeat import lease_clock
from tests.chaos.outside import Outside, append
from tests.chaos.workload import Workload

SWEEP = timedelta(seconds=0.4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Where a worker works.

    Attributes:
        effects: The file of outside effects.
        log: The file of what its loggers say.
    """

    uri: str
    database: str
    effects: Path
    log: Path
    lease: timedelta
    concurrency: int = 6


class _Log(logging.Handler):
    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        text = self.formatter.format(record) if self.formatter else record.getMessage()
        append(self._path, {"pid": os.getpid(), "at": record.created, "level": record.levelname, "logger": record.name, "text": text})


async def _work(post: Post) -> None:
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(post.uri, appname="chaos", serverSelectionTimeoutMS=5000)
    runner: Runner | None = None

    def lease_left(run_id: str) -> float:
        assert runner is not None
        assert runner.process is not None
        attempt = runner.process.running.get(run_id)
        # Its attempt has been told that it is over, while its body still runs: what it was promised does not matter any more.
        return attempt._sink.lease._valid_until - lease_clock() if attempt is not None else 0.0

    def make(name: str, **options: Any) -> App:
        return App(name, uri=post.uri, database=post.database, lease=post.lease, **options)

    apps = Workload(make, post.database, client, Outside(post.effects, lease_left)).apps()
    runner = Runner(apps, concurrency=post.concurrency, lease=post.lease, sweep_interval=SWEEP)
    while True:
        try:
            await runner.run_forever(grace=timedelta(seconds=2))
            break
        except StoreError:
            logging.getLogger("chaos").info("no database at the start; once more")
    await client.close()


def main(post: Post) -> None:
    """Work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the suite, which ends its workers
    handler = _Log(post.log)
    handler.setFormatter(logging.Formatter("%(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("mongo_durable").setLevel(logging.INFO)
    asyncio.run(_work(post))
