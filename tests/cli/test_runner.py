"""`mongo-durable runner`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from mongo_durable import SyncDurableClient
from tests.cli.conftest import Cli, Desk, until

SHOP = """
import asyncio
from typing import TypedDict

from langgraph.graph import START, StateGraph

from mongo_durable import App

app = App("shop")
other = "not an app"


class State(TypedDict, total=False):
    is_held: bool
    bought: str


@app.activity
async def buy(is_held: bool) -> str:
    print("buying", flush=True)
    if is_held:
        await asyncio.Event().wait()
    return "a desk"


@app.entrypoint
def build():
    async def node(state: State) -> State:
        return {"bought": await buy(state["is_held"])}

    graph = StateGraph(State)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    return graph
"""


@pytest.fixture
def shop(tmp_path: Path) -> None:
    """A module of a user, in the folder in which the runner is started."""
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "broken.py").write_text("import shop_that_is_not_there\n")


@pytest.mark.usefixtures("shop")
def test_a_runner_executes_and_drains(process: Any, client: SyncDurableClient) -> None:
    """Runs are executed until SIGTERM; with nothing left running the exit code is 0."""
    running = process("runner", "shop:app", "--concurrency", "2")
    handles = [client.submit("shop", {"is_held": False}) for _ in range(3)]
    for handle in handles:
        assert handle.wait(timeout=60).output == {"is_held": False, "bought": "a desk"}
    running.send_signal(signal.SIGTERM)
    _, complaints = running.communicate(timeout=60)
    assert running.returncode == 0, complaints
    assert complaints.count("attempt 1 begins") == complaints.count("attempt 1 ends: completed") == 3
    assert "\x1b" not in complaints


@pytest.mark.usefixtures("shop")
def test_a_terminal_shows_what_a_runner_does(terminal: Any, desk: Desk, clerk: SyncDurableClient) -> None:
    """What is executed now, with its run; what the attempts before came to; log lines and what user code prints above it. Ctrl-C drains."""
    screen = terminal("runner", "shop:app", "--grace", "0.1")
    screen.until("0 running")
    clerk.submit("shop", {"is_held": False}, run_id="sold")
    screen.until("0 running · 1 completed")
    clerk.submit("shop", {"is_held": True}, run_id="held")
    screen.until("attempt 1  run held  shop")
    screen.until("1 running · 1 completed")
    screen.interrupt()
    assert screen.ended() == 3
    assert "INFO mongo_durable.runner.runner: run sold: attempt 1 ends: completed" in screen.text
    assert "buying\n" in screen.text
    assert "Traceback" not in screen.text


@pytest.mark.usefixtures("shop")
def test_a_runner_releases_at_its_deadline(process: Any, client: SyncDurableClient) -> None:
    """An attempt that does not end in time is given back at once, and the exit code says so: 3."""
    handle = client.submit("shop", {"is_held": True}, run_id="held")
    running = process("runner", "shop:app", "--grace", "0.2")
    assert running.stdout.readline() == "buying\n"
    running.send_signal(signal.SIGTERM)
    _, complaints = running.communicate(timeout=60)
    assert running.returncode == 3, complaints
    until(lambda: handle.get().status == "ready")


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("shop", "form package.module:app"),
        ("shop:", "form package.module:app"),
        ("shop:nothing", "has no 'nothing'"),
        ("shop:other", "of type str"),
        ("nowhere.shop:app", "no module 'nowhere'"),
        ("shop.inner:app", "no module 'shop.inner'"),
        ("./shop.py:app", "form package.module:app"),
    ],
)
def test_what_is_no_app_is_wrong_usage(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, why: str) -> None:
    """A target that names no App says which part of it is wrong, with exit code 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    ended = cli("runner", target)
    assert ended.exit_code == 2, ended.output
    # The box around the message breaks it at any blank.
    said = "".join(ended.stderr.replace("│", "").split())
    assert why.replace(" ", "") in said


@pytest.mark.usefixtures("shop")
def test_a_fault_in_the_users_module_keeps_its_traceback(process: Any) -> None:
    """A module that cannot be imported because of what is in it is the user's to debug: nothing is hidden."""
    _, complaints = (running := process("runner", "broken:app")).communicate(timeout=60)
    assert running.returncode == 1
    assert "Traceback" in complaints
    assert "No module named 'shop_that_is_not_there'" in complaints


def test_a_runner_needs_something_to_execute(cli: Cli) -> None:
    """Without an app the usage is wrong."""
    assert cli("runner").exit_code == 2
