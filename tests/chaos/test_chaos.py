"""Chaos, in its short form: `scripts/chaos` has the long one."""

from __future__ import annotations

import os

import pytest

from tests.chaos.storm import Clock, storm

SEED = int(os.environ.get("MONGO_DURABLE_CHAOS_SEED", "1"))


@pytest.mark.timeout(240)
async def test_whatever_dies_nothing_is_lost_and_nothing_is_doubled() -> None:
    """Workers and servers die, stop and stumble: what was accepted ends rightly, and no recorded effect runs again (I1 to I12)."""
    outcome = await storm(seed=SEED, duration_s=25, patience_s=90, say=Clock())
    print(outcome.as_markdown())
    assert not outcome.faults, f"seed {SEED}: {len(outcome.faults)} faults:\n" + "\n".join(outcome.faults[:40])
