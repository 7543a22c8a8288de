"""The long form: chaos for minutes, and a table of what happened."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys


def main() -> int:
    """Returns the exit code: 0 if nothing is wrong."""
    from tests.chaos.storm import Clock, storm  # not above: every worker imports this module once more, before it begins

    parser = argparse.ArgumentParser(
        prog="scripts/chaos", description="Kill workers and servers for minutes, then check that nothing is lost or doubled."
    )
    parser.add_argument("--minutes", type=float, default=10, help="how long there are faults (10)")
    parser.add_argument("--seed", type=int, help="of orders and faults; a random one is made up and printed")
    parser.add_argument("--quiet", action="store_true", help="print the table alone")
    given = parser.parse_args()
    seed = random.randrange(1_000_000) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    outcome = asyncio.run(storm(seed=seed, duration_s=60 * given.minutes, patience_s=180, say=(lambda _: None) if given.quiet else Clock()))
    print(outcome.as_markdown())
    for fault in outcome.faults:
        print(f"VIOLATION {fault}")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
