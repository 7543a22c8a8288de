"""Durable functions: any other effect of a node."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from mongo_durable.errors import ConfigurationError
from mongo_durable.langgraph.codec import Codec
from mongo_durable.langgraph.crossing import runs
from mongo_durable.langgraph.effects import Effect, Policy, checked_in_thread, run_effect, run_effect_async, start_effect
from mongo_durable.langgraph.scope import current_session, here
from mongo_durable.protocol.events import ActivityKind

SESSION = "session"
"""The keyword under which a transactional function gets the driver's session."""

Transaction = Callable[[Callable[[Any], Awaitable[Any]]], Awaitable[Any]]


def durable_function(target: Callable[..., Any], name: str, policy: Policy, codec: Codec, plain_transaction: Transaction) -> Callable[..., Any]:
    """Wrap a function so that each call is recorded once and never executed again.

    Args:
        plain_transaction: Runs a body in a transaction outside any durable run; for transactional functions.

    Raises:
        ConfigurationError: A transactional function is not async, or takes no session.
    """
    signature = inspect.signature(target)
    is_async = inspect.iscoroutinefunction(target)
    if policy.is_transactional and not (is_async and SESSION in signature.parameters):
        raise ConfigurationError(f"the transactional activity {name!r} has to be an async function with a keyword parameter `{SESSION}`")

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Effect | None:
        session = current_session()
        if session is None:
            return None
        bind = signature.bind_partial if policy.is_transactional else signature.bind
        plain = codec.encode(dict(bind(*args, **kwargs).arguments))
        return start_effect(session, codec, here(), ActivityKind.ACTIVITY, name, plain, policy, shown_input=plain)

    def call_async(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Coroutine[Any, Any, Any]:
        # The position is taken when the function is called, not when its coroutine first runs.
        effect = begin(args, kwargs)

        async def body(_: object, session: Any = None) -> Any:
            if policy.is_transactional:
                return await target(*args, **kwargs, session=session)
            if is_async:
                return await target(*args, **kwargs)
            return await asyncio.to_thread(target if effect is None else checked_in_thread(effect, target), *args, **kwargs)

        async def run() -> Any:
            if effect is not None:
                return await run_effect_async(effect, body)
            return await (plain_transaction(lambda session: body(None, session)) if policy.is_transactional else body(None))

        return run()

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        session = current_session()
        if is_async or (session is not None and runs(session.attempt.loop)):
            return call_async(args, kwargs)
        effect = begin(args, kwargs)
        return target(*args, **kwargs) if effect is None else run_effect(effect, lambda _: target(*args, **kwargs))

    return call
