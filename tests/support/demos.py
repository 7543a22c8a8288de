"""The demos, as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def demo(uri: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `mongo-durable demo` with these arguments: on a server, or on one that it starts itself."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MONGO_DURABLE_U")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    where = ("--uri", uri) if uri is not None else ()
    command = [sys.executable, "-W", "error", "-m", "mongo_durable.cli", "demo", *where, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
