"""`mongo-durable doctor` on deployments that are not as they should be, and for users who may not see it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pymongo
import pytest
from typer.testing import CliRunner

from mongo_durable.cli.commands import app as command_line
from mongo_durable.store import diagnosis
from tests.security.conftest import GROUP
from tests.support.secured import SecuredMongo

pytestmark = GROUP


@pytest.fixture
def doctor(database: str) -> Callable[[str], tuple[int, dict[str, tuple[str, str]]]]:
    """`doctor(uri)`: its exit code, and severity and message of each finding by name."""

    def ask(uri: str) -> tuple[int, dict[str, tuple[str, str]]]:
        ended = CliRunner().invoke(command_line, ["doctor", "--json"], env={"MONGO_DURABLE_URI": uri, "MONGO_DURABLE_DATABASE": database})
        assert ended.exit_code in (0, 1), ended.output
        found = json.loads(ended.stdout)["findings"]
        return ended.exit_code, {each["name"]: (each["severity"], each["message"]) for each in found}

    return ask


def test_a_deployment_that_is_as_it_should_be_has_no_findings(doctor: Any, secured: SecuredMongo) -> None:
    """With a user, journaled majorities, equal clocks and all that `init` makes, an admin reads of nothing."""
    assert doctor(secured.root_uri) == (0, {})


@pytest.mark.parametrize("role", ["viewer", "approver"])
def test_what_a_user_may_not_see_is_said_and_does_not_fail(role: str, doctor: Any, secured: SecuredMongo, database: str) -> None:
    """A user with few rights gets what it may see; for the rest it reads which right is missing."""
    code, found = doctor(secured.user(database, role))
    assert code == 0
    assert {name: severity for name, (severity, _) in found.items()} == {"default_write_concern": "unknown", "oplog": "unknown"}
    assert all("not permitted to see" in message and "clusterMonitor" in message for _, message in found.values())


def test_what_init_would_put_right_is_wrong(doctor: Any, secured: SecuredMongo, database: str) -> None:
    """A missing index, another validator and a missing collection are named with what to do, and the exit code is 1."""
    with pymongo.MongoClient[Any](secured.root_uri) as root:
        root[database]["activity_events"].drop_index("one_outcome")
        root[database]["runs"].drop_index("place")
        root[database]["runs"].create_index("place", name="place")  # not unique: two runs could hold one place
        root[database].command("collMod", "runs", validator={})
        root[database].drop_collection("run_timeline")
    code, found = doctor(secured.root_uri)
    assert code == 1
    severity, message = found["schema"]
    assert severity == "wrong"
    for part in (
        "no index one_outcome on activity_events",
        "no index place on runs",
        "another validator on runs",
        "no collection run_timeline",
        "mongo-durable init",
    ):
        assert part in message
    environment = {"MONGO_DURABLE_URI": secured.root_uri, "MONGO_DURABLE_DATABASE": database}
    with pymongo.MongoClient[Any](secured.root_uri) as root:
        root[database]["runs"].drop_index("place")
    assert CliRunner().invoke(command_line, ["init"], env=environment).exit_code == 0
    assert doctor(secured.root_uri) == (0, {})


@pytest.mark.parametrize(("option", "said"), [("w=1", "w: 1"), ("w=0", "unacknowledged"), ("journal=false", "journal: false")])
def test_a_uri_that_asks_for_less_is_warned_of(option: str, said: str, doctor: Any, secured: SecuredMongo) -> None:
    """The product's own writes are majority writes; those of the user's code on the same URI would not be."""
    code, found = doctor(f"{secured.root_uri}&{option}")
    assert code == 0
    assert found["write_concern"][0] == "warning"
    assert said in found["write_concern"][1]


def test_a_weak_default_of_the_cluster_is_warned_of(doctor: Any, secured: SecuredMongo) -> None:
    """What other programs write by default counts too."""
    with pymongo.MongoClient[Any](secured.root_uri) as root:
        root.admin.command("setDefaultRWConcern", 1, defaultWriteConcern={"w": 1})
        try:
            code, found = doctor(secured.root_uri)
        finally:
            root.admin.command("setDefaultRWConcern", 1, defaultWriteConcern={"w": "majority"})
    assert code == 0
    assert "the cluster's default is w: 1" in found["default_write_concern"][1]


def test_clocks_that_differ_are_warned_of(doctor: Any, secured: SecuredMongo, monkeypatch: pytest.MonkeyPatch) -> None:
    """By how much, and in which direction."""

    class Ahead(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(UTC) + timedelta(seconds=90)

    monkeypatch.setattr(diagnosis, "datetime", Ahead)
    code, found = doctor(secured.root_uri)
    assert code == 0
    assert "90.0 s ahead of the server's" in found["clock"][1]


def test_an_oplog_that_forgets_too_soon_is_warned_of(doctor: Any, secured: SecuredMongo, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is full and reaches back less than an hour; one that is not full has forgotten nothing."""
    monkeypatch.setattr(diagnosis, "_FULL", 0.0)
    code, found = doctor(secured.root_uri)
    assert code == 0
    assert "the oplog reaches back 0 minutes" in found["oplog"][1]


def test_a_server_without_users_is_warned_of(mongo_uri: str, doctor: Any) -> None:
    """Whoever reaches it may do everything; on the loopback interface TLS is not asked for."""
    code, found = doctor(mongo_uri)
    assert code == 0
    assert {name: severity for name, (severity, _) in found.items()} == {"auth": "warning", "schema": "warning"}
    assert "mongo-durable init" in found["schema"][1]


@pytest.mark.parametrize(
    ("uri", "hosts", "is_warned"),
    [
        ("mongodb://db.example.com/", ["db.example.com:27017"], True),
        ("mongodb://db.example.com/?tls=true", ["db.example.com:27017"], False),
        ("mongodb+srv://db.example.com/", ["db.example.com:27017"], False),
        ("mongodb+srv://db.example.com/?tls=false", ["db.example.com:27017"], True),
        ("mongodb://localhost/", ["localhost:27017", "127.0.0.1:27018", "[::1]:27019"], False),
    ],
)
def test_a_network_without_tls_is_warned_of(uri: str, hosts: list[str], is_warned: bool) -> None:
    """Off the loopback interface, a connection has to be encrypted."""
    assert bool(diagnosis.tls_findings(uri, hosts)) is is_warned
