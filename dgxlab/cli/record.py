"""dgxlab import, export, serve-record, db: into the record, out of it, and its upkeep."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from dgxlab import units
from dgxlab.cli._app import JOB, App, Workspace, connect
from dgxlab.cli._out import Format, Out, as_typed, plural, write_bytes
from dgxlab.errors import CheckFailed, UsageError, command

if TYPE_CHECKING:
    from dgxlab.exported import LeftOut

app = App("Check, merge and rebuild the record.")

_PathArgument = Annotated[Path | None, Argument(help="The database; --db by default.")]

# written out, as --help is printed before any tool is imported
# whose rows the record can hand on
Tool = StrEnum("Tool", ["llama-bench", "test-backend-ops", "llama-batched-bench", "llama-server"])
Kind = StrEnum("Kind", ["sqlite", "jsonl", "csv", "parquet", "json"])


def import_(
    file: Path = Argument(help="What the tool printed, plain or gzip."),
    tool: str = Option(
        "",
        metavar="TOOL",
        help="Who printed it: test-backend-ops, llama-bench, llama-batched-bench, llama-perplexity, harness, profile, "
        "llama-benchy, vllm-bench, guidellm or aiperf; by default what it looks like.",
    ),
    format_of: str = Option(
        "",
        metavar="FORMAT",
        help="In which format: console, sql, json, jsonl, csv, md, nsys or ncu; by default what it looks like.",
    ),
    *,
    workspace: Workspace,
    out: Out,
) -> None:
    """Import a tool's output from elsewhere, whole or not at all.

    Example: dgxlab import --tool test-backend-ops perf.log.gz
    """
    from dgxlab import imported

    adopted = imported.open_file(file, tool, format_of)
    with workspace.store(create=True) as store:
        new = imported.record(store, adopted)
    reading = adopted.reading
    for note in reading.notes if out.format is Format.human else ():
        out.note(f"note: {note}")
    about = {name: getattr(adopted, name) for name in ("import_id", "sha256", "tool", "format")}
    read = {name: getattr(reading, name) for name in ("provenance", "notes", "rows")}
    known = "" if new else ": in the record already"
    lines = [f"{adopted.import_id}  {adopted.tool} ({adopted.format}), {plural(len(reading.rows), 'row')}{known}"]
    lines += [f"  {name}: {text}" for name, text in reading.provenance.items() if not isinstance(text, dict)]
    lines.append(f"  shown by: {as_typed(f'dgxlab report --form imported {adopted.import_id}')}")
    out.result({**about, "file": adopted.name, "new": new, **read}, "\n".join(lines))


def export(
    file: Path | None = Argument(
        None, help="A new file, - for stdout; its suffix says how: .sqlite, .jsonl, .csv, .parquet, or .json."
    ),
    output: Path | None = Option(None, "--output", "-o", help="FILE, as an option."),
    as_: Kind | None = Option(None, "--as", help="How, whatever the suffix; on stdout csv by default."),
    tool: Tool | None = Option(None, help="Only this tool's rows; sqlite holds all."),
    job: str | None = Option(None, metavar="JOB", help=f"Only this job's: {JOB}."),
    name: str | None = Option(None, help="Only this experiment's, also as an arm of a session, or this session's."),
    imported: str | None = Option(None, metavar="FILE", help="An imported file's rows, by name or id, alone."),
    *,
    workspace: Workspace,
    out: Out,
) -> None:
    """Export measured rows, for other tools to read.

    compare-llama-bench.py reads them as sqlite; as json those of servers are in llama-benchy's format. `import` reads
    again the jsonl of other tools and the json of servers.

    Example: dgxlab export runs.sqlite --tool llama-bench
    """
    from dgxlab import exported

    path = output or file
    if path is None or (output and file):
        raise UsageError("export needs one FILE, - for stdout; --job names a session", next="dgxlab export --help")
    if imported and (tool or job or name):
        raise UsageError("--imported exports one file and takes no other filter", next="dgxlab export --help")
    kind = as_ or ("csv" if str(path) == "-" else path.suffix[1:])
    with workspace.store() as store:
        if imported:
            tables, left = [exported.collect_imported(store, imported)], []
        else:
            job_id = store.named(job) if job else None
            tools = [tool.value] if tool else [each.value for each in Tool]
            tables = [exported.collect(store, each, job=job_id, name=name) for each in tools]
            left = exported.left_out(store, tools, job=job_id, name=name)
    filled = [each for each in tables if each.rows]
    tables, unfit = exported.fitting(filled, kind, job=job, name=name, imported=imported)
    left = [*unfit, *left]
    if not tables:
        shows = next((each.next for each in left if each.next), "dgxlab sessions")
        raise UsageError(f"{store.path} has no such row to export", details="\n".join(_lines(left)), next=shows)
    if str(path) == "-":
        write_bytes(exported.content(tables, kind))
    else:
        exported.write(path, tables, kind)
    lines = []
    for each in tables:
        lines.append(
            f"{plural(len(each.rows), 'row')} of {each.tool} {'on stdout' if str(path) == '-' else f'in {path}'}"
        )
        lines += newest(f"  {commit}  {', '.join(arms)}" for commit, arms in each.builds.items())
    written = [{"tool": each.tool, "rows": len(each.rows), "builds": each.builds} for each in tables]
    if str(path) == "-":
        out.note("\n".join(lines))
    else:
        out.result({"file": str(path), "tools": written, "left_out": left}, "\n".join(lines))
    out.note("\n".join(_lines(left)))


def _lines(left: Iterable[LeftOut]) -> list[str]:
    return [
        f"left out: {plural(each.rows, 'row')} {each.which}" + (f": see {each.next}" if each.next else "")
        for each in left
    ]


def newest(builds: Iterable[str], most: int = 8) -> list[str]:
    """Return the last lines of builds, below one that counts the earlier ones."""
    every = list(builds)
    earlier = len(every) - most
    return [f"  {earlier} earlier builds", *every[-most:]] if earlier > 1 else every


def serve_record(
    port: int = Option(8001, min=0, max=65535, help="On this port of the loopback; 0: any free one."),
    *,
    workspace: Workspace,
    out: Out,
) -> None:
    """Serve the record to a browser here, read-only, until Ctrl-C.

    Example: dgxlab serve-record
    """
    from dgxlab import served

    served.serve(workspace.database, port, lambda address: out.result({"address": address}, address))


@app.add
def check(path: _PathArgument = None, *, workspace: Workspace, out: Out) -> None:
    """Check the record: integrity, seals, evidence, plans and verdicts.

    Example: dgxlab db check
    """
    gc.disable()  # it would scan 100,000 rows repeatedly for cycles; there are none

    from dgxlab import audit, ingest

    with replace(workspace, db=path or workspace.db).store() as store:
        problems = audit.check(store)
        # not problems: impossible values do not mean that the database is damaged
        beyond = [] if problems else list(ingest.impossible_runs(store))
        sessions, size = len(store.job_ids("")), store.path.stat().st_size
    lines = [*(problems or ["ok"]), *(f"note: {each}" for each in beyond)]
    out.result({"problems": problems, "beyond": beyond}, "\n".join(lines))
    share = f", {units.size(size // sessions)} a session" if sessions else ""
    out.note(f"{store.path} has {units.size(size)}{share}")
    if problems:
        again = command("dgxlab", "db", "rebuild", store.path)
        raise CheckFailed(f"{store.path} has {plural(len(problems), 'problem')}", next=again)


@app.add
def text(path: Path = Argument(help="The database."), *, out: Out) -> None:
    """Print every row as a line, for git diff.

    Example: dgxlab db text results.db
    """
    from dgxlab import store

    lines = list(store.textconv(path))
    out.lines(lines, lambda: "\n".join(lines))


_COUNTED = {
    "jobs": "session",
    "experiments": "spec",  # a version of an experiment
    "runs": "run",
    "samples": "sample",
    "imports": "imported file",
    "notes": "note",
}
"""The rows that `merge` counts besides their sum, by table, in the words of `dgxlab report`."""


@app.add
def merge(
    current: Path = Argument(help="The database that receives."),
    other: Path = Argument(help="The one whose rows are added."),
    *,
    out: Out,
) -> None:
    """Add the rows of OTHER that CURRENT lacks.

    It is also git's merge driver.

    Example: dgxlab db merge results.db ../laptop/results.db
    """
    from dgxlab import audit

    with Workspace(current).store() as store:
        counts = audit.merge(store, other)
    named = [plural(counts[table], word) for table, word in _COUNTED.items() if counts[table]]
    text = f"{plural(sum(counts.values()), 'row')} added"
    out.result(counts, f"{text}: {', '.join(named)}" if named else text)


@app.add
def rebuild(
    path: _PathArgument = None,
    host: list[str] | None = Option(None, help="A host with jobs of the record; may be given again."),
    *,
    workspace: Workspace,
    out: Out,
) -> None:
    """Rebuild the record from the jobs' files on hosts and here.

    Job folders on hosts and raw files here hold all sessions, but no imports, notes, rejections, tries or fleets. A
    sound database keeps its rows. A damaged one is renamed; the newest sound copy replaces it, or a missing one.

    Example: dgxlab db rebuild new.db --host local
    """
    from dgxlab.cli._display import notes
    from dgxlab.lab import rebuild

    workspace = replace(workspace, db=path or workspace.db)
    rebuild.mend(workspace.database, out.note)
    with workspace.lab(create=True) as lab:
        hosts = [connect(name) for name in host or ()]
        done = rebuild.rebuild(lab, hosts, notes(out))
    lines = [f"{job_id} is left out: {reason}" for job_id, reason in done.left]
    out.result(done, "\n".join([*lines, f"{plural(len(done.added), 'job')} recorded"]))
    if done.left:
        raise CheckFailed(f"{plural(len(done.left), 'job')} could not be recorded", next=command("ls", "-l", lab.raw))
