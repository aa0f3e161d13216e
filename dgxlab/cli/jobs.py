"""dgxlab jobs, attach, cancel, logs, session: detached work of any client, and what it printed."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgxlab import project
from dgxlab.cli._app import JOB, App, Desk, JobArgument, connect, naming_a_host
from dgxlab.cli._out import Format, Out, clean, table, write_bytes
from dgxlab.cli.run import leave
from dgxlab.errors import AGAIN, DgxlabError, JobLost, RemoteError, UsageError
from dgxlab.units import duration, size

if TYPE_CHECKING:
    from dgxlab.lab import Lab
    from dgxlab.store import Job
    from dgxlab.transport.host import Host, HostJob

app = App("Judge whole sessions.")

AskOption = Annotated[
    str | None, typer.Option("--host", help="The host to ask, by its name in hosts.yaml; local by default.")
]
WhereOption = Annotated[
    str | None, typer.Option("--host", help="Look for it on this host, as another laptop may have started it.")
]


def jobs(host: AskOption = None, *, desk: Desk, out: Out) -> None:
    """List the jobs of the host and the record; finish what was left.

    Example: dgxlab jobs
    """
    from dgxlab.lab.jobs import settle

    name = host or "local"
    connected = connect(name)
    known: dict[str, Job] = {}
    with desk.lab_if_any() if host else desk.lab() as lab:
        if lab:
            settle(lab, connected, None, lambda event: None)
            known = {job.job_id: job for job in lab.store.jobs()}
    there = {job.job_id: job for job in connected.jobs()}
    ours = {job_id for job_id, job in known.items() if job.host == name}  # the host may have been called otherwise then
    rows = [_row(name, there.get(job_id), known.get(job_id)) for job_id in sorted({*there, *ours})]
    columns = ("job", "host", "kind", "age", "on_host", "recorded")  # the job's id says its name already
    shown = [{**row, "age": duration(row["age_s"])} for row in rows]
    texts = [{column: str(row[column]) for column in columns} for row in shown]
    out.result(rows, lambda: clean(table(texts)) if texts else "no jobs")


def attach(job: JobArgument, host: WhereOption = None, *, desk: Desk, out: Out) -> None:
    """Follow a job from where the record ends, record it, and report.

    Example: dgxlab attach 20261120-120301-quickstart-3f2a9c
    """
    from dgxlab import report
    from dgxlab.cli._display import display
    from dgxlab.lab.jobs import adopt, follow

    with _job_of(desk, job, host) as (lab, connected, job_id):
        error: DgxlabError | None
        try:
            with display(out) as watch:
                adopt(lab, connected, job_id, watch)
                error = follow(lab, connected, job_id, watch)
        except JobLost as lost:
            error = lost
        again = _again(lab.store.job(job_id))
        page = report.collect(lab.store, job_id=job_id)
        out.report(page, lambda: report.render(page))
    try:
        if isinstance(page, report.SessionReport):
            leave(page, error)
        elif error:
            raise error
    except DgxlabError as error:
        error.next = again if error.next == AGAIN else error.next
        raise


def cancel(job: JobArgument, host: WhereOption = None, *, desk: Desk, out: Out) -> None:
    """End a job, its own processes alone; what it measured is kept.

    Example: dgxlab cancel 20261120-120301-quickstart-3f2a9c
    """
    from dgxlab.lab.jobs import settle

    with _job_of(desk, job, host) as (lab, connected, job_id):
        try:
            status = connected.cancel(job_id)
        except RemoteError:  # something of it goes on; that it ended is recorded all the same
            settle(lab, connected, None, lambda event: None)
            raise
        settle(lab, connected, None, lambda event: None)
    state = status.rc["status"] if status.rc else status.state
    out.result({"job": job_id, "state": status.state, "rc": status.rc}, f"job {job_id}: {state}")


@app.add("reject")
def reject(
    session: JobArgument,
    because: Annotated[str, typer.Option("--because", help="Why, in words; every report of it says so.")],
    *,
    desk: Desk,
    out: Out,
) -> None:
    """Set a session's evidence aside for good: it stays in the record, and nothing of it counts.

    Example: dgxlab session reject 20261120-120301-toy-3f2a9c --because hot
    """
    from dgxlab import judgement
    from dgxlab.store import the_one

    if not because.strip():
        raise UsageError("--because says nothing", next="dgxlab session reject --help")
    with desk.store() as store:
        job_id = the_one(store.job_ids(session), session)
        judgement.reject(store, job_id, because)
    out.result({"session": job_id, "rejected": because}, f"session {job_id} is rejected: {because}")


def logs(
    session: Annotated[str, typer.Argument(help=f"A session: {JOB}.", show_default=False)],
    name: Annotated[str | None, typer.Argument(help="The file to print, as the list names it.")] = None,
    unpack: Annotated[Path | None, typer.Option("--out", help="Unpack every file into this new folder.")] = None,
    host: Annotated[
        str | None, typer.Option("--host", help="Fetch from this host, where the record's name for it is not yours.")
    ] = None,
    *,
    desk: Desk,
    out: Out,
) -> None:
    """List what a session's programs printed, or print one file of it.

    Example: dgxlab logs 20261120-120301-quickstart-3f2a9c run-0.out
    """
    from dgxlab.cli._display import display
    from dgxlab.lab import raw
    from dgxlab.store import the_one

    with desk.lab_if_any() if host else desk.lab() as lab:
        unknown = "; if another laptop started it, dgxlab attach records it"
        attach = shlex.join(["dgxlab", "attach", session, "--host", host]) if host else ""
        with naming_a_host():
            job_id = the_one(lab.store.job_ids(session) if lab else [], session, unknown, next=attach)
        assert lab is not None
        job = lab.store.job(job_id)
        with display(out) as watch:
            archive, files = raw.kept(lab, job, host, watch)
    if unpack is not None:
        raw.unpack(archive, unpack)
    rows = {path: {**vars(file), "what": raw.describe(job, path)} for path, file in files.items()}
    if name is None:
        shown = [{"file": path, "size": size(row["size"]), "what": row["what"]} for path, row in rows.items()]
        out.result(list(rows.values()), lambda: table(shown, right=("size",)))
        return
    paths = [path for path in files if name in (path, PurePosixPath(path).name)]
    if len(paths) != 1:
        raise UsageError(f"job {job_id} has no raw file {name!r}", next=f"dgxlab logs {job_id}")
    if out.format is Format.human:
        raw.copy(archive, paths[0], write_bytes)
    else:
        out.result({**rows[paths[0]], "text": raw.content(archive, paths[0]).decode(errors="replace")}, "")


@contextmanager
def _job_of(desk: Desk, job: str, host: str | None) -> Iterator[tuple[Lab, Host, str]]:
    """Open the record, and give it with a job's host and whole id."""
    from dgxlab.lab.jobs import find

    with desk.lab(create=host is not None) as lab:
        with naming_a_host():
            connected, job_id = find(lab, job, host)
        yield lab, connected, job_id


def _again(job: Job) -> str:
    """Return the command that does a job's work again; without its spec in place, the one that shows what it did."""
    from dgxlab.model import SESSIONS
    from dgxlab.spec.resolve import label

    names = [job.name]
    if job.kind in SESSIONS:
        chain = next(job.plan.chains)
        names = [chain.baseline.arm, chain.candidate.arm][: 1 if job.kind == "noise" else 2]
    known = project.specs(project.root())
    files = [known.get(name, []) for name in names]
    if any(len(each) != 1 for each in files):
        return f"dgxlab report {job.job_id}"
    command, *screen = ("ab", "--screen") if job.kind == "screen" else (job.kind,)
    return shlex.join(["dgxlab", command, *(label(file) for (file,) in files), *screen, "--host", job.host])


def _row(host: str, there: HostJob | None, known: Job | None) -> dict[str, Any]:
    says = known or there
    assert says is not None
    return {
        "job": says.job_id,
        "host": host,
        "name": says.name,
        "kind": says.kind,
        "age_s": there.age_s if there else time.time() - known.intent_at if known else None,
        "on_host": there.state if there else "absent",
        "recorded": "rejected" if known and known.rejected else known.state if known else "not here",
    }
