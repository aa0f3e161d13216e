"""Export measured and imported rows in the tools' own columns, as JSON lines, CSV, SQLite or Parquet.

As JSON, rows of servers become a report of llama-benchy, which others compare.

llama.cpp's scripts/compare-llama-bench.py reads the first three. Rows have llama.cpp's columns, then columns of
provenance, which that script ignores. `build_commit` is ours: llama.cpp's own is the same for a patched build. Rows of
an imported file keep their columns and are never mixed with other rows.
"""

import contextlib
import csv
import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dgxlab import __version__
from dgxlab.errors import AGAIN, UsageError, access, command, needs
from dgxlab.model import digest
from dgxlab.report.imports import find_import
from dgxlab.store import UNFIT, WARM_UP, Store, alias
from dgxlab.tools import EXPORTED, TOOLS, clients
from dgxlab.tools.reading import ORIGIN, decoded

PYARROW = "pyarrow>=17"
COMMIT_DIGITS = 8  # length of every build_commit: compare-llama-bench.py cuts all to the shortest

WHY = f"""coalesce({UNFIT}, iif(EXISTS (SELECT 1 FROM samples AS s WHERE s.run_id = rows.run_id AND s.cell = rows.cell
    AND s.discarded IS NULL), NULL, 'had no sample that counts'))"""  # noqa: S608 - a constant of ours

WITH_RUNS = """rows JOIN runs USING (run_id) JOIN arms USING (job_id, arm) LEFT JOIN chain_runs USING (run_id)
    WHERE (:job IS NULL OR runs.job_id = :job)
    AND (:name IS NULL OR :name = runs.arm OR runs.job_id IN (SELECT job_id FROM jobs WHERE jobs.name = :name))"""

ROWS = f"""
    SELECT rows.raw, rows.cell, run_id, runs.job_id, runs.arm, runs.build_id, device_id, runs.env_digest, runs.env,
           arms.commit_id, arms.pin, arms.tree, arms.series, arms.dirty
    FROM {WITH_RUNS} AND runs.tool = :tool AND {WHY} IS NULL
    ORDER BY runs.started, run_id, rows.rowid"""  # noqa: S608 - a constant of ours

LEFT_OUT = f"""
    SELECT {WHY} AS why, count(*) AS count, runs.job_id, max(runs.started)
    FROM {WITH_RUNS} AND runs.tool IN (SELECT value FROM json_each(:tools)) AND why IS NOT NULL
    GROUP BY why ORDER BY why"""  # noqa: S608 - a constant of ours

COUNTED = """SELECT metric, value FROM samples
    WHERE run_id = ? AND cell = ? AND discarded IS NULL ORDER BY metric, ordinal"""


@dataclass(frozen=True)
class Exported:
    """The rows of one tool, each with llama.cpp's columns first, then those of provenance."""

    tool: str  # its program
    rows: tuple[Mapping[str, Any], ...]
    builds: Mapping[str, tuple[str, ...]]  # the arms of each build_commit; for imported rows the file


@dataclass(frozen=True)
class LeftOut:
    """Rows that an export does not have."""

    rows: int
    which: str  # to read after "5 rows"
    next: str  # the command that shows them, of several sessions the last's; "" for warm-ups, which no report has


def collect(store: Store, tool: str, *, job: str | None = None, name: str | None = None) -> Exported:
    """Return the rows of a tool's runs that count, oldest first; `left_out` counts the others.

    With `job`, only rows of the job with this id; with `name`, only rows of the experiment or the jobs of this name,
    those of an experiment as an arm too.
    """
    bench = EXPORTED[tool]
    measured = store.rows(ROWS, {"tool": bench.name, "job": job, "name": name})
    # name a build and environment by its commit if that is unique, else by a digest of both
    identities = sorted({(row["commit_id"], row["build_id"], row["env_digest"]) for row in measured})
    short = [commit[:COMMIT_DIGITS] for commit, _, _ in identities]
    commits = {
        identity: digest(identity[1:], COMMIT_DIGITS) if short.count(commit) > 1 else commit
        for identity, commit in zip(identities, short, strict=True)
    }
    rows: list[dict[str, Any]] = []
    builds: dict[str, dict[str, None]] = {}
    for row in measured:
        samples: dict[str, list[float]] = {}
        for sample in store.rows(COUNTED, (row["run_id"], row["cell"])):
            samples.setdefault(sample["metric"], []).append(sample["value"])
        commit = commits[row["commit_id"], row["build_id"], row["env_digest"]]
        builds.setdefault(commit, {})[row["arm"]] = None
        printed = _plain(bench.exported(json.loads(row["raw"]), samples))
        rows.append({**printed, "build_commit": commit, **{name: row[name] for name in ORIGIN}})
    return Exported(tool, tuple(rows), {commit: tuple(arms) for commit, arms in builds.items()})


def left_out(store: Store, tools: Sequence[str], *, job: str | None = None, name: str | None = None) -> list[LeftOut]:
    """Return which rows of these tools `collect` leaves out."""
    names = json.dumps([EXPORTED[tool].name for tool in tools])
    left = []
    for row in store.rows(LEFT_OUT, {"tools": names, "job": job, "name": name}):
        shows = "" if row["why"] == WARM_UP else command("dgxlab", "report", alias(row["job_id"]), "--wide")
        left.append(LeftOut(row["count"], f"whose run {row['why']}", shows))
    return left


def collect_imported(store: Store, name: str) -> Exported:
    """Return the rows of an imported file, given its name or the beginning of its id.

    Raises UsageError if there is no such file, or its rows lack columns that llama.cpp's script needs.
    """
    file = find_import(store, name)
    whole = {(tool, name): kind for tool in EXPORTED for name, kind in TOOLS[tool].formats.items() if kind.rows}
    kind = whole.get((file["tool"], file["format"]))
    if kind is None:
        kinds = ", ".join(f"{tool} ({name})" for tool, name in whole)
        raise UsageError(
            f"{file['name']} is output of {file['tool']} ({file['format']}), whose rows lack columns that {kinds} have",
            next="dgxlab report --form imported",
        )
    content = store.rows("SELECT content FROM imports WHERE import_id = ?", (file["import_id"],))[0]["content"]
    origin = {"imported": file["name"], "sha256": file["sha256"]}
    rows = [{**_plain(line.columns), **origin} for line in kind.lines(decoded(content.encode()))]
    commits = dict.fromkeys(str(row.get("build_commit", "")) for row in rows)
    return Exported(file["tool"], tuple(rows), dict.fromkeys(commits, (file["name"],)))


def _plain(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns as all formats can hold them: a bool becomes 1 or 0."""
    return {name: int(value) if isinstance(value, bool) else value for name, value in columns.items()}


def fitting(
    tools: Sequence[Exported],
    kind: str,
    *,
    job: str | None = None,
    name: str | None = None,
    imported: str | None = None,
) -> tuple[list[Exported], list[LeftOut]]:
    """Return what a file of this kind can hold of exported rows, and which rows it cannot.

    `job` and `name`, or `imported`, are what the rows were collected by.
    """

    def whole(tool: str) -> str:
        by = {"--imported": imported} if imported else {"--tool": tool, "--job": job, "--name": name}
        return command("dgxlab", "export", "rows.jsonl", *(word for pair in by.items() if pair[1] for word in pair))

    if kind != "json":
        return [*tools], []
    kept = [
        replace(each, rows=tuple(row for row in each.rows if "pl" in row and row.get("requests"))) for each in tools
    ]
    left = [
        LeftOut(count, f"of {each.tool}, which json cannot hold", whole(each.tool))
        for each, part in zip(tools, kept, strict=True)
        if (count := len(each.rows) - len(part.rows))
    ]
    return [each for each in kept if each.rows], left


def write(path: Path, tools: Sequence[Exported], kind: str = "") -> None:
    """Write exported rows into a new file, completely or not at all.

    `kind` is one of KINDS, "" for the one that the file's suffix names. Only SQLite takes several tools: each is a
    table. Raises UsageError if the file exists or cannot be written, its suffix is unknown, it cannot hold several
    tools, or a module is missing.
    """
    kind = kind or path.suffix[1:]
    if kind not in KINDS:
        names = ", ".join(f"*.{kind}" for kind in KINDS)
        raise UsageError(f"the suffix of {path.name} is unknown: name it {names}", next="dgxlab export --help")
    if path.exists():
        raise UsageError(f"{path} is there already, and nothing is written over", next=command("ls", "-l", path))
    with access(path, "written", UsageError), tempfile.TemporaryDirectory(dir=path.parent, prefix=".dgxlab-") as folder:
        whole = Path(folder) / path.name
        _encode(whole, tools, kind)
        os.link(whole, path)  # unlike a rename, it fails if another program has created the file


def content(tools: Sequence[Exported], kind: str) -> bytes:
    """Return what `write` would write; raises UsageError as it does."""
    with tempfile.TemporaryDirectory(prefix="dgxlab-export-") as folder:
        whole = Path(folder) / "rows"
        _encode(whole, tools, kind)
        return whole.read_bytes()


def _encode(path: Path, tools: Sequence[Exported], kind: str) -> None:
    if len(tools) > 1 and kind != "sqlite":
        names = ", ".join(each.tool for each in tools)
        message = f"{kind} holds the rows of one tool, and there are {names}: name one with --tool"
        raise UsageError(message, next=f"{AGAIN} with --tool {tools[0].tool}")
    KINDS[kind](path, tools)


def _jsonl(path: Path, tools: Sequence[Exported]) -> None:
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for each in tools for row in each.rows)
    path.write_text("".join(lines), encoding="utf-8")


def _csv(path: Path, tools: Sequence[Exported]) -> None:
    rows, names = _flat([row for each in tools for row in each.rows])
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _sqlite(path: Path, tools: Sequence[Exported]) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for each in tools:
            rows, names = _flat(each.rows)
            kinds = {name: {type(row.get(name)) for row in rows} for name in names}
            types = ("TEXT" if str in kind else "REAL" if float in kind else "INTEGER" for kind in kinds.values())
            columns = ", ".join(f'"{name}" {kind}' for name, kind in zip(names, types, strict=True))
            table = each.tool.replace("-", "_")  # as in the tool's own SQL
            connection.execute(f"CREATE TABLE {table} ({columns})")
            insert = f"INSERT INTO {table} VALUES ({','.join('?' * len(names))})"  # noqa: S608 - a name of ours
            connection.executemany(insert, [[row.get(name) for name in names] for row in rows])


def _parquet(path: Path, tools: Sequence[Exported]) -> None:
    with needs(PYARROW, "Parquet is written with pyarrow"):
        import pyarrow
        from pyarrow import parquet
    rows = [row for each in tools for row in each.rows]
    columns: dict[str, list[Any]] = {name: [] for row in rows for name in row}
    for name, values in columns.items():
        values.extend(row.get(name) for row in rows)
        if {str} < {type(value) for value in values} - {type(None)}:  # a column has one type
            columns[name] = [None if value is None else str(value) for value in values]
    parquet.write_table(pyarrow.table(columns), path)


def _json(path: Path, tools: Sequence[Exported]) -> None:
    rows = [row for each in tools for row in each.rows]
    if len({tuple(row[name] for name in ("model", "arm", "build_id", "device_id", "env")) for row in rows}) != 1:
        message = "json is llama-benchy's format, of one model, build and device of a server; *.jsonl takes several"
        raise UsageError(message, next="dgxlab sessions")
    report = clients.benchy(rows, f"dgxlab {__version__}", time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime()))
    path.write_text(json.dumps(report, indent=2), encoding="utf-8")


def _flat(rows: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows without list values, which do not fit into a column, and the names of all columns."""
    flat = [{name: value for name, value in row.items() if not isinstance(value, list)} for row in rows]
    return flat, list(dict.fromkeys(name for row in flat for name in row))


KINDS: Mapping[str, Callable[[Path, Sequence[Exported]], None]] = {
    "sqlite": _sqlite,
    "jsonl": _jsonl,
    "csv": _csv,
    "parquet": _parquet,
    "json": _json,
}
"""By format, which is also the suffix of its files, the function that writes it."""
