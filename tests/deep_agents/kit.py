"""What the deep agents of these tests are made of: models that speak by script, delegations, and a watch on what models are given."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import ConfigDict

from mongo_durable.langgraph.models import DurableModel
from mongo_durable.protocol.events import EventType
from mongo_durable.store import heads
from tests.langgraph.bench import Bench, Colour, Make, Told
from tests.langgraph.kit import Kit, Ledger

Say = Callable[[str, int], AIMessage]
"""From what was asked last, and how many answers there have been since, to the next answer."""


class LastFirst:
    """Lets the first answers of sub-agents come in the opposite order of what they are asked."""

    def __init__(self, *asked: str) -> None:
        self._ended = {each: threading.Event() for each in asked}
        self._after = dict(itertools.pairwise(asked))

    def wait(self, asked: str) -> None:
        """Until the one who is asked after this one has had its answer."""
        later = self._after.get(asked)
        assert later is None or self._ended[later].wait(30), f"{later} never came"

    def end(self, asked: str) -> None:
        """This one has its answer."""
        if asked in self._ended:
            self._ended[asked].set()


class Speaker(BaseChatModel):
    """A model that speaks by script. `name_` is what the ledger calls it; it pauses for up to `pause_s`."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    say: Any
    ledger: Any
    name_: str
    pause_s: float = 0.0
    turns: LastFirst | None = None

    @property
    def _llm_type(self) -> str:
        return "speaker"

    def _answer(self, messages: list[BaseMessage]) -> ChatResult:
        self.ledger.note("LLM", self.name_, [(each.type, each.content) for each in messages])
        last = max(index for index, each in enumerate(messages) if isinstance(each, HumanMessage))
        number = sum(isinstance(each, AIMessage) for each in messages[last:])
        if self.turns is not None:
            self.turns.end(str(messages[last].content))
        return ChatResult(generations=[ChatGeneration(message=self.say(str(messages[last].content), number).model_copy(deep=True))])

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any) -> ChatResult:
        if self.turns is not None:
            self.turns.wait(str(messages[-1].content))
        time.sleep(random.random() * self.pause_s)
        return self._answer(messages)

    async def _agenerate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any) -> ChatResult:
        if self.turns is not None:
            await asyncio.to_thread(self.turns.wait, str(messages[-1].content))
        await asyncio.sleep(random.random() * self.pause_s)
        return self._answer(messages)

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        return self.bind(tools=[each.name for each in tools], **options)


def speaker(kit: Kit, name: str, say: Say) -> Speaker:
    """A plain model: nothing about it is durable."""
    return Speaker(say=say, ledger=kit.ledger, name_=name, pause_s=kit.pause_s)


def call(name: str, id: str | None, **arguments: Any) -> Any:
    """A tool call."""
    return {"name": name, "args": arguments, "id": id, "type": "tool_call"}


def order(*calls: Any) -> AIMessage:
    """A model response that makes these calls."""
    return AIMessage("", tool_calls=list(calls))


def task(description: str, kind: str, id: str | None = None) -> Any:
    """A call of a sub-agent."""
    return call("task", f"call-{description}" if id is None else id, description=description, subagent_type=kind)


def in_turn(*answers: AIMessage | Callable[[str], AIMessage]) -> Say:
    """A script: one answer after the other."""

    def say(asked: str, number: int) -> AIMessage:
        said = answers[number]
        return said if isinstance(said, AIMessage) else said(asked)

    return say


def researcher(*tools: str) -> Say:
    """A sub-agent that calls these tools at once with what it was asked, then one of them again, and reports."""
    return in_turn(
        lambda asked: order(*(call(tool, f"{tool}-{index}", q=f"{asked}.{index}") for index, tool in enumerate(tools))),
        lambda asked: order(call("plain", "again", q=f"{asked}.again")),
        lambda asked: AIMessage(f"report on {asked}"),
    )


def subagent(kit: Kit, name: str, say: Say, **options: Any) -> dict[str, Any]:
    """A declared sub-agent with a plain model."""
    return {
        "name": name,
        "description": f"The {name}.",
        "system_prompt": f"You are the {name}.",
        "model": speaker(kit, name, say),
        "tools": kit.tools,
        **options,
    }


def without_times(state: Any) -> Any:
    """A final state without the times of files: plain deepagents takes them from the clock."""
    files = {path: {name: each for name, each in file.items() if not name.endswith("_at")} for path, file in state.get("files", {}).items()}
    return {name: each for name, each in state.items() if name not in ("files", "__interrupt__")} | {"files": files}


class Inputs:
    """What models were given, byte by byte, in all attempts, replayed calls included."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.count = 0
        self._lock = threading.Lock()

    def note(self, run_id: str, position: str, messages: list[BaseMessage]) -> None:
        """A model is called at a position."""
        given = json.dumps([each.model_dump(mode="json") for each in messages], sort_keys=True)
        with self._lock:
            self.seen[(run_id, position)].add(given)
            self.count += 1

    def of(self, run_id: str) -> dict[str, set[str]]:
        """By position."""
        return {position: given for (run, position), given in self.seen.items() if run == run_id}


@contextmanager
def watched_inputs() -> Iterator[Inputs]:
    """Watch what every durable model is given, ids included, whether it is called or its answer is replayed."""
    inputs = Inputs()
    real = DurableModel._effect

    def effect(self: DurableModel, session: Any, messages: list[BaseMessage], *rest: Any) -> Any:
        made = real(self, session, messages, *rest)
        # An attempt that is over goes on for a while where something swallows that (summarization does), and calls nobody any more.
        if session.attempt.failure is None:
            inputs.note(session.attempt.run_id, made.call.position.text, messages)
        return made

    DurableModel._effect = effect  # type: ignore[method-assign]
    try:
        yield inputs
    finally:
        DurableModel._effect = real  # type: ignore[method-assign]


def researching(count: int, *tools: str, **options: Any) -> Make:
    """A root that delegates to `count` researchers at once, calls a tool beside them, and then delegates to one more."""

    def make(kit: Kit) -> Any:
        names = [chr(ord("A") + index) for index in range(count)]
        root = in_turn(
            order(*(task(name, "research") for name in names), call("plain", "call-own", q="own")),
            order(task("Z", "research")),
            AIMessage("done"),
        )
        return kit.app.deep_agent(
            model=speaker(kit, "root", root), tools=kit.tools, subagents=[subagent(kit, "research", researcher(*tools), **options)]
        )

    return make


def positions_of(told: Any, kind: str = "LLM") -> list[str]:
    """Where effects of a kind stand, in their natural order."""
    found = {each.position: each.position.sort_key for each in told.events if each.position is not None and each.kind == kind}
    return [position.text for position in sorted(found, key=found.__getitem__)]


HELLO: dict[str, Any] = {"messages": [("user", "go")]}


def run(bench: Bench, make: Make, colour: Colour = "async", **options: Any) -> Told:
    """Run a deep agent to its end, every question answered by an attempt of its own."""
    return bench.complete(make, options.pop("given", HELLO), colour, options.pop("ledger", Ledger()), **options)


def final_messages(bench: Bench, told: Told) -> list[BaseMessage]:
    """The messages of the final state, with their ids."""
    app = bench.app("reader")
    [ended] = [event for event in told.events if event.type is EventType.RUN_COMPLETED]
    return list(app.codec.decode(bench.call(heads.get(bench.process.connection, ended.run_id)).output)["messages"])


def where(told: Told, inputs: Inputs) -> dict[str, str]:
    """By what a sub-agent was asked, the path under which its model was called."""
    found = {}
    for position, given in inputs.of(told.events[0].run_id).items():
        path = position.partition("@")[0].rpartition("/")[0]
        humans = [each["content"] for each in json.loads(min(given)) if each["type"] == "human"]
        found[humans[-1]] = path
    return found
