"""The contract of `seams.py`: what the installed LangGraph and LangChain must do for positions and answers to be right."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from langchain_core.tools import tool
from langgraph.callbacks import GraphCallbackHandler, GraphResumeEvent
from langgraph.checkpoint.base import BaseCheckpointSaver, empty_checkpoint
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_config, get_stream_writer
from langgraph.errors import UnknownInterruptError
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.runtime import get_runtime
from langgraph.types import Command, Interrupt, RetryPolicy, Send, interrupt
from pydantic import BaseModel, ValidationError

from mongo_durable.langgraph.scope import InterruptWatch
from mongo_durable.langgraph.seams import (
    INTERRUPT_CHANNEL,
    PULL,
    PUSH,
    RESUME_CHANNEL,
    RESUMING_KEY,
    RUNTIME_KEY,
    STRICT_RESUME_KEY,
    TASKS_CHANNEL,
    Writing,
    current_task_path,
    is_call,
    is_invalid_resume,
    is_unsaved_child,
    parent_namespace,
    parse_task_path,
    parse_tool_input,
    step_checkpoint_time,
)
from tests.langgraph.kit import State

CONFIG: Any = {"configurable": {"thread_id": "t"}}


def _one_leaf(leaf: Any) -> Any:
    """A child graph of one node."""
    inner = StateGraph(State)
    inner.add_node("leaf", leaf)
    inner.add_edge(START, "leaf")
    return inner.compile()


def test_the_time_of_a_step() -> None:
    """A step's checkpoint tells when it was made, also in a child graph; a step that is resumed starts from the same one. Outside, nobody knows."""
    times: list[float | None] = []

    def step(_: State) -> State:
        times.append(step_checkpoint_time())
        return {"lines": [interrupt("q")]}

    def around(asking: Any) -> StateGraph[State]:
        graph = StateGraph(State)
        graph.add_node("step", asking)
        graph.add_edge(START, "step")
        return graph

    for graph in (around(step), around(around(step).compile())):
        times.clear()
        compiled = graph.compile(checkpointer=InMemorySaver())
        before = time.time()
        compiled.invoke({"lines": []}, CONFIG)
        after = time.time()
        compiled.invoke(Command(resume="yes"), CONFIG)
        first, again = times
        assert first is not None
        assert before - 0.001 <= first <= after
        assert again == first
    assert step_checkpoint_time() is None


class Listening(InMemorySaver):
    """Keeps what LangGraph tells a saver, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[Any, ...]] = []

    def get_tuple(self, config: Any) -> Any:
        self.log.append(("get", config["configurable"].get("checkpoint_ns", "")))
        return super().get_tuple(config)

    def put(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        self.log.append(("put", config["configurable"].get("checkpoint_ns", ""), metadata["step"], metadata["source"], checkpoint["id"]))
        return super().put(config, checkpoint, metadata, new_versions)

    def put_writes(self, config: Any, writes: Any, task_id: str, task_path: str = "") -> None:
        self.log.append(("writes", config["configurable"].get("checkpoint_ns", ""), task_path, [channel for channel, _ in writes]))
        super().put_writes(config, writes, task_id, task_path)

    async def aget_tuple(self, config: Any) -> Any:
        return self.get_tuple(config)

    async def aput(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        return self.put(config, checkpoint, metadata, new_versions)

    async def aput_writes(self, config: Any, writes: Any, task_id: str, task_path: str = "") -> None:
        self.put_writes(config, writes, task_id, task_path)

    def paths(self) -> set[str]:
        """Every task path that `put_writes` was given."""
        return {each[2] for each in self.log if each[0] == "writes" and each[2]}


def _asking(asked: str = "q") -> StateGraph[State]:
    def step(state: State) -> State:
        return {"lines": [interrupt(asked)]}

    graph = StateGraph(State)
    graph.add_node("step", step)
    graph.add_edge(START, "step")
    return graph


@pytest.fixture(params=["sync", "async"])
def invoke(request: pytest.FixtureRequest) -> Any:
    """Run a graph in either colour, as the driver does."""

    def run(graph: Any, given: Any, config: Any = CONFIG) -> Any:
        if request.param == "sync":
            return graph.invoke(given, config, durability="sync")
        return asyncio.run(graph.ainvoke(given, config, durability="sync"))

    return run


def test_put_writes_gets_the_path_of_its_task(invoke: Any) -> None:
    """A parameter named `task_path` gets a text from which node or Send index can be read."""
    saver = Listening()

    def worker(state: State) -> State:
        return {"lines": ["w"]}

    graph = _asking()
    graph.add_node("worker", worker)
    graph.add_conditional_edges(START, lambda state: [Send("worker", {"work": index}) for index in range(2)], ["worker"])
    invoke(graph.compile(checkpointer=saver), {"lines": []})
    read = {parse_task_path(each) for each in saver.paths()}
    assert {(PULL, "step"), (PUSH, 0, False), (PUSH, 1, False)} <= read
    assert any(INTERRUPT_CHANNEL in each[3] for each in saver.log if each[0] == "writes")
    assert any(TASKS_CHANNEL in each[3] for each in saver.log if each[0] == "writes")


def test_the_path_of_a_task_call_nests_its_caller() -> None:
    """Calls of a `@task` have the path of their caller and their number inside."""
    saver = Listening()

    @task
    def deep(number: int) -> int:
        return number

    @task
    def outer(number: int) -> int:
        return deep(number).result()  # type: ignore[no-any-return]

    @entrypoint(checkpointer=saver)
    def workflow(given: int) -> list[int]:
        return [outer(given).result(), outer(given).result()]

    workflow.invoke(1, CONFIG, durability="sync")
    read = {parse_task_path(each) for each in saver.paths()}
    second = (PUSH, (PULL, "workflow"), 1, True)
    assert second in read
    assert is_call(second)
    assert (PUSH, second, 0, True) in read


def test_metadata_has_the_path_of_the_task(invoke: Any) -> None:
    """`langgraph_path` is what `parse_task_path` reads from the text of `put_writes`."""
    seen: list[Any] = []
    saver = Listening()

    def step(state: State) -> State:
        seen.append(get_config()["metadata"]["langgraph_path"])
        return {}

    graph = StateGraph(State)
    graph.add_node("step", step)
    graph.add_edge(START, "step")
    invoke(graph.compile(checkpointer=saver), {"lines": []})
    assert seen == [(PULL, "step")]
    assert set(seen) <= {parse_task_path(each) for each in saver.paths()}


@pytest.mark.parametrize("over", ["mine", ("mine", "too"), ()])
def test_the_path_of_a_task_is_known_whatever_its_metadata_say(invoke: Any, over: Any) -> None:
    """Where metadata hide it, the state reader in `configurable` has the path of a node, and of a Send's worker."""
    seen: list[Any] = []

    def step(state: State) -> State:
        seen.append((get_config()["metadata"]["langgraph_path"], current_task_path(get_config())))
        return {}

    graph = StateGraph(State)
    graph.add_node("step", step, metadata={"langgraph_path": over})
    graph.add_node("worker", step, metadata={"langgraph_path": over})
    graph.add_edge(START, "step")
    graph.add_conditional_edges("step", lambda state: [Send("worker", {}), Send("worker", {})], ["worker"])
    invoke(graph.compile(checkpointer=InMemorySaver()), {"lines": []})
    assert {each[0] for each in seen} == {over}
    assert {each[1] for each in seen} == {(PULL, "step"), (PUSH, 0, False), (PUSH, 1, False)}


@pytest.mark.parametrize(("answers", "why"), [({"0" * 32: 1}, "not_pending"), ({}, "empty_map")])
def test_a_strict_resume_refuses_what_is_not_pending(invoke: Any, answers: dict[str, Any], why: str) -> None:
    """With the strict key an answer that fits no interrupt raises, and nothing is resumed."""
    graph = _asking().compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "t", STRICT_RESUME_KEY: True}}
    invoke(graph, {"lines": []}, config)
    with pytest.raises(UnknownInterruptError) as raised:
        invoke(graph, Command(resume=answers), config)
    assert raised.value.reason == why


@pytest.mark.parametrize("answer", [None, "", 0, False, [], {}, {"0" * 32: 1}, {"a": None}])
def test_every_answer_arrives_by_id(invoke: Any, answer: Any) -> None:
    """By id, each JSON value is delivered as it is."""
    graph = _asking().compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "t", STRICT_RESUME_KEY: True}}
    (asked,) = invoke(graph, {"lines": []}, config)["__interrupt__"]
    assert isinstance(asked, Interrupt)
    assert invoke(graph, Command(resume={asked.id: answer}), config)["lines"] == [answer]


def test_sequential_interrupts_have_ids_of_their_own(invoke: Any) -> None:
    """A body that asks again has another id pending, and writes the answers so far beside it."""
    saver = Listening()

    def step(state: State) -> State:
        return {"lines": [interrupt("a"), interrupt("b")]}

    graph = StateGraph(State)
    graph.add_node("step", step)
    graph.add_edge(START, "step")
    compiled = graph.compile(checkpointer=saver)
    (first,) = invoke(compiled, {"lines": []})["__interrupt__"]
    (second,) = invoke(compiled, Command(resume={first.id: 1}))["__interrupt__"]
    assert first.id != second.id
    assert any({INTERRUPT_CHANNEL, RESUME_CHANNEL} <= set(each[3]) for each in saver.log if each[0] == "writes")


def test_one_execution_info_is_one_execution_of_a_body(invoke: Any) -> None:
    """The same object within an execution, another one for a resume and for a retry."""
    seen: list[tuple[Any, Any]] = []

    def step(state: State) -> State:
        seen.append((get_runtime().execution_info, get_runtime().execution_info))
        if len(seen) == 1:
            raise ConnectionError("once")
        return {"lines": [interrupt("q")]}

    graph = StateGraph(State)
    graph.add_node("step", step, retry_policy=RetryPolicy(initial_interval=0.001, jitter=False))
    graph.add_edge(START, "step")
    compiled = graph.compile(checkpointer=InMemorySaver())
    (asked,) = invoke(compiled, {"lines": []})["__interrupt__"]
    invoke(compiled, Command(resume={asked.id: 1}))
    assert [each[0].node_attempt for each in seen] == [1, 2, 1]
    assert all(first is second for first, second in seen)
    assert len({id(first) for first, _ in seen}) == 3
    assert len({first.checkpoint_ns for first, _ in seen}) == 1
    assert parent_namespace(seen[0][0].checkpoint_ns) == ""


def test_a_graph_reads_its_saver_before_its_nodes_run(invoke: Any) -> None:
    """`get_tuple` of a child graph comes in the context of the task that calls it, before anything of the child runs."""
    seen: list[Any] = []

    class Contextual(Listening):
        def get_tuple(self, config: Any) -> Any:
            namespace = config["configurable"].get("checkpoint_ns", "")
            if namespace:
                seen.append(("get", namespace, get_runtime().execution_info.checkpoint_ns))
            return super().get_tuple(config)

    def leaf(state: State) -> State:
        seen.append(("leaf", get_runtime().execution_info.checkpoint_ns))
        return {}

    child = _one_leaf(leaf)

    def body(state: State) -> State:
        child.invoke({"lines": []})
        child.invoke({"lines": []})
        return {}

    graph = StateGraph(State)
    graph.add_node("node", child)
    graph.add_node("body", body)
    graph.add_edge(START, "node")
    graph.add_edge("node", "body")
    invoke(graph.compile(checkpointer=Contextual()), {"lines": []})
    assert [each[0] for each in seen] == ["get", "leaf"] * 3
    for got, ran in zip(seen[::2], seen[1::2], strict=True):
        namespace, caller = got[1], got[2]
        assert namespace == caller or namespace.startswith(f"{caller}|")
        assert parent_namespace(ran[1]) == namespace
    assert [each[1].rpartition("|")[2] for each in seen[4::2]] == ["1"], "the second call of one body has its number"


def test_the_steps_of_a_fresh_thread(invoke: Any) -> None:
    """The input is step -1, the start step 0; a checkpoint's tasks are of the step after it."""
    saver = Listening()
    invoke(_asking().compile(checkpointer=saver), {"lines": []})
    assert [(each[2], each[3]) for each in saver.log if each[0] == "put"] == [(-1, "input"), (0, "loop")]


@pytest.mark.parametrize("is_told", [True, False])
def test_a_run_without_input_may_begin(invoke: Any, is_told: bool) -> None:
    """Without input, a graph runs what is next by its checkpoint, as the step after it; told that this is no resume, it tells nobody of one."""
    ran: list[Any] = []

    class Resumes(GraphCallbackHandler):
        def on_resume(self, event: GraphResumeEvent) -> None:
            ran.append("resume")

    def step(state: State) -> State:
        ran.append((get_config()["metadata"]["langgraph_step"], current_task_path(get_config())))
        return {"lines": ["done"]}

    graph = StateGraph(State)
    graph.add_node("step", step)
    graph.add_edge(START, "step")
    saver = InMemorySaver()
    compiled = graph.compile(checkpointer=saver)
    triggers = compiled.nodes["step"].triggers
    versions = dict.fromkeys(triggers, saver.get_next_version(None, None))
    checkpoint: Any = {**empty_checkpoint(), "channel_values": dict.fromkeys(triggers), "channel_versions": versions}
    saver.put({"configurable": {"thread_id": "t", "checkpoint_ns": ""}}, checkpoint, {"source": "loop", "step": 0, "parents": {}}, versions)
    told: Any = {RESUMING_KEY: False} if is_told else {}
    assert invoke(compiled, None, {"configurable": {"thread_id": "t", **told}, "callbacks": [Resumes()]}) == {"lines": ["done"]}
    assert ran == [*([] if is_told else ["resume"]), (1, (PULL, "step"))]


def test_what_a_graph_writes_can_be_taken(invoke: Any) -> None:
    """The tasks of a graph that is given a `Writing` runtime write to it, whatever is streamed; those of its child graphs do not."""
    written: list[Any] = []

    @task
    def below(number: int) -> None:
        get_stream_writer()(f"task {number}")

    def leaf(state: State) -> State:
        get_stream_writer()("child")
        return {}

    child = _one_leaf(leaf)

    def step(state: State) -> State:
        get_stream_writer()("node")
        below(1).result()
        child.invoke({"lines": []})
        return {}

    graph = StateGraph(State)
    graph.add_node("step", step)
    graph.add_edge(START, "step")
    compiled = graph.compile(checkpointer=InMemorySaver())
    invoke(compiled, {"lines": []}, {"configurable": {"thread_id": "t", RUNTIME_KEY: Writing(stream_writer=written.append)}})
    assert written == ["node", "task 1"]


@pytest.mark.parametrize("where", ["before", "after", "child"])
def test_every_stop_of_a_graph_is_told(invoke: Any, where: str) -> None:
    """A graph that stops before its end tells its callbacks, for whatever reason and in whatever graph: without that, nothing pends."""

    def two(second: Any) -> StateGraph[State]:
        graph = StateGraph(State)
        graph.add_node("first", lambda _: {"lines": ["first"]})
        graph.add_node("second", second)
        graph.add_edge(START, "first")
        graph.add_edge("first", "second")
        return graph

    pauses: Any = {"before": {"interrupt_before": ["second"]}, "after": {"interrupt_after": ["first"]}, "child": {}}
    second: Any = two(lambda _: {}).compile(interrupt_before=["second"]) if where == "child" else lambda _: {}
    watch = InterruptWatch()
    graph = two(second).compile(InMemorySaver(), **pauses[where])
    invoke(graph, {"lines": []}, {**CONFIG, "callbacks": [watch]})
    assert watch.has_stopped
    watch.has_stopped = False
    invoke(two(lambda _: {}).compile(InMemorySaver()), {"lines": []}, {**CONFIG, "callbacks": [watch]})
    assert not watch.has_stopped


def test_an_invalid_answer_is_told_apart() -> None:
    """`is_invalid_resume` knows the failure of an answer that its interrupt's schema refuses."""

    class Answer(BaseModel):
        amount: int

    caught: list[Exception] = []

    def step(state: State) -> State:
        try:
            return {"lines": [interrupt("q", response_schema=Answer)]}
        except ValidationError as error:
            caught.append(error)
            raise

    graph = StateGraph(State)
    graph.add_node("step", step)
    graph.add_edge(START, "step")
    compiled = graph.compile(checkpointer=InMemorySaver())
    (asked,) = compiled.invoke({"lines": []}, CONFIG)["__interrupt__"]
    with pytest.raises(ValidationError):
        compiled.invoke(Command(resume={asked.id: {"amount": "many"}}), CONFIG)
    assert all(is_invalid_resume(each) for each in caught)
    assert not is_invalid_resume(ValueError("no"))


def test_a_tool_validates_its_arguments_on_request() -> None:
    """`BaseTool._parse_input` is there, and refuses what the tool itself would refuse."""

    @tool
    def double(number: int) -> int:
        """Double it."""
        return number * 2

    parse_tool_input(double, {"number": 2}, "c1")
    with pytest.raises(ValidationError):
        parse_tool_input(double, {"number": "two"}, "c1")


def test_a_child_without_a_saver_fails_in_a_way_that_is_known(invoke: Any) -> None:
    """Under durability "sync" LangGraph fails on checkpointer=False; when this test breaks, it may have learned to run it."""
    child = _asking().compile(checkpointer=False)

    def body(state: State) -> State:
        child.invoke({"lines": []})
        return {}

    graph = StateGraph(State)
    graph.add_node("body", body)
    graph.add_edge(START, "body")
    with pytest.raises(AttributeError) as raised:
        invoke(graph.compile(checkpointer=InMemorySaver()), {"lines": []})
    assert is_unsaved_child(raised.value)
    assert not is_unsaved_child(AttributeError("other"))


def test_a_copy_with_another_saver_leaves_the_graph_as_it_is() -> None:
    """The driver's `graph.copy({"checkpointer": …})` injects a saver without touching the application's graph."""
    graph = _asking().compile()
    saver: BaseCheckpointSaver[Any] = InMemorySaver()
    assert graph.copy({"checkpointer": saver}).checkpointer is saver
    assert graph.checkpointer is None
