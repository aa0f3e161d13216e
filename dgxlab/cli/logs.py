"""dgxlab logs: what the programs of a session printed, byte for byte."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from dgxlab.cli._lab import lab, lab_if_any, naming_a_host
from dgxlab.cli._options import DbOption, Format, FormatOption, QuietOption
from dgxlab.cli._out import Out, table, write_bytes
from dgxlab.errors import UsageError


def logs(
    session: Annotated[str, typer.Argument(help="A session's id, or enough of its beginning.", show_default=False)],
    name: Annotated[str | None, typer.Argument(help="The file to print, as the list names it.")] = None,
    unpack: Annotated[Path | None, typer.Option("--out", help="Unpack every file into this new folder.")] = None,
    host: Annotated[
        str | None, typer.Option("--host", help="Fetch from this host, where the record's name for it is not yours.")
    ] = None,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """List what a session's programs printed, or print one file of it.

    Example: dgxlab logs 20261120-120301-quickstart-3f2a9c run-0.out
    """
    from dgxlab import lab as use_cases
    from dgxlab.cli._display import display
    from dgxlab.store import the_one
    from dgxlab.units import size

    out = Out(format, quiet)
    with lab_if_any(db) if host else lab(db) as opened:
        unknown = "; if another laptop started it, dgxlab attach records it"
        known = opened.store.job_ids(session) if opened else []
        attach = shlex.join(["dgxlab", "attach", session, "--host", host]) if host else ""
        with naming_a_host():
            found = the_one(known, session, unknown, next=attach)
        assert opened is not None
        job = opened.store.job(found)
        with display(out) as watch:
            archive, files = use_cases.kept(opened, job, host, watch)
    if unpack is not None:
        use_cases.unpack(archive, unpack)
    rows = {path: {**vars(file), "what": use_cases.describe(job, path)} for path, file in files.items()}
    if name is None:
        shown = [{"file": path, "size": size(files[path].size), "what": str(row["what"])} for path, row in rows.items()]
        out.result(list(rows.values()), lambda: table(shown, right=("size",)))
        return
    path = _named(name, files, job.job_id)
    if format is Format.human:
        use_cases.copy(archive, path, write_bytes)
    else:
        out.result({**rows[path], "text": use_cases.content(archive, path).decode(errors="replace")}, "")


def _named(name: str, paths: Collection[str], job_id: str) -> str:
    """Return the path that is meant: all of it, or its last part."""
    found = [path for path in paths if name in (path, PurePosixPath(path).name)]
    if len(found) != 1:
        raise UsageError(f"job {job_id} has no raw file {name!r}", next=f"dgxlab logs {job_id}")
    return found[0]
