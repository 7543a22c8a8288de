"""The contract of `deep_agents/seams.py` and of what else an upgrade may break: what the installed deepagents and LangChain must do."""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path
from typing import Any

import deepagents
import pytest
from deepagents import create_deep_agent
from langchain.agents.middleware import AgentMiddleware, HumanInTheLoopMiddleware
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import ToolNode
from langgraph.types import Command

from mongo_durable import App
from mongo_durable.langgraph.deep_agents import draws, seams
from mongo_durable.langgraph.deep_agents.identity import durable_state, with_stable_ids
from mongo_durable.langgraph.seams import PULL, PUSH, TASKS_CHANNEL, current_task_path
from tests.deep_agents.kit import Speaker, call, in_turn, order, researcher, task
from tests.langgraph.kit import Ledger
from tests.langgraph.test_seams import Listening

CONFIG: Any = {"configurable": {"thread_id": "t"}}


@tool
def plain(q: str) -> str:
    """Say it again."""
    return f"plain:{q}"


class Watching(AgentMiddleware[Any, Any, Any]):
    """Notes what each worker is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.paths: list[Any] = []

    def wrap_tool_call(self, request: Any, handler: Any) -> Any:
        from langgraph.config import get_config

        self.paths.append(current_task_path(get_config()))
        self.seen.append(request)
        return handler(request)


def agent(*answers: Any, middleware: Any = (), **options: Any) -> Any:
    """A plain deep agent with a researcher."""

    def speaks(say: Any) -> Speaker:
        return Speaker(say=say, ledger=Ledger(), name_="m")

    sub = {"name": "research", "description": "r", "system_prompt": "s", "model": speaks(researcher("plain")), "tools": [plain]}
    root = speaks(in_turn(*answers, AIMessage("done")))
    return create_deep_agent(model=root, tools=[plain], subagents=[sub], middleware=middleware, **options)


def test_the_proven_version_is_installed() -> None:
    """These tests speak for the versions that the adapter says it is proven on."""
    assert importlib.metadata.version("deepagents") in seams.PROVEN_VERSIONS


def test_the_task_tool() -> None:
    """Its name, its arguments, whose it is, and where its sub-agents are."""
    table = seams.tool_table(agent())
    made = table[seams.TASK_TOOL]
    assert set(made.tool_call_schema.model_json_schema()["properties"]) == seams.TASK_ARGUMENTS  # type: ignore[union-attr]
    assert seams.is_own_tool(made)
    assert not seams.is_own_tool(plain)
    assert set(seams.subagent_graphs(made) or {}) == {"research", "general-purpose"}
    assert all(seams.is_own_tool(each) for name, each in table.items() if name not in ("plain",))


def test_the_tool_table_is_what_the_node_runs() -> None:
    """A tool put into the table is the one that runs, and the one that a reviewer's edit finds."""
    made = agent()
    node = made.nodes["tools"].bound
    assert isinstance(node, ToolNode)
    assert seams.tool_table(made) is node.tools_by_name


def test_the_packets_of_a_response() -> None:
    """One Send a pending call, in the model's order, of the bare call; each worker's path has its index; its state has the whole response."""
    watching, saver = Watching(), Listening()
    sends: list[Any] = []
    real = saver.put_writes

    def put_writes(config: Any, writes: Any, task_id: str, task_path: str = "") -> None:
        sends.extend(value for channel, value in writes if channel == TASKS_CHANNEL and not config["configurable"]["checkpoint_ns"])
        real(config, writes, task_id, task_path)

    saver.put_writes = put_writes  # type: ignore[method-assign]
    calls = [task("A", "research"), call("plain", "own", q="x"), task("B", "research")]
    agent(order(*calls), middleware=[watching], checkpointer=saver).invoke({"messages": [("user", "go")]}, CONFIG, durability="sync")
    assert [(each.node, [one["id"] for one in each.arg]) for each in sends] == [("tools", [one["id"]]) for one in calls]
    assert sorted(watching.paths) == [(PUSH, index, False) for index in range(3)]
    for request in watching.seen:
        response, answered = seams.last_response(request.state["messages"])
        assert response is not None
        assert [each["id"] for each in response.tool_calls] == [each["id"] for each in calls]
        assert not answered


def test_the_supersteps_of_an_agent() -> None:
    """Every hook is a node and a superstep of its own; the tools run in the step after the model's last one."""
    saver = Listening()
    list(agent(order(task("A", "research")), checkpointer=saver).stream({"messages": [("user", "go")]}, CONFIG, durability="sync"))
    paths = saver.paths()
    assert {f"~{PULL}, {seams.SLOT}.before_agent", f"~{PULL}, model", f"~{PUSH}, 0000000000, 0000000000"} <= paths


def test_what_general_purpose_inherits() -> None:
    """A middleware in the slot's name stands in the root and in general-purpose, in place of deepagents' own; a sub-agent takes what its spec has."""

    class Mine(AgentMiddleware[Any, Any, Any]):
        name = seams.SLOT

        def before_agent(self, state: Any, runtime: Any) -> None:
            """Nothing."""

    mine = Mine()
    made = agent(middleware=[mine])
    from mongo_durable.langgraph.seams import hook_owner

    agents = seams.subagent_graphs(seams.tool_table(made)[seams.TASK_TOOL]) or {}
    owners = {name: hook_owner(graph.nodes[f"{seams.SLOT}.before_agent"].bound) for name, graph in (("root", made), *agents.items())}
    assert (owners["root"] is mine, owners["general-purpose"] is mine, owners["research"] is mine) == (True, True, False)


def test_the_state_schema_reaches_all() -> None:
    """The messages channel of the root and of declared sub-agents is the one of state_schema, files included."""
    made = agent(state_schema=durable_state(None))
    agents = seams.subagent_graphs(seams.tool_table(made)[seams.TASK_TOOL]) or {}
    for graph in (made, *agents.values()):
        assert graph.channels["messages"].operator is with_stable_ids
        assert type(graph.channels["files"]).__name__ == "BinaryOperatorAggregate"


def test_an_edited_call() -> None:
    """A person's edit is kept under its own key; the response keeps the call as it was ordered."""
    watching = Watching()
    gate = HumanInTheLoopMiddleware(interrupt_on={"task": True})
    made = agent(order(task("A", "research")), middleware=[watching, gate], checkpointer=InMemorySaver())
    made.invoke({"messages": [("user", "go")]}, CONFIG)
    edit = {"type": "edit", "edited_action": {"name": "task", "args": {"description": "B", "subagent_type": "research"}}}
    made.invoke(Command(resume={"decisions": [edit]}), CONFIG)
    [request] = watching.seen
    assert request.tool_call["args"]["description"] == "A"
    assert request.state[seams.EDITED_CALLS_KEY]["call-A"]["args"]["description"] == "B"


@tool
def breaks(q: str) -> str:
    """Fail."""
    raise LookupError(q)


def test_whose_errors_the_model_reads() -> None:
    """Arguments that do not fit become a message for the model, also those of a task; what a tool raises comes out of the agent."""
    mistakes = [call("plain", "1", wrong="x"), call("task", "2", description="A"), call("nobody", "3"), task("A", "nobody", "4")]
    said = agent(order(*mistakes)).invoke({"messages": [("user", "go")]})["messages"]
    assert [each.status for each in said if each.type == "tool"] == ["error", "error", "error", "success"]
    model = Speaker(say=in_turn(order(call("breaks", "1", q="x"))), ledger=Ledger(), name_="m")
    with pytest.raises(LookupError):
        create_deep_agent(model=model, tools=[breaks]).invoke({"messages": [("user", "go")]})


def test_answered_calls_get_no_worker() -> None:
    """A call that has a result already, such as a rejected one, is not sent; its response keeps it."""
    messages = [HumanMessage("x"), order(call("plain", "1", q="1"), call("plain", "2", q="2")), ToolMessage("no", tool_call_id="1")]
    response, answered = seams.last_response(messages)
    assert (response, answered) == (messages[1], {"1"})
    assert seams.last_response(messages[:1]) == (None, set())


def test_what_a_deep_agent_looks_like() -> None:
    """By its task tool, or by what it says of itself."""
    made = agent()
    assert seams.is_deep_agent(made)
    assert made.config["metadata"]["ls_integration"] == "deepagents"


def test_a_wrapped_model_has_its_profile() -> None:
    """deepagents finds the harness profile of a durable model as it finds that of the model itself, and caches its prompts by the model's class."""
    from deepagents.graph import _harness_profile_for_model

    model = ChatAnthropic(model="claude-opus-4-7", api_key="none")
    wrapped = App("profile", uri="mongodb://nowhere").llm(model)
    found = _harness_profile_for_model(model, None)
    assert found.system_prompt_suffix
    assert _harness_profile_for_model(wrapped, None) == found
    assert "AnthropicPromptCachingMiddleware" in [each.name for each in seams.prompt_caching()]


DRAWS = {"uuid4", "now", "token_hex", "urandom", "monotonic", "time", "random", "today", "utcnow"}


def test_who_draws() -> None:
    """Every module of deepagents that draws at random or from the clock has a stand-in, or is known to draw where no model reads it."""
    root = Path(deepagents.__path__[0])
    drawing = set()
    for path in root.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {
            each.func.attr if isinstance(each.func, ast.Attribute) else getattr(each.func, "id", "")
            for each in ast.walk(tree)
            if isinstance(each, ast.Call)
        }
        if names & DRAWS:
            drawing.add(".".join(("deepagents", *path.relative_to(root).with_suffix("").parts)))
    assert drawing <= set(draws.STAND_INS) | draws.NO_MODEL_READS_IT
    assert set(draws.STAND_INS) <= drawing, "a stand-in for what is not drawn any more"


def test_stand_ins_are_put_in_place() -> None:
    """Each name that gets a stand-in is there, and outside a run draws as ever."""
    draws.install()
    import importlib

    for name, stand_ins in draws.STAND_INS.items():
        module = importlib.import_module(name)
        for attribute in stand_ins:
            assert getattr(getattr(module, attribute), "is_stand_in", False), f"{name}.{attribute}"
    filesystem: Any = importlib.import_module("deepagents.middleware.filesystem")
    assert filesystem.uuid.uuid4() != filesystem.uuid.uuid4()
    utilities: Any = importlib.import_module("deepagents.backends.utils")
    assert utilities.create_file_data("x")["created_at"].endswith("+00:00")


@pytest.mark.parametrize("state", [{}, {"_summarization_session_id": "session_mine"}])
def test_the_session_of_a_history(state: dict[str, str]) -> None:
    """deepagents names its history file by what the state keeps, else by a random value that it keeps there."""
    made: Any = object.__new__(seams.SummarizationMiddleware)
    said = made._get_session_id(state)
    assert said == "session_mine" if state else said.startswith("session_")
