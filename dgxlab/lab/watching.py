"""Screen a checkout against its baseline each time that a file of it was saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dgxlab.errors import DgxlabError, Interrupted
from dgxlab.judgement import names
from dgxlab.lab import Lab, Watch
from dgxlab.lab.jobs import settle
from dgxlab.lab.request import Request
from dgxlab.lab.session import run
from dgxlab.source.git import Git

LOOK_S = 0.5  # pause between two looks at the checkout


@dataclass(frozen=True)
class Round:
    """One state of the checkout, and what became of it."""

    number: int
    name: str  # of the experiment that was built from the checkout, "" if it could not be read
    session: str  # "" if there was none
    seconds: float
    gates: tuple[str, ...]  # how each gate ended
    verdicts: tuple[dict[str, Any], ...]  # name, label, metric, verdict and effect (a share) of each comparison
    error: str = ""  # in words, "" if all went well


def rounds(lab: Lab, request: Request, shown: Callable[[], AbstractContextManager[Watch]]) -> Iterator[Round]:
    """Yield a round for the checkout `request.tree` as it is now, and one for each later state of it, without end.

    `shown` is called for each round, to show its job while it runs.
    On Ctrl-C the job that runs is cancelled and the rounds end. A state that was saved during a round comes next.

    Raises DgxlabError for an error before the first job runs; later ones are in their round.
    """
    assert isinstance(request.tree, Path)
    number, seen, last = 0, None, None
    begun: list[str] = []  # the jobs of all rounds
    try:
        while True:
            before, seen = seen, _state(request.tree)
            if seen == last or seen != before:  # until two looks are equal, files are being written
                time.sleep(LOOK_S)
                continue
            last, number = seen, number + 1
            yield _round(lab, replace(request, begun=begun.append), number, shown)
    except (KeyboardInterrupt, Interrupted) as stopped:
        job_id = getattr(stopped, "job_id", "") or next(reversed(begun), "")
        if job_id and not lab.store.job(job_id).ended:
            host = lab.connect(request.experiment.host)
            host.cancel(job_id)
            settle(lab, host, None, lambda event: None)


def _round(lab: Lab, request: Request, number: int, shown: Callable[[], AbstractContextManager[Watch]]) -> Round:
    begin = time.monotonic()
    try:
        with shown() as watch:
            outcome = run(lab, request, watch)
    except Interrupted:
        raise
    except DgxlabError as error:
        if number == 1:
            raise
        return Round(number, "", "", time.monotonic() - begin, (), (), error.message)
    sql = "SELECT label, metric, verdict, effect FROM verdict_list WHERE job_id = ? ORDER BY position"
    rows = lab.store.rows(sql, (outcome.job_id,))
    named = names.of_verdicts(lab.store, outcome.job_id)
    verdicts = tuple({"name": name, **row} for name, row in zip(named, rows, strict=True))
    failure = outcome.error
    why = failure.message if failure else ""
    if failure and (first := failure.details.partition("\n")[0]) not in why:
        why += f": {first}"
    took = time.monotonic() - begin
    return Round(number, outcome.experiment.name, outcome.job_id, took, tuple(outcome.gates), verdicts, why)


def _state(tree: Path) -> object:
    """Return what changes whenever a file of the checkout does that git does not ignore: cheaper than a snapshot."""
    git = Git.checkout(tree)
    listed = git.attempt("status", "--porcelain", "-z", "--untracked-files=all").out
    stamps = []
    for entry in listed.split(b"\0"):
        with suppress(OSError):
            status = (tree / entry[3:].decode(errors="surrogateescape")).lstat()
            stamps.append((entry, status.st_mtime_ns, status.st_size))
    return git.attempt("rev-parse", "HEAD").text, listed, stamps
