"""A real MongoDB replica set that is gone when its user is.

`DevMongo` starts one to three `mongod` processes on free loopback ports, initiates the replica set and waits until it can take writes. The servers
are children of a supervisor (see `supervisor.py`), so that neither a crash nor a SIGKILL of this process leaves any behind.

A folder given by `path` keeps its data between starts. Its replica set names the ports of the last start, which are taken again where they are free;
where they are not, the set is reconfigured to the new ones.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pymongo
from pymongo.errors import ConnectionFailure, OperationFailure, PyMongoError

from mongo_durable.dev.mongod import find_mongod
from mongo_durable.errors import ConfigurationError

REPLICA_SET = "rs0"

_HOST = "127.0.0.1"
_MAX_NODES = 3
_START_S = 120.0
_STOP_S = 60.0
_POLL_S = 0.02
_PORT_TRIES = 5
_PORT_RECORD = "dev-mongo.json"
_LOG_NAME = "mongod.log"
_LOG_LINES = 5
_LOG_LINE_LENGTH = 400

# An election within seconds: with the server's default of ten a test of failover mostly waits. Not less: a busy machine would hold elections of its
# own accord.
_SETTINGS = {"electionTimeoutMillis": 3000, "heartbeatIntervalMillis": 500}

# Codes of the server
_ALREADY_INITIALIZED = 23
_NOT_YET_INITIALIZED = 94


class DevMongo:
    """A throwaway MongoDB replica set on this machine, for development and tests.

        with DevMongo() as uri:
            ...

    Needs Linux or macOS, and a `mongod`: see `find_mongod`. It has no authentication and listens on the loopback interface alone. Not for data that
    matters.

    Args:
        nodes: Number of servers, 1 to 3. With three, one may die and the others elect a new primary.
        path: Folder for the data, made if missing, kept afterwards. None means a temporary folder that is removed.
        port: Port of the first node, the others follow it. None means free ports.
        test_commands: Allow the server's test commands, such as `configureFailPoint`.
    """

    def __init__(self, *, nodes: int = 1, path: str | os.PathLike[str] | None = None, port: int | None = None, test_commands: bool = False) -> None:
        if not 1 <= nodes <= _MAX_NODES:
            raise ConfigurationError(f"DevMongo runs 1 to {_MAX_NODES} nodes, not {nodes}.")
        self._node_count = nodes
        self._path = None if path is None else Path(path).absolute()
        self._port = port
        self._test_commands = test_commands
        self._supervisor: _Supervisor | None = None
        self._folder: Path | None = None
        self._mongod: Path | None = None
        self._ports: list[int] = []
        self._pids: list[int] = []
        self._absent: set[int] = set()  # killed or paused by the caller: nobody waits for these

    def __enter__(self) -> str:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def uri(self) -> str:
        """Connection string of the running replica set. Transactions and change streams work through it."""
        self._running()
        hosts = ",".join(f"{_HOST}:{port}" for port in self._ports)
        return f"mongodb://{hosts}/?replicaSet={REPLICA_SET}"

    @property
    def ports(self) -> tuple[int, ...]:
        """Port of each node."""
        return tuple(self._ports)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process id of each node's `mongod`, in the order of `ports`. That of a killed node is its last one."""
        return tuple(self._pids)

    @property
    def folder(self) -> Path:
        """Where the data is."""
        self._running()
        assert self._folder is not None
        return self._folder

    def start(self) -> str:
        """Start the servers and wait until the replica set takes writes.

        Returns:
            The connection string, as `uri`.

        Raises:
            ConfigurationError: No `mongod` was found, it did not start (its last log lines are in the message), or `path` holds another kind of set.
        """
        if self._supervisor is not None:
            raise ConfigurationError("This DevMongo is running already: use its uri, or make another one.")
        if sys.platform == "win32":
            raise ConfigurationError("DevMongo needs Linux or macOS: set MONGO_DURABLE_URI to a replica set instead.")
        self._mongod = find_mongod()
        if self._path is None:
            self._folder = Path(tempfile.mkdtemp(prefix="mongo-durable-"))
        else:
            self._folder = self._path
            self._folder.mkdir(parents=True, exist_ok=True)
        self._supervisor = _Supervisor(self._folder, temporary=self._path is None)
        try:
            self._start_nodes(self._recorded_ports(self._folder))
            self._wait("the replica set to be configured", self._is_configured)
            (self._folder / _PORT_RECORD).write_text(json.dumps({"ports": self._ports}) + "\n")
            self._wait("the replica set to settle", self._is_settled)
        except BaseException:
            self.stop()
            raise
        return self.uri

    def stop(self) -> None:
        """Stop the servers and remove a temporary folder. Stopping what is not running does nothing."""
        if self._supervisor is None:
            return
        supervisor, self._supervisor = self._supervisor, None
        self._folder = None
        self._ports, self._pids, self._absent = [], [], set()
        supervisor.close()

    def kill(self, node: int) -> None:
        """End a node as a crash would (SIGKILL), and wait until it is gone."""
        self._running().signal(node, signal.SIGKILL)
        self._absent.add(node)
        self._wait_for_exit(node)

    def pause(self, node: int) -> None:
        """Stop a node's execution (SIGSTOP): its connections stay open and nothing answers, as behind a broken network."""
        self._running().signal(node, signal.SIGSTOP)
        self._absent.add(node)

    def resume(self, node: int) -> None:
        """Let a paused node go on (SIGCONT)."""
        self._running().signal(node, signal.SIGCONT)
        self._absent.discard(node)

    def restart(self, node: int) -> None:
        """Start a killed node again, or shut a running one down first, and wait until it is back.

        Where more than half of the nodes run then, that includes a primary and every running node in step with it.
        """
        supervisor = self._running()
        self._absent.add(node)
        if supervisor.exit_code(node) is None:
            supervisor.signal(node, signal.SIGTERM)
            supervisor.signal(node, signal.SIGCONT)  # a paused server gets its SIGTERM only when it goes on
            self._wait_for_exit(node)
        self._launch(node, self._ports[node])
        self._wait(f"node {node} to answer", lambda: self._is_up(node))
        if 2 * len(self._present()) > self._node_count:
            self._wait("the replica set to settle", self._is_settled)

    def primary(self) -> int | None:
        """Number of the node that is primary now, or None while there is none."""
        self._running()
        return next((node for node in self._present() if self._is_primary(node)), None)

    def raise_if_dead(self) -> None:
        """Notice servers that ended by themselves.

        Raises:
            ConfigurationError: A node that was not killed through this object is not running. Its last log lines are in the message.
        """
        supervisor = self._running()
        for node in self._present():
            code = supervisor.exit_code(node)
            if code is not None:
                raise self._ended(node, code)

    # -- starting ---------------------------------------------------------------------------------------------------------------------------------

    def _running(self) -> _Supervisor:
        if self._supervisor is None:
            raise ConfigurationError("This DevMongo is not running: call start(), or use it in a `with` statement.")
        return self._supervisor

    def _present(self) -> list[int]:
        return [node for node in range(len(self._pids)) if node not in self._absent]

    def _recorded_ports(self, folder: Path) -> list[int]:
        record = folder / _PORT_RECORD
        if not record.exists():
            return []
        ports: list[int] = json.loads(record.read_text())["ports"]
        if len(ports) != self._node_count:
            raise ConfigurationError(
                f"{folder} holds a set of {len(ports)} node(s), not {self._node_count}: give another path, or nodes={len(ports)}."
            )
        return ports

    def _start_nodes(self, recorded: list[int]) -> None:
        for node in range(self._node_count):
            if self._port is not None:
                fixed = self._port + node
                if not _is_free(fixed):
                    raise ConfigurationError(f"Port {fixed} is in use: give DevMongo another one, or none to have it choose.")
                self._start_node(node, [fixed])
            else:
                wanted = [recorded[node]] if recorded and _is_free(recorded[node]) else []
                self._start_node(node, wanted)

    def _start_node(self, node: int, wanted: list[int]) -> None:
        """Start one node on the wanted port, or on a free one, again on another where somebody else took it in the meantime."""
        for _ in range(_PORT_TRIES):
            port = wanted[0] if wanted else _free_port()
            self._launch(node, port)
            try:
                self._wait(f"node {node} to answer", lambda: self._is_up(node))
            except ConfigurationError:
                lost_race = self._port is None and self._running().exit_code(node) is not None and not _is_free(port)
                if not lost_race:
                    raise
                wanted = []
            else:
                return
        raise ConfigurationError(f"No free port for a mongod in {_PORT_TRIES} tries: each was taken by another process first.")

    def _launch(self, node: int, port: int) -> None:
        assert self._folder is not None
        assert self._mongod is not None
        data = self._folder / f"node-{node}"
        data.mkdir(exist_ok=True)
        command = [
            str(self._mongod),
            *("--replSet", REPLICA_SET),
            *("--bind_ip", _HOST),
            *("--port", str(port)),
            *("--dbpath", str(data)),
            *("--wiredTigerCacheSizeGB", "0.25"),
            "--nounixsocket",  # a killed server would leave its socket file behind in the system's temporary folder
            "--quiet",
            *("--setParameter", "diagnosticDataCollectionEnabled=false"),
            *("--setParameter", "shutdownTimeoutMillisForSignaledShutdown=100"),  # not 15 s for clients to move on
        ]
        if self._test_commands:
            command += ["--setParameter", "enableTestCommands=1"]
        pid = self._running().start(node, command, self._log(node))
        self._ports[node : node + 1] = [port]
        self._pids[node : node + 1] = [pid]
        self._absent.discard(node)

    def _is_configured(self) -> bool:
        """Configure the replica set, unless it is. Asking again is harmless: what has been done is found done."""
        members = [{"_id": node, "host": f"{_HOST}:{port}"} for node, port in enumerate(self._ports)]
        with self._client(0) as client:
            try:
                client.admin.command("replSetInitiate", {"_id": REPLICA_SET, "members": members, "settings": _SETTINGS})
            except OperationFailure as error:
                if error.code != _ALREADY_INITIALIZED:
                    raise ConfigurationError(f"The replica set could not be initiated: {error.details}") from error
            except ConnectionFailure:
                return False  # a node drops its connections when its role changes
            else:
                return True
            try:
                config = client.admin.command("replSetGetConfig")["config"]
                if [member["host"] for member in config["members"]] != [member["host"] for member in members]:
                    # By force: no node finds itself in the old configuration, so there is no primary that could be asked.
                    config["members"] = [{**member, "host": moved["host"]} for member, moved in zip(config["members"], members, strict=True)]
                    config["version"] += 1
                    client.admin.command("replSetReconfig", config, force=True)
            except OperationFailure as error:
                if error.code != _NOT_YET_INITIALIZED:
                    raise ConfigurationError(f"The replica set could not be moved to its new ports: {error.details}") from error
                return False  # it knows that it has a configuration, and has not read it yet
            except ConnectionFailure:
                return False
            return True

    # -- watching ---------------------------------------------------------------------------------------------------------------------------------

    def _client(self, node: int) -> pymongo.MongoClient[dict[str, Any]]:
        # Long enough for a node that looks for itself at the ports of its last start, where a stranger may keep it waiting.
        timeouts: dict[str, Any] = {"serverSelectionTimeoutMS": 500, "connectTimeoutMS": 500, "socketTimeoutMS": 90_000}
        return pymongo.MongoClient(_HOST, self._ports[node], directConnection=True, **timeouts)

    def _is_up(self, node: int) -> bool:
        if not _is_listening(self._ports[node]):
            return False  # the driver would spend its whole server selection time to say the same
        with self._client(node) as client:
            try:
                status = client.admin.command("serverStatus", repl=0, metrics=0, locks=0, wiredTiger=0, tcmalloc=0)
            except PyMongoError:
                return False  # not yet: the caller asks again until its deadline, and sees whether the process ended
        # Another process's server may answer here, where ours lost the race for the port and is about to end.
        return int(status["pid"]) == self._pids[node]

    def _is_primary(self, node: int) -> bool:
        if self._running().exit_code(node) is not None:
            return False
        with self._client(node) as client:
            try:
                return bool(client.admin.command("hello")["isWritablePrimary"])
            except PyMongoError:
                return False  # a node that does not answer is not a primary that anybody can use

    def _is_settled(self) -> bool:
        primary = self.primary()
        if primary is None:
            return False
        with self._client(primary) as client:
            try:
                status = client.admin.command("replSetGetStatus")
            except PyMongoError:
                return False  # it stepped down or died just now: the caller asks again until its deadline
        states = [member["stateStr"] for member in status["members"]]
        return states.count("PRIMARY") == 1 and states.count("SECONDARY") == len(self._present()) - 1

    def _wait(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_S
        while not holds():
            self.raise_if_dead()
            if time.monotonic() > deadline:
                logs = "\n".join(self._log_tail(node) for node in range(len(self._pids)))
                raise ConfigurationError(f"Waited {_START_S:.0f} s in vain for {what}. The end of the logs:\n{logs}")
            time.sleep(_POLL_S)

    def _wait_for_exit(self, node: int) -> None:
        deadline = time.monotonic() + _STOP_S
        while self._running().exit_code(node) is None:
            if time.monotonic() > deadline:
                raise ConfigurationError(f"Node {node} did not end within {_STOP_S:.0f} s. The end of its log:\n{self._log_tail(node)}")
            time.sleep(_POLL_S)

    def _ended(self, node: int, code: int) -> ConfigurationError:
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return ConfigurationError(f"The mongod of node {node} ({self._mongod}) ended {how}. The end of its log:\n{self._log_tail(node)}")

    def _log(self, node: int) -> Path:
        assert self._folder is not None
        return self._folder / f"node-{node}" / _LOG_NAME

    def _log_tail(self, node: int) -> str:
        lines = self._log(node).read_text(errors="replace").splitlines()
        # The reason stands well before the end: a server that gives up still logs every part that it shuts down.
        reasons = [line for line in lines if '"s":"E"' in line or '"s":"F"' in line][-_LOG_LINES:]
        last = [line for line in lines[-_LOG_LINES:] if line not in reasons]
        return "\n".join(line[:_LOG_LINE_LENGTH] for line in [*reasons, *last]) or "(empty)"


class _Supervisor:
    """This process's end of the talk with `supervisor.py`."""

    def __init__(self, folder: Path, *, temporary: bool) -> None:
        script = Path(__file__).with_name("supervisor.py")
        # -I and -S: it needs the standard library alone, and nothing in the environment or in the working folder may change what it imports.
        command = [sys.executable, "-I", "-S", str(script), str(folder), "temporary" if temporary else "kept"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def start(self, node: int, command: list[str], log: Path) -> int:
        return int(self._ask({"do": "start", "node": node, "command": command, "log": str(log)})["pid"])

    def signal(self, node: int, number: signal.Signals) -> None:
        self._ask({"do": "signal", "node": node, "signal": int(number)})

    def exit_code(self, node: int) -> int | None:
        code: int | None = self._ask({"do": "poll", "node": node})["exit_code"]
        return code

    def close(self) -> None:
        """End the supervisor, and with it the servers."""
        if os.getpid() != self._owner:
            return  # a forked child leaves a `with` block that it inherited: the servers are its parent's
        self._requests.close()
        self._answers.close()
        self._process.wait()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            try:
                self._requests.write(json.dumps(request) + "\n")
                self._requests.flush()
                line = self._answers.readline()
            except BrokenPipeError:
                line = ""
        if not line:
            raise ConfigurationError("The process that watches over the servers of this DevMongo was ended by somebody else: start another DevMongo.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ConfigurationError(f"mongod could not be started: {answer['error']}")
        return answer


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server binds: a port whose old connections are only waiting out their time is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
        return True


def _is_listening(port: int) -> bool:
    try:
        socket.create_connection((_HOST, port), timeout=1).close()
    except OSError:
        return False
    return True
