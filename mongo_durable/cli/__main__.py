"""`python -m mongo_durable.cli` is `mongo-durable`."""

from mongo_durable.cli import main

main()
