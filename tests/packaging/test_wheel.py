"""The wheel, installed where nothing else is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Builds and installs with everything that the library needs, from a package registry.
pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("wheel")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True)
    (found,) = folder.glob("mongo_durable-*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a virtual environment with the wheel and nothing but its dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), str(wheel)], check=True)
    return python


def _run(python: Path, *arguments: str) -> str:
    # From a folder without the checkout in it, and without its path: only what was installed can be imported.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([python, *arguments], cwd=python.parent, env=environment, check=True, capture_output=True, text=True).stdout


def test_the_wheel_says_that_it_is_typed(wheel: Path) -> None:
    """Type checkers use the annotations of an installed mongo_durable."""
    assert "mongo_durable/py.typed" in zipfile.ZipFile(wheel).namelist()


def test_the_wheel_has_the_library_alone(wheel: Path) -> None:
    """No test and no script ends up in the user's site-packages."""
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mongo_durable"}


def test_the_wheel_has_the_script_for_mongosh(wheel: Path, python: Path) -> None:
    """It is the one of the checkout, and the installed command line says where it is."""
    script = zipfile.ZipFile(wheel).read("mongo_durable/mongosh/durable.js")
    assert script == (ROOT / "scripts" / "mongosh" / "durable.js").read_bytes()
    path = _run(python, "-m", "mongo_durable.cli", "mongosh-script").strip()
    assert Path(path).read_bytes() == script
    assert Path(path).is_relative_to(python.parents[1])


def test_importing_it_warns_of_nothing(python: Path) -> None:
    """`import mongo_durable` works in an environment of its dependencies, with every warning an error."""
    _run(python, "-W", "error", "-c", "import mongo_durable")


@pytest.mark.parametrize(("imported", "absent"), [("__version__", {"pymongo"}), ("DurableClient, SyncDurableClient", set())])
def test_importing_it_loads_no_framework(python: Path, imported: str, absent: set[str]) -> None:
    """Neither `import mongo_durable` nor its clients load LangGraph, LangChain or Motor: what is not used costs no start-up time."""
    program = f"import json, sys; from mongo_durable import {imported}; print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    loaded = set(json.loads(_run(python, "-c", program)))
    assert not loaded & {"langgraph", "langchain_core", "langchain", "motor", *absent}


def test_the_throwaway_server_is_usable_without_its_extra(python: Path) -> None:
    """`mongo_durable.dev` can be imported where the server extra is not installed, and tells how to get it."""
    program = "from mongo_durable.dev import find_mongod; from mongo_durable.errors import ConfigurationError\ntry: find_mongod()\n"
    program += "except ConfigurationError as error: print(error)\nelse: print('found')"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MONGO_DURABLE_"))}
    environment["PATH"] = str(python.parent)
    ended = subprocess.run([python, "-c", program], cwd=python.parent, env=environment, check=True, capture_output=True, text=True)
    assert "mongo-durable[server]" in ended.stdout
