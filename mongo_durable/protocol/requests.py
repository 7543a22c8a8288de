"""Requests for a person's decision in a well-known shape, and the JSON Schema of the answers that whoever asks can read.

Two shapes are known, by the plain value of an interrupt alone:

- the review of tool calls by LangChain's HumanInTheLoopMiddleware: `{action_requests: […], review_configs: […]}`, answered with
  `{decisions: [{type: approve | edit | reject | respond, …}, …]}`, one decision a request, in their order;
- the question of an Agent Inbox: `{action_request, config, description}` or a list of such, answered with `{type: accept | ignore | response | edit,
  args}`, alone or in a list.

A schema here refuses nothing that the asking side can read, and a value that is not wholly of a shape is not of it: whoever only uses similar words
gets any answer, as before. A schema is not part of an entry's digest, so what is recognised may grow without touching a history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from mongo_durable.protocol.values import decode

Schema: TypeAlias = "dict[str, Any]"

_EDITED_ACTION: Schema = {
    "type": "object",
    "required": ["name", "args"],
    "properties": {"name": {"type": "string"}, "args": {"type": "object"}},
}

# A reason may be left out or be null, and the middleware makes a text of whatever a message is. A null `edited_action` is refused, although the
# middleware lets the call run as it was: who edits does not approve.
_DECISIONS: dict[str, Schema] = {
    "approve": {"title": "Run it as it is", "type": "object", "required": ["type"], "properties": {"type": {"const": "approve"}}},
    "edit": {
        "title": "Run it with another name or other arguments",
        "type": "object",
        "required": ["type", "edited_action"],
        "properties": {"type": {"const": "edit"}, "edited_action": _EDITED_ACTION},
    },
    "reject": {
        "title": "Do not run it; the message says why",
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"const": "reject"}, "message": {}},
    },
    "respond": {
        "title": "Do not run it; the message is its result",
        "type": "object",
        "required": ["type", "message"],
        "properties": {"type": {"const": "respond"}, "message": {}},
    },
}

# An inbox sends the request back with `accept`, and null with `ignore`; whoever asked reads neither.
_RESPONSES: dict[str, Schema] = {
    "allow_accept": {
        "title": "Accept it as it is",
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"const": "accept"}, "args": {}},
    },
    "allow_edit": {
        "title": "Accept it with other arguments",
        "type": "object",
        "required": ["type", "args"],
        "properties": {
            "type": {"const": "edit"},
            "args": {
                "type": "object",
                "required": ["action", "args"],
                "properties": {"action": {"type": "string"}, "args": {"type": "object"}},
            },
        },
    },
    "allow_respond": {
        "title": "Answer in words",
        "type": "object",
        "required": ["type", "args"],
        "properties": {"type": {"const": "response"}, "args": {"type": "string"}},
    },
    "allow_ignore": {
        "title": "Ignore it",
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"const": "ignore"}, "args": {}},
    },
}


def recognised_schema(value: Any) -> Schema | None:
    """The schema of the answers to a question, if its value is a request in a known shape.

    Args:
        value: The question, as a plain value.
    """
    first = value[0] if isinstance(value, list) and value else value
    if not isinstance(first, dict) or first.keys().isdisjoint({"action_requests", "action_request"}):
        return None
    asked = decode(value)
    return _tool_review(asked) or _inbox_question(asked)


def _tool_review(asked: Any) -> Schema | None:
    if not isinstance(asked, dict) or asked.keys() != {"action_requests", "review_configs"}:
        return None
    requests, configs = _items(asked["action_requests"]), _items(asked["review_configs"])
    allowed: dict[str, frozenset[str]] = {}
    for config in configs:
        if not _has(config, action_name=str):
            return None
        kinds = _items(config.get("allowed_decisions"))
        if not kinds or not all(isinstance(kind, str) and kind in _DECISIONS for kind in kinds):
            return None
        if allowed.setdefault(config["action_name"], frozenset(kinds)) != frozenset(kinds):
            return None  # which of the two is meant is not said
    if not requests or not all(_has(each, name=str, args=dict) and each["name"] in allowed for each in requests):
        return None
    decisions = [_one_of({kind: _DECISIONS[kind] for kind in _DECISIONS if kind in allowed[each["name"]]}) for each in requests]
    return {"type": "object", "required": ["decisions"], "properties": {"decisions": _in_order(decisions, at_least=len(decisions))}}


def _inbox_question(asked: Any) -> Schema | None:
    questions = [asked] if isinstance(asked, dict) else _items(asked)
    if not questions or not all(_is_inbox_question(each) for each in questions):
        return None
    responses = [_one_of({name: _RESPONSES[name] for name in _RESPONSES if each["config"][name]}) for each in questions]
    # An inbox answers with a list of one response, also where several questions stand in the value.
    listed = _in_order(responses, at_least=1)
    return {"anyOf": [listed, responses[0]]} if len(responses) == 1 else listed


def _is_inbox_question(asked: Any) -> bool:
    if not isinstance(asked, dict) or not {"action_request", "config"} <= asked.keys() <= {"action_request", "config", "description"}:
        return False
    config = asked["config"]
    return (
        _has(asked["action_request"], action=str, args=dict)
        and _has(config, **dict.fromkeys(_RESPONSES, bool))
        and any(config[name] for name in _RESPONSES)
        and isinstance(asked.get("description"), str | None)
    )


def _items(value: Any) -> Sequence[Any]:
    """The elements of a list or a tuple; none of anything else."""
    return value if isinstance(value, list | tuple) else ()


def _has(value: Any, **fields: type) -> bool:
    """Whether it is an object with these fields, of these types; it may have others."""
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in fields.items())


def _one_of(choices: Mapping[str, Schema]) -> Schema:
    kinds = [each["properties"]["type"]["const"] for each in choices.values()]
    # The list of kinds is there for the message: a schema of alternatives alone does not say which of them was meant.
    return {"type": "object", "required": ["type"], "properties": {"type": {"enum": kinds}}, "oneOf": list(choices.values())}


def _in_order(items: Sequence[Schema], *, at_least: int) -> Schema:
    """A list whose n-th element fits the n-th schema."""
    elements: Schema = {"items": items[0]} if all(each == items[0] for each in items) else {"prefixItems": list(items)}
    return {"type": "array", "minItems": at_least, "maxItems": len(items), **elements}
