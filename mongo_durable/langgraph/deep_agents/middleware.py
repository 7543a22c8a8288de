"""What stands in every agent of a deep agent's tree: the root, each declared sub-agent, and general-purpose."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from deepagents.backends.protocol import BackendProtocol
from deepagents.middleware.patch_tool_calls import PatchToolCallsMiddleware
from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware.types import ModelRequest
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AnyMessage, BaseMessage, ToolMessage
from langchain_core.tools import BaseTool
from langgraph.types import Command

from mongo_durable.langgraph.deep_agents.delegation import call_index
from mongo_durable.langgraph.deep_agents.identity import needs_id, untaken, worker_result_id
from mongo_durable.langgraph.deep_agents.seams import SLOT, SUMMARIZATION_SLOT, SummarizationMiddleware, last_response
from mongo_durable.langgraph.models import DurableModel
from mongo_durable.langgraph.scope import Scope, current_session, here, inside_body

T = TypeVar("T")

if TYPE_CHECKING:
    from langgraph.prebuilt.tool_node import ToolCallRequest


class DeepAgentMiddleware(PatchToolCallsMiddleware):
    """Gives results of tools their ids.

    It takes the place of deepagents' own middleware of that name, and does what that does: it is a place that the general-purpose agent inherits.
    """

    name = SLOT

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Any]) -> Any:
        """Run the call; its result, whoever made it, has a stable id."""
        return _with_ids(request, handler(request))

    async def awrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Any]]) -> Any:
        """See `wrap_tool_call`."""
        return _with_ids(request, await handler(request))


def _with_ids(request: ToolCallRequest, result: Any) -> Any:
    if current_session() is None:
        return result
    if isinstance(result, list):
        return [_with_ids(request, each) for each in result]
    if isinstance(result, ToolMessage):
        return _with_id(request, result)
    if isinstance(result, Command) and isinstance(result.update, dict) and isinstance(result.update.get("messages"), list):
        messages = [_with_id(request, each) if isinstance(each, ToolMessage) else each for each in result.update["messages"]]
        return replace(result, update={**result.update, "messages": messages})
    return result


def _with_id(request: ToolCallRequest, message: ToolMessage) -> ToolMessage:
    call = request.tool_call
    messages: Sequence[BaseMessage] | None = request.state.get("messages") if isinstance(request.state, dict) else None
    if message.tool_call_id != call["id"] or not call["id"] or not needs_id(message) or not messages:
        return message
    index = call_index(call["id"], list(messages))
    response, _ = last_response(list(messages))
    if index is None or response is None:
        return message  # the reducer gives it one
    taken: set[str | None] = {each.id for each in messages}
    scope, stable = here(), ""
    for each in response.tool_calls[: index + 1]:
        # A provider may have used one id for several calls of a response: the earlier ones come first.
        if each["id"] == call["id"]:
            stable = untaken(worker_result_id(scope, each["name"], call["id"]), taken)
    return message.model_copy(update={"id": stable})


class DurableCalls(AgentMiddleware[Any, Any, Any]):
    """Makes durable what middleware before it has put into a call: another model, another tool. It is the last of the caller's middleware."""

    def __init__(self, make_model: Callable[[BaseChatModel], DurableModel], make_tool: Callable[[BaseTool], BaseTool]) -> None:
        super().__init__()
        self._make_model = make_model
        self._make_tool = make_tool

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]) -> Any:
        """Call the model, wrapped if it is not."""
        return handler(self._with_durable_model(request))

    async def awrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[Any]]) -> Any:
        """See `wrap_model_call`."""
        return await handler(self._with_durable_model(request))

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Any]) -> Any:
        """Call the tool, wrapped if it is not."""
        return handler(self._with_durable_tool(request))

    async def awrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Any]]) -> Any:
        """See `wrap_tool_call`."""
        return await handler(self._with_durable_tool(request))

    def _with_durable_model(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        return request if isinstance(request.model, DurableModel) else request.override(model=self._make_model(request.model))

    def _with_durable_tool(self, request: ToolCallRequest) -> ToolCallRequest:
        return request if request.tool is None else replace(request, tool=self._make_tool(request.tool))


class SeesTheModel(AgentMiddleware[Any, Any, Any]):
    """A middleware that asks of what class a model is, shown the model itself; what it makes of the request goes on with the durable one.

    Prompt caching does so: of a wrapped model it would not know what provider it is, and every call would be paid in full.
    """

    def __init__(self, inner: AgentMiddleware[Any, Any, Any]) -> None:
        super().__init__()
        self._inner = inner

    @property
    def name(self) -> str:
        """Its own, so that it takes its own place."""
        return self._inner.name

    @property
    def excluded_as(self) -> type:
        """What a harness profile names to leave it out."""
        named: type = getattr(self._inner, "excluded_as", type(self._inner))
        return named

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]) -> Any:
        """Let it do what it does to the request."""
        model = request.model
        if not isinstance(model, DurableModel):
            return self._inner.wrap_model_call(request, handler)
        return self._inner.wrap_model_call(request.override(model=model.inner), lambda changed: handler(changed.override(model=model)))

    async def awrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[Any]]) -> Any:
        """See `wrap_model_call`."""
        model = request.model
        if not isinstance(model, DurableModel):
            return await self._inner.awrap_model_call(request, handler)

        async def go_on(changed: ModelRequest[Any]) -> Any:
            return await handler(changed.override(model=model))

        return await self._inner.awrap_model_call(request.override(model=model.inner), go_on)


class DurableSummarization(SummarizationMiddleware):
    """deepagents' summarization, whose model and backend are durable.

    Its asynchronous form saves the old messages and asks for the summary at once. Each is a branch of its own, so that their effects do not share one
    numbering.
    """

    name = SUMMARIZATION_SLOT

    async def _aoffload_to_backend(self, backend: BackendProtocol, messages: list[AnyMessage], session_id: str) -> str | None:
        return await _in_branch("offload", super()._aoffload_to_backend(backend, messages, session_id))

    async def _acreate_summary(self, messages_to_summarize: list[AnyMessage]) -> str:
        return await _in_branch("summary", super()._acreate_summary(messages_to_summarize))


async def _in_branch(name: str, work: Awaitable[T]) -> T:
    if current_session() is None:
        return await work
    scope = here()
    branch = Scope(scope.root, scope.namespace, scope.info, (*scope.path, name), scope.step)
    leave = inside_body(branch)
    try:
        return await work
    finally:
        leave()
