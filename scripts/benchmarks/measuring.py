"""Rounds in which the contenders take turns."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from scripts.benchmarks.contenders import CONTENDERS
from scripts.benchmarks.crew import Samples, Worker, WorkFailed
from scripts.benchmarks.servers import Addresses
from scripts.benchmarks.workloads import Workload


@dataclass(slots=True)
class Measured:
    """A workload's samples.

    Attributes:
        rounds: By case (its index) the samples of each round.
        failures: By case what went wrong. It is not tried again.
    """

    workload: Workload
    rounds: dict[int, list[Samples]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def values(self, case: int, series: str) -> list[list[float]]:
        """What was measured of a series, by round; nothing if the case has no such series."""
        return [samples[series] for samples in self.rounds.get(case, []) if series in samples]


async def measure(
    chosen: Sequence[Workload], rounds: int, addresses: Addresses, absent: Collection[str], tell: Callable[[str], None] = lambda text: None
) -> list[Measured]:
    """Do all workloads, with one worker a contender, of which one works at a time.

    Args:
        absent: Contenders that cannot take part.
        tell: Is told what is done now.
    """
    measured = [Measured(workload) for workload in chosen]
    taking_part = [name for name in CONTENDERS if name not in absent and any(case.contender == name for each in chosen for case in each.cases)]
    async with AsyncExitStack() as stack:
        tell("starting")
        workers = dict(zip(taking_part, await asyncio.gather(*(_hired(name, addresses, stack) for name in taking_part)), strict=True))
        for number in range(rounds):
            for each in measured:
                if number >= (each.workload.rounds or rounds):
                    continue
                cases = list(enumerate(each.workload.cases))
                random.shuffle(cases)
                for index, case in cases:
                    if case.contender in absent or index in each.failures:
                        continue
                    tell(f"round {number + 1} of {rounds}: {each.workload.name}, {CONTENDERS[case.contender].title}")
                    try:
                        samples = await workers[case.contender].ask(case.method, case.parameters)
                    except WorkFailed as failure:
                        each.failures[index] = str(failure)
                    else:
                        each.rounds.setdefault(index, []).append(samples)
    return measured


async def _hired(contender: str, addresses: Addresses, stack: AsyncExitStack) -> Worker:
    worker = await Worker.start(contender, addresses)
    stack.push_async_callback(worker.stop)
    return worker
