"""The scratch saver: LangGraph's checkpoints of one attempt, in memory. Never what a resume depends on.

LangGraph tells a saver almost everything that positions need (see `scope`), so this one listens while it keeps. It is also the place to refuse:
what is raised in `put`, under durability "sync", comes out before the next step's nodes run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import ChannelVersions, Checkpoint, CheckpointMetadata, CheckpointTuple
from langgraph.checkpoint.memory import InMemorySaver

from mongo_durable.errors import DurableError
from mongo_durable.langgraph.control import DurableSignal, is_marker
from mongo_durable.langgraph.copies import Copies
from mongo_durable.langgraph.crossing import call_on_loop
from mongo_durable.langgraph.seams import INTERRUPT_CHANNEL, PULL, RESUME_CHANNEL, parse_task_path
from mongo_durable.protocol.identity import Position

if TYPE_CHECKING:
    from mongo_durable.langgraph.scope import Root

PLACEHOLDER = "durable_pending"
"""In `additional_kwargs` of the ToolMessage that stands in for a suspended call until the last call of its task raises for all."""


class ScratchSaver(InMemorySaver):
    """Checkpoints of one attempt, or of one isolated body inside it."""

    def __init__(self, root: Root) -> None:
        super().__init__(serde=Copies())
        self._root = root
        self._steps: dict[str, int] = {}
        self.last_root_step = -1

    def with_allowlist(self, extra_allowlist: Any) -> ScratchSaver:
        """This saver itself: LANGGRAPH_STRICT_MSGPACK would otherwise copy it, and the copy's state would diverge."""
        return self

    def step_of(self, checkpoint_id: str) -> int:
        """LangGraph's step of a checkpoint. The input checkpoint's `put` is not awaited before the first task, so an unknown one is the input's."""
        known = self._steps.get(checkpoint_id)
        if known is not None:
            return known
        return self._root.first_step_offset - 1 if self._root.first_step_offset is not None else -1

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        self._root.learn(config["configurable"].get("checkpoint_ns", ""))
        return super().get_tuple(config)

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        return self.get_tuple(config)

    def put(self, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata, new_versions: ChannelVersions) -> RunnableConfig:
        root = self._root
        namespace = config["configurable"].get("checkpoint_ns", "")
        step = metadata["step"]
        source = metadata.get("source")
        if source in ("fork", "update"):
            raise root.refuse(f"the state of a live run cannot be changed from outside (checkpoint source {source!r})")
        try:
            root.attempt.check()
        except DurableError as error:
            raise DurableSignal(error) from None
        self._steps[checkpoint["id"]] = step
        for value in checkpoint["channel_values"].values():
            if isinstance(value, list):
                last = next((message for message in reversed(value) if isinstance(message, AIMessage)), None)
                root.reserve(namespace, [last])
        if namespace == "" and root.base_step is None:
            self._note_root_step(source, step)
        return super().put(config, checkpoint, metadata, new_versions)

    def _note_root_step(self, source: str | None, step: int) -> None:
        root = self._root
        if source == "input":
            root.note_input_step(step)
        elif source == "loop":
            own = root.root_step(step)
            self.last_root_step = max(self.last_root_step, own)
            attempt = root.attempt
            try:
                # The engine's loop may be another thread's: a sync graph saves in its own.
                call_on_loop(attempt.loop, lambda: attempt.finalize_step(own))
            except DurableError as error:
                raise DurableSignal(error) from None

    async def aput(
        self, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata, new_versions: ChannelVersions
    ) -> RunnableConfig:
        return self.put(config, checkpoint, metadata, new_versions)

    # The parameter must be named task_path: LangGraph passes the path only to a parameter of this name.
    def put_writes(self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = "") -> None:
        for channel, value in writes:
            if channel == INTERRUPT_CHANNEL:
                self._place_interrupts(config, writes, value, task_path)
            elif isinstance(value, list) and any(_is_placeholder(each) for each in value):
                # Remembered here, raised in the next put: the siblings' outcomes are recorded, and no later node runs.
                self._root.refuse(
                    "several tools of one ToolNode task interrupted, and not every call of the response reached its wrapper: "
                    "use app.tool_node(tools), or create_agent",
                )
        super().put_writes(config, writes, task_id, task_path)

    async def aput_writes(self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = "") -> None:
        self.put_writes(config, writes, task_id, task_path)

    def _place_interrupts(self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], interrupts: Sequence[Any], task_path: str) -> None:
        root = self._root
        configurable = config["configurable"]
        namespace = configurable.get("checkpoint_ns", "")
        for interrupt in interrupts:
            # Ancestors write the interrupts of their children again; the innermost task writes first.
            if interrupt.id in root.native or is_marker(interrupt.id):
                continue
            answered = sum(len(value) for channel, value in writes if channel == RESUME_CHANNEL)
            path = parse_task_path(task_path)
            at = root.task_path(namespace, self.step_of(configurable["checkpoint_id"]) + 1, path)
            if at is None:
                raise root.refuse(f"an interrupt came from a graph that is not part of this run ({namespace!r})")
            root.placed.add(interrupt.id)
            root.native[interrupt.id] = Position(*at, f"!{answered + 1}")
            root.native_names[interrupt.id] = root.owner or (str(path[1]) if path[0] == PULL else "interrupt")
            for each in root.concurrent_children:
                if namespace == each or namespace.startswith(each + "|"):
                    root.refuse("child graphs called concurrently in one body, with an interrupt inside: use app.gather or Send")


def _is_placeholder(value: Any) -> bool:
    return isinstance(value, ToolMessage) and PLACEHOLDER in value.additional_kwargs
