"""What runs in the processes that `test_sigkill` starts and kills: a root with researchers, whose bodies leave lines in a file."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from typing import Any

from langgraph.types import Command

from mongo_durable import App
from mongo_durable.store import failpoints
from mongo_durable.store.failpoints import FailPoint
from tests.deep_agents.kit import HELLO, researching, watched_inputs
from tests.langgraph.kit import Kit, Ledger, answer

LEASE = timedelta(seconds=1.5)
TOOLS = ("plain", "ask", "plain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a process is to do: run the run to its next rest, and answer that.

    Attributes:
        effects: Path of the file to which bodies and models' inputs are written.
        kill_at: The hit of a fail point at which the process kills itself.
        die_in: What a tool was asked, in whose body the process kills itself.
    """

    uri: str
    database: str
    effects: str
    run_id: str
    count: int
    is_sync: bool
    kill_at: tuple[FailPoint, int] | None = None
    die_in: str | None = None


class Lines(Ledger):
    """A ledger in a file, which outlives its process."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order

    def write(self, **line: Any) -> None:
        """Append a line, whole."""
        file = os.open(self._order.effects, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, json.dumps(line).encode() + b"\n")
        os.close(file)

    def note(self, kind: str, name: str, given: object) -> None:
        """A body has started."""
        self.write(kind=kind, name=name, given=repr(given))
        if name == "plain" and given == {"q": self._order.die_in}:
            os.kill(os.getpid(), signal.SIGKILL)


def main(order: Order, pipe: Pipe) -> None:
    """Bring the run to its end, or die."""
    hits: Counter[FailPoint] = Counter()

    async def count(point: FailPoint) -> None:
        hits[point] += 1
        if order.kill_at == (point, hits[point]):
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.handler = count
    lines = Lines(order)
    app = App("researching", uri=order.uri, database=order.database, lease=LEASE)
    graph = researching(order.count, *TOOLS)(Kit(app, lines, is_sync=order.is_sync, pause_s=0.01))
    app.entrypoint(lambda: graph)
    config: Any = {"configurable": {"thread_id": order.run_id}}

    def answers(out: Any) -> Command[Any]:
        return Command(resume={each.id: answer(each.value) for each in out["__interrupt__"]})

    async def run() -> Any:
        out = await app.ainvoke(HELLO, config, run_id=order.run_id)
        while "__interrupt__" in out:
            out = await app.ainvoke(answers(out), config, run_id=order.run_id)
        await app.aclose()
        return out

    with watched_inputs() as inputs:
        real = inputs.note

        def note(run_id: str, position: str, messages: Any) -> None:
            lines.write(kind="input", name=position, given=json.dumps([each.model_dump(mode="json") for each in messages], sort_keys=True))
            real(run_id, position, messages)

        inputs.note = note  # type: ignore[method-assign]
        if order.is_sync:
            out = app.invoke(HELLO, config, run_id=order.run_id)
            while "__interrupt__" in out:
                out = app.invoke(answers(out), config, run_id=order.run_id)
            app.close()
        else:
            out = asyncio.run(run())
    said = [(each.type, each.content, each.id) for each in out["messages"]]
    pipe.send({"said": said, "hits": dict(hits)})
    pipe.close()
