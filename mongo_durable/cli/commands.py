"""All commands, and what happens to an error of ours. A command imports what it works with when it runs: `--help` waits for no driver."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mongo_durable.cli import demo, dev, doctor, export, frontiers, mongosh, prune, replay, resolve, runner, runs, schema
from mongo_durable.cli.database import what_to_do
from mongo_durable.cli.output import complain
from mongo_durable.errors import DurableError

INTERRUPTED = 130
"""Exit code: Ctrl-C, where that is no way to leave; as shells count it."""


class _Commands(TyperGroup):
    """Turns errors of mongo_durable into a line on stderr and exit code 1, and Ctrl-C into exit code 130. Any other exception is a fault, and keeps
    its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DurableError as error:
            hint = what_to_do(error)
            complain(f"{error}; {hint}" if hint is not None else str(error))
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            complain("interrupted")
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    name="mongo-durable",
    cls=_Commands,
    help="Durable execution for LangGraph on MongoDB: look at runs, answer them, execute them.",
    no_args_is_help=True,
    # The usual traceback: the rich one is longer, and would show values of frames where it is told to.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from mongo_durable import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)] = False,
) -> None:
    pass


app.command("demo")(demo.demo)
app.command("dev")(dev.dev)
app.command("init")(schema.init)
app.command("runner")(runner.runner)
app.command("runs")(runs.list_runs)
app.command("show")(runs.show)
app.command("frontiers")(frontiers.list_frontiers)
app.command("resolve")(resolve.resolve)
app.command("token")(resolve.token)
app.command("cancel")(runs.cancel)
app.command("retry")(runs.retry)
app.command("doctor")(doctor.doctor)
app.command("mongosh-script")(mongosh.mongosh_script)
app.command("export")(export.export)
app.command("replay")(replay.replay)
app.command("prune")(prune.prune)
