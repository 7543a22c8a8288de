"""`mongo-durable demo`: the library at work, in one command."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import signal
from typing import Annotated

import typer

from mongo_durable.cli.database import URI_VARIABLE, Uri
from mongo_durable.cli.output import complain, console
from mongo_durable.errors import ConfigurationError


def demo(
    uri: Uri = None,
    model: Annotated[
        str | None, typer.Option(metavar="PROVIDER:NAME", help="A real chat model, by LangChain's init_chat_model.", show_default=False)
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="A deep agent with two sub-agents; needs mongo_durable[deepagents].")] = False,
    procurement: Annotated[
        bool, typer.Option("--procurement", help="Purchases that people have to approve, with everything that can go wrong.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the demo's database; needs --uri.")] = False,
) -> None:
    """Run an agent whose workers are killed twice, and prove that it still buys exactly one desk.

    On a database of its own: of the given replica set, else of a throwaway one. The scripted model needs no key. Exit code 1 if a claim did not hold.
    """
    if keep and not uri:
        raise typer.BadParameter(f"--keep needs --uri (or {URI_VARIABLE}): the throwaway replica set goes with the demo")

    if deep and procurement:
        raise typer.BadParameter("--deep and --procurement are two stories: tell one after the other")
    if model is not None and (deep or procurement):
        raise typer.BadParameter("--deep and --procurement have no use for a model: leave --model out")
    if deep and importlib.util.find_spec("deepagents") is None:
        raise ConfigurationError("demo --deep needs the package deepagents: install mongo_durable[deepagents]")
    from mongo_durable.demo import deep_story, procurement_story
    from mongo_durable.demo.story import tell

    if model is not None:
        from mongo_durable.demo.model import named_model

        named_model(model)  # refused here, before anything is started
    out = console()
    # Told to stop, it ends like on Ctrl-C: with its workers ended and its database dropped.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    with contextlib.ExitStack() as stack:
        if not uri:
            from mongo_durable.dev import DevMongo

            out.print("starting a throwaway replica set", style="dim")
            uri = stack.enter_context(DevMongo())
        if procurement:
            telling = procurement_story.tell(out, uri, is_kept=keep)
        else:
            telling = deep_story.tell(out, uri, is_kept=keep) if deep else tell(out, uri, model=model, is_kept=keep)
        found = asyncio.run(telling)
    for fault in found:
        complain(f"not as claimed: {fault}")
    if found:
        raise typer.Exit(1)
