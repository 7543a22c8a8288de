"""The checkpointer that a graph may be compiled with."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.conformance import checkpointer_test, validate

from mongo_durable import App


@checkpointer_test("mongo_durable")
async def checkpointer() -> AsyncGenerator[BaseCheckpointSaver, None]:
    yield App("conformance", uri="mongodb://localhost").checkpointer()


async def test_it_fulfils_langgraphs_contract() -> None:
    """LangGraph's own conformance suite passes, base and extended, and nothing of it is skipped."""
    report = await validate(checkpointer)
    failed = {name: result.failures for name, result in report.results.items() if not result.passed}
    assert not failed
    assert report.passed_all_base()
    assert {name for name, result in report.results.items() if result.tests_passed} >= {"delete_for_runs", "copy_thread", "prune"}
