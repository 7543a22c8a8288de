"""Values that MongoDB must not be able to read: `App(cipher=…)`, `DurableClient(cipher=…)`.

A cipher encrypts every stored value of a run: its input, output and settings, inputs and outcomes of activities, questions, answers and defaults,
messages of errors, the conversation, and the thread's state. What is needed to find, order and match stays readable: ids, names, positions, times,
statuses, response schemas, types of errors, digests, and what people write beside an answer (`resolved_by`, `note`, the reason of a cancellation).

Digests are those of the plain values, so that a divergence, and the same answer given twice, are found with any key. Who reads the database and
guesses a value can see that the guess is right; a secret that can be guessed, such as a PIN, belongs into another system, with its name here.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from typing import Protocol

from mongo_durable.errors import ConfigurationError, DecryptionFailed

KEYS_VARIABLE = "MONGO_DURABLE_KEYS"

_KEY_SIZES = (16, 24, 32)
_NONCE_SIZE = 12


class Cipher(Protocol):
    """What encrypts values. `AesGcm` is one; another may ask a key management service, and is called on the event loop: it has to answer at once."""

    def encrypt(self, data: bytes, context: bytes) -> tuple[str, bytes]:
        """Encrypt `data` with the newest key.

        Args:
            context: Where the value belongs; what was encrypted in one context must not decrypt in another.

        Returns:
            The key's id, which is stored in the clear, and the encrypted bytes.
        """
        ...

    def decrypt(self, key_id: str, data: bytes, context: bytes) -> bytes:
        """The inverse.

        Raises:
            DecryptionFailed: The key is another one, or data or context were changed.
            KeyError: There is no key of this id.
        """
        ...


class AesGcm:
    """AES-GCM with a random nonce of 96 bits for each value. Needs the extra `crypto`.

    To rotate, put a new key last: it encrypts from then on, and all of them decrypt. Give it to every process before the first one encrypts with it.
    A key may be left out when no run that it encrypted is kept. One key is good for 2^32 values.

    Args:
        keys: By an id that is stored with each value: 16, 24 or 32 random bytes (`os.urandom(32)`). The last one encrypts.
    """

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise ConfigurationError("AesGcm needs the package cryptography: install mongo-durable[crypto]") from None
        if not keys:
            raise ConfigurationError("AesGcm needs at least one key")
        for key_id, key in keys.items():
            if not key_id or len(key) not in _KEY_SIZES:
                raise ConfigurationError(f"key {key_id!r} has {len(key)} bytes: a key has an id, and 16, 24 or 32 random bytes")
        self._keys = {key_id: AESGCM(key) for key_id, key in keys.items()}
        self._newest = list(keys)[-1]

    def encrypt(self, data: bytes, context: bytes) -> tuple[str, bytes]:
        """See `Cipher`."""
        nonce = os.urandom(_NONCE_SIZE)
        return self._newest, nonce + self._keys[self._newest].encrypt(nonce, data, context)

    def decrypt(self, key_id: str, data: bytes, context: bytes) -> bytes:
        """See `Cipher`."""
        from cryptography.exceptions import InvalidTag

        key = self._keys[key_id]
        try:
            return key.decrypt(data[:_NONCE_SIZE], data[_NONCE_SIZE:], context)
        except InvalidTag:
            raise DecryptionFailed(
                f"a value does not decrypt with the key {key_id!r} of this process: the key is another one, or the value was changed or moved",
                key_id=key_id,
            ) from None


def cipher_from_environment() -> AesGcm | None:
    """The cipher of the command line: `MONGO_DURABLE_KEYS` is `id:base64,id:base64`, the newest last. None where it is not set.

    Raises:
        ConfigurationError: It cannot be read.
    """
    given = os.environ.get(KEYS_VARIABLE)
    if not given:
        return None
    keys: dict[str, bytes] = {}
    for each in given.split(","):
        key_id, _, encoded = each.strip().partition(":")
        try:
            keys[key_id] = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            raise ConfigurationError(f"{KEYS_VARIABLE} is id:base64,id:base64, the newest key last; key {key_id!r} is not base64") from None
    return AesGcm(keys)
