"""Where am I: the position of an effect, known at the moment when it starts, from the structure of the graph alone (I11).

Four sources together give it, for every shape of graph:

- `get_runtime().execution_info` of the innermost task. One ExecutionInfo *object* is one execution of the task's body: LangGraph makes a new one for
  every re-execution (a resume, a retry), so its identity tells when the body's effects are counted from 1 again.
- The scratch saver's `get_tuple`, which every graph loop awaits before anything of it runs, in the context of the task that called the child
graph: it
  tells under which task, and as its how-manieth child graph, a namespace stands.
- The step that the scratch saver was given in `put` for a checkpoint id. (`metadata["langgraph_step"]` says the same, but a node's own metadata can
  overwrite it.)
- The task's path: the node, or the index of a Send among its producer's.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langgraph.callbacks import GraphCallbackHandler, GraphInterruptEvent
from langgraph.config import get_config
from langgraph.runtime import ExecutionInfo, get_runtime

from mongo_durable.engine.attempt import Attempt, Pending
from mongo_durable.errors import UnsupportedGraph
from mongo_durable.langgraph.control import DurableSignal, is_marker
from mongo_durable.langgraph.redaction import Redact
from mongo_durable.langgraph.seams import PULL, TaskPath, current_task_path, is_call, parent_namespace
from mongo_durable.protocol.events import ActivityKind
from mongo_durable.protocol.identity import ROOT_PATH, Position, segment

if TYPE_CHECKING:
    from mongo_durable.langgraph.scratch import ScratchSaver

_FIRST_INPUT_STEP = -1
"""LangGraph's step of the first input checkpoint on a fresh thread; the first nodes run two steps later, as step 1."""

ROOT_MARK_KEY = "durable_root"
"""In `configurable`: an explicit thread_id or checkpoint coordinate drops it, which is how a child graph with its own thread is found out."""


@dataclass(frozen=True, slots=True)
class ToolSlot:
    """The place of one tool call in its model response."""

    index: int
    batch: tuple[tuple[str | None, str], ...]
    """(tool call id, tool name) of every call of the response, in its order."""


class Scope:
    """One execution of one body: a task's, or an effect's inside it. It numbers the effects that the body starts."""

    def __init__(self, root: Root, namespace: str, info: ExecutionInfo, path: tuple[str, ...], step: int, *, is_task_body: bool = False) -> None:
        self.root = root
        self.namespace = namespace
        self.info = info  # Invariant: kept referenced, because identity is what tells executions apart.
        self.path = path
        self.step = step
        self.is_task_body = is_task_body
        self.lock = threading.Lock()
        self.arrived = 0
        self.stopped: BaseException | None = None
        self._started = 0
        self._children = 0
        self._branches = 0
        self._tool_calls: defaultdict[str, int] = defaultdict(int)
        self._drawn: defaultdict[str, int] = defaultdict(int)
        self._used: set[str] = set()
        self._running: set[str] = set()
        self._callers: dict[str, object] = {}

    def allocate(self, kind: ActivityKind, name: str, digest: str, tool_call_id: str | None) -> tuple[Position, bool]:
        """The position of the effect that this body starts now, and whether it overlaps another one of this body.

        Called in the order in which the body calls its effects, not in the order in which their coroutines first run.
        """
        attempt = self.root.attempt
        with self.lock:
            is_overlapped = bool(self._running)
            slot = self.root.tool_slot(self.namespace, tool_call_id) if tool_call_id is not None else None
            if slot is not None and tool_call_id is not None:
                self._tool_calls[tool_call_id] += 1
                repeat = self._tool_calls[tool_call_id]
                ordinal = f"t{slot.index + 1}" + (f".{repeat}" if repeat > 1 else "")
                is_overlapped = False  # its place is known, whoever starts first
            else:
                self._started += 1
                ordinal = attempt.choose_ordinal(self.path, self.step, self._started, self._used, is_overlapped, kind, name, digest)
            self._used.add(ordinal)
            self._running.add(ordinal)
            return Position(self.path, self.step, ordinal), is_overlapped

    def finished(self, position: Position) -> None:
        """The effect at `position` no longer runs."""
        with self.lock:
            self._running.discard(position.ordinal)

    @property
    def children(self) -> int:
        """How many child graphs this body has called so far."""
        return self._children

    def branch(self) -> int:
        """The number of the next `gather` of this body."""
        with self.lock:
            self._branches += 1
            return self._branches

    def draw(self, kind: str) -> int:
        """The how-manieth value of this kind the body draws now; see `draws`."""
        with self.lock:
            self._drawn[kind] += 1
            return self._drawn[kind]

    def child(self, namespace: str) -> tuple[str, ...]:
        """The path of a child graph that this body calls now."""
        with self.lock:
            self._children += 1
            number = self._children
            caller = _caller()
            if any(_may_overlap(other, caller) for other in self._callers.values()):
                # Numbered by arrival: harmless without interrupts, but a native resume may continue the wrong one.
                for each in (*self._callers, namespace):
                    self.root.concurrent_children.add(each)
            self._callers[namespace] = caller
        return (*self.path, f"c{number}")

    def inside(self, position: Position) -> Scope:
        """The scope of the body of this scope's effect at `position`."""
        return Scope(self.root, self.namespace, self.info, position.body_path, self.step)


def _caller() -> object:
    try:
        return asyncio.current_task() or threading.current_thread()
    except RuntimeError:
        return threading.current_thread()


def _may_overlap(other: object, caller: object) -> bool:
    if other is caller:
        return False
    return not (isinstance(other, asyncio.Task) and other.done())


class Root:
    """A tree of LangGraph namespaces under one scratch saver: the run itself, or one isolated body.

    Attributes:
        base_path, base_step: Where the tree hangs. An isolated body's steps are segments; the run's root steps are the positions' step.
        native: Position of each native interrupt, by its id.
        asked: Name of the question at each of these positions.
        placed: Ids of the native interrupts of all trees of the attempt.
        owner: Name of the tool whose isolated body this is, or None.
    """

    def __init__(
        self,
        attempt: Attempt,
        base_path: tuple[str, ...] = ROOT_PATH,
        base_step: int | None = None,
        owner: str | None = None,
        placed: set[str] | None = None,
    ) -> None:
        from mongo_durable.langgraph.scratch import ScratchSaver

        self.attempt = attempt
        self.base_step = base_step
        self.owner = owner
        self.mark = f"{id(self):x}"
        self.saver: ScratchSaver = ScratchSaver(self)
        self.placed = placed if placed is not None else set()
        self.native: dict[str, Position] = {}
        self.asked: dict[Position, str] = {}
        self.concurrent_children: set[str] = set()
        self.first_step_offset: int | None = None
        self._paths: dict[str, tuple[tuple[str, ...], int | None]] = {"": (base_path, base_step)}
        self._executions: dict[str, Scope] = {}
        self._earlier: defaultdict[str, list[ExecutionInfo]] = defaultdict(list)
        self._slots: dict[tuple[str, str | None], ToolSlot] = {}
        self._lock = threading.RLock()

    def refuse(self, why: str, node: str | None = None) -> DurableSignal:
        """Refuse the graph, for good: a body that swallows the signal changes nothing."""
        return DurableSignal(self.attempt.remember(UnsupportedGraph(why, run_id=self.attempt.run_id, node=node)))

    def root_step(self, native_step: int) -> int:
        """The run's own count of a root step: a thread's later runs go on with LangGraph's numbers, positions start at 1 again."""
        offset = self.first_step_offset
        return native_step if offset is None else native_step - offset

    def note_input_step(self, native_step: int) -> None:
        """The input checkpoint of this run has this LangGraph step."""
        self.first_step_offset = native_step - _FIRST_INPUT_STEP

    def task_path(self, namespace: str, native_step: int, path: TaskPath) -> tuple[tuple[str, ...], int] | None:
        """Path and root step of the task at `path` of the graph with this namespace, or None if the graph is not known."""
        known = self._paths.get(namespace)
        if known is None:
            return None
        above, step = known
        if step is None:
            return (*above, label(path)), self.root_step(native_step)
        return (*above, f"{label(path)}:{native_step}"), step

    def enter(self, info: ExecutionInfo, config: RunnableConfig) -> Scope:
        """The scope of the running task body: a new one when LangGraph started the body anew."""
        namespace = info.checkpoint_ns
        with self._lock:
            known = self._executions.get(namespace)
            if known is not None and known.info is info:
                return known
            if any(earlier is info for earlier in self._earlier[namespace]):
                raise self.refuse("a body went on after LangGraph had started it again")
            if info.node_attempt > 1:
                # A node's policy is refused before the run starts; that of a @task shows only here.
                raise self.refuse(
                    "a task has a retry policy: a recorded failure would replay in every try; use retry= of app.tool, app.llm or app.activity",
                    config.get("metadata", {}).get("langgraph_node"),
                )
            path = current_task_path(config)
            if path is None:
                raise self.refuse("LangGraph does not say which task this is: an effect was started outside any node")
            graph, called = parent_namespace(namespace), path
            while is_call(called):
                graph, called = parent_namespace(graph), called[1]
            step = self.saver.step_of(info.checkpoint_id) + 1
            at = self.task_path(graph, step, path)
            if at is None:
                raise self.refuse(
                    "a child graph runs without the run's scratch (compiled with checkpointer=False?): compile it without a checkpointer",
                    config.get("metadata", {}).get("langgraph_node"),
                )
            if known is not None:
                self._earlier[namespace].append(known.info)
            scope = self._executions[namespace] = Scope(self, namespace, info, *at, is_task_body=True)
            return scope

    def path_of(self, info: ExecutionInfo) -> tuple[str, ...]:
        """The path of the body that this execution is, and the number of its newest child graph."""
        scope = self._executions.get(info.checkpoint_ns)
        return (*scope.path, str(scope.step), str(scope.children)) if scope is not None else ()

    def learn(self, namespace: str) -> None:
        """A graph loop starts to run under `namespace`, called by the task whose context this is."""
        if not namespace:
            return
        try:
            info = get_runtime().execution_info
        except (RuntimeError, LookupError, KeyError):
            return  # somebody looks from outside
        if info is None:
            return
        above = info.checkpoint_ns
        is_below = namespace == above or (namespace.startswith(above + "|") and namespace[len(above) + 1 :].isdigit())
        if not is_below:
            last = namespace.rpartition("|")[2]
            if ":" not in last and not last.isdigit():
                raise self.refuse(f"child graph {last!r} has a checkpointer of its own (checkpointer=True): compile it without one", last)
            return
        path = here().child(namespace)
        with self._lock:
            self._paths[namespace] = (path, here().step)

    def reserve(self, namespace: str, messages: Iterable[Any]) -> None:
        """The tool calls of these model responses get their places in the response's order, before any of them runs."""
        for message in messages:
            if isinstance(message, AIMessage) and message.tool_calls:
                batch = tuple((call["id"], call["name"]) for call in message.tool_calls)
                for index, call in enumerate(message.tool_calls):
                    self._slots[(namespace, call["id"])] = ToolSlot(index, batch)

    def tool_slot(self, task_namespace: str, tool_call_id: str | None) -> ToolSlot | None:
        """The reserved place of a tool call, if its response was seen in the graph of this task."""
        return self._slots.get((parent_namespace(task_namespace), tool_call_id))


def label(path: TaskPath) -> str:
    """The stable name of a task inside its graph and step."""
    if path[0] == PULL:
        return ".".join(segment(str(part)) for part in path[1:])
    if is_call(path):
        return f"{label(path[1])}~{path[2]}"
    return f"[{path[1]}]"


class InterruptWatch(GraphCallbackHandler):
    """Sees every interrupt that ends a graph called in this run, also of graphs that do not use its scratch.

    Attributes:
        seen: Ids of the interrupts.
        has_stopped: Whether any graph of this pass has stopped before its end.
    """

    # LangChain would make a task of the loop of every event, for a handler that ignores almost all of them.
    run_inline = True

    ignore_llm = ignore_chain = ignore_agent = ignore_retriever = ignore_chat_model = ignore_custom_event = ignore_retry = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.has_stopped = False

    def on_interrupt(self, event: GraphInterruptEvent) -> None:
        """A graph has stopped: on interrupts, or before or after a node, where it was told to."""
        self.has_stopped = True
        self.seen.update(each.id for each in event.interrupts)


class Session:
    """What all bodies of one attempt share: who is running, which activities pend at rest, and which timers have still to fire."""

    def __init__(self, attempt: Attempt, redact: Redact | None = None) -> None:
        self.attempt = attempt
        self.redact = redact
        self.root = Root(attempt)
        self.watch = InterruptWatch()
        self.pending: dict[Position, Pending] = {}
        self.timers: dict[Position, datetime] = {}
        self._running = 0
        self._changed = threading.Condition()
        self._settled: asyncio.Event | None = None
        """Of those on the loop that wait until no wrapper runs; None if nobody does."""

    def lost_interrupts(self) -> set[str]:
        """Interrupts raised in no graph of this run: in a child that was called with a thread of its own, where no answer can reach them."""
        return {each for each in self.watch.seen if not is_marker(each)} - self.root.placed

    def begin(self) -> None:
        """A wrapper has entered."""
        with self._changed:
            self._running += 1

    def end(self) -> None:
        """A wrapper has left."""
        with self._changed:
            self._running -= 1
            if self._running:
                return
            self._changed.notify_all()
            settled, self._settled = self._settled, None
        if settled is not None:
            self.attempt.loop.call_soon_threadsafe(settled.set)

    def settle(self) -> None:
        """Wait, in a graph thread, until no wrapper runs."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0)

    async def settle_async(self) -> None:
        """Wait, on the loop, until no wrapper runs."""
        while True:
            with self._changed:
                if not self._running:
                    return
                settled = self._settled = self._settled or asyncio.Event()
            await settled.wait()


_session: contextvars.ContextVar[Session | None] = contextvars.ContextVar("mongo_durable_session", default=None)
_root: contextvars.ContextVar[Root] = contextvars.ContextVar("mongo_durable_root")
_body: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("mongo_durable_body", default=None)


def enter_session(session: Session) -> None:
    """Make `session` the one of the current context."""
    _session.set(session)
    _root.set(session.root)
    _body.set(None)


def enter_root(root: Root) -> None:
    """Make an isolated body's tree the current one."""
    _root.set(root)
    _body.set(None)


@contextmanager
def outside_any_session() -> Iterator[None]:
    """What runs here is part of an effect that is recorded whole: durable models and functions behave like plain ones."""
    token = _session.set(None)
    try:
        yield
    finally:
        _session.reset(token)


def inside_body(scope: Scope) -> Callable[[], None]:
    """Effects started from here count in `scope`, until the returned function is called."""
    token = _body.set(scope)
    return lambda: _body.reset(token)


def current_session() -> Session | None:
    """The running attempt's session, or None outside any attempt: then wrapped models and tools behave like plain ones."""
    return _session.get()


def current_root() -> Root:
    """The tree in which this context runs, inside an attempt."""
    return _root.get()


def current_place() -> str | None:
    """A stable text for the graph loop that runs in this context, or None outside any attempt. It refuses nothing."""
    session = _session.get()
    if session is None:
        return None
    root = _root.get()
    try:
        info = get_runtime().execution_info
    except (RuntimeError, LookupError, KeyError):
        info = None
    path = root.path_of(info) if info is not None else ()
    return "/".join((session.attempt.run_id, *path))


def here() -> Scope:
    """The scope of the body that runs now.

    Raises:
        DurableSignal: The graph has a shape in which this cannot be known.
    """
    root = _root.get()
    config = get_config()
    if config["configurable"].get(ROOT_MARK_KEY) != root.mark:
        raise root.refuse(
            "a child graph was called with its own thread_id or checkpoint coordinates: call it without them, its effects belong to this run"
        )
    info = get_runtime().execution_info
    if info is None:
        raise root.refuse("LangGraph gave no execution info: mongo_durable needs langgraph 1.2.20 or newer")
    body = _body.get()
    if body is not None and body.info is info:
        return body
    return root.enter(info, config)
