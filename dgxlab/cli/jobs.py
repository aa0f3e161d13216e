"""dgxlab jobs, attach, cancel, logs: detached jobs of any client, and their output."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from dgxlab.cli import _complete
from dgxlab.cli._app import JOB, Workspace, connect, experiment
from dgxlab.cli._out import Format, Out, clean, plural, table, write_bytes
from dgxlab.cli.run import raise_for_verdicts
from dgxlab.errors import AGAIN, DgxlabError, HostError, JobLost, RemoteError, SpecError, UsageError, command, one_line
from dgxlab.units import duration, size

if TYPE_CHECKING:
    from dgxlab.lab import Lab
    from dgxlab.store import Job
    from dgxlab.transport.host import Host

_RunningArgument = Annotated[
    str | None,
    Argument(help=f"A job: {JOB}; the only one that is running by default.", autocompletion=_complete.sessions),
]
_WhereOption = Annotated[
    str | None,
    Option(
        "--host",
        help="Look for it on this host, as another laptop may have started it.",
        autocompletion=_complete.hosts,
    ),
]


def jobs(
    host: str | None = Option(
        None, help="The host to ask, by its name in hosts.yaml; local by default.", autocompletion=_complete.hosts
    ),
    *,
    workspace: Workspace,
    out: Out,
) -> None:
    """List a host's jobs, and record the end of your own.

    Example: dgxlab jobs
    """
    from dgxlab.lab.jobs import elsewhere, settle
    from dgxlab.store import alias

    name = host or "local"
    connected = connect(name)
    known: dict[str, Job] = {}
    with workspace.lab_if_any() as lab:
        if lab:
            settle(lab, connected, None, lambda event: None)
            known = {job.job_id: job for job in lab.store.jobs()}
    of_host = {job.job_id: job for job in connected.jobs()}
    # what has ended and is gone is in `dgxlab sessions`; the host may have had another name then
    ours = {job_id for job_id, job in known.items() if job.host == name and not job.ended}
    rows, texts, reasons = [], [], []
    for job_id in sorted({*of_host, *ours}):
        on_host, job = of_host.get(job_id), known.get(job_id)
        either = job or of_host[job_id]
        age_s = on_host.age_s if on_host else time.time() - known[job_id].intent_at
        waits = f"waits for {on_host.waits_for}" if on_host and on_host.waits_for else ""
        away = elsewhere(connected, job) if job and job.state == "running" and not on_host else ""
        row = {
            "job": job_id,
            "host": name,
            "name": either.name,
            "kind": either.shown_kind,
            "age_s": age_s,
            "on_host": on_host.outcome if on_host else "absent",
            "recorded": ("rejected" if job.rejected else job.state) if job else "not here",
            "why": (job and job.error) or (on_host.slurm or on_host.cause if on_host else away) or waits,
        }
        rows.append(row)
        shown = {**row, "job": alias(job_id), "age": duration(age_s)}
        texts.append({key: str(shown[key]) for key in ("job", "name", "kind", "age", "on_host", "recorded")})
        reasons += [one_line(f"{alias(job_id)}: {row['why']}")] if row["why"] else []
    out.result(rows, lambda: "\n".join([clean(table(texts)), *reasons]) if texts else "no jobs")


def attach(job: _RunningArgument = None, host: _WhereOption = None, *, workspace: Workspace, out: Out) -> None:
    """Follow a job from where the record ends, and report.

    Example: dgxlab attach 20261120-120301-quickstart-3f2a9c
    """
    from dgxlab import report
    from dgxlab.cli._display import display, notes
    from dgxlab.cli._on_end import on_end
    from dgxlab.lab.jobs import adopt, ended, ending, find, follow

    tell = on_end(out)
    with _lab(workspace, job, host) as lab:
        error: DgxlabError | None
        if known := ended(lab, job, host):
            job_id, error = known.job_id, ending(lab, known)
        else:
            connected, job_id = find(lab, job, host)
            try:
                adopt(lab, connected, job_id, notes(out))
                with display(out, arms=len(lab.store.job(job_id).plan.arms)) as watch:
                    error = follow(lab, connected, job_id, watch)
            except JobLost as lost:
                error = lost
        page = report.collect_job(lab.store, job_id)
        out.report(page, lambda: report.render(page))
        recorded = lab.store.job(job_id)
        tell(recorded, page.summary if isinstance(page, report.SessionReport) else "")
    try:
        if isinstance(page, report.SessionReport):
            raise_for_verdicts(page, error)
        elif error:
            raise error
    except DgxlabError as error:
        error.next = _again(recorded) if error.next.startswith(AGAIN) else error.next
        raise


def cancel(job: _RunningArgument = None, host: _WhereOption = None, *, workspace: Workspace, out: Out) -> None:
    """End a job and only its processes; its measurements are kept.

    Example: dgxlab cancel 20261120-120301-quickstart-3f2a9c
    """
    from dgxlab.lab.jobs import ended, find, settle

    with _lab(workspace, job, host) as lab:
        known = ended(lab, job, host)
        try:
            connected, job_id = find(lab, job, host)
        except SpecError:
            if known is None:
                raise
            rc = {"status": known.state, "exit_code": known.exit_code}
            text = f"job {known.job_id} has ended ({known.state}): there is nothing to cancel"
            out.result({"job": known.job_id, "state": "done", "rc": rc}, text)
            return
        if job is None:
            _only_ours(lab, connected, job_id)
        try:
            over = connected.status(job_id).state == "done"
            status = connected.cancel(job_id)  # also of a job that has ended, as a process of it may have survived
        except RemoteError:  # some of its processes survive; record its end anyway
            settle(lab, connected, None, lambda event: None)
            raise
        settle(lab, connected, None, lambda event: None)
    state = known.state if known else status.outcome
    text = f"job {job_id} has ended ({state}): nothing of it runs" if known or over else f"job {job_id}: {state}"
    out.result({"job": job_id, "state": status.state, "rc": status.rc}, text)


@contextmanager
def _lab(workspace: Workspace, job: str | None, host: str | None) -> Iterator[Lab]:
    """Open the record, a new one for a job of a named host; UsageError with the job's host if there is none."""
    from dgxlab.store import matching_ids

    with workspace.lab(create=True) if host else workspace.lab_if_any() as lab:
        if lab is None:
            on_local: list[str] = []
            with suppress(HostError):  # no jobs run on this machine
                here = [each.job_id for each in connect("local").jobs() if each.state != "elsewhere"]
                on_local = matching_ids(here, job) if job else []
            again = f"{AGAIN} with --host local" if len(on_local) == 1 else "dgxlab jobs"
            raise UsageError("this project has no record yet, so a job is found only with --host HOST", next=again)
        yield lab


def _only_ours(lab: Lab, host: Host, job_id: str) -> None:
    """Raise UsageError if another record started a job that the user has not named."""
    known = lab.store.find_job(job_id)
    if known is None or known.client != lab.client:
        message = f"job {job_id} was not started from this record, so cancel needs its name"
        raise UsageError(message, next=command("dgxlab", "cancel", job_id, "--host", host.name))


def logs(
    session: str | None = Argument(
        None,
        help=f"A session: {JOB}; with -f, the only job that is running by default.",
        autocompletion=_complete.sessions,
    ),
    name: str | None = Argument(None, help="The file to print, as the list names it."),
    unpack: Path | None = Option(None, "--out", help="Unpack every file into this new folder."),
    follow: bool = Option(False, "--follow", "-f", help="Print what a running job's builds print, as it appears."),
    host: str | None = Option(
        None, help="Fetch from this host, where the record's name for it is not yours.", autocompletion=_complete.hosts
    ),
    *,
    workspace: Workspace,
    out: Out,
) -> None:
    """List the output files of a session, or print one.

    Example: dgxlab logs 20261120-120301-quickstart-3f2a9c run-0.out
    """
    from dgxlab.cli._display import display
    from dgxlab.lab import raw
    from dgxlab.store import only_match

    if follow:
        _follow_builds(session, host, workspace, out)
        return
    if session is None:
        raise UsageError("the output of which session? -f follows the build that runs", next="dgxlab sessions")
    with workspace.lab_if_any() if host else workspace.lab() as lab:
        unknown = "; if another laptop started it, dgxlab attach records it"
        attach = shlex.join(["dgxlab", "attach", session, "--host", host]) if host else "dgxlab jobs"
        job_id = only_match(lab.store.job_ids(session) if lab else [], session, unknown, next=attach)
        assert lab is not None
        job = lab.store.job(job_id)
        with display(out) as watch:
            archive, files = raw.archive(lab, job, host, watch)
    if unpack is not None:
        raw.unpack(archive, unpack)
        out.note(f"{plural(len(files), 'file')} unpacked into {unpack}")
    rows = {path: {**vars(file), "what": raw.describe(job, path)} for path, file in files.items()}
    if name is None:
        shown = [{"file": path, "size": size(row["size"]), "what": row["what"]} for path, row in rows.items()]
        out.result(list(rows.values()), lambda: table(shown, right=("size",)))
        return
    paths = [path for path in files if name in (path, PurePosixPath(path).name)]
    if len(paths) != 1:
        raise UsageError(f"job {job_id} has no raw file {name!r}", next=f"dgxlab logs {job_id}")
    content = raw.content(archive, paths[0])
    if out.format is Format.human:
        write_bytes(content)
    else:
        out.result({**rows[paths[0]], "text": content.decode(errors="replace")}, "")


def _follow_builds(session: str | None, host: str | None, workspace: Workspace, out: Out) -> None:
    from dgxlab.lab.jobs import find

    with _lab(workspace, session, host) as lab:
        connected, job_id = find(lab, session, host)
        for piece in connected.build_output(job_id):
            write_bytes(piece)
    # an effect that is seen early tempts one to stop
    out.note(f"job {job_id} has built; what its other programs print is shown when it has ended")


def _again(job: Job) -> str:
    """Return the command that repeats a job, or shows its runs if this project no longer has what it measured."""
    from dgxlab.model import SESSIONS

    plan, words = job.plan, [job.kind]
    runs = f"dgxlab report {job.job_id} --wide"  # attach has printed the rest
    names = [arm.name for arm in plan.arms]
    if any(arm.source.dirty for arm in plan.arms):  # no record says where its checkout is
        return runs
    if job.kind in SESSIONS:
        chain = next(plan.chains)
        names = [chain.baseline.arm, chain.candidate.arm][: 1 if job.kind == "noise" else 2]
        words = ["ab", "--screen"] if job.kind == "screen" else words
    measured = [plan.baseline, plan.experiment][-len(names) :]
    try:
        same = [experiment(name, host=job.host).digest for name in names] == measured
    except SpecError:
        same = False
    if not same:  # made with --set, edited since, or of another project
        return runs
    return shlex.join(["dgxlab", *words, *names, "--host", job.host])
