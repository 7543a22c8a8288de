"""Whose turn is it: spreads runs over the runners of a fleet, and keeps them from all reaching for the same one.

Each runner orders the live runners for a run by a hash of both (rendezvous hashing). The first tries to claim it at once, the others wait a little
longer each and try only if nobody has taken it by then. No runner asks another: a wrong or old list costs a useless try, never a run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from mongo_durable.store.claims import LiveRunner

TURN_S = 0.03
"""How long a runner leaves a run to the one before it: several times what the news of a claim takes to arrive."""
LONGEST_TURN_S = 2.0


class Fleet:
    """The live runners, as last seen by the runner `owner`."""

    def __init__(self, owner: str, runners: Sequence[LiveRunner] = ()) -> None:
        self._owner = owner
        self._runners = runners

    def turn_s(self, run_id: str, workflow: tuple[str, str]) -> float:
        """How many seconds to leave a run of this workflow (name and version) to others who serve it."""
        mine = _score(run_id, self._owner)
        before = sum(_score(run_id, each.owner) > mine for each in self._runners if each.owner != self._owner and workflow in each.serves)
        return min(before * TURN_S, LONGEST_TURN_S)


def _score(run_id: str, owner: str) -> bytes:
    return hashlib.blake2b(f"{run_id}\0{owner}".encode(), digest_size=8).digest()
