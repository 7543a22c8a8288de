"""A real throwaway MongoDB replica set for development and tests.

    from mongo_durable.dev import DevMongo

    with DevMongo() as uri:
        ...

`python -m mongo_durable.dev` and `mongo-durable dev` run one until they are interrupted.
"""

from __future__ import annotations

from mongo_durable.dev.mongod import find_mongod
from mongo_durable.dev.replica_set import DevMongo
from mongo_durable.dev.serve import serve

__all__ = ["DevMongo", "find_mongod", "serve"]
