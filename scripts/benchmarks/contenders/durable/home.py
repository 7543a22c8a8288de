"""What the workloads of mongo_durable have in common: databases, apps, and suspended runs by the thousand."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from bson import ObjectId
from pymongo import AsyncMongoClient

from mongo_durable import App
from mongo_durable.protocol.events import ActivityKind
from mongo_durable.protocol.frontier import FrontierEntry, frontier_digest, frontier_entry
from mongo_durable.protocol.identity import Position, activity_id
from scripts.benchmarks.servers import Addresses

_COPIES_AT_ONCE = 100
_DOCUMENTS_AT_ONCE = 5_000

Document = dict[str, Any]


class Home:
    """The databases of one process, and the apps that live there until it ends."""

    def __init__(self, addresses: Addresses) -> None:
        self.addresses = addresses
        self.uri = addresses.mongodb
        self.client: AsyncMongoClient[Document] = AsyncMongoClient(self.uri)
        self._databases: list[str] = []
        self._apps: dict[str, App] = {}

    def new_database(self) -> str:
        """Name of a database that is dropped at the end."""
        name = f"bench_{uuid.uuid4().hex[:16]}"
        self._databases.append(name)
        return name

    def app(self, name: str, build: Callable[[App], None], **options: Any) -> App:
        """The app of this name, on a database of its own; made, and given its graph by `build`, on first use."""
        found = self._apps.get(name)
        if found is None:
            found = App(name, **{"uri": self.uri, "database": self.new_database(), **options})
            build(found)
            self._apps[name] = found
        return found

    async def aclose(self) -> None:
        """Give leases up, drop the databases."""
        for app in self._apps.values():
            await app.aclose()
        for name in self._databases:
            await self.client.drop_database(name)
        await self.client.close()

    async def copy_run(self, database: str, run_id: str, copies: Iterable[str]) -> None:
        """Copy a suspended run, each copy as if it had been made in the ordinary way, on a thread of its own name; quicker, by the thousand."""
        names = list(copies)
        held = self.client[database]
        templates = {name: await held[name].find({"run_id": run_id}).to_list(None) for name in _COLLECTIONS}
        for start in range(0, len(names), _COPIES_AT_ONCE):
            part = names[start : start + _COPIES_AT_ONCE]
            for name, documents in templates.items():  # the head last: a runner that sees it finds the rest
                made = [_copied(name, document, run_id, copy) for copy in part for document in documents]
                for first in range(0, len(made), _DOCUMENTS_AT_ONCE):
                    await held[name].insert_many(made[first : first + _DOCUMENTS_AT_ONCE], ordered=False)


_COLLECTIONS = ("activity_events", "memory", "frontiers", "threads", "runs")


def _copied(collection: str, document: Document, run_id: str, copy: str) -> Document:
    made = {**document, "run_id": copy}
    if "thread_id" in document:
        made["thread_id"] = copy
    if "activity_id" in document and document["activity_id"] is not None:
        made["activity_id"] = activity_id(copy, Position.parse(document["position"])) if "position" in document else None
    if "entries" in document:  # a frontier, or its event
        asked = [_entry(copy, entry) for entry in document["entries"]]
        made["entries"] = [{**entry, "activity_id": each.activity_id} for entry, each in zip(document["entries"], asked, strict=True)]
        made["digest"] = frontier_digest(asked)
    match collection:
        case "activity_events":
            made["_id"] = ObjectId()
        case "threads":
            made |= {"_id": copy, "active_run": copy}
        case _:
            made["_id"] = document["_id"].replace(run_id, copy, 1)
    return made


def _entry(run_id: str, document: Document) -> FrontierEntry:
    made = frontier_entry(run_id, Position.parse(document["position"]), ActivityKind(document["kind"]), document["name"], None)
    return replace(made, digest=document["digest"])  # of kind, name and value: the same in every copy
