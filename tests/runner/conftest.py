"""Who stands outside the runners, and what must hold after them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from mongo_durable import DurableClient
from tests.support.invariants import assert_invariants


@pytest.fixture
async def client(mongo_uri: str, database: str) -> AsyncIterator[DurableClient]:
    """Somebody who submits runs, answers and stops them."""
    async with DurableClient(mongo_uri, database=database) as client:
        yield client


@pytest.fixture
def sound(mongo_uri: str, database: str) -> Iterator[None]:
    """In the end the database holds nothing that a correct writer would not write."""
    yield
    assert_invariants(mongo_uri, database)
