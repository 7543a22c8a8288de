"""LangChain and LangGraph objects as plain values, and back.

Only types that are named here or that the application registered (`App(types=[…])`) are stored; a name in the database never makes code run or a
module load.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

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
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mongo_durable.errors import OF_THE_CODE, ActivityFailed, ConfigurationError, DecryptionFailed, PayloadError
from mongo_durable.protocol.values import Tagged, decode, encode
from mongo_durable.store.sealing import SEALED_TYPE

_MESSAGES: dict[str, type[BaseMessage]] = {
    "human": HumanMessage,
    "ai": AIMessage,
    "ai_chunk": AIMessageChunk,
    "system": SystemMessage,
    "tool": ToolMessage,
    "chat": ChatMessage,
    "function": FunctionMessage,
    "remove": RemoveMessage,
    "human_chunk": HumanMessageChunk,
    "system_chunk": SystemMessageChunk,
    "tool_chunk": ToolMessageChunk,
    "chat_chunk": ChatMessageChunk,
    "function_chunk": FunctionMessageChunk,
}
_MESSAGE_NAMES = {kind: name for name, kind in _MESSAGES.items()}
_MESSAGE_TAG = "langchain:message"
_DOCUMENT_TAG = "langchain:document"
_COMMAND_TAG = "langgraph:command"
_SEND_TAG = "langgraph:send"
_OVERWRITE_TAG = "langgraph:overwrite"
_APPLICATION_TAG = "app:type"


class Codec:
    """Values of graphs to plain values and back.

    Args:
        types: Pydantic models, dataclasses and enums of the application that may stand in inputs, outputs and results, and exceptions, made from
            one text, that a recorded failure is to be raised as again.
    """

    def __init__(self, types: Iterable[type] = ()) -> None:
        self._types: dict[str, type] = {}
        for each in types:
            if not (dataclasses.is_dataclass(each) or issubclass(each, BaseModel | enum.Enum | Exception)):
                raise ConfigurationError(f"types= takes Pydantic models, dataclasses, enums and exceptions, not {each.__qualname__}")
            self._types[_type_name(each)] = each

    @property
    def types(self) -> Mapping[str, type]:
        """Registered types by their stored name."""
        return self._types

    def encode(self, value: Any) -> Any:
        """The plain value of `value`.

        Raises:
            NotJsonSafe: Something in it is of a type that cannot be stored.
        """
        return encode(value, convert=self.tag)

    def decode(self, plain: Any) -> Any:
        """What `plain` stands for: fresh objects.

        Raises:
            PayloadError: It names a type that is not registered here.
        """
        return decode(plain, revive=self.revive)

    def describe_error(self, error: Exception) -> dict[str, Any]:
        """What is recorded of a failure: type and message only, because a stack trace differs between attempts; of our own, their fields as well."""
        if isinstance(error, ActivityFailed):
            return {"type": error.error_type, "message": error.message.removeprefix(f"{error.error_type}: ")}
        kind = type(error)
        if isinstance(error, OF_THE_CODE):
            return {"type": _type_name(kind), "message": error.message, "fields": error.fields}
        return {"type": kind.__qualname__ if kind.__module__ == "builtins" else _type_name(kind), "message": str(error)}

    def rebuild_error(self, recorded: Mapping[str, Any]) -> Exception:
        """The recorded failure as an exception: of the same type if it is built in, LangChain's `ToolException` or registered, else
        `ActivityFailed`."""
        name, message = recorded["type"], recorded["message"]
        if name in _OUR_ERRORS:
            return _OUR_ERRORS[name](message, **recorded.get("fields", {}))
        kind = self._types.get(name) or _KNOWN_ERRORS.get(name)
        if kind is not None and issubclass(kind, Exception):
            try:
                rebuilt = kind(message)
            except TypeError:
                rebuilt = None
            if rebuilt is not None and str(rebuilt) == message:
                return rebuilt
        return ActivityFailed(f"{name}: {message}", error_type=name)

    def tag(self, value: object) -> Tagged | None:
        """The named form of a LangChain, LangGraph or registered object; None for anything else."""
        if isinstance(value, BaseMessage) and (name := _MESSAGE_NAMES.get(type(value))) is not None:
            return Tagged(_MESSAGE_TAG, {"type": name, **_set_fields(value)})
        if type(value) is Document:
            return Tagged(_DOCUMENT_TAG, _set_fields(value))
        if isinstance(value, Command):
            fields = {"graph": value.graph, "update": value.update, "resume": value.resume, "goto": value.goto}
            return Tagged(_COMMAND_TAG, {name: field for name, field in fields.items() if field not in (None, ())})
        if isinstance(value, Send):
            return Tagged(_SEND_TAG, {"node": value.node, "arg": value.arg})
        if isinstance(value, Overwrite):
            return Tagged(_OVERWRITE_TAG, value.value)
        if _type_name(type(value)) in self._types:
            return Tagged(_APPLICATION_TAG, {"name": _type_name(type(value)), "value": _application_fields(value)})
        return None

    def revive(self, tagged: Tagged) -> object:
        """The inverse of `tag`.

        Raises:
            PayloadError: The type is not known here.
            DecryptionFailed: The value is encrypted, and was not opened.
        """
        value: Any = tagged.value
        match tagged.type:
            case str(tag) if tag == _MESSAGE_TAG:
                kind = _MESSAGES[value["type"]]
                fields = {name: field for name, field in value.items() if name != "type"}
                return kind(**fields)
            case str(tag) if tag == _DOCUMENT_TAG:
                return Document(**value)
            case str(tag) if tag == _COMMAND_TAG:
                return Command(**value)
            case str(tag) if tag == _SEND_TAG:
                return Send(value["node"], value["arg"])
            case str(tag) if tag == _OVERWRITE_TAG:
                return Overwrite(value)
            case str(tag) if tag == _APPLICATION_TAG and value["name"] in self._types:
                return _rebuild(self._types[value["name"]], value["value"])
            case str(tag) if tag == SEALED_TYPE:
                raise DecryptionFailed(
                    f"a value is encrypted with key {value['key']!r}, which this process does not have: give App or DurableClient a cipher= with it",
                    key_id=value["key"],
                )
            case _:
                name = value["name"] if isinstance(value, dict) and "name" in value else tagged.type
                raise PayloadError(f"a stored value is of type {name}, which this process does not know: register it with App(types=[…])")


_OUR_ERRORS = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in OF_THE_CODE}
_KNOWN_ERRORS: dict[str, type] = {
    **{name: kind for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, Exception)},
    "langchain_core.tools.base.ToolException": ToolException,
}


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _set_fields(model: BaseModel) -> dict[str, Any]:
    """Fields that differ from their default, and extra ones: readable in mongosh, and no larger than needed."""
    fields: dict[str, Any] = {}
    for name, default in _defaults(type(model)):
        value = getattr(model, name)
        if default is None or value != default():
            fields[name] = value
    return fields | (model.__pydantic_extra__ or {})


@functools.cache
def _defaults(kind: type[BaseModel]) -> tuple[tuple[str, Callable[[], Any] | None], ...]:
    """The fields of a LangChain class, each with what makes its default, or None if it has none.

    Made once: Pydantic looks at the signature of a default's factory each time that it is asked for the default.
    """

    def default_of(info: FieldInfo) -> Callable[[], Any] | None:
        if info.is_required():
            return None
        if info.default_factory is None:
            return lambda: info.default
        if info.default_factory_takes_validated_data:
            return functools.partial(cast(Callable[[Any], Any], info.default_factory), {})
        return cast(Callable[[], Any], info.default_factory)

    # "type" says nothing that the class does not say.
    return tuple((name, default_of(info)) for name, info in kind.model_fields.items() if name != "type")


def _application_fields(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields} | (value.__pydantic_extra__ or {})
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}  # type: ignore[arg-type]


def _rebuild(kind: type, fields: Any) -> object:
    if issubclass(kind, enum.Enum):
        return kind[fields]
    if issubclass(kind, BaseModel):
        return kind.model_construct(**fields)
    make: Callable[..., object] = kind
    return make(**fields)
