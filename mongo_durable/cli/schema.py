"""`mongo-durable init`: an admin's step."""

from __future__ import annotations

from mongo_durable.cli.database import Database, Opened, Uri, with_database
from mongo_durable.cli.output import console


def init(uri: Uri = None, database: Database = None) -> None:
    """Create or update collections, indexes, validators and views. Safe to repeat, also while runners work."""

    async def work(opened: Opened) -> None:
        from mongo_durable.store.documents import SCHEMA_VERSION
        from mongo_durable.store.schema import ensure_schema

        await ensure_schema(opened.connection)
        console().print(f"database {opened.name} is set up (schema version {SCHEMA_VERSION})", markup=False)

    with_database(uri, database, work)
