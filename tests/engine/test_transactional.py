"""Transactional activities: what the body writes commits with its outcome, exactly once."""

from __future__ import annotations

from typing import Any, TypedDict

import pytest
from langgraph.graph import START, StateGraph
from pymongo import AsyncMongoClient

from mongo_durable import App, DurableClient
from mongo_durable.errors import ConfigurationError
from mongo_durable.store import claims
from tests.support.server_faults import failing

CONFIG: Any = {"configurable": {"thread_id": "t"}}


class State(TypedDict, total=False):
    balance: int
    fail: bool


def build_app(uri: str, database: str, *, client: Any = None) -> App:
    app = App("bank", uri=uri, database=database, client=client)

    @app.activity(transactional=True)
    async def deposit(amount: int, fail: bool, *, session: Any) -> int:
        accounts = session.client[database]["accounts"]
        account = await accounts.find_one_and_update({"_id": 1}, {"$inc": {"balance": amount}}, upsert=True, return_document=True, session=session)
        if fail:
            raise ValueError("no")
        balance: int = account["balance"]
        return balance

    async def node(state: State) -> State:
        try:
            return {"balance": await deposit(5, state.get("fail", False))}
        except ValueError:
            return {"balance": -1}

    @app.entrypoint
    def build() -> StateGraph[Any]:
        graph = StateGraph(State)
        graph.add_node("node", node)
        graph.add_edge(START, "node")
        return graph

    return app


async def balance(uri: str, database: str) -> int | None:
    async with AsyncMongoClient(uri) as client:
        account = await client[database]["accounts"].find_one({"_id": 1})
        return account["balance"] if account else None


async def test_writes_and_outcome_commit_together(mongo_uri: str, database: str) -> None:
    """The body's write is there once, and its result is recorded."""
    app = build_app(mongo_uri, database)
    assert await app.ainvoke({}, CONFIG, run_id="r") == {"balance": 5}
    assert await balance(mongo_uri, database) == 5
    async with DurableClient(mongo_uri, database=database) as client:
        types = [event.type.value for event in await client.history("r")]
    assert types[2:] == ["step.committed", "activity.started", "activity.completed", "step.committed", "run.completed"]


async def test_a_body_that_raises_keeps_nothing(mongo_uri: str, database: str) -> None:
    """A failure is recorded, and none of the body's writes."""
    app = build_app(mongo_uri, database)
    assert await app.ainvoke({"fail": True}, CONFIG) == {"balance": -1, "fail": True}
    assert await balance(mongo_uri, database) is None


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("commitTransaction", {"errorCode": 91, "errorLabels": ["RetryableWriteError"]}),
        ("commitTransaction", {"closeConnection": True}),
        ("commitTransaction", {"errorCode": 251, "errorLabels": ["TransientTransactionError"]}),
        ("insert", {"errorCode": 112, "errorLabels": ["TransientTransactionError"]}),
        ("findAndModify", {"errorCode": 112, "errorLabels": ["TransientTransactionError"]}),
    ],
)
async def test_faults_of_the_server_change_nothing(mongo_uri: str, database: str, command: str, fault: dict[str, Any]) -> None:
    """CASES 84: a failing commit is repeated as a commit, a transient failure as a whole transaction: the deposit is there once."""
    name = f"bank-{database}"
    async with AsyncMongoClient(mongo_uri, appname=name) as held:
        app = build_app(mongo_uri, database, client=held)
        await app.ainvoke({"fail": True}, {"configurable": {"thread_id": "first"}})  # the schema is there
        mode = {"times": 2} if command == "commitTransaction" else {"skip": 1, "times": 1}
        with failing(mongo_uri, [command], appname=name, mode=mode, **fault) as strikes:
            assert (await app.ainvoke({}, CONFIG))["balance"] == 5
            assert strikes() >= 1
        await app.aclose()
    assert await balance(mongo_uri, database) == 5


async def test_a_superseded_attempt_commits_nothing(mongo_uri: str, database: str) -> None:
    """I2: when another process has taken the run over, the old attempt's transaction is refused as a whole."""
    app = App("bank", uri=mongo_uri, database=database)
    stolen: list[str] = []

    @app.activity(transactional=True)
    async def deposit(*, session: Any) -> int:
        await session.client[database]["accounts"].update_one({"_id": 1}, {"$inc": {"balance": 1}}, upsert=True, session=session)
        if not stolen:
            stolen.append((await claims.claim(app.process().connection, "r", "thief", is_forced=True)).owner)
        return 1

    async def node(_: State) -> State:
        return {"balance": await deposit()}

    @app.entrypoint
    def build() -> StateGraph[Any]:
        graph = StateGraph(State)
        graph.add_node("node", node)
        graph.add_edge(START, "node")
        return graph

    with pytest.raises(Exception, match="superseded"):
        await app.ainvoke({}, CONFIG, run_id="r")
    assert await balance(mongo_uri, database) is None
    # The thief has no process behind it, so the run is taken back, and now it commits.
    assert await app.ainvoke(None, CONFIG) == {"balance": 1}
    assert await balance(mongo_uri, database) == 1


def test_what_cannot_be_transactional_is_refused() -> None:
    """A synchronous function, one without a session, and policies that have no meaning are refused at once."""
    app = App("bank", uri="mongodb://localhost")
    with pytest.raises(ConfigurationError):
        app.activity(transactional=True)(lambda session: None)
    with pytest.raises(ConfigurationError):
        app.activity(transactional=True, on_unknown_outcome="fail")
