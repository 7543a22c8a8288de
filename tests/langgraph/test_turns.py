"""Turns of a thread: runs that follow one another, each from what the last one committed, however often their attempts were abandoned."""

from __future__ import annotations

import random
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import tools_condition

from mongo_durable import App
from tests.langgraph.bench import Bench, Colour, Killer, normalised
from tests.langgraph.kit import ASKING, Kit, Ledger, calls

TURNS = ("first", "second", "third")


def _make(kit: Kit) -> Any:
    script = [message for turn in TURNS for message in (calls("ask", "plain", prefix=turn), AIMessage(f"done {turn}"))]
    model = kit.model(*script)

    async def llm(state: Any) -> Any:
        return {"messages": [await kit.call(model, state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("llm", kit.body(llm))
    graph.add_node("tools", kit.app.tool_node(kit.tools))
    graph.add_edge(START, "llm")
    graph.add_conditional_edges("llm", tools_condition)
    graph.add_edge("tools", "llm")
    return graph


@pytest.mark.parametrize("colour", ["async", "sync"])
def test_turns_follow_one_another_as_in_one_process(bench: Bench, colour: Colour) -> None:
    """Each turn starts from the committed state, counts its positions from step 1 again, and ends as plain LangGraph on one saver would."""
    plain = Ledger()
    graph = _make(Kit(App("oracle", uri=bench.uri), plain, is_sync=True, is_oracle=True)).compile(checkpointer=InMemorySaver())
    thread_id = bench.new_run()
    ledger = Ledger()
    positions = set()
    for number, turn in enumerate(TURNS):
        given = {"messages": [("user", turn)]}
        expected = graph.invoke(given, {"configurable": {"thread_id": "t"}})
        killer = Killer(random.Random(number)) if number else None
        told = bench.complete(_make, given, colour, ledger, killer=killer, thread_id=thread_id)
        assert told.state == normalised(expected)
        assert len(told.frontiers) == 1
        positions.add(tuple(told.positions))
        if killer is None:
            assert ledger.without(*ASKING) == plain.without(*ASKING)
    assert set(ledger.ran) == set(plain.ran)
    assert len(positions) == 1, "every turn reads alike"
    assert min(int(position.rpartition("@")[2].partition("#")[0]) for position in positions.pop()) == 1
