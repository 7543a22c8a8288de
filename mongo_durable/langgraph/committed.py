"""The committed state of a thread: what its next run starts from.

It is the graph's last checkpoint, in LangGraph's own serialisation with an allowlist: only LangChain's types, plain ones, and those that the
application registered are read back. A state that holds another type is refused when it is committed, not when the next turn finds out. Channels
whose values the app's codec can hold go through it, because it gives tuples and large integers back exactly, which LangGraph's serialisation does
not.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.event_hooks import SerdeEvent, register_serde_event_listener
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from mongo_durable.errors import NotJsonSafe
from mongo_durable.langgraph.codec import Codec
from mongo_durable.langgraph.copies import AsKept
from mongo_durable.store.runs import ThreadState


def root_config(thread_id: str) -> RunnableConfig:
    """The address of a thread's root checkpoints."""
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}


def committed_state(saver: InMemorySaver, thread_id: str, codec: Codec) -> ThreadState | None:
    """What `saver` holds of the thread, to be committed; None if the graph saved nothing.

    Raises:
        NotJsonSafe: The state holds a type that would not be read back.
    """
    saved = _uncopied(saver).get_tuple(root_config(thread_id))
    if saved is None:
        return None
    serde = _serde(codec)
    values = {name: _kept(value, codec) for name, value in saved.checkpoint["channel_values"].items()}
    checkpoint = {**saved.checkpoint, "channel_values": values}
    try:
        serde_type, data = serde.dumps_typed({"checkpoint": checkpoint, "metadata": saved.metadata})
    except (TypeError, ValueError, OverflowError) as error:
        raise NotJsonSafe(
            f"the thread's state cannot be serialised ({error}): keep plain values in the state, or types given to App(types=[…])",
            path="$",
            type=type(error).__name__,
        ) from error
    if blocked := _blocked_types(serde, serde_type, data):
        raise NotJsonSafe(
            f"the thread's state holds a {blocked[0]}, which is not read back: register it with App(types=[…]), or keep plain values in the state",
            path="$",
            type=blocked[0],
        )
    return ThreadState(serde_type=serde_type, data=data)


def seed(saver: InMemorySaver, thread_id: str, state: ThreadState, codec: Codec) -> None:
    """Put a committed state into a fresh saver."""
    stored: Mapping[str, Any] = _serde(codec).loads_typed((state.serde_type, state.data))
    checkpoint = stored["checkpoint"]
    checkpoint["channel_values"] = {name: _given_back(kept, codec) for name, kept in checkpoint["channel_values"].items()}
    # The plain saver's put: a scratch saver would take this for a step of the new run.
    InMemorySaver.put(saver, root_config(thread_id), checkpoint, stored["metadata"], checkpoint["channel_versions"])


def _uncopied(saver: InMemorySaver) -> InMemorySaver:
    """The same checkpoints, given out as they are kept: to be read only."""
    view = InMemorySaver(serde=AsKept())
    view.storage, view.writes, view.blobs = saver.storage, saver.writes, saver.blobs
    return view


def _kept(value: Any, codec: Codec) -> dict[str, Any]:
    try:
        return {"plain": codec.encode(value)}
    except NotJsonSafe:
        return {"native": value}


def _given_back(kept: Mapping[str, Any], codec: Codec) -> Any:
    return codec.decode(kept["plain"]) if "plain" in kept else kept["native"]


def _serde(codec: Codec) -> JsonPlusSerializer:
    return JsonPlusSerializer(allowed_msgpack_modules=[(kind.__module__, kind.__name__) for kind in codec.types.values()] or None)


def _blocked_types(serde: JsonPlusSerializer, serde_type: str, data: bytes) -> list[str]:
    found: list[str] = []
    reader = threading.get_ident()

    def note(event: SerdeEvent) -> None:
        if event["kind"] == "msgpack_blocked" and threading.get_ident() == reader:
            found.append(f"{event['module']}.{event['name']}")

    forget = register_serde_event_listener(note)
    try:
        serde.loads_typed((serde_type, data))
    finally:
        forget()
    return found
