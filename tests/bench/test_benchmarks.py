"""The benchmark measures what it says, in turns, and its report has its shape. How fast anything is, is no test's concern."""

from __future__ import annotations

import importlib
import json
import pkgutil

import pytest

import scripts.benchmarks
from scripts.benchmarks import measuring, report
from scripts.benchmarks.contenders import CONTENDERS, OURS
from scripts.benchmarks.servers import Addresses
from scripts.benchmarks.workloads import Case, Series, Target, Workload, workloads

_PEERS = {"dbos_postgres"}
"""Modules that import packages which only the benchmark's own environment has."""

TINY = Workload(
    "tiny",
    "two activities",
    [
        Case(OURS, "sequence", {"steps": 2, "characters": 10}),
        Case("raw", "sequence", {"inserts": 2, "size": 200}, "2 inserts"),
        Case("raw", "no_such_thing", {}),
        Case("dbos", "sequence", {"steps": 2, "size": 10}),
    ],
    [Series("time", "time, ms")],
    [Target("time", 1e9, 1)],
)

REPLAY = Workload(
    "replay",
    "three activities, from a copied run",
    [Case(OURS, "replay", {"activities": 3, "characters": 10}), Case(OURS, "resolving", {"times": 1, "suspended": 3})],
    [Series("queries", "queries"), Series("writes", "writes"), Series("p50", "p50, ms")],
    rounds=1,
)


def test_everything_imports() -> None:
    """Every module can be imported, those of peers aside."""
    names = [each.name for each in pkgutil.walk_packages(scripts.benchmarks.__path__, "scripts.benchmarks.")]
    assert "scripts.benchmarks.contenders.durable.storing" in names
    for name in names:
        if name.rpartition(".")[2] not in {*_PEERS, "__main__"}:
            importlib.import_module(name)


@pytest.mark.parametrize("quick", [True, False])
def test_every_case_names_a_method_and_every_target_a_series(quick: bool) -> None:
    """No workload can fail because a name in the list is wrong."""
    chosen = workloads(quick=quick)
    assert len({each.name for each in chosen}) == len(chosen)
    for workload in chosen:
        assert workload.cases[0].contender == OURS
        assert {each.series for each in workload.targets} <= {each.name for each in workload.series}
        for case in workload.cases:
            module, kind = CONTENDERS[case.contender].place
            if module not in _PEERS:
                found = getattr(importlib.import_module(f"scripts.benchmarks.contenders.{module}"), kind)
                assert hasattr(found, case.method), (workload.name, case)


async def test_a_tiny_workload(mongo_uri: str) -> None:
    """Each contender is measured in its own process, in every round; what fails or is absent stands aside and is named."""
    measured, replayed = await measuring.measure([TINY, REPLAY], 2, Addresses(mongo_uri), absent=["dbos"])
    assert replayed.failures == {}
    assert (replayed.values(0, "queries"), replayed.values(0, "writes")) == ([[1]], [[1]])
    assert len(replayed.values(1, "p50")) == 1
    assert {index: len(rounds) for index, rounds in measured.rounds.items()} == {0: 2, 1: 2}
    assert list(measured.failures) == [2]
    assert "no_such_thing" in measured.failures[2]

    ours, raw = report.rows([measured])
    assert (ours.contender, ours.samples, ours.ratio, ours.target) == (OURS, 2, None, None)
    assert (raw.who, raw.samples, len(raw.ratios), raw.target, raw.is_met) == ("bare MongoDB (2 inserts)", 2, 2, "≤ 1,000,000,000", True)
    assert raw.ratio == pytest.approx(ours.value / raw.value)
    assert json.loads(json.dumps(raw.as_json()))["workload"] == "tiny"

    lines = report.markdown([ours, raw]).splitlines()
    assert [line.count("|") for line in lines] == [len(report.COLUMNS) + 1] * 4
    assert lines[2].startswith("| two activities | time, ms | mongo_durable | ")
    assert report.table([ours, raw]).row_count == 2
