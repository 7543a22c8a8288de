"""Where a `mongod` comes from.

In this order: the environment variable `MONGO_DURABLE_MONGOD`, the `PATH`, the wheel of the `server` extra. A path that was named and cannot be
used is an error, never passed over for the next place: whoever named it wants that server.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
from pathlib import Path

from mongo_durable.errors import ConfigurationError

ENVIRONMENT_VARIABLE = "MONGO_DURABLE_MONGOD"

_WAYS = f"""Ways to get one:
  - pip install 'mongo-durable[server]' brings a mongod with it
  - put a mongod 6.0 or later on the PATH
  - set {ENVIRONMENT_VARIABLE} to the path of a mongod
  - or use no throwaway server at all: set MONGO_DURABLE_URI to a replica set of your own or to Atlas"""


def find_mongod() -> Path:
    """Find the server program that `DevMongo` runs.

    Returns:
        Path to an executable `mongod`.

    Raises:
        ConfigurationError: There is none, or `MONGO_DURABLE_MONGOD` names something that cannot be run.
    """
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        return _named(Path(named))
    on_path = shutil.which("mongod")
    if on_path is not None:
        return Path(on_path)
    in_wheel = _in_wheel()
    if in_wheel is not None:
        return in_wheel
    raise ConfigurationError(f"No mongod found: {ENVIRONMENT_VARIABLE} is not set, the PATH has none, the server extra is not installed.\n{_WAYS}")


def _named(path: Path) -> Path:
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
    elif not os.access(path, os.X_OK):
        problem = "is not executable"
    else:
        return path
    raise ConfigurationError(f"{ENVIRONMENT_VARIABLE} names {path}, which {problem}.\n{_WAYS}")


def _in_wheel() -> Path | None:
    # Only the top-level name is looked up: that runs no code of the package, which at import starts things of its own.
    spec = importlib.util.find_spec("fiftyone")
    if spec is None:
        return None
    for location in spec.submodule_search_locations or ():
        path = Path(location, "db", "bin", "mongod")
        if path.is_file():
            return _made_executable(path)
    return None


def _made_executable(path: Path) -> Path:
    # Not every installer keeps the executable bit of a file in a wheel.
    if not os.access(path, os.X_OK):
        try:
            path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        except OSError as error:
            raise ConfigurationError(f"The server extra's {path} is not executable and cannot be made so ({error.strerror}): chmod +x it.") from error
    return path
