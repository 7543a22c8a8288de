"""Roles with few rights: each does its job through the library, and MongoDB refuses it everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pymongo
import pytest
from pymongo import AsyncMongoClient
from pymongo.errors import OperationFailure
from typer.testing import CliRunner

from mongo_durable import App, DurableClient, Runner
from mongo_durable.cli.commands import app as command_line
from mongo_durable.errors import ConfigurationError, NotPermitted, ResolutionError
from mongo_durable.store import schema
from mongo_durable.store.roles import ROLES, TABLE, privileges
from tests.engine.workflows import State, one_node, until_known
from tests.security.conftest import GROUP, Commands
from tests.support.secured import SecuredMongo

pytestmark = GROUP

_ACTIONS = ("find", "changeStream", "insert", "update", "remove")

# What every tier of Atlas lets a user with a custom role do.
_EVERYWHERE = {
    *("hello", "buildInfo", "ping", "endSessions", "saslStart", "saslContinue"),
    *("find", "aggregate", "distinct", "getMore", "killCursors"),
    *("insert", "update", "findAndModify", "commitTransaction", "abortTransaction"),
}
_STAGES = {"$match", "$project", "$unionWith", "$sort", "$limit", "$changeStream"}


class Broken:
    """Whether the outside system is broken, and whether it lets anybody wait no longer."""

    def __init__(self) -> None:
        self.is_broken = True
        self.reached = asyncio.Event()


def _workshop(client: AsyncMongoClient[Any], database: str, outside: Broken) -> App:
    app = App("workshop", client=client, database=database)

    @app.activity(idempotent=True)
    async def look_up(what: str) -> str:
        return what * 100_000  # too large for its event: it goes to `payloads`

    @app.activity(idempotent=True)
    async def order(what: str) -> str:
        if outside.is_broken:
            raise ValueError("out of stock")
        return what

    @app.activity(idempotent=True)
    async def never() -> None:
        outside.reached.set()
        await asyncio.Event().wait()

    @app.activity(transactional=True)
    async def note(what: str, *, session: Any) -> str:
        return what

    async def node(state: State) -> dict[str, Any]:
        match state["value"]:
            case "ask":
                found = await look_up("desk")
                answer = app.interrupt("approval", "may I?")
                return {"seen": [len(found), answer, await note("done")]}
            case "expire":
                return {"seen": [app.interrupt("approval", "may I?", expires_in=timedelta(seconds=0.2), default="no")]}
            case "fail":
                return {"seen": [await order("desk")]}
            case "sleep":
                await app.sleep(seconds=0.2)
                return {}
            case "work":
                await never()
        return {"seen": ["nothing"]}

    return one_node(app, node)


async def test_users_with_few_rights_do_the_whole_work(
    driver_of: Callable[..., AsyncMongoClient[Any]],
    client_of: Callable[..., Awaitable[DurableClient]],
    database: str,
    commands: Commands,
) -> None:
    """A submitter, a runner, an approver and a viewer bring runs to their ends, with nothing that a shared tier of Atlas refuses."""
    outside = Broken()
    app = _workshop(driver_of("runner"), database, outside)
    viewer, approver, submitter = [await client_of(role) for role in ("viewer", "approver", "submitter")]
    async with Runner([app], sweep_interval=timedelta(seconds=0.2)):
        for name in ("ask", "expire", "fail", "sleep", "work"):
            await submitter.submit("workshop", {"value": name}, run_id=name, thread_id="t" if name == "ask" else None)
        assert (await submitter.wait("ask", timeout=30)).status == "suspended"
        (frontier,) = await approver.open_frontiers(workflow="workshop", run_id="ask")
        answers = {frontier.entries[0].activity_id: "yes"}
        first = await approver.resolve("ask", answers, generation=1, digest=frontier.digest, resolved_by="approver-7")
        assert first == await approver.resolve("ask", answers)
        assert (await approver.wait("ask", timeout=30)).result()["seen"] == [400_000, "yes", "done"]

        async def has_expired() -> bool:
            return (await viewer.get_run("expire")).is_ended

        await until_known(has_expired)
        assert (await viewer.get_run("expire")).result()["seen"] == ["no"]
        assert (await viewer.wait("sleep", timeout=30)).status == "completed"

        assert (await submitter.wait("fail", timeout=30)).error == {"type": "ValueError", "message": "out of stock"}
        await submitter.retry("fail")
        assert (await submitter.wait("fail", timeout=30)).status == "failed"  # what was recorded stands

        await asyncio.wait_for(outside.reached.wait(), 30)
        assert (await submitter.cancel("work", reason="not needed")).status == "cancelled"
        await submitter.submit("workshop", {"value": "ask"}, run_id="second", thread_id="t")
        await submitter.wait("second", timeout=30)
        (question,) = (await approver.open_frontiers(run_id="second"))[0].entries
        with pytest.raises(ResolutionError):
            await approver.resolve("second", {"act_unknown": "yes"}, resolved_by="approver-7")
        assert [refusal.code for refusal in await viewer.refusals("second")] == ["unknown_activity"]
        drafted = await approver.draft_answer("second", {question.activity_id: "yes"}, answered_by="approver-8")
        assert drafted.resolution is not None
        assert (await approver.wait("second", timeout=30)).status == "completed"
        await submitter.submit("workshop", {"value": "ask"}, run_id="third", thread_id="t")
        await submitter.wait("third", timeout=30)
        assert (await submitter.cancel("third")).status == "cancelled"

        forked = await (await client_of("runner")).fork("ask", at=0, new_run_id="forked")
        await forked.wait(timeout=30)
        config = {"configurable": {"thread_id": "t2"}}
        out = await app.ainvoke({"value": "nothing"}, config)
        assert out["seen"] == ["nothing"]
        assert (await app.aget_state(config)).values["seen"] == ["nothing"]

    assert {each.run_id for each in await viewer.list_runs()} >= {"ask", "expire", "fail", "sleep", "work", "second", "third", "forked"}
    assert [event.type.value for event in await viewer.history("ask")][-1] == "run.completed"
    assert [said.role for said in await viewer.transcript("t")]
    assert await viewer.unserved_runs() == []
    await app.aclose()
    assert {name for _, name, _ in commands.sent} <= _EVERYWHERE
    assert {where for where, _, _ in commands.sent} <= {database, "admin"}
    stages = {stage for _, name, command in commands.sent if name == "aggregate" for each in command["pipeline"] for stage in each}
    assert stages <= _STAGES


def _try(database: Any, action: str, collection: str) -> None:
    target = database[collection]
    match action:
        case "find":
            target.find_one({"_id": "nobody"})
        case "changeStream":
            target.watch().close()
        case "insert":
            target.insert_one({"_id": "a document that no validator takes"})
        case "update":
            target.update_one({"_id": "nobody"}, {"$set": {"status": "completed"}})
        case "remove":
            target.delete_one({"_id": "nobody"})


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_do_what_the_table_says_and_nothing_else(role: str, secured: SecuredMongo, database: str) -> None:
    """On every collection and for every action: so no role changes an event or a resolution, and a viewer writes nothing."""
    allowed = set()
    with pymongo.MongoClient[Any](secured.user(database, role)) as client:
        for collection in TABLE:
            for action in _ACTIONS:
                try:
                    _try(client[database], action, collection)
                except OperationFailure as error:
                    if error.code == 13:
                        continue
                allowed.add((collection, action))
        for forbidden in (
            {"collMod": "runs", "validator": {}},
            {"drop": "runs"},
            {"createRole": "x", "privileges": [], "roles": []},
            {"dropDatabase": 1},
        ):
            with pytest.raises(OperationFailure, match="not authorized"):
                client[database].command(forbidden)
        with pytest.raises(OperationFailure, match="not authorized"):
            client["another"]["runs"].find_one()
    assert allowed == {(collection, action) for collection, roles in TABLE.items() for action in roles.get(role, "").split()}
    if role != "janitor":
        append_only = {action for collection, action in allowed if collection in ("activity_events", "resolutions")}
        assert append_only <= {"find", "insert"}


def test_every_collection_and_view_is_in_the_table() -> None:
    """A collection that is added to the schema has to be given to somebody."""
    assert {*schema.VALIDATORS, *schema.VIEWS, "meta"} <= set(TABLE)
    assert all(set(roles) <= set(ROLES) for roles in TABLE.values())


async def test_a_refused_user_hears_which_role_is_missing(client_of: Callable[..., Awaitable[DurableClient]], database: str) -> None:
    """The library's error names the action, the collection and the roles that allow it, and nothing is left behind."""
    viewer, approver, submitter = [await client_of(role) for role in ("viewer", "approver", "submitter")]
    await submitter.submit("workshop", {"card": "4711"}, run_id="waiting")
    for refused in (viewer, approver):
        with pytest.raises(NotPermitted) as raised:
            await refused.submit("workshop", {"card": "4711"}, run_id="mine")
        assert (raised.value.action, raised.value.collection, raised.value.roles) == ("insert", "threads", ["submitter", "runner"])
        assert "role submitter or runner" in str(raised.value)
        assert "4711" not in str(raised.value)
    for refused in (viewer, approver):
        with pytest.raises(NotPermitted) as raised:
            await refused.prune(older_than=timedelta())
        assert raised.value.roles == ["janitor"]
    with pytest.raises(NotPermitted) as raised:
        await viewer.cancel("waiting")
    assert raised.value.collection == "runs"
    found = await viewer.list_runs()
    assert [(each.run_id, each.status) for each in found] == [("waiting", "pending")]
    assert (await approver.cancel("waiting")).status == "cancelled"
    assert await (await client_of("janitor")).prune(older_than=timedelta()) == ["waiting"]
    assert await viewer.list_runs() == []


async def test_an_answer_takes_the_right_to_answer(client_of: Callable[..., Awaitable[DurableClient]], driver_of: Any, database: str) -> None:
    """Neither who looks nor who starts runs can resolve one; the question stays open for an approver."""
    app = _workshop(driver_of("runner"), database, Broken())
    out = await app.ainvoke({"value": "ask"}, {"configurable": {"thread_id": "t"}}, run_id="ask")
    answers = {out["__interrupt__"][0].id: "yes"}
    for role in ("viewer", "submitter"):
        with pytest.raises(NotPermitted) as refused:
            await (await client_of(role)).resolve("ask", answers)
        assert "approver" in refused.value.roles
    assert (await (await client_of("viewer")).get_run("ask")).status == "suspended"
    await (await client_of("approver")).resolve("ask", answers)
    await app.aclose()


async def test_a_database_that_is_not_set_up_says_who_can(secured: SecuredMongo, database: str) -> None:
    """A runner that finds no schema, and may not make one, is told of `mongo-durable init`."""
    uri = secured.user(database, "runner")
    with pymongo.MongoClient[Any](secured.root_uri) as root:
        for name in root[database].list_collection_names(filter={"name": {"$not": {"$regex": "^system"}}}):
            root[database].drop_collection(name)
    app = one_node(App("workshop", uri=uri, database=database), lambda _: {})
    with pytest.raises(ConfigurationError, match="mongo-durable init"):
        await app.ainvoke({}, {"configurable": {"thread_id": "t"}})
    await app.aclose()


def test_init_makes_the_roles_and_brings_them_up_to_date(secured: SecuredMongo, database: str) -> None:
    """`init --roles` may be repeated; a role that somebody widened has its own rights again; it shows how to make a user."""
    environment = {"MONGO_DURABLE_URI": secured.root_uri, "MONGO_DURABLE_DATABASE": database}
    with pymongo.MongoClient[Any](secured.root_uri) as root:
        root[database].command({"updateRole": "viewer", "privileges": [], "roles": ["readWrite"]})
        root[database].command("dropRole", "janitor")
        ended = CliRunner().invoke(command_line, ["init", "--roles"], env=environment)
        assert ended.exit_code == 0, ended.output
        assert "viewer, approver, submitter, runner, janitor" in ended.stdout
        assert f'db.getSiblingDB("{database}").createUser(' in ended.stdout
        found = root[database].command({"rolesInfo": list(ROLES), "showPrivileges": True})["roles"]
        assert sorted(each["role"] for each in found) == sorted(ROLES)
        for each in found:
            assert each["roles"] == []
            made = {(each["resource"]["collection"], frozenset(each["actions"])) for each in each["privileges"]}
            assert made == {(given["resource"]["collection"], frozenset(given["actions"])) for given in privileges(each["role"], database)}
    for role in ("runner", "viewer"):
        refused = CliRunner().invoke(command_line, ["init", "--roles"], env={**environment, "MONGO_DURABLE_URI": secured.user(database, role)})
        assert refused.exit_code == 1
        assert "not_permitted" in refused.stderr
