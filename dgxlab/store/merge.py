"""Operations for git: show a record as lines, and merge another record into it.

A merge is the union of both records, independent of their order. Common rows must be equal: the record that has read
more of a job's journal has all rows of the other. Only columns that may change with time can differ; a symmetric rule
settles them: `SETTLE` for labels, imports and ingest's own flags, `merge_jobs` for jobs. Verdicts are recomputed.
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
from dgxlab.store.connect import named_errors, open_existing, version
from dgxlab.store.records import RANK
from dgxlab.store.schema import BEHIND_VIEWS, DEFLATED, ROOFLINE, UPSERT, VIEWS, inflated
from dgxlab.store.seals import broken, seal_all
from dgxlab.store.store import Store


@dataclass(frozen=True)
class _MergeRule:
    name: str
    may_differ: tuple[str, ...] = ()  # columns that a rule settles; all others must be equal under the same key
    # The parent table and its key. For a common run both sides must have the same rows; for a common job only the side
    # that has read more of its journal may have more: halves of two runs would look like one.
    part_of: tuple[str, str] | tuple[()] = ()
    unless: str = "false"  # SQL condition for rows to skip, given their alias
    key: tuple[str, ...] = ()  # primary, as the database says


INTENT = ("intent_at", "host", "dgxlab_version")  # written by a client; of two, the earlier one started the job
PROGRESS = (  # progress of a job; all taken from the database that has read more of its journal
    *("state", "exit_code", "error", "next", "details", "host_id", "boot_id", "agent_version", "protocol"),
    *("journal_bytes", "journal_lines", "journal_seq", "facts", "finished_at"),
)
WRITTEN_ONCE = ("experiment", "facts", "host_id", "boot_id", "agent_version")  # NULL until known, then never changed
ENDING = ("state", "exit_code", "finished_at")  # never changed after the journal's end event
SETTLE = {
    **UPSERT,
    # the wording for an impossible number may differ between versions
    "flags": f"""ON CONFLICT (run_id, device, kind) DO UPDATE SET reason = excluded.reason
        WHERE kind = '{ROOFLINE}' AND excluded.reason < flags.reason""",
}
OF_JOB, OF_RUN = ("jobs", "job_id"), ("runs", "run_id")
TABLES = (  # parents before children
    _MergeRule("experiments"),
    _MergeRule("jobs", may_differ=("experiment", *INTENT, *PROGRESS)),
    _MergeRule("devices"),
    _MergeRule("arms", part_of=OF_JOB),
    _MergeRule("inputs", part_of=OF_JOB),
    _MergeRule("cells", may_differ=("label",)),
    _MergeRule("case_lists"),
    _MergeRule("gates", part_of=OF_JOB),
    _MergeRule("checks", part_of=OF_JOB),
    _MergeRule("runs", part_of=OF_JOB),
    *(_MergeRule(name, part_of=OF_RUN) for name in ("rows", "samples", "telemetry")),
    _MergeRule("flags", part_of=OF_RUN, unless=f"{{}}.kind = '{ROOFLINE}'"),
    _MergeRule("chain_runs", part_of=OF_RUN),
    _MergeRule("imports", may_differ=("name", "at", "content")),
    _MergeRule("rejections", may_differ=("reason", "at")),
    _MergeRule("notes"),
    *map(_MergeRule, ("tries", "try_sessions", "try_ends", "fleets")),
)


@contextlib.contextmanager
def merging(into: Store, other: Path) -> Iterator[dict[str, int]]:
    """Add every row of the database `other` that `into` lacks; yield how many rows were added, by table.

    The caller computes the verdicts again in the block; if that raises, nothing is changed.

    Raises:
        CheckFailed: if a key has different content, or a database does not match its seals; nothing was changed.
        SpecError: if `other` is not a dgxlab database, or of a newer dgxlab.
    """
    connection = into.connection
    with tempfile.TemporaryDirectory(prefix="dgxlab-merge-") as folder:
        # a copy, at the current schema: the file itself may be older, and is only read
        copy = Path(folder) / "theirs.db"
        with contextlib.closing(open_existing(other)) as source, named_errors(other):
            if version(source, other) == 0:
                raise SpecError(f"{other} is an empty file, not a dgxlab database")
            with contextlib.closing(sqlite3.connect(copy)) as target:
                target.execute("PRAGMA synchronous = OFF")  # the copy is useless after a crash
                source.backup(target)
        with Store.open(copy, create=False) as store:
            _refuse_broken(store.connection, other)
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
    """Return the columns of a job that may differ between two records, merged from its rows there.

    The columns INTENT are those of the earlier intent, PROGRESS those of the row that has read more of the journal.
    """
    intent = min((ours, theirs), key=lambda row: [row[name] for name in INTENT])
    # the text at the end only makes the choice symmetric
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


def _refuse_broken(connection: sqlite3.Connection, path: Path) -> None:
    for sentence in broken(connection):
        raise CheckFailed(f"{path}: {sentence}; nothing was merged", next=command("dgxlab", "db", "check", path))


def _refuse_conflicts(connection: sqlite3.Connection, ours: Path, theirs: Path, table: _MergeRule) -> None:
    for sql in (_different(connection, table), *_torn(table)):
        if row := connection.execute(sql).fetchone():
            key = ", ".join(f"{name} {value}" for name, value in zip(table.key, row, strict=True))
            message = f"{ours} and {theirs} disagree on {table.name} {key}: nothing was merged"
            raise CheckFailed(message, next=command("dgxlab", "db", "check", theirs))


def _different(connection: sqlite3.Connection, table: _MergeRule) -> str:
    packed = DEFLATED.get(table.name, ())  # another zlib packs the same text into other bytes
    tests = [
        f"inflated(m.{name}) IS NOT inflated(t.{name})" if name in packed else f"m.{name} IS NOT t.{name}"
        for name in _columns(connection, table.name)
        if name not in (*table.key, *table.may_differ)
    ]
    if table.name == "jobs":
        tests += [f"m.{name} <> t.{name}" for name in WRITTEN_ONCE]
        ended = "m.finished_at IS NOT NULL AND t.finished_at IS NOT NULL"
        tests.append(f"{ended} AND ({_list('m', ENDING)}) IS NOT ({_list('t', ENDING)})")
    return (
        f"SELECT {_list('t', table.key)} FROM theirs.{table.name} AS t JOIN main.{table.name} AS m"
        f" USING ({','.join(table.key)}) WHERE ({' OR '.join(tests) or 'false'}) AND NOT ({table.unless.format('m')})"
        f" ORDER BY {_list('t', table.key)} LIMIT 1"
    )


def _torn(table: _MergeRule) -> Iterator[str]:
    """Yield SQL that finds a row that only one side has, of a run or job that both have."""
    if not table.part_of:
        return
    whole, key = table.part_of
    for side, other in (("main", "theirs"), ("theirs", "main")):
        more = f"(SELECT journal_seq FROM {side}.jobs WHERE job_id = a.job_id) > r.journal_seq"
        yield (
            f"SELECT {_list('a', table.key)} FROM {side}.{table.name} AS a WHERE EXISTS"
            f" (SELECT 1 FROM {other}.{whole} AS r WHERE r.{key} = a.{key} {f'AND NOT {more}' * (whole == 'jobs')})"
            f" AND NOT EXISTS (SELECT 1 FROM {other}.{table.name} AS b WHERE {_same('a', 'b', table.key)})"
            f" AND NOT ({table.unless.format('a')}) LIMIT 1"
        )


def _add(connection: sqlite3.Connection, table: _MergeRule) -> int:
    count, names = f"SELECT count(*) FROM main.{table.name}", _columns(connection, table.name)
    (before,) = connection.execute(count).fetchone()
    if table.name == "jobs":
        ours, theirs = (
            {row[0]: dict(zip(names, row, strict=True)) for row in connection.execute(f"SELECT * FROM {side}.jobs")}
            for side in ("main", "theirs")
        )
        for job_id in ours.keys() & theirs.keys():
            merged = merge_jobs(ours[job_id], theirs[job_id])
            sets = ",".join(f"{name} = ?" for name in merged)
            connection.execute(f"UPDATE main.jobs SET {sets} WHERE job_id = ?", (*merged.values(), job_id))
    upsert = SETTLE.get(table.name, "")
    is_new = f"NOT EXISTS (SELECT 1 FROM main.{table.name} AS m WHERE {_same('m', 't', table.key)})"
    connection.execute(
        f"INSERT INTO main.{table.name} ({','.join(names)}) SELECT {','.join(names)} FROM theirs.{table.name} AS t"
        f" WHERE {'true' if upsert else is_new} {upsert}"
    )
    (after,) = connection.execute(count).fetchone()
    return int(after - before)


def _key(connection: sqlite3.Connection, table: str) -> tuple[str, ...]:
    sql = "SELECT name FROM pragma_table_info(?, 'main') WHERE pk ORDER BY pk"
    return VIEWS.get(table) or tuple(name for (name,) in connection.execute(sql, (table,)))


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA main.table_info({table})")]


def _same(left: str, right: str, key: tuple[str, ...]) -> str:
    return " AND ".join(f"{left}.{name} = {right}.{name}" for name in key)


def _list(alias: str, key: tuple[str, ...]) -> str:
    return ",".join(f"{alias}.{name}" for name in key)


LONG = 120  # a longer text is cut, with a digest of the whole


def textconv(path: Path) -> Iterator[str]:
    """Yield each row of a database as a line for `git diff`; SpecError if it is not a dgxlab database.

    Lines are sorted by table and text, so a new row adds a line and moves no other.
    """
    # git's temporary file has no WAL beside it, and none may be created
    with named_errors(path), contextlib.closing(open_existing(path, immutable=True)) as connection:
        yield f"schema {version(connection, path)}"
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        if not tables.isdisjoint(BEHIND_VIEWS):
            tables = tables.difference(BEHIND_VIEWS).union(VIEWS)
        for table in sorted(tables):
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
