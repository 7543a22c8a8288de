"""Graphs that more than one contender runs."""

from __future__ import annotations

import asyncio
import operator
import time
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt
from pydantic import PrivateAttr

from scripts.benchmarks.crew import Samples

_NODES = 10
_ASKS = 5
_CHARACTERS = 200


class PausingModel(BaseChatModel):
    """A model that takes its time, and says so.

    Attributes:
        pause_s: How long a call sleeps.
        characters: Length of each of its answers.
    """

    pause_s: float
    characters: int
    _bodies: list[float] = PrivateAttr(default_factory=list)

    def __init__(self, pause_s: float, characters: int) -> None:
        super().__init__(pause_s=pause_s, characters=characters)

    @property
    def bodies(self) -> list[float]:
        """How long each call's body took, in seconds: a sleep is never exact."""
        return self._bodies

    @property
    def _llm_type(self) -> str:
        return "pausing"

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage("x" * self.characters))])

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> ChatResult:
        started = time.perf_counter()
        await asyncio.sleep(self.pause_s)
        self._bodies.append(time.perf_counter() - started)
        return self._generate(messages)


class Empty(TypedDict, total=False):
    """A state with nothing in it that matters."""

    nothing: str


class Log(TypedDict, total=False):
    """The state of the ten nodes."""

    log: Annotated[list[str], operator.add]


def answer(number: int) -> str:
    """What a node's effect returns."""
    return f"{number:03}" + "x" * (_CHARACTERS - 3)


def llm_graph(called: Any, inner: PausingModel, calls: int, samples: Samples) -> StateGraph[Any]:
    """One node that calls a model, one call after the other.

    Args:
        called: The model, or what is wrapped around it.
        inner: The model, which knows how long its bodies took.
        samples: The series "overhead" and "whole call", in milliseconds, are added to it. The first call is to warm up.
    """

    async def work(state: Empty) -> Empty:
        for number in range(calls + 1):
            started = time.perf_counter()
            await called.ainvoke([HumanMessage(f"question {number}")])
            whole = time.perf_counter() - started
            if number:
                samples["overhead"].append((whole - inner.bodies[-1]) * 1e3)
                samples["whole call"].append(whole * 1e3)
        return {}

    return one_node(Empty, work)


def one_node(state: type, work: Any) -> StateGraph[Any]:
    """A graph of one node."""
    graph: StateGraph[Any] = StateGraph(state)
    graph.add_node("work", work)
    graph.add_edge(START, "work")
    return graph


def ten_nodes(effect: Callable[[int], Any], *, is_async: bool) -> StateGraph[Any]:
    """Ten nodes in a row, each with an effect of its own; the middle one asks a question first."""

    def ask(number: int) -> None:
        if number == _ASKS and not interrupt({"question": "Go on?"})["approved"]:
            raise ValueError("nobody refuses here")

    def node(number: int) -> Any:
        def run(state: Log) -> Log:
            ask(number)
            return {"log": [effect(number)]}

        async def run_async(state: Log) -> Log:
            ask(number)
            return {"log": [await effect(number)]}

        return run_async if is_async else run

    graph: StateGraph[Any] = StateGraph(Log)
    names = [f"node{number}" for number in range(_NODES)]
    for number, name in enumerate(names):
        graph.add_node(name, node(number))
    for name, following in zip([START, *names], names, strict=False):
        graph.add_edge(name, following)
    return graph


def chat_graph(model: Any, *, is_async: bool) -> StateGraph[Any]:
    """One call of a model with the whole conversation."""

    def reply(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    async def reply_async(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    return one_node(MessagesState, reply_async if is_async else reply)
