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

    arguments_of = _by_name(signature, is_partial=policy.is_transactional)

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Effect | None:
        session = current_session()
        if session is None:
            return None
        plain = codec.encode(arguments_of(args, kwargs))
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


def _by_name(signature: inspect.Signature, *, is_partial: bool) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """What gives the arguments of a call by name, without defaults.

    Args:
        is_partial: The wrapper adds one to those of the caller.
    """
    bind = signature.bind_partial if is_partial else signature.bind
    parameters = signature.parameters.values()
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    required = sum(each.default is each.empty for each in parameters)
    is_simple = len(names) == len(signature.parameters) and not is_partial

    def by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if is_simple and not kwargs and required <= len(args) <= len(names):
            return dict(zip(names, args, strict=False))  # what most calls are, at a fraction of what binding takes
        return dict(bind(*args, **kwargs).arguments)

    return by_name
