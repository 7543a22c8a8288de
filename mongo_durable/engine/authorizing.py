"""Who may answer what: the application's hook, asked once for each question before anything is stored."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from mongo_durable.errors import NotAuthorized


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """An answer that somebody wants to give.

    Attributes:
        generation, digest: Of the frontier.
        name: Of the interrupt, or of the node or tool that asks.
        kind: INTERRUPT; TOOL or another one where a person is asked whether an effect happened.
        payload: The question's value.
        answer: Decoded; not yet validated.
        caller: `resolved_by`: who answers, as far as the application has said.
        channel: app, client, cli, token or draft.
        audiences: Who is asked now; empty where the code did not say.
    """

    run_id: str
    workflow: str
    thread_id: str
    generation: int
    digest: str
    activity_id: str
    name: str
    kind: str
    payload: Any
    answer: Any
    caller: str | None
    channel: str
    audiences: tuple[str, ...]


Authorize = Callable[[AnswerRequest], bool | Awaitable[bool]]
"""Returns True, and nothing but True, if the answer may be given; or raises NotAuthorized with the reason. Synchronous or not."""


async def check_authorized(authorize: Authorize, request: AnswerRequest) -> None:
    """Ask the hook.

    Raises:
        NotAuthorized: It does not say True. A hook that forgets to return refuses.
    """
    try:
        allowed = authorize(request)
        if inspect.isawaitable(allowed):
            allowed = await allowed
    except NotAuthorized as refusal:
        raise refusal.with_run(request.run_id) from None
    if allowed is not True:
        who = repr(request.caller) if request.caller is not None else "somebody without a name"
        raise NotAuthorized(f"run {request.run_id}: {who} may not answer {request.name!r} ({request.activity_id}) so", run_id=request.run_id)
