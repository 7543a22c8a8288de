"""Requests in well-known shapes: what is one, what only looks like one, and which answers each takes."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mongo_durable.engine.schemas import check_schema, schema_faults
from mongo_durable.protocol.requests import recognised_schema
from mongo_durable.protocol.values import encode

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5), JSON, max_size=2)
KINDS = ("approve", "edit", "reject", "respond")


@st.composite
def reviews(draw: st.DrawFn) -> tuple[dict[str, Any], list[list[str]]]:
    """A request to review tool calls, as the middleware makes it, and the decisions that each call allows."""
    policies = draw(st.dictionaries(st.text(max_size=5), st.lists(st.sampled_from(KINDS), min_size=1, max_size=5), min_size=1, max_size=3))
    names = draw(st.lists(st.sampled_from(sorted(policies)), min_size=1, max_size=4))
    request = {
        "action_requests": [{"name": name, "args": draw(ARGUMENTS), "description": "please"} for name in names],
        "review_configs": [{"action_name": name, "allowed_decisions": policies[name]} for name in names],
    }
    return request, [policies[name] for name in names]


def decision(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    """A decision of a kind, with and without what it may have."""
    required: dict[str, Any] = {"type": st.just(kind)}
    optional: dict[str, Any] = {"note": JSON}
    if kind == "edit":
        required["edited_action"] = st.fixed_dictionaries({"name": st.text(max_size=5), "args": ARGUMENTS}, optional={"why": JSON})
    elif kind == "respond":
        required["message"] = st.text(max_size=5)
    elif kind == "reject":
        optional["message"] = st.none() | st.text(max_size=5)
    return st.fixed_dictionaries(required, optional=optional)


def faults(value: Any, answer: Any) -> list[str]:
    """What of an answer the recognised request refuses."""
    schema = recognised_schema(encode(value))
    assert schema is not None
    return schema_faults(schema, answer)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_allowed_decision_is_an_answer_and_no_other(data: st.DataObject) -> None:
    """One decision a call, each of a kind that its call allows, is an answer; one too few, one too many, or one that is not allowed is none."""
    request, allowed = data.draw(reviews())
    decisions = [data.draw(decision(data.draw(st.sampled_from(kinds)))) for kinds in allowed]
    assert faults(request, {"decisions": decisions}) == []
    assert faults(request, {"decisions": decisions[1:]})
    assert faults(request, {"decisions": [*decisions, decisions[0]]})
    assert faults(request, decisions)
    place = data.draw(st.integers(0, len(decisions) - 1))
    wrong = data.draw(st.sampled_from([*(set(KINDS) - set(allowed[place])), "accept", None]))
    decisions[place] = data.draw(decision(wrong)) if wrong in KINDS else {"type": wrong}
    assert any(fault.startswith(f"$.decisions[{place}].type: ") for fault in faults(request, {"decisions": decisions}))


REVIEW: dict[str, Any] = {
    "action_requests": [{"name": "pay", "args": {"amount": 5}, "description": "Pay?"}, {"name": "tell", "args": {}}],
    "review_configs": [{"action_name": "pay", "allowed_decisions": ["reject", "edit"]}, {"action_name": "tell", "allowed_decisions": ["respond"]}],
}
ANSWERED = {"type": "respond", "message": "told"}


@pytest.mark.parametrize(
    ("first", "path"),
    [
        ({"type": "edit"}, "$.decisions[0]"),
        ({"type": "edit", "edited_action": None}, "$.decisions[0]"),
        ({"type": "edit", "edited_action": {"name": "pay"}}, "$.decisions[0]"),
        ({"type": "edit", "edited_action": {"name": "pay", "args": [5]}}, "$.decisions[0]"),
        ({"type": "approve"}, "$.decisions[0].type"),
        ({}, "$.decisions[0]"),
        ("reject", "$.decisions[0]"),
    ],
)
def test_a_decision_has_what_its_kind_needs(first: Any, path: str) -> None:
    """A decision without what its kind demands is refused, with the place of the fault."""
    assert path in {fault.partition(":")[0] for fault in faults(REVIEW, {"decisions": [first, ANSWERED]})}
    assert faults(REVIEW, {"decisions": [{"type": "reject"}, ANSWERED]}) == []
    assert faults(REVIEW, {"decisions": [{"type": "reject"}, {"type": "respond"}]})


def _changed(path: tuple[Any, ...], value: Any) -> Any:
    made: Any = copy.deepcopy(REVIEW)
    inner = made
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return made


@pytest.mark.parametrize(
    "value",
    [
        _changed(("form",), {"approved": "boolean"}),
        _changed(("action_requests",), []),
        _changed(("action_requests", 0), {"name": "pay"}),
        _changed(("action_requests", 0, "name"), "unknown"),
        _changed(("action_requests", 0, "args"), [5]),
        _changed(("action_requests",), {"name": "pay", "args": {}}),
        _changed(("review_configs",), []),
        _changed(("review_configs", 0), {"action_name": "pay"}),
        _changed(("review_configs", 0, "allowed_decisions"), []),
        _changed(("review_configs", 0, "allowed_decisions"), "approve"),
        _changed(("review_configs", 0, "allowed_decisions"), ["approve", "postpone"]),
        _changed(("review_configs", 0, "allowed_decisions"), [["approve"]]),
        _changed(("review_configs", 1), {"action_name": "pay", "allowed_decisions": ["approve"]}),
        {"action_requests": REVIEW["action_requests"]},
        {"decisions": ["approve"]},
        [REVIEW],
        [],
        {},
        None,
        "approve?",
    ],
)
def test_what_only_looks_like_a_review_takes_any_answer(value: Any) -> None:
    """A value that is not wholly of the shape has no schema."""
    assert recognised_schema(encode(value)) is None


def test_a_review_is_recognised_in_the_ways_it_can_be_written() -> None:
    """Tuples count as lists; there may be one policy for several calls of a tool, and one for a tool that is not called; odd keys do not matter."""
    value = {
        "action_requests": ({"name": "pay", "args": {"$amount": 5}}, {"name": "pay", "args": {}, "risk": "high"}),
        "review_configs": (
            {"action_name": "pay", "allowed_decisions": ("approve",), "args_schema": {"type": "object"}},
            {"action_name": "other", "allowed_decisions": ["edit"]},
        ),
    }
    assert faults(value, {"decisions": [{"type": "approve"}, {"type": "approve"}]}) == []
    assert faults(value, {"decisions": [{"type": "approve"}, {"type": "edit", "edited_action": {"name": "pay", "args": {}}}]})


RESPONSES: dict[str, list[dict[str, Any]]] = {
    "allow_accept": [{"type": "accept", "args": None}, {"type": "accept", "args": {"action": "pay", "args": {"amount": "5"}}}, {"type": "accept"}],
    "allow_ignore": [{"type": "ignore", "args": None}, {"type": "ignore"}],
    "allow_respond": [{"type": "response", "args": "not today"}],
    "allow_edit": [{"type": "edit", "args": {"action": "pay", "args": {"amount": "4"}}}],
}


def inbox_question(*allowed: str, **changes: Any) -> dict[str, Any]:
    """A question of an inbox that allows these responses."""
    config = {name: name in allowed for name in RESPONSES}
    return {"action_request": {"action": "pay", "args": {"amount": 5}}, "config": config, "description": "Pay?", **changes}


@pytest.mark.parametrize("allowed", [each for size in (1, 2, 4) for each in itertools.combinations(RESPONSES, size)], ids="-".join)
def test_an_inbox_question_takes_the_responses_that_it_allows(allowed: tuple[str, ...]) -> None:
    """Alone or in a list of one, whichever way the question was put; nothing else."""
    schema = recognised_schema(encode(inbox_question(*allowed)))
    assert schema is not None
    assert schema == recognised_schema(encode([inbox_question(*allowed)]))
    check_schema(schema)
    for name, responses in RESPONSES.items():
        for response in responses:
            assert (schema_faults(schema, response) == []) is (name in allowed)
            assert (schema_faults(schema, [response]) == []) is (name in allowed)
        assert schema_faults(schema, [responses[0], responses[0]])
    for wrong in ([], None, "accept", {"type": "approve"}, {"type": "edit"}, {"type": "edit", "args": "x"}, {"type": "response", "args": None}):
        assert schema_faults(schema, wrong)


def test_several_inbox_questions() -> None:
    """They are answered by a list, in their order; an inbox that shows only the first answers only that."""
    value = [inbox_question("allow_accept"), inbox_question("allow_ignore", description=None)]
    assert faults(value, [{"type": "accept", "args": None}, {"type": "ignore", "args": None}]) == []
    assert faults(value, [{"type": "accept", "args": None}]) == []
    assert faults(value, [{"type": "ignore", "args": None}, {"type": "ignore", "args": None}])
    assert faults(value, {"type": "accept", "args": None})


@pytest.mark.parametrize(
    "value",
    [
        inbox_question(),
        inbox_question("allow_accept", description=5),
        inbox_question("allow_accept", form={}),
        inbox_question("allow_accept", action_request={"action": "pay"}),
        inbox_question("allow_accept", action_request="pay"),
        inbox_question("allow_accept", config={"allow_accept": True}),
        inbox_question("allow_accept", config=dict.fromkeys(RESPONSES, 1)),
        [inbox_question("allow_accept"), "and more"],
        [inbox_question("allow_accept"), {**inbox_question("allow_accept"), "more": 1}],
        {"action_request": {"action": "pay", "args": {}}},
    ],
)
def test_what_only_looks_like_an_inbox_question_takes_any_answer(value: Any) -> None:
    """A value that is not wholly of the shape has no schema."""
    assert recognised_schema(encode(value)) is None
