"""Everything that depends on private or version-bound behaviour of LangGraph and LangChain, seen on LangGraph 1.2.20 to 1.2.24.

`tests/langgraph/test_seams.py` is the contract test: when an upgrade breaks it, this module is the place to change.
"""

from __future__ import annotations

import copy
from typing import Any, cast

from langchain_core.callbacks import BaseCallbackHandler, BaseRunManager, Callbacks
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base.id import UUID
from langgraph.errors import is_invalid_resume as is_invalid_resume
from langgraph.runtime import Runtime, get_runtime

STRICT_RESUME_KEY = "__pregel_strict_resume"
"""In `configurable`: a resume map with an unknown, stale or missing id raises instead of being ignored (langgraph._internal._constants)."""

RESUMING_KEY = "__pregel_resuming"
"""In `configurable`: whether a run without input goes on after a rest, which child graphs and callbacks then hear of; if not, it begins."""

RUNTIME_KEY = "__pregel_runtime"
"""In `configurable`: the runtime that the graph's own is merged with; see `Writing`."""

TASKS_CHANNEL = "__pregel_tasks"
INTERRUPT_CHANNEL = "__interrupt__"
RESUME_CHANNEL = "__resume__"
ERROR_CHANNEL = "__error__"
_READ_KEY = "__pregel_read"
_SCRATCHPAD_KEY = "__pregel_scratchpad"
PULL = "__pregel_pull"
PUSH = "__pregel_push"

TaskPath = tuple[Any, ...]
"""How LangGraph addresses a task: `(PULL, node)`, `(PUSH, index, False)` for a Send, `(PUSH, caller, index, True)` for a call of a `@task`."""


_UUID_EPOCH_S = -12_219_292_800
"""Where the time of a UUID begins (15 October 1582), in Unix time."""


def step_checkpoint_time() -> float | None:
    """When the checkpoint was made from which the running step started, in Unix time; None outside any graph.

    The ids that LangGraph gives to checkpoints are UUIDs of version 6, which carry it, whatever saver keeps them. A step that is resumed starts from
    the same checkpoint again, however much later that is.
    """
    try:
        info = get_runtime().execution_info
    except (RuntimeError, LookupError, KeyError):
        return None
    try:
        made = UUID(info.checkpoint_id) if info is not None else None
    except ValueError:
        return None
    return made.time / 1e7 + _UUID_EPOCH_S if made is not None and made.version == 6 else None


class Writing(Runtime[Any]):
    """A runtime, given to a graph in its configuration, whose stream writer the graph takes over; its child graphs do not.

    LangGraph's own way to hear what a graph writes, streaming it, costs tasks of the loop, and hangs in a synchronous graph with max_concurrency=1.
    """

    def merge(self, other: Runtime[Any]) -> Runtime[Any]:
        """The runtime of the graph's tasks, of which LangGraph makes plain ones."""
        return super().merge(other).override(stream_writer=self.stream_writer)


def current_task_path(config: RunnableConfig) -> TaskPath | None:
    """The path of the task that runs in this configuration, or None if it is not told.

    `metadata["langgraph_path"]` has it, unless a runnable in between was called with metadata of its own, or the node's metadata overwrite the key.
    Then the task's state reader has it, which LangGraph keeps in `configurable`.
    """
    path = config.get("metadata", {}).get("langgraph_path")
    reader = config["configurable"].get(_READ_KEY)
    for candidate in (path, *(getattr(argument, "path", None) for argument in getattr(reader, "args", ()))):
        if isinstance(candidate, tuple) and candidate and candidate[0] in (PULL, PUSH):
            return candidate
    return None


def parse_task_path(text: str) -> TaskPath:
    """The task path that `put_writes` was given as text, such as `~__pregel_push, 0000000001, 0000000000`.

    `put_writes` gets it only if its parameter is literally named `task_path`.
    """
    tokens = text.split(", ")
    index = 0

    def read() -> TaskPath:
        nonlocal index
        kind = tokens[index].lstrip("~")
        index += 1
        if kind == PULL:
            name = tokens[index]
            index += 1
            rest: list[Any] = []
            while index < len(tokens) and not tokens[index].startswith("~") and not tokens[index].isdigit():
                rest.append(tokens[index])
                index += 1
            return (PULL, name, *rest)
        if tokens[index].startswith("~"):
            caller = read()
            number = int(tokens[index])
            index += 2
            return (PUSH, caller, number, True)
        number = int(tokens[index])
        index += 2
        return (PUSH, number, False)

    return read()


def is_call(path: TaskPath) -> bool:
    """Whether the task is a call of a `@task`, which runs below the task that made it."""
    return path[0] == PUSH and path[-1] is True


def has_unanswered_interrupt(config: RunnableConfig) -> bool:
    """Whether the task that ends in this configuration has called an interrupt that had no answer. To be asked once, when nothing of it runs."""
    scratchpad = config.get("configurable", {}).get(_SCRATCHPAD_KEY)
    # The counter gives the number of calls so far; asking counts as well.
    return scratchpad is not None and scratchpad.interrupt_counter() > len(scratchpad.resume)


def parent_namespace(namespace: str) -> str:
    """The graph namespace in which the task with this checkpoint namespace runs."""
    return namespace.rpartition("|")[0]


def hook_owner(bound: Any) -> object | None:
    """The object whose method a node runs: the middleware, for nodes that `create_agent` makes of its hooks."""
    for method in (getattr(bound, "func", None), getattr(bound, "afunc", None)):
        # `create_agent` gives async hooks as partials of executors where only a sync one exists; the other of the pair is then the method.
        if (owner := getattr(method, "__self__", None)) is not None:
            return cast(object, owner)
    return None


def with_hook_owner(bound: Any, owner: object) -> Any:
    """The same node function, with its methods bound to `owner`."""
    moved = copy.copy(bound)
    for name in ("func", "afunc"):
        method = getattr(bound, name, None)
        if method is not None and getattr(method, "__self__", None) is not None:
            setattr(moved, name, getattr(owner, method.__name__))
    return moved


def with_handler(callbacks: Callbacks, handler: BaseCallbackHandler) -> Callbacks:
    """The caller's callbacks and one more; the caller's own object stays as it is."""
    if callbacks is None:
        return [handler]
    if isinstance(callbacks, list):
        return [*callbacks, handler]
    manager = callbacks.copy()
    manager.add_handler(handler)
    return manager


def wants_tokens(model: BaseChatModel, run_manager: BaseRunManager, options: dict[str, Any], *, async_api: bool) -> bool:
    """Whether LangChain itself would take the model's streaming form for this call: it can stream, and somebody listens to tokens."""
    return model._should_stream(async_api=async_api, run_manager=cast(Any, run_manager), **options)


def parse_tool_input(tool: BaseTool, arguments: Any, tool_call_id: str | None) -> None:
    """Validate a tool's arguments as the tool itself will, before it runs.

    Raises:
        pydantic.ValidationError: They do not fit; ToolNode turns it into a message for the model.
    """
    tool._parse_input(arguments, tool_call_id)


def is_unsaved_child(error: BaseException) -> bool:
    """Whether this is how LangGraph fails, under durability "sync", on a child graph with checkpointer=False."""
    return isinstance(error, AttributeError) and error.name == "_put_checkpoint_fut"
