"""`mongo-durable init`."""

from __future__ import annotations

import pymongo

from tests.cli.conftest import Cli


def test_init_sets_a_database_up_and_may_be_repeated(cli: Cli, mongo_uri: str, database: str) -> None:
    """`init` makes collections, indexes and views, and does no harm the second time."""
    for _ in range(2):
        ended = cli("init")
        assert ended.exit_code == 0, ended.output
        assert database in ended.stdout
    with pymongo.MongoClient(mongo_uri) as client:
        names = set(client[database].list_collection_names())
        assert {"runs", "activity_events", "frontiers", "resolutions", "open_frontiers", "run_timeline"} <= names
        assert client[database]["activity_events"].index_information()["run_seq"]["unique"]
