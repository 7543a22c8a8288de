"""Histories as text: JSON lines that say everything which a replay of a run needs, and come back exactly.

A run is a header line, then one line an event, in order of `seq`; several runs may follow one another. The lines are MongoDB's canonical extended
JSON of the stored documents, with large values brought in; encrypted ones stay so, and are opened where they are replayed. What that JSON cannot
tell, the bits of a NaN, has a form of its own.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from bson import json_util

from mongo_durable.encryption import Cipher
from mongo_durable.errors import ConfigurationError, CorruptHistory
from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.events import Event, RunStatus
from mongo_durable.store import heads, runs
from mongo_durable.store.connection import Connection
from mongo_durable.store.documents import RunHead, event_from
from mongo_durable.store.events import each_document
from mongo_durable.store.faults import store_call
from mongo_durable.store.payloads import assemble
from mongo_durable.store.runs import ThreadState
from mongo_durable.store.sealing import open_error, open_sealed, require_open, sealed_error

FORMAT = 1
_HEADER = "mongo_durable_history"
_NAN = "$nan"
_JSON = json_util.JSONOptions(json_mode=json_util.JSONMode.CANONICAL, tz_aware=True, tzinfo=UTC)
_ALWAYS = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedRun:
    """A run as a file has it.

    Attributes:
        head: As the attempt that would go on with it would see it.
        base: The thread's committed state that it starts from (run_id of its owner, serde_type, data), or None.
    """

    head: RunHead
    events: list[Event]
    base: Mapping[str, Any] | None

    @property
    def state(self) -> ThreadState | None:
        """`base`, as a driver takes it."""
        return None if self.base is None else ThreadState(serde_type=self.base["serde_type"], data=bytes(self.base["data"]))


async def lines(connection: Connection, run_id: str) -> AsyncGenerator[str, None]:
    """The lines of a run, without line ends. One event is held at a time.

    Raises:
        RunNotFound: There is no such run.
        CorruptHistory: A part is missing.
    """
    yield _dumps(await _header(connection, run_id))
    async for document in each_document(connection, run_id):
        yield _dumps(document)


@store_call
async def _header(connection: Connection, run_id: str) -> dict[str, Any]:
    head = await heads.get(connection, run_id)  # that it is there, and of a release which is known here
    document = await connection.runs.find_one({"_id": run_id}, {"input": 1, "settings": 1})
    stored = [None, None] if document is None else [document["input"], document.get("settings") or {}]
    given, settings = await assemble(connection, run_id, stored)
    base = await runs.stored_state(connection, head.base_thread, head.base_turn)
    return {
        _HEADER: FORMAT,
        "run_id": run_id,
        "workflow": head.workflow,
        "version": head.version,
        "thread_id": head.thread_id,
        "turn": head.turn,
        "input": given,
        "settings": settings,
        "base": None if base is None else {name: base[name] for name in ("run_id", "serde_type", "data")},
    }


def read(source: Iterable[str]) -> Iterator[ExportedRun]:
    """The runs that lines hold, one after the other; encrypted values stay so (see `opened`).

    Raises:
        ConfigurationError: They are no histories of this format.
        SchemaVersionMismatch: They are of a newer release.
        CorruptHistory: A run's lines are not those of one run.
    """
    header: Mapping[str, Any] | None = None
    events: list[Event] = []
    for number, line in enumerate(source, start=1):
        if not line.strip():
            continue
        document = _loads(line, number)
        if _HEADER not in document:
            if header is None:
                raise ConfigurationError(f"line {number} is no history: a run begins with its header line, as `mongo-durable export` writes it")
            if document.get("run_id") != header["run_id"]:
                raise CorruptHistory(f"line {number} is of another run than its header, {header['run_id']!r}", run_id=header["run_id"])
            events.append(event_from(document))
            continue
        if document[_HEADER] != FORMAT:
            raise ConfigurationError(f"line {number} is of format {document[_HEADER]!r}, this release reads {FORMAT}: upgrade mongo_durable")
        if header is not None:
            yield _run(header, events)
        header, events = document, []
    if header is None:
        raise ConfigurationError("there is no history: not a single line")
    yield _run(header, events)


def _run(header: Mapping[str, Any], events: list[Event]) -> ExportedRun:
    base = header["base"]
    last = events[-1] if events else None
    head = RunHead(
        run_id=header["run_id"],
        status=RunStatus.RUNNING,
        fence=last.fence + 1 if last is not None else 1,
        attempt=None,
        owner=None,
        generation=0,
        workflow=header["workflow"],
        version=header["version"],
        thread_id=header["thread_id"],
        turn=header["turn"],
        base_thread=header["thread_id"],
        base_turn=0,
        input=header["input"],
        input_digest=digest(header["input"]),
        settings=header["settings"],
        output=None,
        error=None,
        is_cancel_requested=False,
        cancel_reason=None,
        is_past_deadline=False,
        priority=0,
        available_at=None,
        deadline_at=None,
        limit=None,
        is_queued=False,
        crashes=0,
        held_back=None,
        submitted_at=None,
        claimed_at=_ALWAYS,  # before every timer: none that is recorded as set fires in a replay
        ended_at=None,
    )
    return ExportedRun(head=head, events=events, base=base)


def opened(run: ExportedRun, cipher: Cipher | None) -> ExportedRun:
    """The run with its encrypted values as they were given.

    Raises:
        DecryptionFailed: This process has no cipher, or not the key.
    """
    run_id = run.head.run_id

    def each(value: Any, owner: str = run_id) -> Any:
        found = open_sealed(cipher, owner, value)
        require_open(owner, [found])
        return found

    events = [_opened_event(event, cipher, each) for event in run.events]
    base = run.base
    if base is not None:
        base = {**base, "data": each(base["data"], base["run_id"])}
    return replace(run, head=replace(run.head, input=each(run.head.input), settings=each(run.head.settings)), events=events, base=base)


def _opened_event(event: Event, cipher: Cipher | None, each: Callable[[Any], Any]) -> Event:
    data = dict(event.data)
    if "answers" in data:
        data["answers"] = {activity_id: each(answer) for activity_id, answer in data["answers"].items()}
    error = open_error(cipher, event.run_id, event.error)
    each(sealed_error(error))
    return replace(event, value=each(event.value), data=data, error=error)


def _dumps(document: Mapping[str, Any]) -> str:
    text = json_util.dumps(document, json_options=_JSON, ensure_ascii=False, separators=(",", ":"))
    if '"NaN"' in text:
        text = json_util.dumps(_with_nan_bits(document), json_options=_JSON, ensure_ascii=False, separators=(",", ":"))
    return text


def _loads(line: str, number: int) -> dict[str, Any]:
    try:
        loaded = json.loads(line, object_pairs_hook=_object)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"line {number} is not JSON of an exported history ({type(error).__name__})") from None
    if not isinstance(loaded, dict):
        raise ConfigurationError(f"line {number} is not JSON of an exported history (not an object)")
    return loaded


def _object(pairs: list[tuple[str, Any]]) -> Any:
    if len(pairs) == 1 and pairs[0][0] == _NAN:
        (bits,) = struct.unpack(">d", bytes.fromhex(pairs[0][1]))
        return bits
    return json_util.object_pairs_hook(pairs, _JSON)


def _with_nan_bits(value: Any) -> Any:
    """Copy with each NaN as its bits. A stored key never begins with "$": see `protocol.values`."""
    if isinstance(value, dict):
        return {name: _with_nan_bits(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_nan_bits(each) for each in value]
    if isinstance(value, float) and math.isnan(value):
        return {_NAN: struct.pack(">d", value).hex()}
    return value
