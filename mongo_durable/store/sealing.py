"""Encrypted values, as they are stored: `{"__type__": "encrypted:value", "value": {"key": <id>, "data": <bytes>}}`.

The one place where plain values meet the cipher. `payloads.move_out` seals what it is given, `bring_in` opens it: a value that takes this way needs
nothing else. The context is the run: a value that is copied into another run does not open there.

A process without the key leaves a value sealed. People see that it is encrypted; whoever would have to understand it calls `require_open`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import bson

from mongo_durable.encryption import Cipher
from mongo_durable.errors import DecryptionFailed
from mongo_durable.protocol.values import ENVELOPE_KEY

SEALED_TYPE: Final = "encrypted:value"
HIDDEN: Final = "(encrypted)"
"""What stands for the message of an encrypted error."""

_ERROR_KEY: Final = "sealed"


def seal(cipher: Cipher | None, run_id: str, value: Any) -> Any:
    """The stored form of a plain value: itself without a cipher, or if it is sealed already."""
    if cipher is None or sealed_with(value) is not None:
        return value
    key_id, data = cipher.encrypt(bson.encode({"v": value}), _context(run_id))
    return {ENVELOPE_KEY: SEALED_TYPE, "value": {"key": key_id, "data": data}}


def open_sealed(cipher: Cipher | None, run_id: str, value: Any) -> Any:
    """The inverse. A value stays sealed where there is no cipher, or none that has its key.

    Raises:
        DecryptionFailed: The key of this id is another one, or the value was changed, or is another run's.
    """
    key_id = sealed_with(value)
    if cipher is None or key_id is None:
        return value
    try:
        data = cipher.decrypt(key_id, bytes(value["value"]["data"]), _context(run_id))
    except KeyError:
        return value
    except DecryptionFailed as error:
        raise error.with_run(run_id) from None
    return bson.decode(data)["v"]


def sealed_with(value: Any) -> str | None:
    """The id of the key that a value is encrypted with; None if it is not."""
    if isinstance(value, dict) and value.get(ENVELOPE_KEY) == SEALED_TYPE:
        key_id: str = value["value"]["key"]
        return key_id
    return None


def require_open(run_id: str, values: Iterable[Any]) -> None:
    """Refuse to go on with values that are still sealed.

    Raises:
        DecryptionFailed: One is: this process has no cipher, or not its key.
    """
    for value in values:
        key_id = sealed_with(value)
        if key_id is not None:
            raise DecryptionFailed(
                f"run {run_id}: its values are encrypted with key {key_id!r}, which this process does not have: give App or DurableClient a cipher= "
                "with it (the command line takes MONGO_DURABLE_KEYS)",
                run_id=run_id,
                key_id=key_id,
            )


def seal_error(cipher: Cipher | None, run_id: str, error: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The stored form of a recorded error: of an encrypted one, its type alone can be read."""
    if error is None:
        return None
    if cipher is None or _ERROR_KEY in error:
        return dict(error)
    return {"type": error["type"], "message": HIDDEN, _ERROR_KEY: seal(cipher, run_id, dict(error))}


def open_error(cipher: Cipher | None, run_id: str, error: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The inverse; see `open_sealed`."""
    if error is None or _ERROR_KEY not in error:
        return error
    opened = open_sealed(cipher, run_id, error[_ERROR_KEY])
    return error if sealed_with(opened) is not None else opened


def sealed_error(error: Mapping[str, Any] | None) -> Any:
    """What of a recorded error is still sealed, or None."""
    return (error or {}).get(_ERROR_KEY)


def _context(run_id: str) -> bytes:
    return b"mongo_durable\0" + run_id.encode()
