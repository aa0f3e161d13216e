"""The record checked against what it was made from: the plans, the tools' own rows, the chains.

`check` says everything that is wrong with a database. `merge` adds another one, and keeps the result where it is sound.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dgxlab import judgement
from dgxlab import store as stores
from dgxlab.audit.job import Labels, job_problems
from dgxlab.errors import CheckFailed, command
from dgxlab.store import Store


def check(store: Store) -> list[str]:
    """Return a sentence for everything that is wrong with a database; an empty list is a sound one.

    Raises:
        SpecError: if the file is too damaged to be asked.
    """
    problems = [*stores.check(store), *_measured(store)]
    return problems or judgement.check(store)  # unsound evidence says nothing of verdicts


def merge(into: Store, other: Path) -> dict[str, int]:
    """Add every row of the database `other` that `into` lacks, judge every chain again, and check the result.

    Returns:
        For each table how many rows were added.

    Raises:
        CheckFailed: if the two contradict each other, or either or the result is not sound; nothing was changed.
        SpecError: if `other` is not a dgxlab database, or of a newer dgxlab.
    """
    with stores.merging(into, other) as counts:
        for job in into.jobs():
            judgement.record(into, job.job_id)
        into.seal()
        if problems := check(into):
            raise CheckFailed(
                f"{into.path} and {other} together are not sound, nothing was merged: {problems[0]}",
                next=command("dgxlab", "db", "check", other),
            )
    return counts


def _measured(store: Store) -> Iterator[str]:
    """Check every job against its plan, and the cells against the plans of the jobs that measured them."""
    labels: Labels = {}
    for job in store.rows("SELECT * FROM jobs ORDER BY job_id"):
        try:
            yield from job_problems(store, job, labels)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            yield f"job {job['job_id']} cannot be held against its plan: {error!r}"
    known = {row["cell"]: row["label"] for row in store.rows("SELECT cell, label FROM cells ORDER BY cell")}
    for cell in sorted(known.keys() | labels.keys()):
        if known.get(cell) != labels.get(cell):
            yield f"cell {cell} is called {known.get(cell)!r}, and {labels.get(cell)!r} by the plans that measured it"
