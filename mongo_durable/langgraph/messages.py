"""Message identity: ids that are the same in every attempt, and the semantic input of a model call.

LangChain invents ids anew in each attempt (`lc_run--<random>` for answers, uuid4 in `add_messages`). Two things follow. Recorded outcomes carry
ids that derive from the position, set on our own copies; and the digest of a model call's input leaves out what is no part of its meaning: ids,
usage, metadata.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langgraph.types import Command
from pydantic import BaseModel

from mongo_durable.errors import NotJsonSafe
from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.values import encode


def message_id(*parts: object) -> str:
    """A message id that derives from `parts` alone."""
    return "md-" + hashlib.blake2b("\0".join(str(part) for part in parts).encode(), digest_size=10).hexdigest()


def stamp(value: Any, base: str) -> None:
    """Give every message without an id in `value` (a message, a list, a dict of lists, a Command) one that derives from `base` and its place.

    `value` must be our own copy: objects of the caller are never changed.
    """
    if isinstance(value, BaseMessage):
        if value.id is None:
            value.id = message_id(base)
    elif isinstance(value, Command):
        stamp(value.update, base)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            stamp(each, f"{base}:{key}")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            stamp(each, f"{base}:{index}")


def semantic_message(message: BaseMessage) -> dict[str, Any]:
    """What a message means to a model: no id, no usage, no metadata."""
    meaning: dict[str, Any] = {"type": message.type, "content": _without_generated_ids(message.content), "name": message.name}
    if isinstance(message, AIMessage):
        meaning["tool_calls"] = [{"name": call["name"], "args": call["args"], "id": call["id"]} for call in message.tool_calls]
    if isinstance(message, ToolMessage):
        meaning["tool_call_id"] = message.tool_call_id
        meaning["status"] = message.status
    return meaning


def _without_generated_ids(content: Any) -> Any:
    if isinstance(content, list):
        return [_without_generated_ids(block) for block in content]
    if isinstance(content, Mapping):
        return {
            name: _without_generated_ids(each)
            for name, each in content.items()
            if not (name == "id" and isinstance(each, str) and each.startswith("lc_"))
        }
    return content


def message_digests(messages: Iterable[BaseMessage]) -> tuple[str, ...]:
    """The digest of what each message means."""
    return tuple(digest(encode(semantic_message(message))) for message in messages)


def semantic_input(digests: Iterable[str], stop: list[str] | None, options: Mapping[str, Any]) -> Any:
    """The plain value whose digest identifies a model call: messages, stop words and call options (tools, response format, …)."""
    return [list(digests), stop, meaning(options)]


def meaning(value: Any) -> Any:
    """A plain value for the digest of anything: types stand for their name and schema, unknown objects for their type."""
    if isinstance(value, type):
        schema = value.model_json_schema() if issubclass(value, BaseModel) else None
        return {"class": value.__qualname__, "schema": meaning(schema)}
    if isinstance(value, BaseMessage):
        return meaning(semantic_message(value))
    if isinstance(value, BaseModel):
        return {"class": type(value).__qualname__, "fields": {name: meaning(getattr(value, name)) for name in type(value).model_fields}}
    if isinstance(value, Mapping):
        return {str(key): meaning(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [meaning(each) for each in value]
    try:
        return encode(value)
    except NotJsonSafe:
        return {"class": f"{type(value).__module__}.{type(value).__qualname__}"}
