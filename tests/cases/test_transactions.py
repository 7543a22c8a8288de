"""Transactions that the server fails half-way: a commit is repeated as a commit, a transient failure as a whole transaction, and nobody notices."""

from __future__ import annotations

import ast
import inspect
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.types import interrupt
from pymongo import AsyncMongoClient

import mongo_durable
from mongo_durable import App
from mongo_durable.protocol.events import EventType
from tests.cases.workshop import Workshop, chain
from tests.engine.workflows import Commands
from tests.langgraph.kit import State
from tests.support.server_faults import failing

# One life has these transactions: submit, suspend, resolve and end of one run; submit, suspend and cancel of another.
TRANSACTIONS = 7
# Two of them close a frontier.
CLOSINGS = 2

TRANSIENT = {"errorCode": 112, "errorLabels": ["TransientTransactionError"]}

# Which command fails, on which collection alone, how often it comes in one life, and how.
FAULTS: dict[str, tuple[str, str | None, int, dict[str, Any]]] = {
    "commit that is broken off": ("commitTransaction", None, TRANSACTIONS, {"errorCode": 89, "errorLabels": ["RetryableWriteError"]}),
    "commit without a reply": ("commitTransaction", None, TRANSACTIONS, {"closeConnection": True}),
    "commit not known to be durable": ("commitTransaction", None, TRANSACTIONS, {"writeConcernError": {"code": 64, "errmsg": "timed out"}}),
    "commit that is aborted": ("commitTransaction", None, TRANSACTIONS, {"errorCode": 251, "errorLabels": ["TransientTransactionError"]}),
    "conflict at an insert": ("insert", None, TRANSACTIONS, TRANSIENT),
    "conflict at a head": ("findAndModify", None, TRANSACTIONS, TRANSIENT),
    "conflict at a frontier": ("update", "frontiers", CLOSINGS, TRANSIENT),
}


@pytest.fixture
async def named(mongo_uri: str, shared_database: str) -> AsyncIterator[tuple[Workshop, str, Commands]]:
    """A workshop whose client has a name of its own, so that faults can be made for it alone."""
    name, commands = f"transactions-{uuid.uuid4().hex[:8]}", Commands()
    async with AsyncMongoClient(mongo_uri, appname=name, event_listeners=[commands]) as client:
        made = Workshop(mongo_uri, shared_database, name, client)
        yield made, name, commands
        await made.aclose()


async def _life(workshop: Workshop, number: int) -> None:
    """A run that is submitted, asks, is answered and ends, and one that is cancelled while it asks."""

    def make(app: App) -> Any:
        effect = workshop.effect(app)

        async def node(state: State) -> State:
            done = await effect(f"before {state['work']}")
            return {"lines": [done, interrupt("sure?"), await effect(f"after {state['work']}")]}

        return chain(node=node)

    asked = await workshop.once(make, {"lines": [], "work": number}, number)
    (question,) = asked["__interrupt__"]
    dropped = workshop.run(f"dropped-{number}")
    await workshop.once(make, {"lines": [], "work": f"dropped {number}"}, f"dropped-{number}")
    async with workshop.client() as client:
        receipt = await client.resolve(workshop.run(number), {question.id: "yes"})
        assert await client.resolve(workshop.run(number), {question.id: "yes"}) == receipt
        assert (await client.cancel(dropped)).status == "cancelled"
    assert (await workshop.once(make, None, number))["lines"] == [f"before {number}", "yes", f"after {number}"]


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_transaction_that_fails_is_there_once(fault: str, named: tuple[Workshop, str, Commands]) -> None:
    """CASES 84: with any one of a run's transactions failing, at its commit or before, every event is there once and no body runs again for it."""
    workshop, appname, _ = named
    command, collection, times, how = FAULTS[fault]
    namespace = f"{workshop.database}.{collection}" if collection else None
    await _life(workshop, 0)
    usual = [event.type for event in await workshop.history(0)]
    struck = 0
    for number in range(1, times + 1):
        with failing(workshop.uri, [command], appname=appname, namespace=namespace, mode={"skip": number - 1, "times": 1}, **how) as strikes:
            await _life(workshop, number)
            struck += min(strikes(), 1)
        assert [event.type for event in await workshop.history(number)] == usual
        dropped = Counter(event.type for event in await workshop.history(f"dropped-{number}"))
        assert (dropped[EventType.RUN_CANCELLED], dropped[EventType.ACTIVITIES_SUSPENDED]) == (1, 1)
    assert struck == times
    assert set(workshop.ran.values()) == {1}


async def test_a_commit_is_repeated_and_not_the_transaction(named: tuple[Workshop, str, Commands]) -> None:
    """CASES 84: when the replies of commits are lost, more commits are sent and not one more write than without."""
    workshop, appname, commands = named

    def writes() -> Counter[str]:
        sent, known = Counter[str](), {"insert", "update", "findAndModify", "commitTransaction"}
        for name, _, command in commands.sent:
            # The heads of claims and the flights of the appender are no transactions.
            if name in known and "autocommit" in command:
                sent[name] += 1
        return sent

    await _life(workshop, 1)
    before = writes()
    commands.sent.clear()
    fault: dict[str, Any] = {"errorCode": 89, "errorLabels": ["RetryableWriteError"]}
    with failing(workshop.uri, ["commitTransaction"], appname=appname, mode={"times": 3}, **fault) as strikes:
        await _life(workshop, 2)
        assert strikes() >= 3
    after = writes()
    assert after.pop("commitTransaction") > before.pop("commitTransaction")
    assert after == before


def _bodies(tree: ast.AST) -> Iterator[ast.AST]:
    """The functions that a module gives to `transaction`."""
    named = {
        argument.id
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ("transaction", "with_transaction")
        for argument in call.args
        if isinstance(argument, ast.Name)
    }
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef) and node.name in named)


def test_no_body_of_a_transaction_swallows_an_error() -> None:
    """CASES 84: what a driver error means inside a transaction is decided outside it: whatever a body of one catches, it raises again as it is."""
    found = 0
    for path in Path(inspect.getfile(mongo_durable)).parent.rglob("*.py"):
        for body in _bodies(ast.parse(path.read_text())):
            found += 1
            for caught in (node for node in ast.walk(body) if isinstance(node, ast.ExceptHandler)):
                last = caught.body[-1]
                assert isinstance(last, ast.Raise), f"{path.name}:{caught.lineno}"
                assert last.exc is None, f"{path.name}:{caught.lineno}"
    assert found > 5
