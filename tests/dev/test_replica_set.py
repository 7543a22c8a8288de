"""DevMongo: what it starts is a replica set, and what it started is gone afterwards, however it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pymongo
import pytest

from mongo_durable.dev import DevMongo, replica_set
from mongo_durable.errors import ConfigurationError

WAIT_S = 60.0


def eventually(holds: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds that another process brings about."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {WAIT_S:.0f} s in vain for {what}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether a process has this id. One that ended and was not collected yet does not count as running."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout.strip()
    return bool(found) and not found.startswith("Z")


@pytest.fixture
def occupied() -> Iterator[Callable[[int], None]]:
    """Takes a port, as another program would, until the end of the test. It hangs up on whoever calls."""
    servers: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def hang_up(server: socket.socket) -> None:
        while True:
            try:
                server.accept()[0].close()
            except OSError:
                return  # closed by the end of the test

    def occupy(port: int) -> None:
        server = socket.create_server(("127.0.0.1", port))
        servers.append(server)
        threads.append(threading.Thread(target=hang_up, args=(server,)))
        threads[-1].start()

    yield occupy
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
    for thread in threads:
        thread.join()


def insert(uri: str, **document: object) -> None:
    with pymongo.MongoClient(uri) as client:
        client.get_database("kept").get_collection("things", write_concern=pymongo.WriteConcern("majority")).insert_one(document)


def count(uri: str) -> int:
    with pymongo.MongoClient(uri) as client:
        return client.kept.things.count_documents({})


def test_it_is_a_primary_with_transactions_and_change_streams() -> None:
    """The connection string is good for what the library needs: a primary, transactions, change streams."""
    with DevMongo() as uri, pymongo.MongoClient(uri) as client:
        assert client.admin.command("hello")["isWritablePrimary"] is True
        things = client.kept.things
        with things.watch() as stream:
            with client.start_session() as session:
                session.with_transaction(lambda transaction: things.insert_many([{"n": 1}, {"n": 2}], session=transaction))
            assert [stream.next()["fullDocument"]["n"] for _ in range(2)] == [1, 2]


def test_stopping_leaves_no_process_and_no_folder() -> None:
    """After the `with` block the server is gone and so is its folder."""
    mongo = DevMongo()
    with mongo:
        (pid,), folder = mongo.pids, mongo.folder
        assert is_running(pid)
        assert folder.is_dir()
    assert not is_running(pid)
    assert not folder.exists()
    with pytest.raises(ConfigurationError, match="not running"):
        _ = mongo.uri


def test_it_can_be_started_again() -> None:
    """One object may be started after it was stopped, and only then."""
    mongo = DevMongo()
    with mongo:
        with pytest.raises(ConfigurationError, match="running already"):
            mongo.start()
    mongo.stop()
    with mongo as uri:
        assert count(uri) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_killed_parent_leaves_nothing_behind(number: signal.Signals) -> None:
    """The servers and their folder go with the process that started them, also when it could run no code of its own any more."""
    program = "from mongo_durable.dev import DevMongo; m = DevMongo(); m.start(); print(m.pids[0], m.folder, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        assert is_running(int(pid))
        assert Path(folder).is_dir()
        parent.send_signal(number)
        assert parent.wait() == -number
    eventually(lambda: not is_running(int(pid)), "the server to end")
    eventually(lambda: not Path(folder).exists(), "the folder to be removed")


def test_a_forked_child_does_not_keep_the_servers_alive() -> None:
    """A child that holds a copy of the parent's open files does not delay the clean-up, and leaving its copy of the block stops nothing."""
    program = """
import os, sys, time
from mongo_durable.dev import DevMongo
mongo = DevMongo()
with mongo:
    stopper = os.fork()
    if stopper == 0:
        mongo.stop()
        os._exit(0)
    os.waitpid(stopper, 0)
    mongo.raise_if_dead()
    holder = os.fork()
    if holder == 0:
        time.sleep(600)
    print(mongo.pids[0], holder, flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, holder = map(int, parent.stdout.readline().split())
        try:
            parent.kill()
            parent.wait()
            eventually(lambda: not is_running(pid), "the server to end")
            assert is_running(holder)
        finally:
            os.kill(holder, signal.SIGKILL)


def test_a_server_that_does_not_start_shows_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reason why a server gave up is in the error."""
    program = tmp_path / "mongod"
    program.write_text("#!/bin/sh\necho the disk is made of cheese\nexit 7\n")
    program.chmod(0o755)
    monkeypatch.setenv("MONGO_DURABLE_MONGOD", str(program))
    with pytest.raises(ConfigurationError, match=r"exit code 7(?s:.*)the disk is made of cheese"):
        DevMongo().start()


def test_a_program_that_cannot_be_executed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file that is executable and no program is an error that names it."""
    program = tmp_path / "mongod"
    program.write_bytes(b"\x7fELF not really")
    program.chmod(0o755)
    monkeypatch.setenv("MONGO_DURABLE_MONGOD", str(program))
    with pytest.raises(ConfigurationError, match=str(program)):
        DevMongo().start()


def test_a_taken_port_is_an_error(occupied: Callable[[int], None]) -> None:
    """A port that was asked for and is in use is an error that names it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    occupied(port)
    with pytest.raises(ConfigurationError, match=str(port)):
        DevMongo(port=port).start()


def test_a_port_lost_to_another_process_is_replaced(monkeypatch: pytest.MonkeyPatch, occupied: Callable[[int], None]) -> None:
    """A free port that somebody takes before the server binds it costs one more try and nothing else."""
    choose, chosen = replica_set._free_port, []

    def choose_and_lose_the_first() -> int:
        chosen.append(choose())
        if len(chosen) == 1:
            occupied(chosen[0])
        return chosen[-1]

    monkeypatch.setattr(replica_set, "_free_port", choose_and_lose_the_first)
    mongo = DevMongo()
    with mongo as uri:
        insert(uri, n=1)
        assert mongo.ports == (chosen[1],)


def test_a_given_folder_keeps_its_data(tmp_path: Path) -> None:
    """Data in a given folder is there at the next start, on the same port."""
    first = DevMongo(path=tmp_path / "data")
    with first as uri:
        insert(uri, n=1)
        ports = first.ports
    second = DevMongo(path=tmp_path / "data")
    with second as uri:
        assert second.ports == ports
        assert count(uri) == 1


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_given_folder_moves_to_other_ports(tmp_path: Path, occupied: Callable[[int], None], nodes: int) -> None:
    """Where the ports of the last start are taken, the set is found on new ones with its data, and can be written to."""
    first = DevMongo(path=tmp_path, nodes=nodes)
    with first as uri:
        insert(uri, n=1)
        ports = first.ports
    for port in ports:
        occupied(port)
    second = DevMongo(path=tmp_path, nodes=nodes)
    with second as uri:
        assert not set(second.ports) & set(ports)
        insert(uri, n=2)
        assert count(uri) == 2


def test_a_folder_of_another_size_is_refused(tmp_path: Path) -> None:
    """A folder with one node is not started as three."""
    with DevMongo(path=tmp_path):
        pass
    with pytest.raises(ConfigurationError, match="nodes=1"):
        DevMongo(path=tmp_path, nodes=3).start()


def test_three_nodes_elect_a_new_primary() -> None:
    """After the primary was killed the other two go on, lose nothing that was acknowledged, and take it back."""
    mongo = DevMongo(nodes=3)
    with mongo as uri:
        insert(uri, n=1)
        killed = mongo.primary()
        assert killed is not None
        old_pid = mongo.pids[killed]
        mongo.kill(killed)
        assert not is_running(old_pid)
        eventually(lambda: mongo.primary() is not None, "a new primary")
        assert mongo.primary() != killed
        insert(uri, n=2)
        mongo.restart(killed)
        assert mongo.pids[killed] != old_pid
        assert count(uri) == 2


def test_a_paused_node_answers_nothing_and_goes_on() -> None:
    """A paused server keeps its connections and answers none; resumed, it is the server that it was."""
    mongo = DevMongo()
    with mongo as uri, pymongo.MongoClient(uri, socketTimeoutMS=500, serverSelectionTimeoutMS=500) as client:
        client.kept.things.insert_one({"n": 1})
        mongo.pause(0)
        assert mongo.primary() is None
        with pytest.raises(pymongo.errors.PyMongoError):
            client.kept.things.find_one()
        mongo.resume(0)
        eventually(lambda: mongo.primary() == 0, "the primary to be back")
        assert count(uri) == 1


def test_a_restarted_single_node_keeps_its_data() -> None:
    """Killed and restarted, or restarted while it runs, the one node of a set comes back with what it had acknowledged."""
    mongo = DevMongo()
    with mongo as uri:
        insert(uri, n=1)
        mongo.kill(0)
        mongo.restart(0)
        assert count(uri) == 1
        mongo.restart(0)
        assert count(uri) == 1


def test_a_server_that_dies_by_itself_is_noticed() -> None:
    """`raise_if_dead` tells a crash from a kill that was asked for."""
    mongo = DevMongo()
    with mongo:
        mongo.raise_if_dead()
        os.kill(mongo.pids[0], signal.SIGKILL)
        noticed: list[str] = []

        def is_noticed() -> bool:
            try:
                mongo.raise_if_dead()
            except ConfigurationError as error:
                noticed.append(str(error))
            return bool(noticed)

        eventually(is_noticed, "the death to be noticed")
        assert "by signal 9" in noticed[0]


def test_test_commands_are_allowed_on_request() -> None:
    """Fail points can be set where they were asked for, and only there."""
    off = {"configureFailPoint": "failCommand", "mode": "off"}
    with DevMongo(test_commands=True) as uri, pymongo.MongoClient(uri) as client:
        assert client.admin.command(off)["ok"] == 1
    with DevMongo() as uri, pymongo.MongoClient(uri) as client, pytest.raises(pymongo.errors.OperationFailure, match="no such"):
        client.admin.command(off)


@pytest.mark.parametrize("nodes", [0, 4])
def test_the_number_of_nodes_is_checked(nodes: int) -> None:
    """One to three nodes, nothing else."""
    with pytest.raises(ConfigurationError, match="1 to 3"):
        DevMongo(nodes=nodes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_the_command_prints_the_uri_and_ends_cleanly(number: signal.Signals) -> None:
    """`python -m mongo_durable.dev` prints one line, serves, and on Ctrl-C or SIGTERM leaves nothing behind."""
    command = [sys.executable, "-m", "mongo_durable.dev"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        uri = process.stdout.readline().strip()
        insert(uri, n=1)
        with pymongo.MongoClient(uri) as client:
            pid = client.admin.command("serverStatus")["pid"]
        process.send_signal(number)
        out, err = process.communicate()
    assert (process.returncode, out, err) == (0, "", "")
    assert not is_running(pid)


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    """A set-up error of `python -m mongo_durable.dev` is a message, not a traceback."""
    environment = {**os.environ, "MONGO_DURABLE_MONGOD": str(tmp_path / "nowhere")}
    ended = subprocess.run([sys.executable, "-m", "mongo_durable.dev"], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert str(tmp_path / "nowhere") in ended.stderr
    assert "Traceback" not in ended.stderr
