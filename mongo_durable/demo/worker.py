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

from mongo_durable import Runner
from mongo_durable.demo.agent import build_app
from mongo_durable.demo.model import ScriptedModel, named_model
from mongo_durable.demo.shop import Shop

HOLDING = "holding"


def main() -> None:
    """Execute the agent's runs until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shop", type=Path, required=True, help="the file that plays the outside world")
    parser.add_argument("--lease", type=float, default=2.0, help="seconds of silence after which others take over")
    parser.add_argument("--hold", help="name of the tool that never returns after its effect")
    parser.add_argument("--model", help="provider:name instead of the scripted model")
    parser.add_argument("--deep", action="store_true", help="the research agent instead of the purchase agent")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    threading.Thread(target=_end_with_parent, name="demo-parent", daemon=True).start()

    async def pause(effect: str) -> None:
        if effect == arguments.hold:
            print(HOLDING, effect, flush=True)  # the parent waits for this line, and kills
            await asyncio.Event().wait()

    named: str | None = arguments.model
    if arguments.deep:
        from mongo_durable.demo import research  # needs the extra `deepagents`

        app = research.build_app(Shop(arguments.shop), pause)
    else:
        app = build_app(lambda on_call: ScriptedModel(on_call=on_call) if named is None else named_model(named), Shop(arguments.shop), pause)
    has_ended = asyncio.run(Runner([app], concurrency=1, lease=timedelta(seconds=arguments.lease)).run_forever())
    sys.exit(0 if has_ended else 3)


def _end_with_parent() -> None:
    # The pipe closes when the parent is gone, however it went: nobody would be left to stop this process.
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
