"""Which rows of CASES are covered, so that nobody deletes the last test of one without noticing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

COVERED = {
    1: "effects before questions in a loop",
    3: "recorded results by copy",
    4: "two answers to one question",
    5: "an agent inside a node",
    7: "one id for all calls of a tool node",
    8: "answers that go to the wrong call",
    10: "several questions, one answer call",
    11: "the order of a frontier",
    13: "branches with a question each",
    14: "whose ids answers are given under",
    16: "siblings of a call that asks",
    17: "the order of fanned-out work",
    18: "a child graph that starts again",
    20: "nodes after two pauses",
    22: "a child with a saver of its own",
    23: "one request, executed twice",
    25: "one child, called twice",
    26: "a sub-agent's question, decided in every way",
    28: "siblings of a sub-agent that asks",
    30: "nothing kept of what sub-agents do",
    32: "whose approval policy a sub-agent has",
    34: "message ids of each attempt",
    35: "answers that are read as something else",
    37: "None as an answer",
    38: "an empty answer and the next turn",
    39: "an answer that jumps",
    40: "wrappers that swallow questions",
    41: "middleware that swallows questions",
    44: "checkpoints that a resume depends on",
    46: "forks that start at the beginning",
    47: "death at a write",
    48: "death before the first node",
    50: "a failure that a crash forgets",
    51: "two processes on one run",
    52: "two runs on one thread",
    53: "rival answers",
    54: "identities in loops",
    56: "how a question ended",
    57: "an approval for another action",
    72: "values that BSON cannot hold",
    74: "types that nobody registered",
    75: "pickles",
    76: "streams that lose their history",
    77: "tokens that come back from the dead",
    79: "streams that go blind",
    80: "a stream for each wait",
    81: "waits that exhaust a pool",
    82: "writes that a stream has to read past",
    84: "transactions that fail half-way",
    85: "clocks that are wrong",
    86: "a database that dies during a takeover",
    88: "an identity that two starts share",
    89: "a run that nobody takes again",
    91: "concurrent steps in another order",
    92: "waits without an end",
    94: "death between tries",
    95: "a run that this process executes",
    97: "a run that waits for itself",
    98: "what a failure is",
    100: "the order of answers",
    101: "identities from a stream of randomness",
    103: "every class of message",
    104: "a result that comes too late",
    105: "steps that look alike",
}


def docstrings() -> Iterator[str]:
    """The docstrings of all tests."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield ast.get_docstring(node) or ""


@pytest.fixture(scope="module")
def rows() -> dict[int, list[str]]:
    """By row, the docstrings that name it."""
    found: dict[int, list[str]] = defaultdict(list)
    for text in docstrings():
        for numbers in re.findall(r"\bCASES (\d+(?:, \d+)*)", text):
            for number in numbers.split(", "):
                found[int(number)].append(text)
    return found


def test_every_row_has_its_test(rows: dict[int, list[str]]) -> None:
    """Each covered row is named by a test that promises something."""
    missing = {row: what for row, what in COVERED.items() if row not in rows}
    assert not missing, f"no test names these rows any more: {missing}"


def test_no_test_names_a_row_in_vain(rows: dict[int, list[str]]) -> None:
    """A row that a test of this folder names stands in the list above."""
    named = {number for path in Path(__file__).parent.glob("test_*.py") for number in _rows_of(path)}
    assert named == set(COVERED)


def _rows_of(path: Path) -> Iterator[int]:
    for numbers in re.findall(r'"""CASES (\d+(?:, \d+)*):', path.read_text()):
        yield from map(int, numbers.split(", "))
