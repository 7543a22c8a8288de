"""The demo, as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys

import pymongo

from tests.support.demos import ROOT, demo


def _database(printed: str) -> str:
    named = re.search(r"^in database (\S+)$", printed, re.MULTILINE)
    assert named is not None, printed
    return named[1]


def test_the_demo_proves_its_claims(mongo_uri: str) -> None:
    """Two workers are killed by SIGKILL, one inside a tool; there is one order, no recorded effect ran again, and the demo checked all of it."""
    ended = demo(mongo_uri)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    printed = ended.stdout
    assert "proved: killed twice, one order" in printed
    assert "model calls: 4 made, 4 recorded; 5 answers were taken from the history" in printed
    assert re.search(r"^place_order +act_\w+ +2, 3 +1 × +killed inside in attempt 2", printed, re.MULTILINE)
    assert re.search(r"^quote_price +act_\w+ +1 +1 × +ran once", printed, re.MULTILINE)
    assert re.search(r"^1 +A \(\d+\) +nothing +model, quote_price, model, request_approval +suspended on frontier 1", printed, re.MULTILINE)
    assert re.search(r"^2 +B \(\d+\) .* killed inside place_order; attempt 3 took over", printed, re.MULTILINE)
    assert re.search(r"^3 +C \(\d+\) .* completed", printed, re.MULTILINE)
    assert "\x1b" not in printed, "colours are for terminals"
    with pymongo.MongoClient(mongo_uri) as client:
        assert _database(printed) not in client.list_database_names(), "its database is dropped"


def test_the_printed_commands_are_true(mongo_uri: str) -> None:
    """What the demo says that one can type works: the kept run can be shown, and takes the same answer again."""
    ended = demo(mongo_uri, "--keep")
    database = _database(ended.stdout)
    try:
        assert ended.returncode == 0, ended.stdout + ended.stderr
        kept = re.search(r"^kept: mongo-durable show (\S+) --database (\S+)$", ended.stdout, re.MULTILINE)
        answer = re.search(r"--answer '(.*)' --by ada$", ended.stdout, re.MULTILINE)
        assert kept is not None
        assert answer is not None
        assert kept[2] == database
        for arguments in (["show", kept[1]], ["resolve", kept[1], "--answer", answer[1], "--by", "ada"]):
            command = [sys.executable, "-m", "mongo_durable.cli", *arguments, "--uri", mongo_uri, "--database", database]
            again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
            assert again.returncode == 0, again.stderr
    finally:
        with pymongo.MongoClient(mongo_uri) as client:
            client.drop_database(database)


def test_the_demo_needs_no_server() -> None:
    """Without a URI it brings a throwaway replica set of its own."""
    ended = demo(None)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "proved:" in ended.stdout


def test_keep_needs_a_server_that_stays() -> None:
    """--keep without --uri would keep nothing: wrong usage."""
    ended = demo(None, "--keep")
    assert ended.returncode == 2
    assert "--uri" in ended.stderr


def test_a_model_that_does_not_exist_is_refused_before_anything_starts() -> None:
    """A wrong --model is one line, and no server or worker was started for it."""
    ended = demo(None, "--model", "nobody:nothing")
    assert ended.returncode == 1
    assert "--model" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "worker" not in ended.stdout
