"""Everything that depends on private or version-bound behaviour of deepagents, seen on 0.7.32 with LangChain 1.5.2.

`tests/deep_agents/test_seams.py` is the contract test: when an upgrade breaks it, this module is the place to change.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Mapping
from typing import Any, cast

from deepagents._models import resolve_model as resolve_model
from deepagents.middleware._prompt_caching import append_prompt_caching_middleware
from deepagents.middleware.filesystem import _file_data_reducer as merge_files
from deepagents.middleware.summarization import _DeepAgentsSummarizationMiddleware as SummarizationMiddleware
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.tools import BaseTool
from langgraph.pregel import Pregel

__all__ = ["SummarizationMiddleware", "merge_files", "resolve_model"]

PROVEN_VERSIONS = ("0.7.32",)

TASK_TOOL = "task"
TASK_ARGUMENTS = frozenset({"description", "subagent_type"})
"""What the model gives a `task` call; the tool node adds `runtime`."""

SLOT = "PatchToolCallsMiddleware"
"""A middleware of this name takes the place of deepagents' own in the root *and* in the general-purpose agent, which inherits no other middleware."""

SUMMARIZATION_SLOT = "SummarizationMiddleware"

EDITED_CALLS_KEY = "hitl_edited_tool_calls"
"""In the state: tool calls that a person has edited, by id. The model's own message keeps the call as it was ordered."""

_SUBAGENTS_VARIABLE = "subagent_graphs"
_OWN_PACKAGE = "deepagents."


def prompt_caching() -> list[AgentMiddleware[Any, Any, Any]]:
    """The middleware that deepagents caches prompts with, for the providers that are installed."""
    made: list[AgentMiddleware[Any, Any, Any]] = []
    append_prompt_caching_middleware(made)
    return made


def warn_unless_proven() -> None:
    """Say so when the installed deepagents is not a version that this adapter was proven on."""
    installed = importlib.metadata.version("deepagents")
    if installed not in PROVEN_VERSIONS:
        warnings.warn(
            f"app.deep_agent is proven on deepagents {', '.join(PROVEN_VERSIONS)}, and {installed} is installed: "
            "run your crash tests before you rely on it",
            UserWarning,
            stacklevel=4,
        )


def tool_table(graph: Pregel[Any, Any, Any, Any]) -> dict[str, BaseTool]:
    """The tools that an agent's tool node runs, by name: the table itself. A reviewer's edit that names another tool finds it here too."""
    node = graph.nodes.get("tools")
    return cast("dict[str, BaseTool]", node.bound.tools_by_name) if node is not None else {}  # type: ignore[attr-defined]


def is_own_tool(tool: BaseTool) -> bool:
    """Whether a tool is deepagents' own: its outside effects go through the backend, where they are recorded."""
    function = getattr(tool, "func", None) or getattr(tool, "coroutine", None)
    return str(getattr(function, "__module__", "")).startswith(_OWN_PACKAGE)


def is_deep_agent(graph: Pregel[Any, Any, Any, Any]) -> bool:
    """Whether a compiled graph is a deep agent: it has deepagents' `task` tool, or says so in its metadata."""
    task = tool_table(graph).get(TASK_TOOL) if hasattr(getattr(graph.nodes.get("tools"), "bound", None), "tools_by_name") else None
    metadata = (graph.config or {}).get("metadata") or {}
    return (task is not None and is_own_tool(task)) or metadata.get("ls_integration") == "deepagents"


def subagent_graphs(task: BaseTool) -> Mapping[str, Any] | None:
    """The compiled sub-agents behind a `task` tool, by type; None if they are not where they were. No public way leads to them."""
    function = getattr(task, "func", None)
    names = function.__code__.co_freevars if function is not None else ()
    if _SUBAGENTS_VARIABLE not in names or function is None or function.__closure__ is None:
        return None
    found = function.__closure__[names.index(_SUBAGENTS_VARIABLE)].cell_contents
    return found if isinstance(found, Mapping) else None


def last_response(messages: list[BaseMessage]) -> tuple[AIMessage | None, set[str]]:
    """The model's last response among `messages`, and the ids of its calls that have a result already: those get no worker."""
    answered: set[str] = set()
    for message in reversed(messages):
        if isinstance(message, AIMessage):
            return message, answered
        if isinstance(message, ToolMessage):
            answered.add(message.tool_call_id)
    return None, answered


def has_tools_of_skills(middleware: object) -> bool:
    """Whether a SkillsMiddleware resolves tools as it goes: they never stand in the agent's tool node."""
    return getattr(middleware, "_skill_tool_resolver", None) is not None
