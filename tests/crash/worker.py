"""What runs in the processes that the crash tests start, kill and stop.

The workflow `purchase`:

    START -> model -> tools(quote, approve, book) -> model -> END

`quote` may run again, `book` must not be guessed about, `approve` asks a person first and has a person asked when nobody knows whether it happened.
Each appends a line `<tool> <activity id>` to the effects file: that is the outside world. The workflow `purchase-in-turn` has the model ask for one
after the other: quote, book, approve.

The workflow `bulky` has one activity whose result is too large for its document; `ledger` has one that writes to the same cluster.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from typing import Any, Literal

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, interrupt

from mongo_durable import App, DurableClient, Runner, SigningKeys, current_activity
from mongo_durable.cli.commands import app as command_line
from mongo_durable.errors import DurableError
from mongo_durable.store import failpoints, frontiers
from mongo_durable.store.connection import Endpoint
from mongo_durable.store.failpoints import FailPoint

RUN_ID = "po-17"
FORKED_ID = "po-18"
THREAD_ID = "desk-purchase"
LARGE = "desk " * 60_000
PATIENCE_S = 100.0

Moment = Literal["before", "after"]
"""Of a tool's body: before or after its line in the effects file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a process is to do.

    Attributes:
        role: One of `ROLES`.
        effects: Path of the effects file.
        kill_at: Fail point and number of the hit at which the process kills itself.
        body: Tool and moment in whose body something happens: the process dies, or tells `in body` and waits until it is told to go on.
        answers: For `resolve` and `expire`, by activity id.
        is_broken: The graph raises where it would call the model for the last time.
    """

    uri: str
    database: str
    effects: str
    role: str
    workflow: str = "purchase"
    run_id: str = RUN_ID
    lease: timedelta = timedelta(seconds=1.5)
    kill_at: tuple[FailPoint, int] | None = None
    body: tuple[str, Moment, Literal["die", "wait"]] | None = None
    answers: Mapping[str, Any] | None = None
    is_broken: bool = False


class ScriptedModel(BaseChatModel):
    """Answers with the next message of its script: how far a conversation is, its messages say."""

    script: list[AIMessage]

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any) -> ChatResult:
        said = sum(isinstance(message, AIMessage) for message in messages)
        return ChatResult(generations=[ChatGeneration(message=self.script[said].model_copy())])


def app_for(order: Order, pipe: Pipe) -> App:
    """The workflow of an order."""
    app = App(order.workflow, uri=order.uri, database=order.database, lease=order.lease)
    match order.workflow:
        case "bulky":
            return _bulky(app, order, pipe)
        case "ledger":
            return _ledger(app, order)
        case _:
            return _purchase(app, order, pipe)


async def _effect(order: Order, pipe: Pipe, tool: str) -> None:
    """The outside effect of a tool, once for each time its body gets here."""
    await _moment(order, pipe, tool, "before")
    line = os.open(order.effects, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(line, f"{tool} {current_activity().activity_id}\n".encode())
    os.close(line)
    await _moment(order, pipe, tool, "after")


async def _moment(order: Order, pipe: Pipe, tool: str, moment: Moment) -> None:
    if order.body is None or order.body[:2] != (tool, moment):
        return
    if order.body[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.send("in body")
    await asyncio.to_thread(pipe.recv)


def _purchase(app: App, order: Order, pipe: Pipe) -> App:
    @app.tool(on_unknown_outcome="rerun")
    async def quote(item: str) -> str:
        """Ask for a price."""
        await _effect(order, pipe, "quote")
        return f"{item}: 10"

    @app.tool(on_unknown_outcome="suspend")
    async def approve(item: str) -> str:
        """Have a purchase approved."""
        answer = interrupt({"approve": item})
        await _effect(order, pipe, "approve")
        return f"approved: {answer}"

    @app.tool(on_unknown_outcome="fail")
    async def book(item: str) -> str:
        """Book a purchase."""
        await _effect(order, pipe, "book")
        return f"{item} booked"

    def calls(*names: str) -> AIMessage:
        return AIMessage("", tool_calls=[{"name": name, "args": {"item": "desk"}, "id": f"call-{name}"} for name in names])

    asked = [calls("quote"), calls("book"), calls("approve")] if order.workflow == "purchase-in-turn" else [calls("quote", "approve", "book")]
    model = app.llm(ScriptedModel(script=[*asked, AIMessage("bought")]))

    @app.entrypoint
    def build() -> StateGraph:
        async def ask(state: MessagesState) -> dict[str, Any]:
            if order.is_broken and sum(isinstance(message, AIMessage) for message in state["messages"]) == len(asked):
                raise ValueError("broken")
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("model", ask)
        graph.add_node("tools", ToolNode(app.get_tools()))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        return graph

    return app


def _bulky(app: App, order: Order, pipe: Pipe) -> App:
    @app.activity(idempotent=True)
    async def fetch(item: str) -> str:
        await _effect(order, pipe, "fetch")
        return f"{item}: {LARGE}"

    @app.entrypoint
    def build() -> StateGraph:
        async def node(state: MessagesState) -> dict[str, Any]:
            return {"messages": [AIMessage(await fetch("desk"))]}

        graph = StateGraph(MessagesState)
        graph.add_node("node", node)
        graph.add_edge(START, "node")
        return graph

    return app


def _ledger(app: App, order: Order) -> App:
    @app.activity(transactional=True)
    async def enter(item: str, *, session: Any) -> str:
        await session.client[order.database]["ledger"].insert_one({"item": item}, session=session)
        return f"{item} entered"

    @app.entrypoint
    def build() -> StateGraph:
        async def node(state: MessagesState) -> dict[str, Any]:
            return {"messages": [AIMessage(await enter("desk"))]}

        graph = StateGraph(MessagesState)
        graph.add_node("node", node)
        graph.add_edge(START, "node")
        return graph

    return app


def new_input() -> dict[str, Any]:
    """What the run starts from."""
    return {"messages": [HumanMessage("buy a desk")]}


Result = dict[str, Any]


async def _submit(order: Order, pipe: Pipe) -> Result:
    async with DurableClient(order.uri, database=order.database) as client:
        await client.submit(order.workflow, new_input(), thread_id=THREAD_ID, run_id=order.run_id)
    return {}


async def _submit_and_die(order: Order, pipe: Pipe) -> Result:
    async with DurableClient(order.uri, database=order.database) as client:
        await client.submit(order.workflow, new_input(), thread_id=THREAD_ID, run_id=order.run_id)
        os.kill(os.getpid(), signal.SIGKILL)
    return {}


async def _work(order: Order, pipe: Pipe) -> Result:
    """Run until the run is at rest."""
    runner = Runner([app_for(order, pipe)], lease=order.lease, sweep_interval=timedelta(seconds=0.1))
    async with runner, DurableClient(order.uri, database=order.database) as client:
        snapshot = await client.wait(order.run_id, timeout=PATIENCE_S)
    return {"status": snapshot.status}


async def _work_until_told(order: Order, pipe: Pipe) -> Result:
    """Run until SIGTERM, and then release what runs."""
    runner = Runner([app_for(order, pipe)], lease=order.lease, sweep_interval=timedelta(seconds=0.1))
    return {"all_ended": await runner.run_forever(grace=timedelta(0))}


async def _invoke(order: Order, pipe: Pipe) -> Result:
    """Run in LangGraph's own shape, as an application without a runner does."""
    app = app_for(order, pipe)
    config: Any = {"configurable": {"thread_id": THREAD_ID}}
    try:
        await app.ainvoke(new_input(), config, run_id=order.run_id)
    finally:
        await app.aclose()
    return {}


async def _invoke_and_answer(order: Order, pipe: Pipe) -> Result:
    """Run in LangGraph's own shape, and go on with the answers."""
    app = app_for(order, pipe)
    config: Any = {"configurable": {"thread_id": THREAD_ID}}
    try:
        asked = await app.ainvoke(new_input(), config, run_id=order.run_id)
        await app.ainvoke(Command(resume={each.id: "yes" for each in asked["__interrupt__"]}), config)
    finally:
        await app.aclose()
    return {}


async def _resolve(order: Order, pipe: Pipe) -> Result:
    async with DurableClient(order.uri, database=order.database) as client:
        receipt = await client.resolve(order.run_id, order.answers or {})
    return {"receipt": receipt}


async def _resolve_often(order: Order, pipe: Pipe) -> Result:
    """Many tasks of this process answer at once, when they are told to, by every way: half of them `yes`, half of them `no`."""
    async with DurableClient(order.uri, database=order.database, signing_keys=SigningKeys({"k": "k" * 32})) as client:
        snapshot = await client.get_run(order.run_id)
        assert snapshot.frontier is not None
        asked = [entry.activity_id for entry in snapshot.frontier.entries]
        token = await client.resume_token(snapshot.frontier, expires_in=timedelta(hours=1))
        pipe.send("in body")
        await asyncio.to_thread(pipe.recv)

        async def one(number: int) -> Any:
            answers, by = dict.fromkeys(asked, "no" if number % 2 else "yes"), f"{os.getpid()}-{number}"
            match number % 5:
                case 0:
                    return await client.resolve_with_token(token, answers, resolved_by=by)
                case 1:
                    return (await client.draft_answer(order.run_id, answers, answered_by=by)).resolution
                case 2:
                    given = [f"--answer={activity_id}={json.dumps(answer)}" for activity_id, answer in answers.items()]
                    arguments = ["resolve", order.run_id, *given, "--by", by, "--uri", order.uri, "--database", order.database]
                    await asyncio.to_thread(command_line, arguments, standalone_mode=False)
                    return await client.resolve(order.run_id, answers)  # the receipt, which it only prints
                case _:
                    return await client.resolve(order.run_id, answers, resolved_by=by)

        outcomes = await asyncio.gather(*(one(number) for number in range(10)), return_exceptions=True)
    errors = [each for each in outcomes if isinstance(each, BaseException)]
    return {"receipts": [each for each in outcomes if not isinstance(each, BaseException)], "errors": errors}


async def _draft(order: Order, pipe: Pipe) -> Result:
    async with DurableClient(order.uri, database=order.database) as client:
        draft = await client.draft_answer(order.run_id, order.answers or {}, answered_by="somebody")
    return {"is_in": draft.resolution is not None}


async def _expire(order: Order, pipe: Pipe) -> Result:
    endpoint = Endpoint(order.uri, order.database)
    connection = endpoint.connection()
    try:
        frontier = await frontiers.current(connection, order.run_id)
        return {"was_mine": await frontiers.expire(connection, frontier, order.answers or {})}
    finally:
        await endpoint.aclose()


async def _cancel(order: Order, pipe: Pipe) -> Result:
    async with DurableClient(order.uri, database=order.database) as client:
        return {"status": (await client.cancel(order.run_id, reason="no longer needed")).status}


async def _retry(order: Order, pipe: Pipe) -> Result:
    async with DurableClient(order.uri, database=order.database) as client:
        return {"status": (await client.retry(order.run_id)).status}


async def _fork(order: Order, pipe: Pipe) -> Result:
    async with DurableClient(order.uri, database=order.database) as client:
        return {"run_id": (await client.fork(order.run_id, at=1, new_run_id=FORKED_ID)).run_id}


async def _prune(order: Order, pipe: Pipe) -> Result:
    async with DurableClient(order.uri, database=order.database) as client:
        return {"removed": await client.prune(older_than=timedelta())}


ROLES: dict[str, Callable[[Order, Pipe], Awaitable[Result]]] = {
    "submit": _submit,
    "submit and die": _submit_and_die,
    "work": _work,
    "work until told": _work_until_told,
    "invoke": _invoke,
    "invoke and answer": _invoke_and_answer,
    "resolve": _resolve,
    "resolve often": _resolve_often,
    "draft": _draft,
    "expire": _expire,
    "cancel": _cancel,
    "retry": _retry,
    "fork": _fork,
    "prune": _prune,
}


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def main(order: Order, pipe: Pipe) -> None:
    """Follow an order, and tell what came of it: its result, or the error that it raised; how often each fail point was hit; what was logged."""
    hits: Counter[FailPoint] = Counter()

    async def count(point: FailPoint) -> None:
        hits[point] += 1
        if order.kill_at == (point, hits[point]):
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.handler = count
    said = _Said()
    logging.getLogger("mongo_durable").addHandler(said)
    logging.getLogger("mongo_durable").setLevel(logging.INFO)
    error: DurableError | None = None
    result: Result = {}
    try:
        result = asyncio.run(ROLES[order.role](order, pipe))
    except DurableError as raised:
        error = raised
    pipe.send({"result": result, "error": error, "hits": dict(hits), "log": said.messages})
    pipe.close()
