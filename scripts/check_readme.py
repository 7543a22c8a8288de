"""Compile every Python block of a Markdown file, so that an example cannot rot into something that is not even Python."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

_BLOCK = re.compile(r"^```(?:python|py)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def problems(path: Path) -> list[str]:
    """List the blocks that do not compile, as `file:line: message`. Top-level `await` is allowed: an example may show just that."""
    text = path.read_text(encoding="utf-8")
    found = []
    for block in _BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        try:
            compile(block[1], str(path), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
        except SyntaxError as error:
            found.append(f"{path}:{line + (error.lineno or 1)}: {error.msg}")
    return found


if __name__ == "__main__":
    all_problems = [problem for name in sys.argv[1:] for problem in problems(Path(name))]
    print("\n".join(all_problems) or "every Python block compiles")
    sys.exit(bool(all_problems))
