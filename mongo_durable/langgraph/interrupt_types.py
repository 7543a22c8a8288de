"""Named types of interrupts: what a question of a name carries, what its answers are made into, and how long it waits.

A question is stored as the JSON of its payload, for people to read, with the JSON Schema of its response. The schema is what everybody who answers is
held to, wherever; a model's own validators are known only to the application. They refuse an answer that comes through the app before it is stored.
One that came another way reaches them where the code waits for it, and the run fails with `UnusableAnswer`.

Answers are JSON, so models read them as JSON: a strict model takes a text for a time. The model is made anew in every attempt, from the same
answer; a default that it draws from a clock or at random would not be the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError, WrapValidator
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticSerializationError, core_schema, to_json, to_jsonable_python

from mongo_durable.engine.schemas import check_schema, schema_faults
from mongo_durable.errors import ConfigurationError, InvalidAnswer
from mongo_durable.langgraph import questions
from mongo_durable.langgraph.questions import Fault, model_faults
from mongo_durable.protocol.frontier import UNANSWERED, Audience, FrontierEntry
from mongo_durable.protocol.values import decode


class _AnswerSchema(GenerateJsonSchema):
    """JSON Schema that refuses nothing that the model reads."""

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
        made = super().tagged_union_schema(schema)
        if "oneOf" in made and "discriminator" not in made:
            # A function tells the members apart, which may overlap; "one of" would refuse what fits several.
            made["anyOf"] = made.pop("oneOf")
        return made


@dataclass(frozen=True, slots=True)
class _Response:
    """The model of the answers to a type of question.

    Attributes:
        schema: Its JSON Schema.
        type: For LangGraph, which makes of an answer what this type validates it to.
    """

    model: Any
    schema: dict[str, Any]
    adapter: TypeAdapter[Any]
    type: Any

    @classmethod
    def of(cls, model: Any) -> _Response:
        adapter: TypeAdapter[Any] = TypeAdapter(model)
        schema = adapter.json_schema(schema_generator=_AnswerSchema)
        check_schema(schema)

        def read(answer: Any, _: Callable[[Any], Any]) -> Any:
            return answer if answer is UNANSWERED else adapter.validate_json(to_json(answer))

        return cls(model, schema, adapter, Annotated[model, WrapValidator(read)])

    def faults(self, answer: Any) -> list[Fault]:
        """What the model refuses of an answer that is JSON."""
        try:
            self.adapter.validate_json(to_json(answer))
        except ValidationError as error:
            return model_faults(error)
        return []


@dataclass(frozen=True, slots=True)
class InterruptType:
    """A registered type of interrupts.

    Attributes:
        payload: Model of the question's value, or None for any value.
        response: Of the answer, or None for any answer.
        expires_in, default: What holds for a question that says nothing else; the default as JSON, or UNANSWERED.
    """

    name: str
    payload: TypeAdapter[Any] | None
    response: _Response | None
    expires_in: timedelta | None
    default: Any
    models: tuple[Any, Any]

    def ask(self, value: Any, expires_in: timedelta | None, default: Any, audience: Audience | None = None) -> Any:
        """Interrupt with a question of this type, and return the answer as an instance of the response model. See `App.interrupt`."""
        deadline = self.expires_in if expires_in is None else expires_in
        if default is not UNANSWERED:
            default = _fitting_default(self.name, self.response, default)
        elif deadline is not None:
            default = self.default
        return questions.ask(
            self.name,
            self._value(value),
            self.response.schema if self.response is not None else None,
            deadline,
            default,
            audience=audience,
            answer_type=self.response.type if self.response is not None else None,
        )

    def _value(self, value: Any) -> Any:
        if self.payload is None:
            return value
        try:
            return self.payload.dump_python(self.payload.validate_python(value), mode="json", by_alias=True, warnings="error")
        except ValidationError as error:
            where = ", ".join(f"{fault.path} ({fault.kind})" for fault in model_faults(error))
            raise ConfigurationError(f"the question {self.name!r} does not fit its model {_title(self.models[0])} at {where}") from error
        except PydanticSerializationError as error:
            raise ConfigurationError(f"the question {self.name!r} cannot be written as JSON by its model {_title(self.models[0])}") from error


class InterruptTypes:
    """The interrupt types of one app."""

    def __init__(self) -> None:
        self._types: dict[str, InterruptType] = {}

    def get(self, name: str) -> InterruptType | None:
        """The type of this name, if there is one."""
        return self._types.get(name)

    def register(self, name: str, payload: Any, response: Any, expires_in: timedelta | None, default: Any) -> None:
        """Register a type, or its payload later than the rest. See `App.interrupt_type`."""
        if not name:
            raise ConfigurationError("an interrupt type needs a name")
        if expires_in is not None and expires_in <= timedelta():
            raise ConfigurationError(f"the interrupt type {name!r} has a deadline that has passed already")
        made_response = _adapted(name, "response", response, _Response.of)
        made = InterruptType(
            name,
            _adapted(name, "payload", payload, TypeAdapter),
            made_response,
            expires_in,
            default if default is UNANSWERED else _fitting_default(name, made_response, default),
            (payload, response),
        )
        known = self._types.get(name)
        if known is None:
            self._types[name] = made
            return
        if (known.models[1], known.expires_in, known.default) != (response, expires_in, made.default) or (
            None not in (known.models[0], payload) and known.models[0] is not payload
        ):
            raise ConfigurationError(f"the interrupt type {name!r} is registered already, with other models or another deadline or default")
        if known.models[0] is None:
            self._types[name] = made

    def json_answer(self, run_id: str, entry: FrontierEntry, answer: Any) -> Any:
        """The answer to a question as JSON, if the question is of a registered type; else the answer as it is.

        An interrupt that the code makes without a type, in a node or tool that is named like one, has another schema.

        Raises:
            InvalidAnswer: The response model refuses it.
        """
        known = self._types.get(entry.name)
        if known is None or known.response is None or entry.response_schema is None or decode(dict(entry.response_schema)) != known.response.schema:
            return answer
        faults: list[Fault]
        try:
            answer = to_jsonable_python(answer, by_alias=True)
            faults = known.response.faults(answer)
        except PydanticSerializationError:
            faults = [Fault("$", "the answer is not JSON", "not_json")]
        if faults:
            raise InvalidAnswer(
                f"run {run_id}: the answer to {entry.activity_id} ({entry.name!r}) is refused by {_title(known.response.model)} "
                f"at {', '.join(fault.path for fault in faults)}",
                run_id=run_id,
                activity_id=entry.activity_id,
                errors=[fault.text for fault in faults],
            )
        return answer


def _adapted(name: str, what: str, model: Any, adapt: Callable[[Any], Any]) -> Any:
    if model is None:
        return None
    if not _is_model(model):
        raise ConfigurationError(
            f"the interrupt type {name!r} has a {what} that is no model: give a Pydantic model, a dataclass, a TypedDict, or a union of such; "
            "RootModel[…] makes a model of any other type"
        )
    try:
        return adapt(model)
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        raise ConfigurationError(f"the {what} {_title(model)} of the interrupt type {name!r} cannot be used: {error}") from error
    except ConfigurationError as error:
        raise ConfigurationError(f"the {what} {_title(model)} of the interrupt type {name!r} cannot be used: {error.message}") from error


def _is_model(kind: Any) -> bool:
    origin = get_origin(kind)
    if origin is Annotated:
        return _is_model(get_args(kind)[0])
    if origin in (Union, UnionType):
        return all(each is NoneType or _is_model(each) for each in get_args(kind))
    made_of = origin or kind
    # A TypedDict of typing_extensions is none for `typing`, and Pydantic asks for that one before Python 3.12.
    return isinstance(made_of, type) and (issubclass(made_of, BaseModel) or dataclasses.is_dataclass(made_of) or hasattr(made_of, "__total__"))


def _fitting_default(name: str, response: _Response | None, default: Any) -> Any:
    """A default answer as JSON.

    Raises:
        ConfigurationError: It is no answer that the response model takes.
    """
    if response is None:
        return default
    try:
        answer = to_jsonable_python(default, by_alias=True)
    except PydanticSerializationError as error:
        raise ConfigurationError(f"the default of the interrupt type {name!r} is not JSON") from error
    at = [fault.partition(":")[0] for fault in schema_faults(response.schema, answer)] or [fault.path for fault in response.faults(answer)]
    if at:
        raise ConfigurationError(f"the default of the interrupt type {name!r} does not fit {_title(response.model)} at {', '.join(at)}")
    return answer


def _title(model: Any) -> str:
    return getattr(model, "__name__", None) or str(model)
