"""Where and with what something was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pymongo

from scripts.benchmarks.servers import Addresses, find_postgres

_PACKAGES = (
    "mongo-durable",
    "pymongo",
    "langgraph",
    "langchain-core",
    "dbos",
    "langgraph-checkpoint-mongodb",
    "langgraph-checkpoint-postgres",
    "psycopg",
)


def machine(addresses: Addresses) -> dict[str, Any]:
    """Date, size of the machine, how busy it is now, and versions."""
    with pymongo.MongoClient[dict[str, Any]](addresses.mongodb) as client:
        versions = {"MongoDB": client.server_info()["version"]}
    if addresses.postgres is not None:
        versions["PostgreSQL"] = _postgres_version()
    versions["Python"] = platform.python_version()
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            pass  # a contender that cannot take part is named elsewhere
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load_average": [round(each, 1) for each in os.getloadavg()],
        "versions": versions,
    }


def _postgres_version() -> str:
    folder = find_postgres()
    assert folder is not None
    return subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=True).stdout.split()[2]
