"""dgxlab report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dgxlab.cli._lab import naming_a_host, store
from dgxlab.cli._options import DbOption, Format, FormatOption, QuietOption
from dgxlab.cli._out import Out
from dgxlab.errors import UsageError

if TYPE_CHECKING:
    from dgxlab.store import Store


def report(
    name: Annotated[
        str | None,
        typer.Argument(help="An experiment's name or a session's id, or enough of it; the newest by default."),
    ] = None,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Print what the record holds of an experiment as markdown tables.

    Example: dgxlab report quickstart
    """
    from dgxlab import report as reports

    with store(db) as opened:
        if session := _session(opened, name or ""):
            made = reports.collect(opened, job_id=session)
        else:
            with naming_a_host(instead="dgxlab jobs"):
                made = reports.collect(opened, name or _newest(opened))
    Out(format, quiet).result(made, lambda: reports.render(made))


def _session(opened: Store, name: str) -> str | None:
    """Return the session that is meant, None when it is an experiment or nothing that is recorded."""
    from dgxlab.store import the_one

    if opened.find_job(name):
        return name
    found = opened.job_ids(name)
    if not name or not found or opened.rows("SELECT 1 FROM jobs WHERE name = ?", (name,)):
        return None
    return the_one(found, name)


def _newest(opened: Store) -> str:
    """Return the name of the experiment that ran last."""
    job = opened.latest_job()
    if job is None:
        raise UsageError("nothing is recorded yet", next="dgxlab run experiments/quickstart.yaml")
    return job.name
