"""What of a deployment needs somebody's attention, as findings: `mongo-durable doctor` prints them.

Every check stands alone. One that this user may not make says so, and what it would take, instead of failing: on Atlas' shared tiers, and for a user
with few rights, that is usual.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from pymongo import IndexModel
from pymongo.errors import OperationFailure

from mongo_durable.errors import NotPermitted
from mongo_durable.store.connection import Connection
from mongo_durable.store.documents import SCHEMA_VERSION
from mongo_durable.store.faults import store_call, translate
from mongo_durable.store.schema import INDEXES, VALIDATORS
from mongo_durable.store.views import VIEWS

SHORTEST_OPLOG = timedelta(hours=1)
"""A secondary, or a change stream, that was away for longer than the oplog reaches has to begin anew."""
LARGEST_CLOCK_DIFFERENCE = timedelta(seconds=2)
_CLOCK_LOOKS = 3
_FULL = 0.9  # an oplog that takes more than this of its size has begun to forget


class Severity(StrEnum):
    """How bad a finding is."""

    WRONG = "wrong"
    """Something does not work, or a guarantee does not hold."""
    WARNING = "warning"
    """It works, and should be otherwise where it matters."""
    UNKNOWN = "unknown"
    """This user may not see it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that somebody should know.

    Attributes:
        name: Stable name of the check: auth, tls, write_concern, default_write_concern, oplog, clock, schema.
        message: What was found, and what to do.
    """

    name: str
    severity: Severity
    message: str


@store_call
async def examine(connection: Connection, uri: str) -> list[Finding]:
    """Everything of this deployment that is not as it should be.

    Args:
        uri: What the connection was made from; only its options are looked at.
    """
    checks: list[tuple[str, str, Callable[[], Awaitable[list[Finding]]]]] = [
        ("auth", "connectionStatus", lambda: _auth(connection)),
        ("tls", "hello", lambda: _tls(connection, uri)),
        ("write_concern", "the client's options", lambda: _write_concern(connection)),
        ("default_write_concern", "the cluster's default and its configuration take the role clusterMonitor", lambda: _cluster_default(connection)),
        ("oplog", "how far the oplog reaches takes `find` on local.oplog.rs (role clusterMonitor)", lambda: _oplog(connection)),
        ("clock", "hello", lambda: _clock(connection)),
        ("schema", "collections, indexes and validators take listCollections and listIndexes (role viewer)", lambda: _schema(connection)),
    ]
    found: list[Finding] = []
    for name, needed, check in checks:
        try:
            found += await check()
        except OperationFailure as error:
            if not isinstance(translate(error), NotPermitted):
                raise
            found.append(Finding(name, Severity.UNKNOWN, f"not permitted to see: {needed}"))
    return found


async def _auth(connection: Connection) -> list[Finding]:
    status = await connection.client.admin.command("connectionStatus")
    if status["authInfo"]["authenticatedUsers"]:
        return []
    return [
        Finding(
            "auth",
            Severity.WARNING,
            "no user: whoever reaches the server may read and change everything; start it with --keyFile (or --auth), make users with the roles of "
            "`mongo-durable init --roles`, and name one in the URI",
        )
    ]


async def _tls(connection: Connection, uri: str) -> list[Finding]:
    hello = await connection.client.admin.command("hello")
    return tls_findings(uri, hello.get("hosts", []))


def tls_findings(uri: str, hosts: Sequence[str]) -> list[Finding]:
    """What is to be said of a connection to these members of the replica set (`host:port`)."""
    options = uri.partition("?")[2].lower().split("&")
    is_on = any(each in options for each in ("tls=true", "ssl=true")) or (
        uri.startswith("mongodb+srv://") and not any(each in options for each in ("tls=false", "ssl=false"))
    )
    away = [host for host in hosts if not _is_loopback(host)]
    if is_on or not away:
        return []
    return [
        Finding("tls", Severity.WARNING, f"no TLS to {', '.join(away)}: values and answers cross the network in clear text; add tls=true to the URI")
    ]


def _is_loopback(host: str) -> bool:
    name = host.rpartition(":")[0].strip("[]")
    return name == "localhost" or name.startswith("127.") or name == "::1"


async def _write_concern(connection: Connection) -> list[Finding]:
    weak = _weakness(connection.client.write_concern.document)
    if weak is None:
        return []
    return [
        Finding(
            "write_concern",
            Severity.WARNING,
            f"the URI asks for {weak}: mongo_durable writes with w: majority all the same, your own code on this URI may lose what it wrote; "
            "leave w= and journal= out",
        )
    ]


async def _cluster_default(connection: Connection) -> list[Finding]:
    found: list[Finding] = []
    default = await connection.client.admin.command("getDefaultRWConcern")
    weak = _weakness(default.get("defaultWriteConcern", {}))
    if weak is not None:
        found.append(
            Finding(
                "default_write_concern",
                Severity.WARNING,
                f"the cluster's default is {weak}: mongo_durable writes with w: majority all the same, other programs may lose what they wrote; "
                'an admin runs db.adminCommand({setDefaultRWConcern: 1, defaultWriteConcern: {w: "majority"}})',
            )
        )
    config = (await connection.client.admin.command("replSetGetConfig"))["config"]
    if config.get("writeConcernMajorityJournalDefault") is False:
        found.append(
            Finding(
                "default_write_concern",
                Severity.WRONG,
                "writeConcernMajorityJournalDefault is false: what a majority has acknowledged may be lost when servers crash together; "
                "set it to true with rs.reconfig()",
            )
        )
    return found


def _weakness(concern: Mapping[str, Any]) -> str | None:
    """What of a write concern is weaker than acknowledged by a majority and journaled; None if nothing is."""
    w = concern.get("w")
    if isinstance(w, int) and w <= 1:
        return f"w: {w}" + (" (unacknowledged)" if w == 0 else "")
    return "journal: false" if concern.get("j") is False else None


async def _oplog(connection: Connection) -> list[Finding]:
    oplog = connection.client["local"]["oplog.rs"]
    ends = [await oplog.find({}, {"ts": 1}).sort("$natural", direction).limit(1).to_list(None) for direction in (1, -1)]
    if not all(ends):
        return []
    reaches = timedelta(seconds=ends[1][0]["ts"].time - ends[0][0]["ts"].time)
    stats = (await connection.aggregate(oplog, [{"$collStats": {"storageStats": {}}}]))[0]["storageStats"]
    fill = stats["size"] / stats["maxSize"] if stats.get("maxSize") else 1.0
    if fill < _FULL:
        return []  # it has forgotten nothing yet
    if reaches >= SHORTEST_OPLOG:
        return []
    minutes = reaches.total_seconds() / 60
    return [
        Finding(
            "oplog",
            Severity.WARNING,
            f"the oplog reaches back {minutes:.0f} minutes: a server that is away for longer has to copy everything anew; enlarge it with "
            "db.adminCommand({replSetResizeOplog: 1, size: <megabytes>})",
        )
    ]


async def _clock(connection: Connection) -> list[Finding]:
    looks: list[tuple[timedelta, timedelta]] = []
    for _ in range(_CLOCK_LOOKS):
        before = datetime.now(UTC)
        hello = await connection.client.admin.command("hello")
        after = datetime.now(UTC)
        server = hello["localTime"]
        looks.append((after - before, (server if server.tzinfo else server.replace(tzinfo=UTC)) - before - (after - before) / 2))
    took, difference = min(looks)  # the quickest answer says the most
    if abs(difference) - took / 2 <= LARGEST_CLOCK_DIFFERENCE:
        return []
    seconds = difference.total_seconds()
    which = "behind" if seconds > 0 else "ahead of"
    return [
        Finding(
            "clock",
            Severity.WARNING,
            f"this machine's clock is {abs(seconds):.1f} s {which} the server's: leases and deadlines hold, for they go "
            "by the server's; times of events are the writer's, and mislead; run NTP on both",
        )
    ]


async def _schema(connection: Connection) -> list[Finding]:
    meta = await connection.database["meta"].find_one({})
    listed = await connection.database.list_collections()
    found = {each["name"]: each async for each in listed}
    wanted = {*VALIDATORS, *VIEWS}
    if meta is None and not wanted & set(found):
        return [
            Finding("schema", Severity.WARNING, "the database is not set up: run `mongo-durable init` (a runner with enough rights does it itself)")
        ]
    faults = [f"no collection {name}" for name in sorted(wanted - set(found))]
    if meta is None or meta["schema_version"] < SCHEMA_VERSION:
        faults.append(f"no record of schema version {SCHEMA_VERSION}")
    for name, validator in VALIDATORS.items():
        if name not in found:
            continue
        options = found[name]["options"]
        if options.get("validator") != validator or options.get("validationAction", "error") != "error":
            faults.append(f"another validator on {name}")
        indexes = await connection.database[name].index_information()
        faults += [f"no index {index.document['name']} on {name}" for index in INDEXES[name] if not _is_there(index, indexes)]
    if not faults:
        return []
    return [Finding("schema", Severity.WRONG, f"{'; '.join(faults)}: run `mongo-durable init` with an admin's URI")]


def _is_there(index: IndexModel, found: Mapping[str, Any]) -> bool:
    wanted = index.document
    there = found.get(wanted["name"])
    return (
        there is not None
        and list(there["key"]) == list(wanted["key"].items())
        and bool(there.get("unique")) == bool(wanted.get("unique"))
        and there.get("partialFilterExpression") == wanted.get("partialFilterExpression")
    )
