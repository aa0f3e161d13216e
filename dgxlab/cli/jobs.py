"""dgxlab jobs, attach, cancel: detached work, whoever started it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgxlab import project
from dgxlab.cli._lab import connect, lab, lab_if_any, naming_a_host, store
from dgxlab.cli._options import DbOption, Format, FormatOption, JobArgument, QuietOption
from dgxlab.cli._out import Out, clean, table
from dgxlab.cli._tables import show
from dgxlab.cli.ab import leave
from dgxlab.errors import AGAIN, DgxlabError, JobLost, RemoteError, UsageError

if TYPE_CHECKING:
    from dgxlab.store import Job
    from dgxlab.transport.host import HostJob

app = typer.Typer(help="Judge whole sessions.", no_args_is_help=True, rich_markup_mode=None)

AskOption = Annotated[
    str | None, typer.Option("--host", help="The host to ask, by its name in hosts.yaml; local by default.")
]
WhereOption = Annotated[
    str | None, typer.Option("--host", help="Look for it on this host, as another laptop may have started it.")
]


def jobs(
    host: AskOption = None, db: DbOption = None, format: FormatOption = Format.human, quiet: QuietOption = False
) -> None:
    """List the jobs of the host and the record; finish what was left.

    Example: dgxlab jobs
    """
    from dgxlab.lab import settle

    out = Out(format, quiet)
    name = host or "local"
    connected = connect(name)
    known: dict[str, Job] = {}
    with lab_if_any(db) if host else lab(db) as opened:
        if opened:
            settle(opened, connected, None, lambda event: None)
            known = {job.job_id: job for job in opened.store.jobs()}
    there = {job.job_id: job for job in connected.jobs()}
    ours = {job_id for job_id, job in known.items() if job.host == name}  # the host may have been called otherwise then
    rows = [_row(name, job_id, there.get(job_id), known.get(job_id)) for job_id in sorted({*there, *ours})]
    out.result(rows, lambda: clean(table([_shown(row) for row in rows])) if rows else "no jobs")


def attach(
    job: JobArgument,
    host: WhereOption = None,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Follow a job from where the record stands, record it, and report.

    Example: dgxlab attach 20261120-120301-quickstart-3f2a9c
    """
    from dgxlab import lab as use_cases
    from dgxlab import report
    from dgxlab.cli._display import display

    out = Out(format, quiet)
    with lab(db, create=host is not None) as opened:
        with naming_a_host():
            connected, found = use_cases.find(opened, job, host)
        error: DgxlabError | None
        try:
            with display(out) as watch:
                use_cases.adopt(opened, connected, found, watch)
                error = use_cases.follow(opened, connected, found, watch)
        except JobLost as lost:
            error = lost
        again = _again(opened.store.job(found))
        made = report.collect(opened.store, job_id=found)
        show(out, made, lambda: report.render(made))
    try:
        if isinstance(made, report.SessionReport):
            leave(made, error)
        elif error:
            raise error
    except DgxlabError as error:
        error.next = again if error.next == AGAIN else error.next
        raise


def cancel(
    job: JobArgument,
    host: WhereOption = None,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """End a job, its own processes alone; what it measured is kept.

    Example: dgxlab cancel 20261120-120301-quickstart-3f2a9c
    """
    from dgxlab.lab import find, settle

    out = Out(format, quiet)
    with lab(db, create=host is not None) as opened:
        with naming_a_host():
            connected, found = find(opened, job, host)
        try:
            status = connected.cancel(found)
        except RemoteError:  # something of it goes on; that it ended is recorded all the same
            settle(opened, connected, None, lambda event: None)
            raise
        settle(opened, connected, None, lambda event: None)
    out.result(
        {"job": found, "state": status.state, "rc": status.rc},
        f"job {found}: {status.rc['status'] if status.rc else status.state}",
    )


@app.command("reject")
def reject(
    session: JobArgument,
    because: Annotated[str, typer.Option("--because", help="Why, in words; every report of it says so.")],
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Set a session's evidence aside for good: it stays in the record, and nothing of it counts.

    Example: dgxlab session reject 20261120-120301-toy-3f2a9c --because hot
    """
    from dgxlab import judgement
    from dgxlab.store import the_one

    if not because.strip():
        raise UsageError("--because says nothing", next="dgxlab session reject --help")
    with store(db) as opened:
        found = the_one(opened.job_ids(session), session)
        judgement.reject(opened, found, because)
    Out(format, quiet).result({"session": found, "rejected": because}, f"session {found} is rejected: {because}")


def _again(job: Job) -> str:
    """Return the command that does a job's work again; without its spec in place, the one that shows what it did."""
    from dgxlab.spec.resolve import label

    names = [job.name]
    from dgxlab.model import SESSIONS

    if job.kind in SESSIONS:
        chain = next(job.plan.chains)
        names = [chain.baseline.arm, chain.candidate.arm][: 1 if job.kind == "noise" else 2]
    known = project.specs(project.root())
    found = [known.get(name, []) for name in names]
    if any(len(files) != 1 for files in found):
        return f"dgxlab report {job.job_id}"
    command, *screen = ("ab", "--screen") if job.kind == "screen" else (job.kind,)
    return shlex.join(["dgxlab", command, *(label(file) for (file,) in found), *screen, "--host", job.host])


def _row(host: str, job_id: str, there: HostJob | None, known: Job | None) -> dict[str, Any]:
    """Return what host and record say of a job that at least one of them knows."""
    says = known or there
    assert says is not None
    return {
        "job": job_id,
        "host": host,
        "name": says.name,
        "kind": says.kind,
        "age_s": there.age_s if there else time.time() - known.intent_at if known else None,
        "on_host": there.state if there else "absent",
        "recorded": "rejected" if known and known.rejected else known.state if known else "not here",
    }


def _shown(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row for people; the job's id says its name already."""
    from dgxlab.units import duration

    shown = {**row, "age": duration(row["age_s"])}
    return {name: str(shown[name]) for name in ("job", "host", "kind", "age", "on_host", "recorded")}
