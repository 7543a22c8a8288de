"""What the README shows of a terminal, as it really looks.

    scripts/readme_screens        # writes it between the markers of README.md

A screen stands between `<!-- screen: NAME -->` and `<!-- end of screen -->`. The tests compare what stands there with what comes out today.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from mongo_durable.dev import DevMongo
from tests.docs.cli_screens import cli_screens

README = Path(__file__).parents[2] / "README.md"
_SCREEN = re.compile(r"(<!-- screen: (?P<name>[a-z-]+) -->\n)(?P<shown>.*?)(<!-- end of screen -->)", re.DOTALL)


def in_readme() -> dict[str, str]:
    """The screens that stand in the README, by name."""
    return {found["name"]: found["shown"] for found in _SCREEN.finditer(README.read_text(encoding="utf-8"))}


def write(screens: Mapping[str, str]) -> None:
    """Put screens into the README; one that is not among them stays."""
    text = README.read_text(encoding="utf-8")
    README.write_text(_SCREEN.sub(lambda found: f"{found[1]}{screens.get(found['name'], found['shown'])}{found[4]}", text), encoding="utf-8")


def _main() -> None:
    with DevMongo() as uri:
        os.environ |= {"MONGO_DURABLE_URI": uri, "MONGO_DURABLE_DATABASE": "mongo_durable"}
        write(cli_screens(os.environ))


if __name__ == "__main__":
    sys.exit(_main())
