"""Large values, and the values that are easily taken for something else."""

from __future__ import annotations

from typing import Any

import pytest

from mongo_durable.errors import CorruptHistory
from mongo_durable.protocol.values import decode, encode
from mongo_durable.store import frontiers, heads, payloads, runs
from mongo_durable.store.appender import Appender
from mongo_durable.store.connection import Connection
from mongo_durable.store.events import read_history
from mongo_durable.store.runs import ThreadState
from tests.store.conftest import Commands
from tests.support.attempts import Attempt, answers, question

MANY_MB = 17 * 1024 * 1024

ODD_VALUES = [
    {},
    None,
    0,
    "",
    False,
    [],
    {"a.b": 1, "$x": 2},
    {"0123456789abcdef0123456789abcdef": {"answer": True}},
    {"__type__": "payload", "value": {"digest": "0" * 32, "size": 1, "chunks": 1}},
    1 << 80,
    b"\x00\xff",
    (1, {2, 3}),
]


def large(size: int = MANY_MB) -> dict[str, Any]:
    """A value of more than a MongoDB document can hold."""
    return {"text": "0123456789abcdef" * (size // 16), "n": 1}


async def test_an_event_of_17_mb(connection: Connection, appender: Appender, run_id: str) -> None:
    """A result that no document could hold is recorded and read back exactly."""
    attempt = await Attempt.submit(connection, appender, run_id)
    await attempt.started(1)
    await attempt.completed(1, await payloads.move_out(connection, run_id, large()))
    history = await read_history(connection, run_id)
    assert history[-1].value == large()


async def test_an_answer_of_17_mb(connection: Connection, appender: Appender, run_id: str) -> None:
    """A person may answer with a file; the receipt is repeated for the same one."""
    attempt = await Attempt.submit(connection, appender, run_id)
    frontier = await attempt.suspend()
    receipt = await frontiers.resolve(connection, frontier, answers(frontier, large()))
    assert await frontiers.resolve(connection, frontier, answers(frontier, large())) == receipt
    history = await read_history(connection, run_id)
    assert history[-1].data["answers"] == answers(frontier, large())


async def test_input_output_and_thread_state_of_17_mb(connection: Connection, appender: Appender, run_id: str) -> None:
    """So may be what a run starts from, what it returns, and what its thread keeps."""
    attempt = await Attempt.submit(connection, appender, run_id, value=large())
    state = ThreadState(serde_type="msgpack", data=b"01234567" * (MANY_MB // 8))
    await attempt.end(output=large(), state=state)
    head = await heads.get(connection, run_id)
    assert head.input == large()
    assert head.output == large()
    following = await Attempt.submit(connection, appender, f"{run_id}-2", thread_id=run_id)
    assert await runs.thread_state(connection, run_id, following.claim.head.base_turn) == state


async def test_a_frontier_of_many_medium_questions(connection: Connection, appender: Appender, run_id: str) -> None:
    """Questions that are small enough each, and too much for one document together, make one frontier."""
    attempt = await Attempt.submit(connection, appender, run_id)
    asked = [question(run_id, number, "x" * 200_000 + str(number)) for number in range(100)]
    stored = await attempt.suspend(*asked)
    assert [entry.value for entry in stored.entries] == [entry.value for entry in asked]
    (found,) = await frontiers.open_frontiers(connection, run_id=run_id)
    assert found == stored
    given = {entry.activity_id: "y" * 200_000 + str(number) for number, entry in enumerate(stored.entries)}
    await frontiers.resolve(connection, found, given)
    assert (await read_history(connection, run_id))[-1].data["answers"] == given


async def test_a_small_value_stays_in_its_document(connection: Connection, run_id: str, commands: Commands) -> None:
    """Up to 256 KB a value costs no further write or read."""
    value = "x" * (payloads.INLINE_LIMIT - 20)
    commands.forget()
    assert await payloads.move_out(connection, run_id, value) is value
    assert await payloads.bring_in(connection, run_id, [value]) == [value]
    assert commands.sent == []


async def test_many_references_are_one_query(connection: Connection, run_id: str, commands: Commands) -> None:
    """Reading brings all large values in at once, and no two places share an object."""
    values = [large(300_000 + number) for number in range(5)]
    stored = [await payloads.move_out(connection, run_id, value) for value in values]
    commands.forget()
    found = await payloads.bring_in(connection, run_id, [*stored, stored[0], "small"])
    assert found == [*values, values[0], "small"]
    assert found[0] is not found[5]
    assert commands.counted() == {("find", "payloads"): 1}


async def test_writing_a_value_again_changes_nothing(connection: Connection, run_id: str) -> None:
    """A repeated attempt writes the same chunks; they are there once."""
    first = await payloads.move_out(connection, run_id, large(3_000_000))
    count = await connection.payloads.count_documents({"run_id": run_id})
    assert await payloads.move_out(connection, run_id, large(3_000_000)) == first
    assert await connection.payloads.count_documents({"run_id": run_id}) == count == 3


@pytest.mark.parametrize("damage", ["missing", "changed"])
async def test_a_damaged_value_is_never_returned(damage: str, connection: Connection, run_id: str) -> None:
    """A chunk that is missing or was changed is a corrupt history, not a shorter value."""
    reference = await payloads.move_out(connection, run_id, large(3_000_000))
    chunk = {"run_id": run_id, "n": 1}
    if damage == "missing":
        await connection.payloads.delete_one(chunk)
    else:
        await connection.payloads.update_one(chunk, {"$set": {"data": b"else"}})
    with pytest.raises(CorruptHistory):
        await payloads.bring_in(connection, run_id, [reference])


@pytest.mark.parametrize("value", ODD_VALUES, ids=repr)
async def test_a_value_is_read_as_it_was_written(value: Any, connection: Connection, appender: Appender, run_id: str) -> None:
    """Whatever the value, it comes back exactly from every place that can hold one."""
    attempt = await Attempt.submit(connection, appender, run_id, value=value)
    await attempt.started(1, encode(value))
    await attempt.completed(1, encode(value))
    frontier = await attempt.suspend(question(run_id, 2, value))
    await frontiers.resolve(connection, frontier, answers(frontier, value))
    again = await Attempt.start(connection, appender, run_id)
    await again.end(output=encode(value))
    head, history = await heads.get(connection, run_id), await read_history(connection, run_id)
    stored = await frontiers.get(connection, run_id, 1)
    assert stored is not None
    answer = next(each.data["answers"] for each in history if "answers" in each.data)[frontier.entries[0].activity_id]
    values = [each.value for each in history if each.type in ("run.submitted", "activity.started", "activity.completed", "run.completed")]
    for plain in [head.input, head.output, stored.entries[0].value, answer, *values]:
        found = decode(plain)
        assert found == value
        assert type(found) is type(value)
