"""Deep agents inside other graphs, graphs inside deep agents, and what is refused by name when an agent is made."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
from deepagents import create_deep_agent
from deepagents.backends import FilesystemBackend
from deepagents.graph import DeepAgentState
from deepagents.middleware.filesystem import FilesystemMiddleware
from deepagents.middleware.patch_tool_calls import PatchToolCallsMiddleware
from deepagents.middleware.rubric import RubricMiddleware
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

from mongo_durable import App
from mongo_durable.errors import ConfigurationError, UnsupportedGraph
from mongo_durable.langgraph.deep_agents import seams
from tests.deep_agents.kit import HELLO, Inputs, Speaker, call, final_messages, in_turn, order, positions_of, researcher, run, speaker, subagent, task
from tests.deep_agents.test_paths import COLOURS, delegating
from tests.langgraph.bench import Bench, Colour
from tests.langgraph.kit import Kit, State

MODEL = Speaker(say=None, ledger=None, name_="unused")


def raw() -> Any:
    """A deep agent as deepagents makes it."""
    return create_deep_agent(model=MODEL)


def around(child: Any) -> Any:
    """A graph with a node `agent`."""
    graph = StateGraph(MessagesState)
    graph.add_node("agent", child)
    graph.add_edge(START, "agent")
    return graph


def refused(app: App, graph: Any, match: str, node: str | None = None) -> None:
    """The app refuses the graph before anything runs."""
    app.entrypoint(lambda: graph)
    with pytest.raises(UnsupportedGraph, match=match) as caught:
        app.graph()
    assert caught.value.node == node


def test_a_raw_deep_agent_is_refused(bench: Bench) -> None:
    """As root, as a node, as a node of a node, and captured by a function: refused at start, naming the node and the remedy."""
    refused(bench.app("r1"), raw(), "made by create_deep_agent")
    refused(bench.app("r2"), around(raw()), r"app\.deep_agent", "agent")
    refused(bench.app("r3"), around(around(raw()).compile()), r"app\.deep_agent", "agent|agent")
    hidden = raw()
    refused(bench.app("r4"), around(lambda state: hidden.invoke(state)), r"app\.deep_agent", "agent")


def test_a_raw_deep_agent_as_a_sub_agent_is_refused(bench: Bench) -> None:
    """Also where LangGraph does not see it: as a compiled sub-agent, or inside one."""
    for runnable in (raw(), around(raw()).compile()):
        with pytest.raises(UnsupportedGraph, match=r"app\.deep_agent"):
            bench.app("s").deep_agent(model=MODEL, subagents=[{"name": "deep", "description": "d", "runnable": runnable}])


def test_remote_sub_agents_are_refused(bench: Bench) -> None:
    """An async sub-agent's work is on another server and in no history of ours."""
    with pytest.raises(UnsupportedGraph, match="'far' is remote") as caught:
        bench.app("far").deep_agent(model=MODEL, subagents=[{"name": "far", "description": "d", "graph_id": "g"}])
    assert caught.value.node == "far"


def test_savers_and_caches_are_refused(bench: Bench) -> None:
    """A deep agent with a saver or a cache of its own, as the run's graph or as a compiled sub-agent."""
    for options in ({"checkpointer": InMemorySaver()}, {"cache": InMemoryCache()}):
        app = bench.app(f"own-{next(iter(options))}")
        refused(app, app.deep_agent(model=MODEL, **options), "checkpointer of its own|a cache")
    own = around(lambda state: state).compile(checkpointer=InMemorySaver())
    with pytest.raises(UnsupportedGraph, match="'c' is compiled with a checkpointer of its own"):
        bench.app("own").deep_agent(model=MODEL, subagents=[{"name": "c", "description": "d", "runnable": own}])
    app = bench.app("ours")
    app.entrypoint(lambda: app.deep_agent(model=MODEL, checkpointer=app.checkpointer()))
    assert app.graph()


class _Mine(PatchToolCallsMiddleware):
    pass


def test_middleware_that_cannot_be_made_durable(bench: Bench) -> None:
    """What would leave an effect unrecorded, or an agent of the tree without its middleware, is refused by name."""
    app = bench.app("m")
    files = FilesystemMiddleware(backend=FilesystemBackend(root_dir=".", virtual_mode=True))
    with pytest.raises(ConfigurationError, match="FilesystemMiddleware"):
        app.deep_agent(model=MODEL, middleware=[files])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rubric = RubricMiddleware(model=MODEL)
    with pytest.raises(UnsupportedGraph, match="RubricMiddleware"):
        app.deep_agent(model=MODEL, middleware=[rubric])
    taken = _Mine()
    type(taken).name = "PatchToolCallsMiddleware"  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="give yours another name"):
        app.deep_agent(model=MODEL, middleware=[taken])
    with pytest.raises(ConfigurationError, match="needs a model"):
        app.deep_agent()


class _Counting(TypedDict):
    messages: list[Any]


class _More(DeepAgentState):
    page: str


def test_the_callers_state(bench: Bench, inputs: Inputs) -> None:
    """state_schema may add fields, which sub-agents share; a reducer of its own on messages is refused."""
    with pytest.raises(ConfigurationError, match="reducer of its own"):
        bench.app("st").deep_agent(model=MODEL, state_schema=_Counting)

    def make(kit: Kit) -> Any:
        root = in_turn(order(task("A", "research")), AIMessage("done"))
        agents = [subagent(kit, "research", researcher("ask"))]
        return kit.app.deep_agent(model=speaker(kit, "root", root), tools=kit.tools, subagents=agents, state_schema=_More)

    told = run(bench, make, given={**HELLO, "page": "p1"})
    assert told.state["page"] == "p1"


def test_an_excluded_slot_is_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A harness profile that takes our middleware out of the agents: noticed when the agent is made, not after a crash."""
    import deepagents.graph as graph
    from deepagents.profiles import HarnessProfile

    from mongo_durable.langgraph.deep_agents import building

    monkeypatch.setattr(graph, "_harness_profile_for_model", lambda model, spec: HarnessProfile(excluded_middleware={"PatchToolCallsMiddleware"}))
    assert building.create_deep_agent is create_deep_agent
    with pytest.raises(ConfigurationError, match="would not be durable"):
        bench.app("excluded").deep_agent(model=MODEL)


@pytest.mark.parametrize("colour", COLOURS)
def test_other_graphs_as_sub_agents(bench: Bench, inputs: Inputs, colour: Colour) -> None:
    """A compiled create_agent, a graph and a function as sub-agents: what is durable in them is recorded under their path, and may ask."""

    def make(kit: Kit) -> Any:
        agent = create_agent(speaker(kit, "agent", researcher("ask", "plain")), kit.tools, middleware=[kit.app.middleware()])

        async def node(state: Any) -> Any:
            asked = str(state["messages"][-1].content)
            return {"messages": [AIMessage(await kit.act(asked) + kit.interrupt(asked))]}

        async def function(state: Any) -> Any:
            return {"messages": [AIMessage(await kit.act(f"f {state['messages'][-1].content}"))]}

        body = kit.body(function)
        plain = RunnableLambda(body) if kit.is_sync else RunnableLambda(lambda state: None, body)
        root = in_turn(order(task("A", "agent"), task("B", "graph"), task("C", "function"), task("D", "graph")), AIMessage("done"))
        runnables = {"agent": agent, "graph": around(kit.body(node)).compile(), "function": plain}
        return kit.app.deep_agent(
            model=speaker(kit, "root", root),
            subagents=[{"name": name, "description": name, "runnable": each} for name, each in runnables.items()],
        )

    told = run(bench, make, colour)
    expected = bench.plainly(make, HELLO, colour)
    assert told.state == expected.state
    acts = {each.position.text.partition("@")[0] for each in told.events if each.position is not None and each.name == "act"}
    assert {"agent/1/graph/1/agent:1", "agent/1/graph/2/agent:1", "agent/1/function/1"} <= acts
    models = [each.partition("@")[0] for each in positions_of(told) if each.startswith("agent/1/agent/1/")]
    assert models == [f"agent/1/agent/1/model:{step}" for step in (1, 3, 5)]


@pytest.mark.parametrize("colour", COLOURS)
def test_workers_of_a_send_are_deep_agents(bench: Bench, inputs: Inputs, colour: Colour) -> None:
    """A graph that fans out to a deep agent: each worker's sub-agents stand under it."""

    class Fan(State):
        pass

    def make(kit: Kit) -> Any:
        agent = delegating(order(task("A", "research"), task("B", "research")))(kit)

        async def worker(state: Any) -> Any:
            said = await kit.call(agent, {"messages": [("user", str(state["work"]))]})
            return {"lines": [[str(each.content) for each in said["messages"]]]}

        graph = StateGraph(Fan)
        graph.add_node("worker", kit.body(worker))
        graph.add_conditional_edges(START, lambda state: [Send("worker", {"work": f"w{index}"}) for index in range(3)], ["worker"])
        return graph.compile()

    told = run(bench, make, colour, given={"lines": []})
    assert told.state == bench.plainly(make, {"lines": []}, colour).state
    under = {position.partition("/model")[0] for position in told.positions if "/research/" in position}
    assert {f"agent/1/[{worker}]/c1/research/{number}" for worker in range(3) for number in (1, 2)} <= under


def test_a_deep_agent_inside_a_tool(bench: Bench, inputs: Inputs) -> None:
    """A durable tool may call a deep agent: its body is recorded, and what is in it once."""

    def make(kit: Kit) -> Any:
        inner = delegating(order(task("A", "research"), call("ask", "q", q="?")))(kit)
        root = in_turn(order(call("delegate", "d1", q="1"), call("delegate", "d2", q="2")), AIMessage("done"))
        return kit.app.deep_agent(model=speaker(kit, "outer", root), tools=[kit.delegate(inner)])

    told = run(bench, make)
    assert told.state == bench.plainly(make, HELLO, "async").state
    assert len(told.frontiers[0]) == 2
    assert final_messages(bench, told)


def test_without_the_extra() -> None:
    """The package imports without deepagents, and says what to install."""
    code = (
        "import sys\n"
        "sys.modules['deepagents'] = None\n"
        "import mongo_durable, mongo_durable.langgraph.deep_agents\n"
        "from mongo_durable import App\n"
        "from mongo_durable.errors import ConfigurationError\n"
        "try:\n    App('x').deep_agent(model='m')\n"
        "except ConfigurationError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "install mongo_durable[deepagents]" in done.stdout


def test_importing_the_library_loads_no_deepagents() -> None:
    """Who has no deep agents does not pay for them."""
    code = "import sys, mongo_durable.langgraph.app; print([each for each in sys.modules if each.startswith('deepagents')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_another_version_warns(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deepagents that this adapter was not proven on warns when an agent is made."""
    monkeypatch.setattr(seams, "PROVEN_VERSIONS", ("0.7.31",))
    with pytest.warns(UserWarning, match=r"proven on deepagents 0\.7\.31"):
        bench.app("version").deep_agent(model=MODEL)
