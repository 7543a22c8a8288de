"""What is measured. The numbers of DESIGN's targets are written beside the comparisons that they are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.benchmarks.contenders import OURS

_TEXT = 1_000
"""Characters that an effect returns."""
_DOCUMENT = 1_400
"""Bytes of the event that holds them."""


@dataclass(frozen=True, slots=True)
class Case:
    """What one contender does of a workload.

    Attributes:
        method: Of the contender.
        variant: What is special about it, for people.
    """

    contender: str
    method: str
    parameters: Mapping[str, Any]
    variant: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """One of the things that are measured.

    Attributes:
        shown: What people read: with its unit.
        quantile: Which of the samples stands for them: 0.5 is the median.
    """

    name: str
    shown: str
    quantile: float = 0.5


@dataclass(frozen=True, slots=True)
class Target:
    """What is wanted.

    Attributes:
        against: Index of the case that the first one is divided by; None: the first one's own number.
        is_at_most: Whether less is wanted, or more.
    """

    series: str
    bound: float
    against: int | None = None
    is_at_most: bool = True

    def is_met(self, found: float) -> bool:
        """Whether it is reached."""
        return found <= self.bound if self.is_at_most else found >= self.bound


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload. The first case is ours; the others are compared with it.

    Attributes:
        rounds: At most so many; None: as many as there are.
    """

    name: str
    title: str
    cases: Sequence[Case]
    series: Sequence[Series]
    targets: Sequence[Target] = ()
    rounds: int | None = None


def workloads(*, quick: bool) -> list[Workload]:
    """All of them, in the order of the report."""
    return [
        *_recording(quick),
        *(_at_once(runs, (20 if runs < 256 else 10) if quick else 50, 1 if quick and runs == 256 else None) for runs in (1, 16, 64, 256)),
        _events(64, 30 if quick else 100),
        *(_tools(calls) for calls in (1, 8, 32)),
        _graph(3 if quick else 10),
        *(_resolving(suspended, 10 if quick else 30) for suspended in (0, 1_000)),
        _takeover(1 if quick else 2, 2 if quick else None),
        *(_replay(activities) for activities in ((100, 1_000) if quick else (100, 1_000, 10_000))),
        _growth(1_000 if quick else 10_000),
        _idle(1_000 if quick else 10_000),
        *_conversations(50 if quick else 100),
    ]


def _recording(quick: bool) -> list[Workload]:
    calls = 5 if quick else 20
    pause_s = 0.05
    steps = 50
    return [
        Workload(
            "llm",
            f"record a model call of {pause_s * 1e3:.0f} ms",
            [
                Case(OURS, "llm", {"calls": calls, "pause_s": pause_s, "characters": _TEXT}),
                Case("raw", "llm", {"calls": calls, "pause_s": pause_s, "size": _DOCUMENT}, "one insert"),
                Case("memory", "llm", {"calls": calls, "pause_s": pause_s, "characters": _TEXT}, "nothing recorded"),
            ],
            [Series("overhead", "overhead, ms"), Series("whole call", "whole call, ms")],
            [Target("overhead", 1.25, 1), Target("whole call", 1.25, 1)],
        ),
        Workload(
            "tool",
            "record a tool call",
            [
                Case(OURS, "tool", {"calls": 3 * calls, "characters": _TEXT}),
                Case("raw", "tool", {"calls": 3 * calls, "size": _DOCUMENT}, "one insert"),
            ],
            [Series("overhead", "overhead, ms")],
            [Target("overhead", 2.5, 1)],
        ),
        Workload(
            "sequence",
            f"{steps} activities one after the other, in one run",
            [
                Case(OURS, "sequence", {"steps": steps, "characters": _TEXT}),
                Case("dbos", "sequence", {"steps": steps, "size": _TEXT}),
                Case("raw", "sequence", {"inserts": steps, "size": _DOCUMENT}, f"{steps} inserts"),
                Case("raw", "sequence", {"inserts": 2 * steps, "size": _DOCUMENT // 2}, f"{2 * steps} inserts of half the size"),
            ],
            [Series("time", "time, ms")],
        ),
    ]


def _at_once(runs: int, steps: int, rounds: int | None) -> Workload:
    shape = {"runs": runs, "steps": steps, "characters": _TEXT}
    # As many bytes as ours: a step is two documents, and one of them holds the text.
    documents = max(2 * runs * steps, 2 * 64)
    return Workload(
        f"at-once-{runs}",
        f"{runs} run{'s' if runs > 1 else ''} at once, {steps} activities each",
        [
            Case(OURS, "at_once", shape),
            Case(OURS, "at_once_by_runner", shape, "through a runner"),
            Case("dbos", "at_once", {"runs": runs, "steps": steps, "size": _TEXT}),
            Case("raw", "at_once", {"documents": documents, "batch": 64, "size": _DOCUMENT * 5 // 8}, "insert_many of 64"),
        ],
        [Series("steps", "steps/s"), Series("documents", "documents/s")],
        [Target("steps", 10, 2, is_at_most=False), Target("documents", 0.6, 3, is_at_most=False)] if runs == 64 else [],
        rounds,
    )


def _events(runs: int, steps: int) -> Workload:
    shape = {"runs": runs, "steps": steps, "characters": _TEXT}
    return Workload(
        f"events-{runs}",
        f"events of {runs} runs at once, {2 * steps} each, without graphs: the appender alone",
        [
            Case(OURS, "events_at_once", shape, "each is waited for"),
            Case(OURS, "events_at_once", {**shape, "is_start_awaited": False}, "starts are not waited for"),
            Case("raw", "at_once", {"documents": 2 * runs * steps, "batch": 64, "size": _DOCUMENT * 5 // 8}, "insert_many of 64"),
        ],
        [Series("documents", "documents/s")],
        [Target("documents", 0.6, 2, is_at_most=False)],
    )


def _tools(calls: int) -> Workload:
    return Workload(
        f"tools-{calls}",
        f"{calls} tool call{'s' if calls > 1 else ''} of one model response, whole run",
        [
            Case(OURS, "tools", {"calls": calls, "characters": _TEXT}),
            Case("dbos", "tools", {"calls": calls, "size": _TEXT}, "steps at once"),
            Case("raw", "tools", {"calls": calls, "size": _DOCUMENT}, "2 insert_many"),
        ],
        [Series("time", "time, ms")],
    )


def _graph(times: int) -> Workload:
    return Workload(
        "graph",
        "10 nodes with an effect each and one interrupt: start, answer, end",
        [
            Case(OURS, "graph", {"times": times}, "effects recorded"),
            Case(OURS, "graph", {"times": times, "has_activities": False}, "effects not recorded"),
            Case("memory", "graph", {"times": times}),
            Case("postgres-saver", "graph", {"times": times}),
            Case("postgres-saver", "graph", {"times": times, "durability": "sync"}, 'durability="sync"'),
            Case("mongodb-saver", "graph", {"times": times}),
            Case("mongodb-saver", "graph", {"times": times, "durability": "sync"}, 'durability="sync"'),
        ],
        [Series("time", "time, ms")],
        [Target("time", 1 / 3, 5), Target("time", 1, 3)],
    )


def _resolving(suspended: int, times: int) -> Workload:
    return Workload(
        f"resolving-{suspended or 1}",
        f"resolve() returned → first node of the next attempt, {f'{suspended:,} runs' if suspended else 'nothing else'} suspended",
        [
            Case(OURS, "resolving", {"times": times, "suspended": suspended}),
            Case("raw", "resolving", {"times": times}, "transaction of 2 writes + insert"),
        ],
        [Series("p50", "p50, ms"), Series("p99", "p99, ms", 0.99)],
        [Target("p50", 2, 1)],
    )


def _takeover(lease_s: float, rounds: int | None) -> Workload:
    return Workload(
        "takeover",
        f"SIGKILL of a run's process → first event of the next attempt (lease {lease_s:.0f} s)",
        [Case(OURS, "takeover", {"lease_s": lease_s})],
        [Series("leases", "leases")],
        rounds=rounds,
    )


def _replay(activities: int) -> Workload:
    return Workload(
        f"replay-{activities}",
        f"replay of {activities:,} activities",
        [
            Case(OURS, "replay", {"activities": activities, "characters": _TEXT // 5}),
            Case("raw", "replay", {"activities": activities, "size": _DOCUMENT * 2 // 5}, "read the documents"),
        ],
        [Series("rate", "activities/s"), Series("queries", "queries for the history"), Series("writes", "events written")],
        [Target("rate", 20_000, is_at_most=False), Target("queries", 1), Target("writes", 1)],
    )


def _growth(activities: int) -> Workload:
    edge = min(500, activities // 4)
    return Workload(
        "growth",
        f"an activity among {activities:,} of one run: first {edge}, last {edge}",
        [Case(OURS, "growth", {"activities": activities, "characters": _TEXT // 5})],
        [
            Series("first", "first, ms"),
            Series("last", "last, ms"),
            Series("growth", "last ÷ first"),
            Series("growth of computing", "last ÷ first, processor time"),
        ],
        rounds=1,
    )


def _idle(suspended: int) -> Workload:
    return Workload(
        "idle",
        f"a runner beside {suspended:,} suspended runs",
        [Case(OURS, "idle", {"suspended": suspended})],
        [
            Series("memory before", "memory before, MB"),
            Series("memory added", "memory added, MB"),
            Series("cursors", "change streams"),
            Series("commands of a sweep", "commands of a sweep"),
            Series("time of a sweep", "time of a sweep, ms"),
        ],
        [Target("cursors", 1)],
        rounds=1,
    )


def _conversations(turns: int) -> list[Workload]:
    series = [Series("whole", "kB"), Series("growth", "second half ÷ first half")]
    return [
        Workload(
            "model-calls",
            f"bytes of one run with {turns} model calls",
            [Case(OURS, "model_calls", {"calls": turns, "characters": _TEXT // 2})],
            series,
            rounds=1,
        ),
        Workload(
            "turns",
            f"bytes of a conversation of {turns} turns",
            [
                Case(OURS, "turns", {"turns": turns, "characters": _TEXT // 2}),
                Case("mongodb-saver", "turns", {"turns": turns, "characters": _TEXT // 2}),
                Case("postgres-saver", "turns", {"turns": turns, "characters": _TEXT // 2}),
            ],
            series,
            rounds=1,
        ),
    ]
