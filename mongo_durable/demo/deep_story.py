"""The story of the deep agent: two sub-agents, one of which asks; two workers, which are killed; one report, bought once."""

from __future__ import annotations

import secrets
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from mongo_durable.demo.proof import last_message
from mongo_durable.demo.shop import EffectLine, Shop
from mongo_durable.demo.telling import LEASE_S, PATIENCE_S, Process, Telling, ended, on_a_stage, table_of
from mongo_durable.demo.worker import HOLDING
from mongo_durable.demo.workers import DemoFailed
from mongo_durable.protocol.events import RunStatus
from mongo_durable.snapshots import RunSnapshot
from mongo_durable.timeline import Timeline, timeline

WORKFLOW = "research"
BUYS = "buy_report"
REQUEST = "Which standing desk shall we buy?"
ANSWER = {"decisions": [{"type": "approve"}]}
SAID = "Standing desks: new 480 EUR, used 210 EUR. their owners stand by them."
PATHS = {"root": "agent/1", "market": "agent/1/market/1", "survey": "agent/1/survey/1"}
"""Where each agent stands: its model is named for it."""
EFFECTS = {"model-of-root": 2, "model-of-market": 3, "model-of-survey": 2, "search": 2, BUYS: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Everything that is known after the story."""

    snapshot: RunSnapshot
    timeline: Timeline
    effects: Sequence[EffectLine]
    workers: Sequence[Process]


async def tell(console: Console, uri: str, *, is_kept: bool = False) -> list[str]:
    """Play the story on a database of its own, print it, and check it.

    Args:
        is_kept: Leave the database, to look at it.

    Returns:
        What is not as claimed; empty if everything is.
    """
    run_id = f"{WORKFLOW}-{secrets.token_hex(3)}"
    async with on_a_stage(console, uri, f"show {run_id}", is_kept=is_kept) as stage:
        account = await _tell(Telling(stage), run_id)
        found = faults(account)
        _print_account(console, account, found)
    return found


async def _tell(telling: Telling, run_id: str) -> Account:
    stage = telling.stage
    async with stage.workers("research") as workers:
        await stage.client.submit(WORKFLOW, {"messages": [{"role": "user", "content": REQUEST}]}, run_id=run_id)
        telling.say(f"a client submits run {run_id}: “{REQUEST}”")

        a = await telling.start(workers, "A")
        suspended = await a.until("the question", stage.client.wait(run_id), PATIENCE_S)
        if suspended.frontier is None:
            raise DemoFailed(f"the run is {suspended.status} instead of waiting for approval: {suspended.error}")
        telling.say("two sub-agents work at once: market searches and reports; survey wants to buy a report, and a person has to approve it")
        await a.kill()
        telling.say("worker A gets SIGKILL: no process is left, only MongoDB")

        await telling.answer(suspended, ANSWER)

        b = await telling.start(workers, "B", hold=BUYS)
        await b.until(f"the inside of {BUYS}", b.says(f"{HOLDING} {BUYS}"), PATIENCE_S)
        telling.say(f"the approval reaches survey; {BUYS} has bought the report, and its outcome is not recorded yet")
        await b.kill()
        telling.say("worker B gets SIGKILL inside the sub-agent's tool")

        c = await telling.start(workers, "C")
        telling.say(f"once B's lease of {LEASE_S:g} s is over, C takes the run over, and runs the idempotent tool again with the same key")
        snapshot = await c.until("the end of the run", stage.client.wait(run_id), PATIENCE_S)
        telling.say(f"the run is {snapshot.status}" + (f": “{last_message(snapshot.output)}”" if snapshot.output is not None else ""))
        await c.stop()
        processes = [ended(worker) for worker in (a, b, c)]
    return Account(
        snapshot=snapshot,
        timeline=timeline(await stage.client.history(run_id)),
        effects=Shop(stage.outside).lines(),
        workers=processes,
    )


def faults(account: Account) -> list[str]:
    """What is not as claimed; empty if everything is."""
    snapshot, found = account.snapshot, []
    if snapshot.status != RunStatus.COMPLETED:
        return [f"the run is {snapshot.status}, not completed: {snapshot.error}"]
    if last_message(snapshot.output) != SAID:
        found.append(f"the agent said {last_message(snapshot.output)!r}")
    if [each.exit_code for each in account.workers] != [-signal.SIGKILL, -signal.SIGKILL, 0]:
        found.append(f"the workers ended with {[each.exit_code for each in account.workers]}")
    if [each.ending for each in account.timeline.attempts] != ["suspended", None, "completed"]:
        found.append(f"the attempts ended as {[each.ending for each in account.timeline.attempts]}")
    happened = Counter(line.effect for line in account.effects if line.attempt is None)
    if happened != EFFECTS:
        found.append(f"the effects are {dict(happened)}, not {EFFECTS}")
    for (effect, key), count in Counter((line.effect, line.key) for line in account.effects if line.attempt is not None).items():
        if count != (2 if effect == BUYS else 1):
            found.append(f"{effect} {key} ran {count} times")
    for line in (line for attempt in account.timeline.attempts for line in attempt.executed):
        path = PATHS.get(line.name) or PATHS["market" if line.name == "search" else "survey"]
        if not line.position.startswith(f"{path}/") or (path == PATHS["root"] and not line.position.startswith(f"{path}/model@")):
            found.append(f"{line.name} stands at {line.position}, not under {path}")
    return found


def _print_account(console: Console, account: Account, found: list[str]) -> None:
    table = table_of("The timeline", "attempt", "where", "kind", "what", "outcome")
    for attempt in account.timeline.attempts:
        if attempt.recorded:
            table.add_row(str(attempt.fence), "", "", Text(f"{len(attempt.recorded)} outcomes taken from the history"), "")
        for line in attempt.executed:
            table.add_row(str(attempt.fence), Text(line.position), line.kind, Text(line.name), line.outcome or "none: the process died inside")
        how = "killed" if attempt.ending is None else f"{attempt.ending}, then killed" if attempt.ending == "suspended" else attempt.ending
        table.add_row(str(attempt.fence), "", "", Text(how, style="dim"), "")
    console.print(table)
    if not found:
        console.print(Text("\nproved: killed twice, one report, no recorded effect of any agent ran again, each under its sub-agent's path", "green"))
