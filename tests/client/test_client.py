"""What a client may ask for, and what it is told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, RemoveMessage, SystemMessage, ToolMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt
from motor.motor_asyncio import AsyncIOMotorClient
from pydantic import BaseModel
from pymongo import AsyncMongoClient, MongoClient

from mongo_durable import App, DurableClient, Runner, RunSnapshot, SyncDurableClient
from mongo_durable.errors import (
    ConfigurationError,
    IncompleteResolution,
    InvalidAnswer,
    NotJsonSafe,
    ResolutionConflict,
    RunConflict,
    RunError,
    RunFailed,
    RunNotFound,
    RunNotSuspended,
    StaleGeneration,
    ThreadBusy,
    UnknownActivity,
)
from mongo_durable.protocol.events import EventType
from tests.engine.workflows import PATIENCE_S, State, one_node, until, until_known
from tests.support.invariants import assert_invariants

ANSWERS: list[Any] = [{}, None, 0, "", False, [], {"a.b": 1, "$x": 2}, {"0123456789abcdef0123456789abcdef": 1}]


@pytest.fixture(params=["uri", "pymongo", "motor"])
async def client(request: pytest.FixtureRequest, mongo_uri: str, database: str) -> AsyncIterator[DurableClient]:
    """A client by URI, and on the application's own client of either driver."""
    if request.param == "uri":
        async with DurableClient(mongo_uri, database=database) as client:
            yield client
    elif request.param == "pymongo":
        async with AsyncMongoClient(mongo_uri) as given, DurableClient(client=given, database=database) as client:
            yield client
    else:
        motor = AsyncIOMotorClient(mongo_uri)
        async with DurableClient(client=motor, database=database) as client:
            yield client
        motor.close()


class Approval(BaseModel):
    """How an approval has to look."""

    approved: bool
    note: str = ""


class Desk:
    """Workflows for clients, and what they did.

    `asks` asks in its node and then in a tool; `strict` asks for an Approval; `gated` waits for `gate`; `broken` raises once; `talks` answers.
    """

    def __init__(self, uri: str, database: str) -> None:
        self.heard: list[Any] = []
        self.ran: Counter[str] = Counter()
        self.gate = asyncio.Event()
        self.is_broken = True

        def app(name: str) -> App:
            return App(name, uri=uri, database=database, lease=timedelta(seconds=2))

        asks = app("asks")

        @asks.tool
        async def ask(question: str) -> list[Any]:
            """Ask."""
            answer = interrupt(question)
            self.heard.append(answer)
            return [answer]

        async def node(state: State) -> dict[str, Any]:
            first = interrupt({"question": state["value"]})
            (second,) = await ask.ainvoke({"question": "in a tool"})
            return {"seen": [first, second]}

        async def strict(state: State) -> dict[str, Any]:
            answer = interrupt("approve?", response_schema=Approval)
            return {"seen": [type(answer).__name__, answer.approved, answer.note]}

        gated = app("gated")

        @gated.activity
        async def pay() -> str:
            self.ran["pay"] += 1
            await self.gate.wait()
            return "paid"

        async def wait(state: State) -> dict[str, Any]:
            return {"seen": [await pay()]}

        broken = app("broken")

        @broken.activity
        async def count() -> int:
            self.ran["count"] += 1
            return self.ran["count"]

        async def stumble(state: State) -> dict[str, Any]:
            number = await count()
            if self.is_broken:
                raise ValueError("broken")
            return {"seen": [number]}

        talks = app("talks")

        @talks.entrypoint
        def build() -> StateGraph:
            async def answer(state: MessagesState) -> dict[str, Any]:
                self.heard.append(state["messages"])
                calls = [{"name": "pay", "args": {"amount": 7}, "id": "call-1"}]
                return {"messages": [AIMessage("done", tool_calls=calls), ToolMessage("paid", tool_call_id="call-1", artifact={"a": [1, None]})]}

            graph = StateGraph(MessagesState)
            graph.add_node("answer", answer)
            graph.add_edge(START, "answer")
            return graph

        self.runner = Runner(
            [one_node(asks, node), one_node(app("strict"), strict), one_node(gated, wait), one_node(broken, stumble), talks],
            lease=timedelta(seconds=2),
            sweep_interval=timedelta(seconds=0.1),
        )


@pytest.fixture
async def desk(mongo_uri: str, database: str) -> AsyncIterator[Desk]:
    """A runner at work."""
    desk = Desk(mongo_uri, database)
    async with desk.runner:
        yield desk
        desk.gate.set()
    assert_invariants(mongo_uri, database)


async def suspended(client: DurableClient, run_id: str) -> tuple[str, RunSnapshot]:
    """Wait until a run asks one question: its activity id, and the run."""
    snapshot = await client.wait(run_id, timeout=PATIENCE_S)
    assert snapshot.frontier is not None, snapshot
    (entry,) = snapshot.frontier.entries
    return entry.activity_id, snapshot


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same, types and order included."""
    return repr(one) == repr(other)


@pytest.mark.parametrize("answer", ANSWERS, ids=repr)
async def test_any_answer_arrives_as_it_was_given(answer: Any, client: DurableClient, desk: Desk) -> None:
    """Every JSON value is a legal answer and arrives exactly, in a node's interrupt and in a tool's."""
    run = await client.submit("asks", {"value": 1})
    for generation in (1, 2):
        question, snapshot = await suspended(client, run.run_id)
        assert snapshot.generation == generation
        await client.resolve(run.run_id, {question: answer})
    end = await run.wait(timeout=PATIENCE_S)
    assert same(end.output["seen"], [answer, answer])
    assert same(desk.heard, [answer])
    answered = [event.data["answers"] for event in await client.history(run.run_id) if event.type is EventType.ACTIVITIES_RESOLVED]
    assert [same(list(each.values()), [answer]) for each in answered] == [True, True]


async def test_a_run_from_submission_to_its_end(client: DurableClient, desk: Desk) -> None:
    """submit, get, list, wait, open_frontiers, resolve, history and events tell one story."""
    run = await client.submit("asks", {"value": "a desk?"}, thread_id="desk", run_id="po-17")
    question, asked = await suspended(client, "po-17")
    assert asked == await client.get_run("po-17") == await run.get()
    assert (asked.status, asked.workflow, asked.version, asked.thread_id, asked.output) == ("suspended", "asks", "1", "desk", None)
    assert not asked.is_ended
    (frontier,) = await client.open_frontiers(workflow="asks")
    assert frontier == asked.frontier
    assert await client.open_frontiers(run_id="po-17", thread_id="desk") == [frontier]
    assert await client.open_frontiers(workflow="talks") == []
    assert frontier.entries[0].value == {"question": "a desk?"}
    receipt = await client.resolve("po-17", {question: "yes"}, generation=1, digest=frontier.digest, resolved_by="approver-7", note="fine")
    assert (receipt.run_id, receipt.generation, receipt.resolved_by, receipt.note) == ("po-17", 1, "approver-7", "fine")
    second, _ = await suspended(client, "po-17")
    await client.resolve("po-17", {second: "of course"})
    end = await run.wait(timeout=PATIENCE_S)
    assert (end.status, end.is_ended, end.frontier, end.error) == ("completed", True, None, None)
    assert end.result() == end.output == {"value": "a desk?", "seen": ["yes", "of course"]}
    assert end.submitted_at is not None
    assert end.ended_at is not None
    assert end.submitted_at <= end.ended_at
    history = await client.history("po-17")
    assert [event.seq for event in history] == list(range(1, len(history) + 1))
    assert (history[0].type, history[-1].type) == (EventType.RUN_SUBMITTED, EventType.RUN_COMPLETED)
    assert history[0].value == {"value": "a desk?"}
    assert [event async for event in client.events("po-17")] == history
    assert [event async for event in client.events("po-17", follow=True)] == history


async def test_following_the_events_of_a_run_ends_with_it(client: DurableClient, desk: Desk) -> None:
    """`events(follow=True)` gives each event once, as it comes, until the run ends."""
    await client.submit("gated", {"value": 1}, run_id="po-17")
    seen = []
    async for event in client.events("po-17", follow=True):
        seen.append(event)
        if event.type is EventType.ACTIVITY_STARTED:
            desk.gate.set()
    assert seen == await client.history("po-17")
    assert seen[-1].type is EventType.RUN_COMPLETED


async def test_listing(client: DurableClient, desk: Desk) -> None:
    """Runs are listed newest first, by status, workflow and thread, and no more than wanted."""
    for number in range(3):
        await client.submit("talks", {"messages": [HumanMessage("hi")]}, thread_id="desk", run_id=f"talk-{number}")
        await client.wait(f"talk-{number}", timeout=PATIENCE_S)
    await client.submit("asks", {"value": 1}, run_id="ask")
    await suspended(client, "ask")
    assert [run.run_id for run in await client.list_runs()] == ["ask", "talk-2", "talk-1", "talk-0"]
    assert [run.run_id for run in await client.list_runs(status="suspended")] == ["ask"]
    assert [run.run_id for run in await client.list_runs(workflow="talks", limit=2)] == ["talk-2", "talk-1"]
    assert [run.run_id for run in await client.list_runs(thread_id="ask")] == ["ask"]
    with pytest.raises(ConfigurationError):
        await client.list_runs(status="asleep")


async def test_the_same_name_is_the_same_run(client: DurableClient) -> None:
    """Submitting twice under one run_id is one run, also all at once; another input, thread or workflow is a conflict."""
    handles = await asyncio.gather(*(client.submit("nobody", {"value": 1}, run_id="po-17") for _ in range(8)))
    assert {handle.run_id for handle in handles} == {"po-17"}
    assert [run.run_id for run in await client.list_runs()] == ["po-17"]
    assert len(await client.history("po-17")) == 1
    for workflow, value, thread in (("nobody", 2, None), ("somebody", 1, None), ("nobody", 1, "other")):
        with pytest.raises(RunConflict):
            await client.submit(workflow, {"value": value}, run_id="po-17", thread_id=thread)
    with pytest.raises(RunConflict):
        await client.submit("nobody", {"value": 1}, run_id="po-17", version="2")


async def test_a_thread_has_one_live_run(client: DurableClient) -> None:
    """A second run on a thread is refused with the name of the first, and accepted when that one has ended."""
    await client.submit("nobody", {"value": 1}, thread_id="desk", run_id="first")
    with pytest.raises(ThreadBusy) as caught:
        await client.submit("nobody", {"value": 2}, thread_id="desk", run_id="second")
    assert (caught.value.thread_id, caught.value.active_run) == ("desk", "first")
    with pytest.raises(RunNotFound):
        await client.get_run("second")
    await client.cancel("first")
    assert (await client.submit("nobody", {"value": 2}, thread_id="desk", run_id="second")).run_id == "second"


async def test_what_is_not_there(client: DurableClient) -> None:
    """An unknown run is RunNotFound, whatever is asked of it."""
    for call in (client.get_run, client.wait, client.cancel, client.retry, client.history):
        with pytest.raises(RunNotFound):
            await call("nowhere")
    with pytest.raises(RunNotFound):
        await client.resolve("nowhere", {"act_1": 1})
    with pytest.raises(RunNotFound):
        await anext(client.events("nowhere"))


async def test_waiting_ends_in_time(client: DurableClient) -> None:
    """A wait for a run that nobody executes ends with TimeoutError; the run is as it was."""
    run = await client.submit("nobody", {"value": 1})
    with pytest.raises(TimeoutError):
        await run.wait(timeout=0.2)
    assert (await run.get()).status == "pending"


async def test_what_cannot_be_stored_is_refused(client: DurableClient) -> None:
    """A value that is not JSON-safe is refused with its place, before anything is written."""
    with pytest.raises(NotJsonSafe) as caught:
        await client.submit("nobody", {"items": [1, {"when": object()}]}, run_id="po-17")
    assert "when" in caught.value.path
    with pytest.raises(RunNotFound):
        await client.get_run("po-17")


async def test_answers_for_something_else_are_refused(client: DurableClient, desk: Desk) -> None:
    """Answers that are not exactly the open frontier's, or for another generation or digest, are refused; nothing is written."""
    await client.submit("asks", {"value": 1}, run_id="po-17")
    question, asked = await suspended(client, "po-17")
    assert asked.frontier is not None
    written = await client.history("po-17")
    with pytest.raises(UnknownActivity):
        await client.resolve("po-17", {"act_other": 1})
    with pytest.raises(IncompleteResolution) as incomplete:
        await client.resolve("po-17", {question: 1, "act_other": 1})
    assert incomplete.value.extra == ["act_other"]
    with pytest.raises(IncompleteResolution) as missing:
        await client.resolve("po-17", {})
    assert missing.value.missing == [question]
    with pytest.raises(StaleGeneration) as stale:
        await client.resolve("po-17", {question: 1}, generation=2)
    assert (stale.value.expected, stale.value.found) == (2, 1)
    with pytest.raises(StaleGeneration):
        await client.resolve("po-17", {question: 1}, digest="0" * 32)
    with pytest.raises(NotJsonSafe):
        await client.resolve("po-17", {question: object()})
    assert await client.history("po-17") == written
    assert (await client.get_run("po-17")).status == "suspended"


async def test_an_answer_is_given_once(client: DurableClient, desk: Desk) -> None:
    """The same answer again is the same receipt, another one a conflict; what was pinned to an older frontier is stale."""
    await client.submit("asks", {"value": 1}, run_id="po-17")
    first, asked = await suspended(client, "po-17")
    assert asked.frontier is not None
    receipt = await client.resolve("po-17", {first: "yes"}, resolved_by="approver-7")
    await until_generation(client, "po-17", 2)
    with pytest.raises(StaleGeneration):
        await client.resolve("po-17", {first: "no"}, generation=1)
    with pytest.raises(StaleGeneration):
        await client.resolve("po-17", {first: "no"}, digest=asked.frontier.digest)
    with pytest.raises(UnknownActivity):
        await client.resolve("po-17", {first: "no"})
    second, _ = await suspended(client, "po-17")
    desk.heard.clear()
    last = await client.resolve("po-17", {second: "yes"}, resolved_by="approver-8")
    assert await client.resolve("po-17", {second: "yes"}, resolved_by="approver-9") == last
    with pytest.raises(ResolutionConflict):
        await client.resolve("po-17", {second: "no"})
    assert receipt.generation == 1
    assert (await client.wait("po-17", timeout=PATIENCE_S)).status == "completed"


async def until_generation(client: DurableClient, run_id: str, generation: int) -> None:
    """Wait until a run waits for the answers of this frontier."""

    async def waits() -> bool:
        snapshot = await client.get_run(run_id)
        return snapshot.frontier is not None and snapshot.generation == generation

    await until_known(waits)


async def test_an_answer_has_to_fit_its_schema(client: DurableClient, desk: Desk) -> None:
    """An answer that does not fit the question's response schema is refused, with every fault; one that fits arrives as the schema's model."""
    await client.submit("strict", {"value": 1}, run_id="po-17")
    question, asked = await suspended(client, "po-17")
    assert asked.frontier is not None
    assert asked.frontier.entries[0].response_schema["required"] == ["approved"]
    for wrong in ({}, {"approved": "perhaps", "note": 3}, None, "yes", []):
        with pytest.raises(InvalidAnswer) as caught:
            await client.resolve("po-17", {question: wrong})
        assert caught.value.activity_id == question
        assert caught.value.errors
    assert (await client.get_run("po-17")).status == "suspended"
    await client.resolve("po-17", {question: {"approved": True}})
    end = await client.wait("po-17", timeout=PATIENCE_S)
    assert end.status == "completed", end.error
    assert end.output["seen"] == ["Approval", True, ""]


async def test_cancelling_a_run_that_waits_for_a_runner(client: DurableClient) -> None:
    """A pending run is cancelled, with its reason; it can't be answered or retried, and cancelling again changes nothing."""
    await client.submit("nobody", {"value": 1}, run_id="po-17")
    cancelled = await client.cancel("po-17", reason="not needed")
    assert (cancelled.status, cancelled.is_ended) == ("cancelled", True)
    history = await client.history("po-17")
    assert (history[-1].type, history[-1].data["reason"]) == (EventType.RUN_CANCELLED, "not needed")
    assert (await client.cancel("po-17")).status == "cancelled"
    assert await client.history("po-17") == history
    with pytest.raises(RunNotSuspended):
        await client.resolve("po-17", {"act_1": 1})
    with pytest.raises(RunError):
        await client.retry("po-17")
    with pytest.raises(RunFailed):
        cancelled.result()


async def test_cancelling_a_run_at_work(client: DurableClient, desk: Desk) -> None:
    """When the cancel of a running run returns, nothing of it is recorded any more."""
    await client.submit("gated", {"value": 1}, run_id="po-17")
    await until(lambda: desk.ran["pay"] == 1)
    assert (await client.cancel("po-17")).status == "cancelled"
    history = await client.history("po-17")
    desk.gate.set()
    await until(lambda: not desk.runner.running)
    assert await client.history("po-17") == history
    assert desk.ran == {"pay": 1}


async def test_cancelling_a_run_that_asks(client: DurableClient, desk: Desk) -> None:
    """A suspended run is cancelled with its frontier: nobody is asked any more, and an answer is refused."""
    await client.submit("asks", {"value": 1}, run_id="po-17")
    question, _ = await suspended(client, "po-17")
    assert (await client.cancel("po-17")).status == "cancelled"
    assert await client.open_frontiers() == []
    with pytest.raises(RunNotSuspended):
        await client.resolve("po-17", {question: 1})


async def test_a_failed_run_can_go_on(client: DurableClient, desk: Desk) -> None:
    """A failed run says why; a retry goes on from its history, and what was recorded does not run again."""
    await client.submit("broken", {"value": 1}, run_id="po-17")
    failed = await client.wait("po-17", timeout=PATIENCE_S)
    assert (failed.status, failed.error) == ("failed", {"type": "ValueError", "message": "broken"})
    with pytest.raises(RunFailed) as caught:
        failed.result()
    assert caught.value.error == failed.error
    desk.is_broken = False
    assert (await client.retry("po-17")).run_id == "po-17"
    end = await client.wait("po-17", timeout=PATIENCE_S)
    assert (end.status, end.error, end.output["seen"]) == ("completed", None, [1])
    assert desk.ran == {"count": 1}
    with pytest.raises(RunError):
        await client.retry("po-17")


async def test_messages_come_back_as_they_were_given(client: DurableClient, desk: Desk) -> None:
    """Messages of every kind go into a run and come out of it with content, ids, tool calls and extras."""
    calls = [{"name": "pay", "args": {"a.b": None, "$x": [1.5]}, "id": "call-0"}]
    given = [
        SystemMessage("be brief", id="m0"),
        HumanMessage([{"type": "text", "text": "hi"}], name="kim", id="m1", additional_kwargs={"x": {"": 1}}),
        AIMessage("", tool_calls=calls, id="m2", usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}),
        ToolMessage("no", tool_call_id="call-0", status="error", id="m3"),
        AIMessageChunk("chunk", id="m4"),
        HumanMessage("gone", id="m5"),
        RemoveMessage("m5"),
    ]
    await client.submit("talks", {"messages": given}, run_id="po-17")
    end = await client.wait("po-17", timeout=PATIENCE_S)
    assert end.status == "completed", end.error
    assert (await client.history("po-17"))[0].value == {"messages": given}
    messages = end.output["messages"]
    (heard,) = desk.heard
    assert heard == messages[: len(heard)]
    assert [message.id for message in messages[:5]] == ["m0", "m1", "m2", "m3", "m4"]
    assert messages[:4] == given[:4]
    assert [type(message) for message in messages[-2:]] == [AIMessage, ToolMessage]
    assert messages[-1].artifact == {"a": [1, None]}
    assert len({message.id for message in messages}) == len(messages)


async def test_turns_of_a_thread_follow_one_another(client: DurableClient, desk: Desk) -> None:
    """A run on a thread starts from what the run before it left: nothing is lost, nothing is replaced."""
    for turn in range(3):
        await client.submit("talks", {"messages": [HumanMessage(f"turn {turn}")]}, thread_id="desk", run_id=f"talk-{turn}")
        end = await client.wait(f"talk-{turn}", timeout=PATIENCE_S)
    kinds = [message.type for message in end.output["messages"]]
    assert kinds == ["human", "ai", "tool"] * 3
    assert [message.content for message in end.output["messages"] if message.type == "human"] == ["turn 0", "turn 1", "turn 2"]


async def test_a_client_that_is_no_async_one_is_refused(mongo_uri: str) -> None:
    """A synchronous client is refused at once, with what to give instead."""
    with MongoClient(mongo_uri) as given, pytest.raises(ConfigurationError, match="AsyncMongoClient"):
        DurableClient(client=given)


# -- blocking ---------------------------------------------------------------------------------------------------------------------------------


def use_blocking(uri: str, database: str) -> None:
    """The whole story once more, blocking."""
    with SyncDurableClient(uri, database=database) as client:
        run = client.submit("asks", {"value": "a desk?"}, thread_id="desk", run_id="po-17")
        with pytest.raises(ThreadBusy):
            client.submit("asks", {"value": 2}, thread_id="desk")
        for answer in ({}, None):
            asked = run.wait(timeout=PATIENCE_S)
            assert asked.frontier is not None
            assert client.open_frontiers(run_id="po-17") == [asked.frontier]
            question = asked.frontier.entries[0].activity_id
            with pytest.raises(StaleGeneration):
                client.resolve("po-17", {question: answer}, generation=asked.generation + 1)
            receipt = client.resolve("po-17", {question: answer}, generation=asked.generation, digest=asked.frontier.digest, resolved_by="approver-7")
            assert receipt.resolved_by == "approver-7"
        end = client.wait("po-17", timeout=PATIENCE_S)
        assert end == run.get() == client.get_run("po-17")
        assert end.output["seen"] == [{}, None]
        history = client.history("po-17")
        assert list(client.events("po-17", follow=True)) == history == list(client.events("po-17"))
        assert [each.run_id for each in client.list_runs(status="completed")] == ["po-17"]
        client.submit("nobody", {"value": 1}, run_id="po-18")
        assert client.cancel("po-18", reason="not needed").status == "cancelled"
        with pytest.raises(RunNotFound):
            client.get_run("nowhere")
        with pytest.raises(TimeoutError):
            client.submit("nobody", {"value": 1}, run_id="po-19").wait(timeout=0.1)
        client.submit("broken", {"value": 1}, run_id="po-20")
        assert client.wait("po-20", timeout=PATIENCE_S).status == "failed"
        assert client.retry("po-20").run_id == "po-20"
        assert client.wait("po-20", timeout=PATIENCE_S).status == "failed"


async def test_the_blocking_client_does_the_same(mongo_uri: str, database: str, desk: Desk) -> None:
    """SyncDurableClient has the same methods, blocking, with the same results and errors."""
    await asyncio.to_thread(use_blocking, mongo_uri, database)
    with pytest.raises(ConfigurationError):
        SyncDurableClient(client=object())
