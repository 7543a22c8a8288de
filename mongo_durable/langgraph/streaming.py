"""Streams of a durable run: one generator over all that happens between the call and the run's next rest.

A replacement attempt runs the graph again from its input, and passes recorded rests on the way. Where the graph is, the stream itself tells: the
driver listens to LangGraph's `checkpoints` mode beside the caller's modes, so a chunk's root step is known in stream order. What belongs to steps
that the history has sealed, or to a pass before the last recorded frontier, was streamed before and is left out unless asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mongo_durable.engine.attempt import Attempt
from mongo_durable.errors import UnsupportedGraph

Replay = Literal["skip", "emit"]
MODES = ("values", "updates", "messages", "custom", "tasks")
_INTERRUPT = "__interrupt__"
_FIRST_STEP = -1


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """What the caller wants to see, in LangGraph's own words.

    Attributes:
        modes: One or several of values, updates, messages, custom, tasks.
        is_list: Several modes were asked for, so chunks name theirs.
        has_subgraphs: Chunks of child graphs too, with their namespace.
        replay: Whether replayed steps are streamed again.
    """

    modes: tuple[str, ...]
    is_list: bool
    has_subgraphs: bool
    replay: Replay

    @classmethod
    def of(cls, stream_mode: str | Sequence[str], subgraphs: bool, replay: str) -> StreamRequest:
        """The request that these call options make.

        Raises:
            UnsupportedGraph: A mode or option that a durable stream does not have.
        """
        modes = (stream_mode,) if isinstance(stream_mode, str) else tuple(stream_mode)
        if unknown := [mode for mode in modes if mode not in MODES]:
            raise UnsupportedGraph(f"a durable run streams {', '.join(MODES)}, not {unknown[0]!r}: checkpoints are scratch here")
        if replay not in ("skip", "emit"):
            raise UnsupportedGraph(f'replay= is "skip" or "emit", not {replay!r}')
        return cls(modes, not isinstance(stream_mode, str), subgraphs, "emit" if replay == "emit" else "skip")

    @property
    def native_modes(self) -> list[str]:
        """What LangGraph is asked for: also `values`, which carries the output, and `checkpoints`, which tells the step."""
        return [*self.modes, *(mode for mode in ("values", "checkpoints") if mode not in self.modes)]

    def shape(self, namespace: tuple[str, ...], mode: str, payload: Any) -> Any:
        """A chunk in the shape that LangGraph gives for this request."""
        parts = ((namespace,) if self.has_subgraphs else ()) + ((mode,) if self.is_list else ()) + (payload,)
        return parts if len(parts) > 1 else payload

    def at_rest(self, output: Mapping[str, Any]) -> Iterator[Any]:
        """The chunks that show a frontier, with stable ids, once: at the root. As values, with what an invocation returns beside them."""
        question = {_INTERRUPT: tuple(output[_INTERRUPT])}
        for mode in self.modes:
            if mode == "values":
                yield self.shape((), mode, {**output, **question})
            elif mode == "updates":
                yield self.shape((), mode, question)

    def of_result(self, result: Any) -> Iterator[Any]:
        """What a stream shows of a run that another process brought to its rest."""
        if isinstance(result, dict) and _INTERRUPT in result:
            yield from self.at_rest(result)
        elif "values" in self.modes:
            yield self.shape((), "values", result)


class StreamFilter:
    """What of one attempt's native chunks the caller gets."""

    def __init__(self, request: StreamRequest, attempt: Attempt) -> None:
        self.request = request
        self._attempt = attempt
        self._recorded_frontiers = len(attempt.history.frontiers)
        self._last_sealed = max(attempt.history.steps, default=_FIRST_STEP - 1)
        self._step = _FIRST_STEP
        self._offset: int | None = None
        self._resting: set[tuple[str, ...]] = set()
        self._settled: dict[tuple[str, ...], Any] = {}
        self.output: Any = None

    def begin_pass(self) -> None:
        """The graph is run, from its input or from answers."""
        self._resting.clear()

    def take(self, chunk: tuple[Any, ...]) -> Iterator[Any]:
        """The caller's chunks for a native one: none or one."""
        namespace, mode, payload = chunk
        if mode == "checkpoints":
            if namespace == ():
                self._note_step(payload["metadata"])
            return
        if mode == "values" and not self._is_news(namespace, payload):
            return
        if mode not in self.request.modes or (self._is_replayed and self.request.replay == "skip"):
            return
        if isinstance(payload, dict):
            if mode == "updates" and (_INTERRUPT in payload or _is_shown_again(payload)):
                return
            if mode == "tasks" and payload.get("interrupts"):
                payload = {**payload, "interrupts": []}
        yield self.request.shape(namespace, mode, payload)

    def _is_news(self, namespace: tuple[str, ...], payload: Any) -> bool:
        """Whether these values are those after a step.

        At a rest a graph shows the state that it had, and then with it what the step has written so far; when it is resumed, again the first.
        """
        is_rest = isinstance(payload, dict) and _INTERRUPT in payload
        if is_rest:
            self._resting.add(namespace)
            payload = {name: value for name, value in payload.items() if name != _INTERRUPT}
        if namespace == () and (payload or not is_rest):
            self.output = payload
        if payload is None or namespace in self._resting or (namespace in self._settled and payload == self._settled[namespace]):
            return False  # a workflow has no values before its end
        self._settled[namespace] = payload
        return True

    def _note_step(self, metadata: dict[str, Any]) -> None:
        step = metadata["step"]
        if metadata.get("source") == "input" and self._offset is None:
            self._offset = step - _FIRST_STEP
        self._step = step - (self._offset or 0)

    @property
    def _is_replayed(self) -> bool:
        return self._attempt.consumed < self._recorded_frontiers or self._step + 1 <= self._last_sealed


def _is_shown_again(payload: dict[str, Any]) -> bool:
    """Whether a resumed graph tells what a task of the interrupted step had written before."""
    metadata = payload.get("__metadata__")
    return isinstance(metadata, dict) and metadata.get("cached") is True
