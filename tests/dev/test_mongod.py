"""Where DevMongo finds its server."""

from __future__ import annotations

import importlib.util
import os
import stat
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from mongo_durable.dev import DevMongo, find_mongod
from mongo_durable.errors import ConfigurationError


@pytest.fixture
def empty_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that is the whole PATH, with no server named in the environment."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("MONGO_DURABLE_MONGOD", raising=False)
    return folder


def _program(path: Path, mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\nexit 0\n")
    path.chmod(mode)
    return path


def _install_wheel(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    """Have the server extra's package found in `folder` alone, or nowhere."""
    spec = None
    if folder is not None:
        spec = ModuleSpec("fiftyone", None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def test_the_environment_variable_goes_before_the_path(empty_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MONGO_DURABLE_MONGOD wins over a mongod on the PATH."""
    _program(empty_path / "mongod")
    named = _program(tmp_path / "elsewhere" / "mongod")
    monkeypatch.setenv("MONGO_DURABLE_MONGOD", str(named))
    assert find_mongod() == named


def test_the_path_goes_before_the_wheel(empty_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A mongod on the PATH wins over that of the server extra."""
    on_path = _program(empty_path / "mongod")
    _program(tmp_path / "site" / "db" / "bin" / "mongod")
    _install_wheel(monkeypatch, tmp_path / "site")
    assert find_mongod() == on_path


def test_the_wheel_server_is_made_executable(empty_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server that its installer left without the executable bit can be run."""
    in_wheel = _program(tmp_path / "site" / "db" / "bin" / "mongod", mode=0o644)
    _install_wheel(monkeypatch, tmp_path / "site")
    assert find_mongod() == in_wheel
    assert in_wheel.stat().st_mode & stat.S_IXUSR
    assert os.access(in_wheel, os.X_OK)


def test_no_server_anywhere_lists_the_ways_to_get_one(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has no mongod learns every way to get one."""
    _install_wheel(monkeypatch, None)
    with pytest.raises(ConfigurationError) as caught:
        DevMongo().start()
    message = str(caught.value)
    for way in ("mongo-durable[server]", "PATH", "MONGO_DURABLE_MONGOD", "MONGO_DURABLE_URI"):
        assert way in message


@pytest.mark.parametrize(("make", "problem"), [("nothing", "does not exist"), ("folder", "is a folder"), ("plain file", "is not executable")])
def test_a_named_server_that_cannot_be_run_is_an_error(
    empty_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: str, problem: str
) -> None:
    """A path that was named is never passed over for the next place, and the error names it."""
    _program(empty_path / "mongod")
    named = tmp_path / "named"
    if make == "folder":
        named.mkdir()
    elif make == "plain file":
        _program(named, mode=0o644)
    monkeypatch.setenv("MONGO_DURABLE_MONGOD", str(named))
    with pytest.raises(ConfigurationError, match=problem) as caught:
        find_mongod()
    assert str(named) in str(caught.value)
