"""Reading the history of a run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace
from typing import Any

from mongo_durable.errors import CorruptHistory
from mongo_durable.protocol.events import Event
from mongo_durable.store.connection import Connection
from mongo_durable.store.documents import NOT_OF_AN_EVENT, Document, event_from
from mongo_durable.store.faults import no_driver_errors, store_call
from mongo_durable.store.payloads import assemble, bring_in
from mongo_durable.store.sealing import require_open, sealed_error

_ONE_BATCH = 1_000_000  # the reply is cut at 16 MB anyway; a normal history is one reply


@store_call
async def read_history(connection: Connection, run_id: str, *, up_to: int | None = None, after: int = 0) -> list[Event]:
    """The events of a run in order of `seq`, majority-committed, with large values brought in. One query, and one more if there are large values.

    Args:
        up_to: The seq that must be the last one: a read that ends before it is repeated by the caller's claim logic. None reads what is there.
        after: Leave out events up to this seq.

    Raises:
        CorruptHistory: There is a hole.
    """
    documents = await read_documents(connection, run_id, up_to=up_to, after=after)
    read = await from_documents(connection, run_id, documents, after=after)
    if up_to is not None and len(read) != up_to - after:
        raise CorruptHistory(f"run {run_id}: the history ends at event {after + len(read)}, expected {up_to}", run_id=run_id, seq=up_to)
    return read


async def read_documents(connection: Connection, run_id: str, *, up_to: int | None = None, after: int = 0) -> list[Document]:
    """The same as it is stored, unchecked, and its times without a zone. `event_from` understands them."""
    wanted: dict[str, Any] = {"run_id": run_id}
    if up_to is not None or after:
        wanted["seq"] = {"$gt": after, **({"$lte": up_to} if up_to is not None else {})}
    found = connection.histories.find(wanted, NOT_OF_AN_EVENT, batch_size=_ONE_BATCH).sort("seq", 1)
    documents: list[Document] = await found.to_list(None)
    return documents


async def from_documents(connection: Connection, run_id: str, documents: Iterable[Document], *, after: int = 0) -> list[Event]:
    """The events that stored documents stand for, with large values brought in: one query if there are any.

    Raises:
        CorruptHistory: There is a hole.
    """
    read: list[Event] = []
    for seq, document in enumerate(documents, start=after + 1):
        if document["seq"] != seq:
            raise _hole(run_id, seq)
        read.append(event_from(document, connection.cipher))
    return await _with_values(connection, run_id, read)


def require_readable(run_id: str, recorded: Iterable[Event]) -> None:
    """Refuse a history with values that this process cannot decrypt: who executes or copies the run has to know them.

    Raises:
        DecryptionFailed: There is one.
    """
    for event in recorded:
        if type(event.value) is dict or event.data or event.error is not None:  # nothing else can be sealed
            require_open(run_id, [event.value, *event.data.get("answers", {}).values(), sealed_error(event.error)])


async def each_document(connection: Connection, run_id: str) -> AsyncGenerator[Document, None]:
    """The stored events of a run in order of `seq`, with large values brought in and encrypted ones left so, one at a time: for a history that may be
    larger than memory.

    Raises:
        CorruptHistory: There is a hole.
    """
    seq = 0
    with no_driver_errors():
        async for document in connection.activity_events.find({"run_id": run_id}).sort("seq", 1):
            seq += 1
            if document["seq"] != seq:
                raise _hole(run_id, seq)
            answers: dict[str, Any] = document.get("answers") or {}
            whole = await assemble(connection, run_id, [document.get("value"), *answers.values()])
            if "value" in document:
                document["value"] = whole[0]
            answers.update(zip(answers, whole[1:], strict=True))
            yield document


def _hole(run_id: str, seq: int) -> CorruptHistory:
    return CorruptHistory(f"run {run_id}: event {seq} is missing", run_id=run_id, seq=seq)


async def _with_values(connection: Connection, run_id: str, events: list[Event]) -> list[Event]:
    values = await bring_in(connection, run_id, [event.value for event in events])
    answered = [(index, activity_id) for index, event in enumerate(events) for activity_id in event.data.get("answers", ())]
    answers = await bring_in(connection, run_id, [events[index].data["answers"][activity_id] for index, activity_id in answered])
    for index, value in enumerate(values):
        if value is not events[index].value:
            events[index] = replace(events[index], value=value)
    for (index, activity_id), answer in zip(answered, answers, strict=True):
        events[index].data["answers"][activity_id] = answer  # the dict was decoded for this event alone
    return events
