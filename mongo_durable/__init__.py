"""Durable execution for LangGraph on MongoDB.

    from mongo_durable import App, DurableClient, SyncDurableClient, Runner, current_activity

Names are loaded on first use, so that a process that only submits or answers does not import LangGraph.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mongo_durable.approvals import check_proposal as check_proposal
    from mongo_durable.approvals import proposal_digest as proposal_digest
    from mongo_durable.client import DurableClient as DurableClient
    from mongo_durable.client import RunHandle as RunHandle
    from mongo_durable.client import SyncDurableClient as SyncDurableClient
    from mongo_durable.engine.authorizing import AnswerRequest as AnswerRequest
    from mongo_durable.engine.policy import RetryPolicy as RetryPolicy
    from mongo_durable.engine.tokens import SigningKeys as SigningKeys
    from mongo_durable.langgraph.app import App as App
    from mongo_durable.langgraph.current import current_activity as current_activity
    from mongo_durable.runner import Runner as Runner
    from mongo_durable.snapshots import Draft as Draft
    from mongo_durable.snapshots import Frontier as Frontier
    from mongo_durable.snapshots import RunSnapshot as RunSnapshot
    from mongo_durable.store.documents import RunLimit as RunLimit

__version__ = "0.1.0"

_HOMES = {
    "AnswerRequest": "mongo_durable.engine.authorizing",
    "App": "mongo_durable.langgraph.app",
    "DurableClient": "mongo_durable.client",
    "Draft": "mongo_durable.snapshots",
    "Frontier": "mongo_durable.snapshots",
    "RetryPolicy": "mongo_durable.engine.policy",
    "RunHandle": "mongo_durable.client",
    "RunLimit": "mongo_durable.store.documents",
    "RunSnapshot": "mongo_durable.snapshots",
    "Runner": "mongo_durable.runner",
    "SigningKeys": "mongo_durable.engine.tokens",
    "SyncDurableClient": "mongo_durable.client",
    "check_proposal": "mongo_durable.approvals",
    "current_activity": "mongo_durable.langgraph.current",
    "proposal_digest": "mongo_durable.approvals",
}

__all__ = [
    "AnswerRequest",
    "App",
    "Draft",
    "DurableClient",
    "Frontier",
    "RetryPolicy",
    "RunHandle",
    "RunLimit",
    "RunSnapshot",
    "Runner",
    "SigningKeys",
    "SyncDurableClient",
    "__version__",
    "check_proposal",
    "current_activity",
    "proposal_digest",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
