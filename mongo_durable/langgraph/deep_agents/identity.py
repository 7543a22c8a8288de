"""Ids of the messages of a deep agent: derived from tool calls, the same in every attempt, set on copies, and never one that is taken.

    durable-deep-agent-input:<task call>:<n>                  what a sub-agent is asked
    durable-deep-agent-tool-result:<task call>:<tool call>    a tool's result inside it; without <task call>: in the root
    durable-deep-agent-task-result:<task call>                its report

An agent that is neither the root nor a sub-agent (a node of another graph) puts where it stands before the call: its messages may join another's.
A provider may use a tool-call id again, in a later response or twice in one. LangGraph replaces a message whose id comes again, so an id that is
taken gets `~2`, `~3`, …: nothing is lost.

Ids are set where messages enter the state. Hooks too make messages (a rejected call's, a dangling call's), so the place is the reducer of the
`messages` channel, of every agent in the tree. Results of tools get theirs a moment earlier, in the middleware, so that streams show them.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, Required, get_type_hints

from deepagents.backends.protocol import FileData
from deepagents.graph import DeepAgentState
from langchain.agents import AgentState
from langchain_core.messages import AnyMessage, BaseMessage, HumanMessage, ToolMessage, convert_to_messages
from langgraph.graph.message import add_messages

from mongo_durable.errors import ConfigurationError
from mongo_durable.langgraph.deep_agents.seams import TASK_TOOL, merge_files
from mongo_durable.langgraph.messages import message_id
from mongo_durable.langgraph.scope import Scope, current_place, current_session
from mongo_durable.protocol.identity import ROOT_PATH

_PREFIX = "durable-deep-agent"
_RECORDED = "md-"
"""Ids that recorded results have: stable, but not yet in the form of a deep agent."""


@dataclass(frozen=True, slots=True)
class Delegated:
    """A task call whose sub-agent runs here, or around here.

    Attributes:
        path: Where the sub-agent stands.
        place: What `current_place` says in the sub-agent's own loop.
    """

    call_id: str
    path: tuple[str, ...]
    place: str | None


delegated: contextvars.ContextVar[Delegated | None] = contextvars.ContextVar("mongo_durable_delegated", default=None)


def worker_result_id(scope: Scope, name: str, tool_call_id: str) -> str:
    """The id of a call's result, for the worker whose body `scope` is."""
    around, agent = delegated.get(), scope.path[:-1]
    if around is not None and around.path == agent:
        return _result_id(f"{around.call_id}:", "", name, tool_call_id)
    where = "" if agent == ROOT_PATH else f"{'/'.join(agent)}@{scope.step}:"
    return _result_id(where, where, name, tool_call_id)


def _result_id(before_tool: str, before_task: str, name: str | None, tool_call_id: str) -> str:
    return f"{_PREFIX}-task-result:{before_task}{tool_call_id}" if name == TASK_TOOL else f"{_PREFIX}-tool-result:{before_tool}{tool_call_id}"


def untaken(wanted: str, taken: set[str | None]) -> str:
    """`wanted`, or with a number if it is taken; then it is taken."""
    found, number = wanted, 2
    while found in taken:
        found, number = f"{wanted}~{number}", number + 1
    taken.add(found)
    return found


def needs_id(message: BaseMessage) -> bool:
    """Whether nobody gave the message an id of his own."""
    return message.id is None or message.id.startswith(_RECORDED)


def with_stable_ids(left: Any, right: Any) -> Any:
    """`add_messages` for a deep agent."""
    session, place = current_session(), current_place()
    if session is None or place is None:
        return add_messages(left, right)
    given = convert_to_messages(right if isinstance(right, list) else [right])
    before = [message.id for message in left or []]
    taken: set[str | None] = {*before, *(message.id for message in given)}
    around = delegated.get()
    asked = around.call_id if around is not None and around.place == place else None
    where = "" if place == session.attempt.run_id else place.removeprefix(f"{session.attempt.run_id}/") + ":"
    stamped: list[Any] = [_stamped(message, (place, before, index), asked, where, taken) for index, message in enumerate(given)]
    return add_messages(left, stamped)


def _stamped(message: BaseMessage, parts: tuple[object, ...], asked: str | None, where: str, taken: set[str | None]) -> BaseMessage:
    if message.id is not None:
        return message
    if isinstance(message, ToolMessage):
        before = (where, where) if asked is None else (f"{asked}:", "")
        wanted = _result_id(*before, message.name, message.tool_call_id)
    elif isinstance(message, HumanMessage) and asked is not None:
        wanted = f"{_PREFIX}-input:{asked}:{_inputs(taken, asked)}"
    else:
        wanted = message_id(*parts, message.type)
    # A copy: the object may be the caller's, or stand in another agent's state.
    return message.model_copy(update={"id": untaken(wanted, taken)})


def _inputs(taken: Iterable[str | None], asked: str) -> int:
    return sum(1 for each in taken if each is not None and each.startswith(f"{_PREFIX}-input:{asked}:"))


def _merged_files(left: Any, right: Any) -> Any:
    return merge_files(left, right)


def durable_state(schema: type | None) -> type:
    """The state of every agent in the tree: `schema`, with messages that have stable ids.

    Files are kept whole beside it: deepagents keeps what changed only (a DeltaChannel), and the next turn of a thread starts from one checkpoint,
    which would not have them.

    Raises:
        ConfigurationError: The schema has a reducer of its own on `messages`.
    """
    base: Any = DeepAgentState if schema is None else schema
    own = get_type_hints(base, include_extras=True).get("messages")
    known = [get_type_hints(each, include_extras=True)["messages"] for each in (DeepAgentState, AgentState)]
    if own is not None and own not in known:
        raise ConfigurationError(
            "state_schema= has a reducer of its own on `messages`, where a deep agent's stable message ids are made: leave it out"
        )

    class DurableDeepAgentState(base):  # type: ignore[misc]
        messages: Required[Annotated[list[AnyMessage], with_stable_ids]]  # type: ignore[valid-type]
        files: NotRequired[Annotated[dict[str, FileData], _merged_files]]  # type: ignore[valid-type]

    return DurableDeepAgentState
