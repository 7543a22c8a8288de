"""`mongo-durable mongosh-script`: where the script for mongosh is."""

from __future__ import annotations

from pathlib import Path

import typer

# In the wheel it is part of the package; a checkout has it with the other scripts.
_PLACES = (Path(__file__).parents[1] / "mongosh" / "durable.js", Path(__file__).parents[2] / "scripts" / "mongosh" / "durable.js")


def mongosh_script() -> None:
    """Print the path of durable.js, for `mongosh URI --file "$(mongo-durable mongosh-script)" --shell`."""
    typer.echo(next(place for place in _PLACES if place.exists()))
