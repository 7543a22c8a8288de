"""The supplier of the procurement example: an outside system with a database of its own (SQLite), of which mongo_durable knows nothing.

It takes orders by request id. The same request again is the same order: nothing is ordered a second time. Every call is counted.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TABLES = """
    CREATE TABLE IF NOT EXISTS prices (item TEXT PRIMARY KEY, amount INTEGER NOT NULL);
    CREATE TABLE IF NOT EXISTS calls (request_id TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS orders (request_id TEXT PRIMARY KEY, item TEXT NOT NULL, amount INTEGER NOT NULL);
"""
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the supplier has sold.

    Attributes:
        amount: EUR.
        calls: How often it was asked for this order.
    """

    request_id: str
    item: str
    amount: int
    calls: int


async def _reply(request_id: str) -> None:
    return


class Supplier:
    """A supplier that can be asked twice for the same order.

    Args:
        pause: Is awaited between an order and the reply: where it is worst for the caller to die.
    """

    def __init__(self, path: Path, pause: Callable[[str], Awaitable[None]] = _reply) -> None:
        self._path = path
        self._pause = pause
        with self._database() as database:
            database.executescript(_TABLES)

    async def quote(self, item: str) -> int:
        """What an item costs now, in EUR.

        Raises:
            LookupError: It is not sold.
        """
        with self._database() as database:
            found = database.execute("SELECT amount FROM prices WHERE item = ?", (item,)).fetchone()
        if found is None:
            raise LookupError(f"the supplier does not sell {item!r}")
        return int(found[0])

    async def order(self, request_id: str, item: str, amount: int) -> str:
        """Order an item, and return the order's number.

        Raises:
            ValueError: This request has ordered something else.
        """
        with self._database() as database:
            database.execute("INSERT INTO calls VALUES (?)", (request_id,))
            database.execute("INSERT INTO orders VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (request_id, item, amount))
            ordered = database.execute("SELECT item, amount FROM orders WHERE request_id = ?", (request_id,)).fetchone()
        if ordered != (item, amount):
            raise ValueError(f"request {request_id} has ordered {ordered[0]} for {ordered[1]} EUR before: a new order is a new request")
        await self._pause(request_id)
        return f"SO-{request_id.upper()}"

    def set_price(self, item: str, amount: int) -> None:
        """Sell an item at a price, in EUR."""
        with self._database() as database:
            database.execute("INSERT INTO prices VALUES (?, ?) ON CONFLICT DO UPDATE SET amount = excluded.amount", (item, amount))

    def orders(self) -> list[Order]:
        """Everything that was sold, by request id."""
        with self._database() as database:
            rows = database.execute(
                "SELECT request_id, item, amount, (SELECT count(*) FROM calls WHERE calls.request_id = orders.request_id) FROM orders ORDER BY 1"
            ).fetchall()
        return [Order(request_id=request_id, item=item, amount=amount, calls=calls) for request_id, item, amount, calls in rows]

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """A connection for one transaction, which is on disk when the block ends: the caller may be killed at the next instruction."""
        connection = sqlite3.connect(self._path, timeout=_PATIENCE_S)
        try:
            with connection:
                yield connection
        finally:
            connection.close()
