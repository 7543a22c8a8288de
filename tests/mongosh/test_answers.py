"""Answering from mongosh: the same guards as the library's, and the same documents."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from mongo_durable.engine import resolving
from mongo_durable.errors import ResolutionConflict
from mongo_durable.protocol.events import RunStatus
from mongo_durable.protocol.values import encode
from mongo_durable.store import frontiers, heads, runs, schema
from mongo_durable.store.appender import Appender
from mongo_durable.store.connection import Connection
from mongo_durable.store.documents import Answerer, StoredFrontier
from mongo_durable.store.events import read_history
from tests.support.attempts import Attempt, question
from tests.support.invariants import assert_invariants
from tests.support.mongosh import Mongosh, MongoshError
from tests.support.server_faults import failing

pytestmark = pytest.mark.xdist_group("mongosh")


async def _suspended(connection: Connection, appender: Appender, run_id: str, *schemas: dict[str, Any] | None, **options: Any) -> StoredFrontier:
    """A run that asks one question for each schema."""
    attempt = await Attempt.submit(connection, appender, run_id)
    asked = [question(run_id, number, schema=encode(schema)) for number, schema in enumerate(schemas or (None,), start=1)]
    return await attempt.suspend(*asked, **options)


def _ids(frontier: StoredFrontier) -> list[str]:
    return [entry.activity_id for entry in frontier.entries]


async def _documents(connection: Connection, run_id: str) -> dict[str, Any]:
    """What stands of a run, as fields and BSON types, without what differs from run to run."""
    found = {
        "head": await connection.runs.find_one({"_id": run_id}),
        "frontier": await connection.frontiers.find_one({"run_id": run_id}),
        "resolution": await connection.resolutions.find_one({"run_id": run_id}),
        "event": await connection.activity_events.find_one({"run_id": run_id}, sort=[("seq", -1)]),
    }
    return {name: _comparable(document, run_id) for name, document in found.items()}


def _comparable(value: Any, run_id: str) -> Any:
    if isinstance(value, dict):
        return {
            key: _comparable(each, run_id) for key, each in value.items() if key not in ("digest", "input_digest", "answers_digest", "activity_id")
        }
    if isinstance(value, list):
        return [_comparable(each, run_id) for each in value]
    kind = type(value).__name__  # Int64 is another type than int: what the server has as 64 bits
    if kind in ("datetime", "ObjectId"):
        return kind
    return (kind, value.replace(run_id, "RUN").partition("\n")[0] if isinstance(value, str) else value)


async def test_mongosh_writes_what_the_library_writes(connection: Connection, appender: Appender, run_id: str, mongosh: Mongosh) -> None:
    """The same answers, here and there: the same fields, types, order and digest in every collection; only the channel says where they came from."""
    answers = {"approved": True, "amount": 2**40, "n": 3, "share": 0.5, "a.b": ["ü", None], "huge": 2**80}
    literal = '{approved: true, amount: 2 ** 40, n: 3, share: 0.5, "a.b": ["ü", null], huge: 2n ** 80n}'
    here, there = f"{run_id}-here", f"{run_id}-there"
    asked_here, asked_there = [await _suspended(connection, appender, each, None, None) for each in (here, there)]
    # The ids of the activities differ, and are of one length.
    plain = {each: encode(answers) for each in _ids(asked_here)}
    await resolving.resolve(connection, here, plain, Answerer(by="ada", note="fine"))
    text = ", ".join(f"{each}: {literal}" for each in _ids(asked_there))
    told = mongosh.value(f"durable.resolve({json.dumps(there)}, {{{text}}}, {{by: 'ada', note: 'fine'}})")
    expected, found = await _documents(connection, here), await _documents(connection, there)
    for name in ("resolution", "event"):
        channel = found[name].pop("channel")
        assert channel == ("str", "mongosh")
        expected[name].pop("channel", None)
        expected[name]["answers"], found[name]["answers"] = (list(each[name]["answers"].values()) for each in (expected, found))
        assert list(found[name]) == list(expected[name])
    assert found == expected
    receipt = await resolving.resolve(connection, there, {each: encode(answers) for each in _ids(asked_there)})
    stored = await connection.resolutions.find_one({"_id": f"{there}/1"})
    assert stored is not None
    assert receipt.answers_digest == stored["answers_digest"] == told["answers_digest"]
    assert receipt.resolved_at == told["resolved_at"]
    assert (await heads.get(connection, there)).status is RunStatus.READY


async def test_the_same_answer_again_gives_the_same_receipt(connection: Connection, appender: Appender, run_id: str, mongosh: Mongosh) -> None:
    """Whether the first came from mongosh or from Python; another answer is refused, and the first one stands."""
    for number, is_here_first in enumerate((True, False)):
        run = f"{run_id}-{number}"
        (activity_id,) = _ids(await _suspended(connection, appender, run))
        plain = {activity_id: encode({"a": [1, 2.5]})}
        if is_here_first:
            await resolving.resolve(connection, run, plain)
        first, again = (mongosh.value(f"durable.answer({json.dumps(run)}, {{a: [1, 2.5]}})") for _ in range(2))
        receipt = await resolving.resolve(connection, run, plain)
        assert first == again
        assert (receipt.answers_digest, receipt.resolved_at) == (first["answers_digest"], first["resolved_at"])
        with pytest.raises(MongoshError) as refused:
            mongosh.value(f"durable.answer({json.dumps(run)}, {{a: [1, 2]}})")
        assert (refused.value.name, refused.value.code) == ("ResolutionConflict", "resolution_conflict")
        with pytest.raises(ResolutionConflict):
            await resolving.resolve(connection, run, {activity_id: encode(False)})
        assert (await read_history(connection, run))[-1].data["answers"] == plain


@pytest.mark.parametrize("answer", ["null", "false", "0", '""', "[]", "{}", '{"act_x": 1}', "Double(1)"])
async def test_any_value_is_an_answer(connection: Connection, appender: Appender, run_id: str, mongosh: Mongosh, answer: str) -> None:
    """Empty ones too: what is given is what the code gets."""
    frontier = await _suspended(connection, appender, run_id)
    mongosh.value(f"durable.answer({json.dumps(run_id)}, {answer})")
    (given,) = (await read_history(connection, run_id))[-1].data["answers"].values()
    value = 1.0 if answer == "Double(1)" else json.loads(answer)
    assert (given, type(given)) == (value, type(value))
    assert (await frontiers.get(connection, run_id, frontier.generation)).status == "resolved"  # type: ignore[union-attr]


async def test_what_is_not_the_whole_answer_is_refused(connection: Connection, appender: Appender, run_id: str, mongosh: Mongosh) -> None:
    """Fewer, more, unknown, misshapen, out of date, not fitting: each refusal has the library's name, and nothing is written."""
    only_x = {"type": "object", "properties": {"$x": {"type": "boolean"}}, "required": ["$x"], "additionalProperties": False}
    frontier = await _suspended(connection, appender, run_id, only_x, None)
    one, two = _ids(frontier)
    whole = f'{one}: {{"$x": true}}, {two}: 1'
    before = await _documents(connection, run_id)
    refused = {
        f"{{{one}: 1}}": "IncompleteResolution",
        f"{{{whole}, act_x: 1}}": "IncompleteResolution",
        "{act_x: 1}": "UnknownActivity",
        "{}": "IncompleteResolution",
        "[1, 2]": "IncompleteResolution",
        "true": "IncompleteResolution",
        f"{{{one}: {{}}, {two}: 1}}": "InvalidAnswer",
        f'{{{one}: {{"$x": 1}}, {two}: 1}}': "InvalidAnswer",
        f'{{{one}: {{"$x": true, y: 1}}, {two}: 1}}': "InvalidAnswer",
        f'{{{one}: {{"$x": true}}, {two}: undefined}}': "NotJsonSafe",
        f'{{{one}: {{"$x": true}}, {two}: "x".repeat(270000)}}': "PayloadTooLarge",
        f"{{{whole}}}, {{generation: 2}}": "StaleGeneration",
        f'{{{whole}}}, {{digest: "{"0" * 32}"}}': "StaleGeneration",
        f"{{{whole}}}, {{resolved_by: 'ada'}}": "ConfigurationError",
        f"{{{whole}}}, {{by: 7}}": "ConfigurationError",
    }
    calls = ", ".join(f"() => durable.resolve({json.dumps(run_id)}, {arguments})" for arguments in refused)
    names = mongosh.value(f"[{calls}].map((call) => {{ try {{ call(); return null }} catch (error) {{ return error.name }} }})")
    assert dict(zip(refused, names, strict=True)) == refused
    with pytest.raises(MongoshError, match="2 open questions"):
        mongosh.value(f"durable.answer({json.dumps(run_id)}, 1)")
    assert await _documents(connection, run_id) == before
    pinned = f"{{generation: {frontier.generation}, digest: {json.dumps(frontier.digest)}}}"
    mongosh.value(f"durable.resolve({json.dumps(run_id)}, {{{whole}}}, {pinned})")


async def test_an_encrypted_question_is_not_answered(connection: Connection, appender: Appender, run_id: str, mongosh: Mongosh) -> None:
    """Nobody can know what is asked, and the answer would stand there unencrypted: it is refused, with what to use instead."""
    sealed = {"__type__": "encrypted:value", "value": {"key": "2026-11", "data": b"sealed"}}
    attempt = await Attempt.submit(connection, appender, run_id)
    stored = await attempt.suspend(replace(question(run_id, 1), value=sealed))
    with pytest.raises(MongoshError, match=r"encrypted with key .*MONGO_DURABLE_KEYS"):
        mongosh.value(f"durable.answer({json.dumps(run_id)}, true)")
    assert (await heads.get(connection, run_id)).status is RunStatus.SUSPENDED
    assert f'{stored.entries[0].activity_id}  approval asks (encrypted with key "2026-11")' in mongosh.shown(f"durable.show({json.dumps(run_id)})")


async def test_a_run_that_waits_for_no_answer_is_told_so(connection: Connection, appender: Appender, run_id: str, mongosh: Mongosh) -> None:
    """Unknown, not suspended, cancelled, expired: the library's errors, by name."""
    attempt = await Attempt.submit(connection, appender, f"{run_id}-runs")
    await _suspended(connection, appender, f"{run_id}-dropped")
    await runs.cancel(connection, f"{run_id}-dropped", None, "operator")
    await _suspended(connection, appender, f"{run_id}-late", expires_in=timedelta(milliseconds=-1))
    for name, error in (("gone", "RunNotFound"), ("runs", "RunNotSuspended"), ("dropped", "RunNotSuspended"), ("late", "FrontierExpired")):
        with pytest.raises(MongoshError) as refused:
            mongosh.value(f"durable.answer({json.dumps(f'{run_id}-{name}')}, 1)")
        assert refused.value.name == error
    assert (await heads.get(connection, attempt.run_id)).status is RunStatus.RUNNING


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("insert", {"errorCode": 112, "errorLabels": ["TransientTransactionError"]}),
        ("commitTransaction", {"errorCode": 251, "errorLabels": ["TransientTransactionError"]}),
        ("commitTransaction", {"writeConcernError": {"code": 64, "errmsg": "no majority in time"}}),
    ],
    ids=["write conflict", "lost before the commit", "commit without an answer"],
)
async def test_what_the_server_calls_transient_is_tried_again(
    connection: Connection, appender: Appender, run_id: str, mongosh: Mongosh, mongo_uri: str, command: str, fault: dict[str, Any]
) -> None:
    """A person sees nothing of it: the answer is recorded once."""
    await _suspended(connection, appender, run_id)
    with failing(mongo_uri, [command], appname=mongosh.appname, mode={"times": 1}, **fault) as strikes:
        mongosh.value(f"durable.answer({json.dumps(run_id)}, true)")
        assert strikes() == 1
    assert await connection.resolutions.count_documents({"run_id": run_id}) == 1
    assert [each.seq for each in await read_history(connection, run_id)] == [1, 2, 3, 4]


async def test_answers_from_mongosh_leave_a_sound_database(connection: Connection, mongosh: Mongosh, mongo_uri: str, database: str) -> None:
    """A run that is answered from mongosh twice and ends well: the checker of the invariants has nothing to object to."""
    own = Connection(connection.client, database, is_owned=False)
    await schema.ensure_schema(own)
    appender = Appender(own)
    mongosh.shown(f"use {database}")
    await _suspended(own, appender, "po-17")
    for number in (1, 2):
        mongosh.value(f'durable.answer("po-17", {number})')
        again = await Attempt.start(own, appender, "po-17")
        if number == 1:
            await again.suspend(question("po-17", 2))
    await again.end(output="done")
    assert_invariants(mongo_uri, database)
    await own.aclose()
