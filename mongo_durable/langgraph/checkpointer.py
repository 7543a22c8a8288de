"""What a graph of a durable app may be compiled with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from langgraph.checkpoint.memory import InMemorySaver

from mongo_durable.errors import ConfigurationError

_Key = tuple[str, str, str]  # thread, namespace, checkpoint


class DurableCheckpointer(InMemorySaver):
    """A checkpointer that says "this graph is run by mongo_durable".

    In a durable run the driver puts its own scratch saver in its place, one for each attempt. Outside one, the graph runs on this as on LangGraph's
    in-memory saver, which is what unit tests of a graph want. It fulfils LangGraph's whole checkpointer contract, the extended part included.
    """

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints, and their writes, that these LangGraph runs made."""
        wanted = set(run_ids)
        self._delete(key for key, metadata in self._all_metadata() if metadata.get("run_id") in wanted)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy every checkpoint of a thread, with its writes and its chain of parents, to another thread."""
        for namespace, checkpoints in list(self.storage.get(source_thread_id, {}).items()):
            self.storage[target_thread_id][namespace].update(checkpoints)
        for (thread_id, namespace, checkpoint_id), writes in list(self.writes.items()):
            if thread_id == source_thread_id:
                self.writes[(target_thread_id, namespace, checkpoint_id)].update(writes)
        for (thread_id, namespace, channel, version), blob in list(self.blobs.items()):
            if thread_id == source_thread_id:
                self.blobs[(target_thread_id, namespace, channel, version)] = blob

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete all checkpoints of threads, or all but the latest of each namespace.

        A latest checkpoint whose DeltaChannels have not been snapshotted in it keeps its ancestors: without their writes it would read as empty.
        """
        if strategy == "delete":
            for thread_id in thread_ids:
                self.delete_thread(thread_id)
            return
        if strategy != "keep_latest":
            raise ConfigurationError(f'strategy is "keep_latest" or "delete", not {strategy!r}')
        for thread_id in thread_ids:
            for namespace, checkpoints in list(self.storage.get(thread_id, {}).items()):
                latest = max(checkpoints, default=None)
                if latest is None or self._metadata(checkpoints[latest]).get("counters_since_delta_snapshot"):
                    continue
                self._delete((thread_id, namespace, each) for each in checkpoints if each != latest)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """See `delete_for_runs`."""
        self.delete_for_runs(run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """See `copy_thread`."""
        self.copy_thread(source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """See `prune`."""
        self.prune(thread_ids, strategy=strategy)

    def _all_metadata(self) -> Iterable[tuple[_Key, dict[str, Any]]]:
        for thread_id, namespaces in self.storage.items():
            for namespace, checkpoints in namespaces.items():
                for checkpoint_id, stored in checkpoints.items():
                    yield (thread_id, namespace, checkpoint_id), self._metadata(stored)

    def _metadata(self, stored: Any) -> dict[str, Any]:
        metadata: dict[str, Any] = self.serde.loads_typed(stored[1])
        return metadata

    def _delete(self, keys: Iterable[_Key]) -> None:
        for thread_id, namespace, checkpoint_id in list(keys):
            del self.storage[thread_id][namespace][checkpoint_id]
            self.writes.pop((thread_id, namespace, checkpoint_id), None)
