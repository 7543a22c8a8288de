"""`python -m mongo_durable.demo.worker`: a real process with a `Runner` in it, made to be killed. Its database is named by the environment."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

from mongo_durable import App, Runner

HOLDING = "holding"


def main() -> None:
    """Execute the agent's runs until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("agent", choices=["purchase", "research", "procurement"])
    parser.add_argument("--outside", type=Path, required=True, help="the file that plays the outside world")
    parser.add_argument("--lease", type=float, default=2.0, help="seconds of silence after which others take over")
    parser.add_argument("--hold", help="the effect that never returns: a tool, or a request to the supplier")
    parser.add_argument("--model", help="provider:name instead of the purchase agent's scripted model")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    threading.Thread(target=_end_with_parent, name="demo-parent", daemon=True).start()
    apps, concurrency = _apps(arguments.agent, arguments.outside, arguments.model, arguments.hold)
    has_ended = asyncio.run(Runner(apps, concurrency=concurrency, lease=timedelta(seconds=arguments.lease)).run_forever())
    sys.exit(0 if has_ended else 3)


def _apps(agent: str, outside: Path, model: str | None, held: str | None) -> tuple[list[App], int]:
    """The apps of an agent, and how many of its runs are executed at once."""

    async def pause(effect: str) -> None:
        if effect == held:
            print(HOLDING, effect, flush=True)  # the parent waits for this line, and kills
            await asyncio.Event().wait()

    # Each imports what it needs: LangGraph alone, or the extra `deepagents` as well.
    match agent:
        case "procurement":
            from mongo_durable.demo.procurement import build_app as build_procurement
            from mongo_durable.demo.procurement_story import TERMS
            from mongo_durable.demo.supplier import Supplier

            supplier = Supplier(outside, pause)
            return [build_procurement(supplier, terms, workflow=workflow) for workflow, terms in TERMS.items()], 8
        case "research":
            from mongo_durable.demo import research
            from mongo_durable.demo.shop import Shop

            return [research.build_app(Shop(outside), pause)], 1
        case _:
            from mongo_durable.demo.agent import build_app
            from mongo_durable.demo.model import ScriptedModel, named_model
            from mongo_durable.demo.shop import Shop

            app = build_app(lambda on_call: ScriptedModel(on_call=on_call) if model is None else named_model(model), Shop(outside), pause)
            return [app], 1


def _end_with_parent() -> None:
    # The pipe closes when the parent is gone, however it went: nobody would be left to stop this process.
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
