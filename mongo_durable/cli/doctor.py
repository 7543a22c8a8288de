"""`mongo-durable doctor`: what needs somebody's attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from mongo_durable.cli.database import Database, Opened, Uri, with_database
from mongo_durable.cli.output import AsJson, console, print_json, printable

if TYPE_CHECKING:
    from mongo_durable.snapshots import RunSnapshot
    from mongo_durable.store.claims import LiveRunner
    from mongo_durable.store.diagnosis import Finding

_AT_MOST = 100


def doctor(as_json: AsJson = False, uri: Uri = None, database: Database = None) -> None:
    """Show what of the deployment is not as it should be, which runners live, and which runs do not go on by themselves: nobody serves them, they are
    held back, or they were parked.

    Exit code 1 if there is such a run or something is wrong; warnings, and what this user may not see, are shown only.
    """

    async def work(opened: Opened) -> tuple[list[Finding], list[LiveRunner], dict[str, list[RunSnapshot]]]:
        from mongo_durable.protocol.events import RunStatus
        from mongo_durable.store.claims import live_runners
        from mongo_durable.store.diagnosis import examine
        from mongo_durable.store.runs import PARKED

        findings = await examine(opened.connection, uri or "")
        failed = await opened.client.list_runs(status=RunStatus.FAILED, limit=_AT_MOST)
        ready = await opened.client.list_runs(status=RunStatus.READY, limit=_AT_MOST)
        troubled = {
            "unserved": await opened.client.unserved_runs(limit=_AT_MOST),
            "held back": [each for each in ready if each.waits_for is not None and each.waits_for.startswith("held back")],
            "parked": [each for each in failed if (each.error or {}).get("type") == PARKED],
        }
        return findings, await live_runners(opened.connection), troubled

    findings, runners, troubled = with_database(uri, database, work)
    if as_json:
        print_json(
            {
                "findings": findings,
                "runners": [{"owner": each.owner, "serves": [f"{name} {version}" for name, version in sorted(each.serves)]} for each in runners],
                **{name.replace(" ", "_"): [_brief(run) for run in found] for name, found in troubled.items()},
            }
        )
    else:
        out = console()
        for finding in findings:
            out.print(f"{finding.severity.value}: {finding.name}: {printable(finding.message)}", markup=False, soft_wrap=True)
        out.print(_counted(len(runners), "runner", "live"), markup=False)
        for runner in runners:
            out.print(f"  {printable(runner.owner)} serves {printable(', '.join(f'{name} {version}' for name, version in sorted(runner.serves)))}")
        for name, found in troubled.items():
            out.print(_counted(len(found), "run", name) + (f" (the first {_AT_MOST} are shown)" if len(found) == _AT_MOST else ""), markup=False)
            for run in found:
                out.print(f"  {printable(run.run_id)}: {printable(_brief(run)['why'])}", markup=False)
    if any(troubled.values()) or any(finding.severity == "wrong" for finding in findings):
        raise typer.Exit(1)


def _counted(number: int, what: str, how: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'} {how}"


def _brief(run: RunSnapshot) -> dict[str, Any]:
    why = run.waits_for or (run.error or {}).get("message") or ""
    return {"run_id": run.run_id, "workflow": run.workflow, "version": run.version, "why": why}
