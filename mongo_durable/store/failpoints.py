"""Named points around every store write, at which a test can pause, fail or kill the process.

In production a point costs one comparison. `tests/crash` reads `FailPoint` and fails when a point is never reached by any test.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum


class FailPoint(StrEnum):
    """`<write>.before` and `.after` the write as the caller sees it; `.inside` between the head and the event of one transaction.

    Pruning is many writes: `.before` its mark, `.marked` behind that, `.inside` and `.after` each of its transactions, and after its last write.
    """

    SUBMIT_BEFORE = "submit.before"
    SUBMIT_INSIDE = "submit.inside"
    SUBMIT_AFTER = "submit.after"
    CLAIM_HEAD_BEFORE = "claim_head.before"
    CLAIM_HEAD_AFTER = "claim_head.after"
    CLAIM_EVENT_BEFORE = "claim_event.before"
    CLAIM_EVENT_AFTER = "claim_event.after"
    APPEND_BEFORE = "append.before"
    APPEND_AFTER = "append.after"
    PAYLOAD_BEFORE = "payload.before"
    PAYLOAD_AFTER = "payload.after"
    SUSPEND_BEFORE = "suspend.before"
    SUSPEND_INSIDE = "suspend.inside"
    SUSPEND_AFTER = "suspend.after"
    RESOLVE_BEFORE = "resolve.before"
    RESOLVE_INSIDE = "resolve.inside"
    RESOLVE_AFTER = "resolve.after"
    DRAFT_BEFORE = "draft.before"
    DRAFT_AFTER = "draft.after"
    EXPIRE_BEFORE = "expire.before"
    EXPIRE_INSIDE = "expire.inside"
    EXPIRE_AFTER = "expire.after"
    END_BEFORE = "end.before"
    END_INSIDE = "end.inside"
    END_AFTER = "end.after"
    CANCEL_BEFORE = "cancel.before"
    CANCEL_INSIDE = "cancel.inside"
    CANCEL_AFTER = "cancel.after"
    RETRY_BEFORE = "retry.before"
    RETRY_INSIDE = "retry.inside"
    RETRY_AFTER = "retry.after"
    TRANSACTIONAL_BEFORE = "transactional.before"
    TRANSACTIONAL_INSIDE = "transactional.inside"
    TRANSACTIONAL_AFTER = "transactional.after"
    FORK_BEFORE = "fork.before"
    FORK_INSIDE = "fork.inside"
    FORK_AFTER = "fork.after"
    PRUNE_BEFORE = "prune.before"
    PRUNE_MARKED = "prune.marked"
    PRUNE_INSIDE = "prune.inside"
    PRUNE_AFTER = "prune.after"
    RELEASE_BEFORE = "release.before"
    RELEASE_AFTER = "release.after"


handler: Callable[[FailPoint], Awaitable[None]] | None = None
"""Set by tests only. It may sleep, raise, or kill the process."""


async def reach(point: FailPoint) -> None:
    """Tell the handler, if there is one, that `point` was reached."""
    if handler is not None:
        await handler(point)
