"""Medians, spreads and ratios, as rows, and the rows as a table, Markdown or JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from scripts.benchmarks.contenders import CONTENDERS
from scripts.benchmarks.measuring import Measured
from scripts.benchmarks.workloads import Case, Series

COLUMNS = ("", "measured", "who", "median (p10 to p90)", "mongo_durable ÷ it (by round)", "target")
_NUMBERS = COLUMNS[3:5]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One series of one case.

    Attributes:
        measured: The series, with its unit.
        value: Of all samples of all rounds: their median, or the quantile that the series names.
        spread: Their 10th and 90th percentile; of another quantile, that quantile of each round.
        ratio, ratios: Our value divided by this one, over all and in each round; None for our own first case.
        target: What is wanted of the ratio, or of the value where there is none.
        is_met: Whether it is so; None where nothing is wanted.
    """

    workload: str
    title: str
    series: str
    measured: str
    contender: str
    who: str
    value: float
    spread: Sequence[float]
    samples: int
    ratio: float | None
    ratios: Sequence[float]
    target: str | None
    is_met: bool | None

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def rows(measured: Iterable[Measured]) -> list[Row]:
    """All that was measured."""
    return [
        row
        for each in measured
        for series in each.workload.series
        for index, case in enumerate(each.workload.cases)
        if (row := _row(each, series, index, case)) is not None
    ]


def _row(measured: Measured, series: Series, index: int, case: Case) -> Row | None:
    by_round = measured.values(index, series.name)
    if not by_round:
        return None
    pooled = [value for values in by_round for value in values]
    value = quantile(pooled, series.quantile)
    ours = measured.values(0, series.name) if index else []
    ratio = quantile([value for values in ours for value in values], series.quantile) / value if ours and value else None
    pairs = zip(ours, by_round, strict=False)
    ratios = [quantile(mine, series.quantile) / quantile(its, series.quantile) for mine, its in pairs] if ratio is not None else []
    target = next((each for each in measured.workload.targets if each.series == series.name and (each.against or 0) == index), None)
    found = ratio if target is not None and target.against is not None else value
    return Row(
        workload=measured.workload.name,
        title=measured.workload.title,
        series=series.name,
        measured=series.shown,
        contender=case.contender,
        who=f"{CONTENDERS[case.contender].title}{f' ({case.variant})' if case.variant else ''}",
        value=value,
        spread=[quantile(pooled, 0.1), quantile(pooled, 0.9)] if series.quantile == 0.5 else [quantile(each, series.quantile) for each in by_round],
        samples=len(pooled),
        ratio=ratio,
        ratios=ratios,
        target=f"{'≤' if target.is_at_most else '≥'} {number(target.bound)}" if target is not None else None,
        is_met=target.is_met(found) if target is not None and found is not None else None,
    )


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which `part` of the values lie; between two of them in proportion."""
    if len(values) == 1:
        return values[0]
    if part == 0.5:
        return statistics.median(values)
    return statistics.quantiles(values, n=100, method="inclusive")[round(part * 100) - 1]


def number(value: float) -> str:
    """Three digits that matter."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def table(found: Sequence[Row]) -> Table:
    """For a terminal."""
    made = Table(show_edge=False, header_style="bold")
    for column in COLUMNS:
        made.add_column(column, justify="right" if column in _NUMBERS else "left", overflow="fold")
    for row, cells in _lines(found):
        if cells[0] and made.row_count:
            made.add_section()
        colour = {True: "[green]{}[/]", False: "[red]{}[/]", None: "{}"}[row.is_met]
        made.add_row(*cells[:-1], colour.format(cells[-1]))
    return made


def markdown(found: Sequence[Row]) -> str:
    """For a document."""
    ruler = "|".join("---:" if column in _NUMBERS else "---" for column in COLUMNS)
    return "\n".join([f"| {' | '.join(COLUMNS)} |", f"|{ruler}|", *(f"| {' | '.join(cells)} |" for _, cells in _lines(found))])


def _lines(found: Sequence[Row]) -> Iterator[tuple[Row, list[str]]]:
    """Each row with its cells; the title of a workload stands on its first row alone."""
    last = ""
    for row in found:
        verdict = {True: " ✓", False: " ✗", None: ""}[row.is_met]
        yield (
            row,
            [
                row.title if row.workload != last else "",
                row.measured,
                row.who,
                f"{number(row.value)}{_span(row.spread)}",
                f"{number(row.ratio)}{_span(row.ratios)}" if row.ratio is not None else "",
                f"{row.target}{verdict}" if row.target else "",
            ],
        )
        last = row.workload


def _span(values: Sequence[float]) -> str:
    low, high = (number(min(values)), number(max(values))) if values else ("", "")
    return f" ({low} to {high})" if low != high else ""


def heading(about: Mapping[str, Any]) -> str:
    """Where it was measured, in one line."""
    versions = ", ".join(f"{name} {each}" for name, each in about["versions"].items())
    load = about["load_average"][0]
    return f"{about['date']}, {about['cores']} cores, {about['memory_gb']} GB, {about['system']}, load average {load} at the start; {versions}"
