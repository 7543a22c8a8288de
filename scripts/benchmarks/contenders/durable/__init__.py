"""mongo_durable itself."""

from __future__ import annotations

from scripts.benchmarks.contenders.durable.recording import Recording
from scripts.benchmarks.contenders.durable.resuming import Resuming
from scripts.benchmarks.contenders.durable.storing import Storing


class Durable(Recording, Resuming, Storing):
    """All workloads."""
