"""Import rules that need no list of every other package."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import mongo_durable

PACKAGE = Path(mongo_durable.__path__[0])


def _imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import: write the full name"
            names.add(node.module or "")
    return names


def test_the_protocol_imports_the_standard_library_alone() -> None:
    """The protocol is pure: the standard library, itself and the errors."""
    files = sorted((PACKAGE / "protocol").rglob("*.py"))
    assert files
    foreign = {
        (path.name, name)
        for path in files
        for name in _imported(path)
        if name.partition(".")[0] not in sys.stdlib_module_names
        and name != "mongo_durable.errors"
        and not f"{name}.".startswith("mongo_durable.protocol.")
    }
    assert not foreign
