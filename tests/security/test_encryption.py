"""`cipher=`: nothing of a run's values can be read in the database, and everything works as without."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import bson
import pymongo
import pytest
from langgraph.types import Command
from typer.testing import CliRunner, Result

from mongo_durable import App, DurableClient, Runner
from mongo_durable.cli.commands import app as command_line
from mongo_durable.encryption import AesGcm
from mongo_durable.errors import ConfigurationError, DecryptionFailed, NondeterminismError, ResolutionConflict
from mongo_durable.protocol.values import Tagged
from mongo_durable.store import sealing
from mongo_durable.store.payloads import INLINE_LIMIT
from tests.engine.workflows import State, one_node, until_known
from tests.security.conftest import GROUP
from tests.support.secured import SecuredMongo

pytestmark = GROUP

SECRET = "4711-0815-rosebud"
OLD, NEW = {"2026-01": os.urandom(32)}, {"2026-02": os.urandom(32)}


@pytest.fixture
def mongo_uri(secured: SecuredMongo) -> str:
    """The server that all of these tests share, as its root."""
    return secured.root_uri


@pytest.fixture
def raw(mongo_uri: str, database: str) -> Iterator[Any]:
    """The database as it is stored."""
    with pymongo.MongoClient[Any](mongo_uri) as client:
        yield client[database]


def _secretive(uri: str, database: str, cipher: AesGcm | None, begun: list[str] | None = None, *, amount: int = 7) -> App:
    app = App("secretive", uri=uri, database=database, cipher=cipher)

    @app.activity(idempotent=True)
    async def look_up(card: str, amount: int) -> dict[str, Any]:
        if begun is not None:
            begun.append("look_up")
        return {"card": card, "large": SECRET * (INLINE_LIMIT // len(SECRET) + 1)}

    @app.activity(idempotent=True)
    async def refuse(card: str) -> None:
        if begun is not None:
            begun.append("refuse")
        raise ValueError(f"no money on {card}")

    async def node(state: State) -> dict[str, Any]:
        found = await look_up(SECRET, amount)
        said = ""
        try:
            await refuse(SECRET)
        except ValueError as error:
            said = str(error)
        answer = app.interrupt(
            "approval",
            {"question": f"Charge {SECRET}?"},
            response_schema={"type": "object", "required": ["code"]},
            expires_in=timedelta(hours=1),
            default={"code": SECRET},
        )
        if state["value"] == "fail":
            raise ValueError(f"cannot charge {SECRET}")
        return {"seen": [*state.get("seen", []), found["card"], said, answer["code"]]}

    return one_node(app, node)


def _stored(raw: Any) -> dict[str, bytes]:
    """Every collection's documents, as bytes."""
    names = [each["name"] for each in raw.list_collections(filter={"type": "collection"}) if not each["name"].startswith("system.")]
    return {name: b"".join(bson.encode(each) for each in raw[name].find()) for name in names}


def _keys(value: Any) -> set[str]:
    """Ids of the keys of all encrypted values in a document."""
    if sealing.sealed_with(value) is not None:
        return {value["value"]["key"]}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {key for each in parts for key in _keys(each)}


async def test_no_value_can_be_read_in_the_database(mongo_uri: str, database: str, raw: Any) -> None:
    """A run with a question, a resumption by another process, a thread, a failed run and a fork: the secret stands nowhere in any document."""
    begun: list[str] = []
    config = {"configurable": {"thread_id": "t", "account": SECRET}}
    cipher = AesGcm(OLD)
    app = _secretive(mongo_uri, database, cipher, begun)
    await app.ainvoke({"value": SECRET}, config, run_id="first")
    await app.aclose()
    async with DurableClient(mongo_uri, database=database, cipher=AesGcm(OLD)) as client:
        (question,) = (await client.open_frontiers())[0].entries
        assert question.value == {"question": f"Charge {SECRET}?"}
        assert question.default == {"code": SECRET}
        assert question.response_schema == {"type": "object", "required": ["code"]}
        receipt = await client.resolve("first", {question.activity_id: {"code": SECRET}})
        assert receipt == await client.resolve("first", {question.activity_id: {"code": SECRET}})
        with pytest.raises(ResolutionConflict):
            await client.resolve("first", {question.activity_id: {"code": "another"}})

        again = _secretive(mongo_uri, database, AesGcm(OLD), begun)
        expected = [SECRET, f"no money on {SECRET}", SECRET]
        assert (await again.ainvoke(None, config))["seen"] == expected
        assert begun == ["look_up", "refuse"]
        await again.ainvoke({"value": "second"}, config, run_id="second")
        assert (await again.ainvoke(Command(resume={"code": SECRET}), config))["seen"] == expected * 2
        await again.ainvoke({"value": "fail"}, {"configurable": {"thread_id": "f"}}, run_id="failed")
        with pytest.raises(ValueError, match=SECRET):
            await again.ainvoke(Command(resume={"code": SECRET}), {"configurable": {"thread_id": "f"}})
        await client.fork("first", at=0, new_run_id="forked")
        place = next(event.position.text for event in await client.history("first") if event.name == "refuse" and event.position)
        await client.fork("second", at=place, new_run_id="forked-2")
        for forked in ("forked", "forked-2"):
            await again.ainvoke(None, {"configurable": {"thread_id": forked}})
        assert len(await client.open_frontiers()) == 2

        assert (await client.get_run("failed")).error == {"type": "ValueError", "message": f"cannot charge {SECRET}"}
        assert {each.run_id: each.error for each in await client.list_runs(status="failed")} == {"failed": (await client.get_run("failed")).error}
        assert SECRET in str(await client.transcript("t"))
        await again.aclose()
    stored = _stored(raw)
    assert {name for name, documents in stored.items() if documents} >= {
        "runs",
        "activity_events",
        "resolutions",
        "thread_states",
        "memory",
        "payloads",
    }
    assert [name for name, documents in stored.items() if SECRET.encode() in documents] == []


async def test_a_divergence_is_found_without_reading_a_value(mongo_uri: str, database: str) -> None:
    """Digests are of the plain input, so another input is another input, whatever it is encrypted to."""
    config = {"configurable": {"thread_id": "t"}}
    app = _secretive(mongo_uri, database, AesGcm(OLD))
    await app.ainvoke({"value": "x"}, config)
    await app.aclose()
    changed = _secretive(mongo_uri, database, AesGcm(OLD), amount=8)
    with pytest.raises(NondeterminismError):
        await changed.ainvoke(Command(resume={"code": "1"}), config)
    await changed.aclose()


async def test_keys_are_rotated_while_runs_wait(mongo_uri: str, database: str, raw: Any) -> None:
    """The newest key encrypts, older ones still decrypt; a process without the old one executes nothing, and says which it lacks."""
    config = {"configurable": {"thread_id": "t"}}
    first = _secretive(mongo_uri, database, AesGcm(OLD))
    await first.ainvoke({"value": SECRET}, config, run_id="waiting")
    await first.aclose()
    assert {key for each in raw["activity_events"].find() for key in _keys(each)} == {"2026-01"}

    async with DurableClient(mongo_uri, database=database, cipher=AesGcm({**OLD, **NEW})) as client:
        (question,) = (await client.open_frontiers())[0].entries
        await client.resolve("waiting", {question.activity_id: {"code": SECRET}})
    (resolution,) = raw["resolutions"].find()
    assert _keys(resolution) == {"2026-02"}

    forgetful = _secretive(mongo_uri, database, AesGcm(NEW))
    with pytest.raises(DecryptionFailed, match="2026-01") as refused:
        await forgetful.ainvoke(None, config)
    assert refused.value.key_id == "2026-01"
    await forgetful.aclose()
    assert raw["runs"].find_one({"_id": "waiting"})["status"] == "ready"
    assert "2026-01" in raw["runs"].find_one({"_id": "waiting"})["held_back"]

    rotated = _secretive(mongo_uri, database, AesGcm({**OLD, **NEW}))
    async with Runner([rotated]), DurableClient(mongo_uri, database=database, cipher=AesGcm({**OLD, **NEW})) as client:

        async def has_ended() -> bool:
            return (await client.get_run("waiting")).is_ended

        await until_known(has_ended)
        assert (await client.get_run("waiting")).result()["seen"][-1] == SECRET
    await rotated.aclose()


async def test_a_value_opens_with_its_key_and_in_its_run_alone(mongo_uri: str, database: str, raw: Any) -> None:
    """Another key of the same id, a changed byte, and a value that somebody moved into another run are refused."""
    app = _secretive(mongo_uri, database, AesGcm(OLD))
    for run_id in ("one", "other"):
        await app.ainvoke({"value": run_id}, {"configurable": {"thread_id": run_id}}, run_id=run_id)
    await app.aclose()
    async with DurableClient(mongo_uri, database=database, cipher=AesGcm({"2026-01": os.urandom(32)})) as wrong:
        with pytest.raises(DecryptionFailed) as refused:
            await wrong.history("one")
        assert (refused.value.key_id, refused.value.run_id) == ("2026-01", "one")
    moved = raw["activity_events"].find_one({"run_id": "one", "type": "run.submitted"})["value"]
    raw["activity_events"].update_one({"run_id": "other", "type": "run.submitted"}, {"$set": {"value": moved}})
    data = bytearray(moved["value"]["data"])
    data[-1] ^= 1
    changed = {**moved, "value": {**moved["value"], "data": bytes(data)}}
    raw["activity_events"].update_one({"run_id": "one", "type": "run.submitted"}, {"$set": {"value": changed}})
    async with DurableClient(mongo_uri, database=database, cipher=AesGcm(OLD)) as client:
        for run_id in ("one", "other"):
            with pytest.raises(DecryptionFailed):
                await client.history(run_id)


@pytest.fixture
def waiting(mongo_uri: str, database: str) -> str:
    """A run that waits for an answer to an encrypted question."""

    async def start() -> None:
        app = _secretive(mongo_uri, database, AesGcm(OLD))
        await app.ainvoke({"value": SECRET}, {"configurable": {"thread_id": "waiting"}}, run_id="waiting")
        await app.aclose()

    asyncio.run(start())
    return "waiting"


def test_without_the_key_people_see_that_it_is_encrypted(mongo_uri: str, database: str, waiting: str) -> None:
    """Listing and showing work; answering and forking are refused, and nothing is stored in the clear."""

    async def look() -> None:
        for keys in (None, AesGcm(NEW)):
            async with DurableClient(mongo_uri, database=database, cipher=keys) as client:
                assert [each.run_id for each in await client.list_runs()] == [waiting]
                snapshot = await client.get_run(waiting)
                assert snapshot.frontier is not None
                (question,) = snapshot.frontier.entries
                assert isinstance(question.value, Tagged)
                assert SECRET not in str((await client.history(waiting), await client.transcript(waiting), snapshot))
                with pytest.raises(DecryptionFailed, match="2026-01"):
                    await client.resolve(waiting, {question.activity_id: {"code": "1"}})
                with pytest.raises(DecryptionFailed, match="2026-01"):
                    await client.fork(waiting, at=0)
                assert (await client.get_run(waiting)).status == "suspended"
        app = _secretive(mongo_uri, database, None)
        with pytest.raises(DecryptionFailed, match="2026-01"):
            await app.ainvoke(Command(resume={"code": "1"}), {"configurable": {"thread_id": waiting}})
        await app.aclose()

    asyncio.run(look())


def test_the_command_line_takes_keys_from_the_environment(mongo_uri: str, database: str, waiting: str) -> None:
    """`show` without keys says that values are encrypted, with them it shows them; so for `resolve`."""

    def cli(*arguments: str, keys: str | None = None) -> Result:
        environment = {"MONGO_DURABLE_URI": mongo_uri, "MONGO_DURABLE_DATABASE": database, "MONGO_DURABLE_KEYS": keys}
        return CliRunner().invoke(command_line, list(arguments), env=environment)

    keys = f"2026-01:{base64.b64encode(OLD['2026-01']).decode()}"
    question = json.loads(cli("frontiers", "--json").stdout)[0]["entries"][0]
    assert question["value"]["type"] == "encrypted:value"
    for command in (["show", waiting], ["runs"], ["frontiers"]):
        ended = cli(*command)
        assert ended.exit_code == 0, ended.output
        assert SECRET not in ended.stdout
    answer = f'{question["activity_id"]}={{"code": "{SECRET}"}}'
    refused = cli("resolve", waiting, "--answer", answer)
    assert refused.exit_code == 1
    assert "MONGO_DURABLE_KEYS" in refused.stderr
    assert SECRET in cli("show", waiting, keys=keys).stdout
    assert cli("resolve", waiting, "--answer", answer, keys=keys).exit_code == 0
    assert "base64" in cli("show", waiting, keys="2026-01:???").stderr


def test_apps_of_one_runner_share_their_cipher(mongo_uri: str) -> None:
    """They share one connection, so one of them would read with the other's keys."""
    apps = [App(name, uri=mongo_uri, cipher=AesGcm(OLD)) for name in ("one", "other")]
    with pytest.raises(ConfigurationError, match="share one cipher"):
        Runner(apps)


@pytest.mark.parametrize(
    ("keys", "said"), [({}, "at least one"), ({"a": b"short"}, "5 bytes"), ({"": os.urandom(32)}, "has an id")], ids=["none", "short", "nameless"]
)
def test_keys_that_cannot_work_are_refused(keys: dict[str, bytes], said: str) -> None:
    """When they are given, not when the first value is to be read."""
    with pytest.raises(ConfigurationError, match=said):
        AesGcm(keys)
