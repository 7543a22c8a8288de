"""What to do when an effect fails, and when nobody knows whether it happened."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import tenacity

from mongo_durable.errors import ConfigurationError, StoreError

T = TypeVar("T")

OnUnknownOutcome = Literal["rerun", "fail", "suspend"]
"""What to do with an effect whose process died inside it: run it again, fail the run, or ask a person whether it happened."""


WhenBusy = Literal["refuse", "queue"]
"""What becomes of a run whose thread has a live one."""


def is_queued(when_busy: str) -> bool:
    """Whether such a run waits.

    Raises:
        ConfigurationError: It is neither of the two.
    """
    if when_busy not in ("refuse", "queue"):
        raise ConfigurationError(f'when_busy is "refuse" or "queue", not {when_busy!r}')
    return when_busy == "queue"


def store_retrying(stop: Callable[[tenacity.RetryCallState], bool]) -> tenacity.AsyncRetrying:
    """Repeats a call of the store that is safe to repeat, while the store is unavailable or its answers get lost; the last error is raised."""
    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, StoreError) and error.retryable),
        stop=stop,
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=5),
        reraise=True,
    )


def check_on_unknown_outcome(policy: str) -> None:
    """Refuse a policy that does not exist.

    Raises:
        ConfigurationError: It is not one of the three.
    """
    if policy not in ("rerun", "fail", "suspend"):
        raise ConfigurationError(f'on_unknown_outcome is "rerun", "fail" or "suspend", not {policy!r}')


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and when a failing body is tried again, before its outcome is recorded. Interrupts and other control flow are never retried.

    Attributes:
        max_attempts: Tries in all, the first included.
        initial_interval: Pause before the second try.
        backoff: Factor from one pause to the next.
        max_interval: Longest pause.
        jitter: Up to this much is added to each pause at random.
        retry_on: Which exceptions are tried again; every other is recorded at once.
    """

    max_attempts: int = 3
    initial_interval: timedelta = timedelta(seconds=0.5)
    backoff: float = 2.0
    max_interval: timedelta = timedelta(seconds=30)
    jitter: timedelta = timedelta(seconds=0.5)
    retry_on: type[Exception] | tuple[type[Exception], ...] = Exception

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or self.backoff < 1:
            raise ConfigurationError("a retry policy needs max_attempts and backoff of at least 1")

    def _wait(self) -> tenacity.wait.wait_base:
        initial, longest = self.initial_interval.total_seconds(), self.max_interval.total_seconds()
        paused = tenacity.wait_exponential(multiplier=initial, exp_base=self.backoff, max=longest)
        return paused + tenacity.wait_random(0, self.jitter.total_seconds())

    def _is_retried(self, error: BaseException, control_flow: tuple[type[BaseException], ...]) -> bool:
        return isinstance(error, self.retry_on) and not isinstance(error, control_flow)

    async def run_async(self, body: Callable[[], Awaitable[T]], control_flow: tuple[type[BaseException], ...]) -> T:
        """Await `body` until it succeeds, raises control flow, or the tries are used up; then its last error is raised."""

        async def tried() -> T:
            return await body()

        return await tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(lambda error: self._is_retried(error, control_flow)),
            stop=tenacity.stop_after_attempt(self.max_attempts),
            wait=self._wait(),
            reraise=True,
        )(tried)

    def run(self, body: Callable[[], T], control_flow: tuple[type[BaseException], ...]) -> T:
        """The same for a synchronous body."""
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda error: self._is_retried(error, control_flow)),
            stop=tenacity.stop_after_attempt(self.max_attempts),
            wait=self._wait(),
            reraise=True,
        )(body)
