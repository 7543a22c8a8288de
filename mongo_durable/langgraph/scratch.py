"""The scratch saver: LangGraph's checkpoints of one attempt, in memory. Never what a resume depends on.

LangGraph tells a saver almost everything that positions need (see `scope`), so this one listens while it keeps. It is also the place to refuse:
what is raised in `put`, under durability "sync", comes out before the next step's nodes run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import ChannelVersions, Checkpoint, CheckpointMetadata, CheckpointTuple, empty_checkpoint
from langgraph.checkpoint.memory import InMemorySaver

from mongo_durable.errors import DurableError
from mongo_durable.langgraph.committed import root_config
from mongo_durable.langgraph.control import DurableSignal, is_marker
from mongo_durable.langgraph.copies import Copies
from mongo_durable.langgraph.crossing import call_on_loop
from mongo_durable.langgraph.questions import Asked, note_unusable
from mongo_durable.langgraph.seams import ERROR_CHANNEL, INTERRUPT_CHANNEL, PULL, RESUME_CHANNEL, is_invalid_resume, parse_task_path
from mongo_durable.protocol.identity import Position, activity_id

if TYPE_CHECKING:
    from mongo_durable.langgraph.scope import Root

PLACEHOLDER = "durable_pending"
"""In `additional_kwargs` of the ToolMessage that stands in for a suspended call until the last call of its task raises for all."""

_UNHEARD = (
    "the answer to {} did not reach the code that asked: its body went on without it "
    "(an `except` around the question, or a tool with handle_validation_error?)"
)


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

    def begin(self, thread_id: str, triggers: Iterable[str]) -> None:
        """Let the graph of an isolated body begin behind step 0, as if it had taken its input there and written to these channels."""
        checkpoint: Checkpoint = {
            **empty_checkpoint(),
            "channel_values": dict.fromkeys(triggers),
            "channel_versions": dict.fromkeys(triggers, self.get_next_version(None, None)),
        }
        self._steps[checkpoint["id"]] = 0
        # The plain saver's put: nothing has run yet that could be refused.
        super().put(root_config(thread_id), checkpoint, {"source": "loop", "step": 0, "parents": {}}, checkpoint["channel_versions"])

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
            elif channel == ERROR_CHANNEL and isinstance(value, BaseException) and is_invalid_resume(value):
                self._place_refusal(config, writes, value, task_path)
            elif isinstance(value, list) and any(_is_placeholder(each) for each in value):
                # Remembered here, raised in the next put: the siblings' outcomes are recorded, and no later node runs.
                self._root.refuse(
                    "several tools of one ToolNode task interrupted, and not every call of the response reached its wrapper: "
                    "use app.tool_node(tools), or create_agent",
                )
        if task_path and {channel for channel, _ in writes}.isdisjoint({INTERRUPT_CHANNEL, ERROR_CHANNEL}):
            self._check_heard(config, writes, task_path)
        super().put_writes(config, writes, task_id, task_path)

    async def aput_writes(self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = "") -> None:
        self.put_writes(config, writes, task_id, task_path)

    def _place_interrupts(self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], interrupts: Sequence[Any], task_path: str) -> None:
        root = self._root
        namespace = config["configurable"].get("checkpoint_ns", "")
        for interrupt in interrupts:
            # Ancestors write the interrupts of their children again; the innermost task writes first.
            if interrupt.id in root.native or is_marker(interrupt.id):
                continue
            position = self._position(config, writes, task_path)
            if position is None:
                raise root.refuse(f"an interrupt came from a graph that is not part of this run ({namespace!r})")
            if position in root.asked:
                raise root.refuse(_UNHEARD.format(activity_id(root.attempt.run_id, position)))
            root.placed.add(interrupt.id)
            root.native[interrupt.id] = position
            path = parse_task_path(task_path)
            owner = root.owner or (str(path[1]) if path[0] == PULL else "interrupt")
            root.asked[position] = interrupt.value.name if isinstance(interrupt.value, Asked) else owner
            for each in root.concurrent_children:
                if namespace == each or namespace.startswith(each + "|"):
                    root.refuse("child graphs called concurrently in one body, with an interrupt inside: use app.gather or Send")

    def _check_heard(self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_path: str) -> None:
        """A task that has ended has heard the answer to every question that it asked: one that it refuses it may not leave unheard."""
        root = self._root
        following = self._position(config, writes, task_path) if root.asked else None
        if following is not None and following in root.asked:
            root.refuse(_UNHEARD.format(activity_id(root.attempt.run_id, following)))

    def _position(self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_path: str) -> Position | None:
        """Where the task with these writes asks: behind what it has heard answers to. None if its graph is not known."""
        configurable = config["configurable"]
        answered = max((len(value) for channel, value in writes if channel == RESUME_CHANNEL), default=0)
        step = self.step_of(configurable["checkpoint_id"]) + 1
        at = self._root.task_path(configurable.get("checkpoint_ns", ""), step, parse_task_path(task_path))
        return Position(*at, f"!{answered + 1}") if at is not None else None

    def _place_refusal(self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], error: BaseException, task_path: str) -> None:
        """A task has refused the answer to the question behind those that it has heard answers to."""
        root = self._root
        position = self._position(config, writes, task_path)
        if position is not None and position in root.asked:
            note_unusable(error, root.attempt.run_id, position, root.asked[position])


def _is_placeholder(value: Any) -> bool:
    return isinstance(value, ToolMessage) and PLACEHOLDER in value.additional_kwargs
