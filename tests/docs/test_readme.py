"""The README's example is run as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.cli_screens import cli_screens
from tests.docs.screens import in_readme

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


def test_the_terminal_looks_as_shown(mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the README shows of the command line is what comes out today, but for times, durations and names of processes."""
    monkeypatch.setenv("MONGO_DURABLE_URI", mongo_uri)
    monkeypatch.setenv("MONGO_DURABLE_DATABASE", database)
    shown = in_readme()
    for name, screen in cli_screens(os.environ).items():
        assert _steady(shown[name]) == _steady(screen), "scripts/readme_screens writes it anew"


_VARYING = {r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ": "TIME", r"\d+(\.\d+)? (ms|s|min)\b": "DURATION", r"host-1-\d+-[0-9a-f]+": "PROCESS"}


def _steady(screen: str) -> str:
    for varying, word in _VARYING.items():
        screen = re.sub(varying, word, screen)
    return re.sub(r"(?m)^(.{60}).*…$", r"\1…", screen)  # where a line is cut hangs on the lengths of all these
