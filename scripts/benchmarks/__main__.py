"""`python -m scripts.benchmarks`: see `scripts/bench`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

from rich.console import Console

from scripts.benchmarks import report
from scripts.benchmarks.contenders import CONTENDERS
from scripts.benchmarks.machine import machine
from scripts.benchmarks.measuring import Measured, measure
from scripts.benchmarks.servers import servers
from scripts.benchmarks.workloads import Workload, workloads

_QUICK_ROUNDS = 3
_ROUNDS = 5
_WIDTH_WITHOUT_TERMINAL = 200


def main(arguments: list[str] | None = None) -> int:
    """Measure and print. Returns the exit code: 1 if a contender could not do a workload that it takes part in."""
    options = _parser().parse_args(arguments)
    available = workloads(quick=options.quick)
    if options.list:
        print("\n".join(f"{each.name:<16}{each.title}" for each in available))
        return 0
    chosen = _chosen(available, options.only)
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS)
    errors = Console(stderr=True, highlight=False)
    started = time.monotonic()
    needed = {case.contender for workload in chosen for case in workload.cases}
    with servers(with_postgres=any(CONTENDERS[name].needs_postgres for name in needed)) as running:
        absent = {}
        for name in sorted(needed):
            reason = CONTENDERS[name].absence(has_postgres=running.addresses.postgres is not None)
            if reason is not None:
                absent[name] = running.absent if reason == "it needs PostgreSQL" and running.absent else reason
        for name, reason in absent.items():
            errors.print(f"left out: {CONTENDERS[name].title}: {reason}")
        about = machine(running.addresses)
        with errors.status("") as status:
            tell = status.update if errors.is_terminal else errors.print
            measured = asyncio.run(measure(chosen, rounds, running.addresses, absent, tell))
    about |= {"rounds": rounds, "is_quick": options.quick, "seconds": round(time.monotonic() - started)}
    found = report.rows(measured)
    if options.markdown:
        print(report.markdown(found))
    else:
        output = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL)
        output.print(report.table(found))
    errors.print(f"{report.heading(about)}; {rounds} round{'s' if rounds > 1 else ''} in {about['seconds']} s", soft_wrap=True)
    failures = {_where(each, index): text for each in measured for index, text in each.failures.items()}
    for where, text in failures.items():
        errors.print(f"failed: {where}: {text}", style="red", markup=False)
    if options.json is not None:
        whole = {**about, "left_out": absent, "failures": failures, "rows": [row.as_json() for row in found]}
        options.json.write_text(json.dumps(whole, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if failures else 0


def _where(measured: Measured, case: int) -> str:
    contender = measured.workload.cases[case].contender
    return f"{measured.workload.name}, {CONTENDERS[contender].title}"


def _chosen(available: list[Workload], names: list[str]) -> list[Workload]:
    """Those whose name is one of `names` or begins with one; all of them if there are no names."""
    for name in names:
        if not any(_is_meant(each, name) for each in available):
            raise SystemExit(f"bench: no workload is named {name!r}; there are {', '.join(each.name for each in available)}")
    return [each for each in available if not names or any(_is_meant(each, name) for name in names)]


def _is_meant(workload: Workload, name: str) -> bool:
    return workload.name == name or workload.name.startswith(f"{name}-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measures mongo_durable beside the bare database and its peers, in one run.")
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds: under two minutes on a quiet machine")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these workloads: a name, or its beginning up to a hyphen")
    parser.add_argument(
        "--rounds", type=_positive, metavar="N", help=f"how often each contender has its turn ({_ROUNDS}, with --quick {_QUICK_ROUNDS})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found to a file as well")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--list", action="store_true", help="print the names of the workloads")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
