"""A wrapped model, however it is called: each provider call is recorded once, and a replay makes none."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.graph import START, StateGraph
from pydantic import BaseModel

from mongo_durable import App
from mongo_durable.errors import UnsupportedGraph
from mongo_durable.langgraph.models import DurableModel
from tests.langgraph.bench import Bench, Colour
from tests.langgraph.kit import Kit, Ledger, ScriptedModel, State

HELLO = HumanMessage("hello")
"""An object of the caller: no run may change it."""


class Weather(BaseModel):
    """What a model is asked to fill in."""

    degrees: int


@tool
def look(q: str) -> str:
    """Look it up."""
    return q


class Failing(ScriptedModel):
    """Fails a number of times before it answers, and changes the messages that it is given."""

    failures: int = 0

    def _answer(self, messages: Any) -> Any:
        messages[0].additional_kwargs["touched"] = True
        failed = sum(count for (_, name, _), count in self.ledger.ran.items() if name == f"{self.name_} failed")
        if failed < self.failures:
            self.ledger.note("LLM", f"{self.name_} failed", "")
            raise ConnectionError("provider is down")
        return super()._answer(messages)


FILLED = AIMessage("", tool_calls=[{"name": "Weather", "args": {"degrees": 21}, "id": "c1"}])
LOOKED = AIMessage(
    "", tool_calls=[{"name": "look", "args": {"q": "x"}, "id": "c1"}], usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
)

Use = Callable[[Kit, DurableModel], Awaitable[Any]]


async def _invoke(kit: Kit, model: Any) -> Any:
    return await kit.call(model, [HELLO])


async def _stream(kit: Kit, model: Any) -> Any:
    chunks = list(model.stream([HELLO])) if kit.is_sync else [each async for each in model.astream([HELLO])]
    return [(each.content, each.id) for each in chunks if each.content]


async def _batch(kit: Kit, model: Any) -> Any:
    given = [[HELLO, HumanMessage(str(number))] for number in range(3)]
    return model.batch(given) if kit.is_sync else await model.abatch(given)


async def _structured(kit: Kit, model: Any) -> Any:
    return await kit.call(model.with_structured_output(Weather), [HELLO])


async def _structured_raw(kit: Kit, model: Any) -> Any:
    return await kit.call(model.with_structured_output(Weather, include_raw=True), [HELLO])


async def _retried(kit: Kit, model: Any) -> Any:
    return await kit.call(model.with_retry(stop_after_attempt=3, wait_exponential_jitter=False), [HELLO])


async def _fallback(kit: Kit, model: Any) -> Any:
    other = kit.app.llm(ScriptedModel(script=[AIMessage("from the other")], ledger=kit.ledger, name_="other"), name="other")
    return await kit.call(model.with_fallbacks([other]), [HELLO])


async def _bound(kit: Kit, model: Any) -> Any:
    return await kit.call(model.bind_tools([look]), [HELLO])


async def _chained(kit: Kit, model: Any) -> Any:
    return await kit.call(model | (lambda message: message.content.upper()), [HELLO])


ANSWER = AIMessage("hi", response_metadata={"model_name": "m"})
USES: dict[str, tuple[Use, AIMessage, int, dict[str, int]]] = {
    # how it is used; what the provider answers; how often it fails first; its calls by the ledger's name
    "invoke": (_invoke, ANSWER, 0, {"model": 1}),
    "stream": (_stream, ANSWER, 0, {"model": 1}),
    "batch": (_batch, ANSWER, 0, {"model": 3}),
    "with_structured_output": (_structured, FILLED, 0, {"model": 1}),
    "with_structured_output(include_raw=True)": (_structured_raw, FILLED, 0, {"model": 1}),
    "with_retry": (_retried, ANSWER, 2, {"model failed": 2, "model": 1}),
    "with_fallbacks": (_fallback, ANSWER, 9, {"model failed": 1, "other": 1}),
    "bind_tools": (_bound, LOOKED, 0, {"model": 1}),
    "in a chain": (_chained, ANSWER, 0, {"model": 1}),
}


def _make(use: Use, said: AIMessage, failures: int, seen: list[Any]) -> Callable[[Kit], Any]:
    def make(kit: Kit) -> Any:
        model = kit.app.llm(Failing(script=[said], ledger=kit.ledger, failures=failures), name="model")

        async def step(state: State) -> State:
            result = await use(kit, model)
            seen.append(copy.deepcopy(result))
            return {"lines": [str(kit.interrupt("go on?"))]}

        graph = StateGraph(State)
        graph.add_node("step", kit.body(step))
        graph.add_edge(START, "step")
        return graph

    return make


@pytest.mark.parametrize("colour", ["async", "sync", "mixed"])
@pytest.mark.parametrize("how", USES)
def test_a_model_call_is_recorded_once_and_replayed_without_its_provider(bench: Bench, how: str, colour: Colour) -> None:
    """A body that runs again (with its answer, in another attempt) gets equal results, ids included; the provider is asked as often as by one run."""
    use, said, failures, calls = USES[how]
    seen: list[Any] = []
    ledger = Ledger()
    told = bench.complete(_make(use, said, failures, seen), {"lines": []}, colour, ledger, pause_s=0)
    assert told.attempts == 2
    assert len(seen) >= 2
    assert all(each == seen[0] for each in seen)
    by_name: dict[str, int] = {}
    for (_, name, _), count in ledger.ran.items():
        by_name[name] = by_name.get(name, 0) + count
    assert by_name == calls
    assert sum(told.started.values()) == sum(calls.values())
    assert HELLO.id is None
    assert HELLO.additional_kwargs == {}


def test_the_answer_is_the_providers_with_an_id_of_its_place(bench: Bench) -> None:
    """Content, tool calls, usage and metadata are kept; an answer without id gets one that is the same in every attempt."""
    seen: list[Any] = []
    bench.complete(_make(_bound, LOOKED, 0, seen), {"lines": []}, "async", Ledger(), pause_s=0)
    first, again = seen[0], seen[-1]
    assert first.id is not None
    assert again.id == first.id
    assert (first.content, first.tool_calls, first.usage_metadata) == (LOOKED.content, LOOKED.tool_calls, LOOKED.usage_metadata)


def test_streamed_messages_come_once_and_are_recorded_once(bench: Bench) -> None:
    """stream_mode="messages" reroutes no call past the wrapper."""
    ledger, seen = Ledger(), []
    app = bench.built(_make(_invoke, ANSWER, 0, seen), ledger, "async")

    async def stream() -> list[Any]:
        config: Any = {"configurable": {"thread_id": bench.new_run()}}
        return [each async for each in app.astream({"lines": []}, config, stream_mode="messages")]

    said = [message for message, _ in bench.call(stream())]
    assert [each.content for each in said] == ["hi"]
    assert sum(ledger.of("model").values()) == 1


@pytest.mark.parametrize("colour", ["async", "sync"])
def test_outside_a_run_a_wrapped_model_is_the_plain_one(bench: Bench, colour: Colour) -> None:
    """No database is asked, and answer and tool binding are those of the model inside."""
    ledger = Ledger()
    app = App("plain", uri="mongodb://localhost:1")
    model = app.llm(ScriptedModel(script=[LOOKED], ledger=ledger))

    async def call() -> Any:
        return await model.bind_tools([look]).ainvoke([HELLO])

    said = model.bind_tools([look]).invoke([HELLO]) if colour == "sync" else bench.call(call())
    assert said.tool_calls == LOOKED.tool_calls
    assert sum(ledger.of("model").values()) == 1


def test_only_a_chat_model_can_be_wrapped() -> None:
    """A bound model is refused with what to do; a wrapped one is itself."""
    app = App("plain", uri="mongodb://localhost:1")
    plain = ScriptedModel(script=[ANSWER], ledger=Ledger())
    with pytest.raises(UnsupportedGraph, match="wrap the model first"):
        app.llm(plain.bind_tools([look]))
    wrapped = app.llm(plain)
    assert app.llm(wrapped) is wrapped
    assert isinstance(wrapped, BaseChatModel)
