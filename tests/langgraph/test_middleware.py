"""`app.middleware()`: LangChain's agents with plain models and tools, and its stock middleware in any order."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    ModelCallLimitMiddleware,
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
    PIIMiddleware,
    SummarizationMiddleware,
    ToolCallLimitMiddleware,
    ToolRetryMiddleware,
)
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.types import Command, interrupt
from pydantic import BaseModel

from mongo_durable import App, DurableClient

CONFIG: Any = {"configurable": {"thread_id": "t"}}
RAN: Counter[str] = Counter()


class Scripted(BaseChatModel):
    """A model that says what its script has for the number of answers so far; it may fail first."""

    script: list[AIMessage]
    label: str = "scripted"
    failures: int = 0

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        RAN[self.label] += 1
        if self.failures:
            self.failures -= 1
            raise ConnectionError("try again")
        said = sum(isinstance(message, AIMessage) for message in messages)
        return ChatResult(generations=[ChatGeneration(message=self.script[min(said, len(self.script) - 1)].model_copy())])

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=[getattr(each, "name", str(each)) for each in tools], **kwargs)


@tool
async def look(q: str) -> str:
    """Look something up."""
    RAN["look"] += 1
    return f"seen {q}"


@tool
def buy(q: str) -> str:
    """Buy something, after a person has said yes."""
    RAN["buy.begun"] += 1
    answer = interrupt({"buy": q})
    RAN["buy"] += 1
    return f"bought {q}: {answer}"


def calls(*names: str) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": {"q": f"{name}{n}"}, "id": f"{name}-{n}"} for n, name in enumerate(names)])


def script() -> list[AIMessage]:
    return [calls("look", "buy", "look"), calls("buy"), AIMessage("done")]


def build_app(uri: str, database: str, middleware: Callable[[App], list[Any]], *, wrapped: bool = False, model: Any = None) -> App:
    app = App("agent", uri=uri, database=database)
    chosen = model or Scripted(script=script())
    tools: list[Any] = [look, buy]
    if wrapped:
        chosen, tools = app.llm(chosen), [app.tool(each) for each in tools]

    @app.entrypoint
    def build() -> Any:
        return create_agent(chosen, tools, middleware=middleware(app))

    return app


async def finish(make: Callable[[], App], colour: str = "async") -> Any:
    """Run to the end; each answer is taken up by an App made anew, as another process would."""
    RAN.clear()
    given: Any = {"messages": [HumanMessage("go")]}
    while True:
        app = make()
        out = await app.ainvoke(given, CONFIG) if colour == "async" else await asyncio.to_thread(app.invoke, given, CONFIG)
        if "__interrupt__" not in out:
            return out["messages"]
        answers = {each.id: answer_to(each.value) for each in out["__interrupt__"]}
        given = Command(resume=answers)


def answer_to(question: Any) -> Any:
    if "action_requests" in question:
        return {"decisions": [{"type": "approve"} for _ in question["action_requests"]]}
    return "yes"


async def completed(uri: str, database: str) -> Counter[Any]:
    """Recorded results of the only run, by kind."""
    async with DurableClient(uri, database=database) as client:
        [run] = await client.list_runs()
        return Counter(event.kind for event in await client.history(run.run_id) if event.type == "activity.completed")


ONCE = {"scripted": 3, "look": 2, "buy": 2}


def ran() -> dict[str, int]:
    return {name: RAN[name] for name in ONCE}


@pytest.mark.parametrize("colour", ["async", "sync"])
@pytest.mark.parametrize("wrapped", [False, True])
async def test_two_lines_make_an_agent_durable(mongo_uri: str, database: str, colour: str, wrapped: bool) -> None:
    """Plain model and tools run once each over all attempts; what is wrapped and under the middleware is recorded once."""
    if colour == "sync":
        # An async-only tool cannot run in a synchronous graph, so only the other one is called.
        model = Scripted(script=[calls("buy", "buy"), AIMessage("done")])
        messages = await finish(lambda: build_app(mongo_uri, database, lambda app: [app.middleware()], wrapped=wrapped, model=model), colour)
        assert (RAN["scripted"], RAN["buy"]) == (2, 2)
    else:
        messages = await finish(lambda: build_app(mongo_uri, database, lambda app: [app.middleware()], wrapped=wrapped))
        assert ran() == ONCE
    assert messages[-1].content == "done"
    assert await completed(mongo_uri, database) == ({"LLM": 3, "TOOL": 4} if colour == "async" else {"LLM": 2, "TOOL": 2})


STOCK: dict[str, Callable[[], AgentMiddleware[Any, Any, Any]]] = {
    "model retry": lambda: ModelRetryMiddleware(max_retries=2, initial_delay=0),
    "tool retry": lambda: ToolRetryMiddleware(max_retries=2, initial_delay=0),
    "fallback": lambda: ModelFallbackMiddleware(Scripted(script=script(), label="fallback")),
    "model call limit": lambda: ModelCallLimitMiddleware(run_limit=10),
    "tool call limit": lambda: ToolCallLimitMiddleware(run_limit=10),
    "summarization": lambda: SummarizationMiddleware(
        Scripted(script=[AIMessage("so far")], label="summary"), trigger=("messages", 6), keep=("messages", 2)
    ),
    "human in the loop": lambda: HumanInTheLoopMiddleware(interrupt_on={"look": True}),
    "pii": lambda: PIIMiddleware("email", strategy="redact"),
}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", STOCK)
async def test_stock_middleware_in_any_order(mongo_uri: str, database: str, name: str, is_first: bool) -> None:
    """No stock middleware, inside or outside, swallows an interrupt or repeats an effect, its own model calls included."""

    def middleware(app: App) -> list[Any]:
        ours, stock = app.middleware(), STOCK[name]()
        return [ours, stock] if is_first else [stock, ours]

    messages = await finish(lambda: build_app(mongo_uri, database, middleware))
    assert messages[-1].content == "done"
    recorded = await completed(mongo_uri, database)
    assert recorded["LLM"] == RAN["scripted"] + RAN["summary"]
    assert recorded["TOOL"] == RAN["look"] + RAN["buy"]
    if name == "summarization":  # the script goes by the answers that are left, so it says more here
        assert RAN["summary"] >= 1
    else:
        assert ran() == ONCE
        assert RAN["fallback"] == 0


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", ["model retry", "fallback"])
async def test_a_failing_model_is_recorded_as_what_came_of_it(mongo_uri: str, database: str, name: str, is_first: bool) -> None:
    """A retry or a fallback happens in the attempt in which the model failed, and is replayed like any other answer."""
    failing = itertools.count()

    def make() -> App:
        model = Scripted(script=script(), failures=1 if next(failing) == 0 else 0)

        def middleware(app: App) -> list[Any]:
            return [app.middleware(), STOCK[name]()] if is_first else [STOCK[name](), app.middleware()]

        return build_app(mongo_uri, database, middleware, model=model)

    messages = await finish(make)
    assert messages[-1].content == "done"
    assert RAN["look"] == 2
    assert RAN["buy"] == 2
    assert RAN["scripted"] + RAN["fallback"] == 4


class Verdict(BaseModel):
    good: bool


async def test_structured_answers_are_recorded(mongo_uri: str, database: str) -> None:
    """The schema that an agent names needs no registration: its instance comes back in every attempt."""
    structured = AIMessage("", tool_calls=[{"name": "Verdict", "args": {"good": True}, "id": "v"}])
    app = App("agent", uri=mongo_uri, database=database, types=(Verdict,))

    @app.entrypoint
    def build() -> Any:
        model = Scripted(script=[calls("buy"), structured])
        return create_agent(model, [buy], middleware=[app.middleware()], response_format=Verdict)

    out = await app.ainvoke({"messages": [HumanMessage("go")]}, CONFIG)
    out = await app.ainvoke(Command(resume="yes"), CONFIG)
    assert out["structured_response"] == Verdict(good=True)


async def test_an_agent_outside_a_run_is_a_plain_one(mongo_uri: str, database: str) -> None:
    """The middleware does nothing when nobody runs the graph durably."""
    RAN.clear()
    app = App("agent", uri=mongo_uri, database=database)
    agent = create_agent(Scripted(script=[calls("look"), AIMessage("done")]), [look], middleware=[app.middleware()])
    out = await agent.ainvoke({"messages": [HumanMessage("go")]})
    assert out["messages"][-1].content == "done"
    assert RAN["look"] == 1
