"""The README's example is run as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def blocks_of(section: str) -> list[str]:
    """The Python blocks of a section."""
    text = README.read_text(encoding="utf-8")
    _, _, rest = text.partition(f"\n## {section}\n")
    assert rest, f"the README has no section {section!r}"
    return re.findall(r"^```python\n(.*?)^```", rest.partition("\n## ")[0], re.MULTILINE | re.DOTALL)


def test_the_interrupt_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    """The plain graph with an interrupt node asks, and the answer is what its tool call got."""
    [example] = blocks_of("Interrupt nodes")
    exec(compile(example, "README.md", "exec", dont_inherit=True), {"__name__": "example"})
    question, answer = capsys.readouterr().out.splitlines()
    assert "'payload': {'item': 'desk'}, 'tool_call_id': 'call-1'}" in question
    assert answer == '{"approved": true}'


def test_the_example_runs(mongo_uri: str, database: str, tmp_path: Path) -> None:
    """A newcomer who copies the first example into a file and runs it sees the order bought."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    example = tmp_path / "example.py"
    example.write_text(blocks[0], encoding="utf-8")
    environment = {**os.environ, "MONGO_DURABLE_URI": mongo_uri, "MONGO_DURABLE_DATABASE": database}
    ran = subprocess.run([sys.executable, "-W", "error", str(example)], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"'receipt': 'desk for 28 \(act_[a-z2-7]{16}\)'", ran.stdout), ran.stdout
    assert not ran.stderr
