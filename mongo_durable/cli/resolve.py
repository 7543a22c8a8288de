"""`mongo-durable resolve` and `token`: the answer to what a run asks, and a signed permission to give it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mongo_durable.cli.asking import Form, parse_json, show_question
from mongo_durable.cli.database import Database, Opened, Uri, complete_suspended_run, with_database
from mongo_durable.cli.durations import duration
from mongo_durable.cli.output import AsJson, age, complain, console, in_one_line, line, moment, print_json, printable
from mongo_durable.cli.run_tree import terms_of
from mongo_durable.errors import ConfigurationError, InvalidAnswer, RunNotSuspended, StaleGeneration, TokenInvalid

if TYPE_CHECKING:
    from rich.console import Console

    from mongo_durable.engine.tokens import Grant, SigningKeys
    from mongo_durable.snapshots import Draft, Frontier
    from mongo_durable.store.documents import Resolution

_Given = tuple[str | None, Any]  # activity id, if one was named, and value

# No JSON value begins like this.
_NAMED_ANSWER = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """How the answers are given."""

    by: str | None
    note: str | None
    generation: int | None
    digest: str | None
    is_draft: bool
    token: str | None
    audience: str | None


def resolve(
    run_id: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="The run that waits; not needed with --token.", show_default=False, autocompletion=complete_suspended_run),
    ] = None,
    answer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ACTIVITY_ID=JSON",
            help="One for each open question; JSON alone where there is exactly one question. Without any, they are asked for on the terminal.",
            show_default=False,
        ),
    ] = None,
    by: Annotated[str | None, typer.Option(help="Who answers; recorded.", show_default=False)] = None,
    note: Annotated[str | None, typer.Option(help="Why; recorded.", show_default=False)] = None,
    generation: Annotated[int | None, typer.Option(help="Refuse if the run has moved on from this generation.", show_default=False)] = None,
    digest: Annotated[str | None, typer.Option(help="Refuse if the questions are not those with this digest.", show_default=False)] = None,
    is_draft: Annotated[
        bool, typer.Option("--draft", help="Put the answers, if only some, into the draft; with the last one all go in. Needs --by.")
    ] = False,
    token: Annotated[str | None, typer.Option(help="Answer with a resume token, from `mongo-durable token`.", show_default=False)] = None,
    audience: Annotated[str | None, typer.Option(help="Whom the token is for, where it names an audience.", show_default=False)] = None,
    as_json: AsJson = False,
    uri: Uri = None,
    database: Database = None,
) -> None:
    """Answer all open questions of a run, at once. The same answers again are accepted and change nothing.

    Without --answer, each question is shown and asked on the terminal, by its response schema. What goes in is for exactly the questions that were
    shown: where the run has moved on meanwhile, nothing is answered.
    """
    given = [_parse(each) for each in answer or ()]
    options = _Options(by=by, note=note, generation=generation, digest=digest, is_draft=is_draft, token=token, audience=audience)
    _check(options, run_id, is_asked=not given)
    grant = _grant(token, run_id) if token is not None else None
    named = grant.run_id if grant is not None else str(run_id)

    try:
        if given:
            receipt = with_database(uri, database, lambda opened: _answer_given(opened, named, given, grant, options))
        else:
            receipt = _ask(uri, database, named, grant, options, _where_to_ask(as_json))
    except InvalidAnswer as refusal:
        complain(str(refusal))
        for fault in refusal.errors:  # of the value that was typed here
            complain(f"  {printable(fault)}")
        raise typer.Exit(1) from None
    _say(receipt, named, as_json)


def _check(options: _Options, run_id: str | None, *, is_asked: bool) -> None:
    """What goes together.

    Raises:
        typer.BadParameter: It does not.
    """
    if run_id is None and options.token is None:
        raise typer.BadParameter("which run? Give its id, or --token")
    if options.is_draft and not options.by:
        raise typer.BadParameter("--draft needs --by: a draft says who gave which answer")
    if options.token is not None and (options.is_draft or options.generation is not None or options.digest is not None):
        raise typer.BadParameter("--token goes with none of --draft, --generation and --digest: it is for exactly one frontier")
    if options.audience is not None and options.token is None:
        raise typer.BadParameter("--audience goes with --token")
    if is_asked and not sys.stdin.isatty():
        raise typer.BadParameter(
            "no --answer, and standard input is no terminal on which to ask: give --answer ACTIVITY_ID=JSON for each open question"
            " (`mongo-durable frontiers --run RUN --json` shows them)"
        )


def _keys() -> SigningKeys:
    from mongo_durable.engine.tokens import KEYS_VARIABLE, SigningKeys

    keys = SigningKeys.from_environment()
    if keys is None:
        raise ConfigurationError(f"resume tokens need a key to sign with: set {KEYS_VARIABLE} to id:secret, as where they are made")
    return keys


def _grant(token: str, run_id: str | None) -> Grant:
    from mongo_durable.engine.tokens import read_token

    grant = read_token(_keys(), token)
    if run_id is not None and run_id != grant.run_id:
        raise typer.BadParameter(f"the token is for another run than {run_id}: leave the run out")
    return grant


async def _answer_given(opened: Opened, run_id: str, given: list[_Given], grant: Grant | None, options: _Options) -> Resolution | Draft:
    answers = await _by_activity(opened, run_id, given, grant)
    return await _send(opened, run_id, answers, options)


async def _send(opened: Opened, run_id: str, answers: Mapping[str, Any], options: _Options) -> Resolution | Draft:
    client, by, note = opened.client, options.by, options.note
    if options.token is not None:
        return await client.resolve_with_token(options.token, answers, audience=options.audience, resolved_by=by, note=note)
    if options.is_draft:
        return await client.draft_answer(run_id, answers, answered_by=str(by), note=note, generation=options.generation, digest=options.digest)
    return await client.resolve(run_id, answers, generation=options.generation, digest=options.digest, resolved_by=by, note=note)


async def _by_activity(opened: Opened, run_id: str, given: list[_Given], grant: Grant | None) -> dict[str, Any]:
    named = {activity_id: value for activity_id, value in given if activity_id is not None}
    if len(named) == len(given):
        return named
    if len(given) > 1:
        raise typer.BadParameter("--answer: with more than one, each is ACTIVITY_ID=JSON for another activity")

    from mongo_durable.store import frontiers

    found = await frontiers.get(opened.connection, run_id, grant.generation) if grant is not None else None
    frontier = found or await frontiers.current(opened.connection, run_id)
    if len(frontier.entries) != 1:
        ids = ", ".join(entry.activity_id for entry in frontier.entries)
        raise typer.BadParameter(f"--answer: run {run_id} has {len(frontier.entries)} open questions, name each as ACTIVITY_ID=JSON: {ids}")
    return {frontier.entries[0].activity_id: given[0][1]}


def _parse(text: str) -> tuple[str | None, Any]:
    """The activity id, if one is named, and the value.

    Raises:
        typer.BadParameter: The value is not JSON.
    """
    named = _NAMED_ANSWER.fullmatch(text)
    activity_id, value = (named[1], named[2]) if named is not None else (None, text)
    try:
        return activity_id, parse_json(value)
    except ValueError as error:
        where = f" for {activity_id}" if activity_id is not None else ""
        hint = "a text needs its double quotes, inside the shell's: '\"yes\"'"
        raise typer.BadParameter(f"--answer: the value{where} is not JSON ({error}); {hint}") from None


def _where_to_ask(as_json: bool) -> Console:
    """Where questions are asked: where JSON or a pipe has standard output, on standard error."""
    from rich.console import Console

    return Console(stderr=as_json or not sys.stdout.isatty(), highlight=False)


def _ask(uri: str | None, database: str | None, run_id: str, grant: Grant | None, options: _Options, out: Console) -> Resolution | Draft:
    """Show the open questions, ask for their answers, and send them, pinned to what was shown.

    Raises:
        typer.Exit: The person thought better of it; nothing was sent.
    """
    frontier, draft = with_database(uri, database, lambda opened: _shown(opened, run_id, grant, options))
    try:
        answers = _asked(out, frontier, draft, options)
    except (KeyboardInterrupt, EOFError):
        out.print()
        complain("interrupted: nothing was sent")
        raise typer.Exit(130) from None
    if answers is None:
        complain("nothing was sent")
        raise typer.Exit(1)
    pinned = replace(options, generation=frontier.generation, digest=frontier.digest)
    return with_database(uri, database, lambda opened: _send(opened, run_id, answers, pinned))


async def _shown(opened: Opened, run_id: str, grant: Grant | None, options: _Options) -> tuple[Frontier, Draft | None]:
    from mongo_durable.engine.tokens import check_grant

    client = opened.client
    if grant is not None:
        check_grant(grant, database=opened.name, audience=options.audience, now=await opened.connection.server_time())
        frontier = await client.frontier(run_id, grant.generation)
        if frontier is None or frontier.digest != grant.digest:
            raise TokenInvalid(run_id=run_id)
    else:
        frontier = await _open_frontier(opened, run_id)
    if frontier.status != "open":
        raise RunNotSuspended(
            f"run {run_id}: frontier {frontier.generation} is {frontier.status} and waits for no answer", run_id=run_id, status=frontier.status
        )
    for what, wanted, found in (("generation", options.generation, frontier.generation), ("digest", options.digest, frontier.digest)):
        if wanted is not None and wanted != found:
            raise StaleGeneration(f"run {run_id} has {what} {found}, not {wanted}", run_id=run_id, expected=wanted, found=found)
    return frontier, await client.draft(run_id, generation=frontier.generation)


async def _open_frontier(opened: Opened, run_id: str) -> Frontier:
    run = await opened.client.get_run(run_id)
    if run.frontier is None:
        raise RunNotSuspended(f"run {run_id} is {run.status} and waits for no answer", run_id=run_id, status=run.status)
    return run.frontier


def _asked(out: Console, frontier: Frontier, draft: Draft | None, options: _Options) -> dict[str, Any] | None:
    """The answers, or None where the person did not want to send them."""
    form = Form(out, _reader(out))
    drafted = draft.answers if draft is not None else {}
    number = len(frontier.entries)
    out.print(
        line(
            (f"run {printable(frontier.run_id)}", "bold"),
            f"  {printable(frontier.workflow)}  generation {frontier.generation}  waits for {age(frontier.opened_at)}"
            + (f", until {moment(frontier.expires_at)}" if frontier.expires_at is not None else ""),
        )
    )
    answers: dict[str, Any] = {}
    for count, entry in enumerate(frontier.entries, 1):
        out.print()
        which = f"question {count} of {number}  " if number > 1 else "question  "
        out.print(line((which, "bold"), printable(entry.name), "  ", (entry.activity_id, "cyan")))
        show_question(out, entry)
        if terms := terms_of(entry):
            out.print(line("  ", (terms, "dim"), is_whole=True))
        if entry.activity_id in drafted:
            found = drafted[entry.activity_id]
            out.print(line("  ", (f"in the draft, {printable(found.by)} says {in_one_line(found.value)}, {age(found.at)} ago", "yellow")))
        if options.is_draft and number > 1 and not form.agrees("  answer this one?", default=entry.activity_id not in drafted):
            continue
        answers[entry.activity_id] = form.answer(entry)
    if not answers:
        return None
    out.print()
    for entry in frontier.entries:
        if entry.activity_id in answers:
            whole = in_one_line(answers[entry.activity_id], None)
            out.print(line((entry.activity_id, "cyan"), f"  {printable(entry.name)}  ", (whole, "bold"), is_whole=True))
    where = "into the draft" if options.is_draft else f"to run {printable(frontier.run_id)}"
    return answers if form.agrees(f"send {where}?") else None


def _reader(out: Console) -> Any:
    """Reads a line, with the shell's usual keys where the terminal has both directions."""
    if out.stderr or not sys.stdout.isatty():

        def read_plainly(prompt: str) -> str:
            out.print(prompt, end="", markup=False)
            typed = sys.stdin.readline()
            if not typed:
                raise EOFError
            return typed.rstrip("\n")

        return read_plainly
    try:
        import readline  # noqa: F401 - makes input() edit lines, longer ones than a terminal's own, too
    except ImportError:
        pass  # some builds of Python have none
    return input


def _say(receipt: Resolution | Draft, run_id: str, as_json: bool) -> None:
    from mongo_durable.snapshots import Draft

    if as_json:
        print_json(receipt)
        return
    out = console()
    if isinstance(receipt, Draft):
        if receipt.resolution is None:
            left = len(receipt.missing)
            out.print(f"run {printable(run_id)}: in the draft; {left} question{'' if left == 1 else 's'} left to answer", markup=False)
            return
        receipt = receipt.resolution
    out.print(f"run {printable(run_id)}: generation {receipt.generation} is answered; a runner goes on with it", markup=False)


def token(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run that waits.", show_default=False, autocompletion=complete_suspended_run)],
    expires_in: Annotated[str, typer.Option(metavar="DURATION", help="How long it can be used: seconds, or 30m, 2h, 7d.", show_default=False)],
    audience: Annotated[str | None, typer.Option(help="Whom it is for; who uses it has to say the same.", show_default=False)] = None,
    as_json: AsJson = False,
    uri: Uri = None,
    database: Database = None,
) -> None:
    """Print a resume token: who has it can answer what the run asks now, once, with `resolve --token`.

    It is signed with the first key of MONGO_DURABLE_SIGNING_KEYS (id:secret,id:secret).
    """
    lifetime = duration(expires_in, "--expires-in")
    _keys()

    async def work(opened: Opened) -> tuple[Frontier, str]:
        frontier = await _open_frontier(opened, run_id)
        return frontier, await opened.client.resume_token(frontier, expires_in=lifetime, audience=audience)

    frontier, made = with_database(uri, database, work)
    if as_json:
        print_json({"token": made, "run_id": run_id, "generation": frontier.generation, "audience": audience, "expires_in": lifetime})
    else:
        typer.echo(made)
