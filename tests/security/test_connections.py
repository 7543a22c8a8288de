"""Users and TLS in the URI."""

from __future__ import annotations

from typing import Any

import pytest

from mongo_durable import App, DurableClient, Runner
from mongo_durable.errors import ConfigurationError
from tests.engine.workflows import one_node
from tests.security.conftest import GROUP
from tests.support.secured import SecuredMongo

pytestmark = GROUP


async def test_a_user_of_the_products_database_signs_in(secured: SecuredMongo, database: str) -> None:
    """SCRAM with `authSource` is for the client, the runner, its change stream and its heartbeat alike, and over TLS as well."""
    uri = f"{secured.user(database, 'runner')}&authMechanism=SCRAM-SHA-256&tls=true&tlsCAFile={secured.authority}"
    app = one_node(App("workshop", uri=uri, database=database), _node)
    async with DurableClient(uri, database=database) as client, Runner([app]):
        run = await client.submit("workshop", {"value": 1})
        assert (await run.wait(timeout=30)).result() == {"value": 1, "seen": ["here"]}


async def _node(state: Any) -> Any:
    return {"seen": ["here"]}


@pytest.mark.parametrize("wrong", ["authSource", "password"])
async def test_a_user_who_is_not_let_in_is_told_why(wrong: str, secured: SecuredMongo, database: str) -> None:
    """A wrong password, or a user of another database, is a matter of configuration; the message has no password in it."""
    uri = secured.user(database, "viewer")
    password = uri.partition("://")[2].partition(":")[2].partition("@")[0]
    uri = uri.replace(f"authSource={database}", "authSource=admin") if wrong == "authSource" else uri.replace(password, f"not-{password}")
    with pytest.raises(ConfigurationError, match="authSource") as refused:
        async with DurableClient(uri, database=database):
            pass
    assert password not in str(refused.value)
