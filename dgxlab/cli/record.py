"""dgxlab import, export, db: what goes into the record and out of it, its health, and two of them merged."""

from __future__ import annotations

import gc
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dgxlab import units
from dgxlab.cli._app import JOB, App, Desk, connect
from dgxlab.cli._out import Format, Out, plural, table
from dgxlab.errors import CheckFailed, UsageError, command

if TYPE_CHECKING:
    from dgxlab.imported import Imported
    from dgxlab.tools.reading import Values

app = App("Check, merge and rebuild the record.")

PathArgument = Annotated[Path | None, typer.Argument(help="The database; --db by default.", show_default=False)]

SHOWN = 20
"""Rows of a file that people are shown."""


class Tool(StrEnum):
    """Whose rows the record can hand on."""

    llama_bench = "llama-bench"
    test_backend_ops = "test-backend-ops"
    llama_batched_bench = "llama-batched-bench"


def import_(
    file: Annotated[Path, typer.Argument(help="What the tool printed, plain or gzip.", show_default=False)],
    tool: Annotated[
        str,
        typer.Option(
            "--tool",
            metavar="TOOL",
            help="Who printed it: test-backend-ops, llama-bench, llama-batched-bench, llama-perplexity or harness; "
            "by default what it looks like.",
            show_default=False,
        ),
    ] = "",
    format_of: Annotated[
        str,
        typer.Option(
            "--format-of",
            metavar="FORMAT",
            help="In which format: console, sql, json, jsonl, csv or md; by default what it looks like.",
            show_default=False,
        ),
    ] = "",
    *,
    desk: Desk,
    out: Out,
) -> None:
    """Adopt what a tool printed elsewhere, exactly or not at all.

    Example: dgxlab import --tool test-backend-ops perf.log.gz
    """
    from dgxlab import imported

    adopted = imported.open_file(file, tool, format_of)
    with desk.store(create=True) as store:
        new = imported.record(store, adopted)
    for note in adopted.reading.notes if out.format is Format.human else ():
        out.note(f"note: {note}")
    reading = adopted.reading
    value = {
        "import_id": adopted.import_id,
        "sha256": adopted.sha256,
        "file": adopted.name,
        "tool": adopted.tool,
        "format": adopted.format,
        "new": new,
        "provenance": reading.provenance,
        "notes": reading.notes,
        "rows": reading.rows,
    }
    out.result(value, lambda: _as_text(adopted, new))


def export(
    file: Annotated[
        Path, typer.Argument(help="A new file; its suffix says how: .sqlite, .jsonl or .csv.", show_default=False)
    ],
    tool: Annotated[
        Tool | None, typer.Option("--tool", help="Only this tool's rows; into .sqlite go all.", show_default=False)
    ] = None,
    job: Annotated[str | None, typer.Option("--job", metavar="JOB", help=f"Only this job's: {JOB}.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Only jobs of this experiment or session.")] = None,
    imported: Annotated[
        str | None, typer.Option("--imported", metavar="FILE", help="An imported file's rows, by name or id, alone.")
    ] = None,
    *,
    desk: Desk,
    out: Out,
) -> None:
    """Hand on what was measured, for compare-llama-bench.py.

    Example: dgxlab export runs.sqlite --tool llama-bench
    """
    from dgxlab import exported
    from dgxlab.store import the_one

    if imported and (tool or job or name):
        raise UsageError("--imported hands on one file and nothing else", next="dgxlab export --help")
    with desk.store() as store:
        if imported:
            tables = [exported.collect_imported(store, imported)]
        else:
            job_id = the_one(store.job_ids(job), job, next="dgxlab jobs") if job else None
            tools = [tool.value] if tool else list(exported.TABLES)
            tables = [exported.collect(store, each, job=job_id, name=name) for each in tools]
    tables = [each for each in tables if each.rows]
    if not tables:
        raise UsageError(f"{store.path} has no valid run of that kind", next="dgxlab jobs")
    exported.write(file, tables)
    lines = []
    for each in tables:
        lines.append(f"{plural(len(each.rows), 'row')} of {each.tool} in {file}")
        lines += [f"  {commit}  {', '.join(arms)}" for commit, arms in each.builds.items()]
    written = [{"tool": each.tool, "rows": len(each.rows), "builds": each.builds} for each in tables]
    out.result({"file": str(file), "tools": written}, "\n".join(lines))


@app.add("check")
def check(path: PathArgument = None, *, desk: Desk, out: Out) -> None:
    """Check the record: integrity, seals, evidence, plans and verdicts.

    Example: dgxlab db check
    """
    gc.disable()  # it would walk 100,000 rows again and again for cycles, and there are none

    from dgxlab import audit, ingest

    with replace(desk, db=path or desk.db).store() as store:
        problems = audit.check(store)
        beyond = [] if problems else list(ingest.beyond(store))  # sound evidence of what cannot be: no damage
        sessions, size = len(store.job_ids("")), store.path.stat().st_size
    lines = [*(problems or ["ok"]), *(f"note: {each}" for each in beyond)]
    out.result({"problems": problems, "beyond": beyond}, "\n".join(lines))
    share = f", {units.size(size // sessions)} a session" if sessions else ""
    out.note(f"{store.path} has {units.size(size)}{share}")
    if problems:
        again = command("dgxlab", "db", "rebuild", store.path)
        raise CheckFailed(f"{store.path} has {plural(len(problems), 'problem')}", next=again)


@app.add("text")
def text(path: Annotated[Path, typer.Argument(help="The database.", show_default=False)], *, out: Out) -> None:
    """Print every row as a line, for git diff.

    Example: dgxlab db text results.db
    """
    from dgxlab import store

    lines = list(store.text(path))
    out.lines(lines, lambda: "\n".join(lines))


@app.add("merge")
def merge(
    current: Annotated[Path, typer.Argument(help="The database that receives.", show_default=False)],
    other: Annotated[Path, typer.Argument(help="The one whose rows are added.", show_default=False)],
    *,
    out: Out,
) -> None:
    """Add what OTHER has and CURRENT lacks; git's merge driver too.

    Example: dgxlab db merge results.db ../laptop/results.db
    """
    from dgxlab import audit

    with Desk(current).store() as store:
        counts = audit.merge(store, other)
    added = sum(counts.values())
    out.result(counts, f"{added} rows added" + "".join(f", {n} {t}" for t, n in counts.items() if n))


@app.add("rebuild")
def rebuild(
    path: PathArgument = None,
    host: Annotated[
        list[str] | None, typer.Option("--host", help="A host with jobs of the record; may be given again.")
    ] = None,
    *,
    desk: Desk,
    out: Out,
) -> None:
    """Record anew what jobs left on hosts, and here.

    Their folders there and their raw files here hold all of it. A sound database keeps what it has. One that is damaged
    or gone is set aside first, and its newest sound copy is where this begins: what was imported is in that alone.

    Example: dgxlab db rebuild new.db --host local
    """
    from dgxlab.lab import rebuild

    desk = replace(desk, db=path or desk.db)
    rebuild.mend(desk.database, out.note)
    with desk.lab(create=True) as lab:
        hosts = [connect(name) for name in host or ()]
        done = rebuild.rebuild(lab, hosts, lambda event: out.note(getattr(event, "note", "")))
    reasons = [f"{job_id} is left out: {reason}" for job_id, reason in done.left]
    out.result(done, "\n".join([*reasons, f"{plural(len(done.added), 'job')} recorded"]))
    if done.left:
        raise CheckFailed(f"{plural(len(done.left), 'job')} could not be recorded", next=command("ls", "-l", lab.raw))


def _as_text(adopted: Imported, new: bool) -> str:
    rows = adopted.reading.rows
    head = f"{adopted.import_id}  {adopted.tool} ({adopted.format}), {plural(len(rows), 'row')}"
    lines = [head if new else f"{head}: in the record already"]
    lines += [f"  {name}: {text}" for name, text in adopted.reading.provenance.items() if not isinstance(text, dict)]
    names = list(dict.fromkeys(each.metric for row in rows[:SHOWN] for each in row.values))
    shown = []
    for row in rows[:SHOWN]:
        values = {each.metric: each for each in row.values}
        shown.append({"": row.label, **{name: _text(values.get(name)) for name in names}})
    lines.append(table(shown, right=names))
    return "\n".join([*lines, *([f"and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else [])])


def _text(values: Values | None) -> str:
    if values is None:
        return ""
    first = f"{values.values[0]:.10g}"
    more = f" and {len(values.values) - 1} more" if len(values.values) > 1 else ""
    return f"{first}{more} {values.unit}".rstrip() + (" (discarded)" if values.discarded else "")
