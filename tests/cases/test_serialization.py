"""Values on their way through the database: exactly, or refused; nothing in the database loads code."""

from __future__ import annotations

import dataclasses
import enum
import math
import pickletools
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pymongo
import pytest
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langgraph.types import Command, interrupt
from pydantic import BaseModel

import mongo_durable
from mongo_durable import App
from mongo_durable.errors import ActivityFailed, NotJsonSafe, PayloadError
from mongo_durable.protocol.events import EventType
from tests.cases.workshop import Make, Workshop, chain
from tests.langgraph.kit import State


class Colour(enum.Enum):
    """An enum of the application."""

    RED = "red"
    BLUE = "blue"


class Order(BaseModel):
    """A model of the application."""

    item: str
    number: int = 1


@dataclasses.dataclass
class Parcel:
    """A dataclass of the application."""

    order: Order
    colours: list[Colour]


VALUES: dict[str, Any] = {
    "awkward keys": {"a.b": 1, "$x": 2, "": 3, "\0": 4, "__type__": 5, 7: 8, None: 9, (1, 2): 10},
    "awkward keys inside": [{"deep": {"$set": {"a.b": [{"": {}}]}}}],
    "large integers": [2**70, -(2**70), 2**63, 2**63 - 1, -(2**63), 10**400],
    "floats": [math.nan, math.inf, -math.inf, -0.0, 0.1, 5e-324],
    "moments": [datetime(2024, 2, 29, 12, 30, 15, 123456, UTC), datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=45)))],
    "naive moments": [
        datetime.fromisoformat("2024-01-01T00:00:00.000001"),
        date(2024, 2, 29),
        time(23, 59, 59, 999999),
        timedelta(days=-1, microseconds=1),
    ],
    "bytes": [b"", b"\x00\xff\x80", bytes(range(256))],
    "tuples and sets": [(1, (2, ())), {1, 2, 3}, frozenset({"a"}), [], set(), {}],
    "texts": ["\0", "\ud800", "𝄞", "é", "é", "a" * 3],
    "truth beside numbers": [True, 1, 1.0, False, 0, 0.0, None],
    "decimals": [Decimal("1.10"), Decimal("NaN"), Decimal("-0")],
    "enums, models and dataclasses": [Colour.RED, Order(item="desk", number=2), Parcel(Order(item="chair"), [Colour.BLUE])],
}
TYPES: tuple[type, ...] = (Colour, Order, Parcel)


def everywhere(workshop: Workshop) -> Make:
    """A run that takes a value from its input through an activity, a tool, a question and an answer to its output."""

    def make(app: App) -> Any:
        steps = _steps(workshop, app)

        async def node(state: State) -> State:
            return {"lines": await steps(state["work"])}

        return chain(node=node)

    return make


def _steps(workshop: Workshop, app: App) -> Any:
    effects = _effects(workshop, app)

    async def steps(value: Any) -> list[Any]:
        return [*await effects(value), interrupt(value)]

    return steps


def _effects(workshop: Workshop, app: App) -> Any:
    effect = workshop.effect(app)

    @app.tool(idempotent=True)
    async def pack(what: Any) -> Any:
        """Pack something."""
        return [what]

    async def effects(value: Any) -> list[Any]:
        through = await effect(value)
        (packed,) = await pack.ainvoke({"what": value})
        return [through, packed]

    return effects


def exactly(value: Any) -> Any:
    """Types, order and bits of a value, for comparing: NaN equals itself, True is not 1."""
    if isinstance(value, dict):
        return {"dict": [(exactly(key), exactly(each)) for key, each in value.items()]}
    if isinstance(value, set | frozenset):
        return (type(value).__name__, sorted(map(repr, value)))
    if isinstance(value, list | tuple):
        return (type(value).__name__, [exactly(each) for each in value])
    if isinstance(value, BaseModel | Parcel):
        return (type(value).__name__, exactly(dict(vars(value))))
    return (type(value).__name__, repr(value))


@pytest.mark.parametrize("what", VALUES)
async def test_a_value_comes_back_exactly_from_effects(what: str, workshop: Workshop) -> None:
    """CASES 72: what plain BSON cannot hold comes back from activities and tools the same in type, order and bits, in every attempt."""
    value = VALUES[what]
    got: list[Any] = []

    def make(app: App) -> Any:
        effects = _effects(workshop, app)

        @app.activity(idempotent=True)
        async def give() -> Any:
            workshop.ran["give"] += 1
            return value

        async def node(state: State) -> State:
            given = await give()
            got.extend([given, *await effects(given)])
            return {"lines": [interrupt("seen?")]}

        return chain(node=node)

    await workshop.complete(make, {"lines": []}, lambda _: "yes", types=TYPES)
    assert len(got) >= 6
    assert [exactly(each) for each in got] == [exactly(value)] * len(got)
    assert workshop.ran == {"give": 1, str(value): 1}
    async with workshop.client(codec=workshop.app(make, types=TYPES).codec) as client:
        history = await client.history(workshop.run())
    shown = [event.value for event in history if event.type is EventType.ACTIVITY_STARTED]
    assert [exactly(each) for each in (shown[1]["what"], shown[2]["what"])] == [exactly(value)] * 2
    recorded = [event.value for event in history if event.type is EventType.ACTIVITY_COMPLETED]
    assert [exactly(each) for each in (recorded[0], recorded[1], recorded[2][0])] == [exactly(value)] * 3


@pytest.mark.parametrize("what", VALUES)
async def test_a_value_comes_back_exactly_as_an_answer(what: str, workshop: Workshop) -> None:
    """CASES 72: the same for what a question shows and what its answer is, in a node and in a tool."""
    value = VALUES[what]
    got: list[Any] = []

    def make(app: App) -> Any:
        @app.tool(idempotent=True)
        async def ask() -> str:
            """Ask a person."""
            got.append(interrupt(value))
            return "heard"

        async def node(state: State) -> State:
            got.append(interrupt(value))
            return {"lines": [await ask.ainvoke({})]}

        return chain(node=node)

    out = await workshop.once(make, {"lines": []}, types=TYPES)
    while "__interrupt__" in out:
        [question] = out["__interrupt__"]
        got.append(question.value)
        out = await workshop.once(make, Command(resume={question.id: value}), types=TYPES)
    assert [exactly(each) for each in got] == [exactly(value)] * len(got)


@pytest.mark.parametrize("what", VALUES)
async def test_a_value_in_the_state_comes_back_exactly(what: str, workshop: Workshop, request: pytest.FixtureRequest) -> None:
    """CASES 72: the same for a value that a run is given, keeps in its graph's state over a question, and ends with."""
    if what == "floats":
        # The output is compared with the history's, when the shared database is checked at the end: a NaN equals nothing.
        workshop.database = request.getfixturevalue("database")
    value = VALUES[what]
    out = await workshop.complete(everywhere(workshop), {"lines": [], "work": value}, lambda asked: asked, types=TYPES)
    assert [exactly(each) for each in out["lines"]] == [exactly(value)] * 3
    async with workshop.client(codec=workshop.app(everywhere(workshop), types=TYPES).codec) as client:
        snapshot = await client.get_run(workshop.run())
        assert exactly(snapshot.output["lines"]) == exactly([value] * 3)
        first = (await client.history(workshop.run()))[0]
    assert exactly(first.value["work"]) == exactly(value)


class Unknown:
    """What nobody registered."""


@pytest.mark.parametrize(
    "value", [object(), Unknown(), Order(item="desk"), lambda: None, Exception("text"), 1j], ids=lambda each: type(each).__name__
)
async def test_an_unknown_type_is_refused_where_it_is_given(value: Any, workshop: Workshop) -> None:
    """CASES 74: a value of a type that nobody registered is refused at record time, by place and type, in input, result and answer alike."""
    with pytest.raises(NotJsonSafe) as refused:
        await workshop.once(everywhere(workshop), {"lines": [], "work": {"deep": [value]}})
    assert refused.value.path == "$.work.deep[0]"
    assert type(value).__name__ in refused.value.type
    async with workshop.client() as client:
        assert await client.list_runs(workflow=workshop.name) == []

    def make(app: App) -> Any:
        @app.activity
        async def give() -> Any:
            workshop.ran["give"] += 1
            return {"result": value}

        async def node(state: State) -> State:
            return {"lines": [await give()]}

        return chain(node=node)

    with pytest.raises(NotJsonSafe, match="result"):
        await workshop.once(make, {"lines": []}, "result")
    assert await workshop.history("result", EventType.ACTIVITY_COMPLETED) == []


async def test_a_registered_type_stays_what_it_is(workshop: Workshop) -> None:
    """CASES 74: a registered model is a model again, never a dict; where it is not registered, its name in the database is only a name."""
    out = await workshop.complete(everywhere(workshop), {"lines": [], "work": Order(item="desk")}, lambda asked: asked, types=TYPES)
    assert [type(each) for each in out["lines"]] == [Order] * 3
    async with workshop.client(codec=workshop.app(everywhere(workshop)).codec) as client:
        with pytest.raises(PayloadError, match=r"App\(types="):
            await client.get_run(workshop.run())


async def test_a_name_in_the_database_loads_no_module(workshop: Workshop) -> None:
    """CASES 74: a stored value that claims a type by the name of a module that is not loaded is refused, and nothing is imported."""
    module = "this_module_is_not_there"
    await workshop.once(everywhere(workshop), {"lines": [], "work": "x"})
    forged = {"__type__": "app:type", "value": {"name": f"{module}.Thing", "value": {}}}
    before = set(sys.modules)
    codec = workshop.app(everywhere(workshop)).codec
    for tag in (forged, {"__type__": "python:os.system", "value": "true"}, {"__type__": "langchain:message", "value": {"type": "os", "content": ""}}):
        with pytest.raises((PayloadError, KeyError)):
            codec.decode(tag)
    assert set(sys.modules) == before


async def test_there_is_no_pickle(workshop: Workshop, database: str) -> None:
    """CASES 75: no byte string in the database is a pickle, whatever went through it, and the library imports no module that makes or reads one."""
    workshop.database = database
    await workshop.complete(everywhere(workshop), {"lines": [], "work": VALUES}, lambda asked: asked, types=TYPES)
    with pymongo.MongoClient(workshop.uri) as client:
        stored = [document for name in client[database].list_collection_names() for document in client[database][name].find()]
    found = [each for document in stored for each in byte_strings(document)]
    assert found, "the thread's state is bytes"
    assert not any(map(is_pickle, found))
    for source in Path(mongo_durable.__file__).parent.rglob("*.py"):
        lines = source.read_text().splitlines()
        assert not any(
            line.strip().startswith((f"import {name}", f"from {name}")) for line in lines for name in ("pickle", "dill", "marshal", "shelve")
        )


def byte_strings(value: Any) -> Iterator[bytes]:
    """All byte strings in a document."""
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from byte_strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from byte_strings(each)


def is_pickle(found: bytes) -> bool:
    """Whether bytes are a pickle of a protocol that is still written."""
    if not found.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return False
    try:
        return any(opcode.name == "STOP" for opcode, _, _ in pickletools.genops(found))
    except ValueError:
        return False


MESSAGES: list[BaseMessage] = [
    HumanMessage("text", name="somebody", additional_kwargs={"x": {"a.b": 1}}),
    HumanMessage([{"type": "text", "text": "blocks"}, {"type": "image_url", "image_url": {"url": "data:,"}}]),
    AIMessage(
        [{"type": "text", "text": "thinking", "index": 0}],
        tool_calls=[{"name": "pay", "args": {"amount": 7, "to": {"$id": [1, None]}}, "id": "call-1"}, {"name": "look", "args": {}, "id": "call-2"}],
        invalid_tool_calls=[{"name": "broken", "args": "{", "id": "call-3", "error": "no json"}],
        usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
        response_metadata={"model": "m", "finish_reason": "tool_calls"},
    ),
    AIMessageChunk("part", tool_call_chunks=[{"name": "pay", "args": '{"amount": 7}', "id": "call-1", "index": 0}]),
    SystemMessage("rules"),
    ToolMessage("paid", tool_call_id="call-1", artifact={"receipt": [1, {"a.b": b"\x00"}]}, status="error", name="pay"),
    ChatMessage("said", role="critic"),
    FunctionMessage("result", name="function"),
    RemoveMessage(id="message-1"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
async def test_every_message_class_comes_back(message: BaseMessage, workshop: Workshop) -> None:
    """CASES 103: a message of each class goes through input, effects, questions and output with everything that it has, tool calls above all."""
    message.id = message.id or "message-7"
    out = await workshop.complete(everywhere(workshop), {"lines": [], "work": message}, lambda asked: asked)
    for each in out["lines"]:
        assert type(each) is type(message)
        assert each.model_dump() == message.model_dump()
    document = Document("page", metadata={"source": "x", "message": 1})
    again = await workshop.complete(everywhere(workshop), {"lines": [], "work": [document]}, lambda asked: asked, 2)
    assert again["lines"] == [[document]] * 3


async def test_a_recorded_failure_needs_no_class(workshop: Workshop) -> None:
    """CASES 75: a failure of a type that only its raiser knows is recorded by name and message, and raised again as such in every attempt."""

    class OutOfStock(Exception):
        """Of the application."""

    seen: Counter[str] = Counter()

    def make(app: App) -> Any:
        @app.activity
        async def buy() -> None:
            workshop.ran["buy"] += 1
            raise OutOfStock("no desks")

        async def node(state: State) -> State:
            try:
                await buy()
            except ActivityFailed as error:
                seen[f"{error.error_type.rpartition('.')[2]}: {error.message.rpartition(': ')[2]}"] += 1
            return {"lines": [interrupt("what now?")]}

        return chain(node=node)

    out = await workshop.complete(make, {"lines": []}, lambda _: "wait")
    assert out["lines"] == ["wait"]
    assert workshop.ran == {"buy": 1}
    assert set(seen) == {"OutOfStock: no desks"}
