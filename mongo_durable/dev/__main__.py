"""`python -m mongo_durable.dev`: print the connection string of a throwaway replica set and run it until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import sys

from mongo_durable.dev.serve import serve
from mongo_durable.errors import ConfigurationError


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m mongo_durable.dev", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1, help="number of servers, 1 to 3 (default: 1)")
    parser.add_argument("--path", help="folder for the data, kept afterwards (default: a temporary one, removed)")
    parser.add_argument("--port", type=int, help="port of the first node (default: free ones)")
    parser.add_argument("--test-commands", action="store_true", help="allow the server's test commands, such as configureFailPoint")
    arguments = parser.parse_args()
    try:
        serve(nodes=arguments.nodes, path=arguments.path, port=arguments.port, test_commands=arguments.test_commands)
    except ConfigurationError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
