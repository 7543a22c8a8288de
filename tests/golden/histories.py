"""Golden histories as files: JSON lines, one event a line as it stands in `activity_events`, without the fields that say the same once more (run_id,
path, ordinal, …) or differ in every recording for no reason (_id, at, owner).

    python -m tests.golden.record          writes them
    tests/golden/test_golden.py            replays them, for ever

A file is never changed once a release could have written it: code that cannot replay it any more would diverge on its users' runs too. A graph whose
file is here stays as it is in `tests/langgraph/shapes.py`; another version of the protocol gets a folder of its own beside `v1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pymongo
from bson import ObjectId, json_util

from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.events import OUTCOMES, Event, EventType
from mongo_durable.protocol.history import fold
from mongo_durable.store.documents import SCHEMA_VERSION, event_document, event_from

FOLDER = Path(__file__).parent / "v1"
OWNER = "recorder"
_NO_ID = ObjectId("0" * 24)
_LEFT_OUT = frozenset({"_id", "at", "attempt", "run_id", "schema_version", "path", "ordinal", "outcome"})


def slug(name: str) -> str:
    """The name of a shape as a file name and a run id."""
    return "-".join("".join(each if each.isalnum() else " " for each in name.lower()).split())


def run_id_of(name: str) -> str:
    """The run whose history is recorded: its activity ids derive from it."""
    return f"golden-{slug(name)}"


def path_of(name: str) -> Path:
    """The file of a shape."""
    return FOLDER / f"{slug(name)}.jsonl"


def dump(name: str, events: Sequence[Event]) -> int:
    """Write the history of a shape; returns its size in bytes."""
    lines = []
    for event in events:
        document = event_document(event, _NO_ID)
        if event.type is EventType.ATTEMPT_STARTED:
            document["owner"] = OWNER
        left_out = {*_LEFT_OUT, *({"step"} if event.position else ()), *({"activity_id"} if event.type in OUTCOMES else ())}
        document = {field: value for field, value in document.items() if field not in left_out}
        lines.append(json_util.dumps(document, json_options=json_util.RELAXED_JSON_OPTIONS, ensure_ascii=False, separators=(",", ":")))
    text = "\n".join(lines) + "\n"
    path_of(name).write_text(text, encoding="utf-8")
    return len(text.encode())


def load(name: str) -> list[Event]:
    """The recorded history of a shape."""
    common = {"run_id": run_id_of(name), "schema_version": 1}
    documents = [json_util.loads(line) for line in path_of(name).read_text(encoding="utf-8").splitlines()]
    ids = {document["position"]: document["activity_id"] for document in documents if "activity_id" in document}
    return [event_from({**common, **_named(document, ids)}) for document in documents]


def _named(document: dict[str, Any], ids: dict[str, str]) -> dict[str, Any]:
    return {**document, "activity_id": ids[document["position"]]} if "position" in document else document


def put(database: pymongo.database.Database[dict[str, Any]], events: Sequence[Event]) -> None:
    """Store a history, in the place of whatever there is of its run, and beside it the head of a run that whoever comes next may claim."""
    submitted, now = events[0], datetime.now(UTC)
    history = fold(submitted.run_id, events)
    thread_id, turn = submitted.data["thread_id"], submitted.data["turn"]
    stored = [event_document(replace(event, at=now), ObjectId()) for event in events]
    for name in ("activity_events", "runs", "threads", "thread_states", "memory"):
        database[name].delete_many({"run_id": submitted.run_id})
    database["activity_events"].insert_many(stored)
    database["threads"].insert_one(
        {
            "_id": thread_id,
            "run_id": submitted.run_id,
            "schema_version": SCHEMA_VERSION,
            "active_run": submitted.run_id,
            "turn": turn,
            "committed_turn": submitted.data["base_turn"],
        }
    )
    database["runs"].insert_one(
        {
            "_id": submitted.run_id,
            "run_id": submitted.run_id,
            "schema_version": SCHEMA_VERSION,
            "status": "ready",
            "fence": history.fence,
            "attempt": None,
            "owner": None,
            "generation": history.generation,
            "workflow": submitted.data["workflow"],
            "thread_id": thread_id,
            "turn": turn,
            "base_turn": submitted.data["base_turn"],
            "input": submitted.value,
            "input_digest": digest(submitted.value),
            "settings": {},
            "news": f"{submitted.data['workflow']['name']}\n{submitted.data['workflow']['version']}\n",
            "output": None,
            "error": None,
            "available_at": now,
            "submitted_at": now,
        }
    )
