"""Resume tokens: signed permission to answer one frontier, for a link in a mail or a chat. JSON Web Tokens, signed with HMAC-SHA-256.

A token is bound to database, run, generation and digest, so it answers exactly what was shown to whom it was sent. Nothing is stored of it: it can
be used once because its frontier can be answered once, in one transaction, so no crash can use it up without the answer.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from mongo_durable.engine.resolving import NO_RULES, Rules, keep_refusal, resolve_once
from mongo_durable.errors import ConfigurationError, TokenError, TokenExpired, TokenInvalid, TokenOutOfScope
from mongo_durable.store.connection import Connection
from mongo_durable.store.documents import Answerer, Resolution

KEYS_VARIABLE = "MONGO_DURABLE_SIGNING_KEYS"
_ALGORITHM = "HS256"
_ISSUER = "mongo_durable"
_SHORTEST_KEY = 32
_REQUIRED = ["iss", "sub", "exp", "iat", "db", "gen", "dig"]


class SigningKeys:
    """Keys that resume tokens are signed with, by id.

    To change the key: add a new one under a new id and make it the one that signs; keep the old one until the last token that it signed has expired.

    Args:
        keys: Secret by id; at least 32 bytes each, say `secrets.token_urlsafe(32)`.
        signs: Id of the key that signs new tokens; None where there is one key.

    Raises:
        ConfigurationError: There is no key, one is too short, or it is not said which one signs.
    """

    def __init__(self, keys: Mapping[str, str | bytes], *, signs: str | None = None) -> None:
        self._keys = {name: key.encode() if isinstance(key, str) else bytes(key) for name, key in keys.items()}
        if not self._keys:
            raise ConfigurationError("SigningKeys needs at least one key")
        for name, key in self._keys.items():
            if not name or len(key) < _SHORTEST_KEY:
                raise ConfigurationError(
                    f"the signing key {name!r} needs a name and at least {_SHORTEST_KEY} bytes: secrets.token_urlsafe(32) makes one"
                )
        if signs is None and len(self._keys) > 1:
            raise ConfigurationError(f"which of the signing keys {', '.join(sorted(self._keys))} signs new tokens? Give signs=")
        self.signs = signs if signs is not None else next(iter(self._keys))
        if self.signs not in self._keys:
            raise ConfigurationError(f"there is no signing key {self.signs!r}: the keys are {', '.join(sorted(self._keys))}")

    @classmethod
    def from_environment(cls) -> Self | None:
        """From `MONGO_DURABLE_SIGNING_KEYS`: `id:secret,id:secret`, of which the first one signs. None if it is not set.

        Raises:
            ConfigurationError: It cannot be read.
        """
        given = os.environ.get(KEYS_VARIABLE)
        if not given:
            return None
        pairs = [each.strip().partition(":") for each in given.split(",")]
        if not all(name and separator for name, separator, _ in pairs):
            raise ConfigurationError(f"{KEYS_VARIABLE} is a list of id:secret, separated by commas")
        return cls({name: secret for name, _, secret in pairs}, signs=pairs[0][0])

    def __repr__(self) -> str:
        return f"SigningKeys({', '.join(sorted(self._keys))}; {self.signs} signs)"  # the secrets stay where they are

    def sign(self, claims: Mapping[str, Any]) -> str:
        """The token of some claims."""
        import jwt  # here, because it brings cryptography, and few processes sign

        return jwt.encode(dict(claims), self._keys[self.signs], _ALGORITHM, headers={"kid": self.signs})

    def claims(self, token: str) -> dict[str, Any]:
        """The claims of a token that one of the keys has signed. Whether they hold is not looked at.

        Raises:
            TokenInvalid: None of them has.
        """
        import jwt

        try:
            key = self._keys[jwt.get_unverified_header(token)["kid"]]
            unjudged = {"verify_exp": False, "verify_iat": False, "verify_nbf": False, "verify_aud": False, "require": _REQUIRED}
            return jwt.decode(token, key, [_ALGORITHM], issuer=_ISSUER, options=unjudged)  # type: ignore[arg-type]
        except (jwt.InvalidTokenError, KeyError, TypeError, ValueError):
            raise TokenInvalid() from None  # which of them it was would help only whoever forges


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a resume token allows.

    Attributes:
        audience: Who may use it; None: whoever has it.
        expires_at: By the server's clock.
    """

    database: str
    run_id: str
    generation: int
    digest: str
    audience: str | None
    expires_at: datetime


def make_token(
    keys: SigningKeys, *, database: str, run_id: str, generation: int, digest: str, audience: str | None, now: datetime, expires_in: timedelta
) -> str:
    """A signed token for one frontier.

    Args:
        now: By the server's clock.

    Raises:
        ConfigurationError: It would have expired already.
    """
    if expires_in <= timedelta():
        raise ConfigurationError("a resume token needs a time to live: expires_in is more than nothing")
    claims = {
        "iss": _ISSUER,
        "sub": run_id,
        "db": database,
        "gen": generation,
        "dig": digest,
        "iat": int(now.timestamp()),
        "exp": (now + expires_in).timestamp(),
        "jti": uuid.uuid4().hex,
    }
    return keys.sign(claims if audience is None else {**claims, "aud": audience})


def read_token(keys: SigningKeys, token: str) -> Grant:
    """What a token allows, if one of the keys has signed it.

    Raises:
        TokenInvalid: None has.
    """
    claims = keys.claims(token)
    audience = claims.get("aud")
    try:
        return Grant(
            database=claims["db"],
            run_id=claims["sub"],
            generation=int(claims["gen"]),
            digest=claims["dig"],
            audience=audience,
            expires_at=datetime.fromtimestamp(claims["exp"], UTC),
        )
    except (TypeError, ValueError, OverflowError):
        raise TokenInvalid() from None


async def answer_with_token(
    connection: Connection,
    keys: SigningKeys,
    token: str,
    answers: Mapping[str, Any],
    answerer: Answerer,
    *,
    audience: str | None = None,
    rules: Rules = NO_RULES,
) -> Resolution:
    """Answer the frontier that a token is for. What is refused is kept as an audit event, unless the token is not ours: then it names no run.

    Raises:
        TokenError: The token does not allow it.
        ResolutionError, RunError: See `engine.resolving.resolve`.
    """
    grant = read_token(keys, token)
    try:
        check_grant(grant, database=connection.database.name, audience=audience, now=await connection.server_time())
    except TokenError as refusal:
        await keep_refusal(connection, grant.run_id, grant.generation, answerer, refusal, [])
        raise
    return await resolve_once(connection, grant.run_id, grant.generation, grant.digest, answers, answerer, rules=rules)


def check_grant(grant: Grant, *, database: str, audience: str | None, now: datetime) -> None:
    """Whether a grant holds here and now, for this audience.

    Raises:
        TokenOutOfScope, TokenExpired.
    """
    run_id = grant.run_id
    if grant.database != database:
        raise TokenOutOfScope(f"run {run_id}: the resume token is for another database", run_id=run_id)
    if grant.audience is not None and grant.audience != audience:
        raise TokenOutOfScope(f"run {run_id}: the resume token is for {grant.audience!r}, not for {audience!r}", run_id=run_id)
    if grant.expires_at <= now:
        raise TokenExpired(f"run {run_id}: the resume token expired at {grant.expires_at:%Y-%m-%d %H:%M:%SZ}: ask for another one", run_id=run_id)
