"""`mongo-durable init`: an admin's step."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mongo_durable.cli.database import Database, Opened, Uri, with_database
from mongo_durable.cli.output import console

WithRoles = Annotated[bool, typer.Option("--roles", help="Also create or update the roles for users with few rights. Not on Atlas: see the README.")]


def init(with_roles: WithRoles = False, uri: Uri = None, database: Database = None) -> None:
    """Create or update collections, indexes, validators and views. Safe to repeat, also while runners work."""

    async def work(opened: Opened) -> None:
        from mongo_durable.store.documents import SCHEMA_VERSION
        from mongo_durable.store.roles import ROLES
        from mongo_durable.store.schema import ensure_roles, ensure_schema

        await ensure_schema(opened.connection)
        out = console()
        out.print(f"database {opened.name} is set up (schema version {SCHEMA_VERSION})", markup=False)
        if with_roles:
            await ensure_roles(opened.connection)
            out.print(f"roles of database {opened.name}: {', '.join(ROLES)}", markup=False)
            out.print("a user with one or more of them, in mongosh:", markup=False)
            where = f"db.getSiblingDB({json.dumps(opened.name)})"
            out.print(f'  {where}.createUser({{ user: "runner-1", pwd: passwordPrompt(), roles: ["runner"] }})', markup=False)
            out.print(f"whose URI says authSource={opened.name}", markup=False)

    with_database(uri, database, work)
