"""`mongo-durable dev`."""

from __future__ import annotations

import signal
from typing import Any

import pymongo

from tests.cli.conftest import Cli


def test_dev_serves_a_replica_set_until_it_is_told_to_stop(process: Any, tmp_path: Any) -> None:
    """The one line on stdout is the connection string of a set that takes writes; SIGTERM ends it well."""
    running = process("dev", "--path", str(tmp_path / "data"))
    uri = running.stdout.readline().strip()
    with pymongo.MongoClient(uri) as client:
        assert client["any"]["thing"].insert_one({}).acknowledged
    running.send_signal(signal.SIGTERM)
    rest, complaints = running.communicate(timeout=60)
    assert (running.returncode, rest, complaints) == (0, "", "")
    assert (tmp_path / "data").is_dir()


def test_dev_runs_one_to_three_servers(cli: Cli) -> None:
    """Another number of servers is wrong usage."""
    for number in ("0", "4"):
        assert cli("dev", "--nodes", number).exit_code == 2
