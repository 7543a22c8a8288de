"""The servers that the contenders work on: a throwaway MongoDB, and a throwaway PostgreSQL where one is installed.

Both keep their defaults for durability: MongoDB acknowledges a majority write when it is in the journal, PostgreSQL a commit when its log is synced.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mongo_durable.dev import DevMongo

_START_S = 60.0
_STOP_S = 30.0
_POLL_S = 0.05
_CONNECTIONS = 200
_PLACES = ("/usr/lib/postgresql", "/usr/local/opt", "/opt/homebrew/opt", "/usr/pgsql-*")
# A server may not run as root. Who it is is of no importance: the folder is given to them.
_OTHER_USERS = ("postgres", "nobody")
# The server outlives neither this process nor its folder: the shell waits for the end of its input, which comes however the parent dies.
_WATCH = """
"$1/postgres" -D "$2/data" -p "$3" -k "$2" -h 127.0.0.1 -c "max_connections=$4" >"$2/log" 2>&1 </dev/null &
server=$!
read -r _
kill -INT "$server"
wait "$server"
rm -rf "$2"
"""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the servers are.

    Attributes:
        postgres: Of a server whose user `postgres` needs no password, without a database name; None where there is none.
    """

    mongodb: str
    postgres: str | None = None

    def as_json(self) -> dict[str, Any]:
        """For a process that is told of them."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Servers:
    """The running servers.

    Attributes:
        absent: Why there is no PostgreSQL, or None.
    """

    addresses: Addresses
    absent: str | None = None


@contextmanager
def servers(*, with_postgres: bool) -> Iterator[Servers]:
    """Start what is needed; it is gone afterwards, with all data."""
    with ExitStack() as stack:
        mongodb = stack.enter_context(DevMongo())
        if not with_postgres:
            yield Servers(Addresses(mongodb))
            return
        programs = find_postgres()
        if programs is None:
            yield Servers(Addresses(mongodb), "no PostgreSQL is installed (initdb and postgres, on the PATH or in /usr/lib/postgresql)")
            return
        yield Servers(Addresses(mongodb, stack.enter_context(_postgres(programs))))


def find_postgres() -> Path | None:
    """The folder that holds both `initdb` and `postgres`, of the newest version found, or None."""
    found = [Path(name).resolve().parent for name in (shutil.which("postgres"), shutil.which("initdb")) if name]
    for place in _PLACES:
        root = Path(place)
        found += sorted(root.parent.glob(f"{root.name}/*/bin") if "*" not in place else root.parent.glob(f"{root.name}/bin"), reverse=True)
    return next((folder for folder in found if all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres"))), None)


@contextmanager
def _postgres(programs: Path) -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="mongo-durable-bench-postgres-"))
    user: str | None = None
    if os.geteuid() == 0:
        user = next(name for name in _OTHER_USERS if _is_user(name))
        shutil.chown(folder, user)
    identity: dict[str, Any] = {} if user is None else {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
    watch: subprocess.Popen[bytes] | None = None
    try:
        made = subprocess.run(
            [programs / "initdb", "-D", folder / "data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"],
            capture_output=True,
            text=True,
            cwd=folder,
            check=False,
            **identity,
        )
        if made.returncode:
            raise RuntimeError(f"initdb failed: {made.stderr.strip()[-400:]}")
        port = _free_port()
        command = ["/bin/sh", "-c", _WATCH, "sh", str(programs), str(folder), str(port), str(_CONNECTIONS)]
        watch = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=folder, start_new_session=True, **identity)
        _wait_for(folder, port)
        yield f"postgresql://postgres@127.0.0.1:{port}"
    finally:
        if watch is not None:
            assert watch.stdin is not None
            watch.stdin.close()
            watch.wait(_STOP_S)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(folder: Path, port: int) -> None:
    # The last line of postmaster.pid says when the server takes connections; a connection alone may be refused yet by its start-up.
    record = folder / "data" / "postmaster.pid"
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if record.exists() and record.read_text().rstrip().endswith("ready"):
            return
        time.sleep(_POLL_S)
    raise RuntimeError(f"PostgreSQL took no connections on port {port} within {_START_S:.0f} s: {(folder / 'log').read_text()[-400:]}")


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
