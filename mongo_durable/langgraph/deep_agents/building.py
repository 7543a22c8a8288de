"""How a durable deep agent is made: deepagents' own `create_deep_agent`, given durable parts.

Refused by name, when the agent is made: remote (async) sub-agents, whose work and answers are not in this run; deep agents that were not made here;
middleware whose models, tools or backends cannot be reached; and whatever would leave an agent of the tree without its middleware.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from deepagents import create_deep_agent
from deepagents.backends.protocol import BackendProtocol
from deepagents.backends.state import StateBackend
from deepagents.middleware.async_subagents import AsyncSubAgentMiddleware
from deepagents.middleware.patch_tool_calls import PatchToolCallsMiddleware
from deepagents.middleware.rubric import RubricMiddleware
from deepagents.middleware.summarization import SummarizationToolMiddleware, create_summarization_middleware
from langchain.agents.middleware import AgentMiddleware
from langchain.agents.structured_output import AutoStrategy, ProviderStrategy, ToolStrategy
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.tools import BaseTool
from langgraph.pregel import Pregel

from mongo_durable.errors import ConfigurationError, UnsupportedGraph
from mongo_durable.langgraph import stable_ids
from mongo_durable.langgraph.deep_agents import draws
from mongo_durable.langgraph.deep_agents.backends import durable_backend, is_durable
from mongo_durable.langgraph.deep_agents.delegation import DelegatingTool, delegating_tool
from mongo_durable.langgraph.deep_agents.identity import durable_state, with_stable_ids
from mongo_durable.langgraph.deep_agents.middleware import DeepAgentMiddleware, DurableCalls, DurableSummarization, SeesTheModel
from mongo_durable.langgraph.deep_agents.seams import (
    SLOT,
    SUMMARIZATION_SLOT,
    TASK_ARGUMENTS,
    TASK_TOOL,
    SummarizationMiddleware,
    has_tools_of_skills,
    is_deep_agent,
    is_own_tool,
    prompt_caching,
    resolve_model,
    subagent_graphs,
    tool_table,
    warn_unless_proven,
)
from mongo_durable.langgraph.effects import Policy
from mongo_durable.langgraph.middleware import DurableMiddleware, with_durable_hooks
from mongo_durable.langgraph.models import DurableModel, replace_models
from mongo_durable.langgraph.seams import hook_owner
from mongo_durable.langgraph.tools import DurableTool, durable_tool
from mongo_durable.langgraph.topology import check_child

if TYPE_CHECKING:
    from mongo_durable.langgraph.app import App

Graph = Pregel[Any, Any, Any, Any]

_NOT_WRAPPED = Policy(on_unknown_outcome="suspend")
"""Of tools that were given plainly."""


def build(
    app: App,
    *,
    model: str | BaseChatModel | None,
    middleware: Sequence[AgentMiddleware[Any, Any, Any]],
    subagents: Sequence[Mapping[str, Any]] | None,
    backend: BackendProtocol | None,
    response_format: Any,
    state_schema: type | None,
    **options: Any,
) -> Graph:
    """See `App.deep_agent`."""
    warn_unless_proven()
    draws.install()
    if model is None:
        raise ConfigurationError("app.deep_agent needs a model: a chat model, or a name such as 'anthropic:claude-sonnet-4-6'")
    parts = _Parts(app, backend)
    chosen = parts.model(model)
    graph: Graph = create_deep_agent(
        model=chosen,
        middleware=parts.middleware(middleware, chosen),
        subagents=cast("Any", [parts.subagent(spec, chosen) for spec in subagents or ()]),
        backend=parts.backend,
        response_format=_titled(response_format, "the agent"),
        state_schema=durable_state(state_schema),
        **options,
    )
    parts.complete(graph)
    return graph


class _Parts:
    """Makes the parts of a deep agent durable."""

    def __init__(self, app: App, backend: BackendProtocol | None) -> None:
        self._app = app
        self.backend = durable_backend(backend if backend is not None else StateBackend(), app.codec)

    def model(self, model: str | BaseChatModel) -> DurableModel:
        """A durable model. A wrapped one is returned as it is."""
        return self._app.llm(resolve_model(model))

    def tool(self, tool: BaseTool, table: Mapping[str, BaseTool]) -> BaseTool:
        """A durable tool: the task tool knows where its sub-agents stand, and deepagents' own tools work on a durable backend already."""
        if isinstance(tool, DurableTool | DelegatingTool):
            return tool
        if not is_own_tool(tool):
            return durable_tool(tool, self._app.codec, _NOT_WRAPPED, lambda name: isinstance(table.get(name), DurableTool))
        if tool.name != TASK_TOOL:
            return tool
        agents = subagent_graphs(tool)
        if agents is None or set(tool.tool_call_schema.model_json_schema().get("properties", {})) != TASK_ARGUMENTS:  # type: ignore[union-attr]
            raise ConfigurationError("this deepagents has a task tool of another make: use a version that app.deep_agent is proven on")
        return delegating_tool(tool, frozenset(agents))

    def subagent(self, spec: Mapping[str, Any], of_root: DurableModel) -> Mapping[str, Any]:
        """A sub-agent whose model, tools and middleware are durable.

        Raises:
            UnsupportedGraph: It cannot be.
        """
        name = str(spec.get("name"))
        if "graph_id" in spec:
            raise UnsupportedGraph(
                f"sub-agent {name!r} is remote (AsyncSubAgent): its work is not part of this run; call it from a tool (@app.tool) instead", node=name
            )
        if "runnable" in spec:
            return {**spec, "runnable": self._compiled(name, spec["runnable"])}
        chosen = self.model(spec["model"]) if spec.get("model") is not None else of_root
        prepared = {**spec, "model": chosen, "middleware": self.middleware(spec.get("middleware", ()), chosen)}
        if "response_format" in spec:
            prepared["response_format"] = _titled(spec["response_format"], f"sub-agent {name!r}")
        return prepared

    def _compiled(self, name: str, runnable: Any) -> Any:
        if not isinstance(runnable, Pregel):
            return runnable
        check_child(runnable, name)
        return stable_ids.with_stable_ids(with_durable_hooks(runnable, self._app.llm))

    def middleware(self, given: Iterable[AgentMiddleware[Any, Any, Any]], model: DurableModel) -> list[AgentMiddleware[Any, Any, Any]]:
        """The caller's middleware, made durable, with ours."""
        prepared = [self._prepared(each) for each in given if not isinstance(each, DurableMiddleware) and type(each) is not PatchToolCallsMiddleware]
        for each in prepared:
            if each.name == SLOT:
                raise ConfigurationError(f"a middleware named {SLOT} takes the place in which app.deep_agent stands: give yours another name")
        if not any(each.name == SUMMARIZATION_SLOT for each in prepared):
            prepared.append(_summarization(create_summarization_middleware(model, self.backend)))
        caching = {each.name: each for each in prompt_caching()}
        caching |= {each.name: each for each in prepared if each.name in caching}
        prepared = [*(each for each in prepared if each.name not in caching), *map(SeesTheModel, caching.values())]
        return [DeepAgentMiddleware(), *prepared, DurableCalls(self.model, lambda tool: self.tool(tool, {}))]

    def _prepared(self, middleware: AgentMiddleware[Any, Any, Any]) -> AgentMiddleware[Any, Any, Any]:
        what = f"middleware {middleware.name!r}"
        if isinstance(middleware, AsyncSubAgentMiddleware | RubricMiddleware):
            raise UnsupportedGraph(
                f"{what} is not proven to replay: leave it out, or call what it does from a tool (@app.tool)", node=middleware.name
            )
        if has_tools_of_skills(middleware):
            raise UnsupportedGraph(f"{what} brings tools with its skills, which cannot be wrapped: give them in tools=", node=middleware.name)
        if getattr(middleware, "tools", None) and any(
            isinstance(each, BackendProtocol) and not is_durable(each) for each in vars(middleware).values()
        ):
            raise ConfigurationError(
                f"{what} has tools with a backend of their own, whose effects would not be recorded: give it in backend= of app.deep_agent"
            )
        if isinstance(middleware, SummarizationToolMiddleware):
            engine = self._prepared(middleware._summarization)
            return SummarizationToolMiddleware(cast("Any", engine), system_prompt=middleware.system_prompt)
        made = self._with_durable_fields(middleware)
        return _summarization(made) if type(made) is SummarizationMiddleware else made

    def _with_durable_fields(self, middleware: AgentMiddleware[Any, Any, Any]) -> Any:
        """A copy of a middleware in which the models that it calls and the backends that it uses are durable; itself if it has none."""

        def durable(value: Any) -> Any:
            if isinstance(value, AgentMiddleware):
                return self._with_durable_fields(value)
            if isinstance(value, BackendProtocol):
                return durable_backend(value, self._app.codec)
            if isinstance(value, list | tuple):
                made = [durable(each) for each in value]
                return value if all(new is old for new, old in zip(made, value, strict=True)) else type(value)(made)
            if isinstance(value, dict):
                entries = {key: durable(each) for key, each in value.items()}
                return value if all(entries[key] is each for key, each in value.items()) else entries
            return replace_models(value, self.model)

        fields = {name: durable(value) for name, value in vars(middleware).items()}
        if all(fields[name] is value for name, value in vars(middleware).items()):
            return middleware
        made = copy.copy(middleware)
        vars(made).update(fields)
        return made

    def complete(self, root: Graph) -> None:
        """Put durable tools into the tool nodes of the agents that deepagents has just made, and see that none of them lacks anything.

        Raises:
            ConfigurationError: An agent of the tree would not be durable.
        """
        waiting: list[tuple[str, Any]] = [("the root", root)]
        for name, graph in waiting:
            if not isinstance(graph, Pregel) or not is_deep_agents_own(graph):
                continue  # a compiled sub-agent: the caller's own graph
            if not is_durable_agent(graph):
                raise ConfigurationError(
                    f"{name} would not be durable: a harness profile (excluded_middleware) or another middleware has taken {SLOT} out of it"
                )
            table = tool_table(graph)
            for tool_name, tool in list(table.items()):
                if tool_name == TASK_TOOL and is_own_tool(tool) and not isinstance(tool, DelegatingTool):
                    waiting += [(f"sub-agent {each!r}", agent) for each, agent in (subagent_graphs(tool) or {}).items()]
                table[tool_name] = self.tool(tool, table)


def is_durable_agent(graph: Graph) -> bool:
    """Whether an agent of a tree was made here: it has the middleware, and message ids that are stable."""
    hook = graph.nodes.get(f"{SLOT}.before_agent")
    channel = graph.channels.get("messages")
    return hook is not None and isinstance(hook_owner(hook.bound), DeepAgentMiddleware) and getattr(channel, "operator", None) is with_stable_ids


def is_deep_agents_own(graph: Graph) -> bool:
    """Whether deepagents has made an agent: its file tools are there, or it says so."""
    return is_deep_agent(graph) or any(is_own_tool(tool) for tool in tool_table(graph).values())


def _summarization(made: Any) -> AgentMiddleware[Any, Any, Any]:
    own = copy.copy(made)
    own.__class__ = DurableSummarization
    return cast("AgentMiddleware[Any, Any, Any]", own)


def _titled(response_format: Any, what: str) -> Any:
    """A response format whose tool has the same name in every process: LangChain draws one for a schema without a title."""
    if isinstance(response_format, dict):
        return response_format if response_format.get("title") else {**response_format, "title": "response_format"}
    schema = getattr(response_format, "schema", None) if isinstance(response_format, ToolStrategy | ProviderStrategy | AutoStrategy) else None
    if isinstance(schema, dict) and not schema.get("title"):
        raise ConfigurationError(
            f"the schema in response_format of {what} has no title, and LangChain would draw another name for it each time: give it one"
        )
    return response_format
