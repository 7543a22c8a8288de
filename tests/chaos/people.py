"""The people of the chaos suite: who orders, who answers, who calls off, who lets failed runs go on. They keep what they were told.

They live in the process of the suite, which nobody kills, so that every acknowledgement is known at the end. Their commands meet the same faults as
everybody's: what is not acknowledged is asked again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mongo_durable import DurableClient
from mongo_durable.errors import ResolutionConflict, ResolutionError, RunError, RunNotFound, RunNotSuspended, StaleGeneration, StoreError
from mongo_durable.snapshots import Frontier, Question
from tests.chaos.outside import Line, Witness
from tests.chaos.workload import Order, answer
from tests.support.invariants import Cancelled, Promise, Received

T = TypeVar("T")

APPROVERS = 3
WORDS = ("oak", "elm", "ash", "fir", "yew")
_AGAIN_S = 0.1
_LOOK_S = 0.3


@dataclass(slots=True)
class Told:
    """What people were told by the system, and how often they heard what.

    Attributes:
        accepted: Orders whose submission was acknowledged.
        called_off: Runs that somebody asked to cancel, acknowledged or not.
        promises: Receipts and cancellations.
        wrong: What nobody may ever hear.
    """

    accepted: dict[str, Order] = field(default_factory=dict)
    called_off: set[str] = field(default_factory=set)
    promises: list[Promise] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    heard: Counter[str] = field(default_factory=Counter)


class People:
    """Everybody who uses the system, at once.

    Args:
        at_once: How many runs are live at a time.
        effects: The outside world, where a careful person looks before saying whether something happened.
    """

    def __init__(self, uri: str, database: str, orders: Iterable[Order], effects: Path, *, at_once: int, seed: int) -> None:
        self.told = Told()
        self._uri = uri
        self._database = database
        self._orders = iter(orders)
        self._witness = Witness(effects)
        self._at_once = at_once
        self._seed = seed
        self._live: set[str] = set()
        self._in_flight = 0
        self._is_closing_time = asyncio.Event()

    @property
    def live(self) -> list[str]:
        """Accepted runs that have not come to their end."""
        return sorted(self._live)

    def close_for_orders(self) -> None:
        """Nobody orders any more; everybody else goes on."""
        self._is_closing_time.set()

    async def live_and_let_live(self) -> None:
        """Be everybody, until all runs that were accepted have ended."""
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(DurableClient(self._uri, database=self._database)) for _ in range(APPROVERS + 1)]
            ordering = asyncio.create_task(self._order(clients[-1]))
            everybody = [ordering, asyncio.create_task(self._operate(clients[-1]))]
            everybody += [asyncio.create_task(self._approve(f"approver-{number}", clients[number])) for number in range(APPROVERS)]
            try:
                ended, _ = await asyncio.wait(everybody, return_when=asyncio.FIRST_COMPLETED)
                for each in ended:
                    each.result()  # all but the first end by an error alone
            finally:
                for each in everybody:
                    each.cancel()
                await asyncio.gather(*everybody, return_exceptions=True)

    async def _order(self, client: DurableClient) -> None:
        """Order so much that `at_once` runs are live; at closing time, wait for their end."""
        async with asyncio.TaskGroup() as group:
            while True:
                is_closed = self._is_closing_time.is_set()
                if is_closed and not self._live and not self._in_flight:
                    return
                while not is_closed and len(self._live) + self._in_flight < self._at_once:
                    order = next(self._orders, None)
                    if order is None:
                        self._is_closing_time.set()
                        break
                    self._in_flight += 1
                    group.create_task(self._submit(client, order))
                await self._look(client)
                await asyncio.sleep(_LOOK_S)

    async def _submit(self, client: DurableClient, order: Order) -> None:
        try:
            await self._insist(
                lambda: client.submit(order.workflow, order.input(), run_id=order.run_id, thread_id=order.thread_id, when_busy="queue")
            )
            self.told.accepted[order.run_id] = order
            self._live.add(order.run_id)
        except Exception as error:  # noqa: BLE001 - nothing else may come of a submission
            self.told.wrong.append(f"submit {order.run_id}: {type(error).__name__}: {error}")
        finally:
            self._in_flight -= 1
        if order.cancel_after_s is not None:
            await asyncio.sleep(order.cancel_after_s)
            await self._call_off(client, order.run_id)

    async def _call_off(self, client: DurableClient, run_id: str) -> None:
        self.told.called_off.add(run_id)
        try:
            snapshot = await self._insist(lambda: client.cancel(run_id, reason="no longer wanted"))
        except RunError as error:
            self.told.heard[f"cancel: {type(error).__name__}"] += 1
            return
        if snapshot.status == "cancelled":
            self.told.promises.append(Cancelled(run_id=run_id))

    async def _look(self, client: DurableClient) -> None:
        """Strike off what has ended. A failed run that is to go on has not."""
        try:
            for run_id in list(self._live):
                snapshot = await client.get_run(run_id)
                if snapshot.is_ended and not (snapshot.status == "failed" and _may_go_on(snapshot.error)):
                    self._live.discard(run_id)
        except StoreError:
            return
        except RunNotFound as error:
            # Majority-committed, and not there: no fault of the moment excuses it.
            self.told.wrong.append(f"lost: {error}")
            self._live.discard(str(error.run_id))

    async def _operate(self, client: DurableClient) -> None:
        """Let runs go on that failed because nobody knew whether something had happened."""
        while True:
            try:
                for snapshot in await client.list_runs(status="failed"):
                    if _may_go_on(snapshot.error):
                        await client.retry(snapshot.run_id)
                        self.told.heard["retried"] += 1
            except (StoreError, RunError):
                pass  # the next look finds it
            await asyncio.sleep(_LOOK_S)

    async def _approve(self, name: str, client: DurableClient) -> None:
        """Answer what is open, in any order, in a race with the others."""
        dice = random.Random(f"{name} {self._seed}")
        while True:
            try:
                found = await client.open_frontiers(limit=50)
            except StoreError:
                await asyncio.sleep(_AGAIN_S)
                continue
            if not found:
                await asyncio.sleep(_AGAIN_S / 2)
                continue
            frontier = dice.choice(found)
            await asyncio.sleep(dice.random() * 0.03)
            happened = self._witness.happened() if _asks_what_happened(frontier) else {}
            given = {entry.activity_id: self._decide(entry, happened, dice) for entry in frontier.entries}
            await self._resolve(client, frontier, given, name)

    def _decide(self, entry: Question, happened: dict[str, Line], dice: random.Random) -> Any:
        if entry.name != "unknown_outcome":
            return answer(entry.value, dice.choice(WORDS))
        line = happened.get(entry.value["idempotency_key"])
        return {"verdict": "rerun"} if line is None else {"verdict": "completed", "result": line.result}

    async def _resolve(self, client: DurableClient, frontier: Frontier, given: dict[str, Any], name: str) -> None:
        try:
            receipt = await self._insist(
                lambda: client.resolve(frontier.run_id, given, generation=frontier.generation, digest=frontier.digest, resolved_by=name)
            )
        except (ResolutionConflict, StaleGeneration, RunNotSuspended) as error:
            self.told.heard[f"resolve: {type(error).__name__}"] += 1
        except (ResolutionError, RunError) as error:
            self.told.wrong.append(f"resolve {frontier.run_id}: {type(error).__name__}: {error}")
        else:
            self.told.heard["resolve: receipt"] += 1
            self.told.promises.append(Received(run_id=frontier.run_id, generation=frontier.generation, answers_digest=receipt.answers_digest))

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Send the same command until its answer comes."""
        while True:
            try:
                return await call()
            except StoreError as error:
                self.told.heard[f"asked again after {type(error).__name__}"] += 1
                await asyncio.sleep(_AGAIN_S)


def _asks_what_happened(frontier: Frontier) -> bool:
    return any(entry.name == "unknown_outcome" for entry in frontier.entries)


def _may_go_on(error: Any) -> bool:
    return str((error or {}).get("type", "")).endswith("UnknownOutcome")
