"""The command line, `mongo-durable`: one noun a file.

Exit codes: 0 done, also after Ctrl-C where that is how one leaves (`--watch`, `runner`, `dev`) · 1 refused or failed, with the reason and its code on
stderr · 2 wrong usage · 3 (`runner` alone) stopped, with attempts released · 130 interrupted by Ctrl-C anywhere else.
"""

from __future__ import annotations


def main() -> None:
    """Run the command that the process was called with."""
    from mongo_durable.cli.commands import app

    app(prog_name="mongo-durable")
