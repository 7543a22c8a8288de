"""Durable execution for LangGraph on MongoDB.

    from mongo_durable import App, DurableClient, SyncDurableClient, Runner, current_activity

Names are loaded on first use, so that a process that only submits or answers does not import LangGraph.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mongo_durable.client import DurableClient as DurableClient
    from mongo_durable.client import Frontier as Frontier
    from mongo_durable.client import RunHandle as RunHandle
    from mongo_durable.client import RunSnapshot as RunSnapshot
    from mongo_durable.client import SyncDurableClient as SyncDurableClient
    from mongo_durable.engine.policy import RetryPolicy as RetryPolicy
    from mongo_durable.langgraph.app import App as App
    from mongo_durable.langgraph.current import current_activity as current_activity
    from mongo_durable.runner import Runner as Runner
    from mongo_durable.store.documents import RunLimit as RunLimit

__version__ = "0.1.0"

_HOMES = {
    "App": "mongo_durable.langgraph.app",
    "DurableClient": "mongo_durable.client",
    "Frontier": "mongo_durable.client",
    "RetryPolicy": "mongo_durable.engine.policy",
    "RunHandle": "mongo_durable.client",
    "RunLimit": "mongo_durable.store.documents",
    "RunSnapshot": "mongo_durable.client",
    "Runner": "mongo_durable.runner",
    "SyncDurableClient": "mongo_durable.client",
    "current_activity": "mongo_durable.langgraph.current",
}

__all__ = [
    "App",
    "DurableClient",
    "Frontier",
    "RetryPolicy",
    "RunHandle",
    "RunLimit",
    "RunSnapshot",
    "Runner",
    "SyncDurableClient",
    "__version__",
    "current_activity",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
