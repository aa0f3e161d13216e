"""dgxlab import and export: raw output of tools into the record, and what was measured out of it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgxlab.cli._lab import store
from dgxlab.cli._options import DbOption, Format, FormatOption, QuietOption
from dgxlab.cli._out import Out, plural, table
from dgxlab.errors import UsageError

if TYPE_CHECKING:
    from dgxlab.imported import Imported, Values

SHOWN = 20
"""Rows of a file that people are shown."""


class Tool(StrEnum):
    """Whose rows the record can hand on."""

    llama_bench = "llama-bench"
    test_backend_ops = "test-backend-ops"
    llama_batched_bench = "llama-batched-bench"


def import_(
    file: Annotated[
        Path | None, typer.Argument(help="What the tool printed, plain or gzip.", show_default=False)
    ] = None,
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
    published: Annotated[
        bool, typer.Option("--published", help="Adopt the figures of documents that come with dgxlab, and no file.")
    ] = False,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Adopt what a tool printed elsewhere, exactly or not at all.

    Example: dgxlab import --tool test-backend-ops perf.log.gz
    """
    from dgxlab import imported

    if published and not (file or tool or format_of):
        _published(db, Out(format, quiet))
        return
    if published or file is None:
        raise UsageError("a file or --published is what can be imported, one of them", next="dgxlab import --help")
    found = imported.open_file(file, tool, format_of)
    with store(db, create=True) as opened:
        new = imported.record(opened, found)
    out = Out(format, quiet)
    for note in found.reading.notes if format is Format.human else ():
        out.note(f"note: {note}")
    out.result(_as_json(found, new), lambda: _as_text(found, new))


def _published(db: Path | None, out: Out) -> None:
    """Add the published record to the database; what is there already stays."""
    from dgxlab import published

    with store(db, create=True) as opened:
        added = published.load(opened)
    out.result(added, ", ".join(f"{plural(count, 'row')} of {table} added" for table, count in added.items()))


def export(
    file: Annotated[
        Path, typer.Argument(help="A new file; its suffix says how: .sqlite, .jsonl or .csv.", show_default=False)
    ],
    tool: Annotated[
        Tool | None, typer.Option("--tool", help="Only this tool's rows; into .sqlite go all.", show_default=False)
    ] = None,
    job: Annotated[
        str | None, typer.Option("--job", metavar="JOB", help="Only this job's; the beginning of its id is enough.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Only jobs of this experiment or session.")] = None,
    imported: Annotated[
        str | None, typer.Option("--imported", metavar="FILE", help="An imported file's rows, by name or id, alone.")
    ] = None,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Hand on what was measured, for compare-llama-bench.py.

    Example: dgxlab export runs.sqlite --tool llama-bench
    """
    from dgxlab import exported
    from dgxlab.store import the_one

    if imported and (tool or job or name):
        raise UsageError("--imported hands on one file and nothing else", next="dgxlab export --help")
    with store(db) as opened:
        job_id = the_one(opened.job_ids(job), job, next="dgxlab jobs") if job else None
        tools = [tool.value] if tool else list(exported.TABLES)
        found = (
            [exported.collect_imported(opened, imported)]
            if imported
            else [exported.collect(opened, each, job=job_id, name=name) for each in tools]
        )
    found = [each for each in found if each.rows]
    if not found:
        raise UsageError(f"{opened.path} has no valid run of that kind", next="dgxlab jobs")
    exported.write(file, found)
    told = [{"tool": each.tool, "rows": len(each.rows), "builds": each.builds} for each in found]
    lines = [
        line
        for each in found
        for line in (
            f"{plural(len(each.rows), 'row')} of {each.tool} in {file}",
            *(f"  {commit}  {', '.join(arms)}" for commit, arms in each.builds.items()),
        )
    ]
    Out(format, quiet).result({"file": str(file), "tools": told}, "\n".join(lines))


def _as_json(found: Imported, new: bool) -> dict[str, Any]:
    reading = found.reading
    return {
        "import_id": found.import_id,
        "sha256": found.sha256,
        "file": found.name,
        "tool": found.tool,
        "format": found.format,
        "new": new,
        "provenance": reading.provenance,
        "notes": reading.notes,
        "rows": reading.rows,
    }


def _as_text(found: Imported, new: bool) -> str:
    rows = found.reading.rows
    head = f"{found.import_id}  {found.tool} ({found.format}), {plural(len(rows), 'row')}"
    lines = [head if new else f"{head}: in the record already"]
    lines += [f"  {name}: {said}" for name, said in found.reading.provenance.items() if not isinstance(said, dict)]
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
