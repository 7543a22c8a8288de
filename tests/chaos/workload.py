"""What the runs of the chaos suite do.

`desk` is an agent: a model that asks for tools, turn by turn of a conversation; parallel questions; a loop. `fan` is a graph: a Send fan-out of
workers, some of which ask, a transactional activity, a loop. `bench` is a synchronous graph, executed in threads.

Tools and activities have each policy for an outcome that nobody knows. Their inputs and results depend on the plan of the run alone, so that what a
run's output has to be is known beforehand, up to the words that people answered.
"""

from __future__ import annotations

import asyncio
import json
import operator
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, TypedDict

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Send, interrupt
from pymongo import AsyncMongoClient
from pymongo.errors import PyMongoError

from mongo_durable import App, RetryPolicy, current_activity
from tests.chaos.outside import Outside

LONGEST_EFFECT_S = 0.03
"""A body takes up to this long between its beginning and its effect: where it is worst to die."""

MAY_RUN_AGAIN = frozenset({"model", "note", "row", "scrap"})
"""Effects whose process may die in them without anybody being asked."""
TRANSACTIONAL = frozenset({"enter"})
TRIED_AGAIN = frozenset({"row", *TRANSACTIONAL})
"""Effects whose body may begin more than once in one attempt: it has a retry policy, or its transaction is repeated."""

# Rounds of tool calls, one plan a kind of run. A tool's item is `<round>.<number of the call>`.
PLANS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("note", "ask", "row"), ("pay",)),
    (("ask", "ask", "book"), ("row", "note")),
    (("pay", "ask"), ("note", "ask")),
    (("row", "note", "book", "pay"),),
)
WORKERS = 4
LAPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A run that somebody wants.

    Attributes:
        plan: Index of the agent's plan.
        thread_id: Of a conversation that the run is a turn of; None for a run on its own.
        cancel_after_s: Somebody changes their mind after this long; None: nobody does.
    """

    run_id: str
    workflow: str
    plan: int = 0
    thread_id: str | None = None
    cancel_after_s: float | None = None

    @property
    def kind(self) -> str:
        """Orders of one kind have the same structure, so the same positions (I11)."""
        return f"{self.workflow}-{self.plan}"

    def input(self) -> dict[str, Any]:
        """What the run starts from."""
        if self.workflow == "desk":
            return {"messages": [HumanMessage(json.dumps({"run": self.run_id, "plan": self.plan}))]}
        return {"run": self.run_id, "lines": []}


def orders(seed: int, number: int) -> list[Order]:
    """The orders of a seed: of all kinds, some of them turns of conversations, a few of them called off."""
    dice = random.Random(f"orders {seed}")
    found = []
    for index in range(number):
        workflow = dice.choices(["desk", "fan", "bench"], [5, 3, 2])[0]
        plan = dice.randrange(len(PLANS)) if workflow == "desk" else 0
        # A run that has failed cannot go on after its conversation has: what may fail is no turn of one.
        is_turn = workflow == "desk" and not any("book" in calls for calls in PLANS[plan]) and dice.random() < 0.5
        thread_id = f"talk-{index // 24}" if is_turn else None
        cancel_after_s = dice.random() * 1.5 if dice.random() < 0.05 else None
        found.append(Order(run_id=f"r{index:05}", workflow=workflow, plan=plan, thread_id=thread_id, cancel_after_s=cancel_after_s))
    return found


def question(item: str, run_id: str) -> dict[str, str]:
    """What a run asks."""
    return {"ask": item, "run": run_id}


def answer(asked: Mapping[str, str], word: str) -> dict[str, str]:
    """What a person answers: it says to whom it belongs."""
    return {"to": asked["ask"], "run": asked["run"], "word": word}


def said(item: str, given: Mapping[str, str]) -> str:
    """What a run makes of an answer to its question about `item`."""
    return f"{item}: {given['to']} {given['run']} {given['word']}"


def expected(order: Order, words: Mapping[str, str]) -> list[str]:
    """The lines that a completed run ends with.

    Args:
        words: What people answered, by item.
    """

    def line(tool: str, item: str) -> str:
        return said(item, answer(question(item, order.run_id), words[item])) if tool == "ask" else f"{tool} {item}"

    match order.workflow:
        case "desk":
            return [line(tool, f"{number}.{index}") for number, calls in enumerate(PLANS[order.plan]) for index, tool in enumerate(calls)]
        case "fan":
            worked = []
            for index in range(WORKERS):
                asked = [line("ask", f"worker {index}")] if index % 2 else []
                worked.append("; ".join([f"row {index}", *asked, f"enter {index}"]))
            return [*worked, *(each for lap in range(LAPS) for each in (f"pay lap {lap}", f"enter lap {lap}")), line("ask", "end")]
        case _:
            return ["scrap first", line("ask", "sure"), *(f"pay_sync {lap}" for lap in range(LAPS))]


def items_asked(order: Order) -> list[str]:
    """The items that the run asks about."""
    match order.workflow:
        case "desk":
            return [f"{number}.{index}" for number, calls in enumerate(PLANS[order.plan]) for index, tool in enumerate(calls) if tool == "ask"]
        case "fan":
            return [*(f"worker {index}" for index in range(WORKERS) if index % 2), "end"]
        case _:
            return ["sure"]


def lines_of(order: Order, output: Any) -> list[str]:
    """The lines of an output; of an agent's, those of its last turn."""
    if order.workflow != "desk":
        found: list[str] = output["lines"]
        return found
    messages: list[BaseMessage] = output["messages"]
    assert messages[-1].content == "done", messages[-1]
    return [str(message.content) for message in _last_turn(messages) if isinstance(message, ToolMessage)]


def turns_of(output: Any) -> list[str]:
    """The runs whose turns an agent's output remembers, its own the last."""
    return [json.loads(str(message.content))["run"] for message in output["messages"] if isinstance(message, HumanMessage)]


def _last_turn(messages: Sequence[BaseMessage]) -> Sequence[BaseMessage]:
    start = max(index for index, message in enumerate(messages) if isinstance(message, HumanMessage))
    return messages[start:]


class Planner(BaseChatModel):
    """Asks for the tools of its plan, round by round: how far it is, the conversation says."""

    outside: Any

    @property
    def _llm_type(self) -> str:
        return "planner"

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any) -> ChatResult:
        turn = _last_turn(messages)
        plan = PLANS[json.loads(str(turn[0].content))["plan"]]
        number = sum(isinstance(message, AIMessage) for message in turn)
        self.outside.begin("model")
        if number == len(plan):
            return _says(AIMessage("done"))
        calls = [{"name": tool, "args": {"item": f"{number}.{index}"}, "id": f"call-{number}-{index}"} for index, tool in enumerate(plan[number])]
        return _says(AIMessage("", tool_calls=calls))


def _says(message: AIMessage) -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=message)])


class FanState(TypedDict, total=False):
    """State of `fan` and `bench`."""

    run: str
    index: int
    lap: int
    lines: Annotated[list[str], operator.add]


Make = Callable[..., App]


class Workload:
    """The apps of one process.

    Args:
        client: For what tools write to MongoDB on their own account.
    """

    def __init__(self, make: Make, database: str, client: AsyncMongoClient[dict[str, Any]], outside: Outside) -> None:
        self._make = make
        self._outside = outside
        self._database = database
        self._rows = client[database]["rows"]

    def apps(self) -> list[App]:
        """One app for each workflow."""
        return [self._desk(self._make("desk")), self._fan(self._make("fan")), self._bench(self._make("bench", sync=True))]

    async def _effect(self, name: str, item: str) -> str:
        self._outside.begin(name)
        await asyncio.sleep(random.random() * LONGEST_EFFECT_S)
        return self._outside.happen(name, f"{name} {item}")

    async def _row(self, item: str) -> str:
        """Its effect is a write that does no harm when it is repeated."""
        self._outside.begin("row")
        await self._rows.update_one({"_id": current_activity().activity_id}, {"$set": {"item": item}, "$inc": {"writes": 1}}, upsert=True)
        return self._outside.happen("row", f"row {item}")

    def _desk(self, app: App) -> App:
        @app.tool(on_unknown_outcome="rerun")
        async def note(item: str) -> str:
            """Note something."""
            return await self._effect("note", item)

        @app.tool(idempotent=True, retry=PATIENT)
        async def row(item: str) -> str:
            """Write a row."""
            return await self._row(item)

        @app.tool(on_unknown_outcome="suspend")
        async def pay(item: str) -> str:
            """Pay."""
            return await self._effect("pay", item)

        @app.tool(on_unknown_outcome="fail")
        async def book(item: str) -> str:
            """Book."""
            return await self._effect("book", item)

        @app.tool(on_unknown_outcome="suspend")
        async def ask(item: str) -> str:
            """Ask a person, and act on the answer."""
            given = interrupt(question(item, current_activity().run_id))
            self._outside.begin("ask")
            await asyncio.sleep(random.random() * LONGEST_EFFECT_S)
            return self._outside.happen("ask", said(item, given))

        model = app.llm(Planner(outside=self._outside), name="model")

        async def think(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await model.ainvoke(state["messages"])]}

        @app.entrypoint
        def build() -> StateGraph[MessagesState]:
            graph = StateGraph(MessagesState)
            graph.add_node("model", think)
            graph.add_node("tools", ToolNode(app.get_tools()))
            graph.add_edge(START, "model")
            graph.add_conditional_edges("model", tools_condition)
            graph.add_edge("tools", "model")
            return graph

        return app

    def _fan(self, app: App) -> App:
        @app.activity(idempotent=True, retry=PATIENT)
        async def row(item: str) -> str:
            return await self._row(item)

        @app.activity(transactional=True)
        async def enter(item: str, *, session: Any) -> str:
            self._outside.begin("enter")
            entry = {"key": current_activity().activity_id, "run_id": current_activity().run_id, "item": item}
            await session.client[self._database]["ledger"].insert_one(entry, session=session)
            return f"enter {item}"

        @app.activity(on_unknown_outcome="suspend")
        async def pay(item: str) -> str:
            return await self._effect("pay", item)

        def scatter(state: FanState) -> list[Send]:
            return [Send("work", {"run": state["run"], "index": index}) for index in range(WORKERS)]

        async def work(state: FanState) -> FanState:
            index = state["index"]
            found = [await row(str(index))]
            if index % 2:
                item = f"worker {index}"
                found.append(said(item, interrupt(question(item, state["run"]))))
            found.append(await enter(str(index)))
            return {"lines": ["; ".join(found)]}

        async def lap(state: FanState) -> FanState:
            number = state.get("lap", 0)
            return {"lap": number + 1, "lines": [await pay(f"lap {number}"), await enter(f"lap {number}")]}

        async def end(state: FanState) -> FanState:
            return {"lines": [said("end", interrupt(question("end", state["run"])))]}

        @app.entrypoint
        def build() -> StateGraph[FanState]:
            graph = StateGraph(FanState)
            graph.add_node("work", work)
            graph.add_node("lap", lap)
            graph.add_node("end", end)
            graph.add_conditional_edges(START, scatter, ["work"])
            graph.add_edge("work", "lap")
            graph.add_conditional_edges("lap", lambda state: "end" if state["lap"] == LAPS else "lap", ["lap", "end"])
            graph.add_edge("end", END)
            return graph

        return app

    def _bench(self, app: App) -> App:
        @app.activity(idempotent=True)
        def scrap(item: str) -> str:
            return self._in_thread("scrap", item)

        @app.activity(on_unknown_outcome="suspend")
        def pay_sync(item: str) -> str:
            return self._in_thread("pay_sync", item)

        def first(state: FanState) -> FanState:
            return {"lines": [scrap("first"), said("sure", interrupt(question("sure", state["run"])))]}

        def lap(state: FanState) -> FanState:
            number = state.get("lap", 0)
            return {"lap": number + 1, "lines": [pay_sync(str(number))]}

        @app.entrypoint
        def build() -> StateGraph[FanState]:
            graph = StateGraph(FanState)
            graph.add_node("first", first)
            graph.add_node("lap", lap)
            graph.add_edge(START, "first")
            graph.add_edge("first", "lap")
            graph.add_conditional_edges("lap", lambda state: END if state["lap"] == LAPS else "lap", ["lap", END])
            return graph

        return app

    def _in_thread(self, name: str, item: str) -> str:
        self._outside.begin(name)
        time.sleep(random.random() * LONGEST_EFFECT_S)
        return self._outside.happen(name, f"{name} {item}")


PATIENT = RetryPolicy(
    max_attempts=100, initial_interval=timedelta(seconds=0.1), max_interval=timedelta(seconds=1), jitter=timedelta(seconds=0.1), retry_on=PyMongoError
)
"""For bodies that write to the very cluster under fault: a failure that outlasts it would be recorded, and rightly so."""
