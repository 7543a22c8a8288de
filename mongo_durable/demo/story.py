"""The story: three workers, two of which are killed, one person, one desk."""

from __future__ import annotations

import json
import secrets

from rich.console import Console
from rich.text import Text

from mongo_durable.demo.proof import ASKS, KILLED_INSIDE, Account, faults, last_message, model_calls, proofs, worker_of
from mongo_durable.demo.shop import Shop
from mongo_durable.demo.telling import LEASE_S, PATIENCE_S, PERSON, Telling, ended, on_a_stage, table_of
from mongo_durable.demo.worker import HOLDING
from mongo_durable.demo.workers import DemoFailed
from mongo_durable.timeline import AttemptLine, timeline

WORKFLOW = "purchase"
ANSWER = {"approved": True, "note": "within budget"}
REQUEST = "Please buy a standing desk."
_MODEL_PATIENCE_S = 300.0


async def tell(console: Console, uri: str, *, model: str | None = None, is_kept: bool = False) -> list[str]:
    """Play the story on a database of its own, print it, and check it.

    Args:
        model: provider:name instead of the scripted model.
        is_kept: Leave the database, to look at it.

    Returns:
        What is not as claimed; empty if everything is.
    """
    run_id = f"{WORKFLOW}-{secrets.token_hex(3)}"
    async with on_a_stage(console, uri, f"show {run_id}", is_kept=is_kept) as stage:
        account = await _tell(Telling(stage, PATIENCE_S if model is None else _MODEL_PATIENCE_S), run_id, model)
        found = faults(account)
        _print_account(console, account, found)
    return found


async def _tell(telling: Telling, run_id: str, model: str | None) -> Account:
    stage = telling.stage
    async with stage.workers("purchase", *(["--model", model] if model is not None else [])) as workers:
        await stage.client.submit(WORKFLOW, {"messages": [{"role": "user", "content": REQUEST}]}, run_id=run_id)
        telling.say(f"a client submits run {run_id}: “{REQUEST}”")

        a = await telling.start(workers, "A")
        suspended = await a.until("the question", stage.client.wait(run_id), telling.patience_s)
        if suspended.frontier is None:
            raise DemoFailed(f"the run is {suspended.status} instead of waiting for approval: {suspended.error}")
        telling.say("the model asks for the price, the shop quotes it, the model asks for approval: the run is suspended")
        await a.kill()
        telling.say("worker A gets SIGKILL: no process is left, only MongoDB")

        await telling.answer(suspended, ANSWER)

        b = await telling.start(workers, "B", hold=KILLED_INSIDE)
        await b.until(f"the inside of {KILLED_INSIDE}", b.says(f"{HOLDING} {KILLED_INSIDE}"), telling.patience_s)
        telling.say(f"the answer reaches {ASKS}; the model orders; {KILLED_INSIDE} has ordered, and its outcome is not recorded yet")
        await b.kill()
        telling.say("worker B gets SIGKILL inside the tool: nobody knows whether the order happened")

        c = await telling.start(workers, "C")
        telling.say(f"once B's lease of {LEASE_S:g} s is over, C takes the run over; the tool is idempotent, so its policy is to run it again")
        snapshot = await c.until("the end of the run", stage.client.wait(run_id), telling.patience_s)
        telling.say(f"the run is {snapshot.status}" + (f": “{last_message(snapshot.output)}”" if snapshot.output is not None else ""))
        await c.stop()
        processes = [ended(worker) for worker in (a, b, c)]
    return Account(
        snapshot=snapshot,
        timeline=timeline(await stage.client.history(run_id)),
        effects=Shop(stage.outside).lines(),
        workers=processes,
        answered_by=PERSON,
        is_scripted=model is None,
    )


def _print_account(console: Console, account: Account, found: list[str]) -> None:
    attempts = table_of("What the history says", "attempt", "process", "replayed: taken from the history", "executed", "how it ended")
    for attempt in account.timeline.attempts:
        worker = worker_of(attempt, account.workers)
        attempts.add_row(
            str(attempt.fence),
            f"{worker.name} ({worker.pid})" if worker is not None else Text(attempt.owner),
            Text(", ".join(line.name for line in attempt.recorded) or "nothing"),
            Text(", ".join(line.name for line in attempt.executed) or "nothing"),
            Text(_ending(attempt)),
        )
    console.print(attempts)

    frontiers = table_of("The frontier", "no.", "asked by", "activity", "status", "answer", "by")
    for frontier in account.timeline.frontiers:
        for entry in frontier.entries:
            answer = (frontier.answers or {}).get(entry["activity_id"])
            cells = (
                str(frontier.generation),
                entry["name"],
                entry["activity_id"],
                frontier.status.value,
                json.dumps(answer),
                frontier.resolved_by or "",
            )
            frontiers.add_row(*(Text(cell) for cell in cells))
    console.print(frontiers)

    table = table_of("What the outside world saw", "effect", "activity", "body began in attempt", "took effect", "that is")
    for each in proofs(account):
        began = ", ".join(str(number) for number in each.began)
        seen = (each.effect, each.key, began, f"{each.happened} ×", each.verdict)
        table.add_row(*(Text(cell, style="" if each.is_right else "red") for cell in seen))
    console.print(table)

    calls = model_calls(account)
    made = f"{calls.made} made" if calls.made is not None else "not counted by this model"
    console.print(f"\nmodel calls: {made}, {calls.recorded} recorded; {calls.spared} answers were taken from the history instead of calling again")
    if not found:
        console.print(Text("proved: killed twice, one order, no recorded effect ran again, and the history says what the outside world saw", "green"))


def _ending(attempt: AttemptLine) -> str:
    if attempt.ending == "suspended":
        return f"suspended on frontier {attempt.generation}, then killed"
    if attempt.ending is not None:
        return attempt.ending
    last = attempt.executed[-1].name if attempt.executed else "nothing"
    return f"killed inside {last}; attempt {attempt.taken_over_by} took over"
