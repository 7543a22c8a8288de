"""What is stored of LangChain's objects comes back exactly; what cannot is refused by its path."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import bson
import pytest
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    ChatMessageChunk,
    FunctionMessage,
    FunctionMessageChunk,
    HumanMessage,
    HumanMessageChunk,
    RemoveMessage,
    SystemMessage,
    SystemMessageChunk,
    ToolMessage,
    ToolMessageChunk,
)
from langchain_core.tools import ToolException
from langgraph.types import Command, Overwrite, Send
from pydantic import BaseModel, Field

from mongo_durable.errors import ActivityFailed, ConfigurationError, NotJsonSafe, PayloadError
from mongo_durable.langgraph.codec import Codec


class Colour(enum.Enum):
    """An application's enum."""

    RED = "red"


@dataclasses.dataclass
class Order:
    """An application's dataclass."""

    item: str
    colours: list[Colour]
    note: BaseMessage | None = None


class Invoice(BaseModel):
    """An application's model."""

    model_config = {"extra": "allow"}

    number: int
    order: Order
    tags: set[str] = Field(default_factory=set)


class Refused(Exception):
    """An application's error, made from one text."""


class Odd(Exception):
    """An error that is not made from one text."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(code, why)


USAGE: Any = {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7, "input_token_details": {"cache_read": 1}}
MESSAGES: dict[str, BaseMessage] = {
    "human": HumanMessage("hi", id="h1", name="Ada"),
    "human with blocks": HumanMessage([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]),
    "system": SystemMessage("be brief", additional_kwargs={"cache": {"type": "ephemeral"}}),
    "ai": AIMessage("yes", id="a1"),
    "ai with everything": AIMessage(
        [{"type": "text", "text": "calling", "annotations": []}, {"type": "reasoning", "reasoning": "because"}],
        tool_calls=[{"name": "pay", "args": {"amount": 1.5, "to": {"a.b": "$x"}}, "id": "c1", "type": "tool_call"}],
        invalid_tool_calls=[{"name": "pay", "args": "{not json", "id": "c2", "error": "bad", "type": "invalid_tool_call"}],
        usage_metadata=USAGE,
        response_metadata={"model_name": "m", "finish_reason": "tool_calls", "logprobs": None},
        additional_kwargs={"refusal": None, "tool_calls": [{"id": "c1", "function": {"arguments": "{}", "name": "pay"}}]},
    ),
    "ai chunk": AIMessageChunk(
        "par",
        id="run-1",
        tool_call_chunks=[{"name": "pay", "args": '{"amount": 1}', "id": "c1", "index": 0, "type": "tool_call_chunk"}],
        usage_metadata=USAGE,
        chunk_position="last",
    ),
    "tool": ToolMessage("10", tool_call_id="c1", name="quote", id="t1"),
    "tool with artifact and status": ToolMessage([{"type": "text", "text": "10"}], tool_call_id="c1", artifact={"raw": [1, (2, 3)]}, status="error"),
    "chat": ChatMessage("psst", role="whisperer"),
    "function": FunctionMessage("10", name="quote"),
    "remove": RemoveMessage(id="a1"),
    "human chunk": HumanMessageChunk("hi", id="h1"),
    "tool chunk": ToolMessageChunk("10", tool_call_id="c1", status="error"),
    "system chunk": SystemMessageChunk("be brief"),
    "chat chunk": ChatMessageChunk("psst", role="whisperer"),
    "function chunk": FunctionMessageChunk("10", name="quote"),
}


def through_the_database(codec: Codec, value: Any) -> Any:
    """Encoded, as BSON, and back."""
    return codec.decode(bson.decode(bson.encode({"value": codec.encode(value)}))["value"])


@pytest.mark.parametrize("what", MESSAGES)
def test_a_message_comes_back_exactly(what: str) -> None:
    """Class, content, ids, tool calls, usage and metadata: equal in every field."""
    message = MESSAGES[what]
    back = through_the_database(Codec(), message)
    assert type(back) is type(message)
    assert back.model_dump() == message.model_dump()
    assert back is not message


VALUES: dict[str, Any] = {
    "Command": Command(goto="next", update={"messages": [AIMessage("x", id="1")], "n": 1}),
    "Command to its parent, with Sends": Command(graph=Command.PARENT, goto=[Send("w", {"x": 1}), "other"], resume={"id": None}),
    "Send": Send("worker", {"messages": [HumanMessage("x", id="1")], "pair": (1, 2)}),
    "Overwrite": Overwrite([1, 2]),
    "Document": Document("text", id="d1", metadata={"source": "a.b", "score": 0.5}),
    "nested": {"a": [{"b.c": (HumanMessage("x", id="1"), {1, 2})}], "$d": None},
    "list of Commands": [Command(update={"a": 1}), ToolMessage("x", tool_call_id="c", id="1")],
}


@pytest.mark.parametrize("what", VALUES)
def test_langgraphs_values_come_back_exactly(what: str) -> None:
    """Command, Send, Overwrite, Document, and plain containers around them."""
    value = VALUES[what]
    back = through_the_database(Codec(), value)
    assert type(back) is type(value)
    assert back == value


APPLICATION: dict[str, Any] = {
    "enum": Colour.RED,
    "dataclass": Order("desk", [Colour.RED], HumanMessage("x", id="1")),
    "pydantic": Invoice(number=1, order=Order("desk", []), tags={"a"}, extra="kept"),  # type: ignore[call-arg]
    "in a message": {"messages": [ToolMessage("x", tool_call_id="c", id="1", artifact=Order("desk", [Colour.RED]))]},
}


@pytest.mark.parametrize("what", APPLICATION)
def test_a_registered_type_comes_back(what: str) -> None:
    """Pydantic models, dataclasses and enums that the application names."""
    value = APPLICATION[what]
    back = through_the_database(Codec([Colour, Order, Invoice]), value)
    assert type(back) is type(value)
    assert back == value


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"order": Order("desk", [])}, "$.order"),
        ({"messages": [ToolMessage("x", tool_call_id="c", artifact={"raw": object()})]}, "$.messages[0]"),
        ([1, Colour.RED], "$[1]"),
        ({"call": Command(update={"when": object()})}, "$.call"),
    ],
)
def test_what_is_not_registered_is_refused_by_its_path(value: Any, path: str) -> None:
    """Before anything is written, the error says where the value stands and what type it has."""
    with pytest.raises(NotJsonSafe) as raised:
        Codec().encode(value)
    assert raised.value.path.startswith(path)
    assert path in str(raised.value)


def test_a_stored_type_that_is_not_registered_here_is_refused() -> None:
    """A name in the database never makes a module load."""
    stored = Codec([Colour]).encode(Colour.RED)
    with pytest.raises(PayloadError, match="register it"):
        Codec().decode(stored)


def test_only_types_with_a_known_way_back_can_be_registered() -> None:
    """Anything else is refused when the app is made."""
    with pytest.raises(ConfigurationError, match="Pydantic models"):
        Codec([object])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no"), ValueError("no")),
        (KeyError("no"), None),
        (ToolException("no"), ToolException("no")),
        (Refused("no"), Refused("no")),
        (Odd(1, "no"), None),
        (TimeoutError(), TimeoutError()),
    ],
)
def test_a_recorded_failure_is_raised_as_the_same_type_and_text(error: Exception, expected: Exception | None) -> None:
    """Built-in, LangChain's and registered exceptions keep their type where their text makes them; any other is an ActivityFailed with both."""
    codec = Codec([Refused, Odd])
    rebuilt = codec.rebuild_error(codec.describe_error(error))
    if expected is not None:
        assert type(rebuilt) is type(expected)
        assert str(rebuilt) == str(expected)
    else:
        assert isinstance(rebuilt, ActivityFailed)
        assert type(error).__qualname__ in str(rebuilt)
        assert str(error) in str(rebuilt)


def test_a_failure_that_came_back_is_described_as_before() -> None:
    """Recording a replayed failure again would record the same."""
    codec = Codec()
    described = codec.describe_error(Odd(1, "no"))
    assert codec.describe_error(codec.rebuild_error(described)) == described
