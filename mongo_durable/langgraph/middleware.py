"""`app.middleware()`: an existing `create_agent` becomes durable with its plain model and tools.

A model call is recorded around everything that stands inside this middleware (other middleware's retries and fallbacks included), once: a durable
model inside it behaves like a plain one. A tool call is recorded at the tool itself, whose body may interrupt. Stock middleware that calls a model in
a hook of its own (summarization) gets that model made durable when the app takes the graph.

Put it first in the list: middleware outside it that calls a model of its own inside `wrap_model_call` is not seen.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware.types import ExtendedModelResponse, ModelRequest, ModelResponse
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import BaseTool
from langgraph.pregel import Pregel
from pydantic import BaseModel

from mongo_durable.langgraph.codec import Codec
from mongo_durable.langgraph.effects import Effect, Policy, run_effect, run_effect_async, start_effect
from mongo_durable.langgraph.messages import meaning, message_digests, semantic_input
from mongo_durable.langgraph.models import DurableModel, model_name, replace_models
from mongo_durable.langgraph.scope import Session, current_session, here, outside_any_session
from mongo_durable.langgraph.seams import hook_owner, parent_namespace, with_hook_owner
from mongo_durable.langgraph.tools import DurableTool
from mongo_durable.protocol.events import ActivityKind

if TYPE_CHECKING:
    from langgraph.prebuilt.tool_node import ToolCallRequest


class DurableMiddleware(AgentMiddleware[Any, Any, Any]):
    """Makes the model and tool calls of an agent durable."""

    def __init__(self, codec: Codec, model_policy: Policy, make_tool: Callable[[BaseTool], DurableTool]) -> None:
        super().__init__()
        self._codec = codec
        self._model_policy = model_policy
        self._make_tool = make_tool
        self._tools: dict[int, DurableTool] = {}

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]) -> Any:
        """Record the model call that `handler` makes, whatever it does to make it."""
        session = current_session()
        if session is None:
            return handler(request)
        call = _ModelCall(self._codec, self._model_policy, session, request)

        def body(_: object) -> Any:
            with outside_any_session():
                return call.value_of(handler(request))

        return call.response(run_effect(call.effect, body))

    async def awrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[Any]]) -> Any:
        """See `wrap_model_call`."""
        session = current_session()
        if session is None:
            return await handler(request)
        call = _ModelCall(self._codec, self._model_policy, session, request)

        async def body(_: object) -> Any:
            with outside_any_session():
                return call.value_of(await handler(request))

        return call.response(await run_effect_async(call.effect, body))

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Any]) -> Any:
        """Run the call with its tool made durable."""
        return handler(self._with_durable_tool(request))

    async def awrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Any]]) -> Any:
        """See `wrap_tool_call`."""
        return await handler(self._with_durable_tool(request))

    def _with_durable_tool(self, request: ToolCallRequest) -> ToolCallRequest:
        tool = request.tool
        if tool is None or isinstance(tool, DurableTool):
            return request
        known = self._tools.get(id(tool))
        if known is None or known.inner is not tool:
            known = self._tools[id(tool)] = self._make_tool(tool)
        return dataclasses.replace(request, tool=known)


class _ModelCall:
    """One model call under the middleware."""

    def __init__(self, codec: Codec, policy: Policy, session: Session, request: ModelRequest[Any]) -> None:
        # The schemas of structured output are types that the agent itself names, so their instances may be stored.
        schemas = [each for each in _schemas(request.response_format) if issubclass(each, BaseModel) or dataclasses.is_dataclass(each)]
        codec = Codec([*codec.types.values(), *schemas]) if schemas else codec
        messages = [request.system_message, *request.messages] if request.system_message is not None else list(request.messages)
        parts = message_digests(messages)
        options = {
            "tools": [_tool_meaning(tool) for tool in request.tools],
            "tool_choice": request.tool_choice,
            "response_format": request.response_format,
            "settings": request.model_settings,
        }
        self.effect: Effect = start_effect(
            session,
            codec,
            here(),
            ActivityKind.LLM,
            model_name(request.model),
            semantic_input(parts, None, options),
            policy,
            parts=parts,
            happened=lambda result: {"messages": [AIMessage(content=str(result))]},
        )

    def value_of(self, response: Any) -> dict[str, Any]:
        """What is recorded of a model node's response."""
        command = None
        if isinstance(response, ExtendedModelResponse):
            command, response = response.command, response.model_response
        if isinstance(response, AIMessage):
            response = ModelResponse(result=[response])
        parts = {"messages": list(response.result), "structured": response.structured_response, "command": command}
        return {name: part for name, part in parts.items() if part is not None}

    def response(self, recorded: dict[str, Any]) -> Any:
        """The response that was recorded. Its tool calls get their places in its order, before any of them runs."""
        self.effect.scope.root.reserve(parent_namespace(self.effect.scope.namespace), recorded["messages"])
        response: ModelResponse[Any] = ModelResponse(result=recorded["messages"], structured_response=recorded.get("structured"))
        command = recorded.get("command")
        return ExtendedModelResponse(model_response=response, command=command) if command is not None else response


def _tool_meaning(tool: Any) -> Any:
    if not isinstance(tool, BaseTool):
        return meaning(tool)
    return {"name": tool.name, "description": tool.description, "schema": meaning(tool.tool_call_schema)}


def _schemas(response_format: Any) -> list[type]:
    schema = getattr(response_format, "schema", response_format)
    candidates = [schema, *getattr(schema, "__args__", ())]
    return [each for each in candidates if isinstance(each, type)]


def with_durable_hooks(graph: Pregel[Any, Any, Any, Any], make_model: Callable[[BaseChatModel], DurableModel]) -> Pregel[Any, Any, Any, Any]:
    """A copy of `graph` in which the models that middleware calls in its hooks, which are nodes of their own, are durable.

    The middleware objects stay as they are.
    """

    def durable_unless_wrapped(model: BaseChatModel) -> BaseChatModel:
        return model if isinstance(model, DurableModel) else make_model(model)

    nodes = {}
    for name, node in graph.nodes.items():
        bound = node.bound
        owner = hook_owner(bound)
        if isinstance(bound, Pregel):
            bound = with_durable_hooks(bound, make_model)
        elif isinstance(owner, AgentMiddleware):
            fields = {field: replace_models(value, durable_unless_wrapped) for field, value in vars(owner).items()}
            if any(fields[field] is not value for field, value in vars(owner).items()):
                moved = copy.copy(owner)
                vars(moved).update(fields)
                bound = with_hook_owner(bound, moved)
        nodes[name] = node if bound is node.bound else node.copy({"bound": bound})
    return graph.copy({"nodes": nodes})
