"""What the README shows of mongosh is what comes out."""

from __future__ import annotations

import re

import pytest

from tests.docs.screens import in_readme, mongosh_screens
from tests.support.mongosh import Mongosh

pytestmark = pytest.mark.xdist_group("mongosh")


def test_the_readme_shows_what_mongosh_shows(shell: Mongosh, mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for times and the names of processes, character for character; `scripts/readme_screens` writes it anew."""
    monkeypatch.setenv("MONGO_DURABLE_URI", mongo_uri)
    monkeypatch.setenv("MONGO_DURABLE_DATABASE", database)
    written = {name: screen for name, screen in in_readme().items() if name.startswith("mongosh-")}
    assert {name: _timeless(screen) for name, screen in mongosh_screens(shell, database).items()} == {
        name: _timeless(screen) for name, screen in written.items()
    }


def _timeless(screen: str) -> str:
    screen = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", "THEN", screen)
    screen = re.sub(r"[\d.]+ (ms|s|min)\b", "LONG", screen)
    return re.sub(r"process \S+", "process NAME", screen)
