"""dgxlab jobs, attach, cancel: detached work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from dgxlab.cli._lab import lab
from dgxlab.cli._options import DbOption, Format, FormatOption, JobArgument, QuietOption
from dgxlab.cli._out import Out
from dgxlab.errors import DgxlabError, JobLost, UsageError

WhereOption = Annotated[str, typer.Option("--host", help="The host to ask, by its name in hosts.yaml.")]


def jobs(
    host: WhereOption = "local", db: DbOption = None, format: FormatOption = Format.human, quiet: QuietOption = False
) -> None:
    """List the jobs of the host and the record; finish what was left.

    Example: dgxlab jobs
    """
    from dgxlab.lab import settle

    out = Out(format, quiet)
    with lab(db) as opened:
        connected = opened.connect(host)
        settle(opened, connected, None, lambda event: None)
        there = {status.job_id: status for status in connected.jobs()}
        known = {job.job_id: job.state for job in opened.store.jobs(host=host)}
    rows = [
        {
            "job": job_id,
            "host": host,
            "on_host": there[job_id].state if job_id in there else "absent",
            "recorded": known.get(job_id, "not here"),
        }
        for job_id in sorted({*there, *known})
    ]
    out.result(rows, lambda: _table(rows))


def attach(
    job: JobArgument, db: DbOption = None, format: FormatOption = Format.human, quiet: QuietOption = False
) -> None:
    """Follow a job from where the record stands, record it, and report.

    Example: dgxlab attach 20261120-120301-quickstart-3f2a9c
    """
    from dgxlab import lab as use_cases
    from dgxlab import report
    from dgxlab.cli._display import display

    out = Out(format, quiet)
    with lab(db) as opened:
        found = opened.store.job(_one((known.job_id for known in opened.store.jobs()), job))
        error: DgxlabError | None
        try:
            with display(out) as watch:
                error = use_cases.follow(opened, opened.connect(found.host), found.job_id, watch)
        except JobLost as lost:
            error = lost
        made = report.collect(opened.store, job_id=found.job_id)
        out.result(made, lambda: report.render(made))
    if error:
        raise error


def cancel(
    job: JobArgument,
    host: WhereOption = "local",
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """End a job, its own processes alone; what it measured is kept.

    Example: dgxlab cancel 20261120-120301-quickstart-3f2a9c
    """
    from dgxlab.lab import settle

    out = Out(format, quiet)
    with lab(db) as opened:
        recorded = {known.job_id: known.host for known in opened.store.jobs()}
        there = {status.job_id: host for status in opened.connect(host).jobs()}  # also what others started
        hosts = {**there, **recorded}
        found = _one(hosts, job)
        connected = opened.connect(hosts[found])
        status = connected.cancel(found)
        settle(opened, connected, None, lambda event: None)
    out.result(
        {"job": found, "state": status.state, "rc": status.rc},
        f"job {found}: {(status.rc or {}).get('status', status.state)}",
    )


def _one(ids: Iterable[str], text: str) -> str:
    """Return the one id that begins with `text`."""
    found = [job_id for job_id in ids if job_id.startswith(text)]
    if len(found) != 1:
        how_many = f"{len(found)} jobs begin" if found else "no job begins"
        raise UsageError(f"{how_many} with {text!r}", next="dgxlab jobs")
    return found[0]


def _table(rows: list[dict[str, str]]) -> str:
    if not rows:
        return "no jobs"
    columns = list(rows[0])
    widths = [max(len(column), *(len(row[column]) for row in rows)) for column in columns]
    lines = [columns, *([row[column] for column in columns] for row in rows)]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)
