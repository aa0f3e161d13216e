"""dgxlab jobs, attach, cancel: detached work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dgxlab.cli._lab import lab
from dgxlab.cli._options import DbOption, Format, FormatOption, JobArgument, QuietOption
from dgxlab.cli._out import Out
from dgxlab.errors import UsageError

if TYPE_CHECKING:
    from dgxlab.store import Store


def jobs(db: DbOption = None, format: FormatOption = Format.human, quiet: QuietOption = False) -> None:
    """List the jobs on the host and those only recorded here, newest last; finish what was left behind.

    Example: dgxlab jobs
    """
    from dgxlab.lab import settle

    out = Out(format, quiet)
    with lab(db) as opened:
        host = opened.connect("local")
        settle(opened, host, None, lambda event: None)
        there = {status.job_id: status for status in host.jobs()}
        known = {str(row["job_id"]): row for row in opened.store.rows("SELECT job_id, name, state FROM jobs")}
    rows = [
        {
            "job": job_id,
            "host": host.name,
            "on_host": there[job_id].state if job_id in there else "absent",
            "recorded": known[job_id]["state"] if job_id in known else "not here",
        }
        for job_id in sorted({*there, *known})
    ]
    out.result(rows, lambda: _table(rows))


def attach(
    job: JobArgument, db: DbOption = None, format: FormatOption = Format.human, quiet: QuietOption = False
) -> None:
    """Follow a running job from where the record stands, and record what it measured.

    Example: dgxlab attach 20261120-120301-quickstart-3f2a9c
    """
    from dgxlab import lab as use_cases
    from dgxlab import report
    from dgxlab.cli._display import display
    from dgxlab.model import to_json

    out = Out(format, quiet)
    with lab(db) as opened:
        found = _find(opened.store, job)
        host = opened.connect(found.host)
        with display(out) as watch:
            error = use_cases.follow(opened, host, found.job_id, watch)
        made = report.collect(opened.store, job_id=found.job_id)
        out.result(lambda: to_json(made), lambda: report.render(made))
    if error:
        raise error


def cancel(
    job: JobArgument, db: DbOption = None, format: FormatOption = Format.human, quiet: QuietOption = False
) -> None:
    """End a job: its own processes and nothing else. What it measured is kept.

    Example: dgxlab cancel 20261120-120301-quickstart-3f2a9c
    """
    from dgxlab.lab import settle

    out = Out(format, quiet)
    with lab(db) as opened:
        found = _find(opened.store, job)
        host = opened.connect(found.host)
        status = host.cancel(found.job_id)
        settle(opened, host, None, lambda event: None)
    out.result(
        {"job": found.job_id, "state": status.state, "rc": status.rc},
        f"job {found.job_id}: {(status.rc or {}).get('status', status.state)}",
    )


def _find(store: Store, text: str) -> Any:
    """Return the one recorded job whose id begins with `text`."""
    rows = store.rows("SELECT job_id FROM jobs WHERE job_id LIKE ? || '%' ESCAPE '\\'", (text.replace("_", "\\_"),))
    ids = [str(row["job_id"]) for row in rows]
    if len(ids) != 1:
        raise UsageError(
            f"no job begins with {text}" if not ids else f"{len(ids)} jobs begin with {text}", next="dgxlab jobs"
        )
    return store.job(ids[0])


def _table(rows: list[dict[str, str]]) -> str:
    if not rows:
        return "no jobs"
    columns = list(rows[0])
    widths = [max(len(column), *(len(row[column]) for row in rows)) for column in columns]
    lines = [columns, *([row[column] for column in columns] for row in rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
