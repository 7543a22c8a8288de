"""Who takes part. Each has one method a workload, named like it, which does the workload once and returns its samples."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from scripts.benchmarks.servers import Addresses

OURS = "mongo_durable"


@dataclass(frozen=True, slots=True)
class Kind:
    """One contender.

    Attributes:
        title: For people.
        place: Module and class. The module is imported in the contender's own process alone.
        packages: Modules that have to be installed.
    """

    title: str
    place: tuple[str, str]
    packages: tuple[str, ...] = ()
    needs_postgres: bool = False

    def absence(self, *, has_postgres: bool) -> str | None:
        """Why it cannot take part here, or None."""
        if missing := [name for name in self.packages if not _is_installed(name)]:
            return f"not installed: {', '.join(missing)}"
        if self.needs_postgres and not has_postgres:
            return "it needs PostgreSQL"
        return None


CONTENDERS = {
    OURS: Kind("mongo_durable", ("durable", "Durable")),
    "raw": Kind("bare MongoDB", ("raw", "Raw")),
    "dbos": Kind("DBOS on PostgreSQL", ("dbos_postgres", "DbosOnPostgres"), ("dbos", "psycopg"), needs_postgres=True),
    "memory": Kind("LangGraph, InMemorySaver", ("savers", "InMemory")),
    "mongodb-saver": Kind("LangGraph, MongoDBSaver", ("savers", "OnMongoDB"), ("langgraph.checkpoint.mongodb",)),
    "postgres-saver": Kind(
        "LangGraph, AsyncPostgresSaver", ("savers", "OnPostgres"), ("langgraph.checkpoint.postgres", "psycopg"), needs_postgres=True
    ),
}


def open_contender(name: str, addresses: Addresses) -> Any:
    """The contender, in this process. Close it with `aclose`."""
    module, kind = CONTENDERS[name].place
    return getattr(import_module(f"{__name__}.{module}"), kind)(addresses)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it is missing
        return False
