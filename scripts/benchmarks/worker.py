"""A process that is one contender. It says `{"samples": {}}` when it is ready, reads one request a line, `{"do": workload, "with": {…}}`, and answers
each with `{"samples": {…}}` or `{"error": "…"}`. It ends when its input does, whatever it is doing.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import sys
import threading
import time
import traceback
from typing import IO

from scripts.benchmarks.contenders import open_contender
from scripts.benchmarks.servers import Addresses

_CLEAN_UP_S = 20.0


async def main(name: str, addresses: Addresses, answers: IO[str]) -> None:
    """Serve until the input ends."""
    requests: asyncio.Queue[str] = asyncio.Queue()
    loop, serving = asyncio.get_running_loop(), asyncio.current_task()
    assert serving is not None

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(requests.put_nowait, line)
        loop.call_soon_threadsafe(serving.cancel)
        time.sleep(_CLEAN_UP_S)
        os._exit(1)  # a contender that waits for a server which is gone would wait for ever (seen with DBOS)

    def say(answer: object) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    # A thread that nobody waits for: the loop must be able to end while it reads.
    threading.Thread(target=read, daemon=True).start()
    contender = open_contender(name, addresses)
    # What was imported stays: a full collection that looks at all of it would fall into the turn of whoever happens to cause it.
    gc.collect()
    gc.freeze()
    try:
        say({"samples": {}})
        while True:
            request = json.loads(await requests.get())
            try:
                say({"samples": await getattr(contender, request["do"])(**request["with"])})
            except Exception:  # noqa: BLE001 - it is told to the parent, which reports it
                say({"error": traceback.format_exc()})
    except asyncio.CancelledError:
        pass  # the end of the input
    finally:
        await contender.aclose()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    # What a library prints must not get between the answers.
    private = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(main(sys.argv[1], Addresses(**json.loads(sys.argv[2])), private))
