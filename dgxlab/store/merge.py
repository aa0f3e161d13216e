"""What git asks of a record: to show it as lines, and to add another one to it.

A merge is the union of what both know, in either order the same. What both have must say the same: one who has read
more of a job's journal has all that the other has. Only what is known to change with time may differ, and then a rule
that looks at both decides: `SETTLE` for labels, imports and what ingest itself says of a run, `merge_jobs` for jobs.
Verdicts are computed again.
"""

# ruff: noqa: S608 - names of tables and columns are our own, values are always bound

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dgxlab.errors import CheckFailed, SpecError, command
from dgxlab.model import canonical
from dgxlab.store.connect import named_errors, plain, version
from dgxlab.store.records import RANK
from dgxlab.store.schema import BEHIND_VIEWS, DEFLATED, ROOFLINE, UPSERT, VIEWS, inflated
from dgxlab.store.seals import broken, seal_all
from dgxlab.store.store import Store


@dataclass(frozen=True)
class Table:
    """How a table is merged.

    Attributes:
        may_differ: Columns that a rule settles; every other one must be equal under the same key.
        part_of: The table whose parts it holds and its key, () for none: of a run that both have, both must have the
            same parts, for half a run of one and half of the other would look like a run. Of a job that both have, only
            the one that has read more of its journal may have parts that the other lacks.
        unless: SQL of rows that are left alone, given their alias.
        key: Its primary key, as the database says.
    """

    name: str
    may_differ: tuple[str, ...] = ()
    part_of: tuple[str, str] | tuple[()] = ()
    unless: str = "false"
    key: tuple[str, ...] = ()


INTENT = ("intent_at", "host", "dgxlab_version")
"""What a client wrote about a job; of two clients that know it the earlier one started it."""

PROGRESS = (
    *("state", "exit_code", "error", "next", "details", "host_id", "boot_id", "agent_version", "protocol"),
    *("journal_bytes", "journal_lines", "journal_seq", "facts", "finished_at"),
)
"""What became of a job; taken together from the database that has read more of its journal."""

TOLD_ONCE = ("experiment", "facts", "host_id", "boot_id", "agent_version")
"""Columns of a job that are NULL until they are known, and never change afterwards."""

ENDING = ("state", "exit_code", "finished_at")
"""Columns of a job that do not change once its journal has told its end."""

SETTLE = {
    **UPSERT,
    # two versions may say in other words that a number cannot be true
    "flags": f"""ON CONFLICT (run_id, device, kind) DO UPDATE SET reason = excluded.reason
        WHERE kind = '{ROOFLINE}' AND excluded.reason < flags.reason""",
}
"""What to do with a key that both have."""

OF_JOB, OF_RUN = ("jobs", "job_id"), ("runs", "run_id")

TABLES = (  # parents before children
    Table("experiments"),
    Table("jobs", may_differ=("experiment", *INTENT, *PROGRESS)),
    Table("devices"),
    Table("arms", part_of=OF_JOB),
    Table("inputs", part_of=OF_JOB),
    Table("cells", may_differ=("label",)),
    Table("case_lists"),
    Table("gates", part_of=OF_JOB),
    Table("checks", part_of=OF_JOB),
    Table("runs", part_of=OF_JOB),
    *(Table(name, part_of=OF_RUN) for name in ("rows", "samples", "telemetry")),
    Table("flags", part_of=OF_RUN, unless=f"{{}}.kind = '{ROOFLINE}'"),
    Table("chain_runs", part_of=OF_RUN),
    Table("imports", may_differ=("name", "at", "content")),
    Table("rejections", may_differ=("reason", "at")),
)


@contextlib.contextmanager
def merging(into: Store, other: Path) -> Iterator[dict[str, int]]:
    """Add every row of the database `other` that `into` lacks; `other` is only read.

    The block computes the verdicts again, and changes nothing if it raises.

    Yields:
        For each table how many rows were added.

    Raises:
        CheckFailed: if the same key has another content, or a database is not what was sealed; nothing was changed.
        SpecError: if `other` is not a dgxlab database, or of a newer dgxlab.
    """
    connection = into.connection
    with tempfile.TemporaryDirectory(prefix="dgxlab-merge-") as folder:
        # a copy, at the current schema: the file itself may be older, and is not ours
        copy = Path(folder) / "theirs.db"
        _copy(other, copy)
        connection.execute("ATTACH ? AS theirs", (str(copy),))
        try:
            with into.transaction():
                _refuse_broken(connection, into.path)
                tables = [replace(table, key=_key(connection, table.name)) for table in TABLES]
                for table in tables:
                    _refuse_conflicts(connection, into.path, other, table)
                counts = {table.name: _add(connection, table) for table in tables}
                seal_all(connection)
                yield counts
        finally:
            connection.execute("DETACH theirs")


def merge_jobs(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two rows of the same job make: the earlier intent, the more advanced progress, any experiment."""
    intent = min((ours, theirs), key=lambda row: [row[name] for name in INTENT])
    # the text at the end only makes the choice the same from both sides
    progress = max(
        (ours, theirs),
        key=lambda row: (
            *(row["journal_seq"], RANK[row["state"]], row["journal_lines"]),
            canonical([row[name] for name in PROGRESS]),
        ),
    )
    return {
        **{name: intent[name] for name in INTENT},
        **{name: progress[name] for name in PROGRESS},
        "experiment": ours["experiment"] or theirs["experiment"],
    }


def _copy(other: Path, copy: Path) -> None:
    source = plain(other)
    try:
        with named_errors(other):
            if version(source, other) == 0:
                raise SpecError(f"{other} is an empty file, not a dgxlab database")
            target = sqlite3.connect(copy)
            target.execute("PRAGMA synchronous = OFF")  # the copy is of no use after a crash
            source.backup(target)
            target.close()
    finally:
        source.close()
    with Store.open(copy, create=False) as store:
        _refuse_broken(store.connection, other)


def _refuse_broken(connection: sqlite3.Connection, path: Path) -> None:
    for sentence in broken(connection):
        raise CheckFailed(f"{path}: {sentence}; nothing was merged", next=command("dgxlab", "db", "check", path))


def _refuse_conflicts(connection: sqlite3.Connection, ours: Path, theirs: Path, table: Table) -> None:
    for sql in (_different(connection, table), *_torn(table)):
        if row := connection.execute(sql).fetchone():
            key = ", ".join(f"{name} {value}" for name, value in zip(table.key, row, strict=True))
            raise CheckFailed(
                f"{ours} and {theirs} disagree on {table.name} {key}: nothing was merged",
                next=command("dgxlab", "db", "check", theirs),
            )


def _different(connection: sqlite3.Connection, table: Table) -> str:
    """Return SQL for a key that both have with different content."""
    settled = {*table.key, *table.may_differ}
    packed = DEFLATED.get(table.name, ())  # another zlib packs the same text into other bytes
    tests = [
        f"inflated(m.{name}) IS NOT inflated(t.{name})" if name in packed else f"m.{name} IS NOT t.{name}"
        for name in _columns(connection, table.name)
        if name not in settled
    ]
    if table.name == "jobs":
        tests += [f"m.{name} <> t.{name}" for name in TOLD_ONCE]
        ended = "m.finished_at IS NOT NULL AND t.finished_at IS NOT NULL"
        tests.append(f"{ended} AND ({_list('m', ENDING)}) IS NOT ({_list('t', ENDING)})")
    return (
        f"SELECT {_list('t', table.key)} FROM theirs.{table.name} AS t JOIN main.{table.name} AS m"
        f" USING ({','.join(table.key)}) WHERE ({' OR '.join(tests) or 'false'}) AND NOT ({table.unless.format('m')})"
        f" ORDER BY {_list('t', table.key)} LIMIT 1"
    )


def _torn(table: Table) -> Iterator[str]:
    """Yield SQL for a part that only one side has, of a run or a job that both have."""
    if not table.part_of:
        return
    whole, key = table.part_of
    for side, other in (("main", "theirs"), ("theirs", "main")):
        read_more = (
            f"(SELECT journal_seq FROM {side}.jobs WHERE job_id = a.job_id) > r.journal_seq"
            if whole == "jobs"
            else "false"
        )
        yield (
            f"SELECT {_list('a', table.key)} FROM {side}.{table.name} AS a"
            f" WHERE EXISTS (SELECT 1 FROM {other}.{whole} AS r WHERE r.{key} = a.{key} AND NOT {read_more})"
            f" AND NOT EXISTS (SELECT 1 FROM {other}.{table.name} AS b WHERE {_same('a', 'b', table.key)})"
            f" AND NOT ({table.unless.format('a')}) LIMIT 1"
        )


def _add(connection: sqlite3.Connection, table: Table) -> int:
    """Insert what is new, settle what may differ, and return how many rows are new."""
    count = f"SELECT count(*) FROM main.{table.name}"
    (before,) = connection.execute(count).fetchone()
    names = ",".join(_columns(connection, table.name))
    if table.name == "jobs":
        ours, theirs = (_jobs(connection, side) for side in ("main", "theirs"))
        for job_id in ours.keys() & theirs.keys():
            merged = merge_jobs(ours[job_id], theirs[job_id])
            sets = ",".join(f"{name} = ?" for name in merged)
            connection.execute(f"UPDATE main.jobs SET {sets} WHERE job_id = ?", (*merged.values(), job_id))
    upsert = SETTLE.get(table.name, "")
    is_new = f"NOT EXISTS (SELECT 1 FROM main.{table.name} AS m WHERE {_same('m', 't', table.key)})"
    connection.execute(
        f"INSERT INTO main.{table.name} ({names}) SELECT {names} FROM theirs.{table.name} AS t"
        f" WHERE {'true' if upsert else is_new} {upsert}"
    )
    (after,) = connection.execute(count).fetchone()
    return int(after - before)


def _jobs(connection: sqlite3.Connection, side: str) -> dict[str, dict[str, Any]]:
    names = _columns(connection, "jobs")
    return {row[0]: dict(zip(names, row, strict=True)) for row in connection.execute(f"SELECT * FROM {side}.jobs")}


def _key(connection: sqlite3.Connection, table: str) -> tuple[str, ...]:
    sql = "SELECT name FROM pragma_table_info(?, 'main') WHERE pk ORDER BY pk"
    return VIEWS.get(table) or tuple(name for (name,) in connection.execute(sql, (table,)))


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA main.table_info({table})")]


def _same(left: str, right: str, key: tuple[str, ...]) -> str:
    return " AND ".join(f"{left}.{name} = {right}.{name}" for name in key)


def _list(alias: str, key: tuple[str, ...]) -> str:
    return ",".join(f"{alias}.{name}" for name in key)


LONG = 120
"""Characters of a value above which only its beginning is shown, with a digest of all of it."""


def text(path: Path) -> Iterator[str]:
    """Yield a line for each row of each table, in an order that adding rows does not change; the file is only read.

    Raises:
        SpecError: if it is no database of ours, or damaged.
    """
    # what git hands over has no log beside it, and none may be made
    with named_errors(path), contextlib.closing(plain(path, immutable=True)) as connection:
        yield f"schema {version(connection, path)}"
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        if not tables.isdisjoint(BEHIND_VIEWS):
            tables = tables.difference(BEHIND_VIEWS).union(VIEWS)
        for table in sorted(tables):
            yield from _rows(connection, table)


def _rows(connection: sqlite3.Connection, table: str) -> Iterator[str]:
    cursor = connection.execute(f'SELECT * FROM "{table}"')
    names = [column[0] for column in cursor.description]
    rows = (zip(names, row, strict=True) for row in cursor)
    shown = ({name: _short(value) for name, value in row if value is not None} for row in rows)
    yield from sorted(f"{table} {json.dumps(row, ensure_ascii=False)}" for row in shown)


def _short(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            value = inflated(value)
        except ValueError:
            return f"{len(value)} bytes, sha256 {hashlib.sha256(value).hexdigest()[:16]}"
    if isinstance(value, str) and len(value) > LONG:
        return f"{value[:40]}... ({len(value)} characters, sha256 {hashlib.sha256(value.encode()).hexdigest()[:16]})"
    return value
