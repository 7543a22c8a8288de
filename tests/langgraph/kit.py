"""What the graphs of these tests are made of: effects that keep a ledger, a scripted model, and questions that an oracle answers on the spot.

A body is written once, as a coroutine function that awaits only what the kit gives. In a synchronous kit these awaitables are done already, so that
`driven` turns the coroutine function into a plain one: the same graph exists in both colours.
"""

from __future__ import annotations

import asyncio
import functools
import operator
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import Annotated, Any, TypedDict

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt as native_interrupt
from pydantic import ConfigDict

from mongo_durable import App
from mongo_durable.langgraph.models import DurableModel
from mongo_durable.langgraph.tools import DurableTool


class State(TypedDict, total=False):
    """Lines that nodes add, and what a Send hands over."""

    lines: Annotated[list[Any], operator.add]
    work: Any


class Lines(TypedDict, total=False):
    """What a child graph gives back."""

    lines: Annotated[list[Any], operator.add]


class Ledger:
    """Which bodies ran, with what: the outside world of a test, shared by all attempts of a run."""

    def __init__(self) -> None:
        self.ran: Counter[tuple[str, str, str]] = Counter()
        self._lock = threading.Lock()

    def note(self, kind: str, name: str, given: object) -> None:
        """A body has started."""
        with self._lock:
            self.ran[(kind, name, repr(given))] += 1

    def of(self, *names: str) -> Counter[tuple[str, str, str]]:
        """The bodies of these names."""
        return Counter({key: count for key, count in self.ran.items() if key[1] in names})

    def without(self, *names: str) -> Counter[tuple[str, str, str]]:
        """All bodies but those whose names end so."""
        return Counter({key: count for key, count in self.ran.items() if not key[1].endswith(names)})


class _Done:
    """An awaitable that is done already."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, Any]:
        return self._value
        yield


def driven(function: Callable[..., Any]) -> Callable[..., Any]:
    """The plain function that a coroutine function is when everything that it awaits is done already."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        coroutine = function(*args, **kwargs)
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value
        coroutine.close()
        raise AssertionError(f"{function.__name__} awaited something that was not done")

    return call


class ScriptedModel(BaseChatModel):
    """Answers with the entry of its script for the number of answers that it sees. `name_` is what the ledger calls it."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    script: list[AIMessage]
    ledger: Any
    pause_s: float = 0.0
    name_: str = "model"

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _answer(self, messages: list[BaseMessage]) -> ChatResult:
        self.ledger.note("LLM", self.name_, [(each.type, each.content) for each in messages])
        number = sum(isinstance(each, AIMessage) for each in messages)
        return ChatResult(generations=[ChatGeneration(message=self.script[number].model_copy(deep=True))])

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        time.sleep(random.random() * self.pause_s)
        return self._answer(messages)

    async def _agenerate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        await asyncio.sleep(random.random() * self.pause_s)
        return self._answer(messages)

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=[getattr(each, "name", None) or each.__name__ for each in tools], **kwargs)


def calls(*names: str, prefix: str = "call") -> AIMessage:
    """A model response that calls these tools."""
    return AIMessage("", tool_calls=[{"name": name, "args": {"q": f"{name}{i}"}, "id": f"{prefix}-{i}"} for i, name in enumerate(names)])


def answer(question: Any) -> Any:
    """What a person says to a question."""
    if isinstance(question, Mapping) and "action_requests" in question:
        return {"decisions": [{"type": "approve"} for _ in question["action_requests"]]}
    if isinstance(question, Mapping) and question.get("type") == "tool_approval":
        return {"type": "approve"}
    return f"A({question})"


ASKING = ("ask", "ask_twice", "delegate")
"""Tools whose bodies are entered again with each answer; every other body runs once."""


class Kit:
    """Effects and questions for one build of a graph.

    Args:
        is_sync: Bodies are plain functions.
        is_oracle: Questions are answered on the spot.
        pause_s: Every body pauses for up to this long.
    """

    def __init__(self, app: App, ledger: Ledger, *, is_sync: bool, is_oracle: bool = False, pause_s: float = 0.0) -> None:
        self.app = app
        self.ledger = ledger
        self.is_sync = is_sync
        self.is_oracle = is_oracle
        self.pause_s = pause_s
        self._models = 0

        async def act(x: Any) -> str:
            ledger.note("ACTIVITY", "act", x)
            await self.pause()
            return f"e({x})"

        async def ask(q: str) -> str:
            """Ask once, between two effects."""
            self._note_tool("ask", q)
            before = await self.act(f"pre-{q}")
            await self.pause()
            said = self.interrupt(q)
            after = await self.act(f"post-{q}")
            return f"{before}{said}{after}"

        async def ask_twice(q: str) -> str:
            """Ask twice, with an effect between."""
            self._note_tool("ask_twice", q)
            first = self.interrupt(f"{q}.1")
            await self.act(f"mid-{q}")
            await self.pause()
            return f"{first}{self.interrupt(f'{q}.2')}"

        async def plain(q: str) -> str:
            """Ask nothing."""
            self._note_tool("plain", q)
            await self.pause()
            return f"plain:{q}"

        self._act = app.activity(idempotent=True)(self.body(act))
        self.ask, self.ask_twice, self.plain = (self.tool(each) for each in (ask, ask_twice, plain))

    def _note_tool(self, name: str, q: str) -> None:
        self.ledger.note("TOOL", name, {"q": q})

    def body(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A node, edge or tool function in the kit's colour."""
        return driven(function) if self.is_sync else function

    def tool(self, function: Callable[..., Any]) -> DurableTool:
        """A durable tool."""
        return self.app.tool(idempotent=True)(self.body(function))

    def delegate(self, agent: Any, name: str = "delegate") -> DurableTool:
        """A durable tool that hands its question to an agent."""

        async def delegate(q: str) -> str:
            """Ask another agent."""
            self._note_tool(name, q)
            said = await self.call(agent, {"messages": [("user", q)]})
            return str([each.content for each in said["messages"] if each.type == "tool"])

        delegate.__name__ = name
        return self.tool(delegate)

    @property
    def tools(self) -> list[DurableTool]:
        """The kit's own tools."""
        return [self.ask, self.ask_twice, self.plain]

    def model(self, *script: AIMessage) -> DurableModel:
        """A durable scripted model."""
        return self.app.llm(ScriptedModel(script=list(script), ledger=self.ledger, pause_s=self.pause_s), name="model")

    def act(self, x: Any) -> Awaitable[str]:
        """A durable activity."""
        return _Done(self._act(x)) if self.is_sync else self._act(x)

    def call(self, runnable: Any, given: Any) -> Awaitable[Any]:
        """Call a graph, a model or a tool."""
        return _Done(runnable.invoke(given)) if self.is_sync else runnable.ainvoke(given)

    def interrupt(self, question: Any, **options: Any) -> Any:
        """Ask a person."""
        return answer(question) if self.is_oracle else native_interrupt(question, **options)

    def sleep(self, seconds: float) -> Awaitable[None]:
        """A durable timer."""
        waited = self.app.sleep(seconds=seconds)
        return waited if waited is not None else _Done(None)

    def pause(self) -> Awaitable[None]:
        """Let others overtake."""
        length = random.random() * self.pause_s
        return _Done(time.sleep(length)) if self.is_sync else asyncio.sleep(length)

    def node(self, name: str, *, asks: bool = False) -> Callable[..., Any]:
        """A node with an effect; with a question and another effect if it asks."""

        async def node(state: State) -> State:
            line = await self.act(f"{name}.1")
            if asks:
                line += self.interrupt(name) + await self.act(f"{name}.2")
            return {"lines": [f"{name}:{line}"]}

        return self.body(node)

    def parallel(self, tag: str = "") -> Any:
        """A graph of three parallel nodes, two of which ask, and a last one."""
        graph = StateGraph(State, output_schema=Lines)
        names = ("p1", "p2", "p3")
        for name in names:
            graph.add_node(name, self.node(tag + name, asks=name != "p3"))
            graph.add_edge(START, name)
        graph.add_node("last", self.node(f"{tag}last"))
        graph.add_edge(names, "last")
        return graph.compile()
