"""`mongo-durable dev`: a throwaway replica set on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def dev(
    nodes: Annotated[int, typer.Option(min=1, max=3, help="Number of servers.")] = 1,
    path: Annotated[Path | None, typer.Option(help="Folder for the data, kept afterwards. Without it: a temporary one.", show_default=False)] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the first server, the others follow. Without it: free ones.", show_default=False)
    ] = None,
) -> None:
    """Run a throwaway MongoDB replica set until Ctrl-C. Its connection string is the one line on stdout."""
    from mongo_durable.dev import serve

    def announce(uri: str) -> None:
        print(uri, flush=True)
        if sys.stdout.isatty():
            typer.echo(f"Ctrl-C ends it. In another terminal:\n  export MONGO_DURABLE_URI='{uri}'", err=True)

    serve(nodes=nodes, path=path, port=port, announce=announce)
