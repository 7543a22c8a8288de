"""`app.tool_node`: a ToolNode whose calls interrupt and resume each on its own. `app.gather`: branches of a body, likewise."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.runnables.config import get_executor_for_config
from langchain_core.tools import BaseTool
from langgraph.errors import GraphBubbleUp, GraphInterrupt
from langgraph.prebuilt import ToolNode
from langgraph.types import Interrupt

from mongo_durable.errors import ConfigurationError
from mongo_durable.langgraph.codec import Codec
from mongo_durable.langgraph.isolation import isolated_async
from mongo_durable.langgraph.scope import Scope, current_session, here, inside_body
from mongo_durable.langgraph.tools import one_call_at_a_time


def tool_node(tools: Sequence[BaseTool | Callable[..., Any]], *, messages_key: str = "messages", **options: Any) -> RunnableLambda[Any, Any]:
    """A node that runs the tool calls of the last model response in one task, each call by itself.

    All calls run to their end or to their interrupts; then the interrupts go up together, as one frontier.

    Args:
        options: As for LangGraph's ToolNode.
    """
    node = ToolNode(tools, messages_key=messages_key, **options)

    def calls(state: Any) -> list[dict[str, Any]]:
        messages = state if isinstance(state, list) else state[messages_key] if isinstance(state, dict) else getattr(state, messages_key)
        last = next((message for message in reversed(messages) if isinstance(message, AIMessage)), None)
        if last is None:
            raise ConfigurationError("the tool node found no model response among the messages")
        return [{"__type": "tool_call_with_context", "tool_call": call, "state": state} for call in last.tool_calls]

    def run(state: Any, config: RunnableConfig) -> Any:
        def one(call: dict[str, Any]) -> Any:
            one_call_at_a_time.set(True)
            try:
                return node.invoke(call, config)
            except Exception as error:  # noqa: BLE001 - raised again by _combine, after every call has come to its end
                return error

        with get_executor_for_config(config) as executor:
            return _combine(list(executor.map(one, calls(state))), messages_key)

    async def run_async(state: Any, config: RunnableConfig) -> Any:
        async def one(call: dict[str, Any]) -> Any:
            one_call_at_a_time.set(True)
            return await node.ainvoke(call, config)

        return _combine(await asyncio.gather(*(one(call) for call in calls(state)), return_exceptions=True), messages_key)

    return RunnableLambda(run, run_async, name="tools")


def _combine(results: Sequence[Any], messages_key: str) -> Any:
    flat = [each for result in _raise_all(results) for each in (result if isinstance(result, list) else [result])]
    if all(isinstance(each, dict) for each in flat):
        return {messages_key: [message for each in flat for message in each[messages_key]]}
    return flat


def _raise_all(results: Sequence[Any]) -> list[Any]:
    """The results, or the one exception that stands for all: interrupts together, else the first failure.

    Interrupts come first, because a body that handles a sibling's failure would drop a question that has been asked. A failure shows when they are
    answered.
    """
    interrupts: list[Interrupt] = [each for result in results if isinstance(result, GraphInterrupt) for each in result.args[0]]
    others = [result for result in results if isinstance(result, BaseException) and not isinstance(result, GraphInterrupt)]
    if signals := [each for each in others if isinstance(each, GraphBubbleUp)]:
        raise signals[0]
    if interrupts:
        raise GraphInterrupt(tuple(interrupts))
    if others:
        raise others[0]
    return list(results)


async def gather(codec: Codec, functions: Sequence[Callable[[], Awaitable[Any]]]) -> list[Any]:
    """Run `functions` at once, each as a branch with its own numbered effects and interrupts.

    Concurrent effects and interrupts of one body start in random order; here each branch counts its own, so positions do not depend on it.

    Returns:
        Their results, in the order of `functions`.

    Raises:
        GraphInterrupt: Some pend; all have come to their end or their interrupt.
        Exception: What the first failing branch raised, when no branch pends any more.
    """
    session = current_session()
    if session is None:
        return list(await asyncio.gather(*(function() for function in functions)))
    scope = here()
    number = scope.branch()

    async def branch(index: int, function: Callable[[], Awaitable[Any]]) -> Any:
        inner = Scope(scope.root, scope.namespace, scope.info, (*scope.path, f"g{number}.{index}"), scope.step)
        session.begin()
        leave = inside_body(inner)
        try:
            return await isolated_async(session, codec, inner, None, function)
        finally:
            leave()
            session.end()

    results = await asyncio.gather(*(branch(index, each) for index, each in enumerate(functions, start=1)), return_exceptions=True)
    return _raise_all(results)
