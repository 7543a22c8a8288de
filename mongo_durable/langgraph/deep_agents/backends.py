"""Durable backends: what a deep agent does to a file system, a shell, a store or a sandbox is recorded once, and never done again.

A durable backend is a copy of the caller's whose class derives from the caller's class, because deepagents asks what a backend is. Each operation is
one activity; what it does inside stays its own. Files in the agent's state (`StateBackend`) are part of the state: they are rebuilt, not recorded.

When a process dies inside an operation, one that may be done again is (reading, and writing or uploading a whole file); for an edit, a deletion or a
command a person is asked whether it happened.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

from deepagents.backends import protocol
from deepagents.backends.composite import CompositeBackend
from deepagents.backends.protocol import BackendProtocol, ExecuteResponse
from deepagents.backends.state import StateBackend

from mongo_durable.langgraph.codec import Codec
from mongo_durable.langgraph.effects import Effect, Policy, run_effect, run_effect_async, start_effect
from mongo_durable.langgraph.scope import current_session, here
from mongo_durable.protocol.events import ActivityKind

READS = ("ls", "read", "grep", "glob", "download_files")
REPEATABLE = ("write", "upload_files")
ONCE = ("edit", "delete", "execute", "execute_with_offload")

_READ = Policy(on_unknown_outcome="rerun", is_start_awaited=False)
_REPEAT = Policy(on_unknown_outcome="rerun")
_ASK = Policy(on_unknown_outcome="suspend")
_POLICIES = {**dict.fromkeys(READS, _READ), **dict.fromkeys(REPEATABLE, _REPEAT), **dict.fromkeys(ONCE, _ASK)}

_RESULTS = [each for each in vars(protocol).values() if isinstance(each, type) and dataclasses.is_dataclass(each)]
"""The types of results: they may be stored."""

_INNER = "_durable_inner"
_CODEC = "_durable_codec"


def durable_backend(backend: BackendProtocol, codec: Codec) -> BackendProtocol:
    """A durable copy of `backend`; itself if there is nothing to record. The caller's own stays as it is."""
    if isinstance(backend, StateBackend) or is_durable(backend):
        return backend
    made: Any = copy.copy(backend)
    if isinstance(backend, CompositeBackend):
        made.default = durable_backend(backend.default, codec)
        made.routes = {prefix: durable_backend(each, codec) for prefix, each in backend.routes.items()}
        made.sorted_routes = sorted(made.routes.items(), key=lambda route: len(route[0]), reverse=True)
        return cast(BackendProtocol, made)
    vars(made).update({_INNER: backend, _CODEC: Codec([*codec.types.values(), *_RESULTS])})
    made.__class__ = _durable_class(type(backend))
    return cast(BackendProtocol, made)


def is_durable(backend: BackendProtocol) -> bool:
    """Whether what the backend does is recorded, or is part of the state."""
    if isinstance(backend, CompositeBackend):
        return is_durable(backend.default) and all(is_durable(each) for each in backend.routes.values())
    return isinstance(backend, StateBackend) or _INNER in vars(backend)


@functools.cache
def _durable_class(kind: type[BackendProtocol]) -> type[BackendProtocol]:
    methods: dict[str, Any] = {}
    for operation, policy in _POLICIES.items():
        for name, make in ((operation, _sync_method), (f"a{operation}", _async_method)):
            real = getattr(kind, name, None)
            # deepagents takes a backend whose method is the protocol's own for one that cannot do it.
            if real is not None and not (operation == "delete" and kind.delete is BackendProtocol.delete):
                methods[name] = functools.wraps(real)(make(operation, name, real, policy))
    return type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _sync_method(operation: str, name: str, real: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        effect = _effect(self, operation, real, policy, args, kwargs)
        inner = getattr(vars(self)[_INNER], name)
        return inner(*args, **kwargs) if effect is None else run_effect(effect, lambda _: inner(*args, **kwargs))

    return method


def _async_method(operation: str, name: str, real: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    async def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        effect = _effect(self, operation, real, policy, args, kwargs)
        inner = getattr(vars(self)[_INNER], name)
        return await inner(*args, **kwargs) if effect is None else await run_effect_async(effect, lambda _: inner(*args, **kwargs))

    return method


def _effect(self: Any, operation: str, real: Callable[..., Any], policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Effect | None:
    session = current_session()
    if session is None:
        return None
    codec: Codec = vars(self)[_CODEC]
    arguments = dict(inspect.signature(real).bind(self, *args, **kwargs).arguments)
    arguments.pop("self", None)
    plain = codec.encode(arguments)
    name = f"{type(self).__name__}.{operation}"
    return start_effect(session, codec, here(), ActivityKind.ACTIVITY, name, plain, policy, shown_input=plain, happened=_from_person(operation))


def _from_person(operation: str) -> Callable[[Any], Any]:
    """What an operation gave, from what a person says that it gave: the fields of its result, or of a command its output."""
    kinds = {"edit": protocol.EditResult, "delete": protocol.DeleteResult, "execute": ExecuteResponse, "execute_with_offload": ExecuteResponse}

    def result(said: Any) -> Any:
        fields = said if isinstance(said, dict) else {"output": str(said), "exit_code": 0} if operation.startswith("execute") else {}
        made = kinds[operation](**fields)
        return protocol.ExecuteOffloadResult(offloaded=False, response=made) if operation == "execute_with_offload" else made

    return result
