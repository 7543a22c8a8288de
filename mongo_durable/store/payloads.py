"""Values too large for the document that they belong to.

A value of more than 256 KB is cut into chunks of 1 MB in `payloads`, and a reference stands in its place. Chunks are keyed `run_id/digest/n`, so a
run owns its chunks, writing them again is harmless, and nothing fails at 16 MB. They are written before the document that refers to them, never
inside its transaction; what a crash leaves behind without a reference is removed with its run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import bson
from bson.raw_bson import RawBSONDocument
from pymongo.errors import BulkWriteError

from mongo_durable.errors import CorruptHistory
from mongo_durable.protocol.values import ENVELOPE_KEY
from mongo_durable.store.connection import Connection
from mongo_durable.store.documents import SCHEMA_VERSION, check_version
from mongo_durable.store.failpoints import FailPoint, reach
from mongo_durable.store.faults import store_call
from mongo_durable.store.sealing import open_sealed, seal

INLINE_LIMIT = 256 * 1024
"""Bytes of BSON up to which a value stays in its document."""
DOCUMENT_BUDGET = 4 * 1024 * 1024
"""Bytes that the values of one document may have together before the largest move out."""
CHUNK_SIZE = 1024 * 1024
COMMAND_SIZE = 4 * CHUNK_SIZE
REFERENCE_TYPE = "payload"
_DUPLICATE_KEY = 11000
_CHARACTER = 5
"""More bytes than one takes, with its share of the document around the text."""


def size(value: Any) -> int:
    """Bytes of BSON that `value` takes."""
    return len(bson.encode({"v": value}))


@store_call
async def move_out(connection: Connection, run_id: str, value: Any) -> Any:
    """The stored form of a value: itself, encrypted if there is a cipher; if it is large, a reference to its chunks, durable when this returns.

    Writes: `payloads`, insert only.
    """
    value = seal(connection.cipher, run_id, value)
    if value is None or (type(value) is str and len(value) < INLINE_LIMIT // _CHARACTER):
        return value  # what most results are; the others have to be measured
    encoded = bson.encode({"v": value})
    if len(encoded) <= INLINE_LIMIT:
        return value
    return await _write(connection, run_id, encoded)


@store_call
async def move_out_all(connection: Connection, run_id: str, values: Sequence[Any]) -> list[Any]:
    """The same for values that share a document: beyond 4 MB together, the largest move out too."""
    kept = [seal(connection.cipher, run_id, value) for value in values]
    encoded = [bson.encode({"v": value}) for value in kept]
    total = sum(len(data) for data in encoded)
    for index in sorted(range(len(encoded)), key=lambda index: -len(encoded[index])):
        if len(encoded[index]) <= INLINE_LIMIT and total <= DOCUMENT_BUDGET:
            break
        kept[index] = await _write(connection, run_id, encoded[index])
        total -= len(encoded[index])
    return kept


async def move_out_each(connection: Connection, run_id: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The same for values that share a document under keys, such as the answers of a resolution."""
    return dict(zip(values, await move_out_all(connection, run_id, list(values.values())), strict=True))


async def _write(connection: Connection, run_id: str, encoded: bytes) -> dict[str, Any]:
    digest = hashlib.blake2b(encoded, digest_size=16).hexdigest()
    now = datetime.now(UTC)
    count = -(-len(encoded) // CHUNK_SIZE)
    await reach(FailPoint.PAYLOAD_BEFORE)
    for first in range(0, count, COMMAND_SIZE // CHUNK_SIZE):
        chunks = [
            RawBSONDocument(
                bson.encode(
                    {
                        "_id": f"{run_id}/{digest}/{n}",
                        "run_id": run_id,
                        "schema_version": SCHEMA_VERSION,
                        "digest": digest,
                        "n": n,
                        "created_at": now,
                        "data": encoded[n * CHUNK_SIZE : (n + 1) * CHUNK_SIZE],
                    }
                )
            )
            for n in range(first, min(first + COMMAND_SIZE // CHUNK_SIZE, count))
        ]
        try:
            await connection.payloads.insert_many(chunks, ordered=False)
        except BulkWriteError as error:
            # A chunk that is there already has the same bytes; but a duplicate says "durable" only when no write concern failed beside it.
            details = error.details or {}
            if details.get("writeConcernErrors") or any(fault["code"] != _DUPLICATE_KEY for fault in details["writeErrors"]):
                raise
    await reach(FailPoint.PAYLOAD_AFTER)
    return {ENVELOPE_KEY: REFERENCE_TYPE, "value": {"digest": digest, "size": len(encoded), "chunks": count}}


def reference_of(value: Any) -> dict[str, Any] | None:
    """What stands in the place of a value that was moved out: digest, size, chunks; None for a value itself."""
    if isinstance(value, dict) and value.get(ENVELOPE_KEY) == REFERENCE_TYPE:
        reference: dict[str, Any] = value["value"]
        return reference
    return None


@store_call
async def bring_in(connection: Connection, run_id: str, values: Iterable[Any]) -> list[Any]:
    """The values with every reference replaced by what it stands for, and decrypted. One query whatever the number of references, none without any.

    Raises:
        DecryptionFailed: A value was changed, or the cipher's key is another one. Without the key, it stays as it is.
        CorruptHistory: A chunk is missing or damaged.
    """
    values = await assemble(connection, run_id, values)
    return values if connection.cipher is None else [open_sealed(connection.cipher, run_id, value) for value in values]


@store_call
async def assemble(connection: Connection, run_id: str, values: Iterable[Any]) -> list[Any]:
    """The values with every reference replaced by what it stands for, and still encrypted if they are. See `bring_in`.

    Raises:
        CorruptHistory: A chunk is missing or damaged.
    """
    values = list(values)
    wanted = {reference["digest"]: reference for value in values if (reference := reference_of(value)) is not None}
    if not wanted:
        return values
    parts: dict[str, dict[int, bytes]] = {digest: {} for digest in wanted}
    ids = [f"{run_id}/{digest}/{n}" for digest, reference in wanted.items() for n in range(reference["chunks"])]
    async for chunk in connection.payloads.find({"_id": {"$in": ids}}):
        check_version(chunk)
        parts[chunk["digest"]][chunk["n"]] = bytes(chunk["data"])
    found: dict[str, Any] = {}
    for digest, reference in wanted.items():
        encoded = b"".join(parts[digest][n] for n in sorted(parts[digest]))
        if hashlib.blake2b(encoded, digest_size=16).hexdigest() != digest:
            raise CorruptHistory(f"run {run_id}: the stored value {digest} of {reference['size']} bytes is incomplete or damaged", run_id=run_id)
        found[digest] = encoded
    # Decoded once for each place it stands, so that no two places share an object.
    return [bson.decode(found[reference["digest"]])["v"] if (reference := reference_of(value)) is not None else value for value in values]
