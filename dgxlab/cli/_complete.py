"""What the shell completes: names of experiments, sessions, hosts and series. What cannot be read is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import wraps
from pathlib import Path

from typer import Context

from dgxlab.errors import DgxlabError
from dgxlab.project import hosts_files, root, specs

Words = list[tuple[str, str]]  # each with its description, "" for none


def _quietly(words: Callable[[Context, str], Iterator[tuple[str, str]]]) -> Callable[[Context, str], Words]:
    """Return a function that lists the words with the beginning that was typed; an error ends the list."""

    @wraps(words)
    def listed(context: Context, incomplete: str) -> Words:
        fitting: Words = []
        with suppress(DgxlabError, OSError):
            fitting.extend(pair for pair in words(context, incomplete) if pair[0].startswith(incomplete))
        return fitting

    return listed


@_quietly
def experiments(context: Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """List the project's experiments."""
    for name in specs(root()):
        yield name, ""


@_quietly
def sessions(context: Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """List the sessions of the record, newest first, by their last six characters or by what was typed of the id."""
    import sqlite3

    from dgxlab.store import alias

    path = Path(context.find_root().params.get("db") or root() / "results.db").absolute()
    way = "mode=ro" if Path(f"{path}-wal").exists() else "mode=ro&immutable=1"  # neither it nor its log is written
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{path.as_uri()}?{way}", uri=True)) as opened:
        for (job_id,) in opened.execute("SELECT job_id FROM jobs ORDER BY intent_at DESC").fetchall():
            yield (job_id, "") if incomplete and job_id.startswith(incomplete) else (alias(job_id), job_id)


def subjects(context: Context, incomplete: str) -> Words:
    """List experiments and sessions."""
    return [*experiments(context, incomplete), *sessions(context, incomplete)]


@_quietly
def hosts(context: Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """List the hosts that hosts.yaml names."""
    from dgxlab.spec.hosts import load_hosts

    for host in load_hosts(hosts_files()).values():
        yield host.name, host.ssh or "this machine"


@_quietly
def series(context: Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """List the project's series."""
    from dgxlab.series import names

    for name in names(root()):
        yield name, ""
