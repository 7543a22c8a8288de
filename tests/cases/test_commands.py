"""How answers are given: every JSON value is one, and nothing else rides on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from langgraph.types import Command, interrupt

from mongo_durable import App
from mongo_durable.errors import UnsupportedGraph
from mongo_durable.protocol.events import EventType
from tests.cases.workshop import Workshop, chain
from tests.langgraph.kit import State

ANSWERS: list[Any] = [{}, None, {1: 2}, {"0123456789abcdef0123456789abcdef": "x"}, "", 0, False, [], {"": {}}, {"resume": None}]


def _asks_everywhere(app: App) -> Any:
    """A node that asks, and a tool that asks."""

    @app.tool(idempotent=True)
    async def ask(q: str) -> list[Any]:
        """Ask a person."""
        return [interrupt(q)]

    async def node(state: State) -> State:
        return {"lines": [interrupt("one?"), interrupt("two?")]}

    async def tool(state: State) -> State:
        return {"lines": [*await ask.ainvoke({"q": "three?"}), *await ask.ainvoke({"q": "four?"})]}

    return chain(node=node, tool=tool)


def _same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)


@pytest.mark.parametrize("answer", ANSWERS, ids=repr)
async def test_an_answer_is_never_read_as_anything_else(answer: Any, workshop: Workshop) -> None:
    """CASES 35: empty, false and odd answers, and dicts that look like maps of questions, arrive exactly, once, by id and bare, in node and tool."""
    out = await workshop.once(_asks_everywhere, {"lines": []})
    for is_named in (True, False, False, True):
        [question] = out["__interrupt__"]
        out = await workshop.once(_asks_everywhere, Command(resume={question.id: answer} if is_named else answer))
    assert _same(out["lines"], [answer] * 4)
    assert len(await workshop.history(1, EventType.ACTIVITIES_RESOLVED)) == 4


async def test_none_is_an_answer_in_both_colours(workshop: Workshop) -> None:
    """CASES 37: `Command(resume=None)` answers the question with None, asynchronously and synchronously, and the next one still asks."""
    for number, is_sync in enumerate((False, True)):

        def make(app: App) -> Any:
            def node(state: State) -> State:
                return {"lines": [interrupt("one?"), interrupt("two?")]}

            return chain(node=node)

        run: Any = {"configurable": {"thread_id": workshop.run(number)}}
        outs = []
        for given in ({"lines": []}, Command(resume=None), Command(resume=None)):
            if is_sync:
                outs.append(workshop.app(make, client=None, uri=workshop.uri, sync=True).invoke(given, run, run_id=workshop.run(number)))
            else:
                outs.append(await workshop.once(make, given, number))
        assert [[each.value for each in out.get("__interrupt__", ())] for out in outs] == [["one?"], ["two?"], []]
        assert outs[-1]["lines"] == [None, None]


async def test_after_an_empty_answer_the_next_turn_is_clean(workshop: Workshop) -> None:
    """CASES 38: `{}` ends its question for good: the thread's next turn starts with nothing pending and asks its own question, once."""

    def make(app: App) -> Any:
        async def node(state: State) -> State:
            answer = interrupt(f"turn {len(state['lines'])}?")
            assert isinstance(answer, Mapping)
            return {"lines": [dict(answer)]}

        return chain(node=node)

    for turn in (1, 2, 3):
        out = await workshop.once(make, {"lines": []}, turn, thread="conversation")
        assert [each.value for each in out["__interrupt__"]] == [f"turn {turn - 1}?"]
        out = await workshop.once(make, Command(resume={}), turn, thread="conversation")
        assert "__interrupt__" not in out
        state = await workshop.app(make).aget_state({"configurable": {"thread_id": workshop.run("conversation")}})
        assert (state.interrupts, state.next, state.values["lines"]) == ((), (), [{}] * turn)
    async with workshop.client() as client:
        assert await client.open_frontiers(thread_id=workshop.run("conversation")) == []
    for turn in (1, 2, 3):
        assert len(await workshop.history(turn, EventType.ACTIVITIES_SUSPENDED)) == 1


@pytest.mark.parametrize(
    "more", [{"goto": "last"}, {"update": {"lines": ["smuggled"]}}, {"graph": Command.PARENT}], ids=lambda each: next(iter(each))
)
async def test_an_answer_moves_nothing(more: dict[str, Any], workshop: Workshop) -> None:
    """CASES 39: an answer with a jump or an update in it is refused while questions pend; the run stays as it was, and takes the plain answer."""

    def make(app: App) -> Any:
        async def first(state: State) -> State:
            return {"lines": [interrupt("first?")]}

        async def last(state: State) -> State:
            return {"lines": [interrupt("last?")]}

        return chain(first=first, last=last)

    [question] = (await workshop.once(make, {"lines": []}))["__interrupt__"]
    before = await workshop.history()
    for resume in ({question.id: "yes"}, "yes"):
        with pytest.raises(UnsupportedGraph, match="alone"):
            await workshop.once(make, Command(resume=resume, **more))
    assert await workshop.history() == before
    [following] = (await workshop.once(make, Command(resume={question.id: "yes"})))["__interrupt__"]
    assert following.value == "last?"
    assert (await workshop.once(make, Command(resume={following.id: "no"})))["lines"] == ["yes", "no"]
