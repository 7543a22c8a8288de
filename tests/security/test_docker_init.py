"""What the containers run first: the script that makes roles and users, in the real mongosh."""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path
from typing import Any

import pymongo
import pytest
from pymongo.errors import OperationFailure

from mongo_durable.store.roles import ROLES, TABLE
from tests.security.conftest import GROUP
from tests.support.mongosh import command
from tests.support.secured import SecuredMongo

INIT = Path(__file__).parents[2] / "docker" / "init"

pytestmark = GROUP


def test_the_script_makes_roles_and_users(secured: SecuredMongo, tmp_path: Path) -> None:
    """Each user can do what the table says, and no more; again, with another password for one of them, it brings them up to date."""
    database = f"test_docker_{secrets.token_hex(6)}"
    (tmp_path / "root_password").write_text(secured.password + "\n")
    host = f"127.0.0.1:{secured.port}"
    environment = {**os.environ, "HOSTS": host, "DATABASE": database, "SECRETS": str(tmp_path), "ROLES": str(INIT), "HOME": str(tmp_path)}
    uri = f"mongodb://{host}/?directConnection=true"
    try:
        for _ in range(2):
            for role in ROLES:
                (tmp_path / f"{role}_password").write_text(secrets.token_hex(12))
            arguments = [*command(), "--quiet", "--norc", uri, str(INIT / "init.js")]
            ran = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=60, check=False)
            assert ran.returncode == 0, ran.stdout + ran.stderr
            assert "roles and users are there" in ran.stdout
        for role in ROLES:
            password = (tmp_path / f"{role}_password").read_text()
            with pymongo.MongoClient[Any](host, username=role, password=password, authSource=database, replicaSet="rs0") as user:
                assert user[database]["runs"].find_one() is None
                with pytest.raises(OperationFailure, match="not authorized"):
                    user[database]["activity_events"].update_one({}, {"$set": {"value": 1}})
                if "insert" not in TABLE["runs"].get(role, ""):
                    with pytest.raises(OperationFailure, match="not authorized"):
                        user[database]["runs"].insert_one({})
    finally:
        with pymongo.MongoClient[Any](secured.root_uri) as root:
            root[database].command("dropAllUsersFromDatabase")
            root[database].command("dropAllRolesFromDatabase")
            root.drop_database(database)
