"""The apps that a command is given, as `package.module:app`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from mongo_durable.langgraph.app import App


def load(targets: list[str]) -> list[App]:
    """The apps that `targets` name. The current directory is on the Python path, as for `python -m`.

    Raises:
        typer.BadParameter: One names none. An error inside the module itself is raised as it is, with its traceback.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return [_load(each) for each in targets]


def _load(target: str) -> App:
    """The App that `target` names.

    Raises:
        typer.BadParameter: It names none. An error inside the module itself is raised as it is, with its traceback.
    """
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute or module_name.startswith("."):
        raise typer.BadParameter(f"{target!r} is not of the form package.module:app")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise typer.BadParameter(f"{target!r}: there is no module {error.name!r} (looked in {os.getcwd()} and on the Python path)") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise typer.BadParameter(f"{target!r}: module {module_name!r} has no {attribute!r}")
        found = getattr(found, part)

    from mongo_durable.langgraph.app import App

    if not isinstance(found, App):
        raise typer.BadParameter(f"{target!r} is of type {type(found).__name__}, not a mongo_durable App")
    return found
