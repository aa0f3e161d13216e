"""SIGKILL while the record is written, created or migrated."""

# ruff: noqa: S608 - names of tables and columns are our own

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from dgxlab.ingest import ingest
from dgxlab.store import Store, check
from dgxlab.store.connect import schema_problems
from dgxlab.store.migrations import MIGRATIONS, upgrade
from dgxlab.store.schema import DEFLATED, VERSION, add_functions
from dgxlab.store.seals import seal_all
from faults.fault import Broken, Fault
from tests.elsewhere import from_elsewhere
from tests.journals import FROM_ELSEWHERE, TABLES, compared, dump, intend
from tests.store.writer import ENDLESS, PROJECT, SAMPLES, journal, killed

WRITING_S = 0.15
"""A writer is killed within this time after its first commit."""
OPENING_S = 0.06
"""Half of the migrating processes are killed within this time, about what creating or migrating takes."""

Columns = Mapping[str, Sequence[str]]
"""Names of the columns that are compared, by table."""

Rows = Mapping[str, list[tuple[Any, ...]]]


@dataclass(frozen=True)
class Old:
    """A database with an older schema, or none.

    Attributes:
        path: The database; None for none.
        version: Its schema's version; 0 for none.
        columns: The columns that the newest schema has too.
        rows: All rows, with these columns.
        work: SQLite's work to migrate it, in STEPs of tests.store.opener.
    """

    path: Path | None
    version: int
    columns: Columns
    rows: Rows
    work: int


@dataclass(frozen=True)
class Shelf:
    """A folder for the database of a trial, and a database of every older schema."""

    folder: Path
    olds: Sequence[Old]

    def anew(self) -> Path:
        """Return the path for the database of a trial, in an empty folder."""
        trial = self.folder / "trial"
        shutil.rmtree(trial, ignore_errors=True)
        trial.mkdir()
        return trial / "results.db"


@contextmanager
def shelf(*, work: bool = True) -> Iterator[Shelf]:
    """Yield databases of every older schema, with rows in every table.

    Args:
        work: Whether to measure the work to migrate each.
    """
    with tempfile.TemporaryDirectory(prefix="dgxlab-faults-") as name:
        folder = Path(name)
        with Store.open(folder / "now.db") as store:
            for number in range(6):
                of = compared(f"job-{number}")
                intend(store, of)
                ingest(store, f"job-{number}", of.lines())
            from_elsewhere(store)
        names = [migration.name for migration in MIGRATIONS._migrations]
        place = Shelf(folder, [])
        olds = [_old(place, None, 0, work=work)]
        olds += [
            _old(place, folder / f"v{number}.db", number, names[number], work=work) for number in range(1, VERSION)
        ]
        yield Shelf(folder, olds)


def _old(place: Shelf, path: Path | None, version: int, stop_before: str = "", *, work: bool) -> Old:
    columns: Columns = {}
    rows: Rows = {}
    if path is not None:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            add_functions(connection)
            upgrade(connection, path, stop_before=stop_before)
            connection.execute("PRAGMA foreign_keys = OFF")
            connection.execute("ATTACH ? AS now", (str(place.folder / "now.db"),))
            if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'hosts'").fetchone():
                connection.execute("INSERT INTO hosts VALUES ('host-a', 'local', 'box', '{}', 1.0)")
            columns = {table: _shared(connection, table) for table in _tables(connection)}
            for table, names in columns.items():
                gone = {"host_id"}.intersection(_columns(connection, f"main.{table}")).difference(names)
                blobs = {row[1] for row in connection.execute(f"PRAGMA main.table_info({table})") if row[2] == "BLOB"}
                whole = [
                    name if name in blobs else text for name, text in zip(names, _texts(table, names), strict=True)
                ]
                values = ",".join((*whole, *("'host-a'" for _ in gone)))
                into = f"{table} ({','.join((*names, *gone))})"
                connection.execute(f"INSERT INTO {into} SELECT {values} FROM now.{table}")
            rows = rows_of(connection, columns)
            if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'seals'").fetchone():
                seal_all(connection)
    if not work:
        return Old(path, version, columns, rows, 0)
    database = place.anew()
    if path is not None:
        shutil.copy(path, database)
    with _opener(database) as child:
        out, err = child.communicate("now\n")
    if child.returncode != 0:
        raise Broken(f"a schema of version {version} cannot be migrated: {err}")
    return Old(path, version, columns, rows, int(out.split()[-1]))


def trial(place: Shelf, random: Random) -> str:
    """Kill a process that writes to a record, or that creates or migrates one."""
    if random.random() < 0.5:
        return _while_writing(place, random)
    return _while_opening(place, random)


def _while_writing(place: Shelf, random: Random) -> str:
    path = place.anew()
    acknowledged = killed(path, "job-1", random.randrange(1000), random.uniform(0, WRITING_S))
    with Store.open(path) as store, Store.open(path.with_name("whole.db")) as uncut:
        sound(store)
        partial = store.rows("SELECT run_id FROM samples GROUP BY run_id HAVING count(*) <> ?", (SAMPLES + 1,))
        (runs,) = store.rows("SELECT count(*) AS n FROM runs")
        reached = store.job("job-1").journal_seq
        if partial or runs["n"] != max(0, reached - 4):
            raise Broken(f"there are {runs['n']} runs of {reached} lines, {len(partial)} of them in part")
        if reached < acknowledged:
            raise Broken(f"lost: line {acknowledged} was acknowledged, and the record has {reached}")
        lines = journal("job-1", ENDLESS).lines()[: reached + 10]
        ingest(store, "job-1", lines)
        intend(uncut, journal("job-1", ENDLESS))
        ingest(uncut, "job-1", lines)
        if dump(store, intent_times=False) != dump(uncut, intent_times=False):
            raise Broken("going on gave another record than one that was never interrupted")
    return "commit"


def _while_opening(place: Shelf, random: Random) -> str:
    old, path = random.choice(place.olds), place.anew()
    if old.path is not None:
        shutil.copy(old.path, path)
    step = random.randint(1, old.work) if random.random() < 0.5 else 0
    with _opener(path, step) as child:
        timer = threading.Timer(random.uniform(0, OPENING_S), child.kill)
        if not step:
            timer.start()
        _, err = child.communicate("now\n")
        timer.cancel()
    if child.returncode not in (0, -9):
        raise Broken(f"opening ended with {child.returncode}: {err}")
    as_it_was_or_whole(path, old)
    for copy in path.with_name(f"{path.name}.backups").glob("*.db"):
        with closing(sqlite3.connect(f"file:{copy}?mode=ro", uri=True)) as connection:
            if _integrity(connection) != "ok" or rows_of(connection, old.columns) != old.rows:
                raise Broken(f"the backup {copy.name} is not what there was")
    with Store.open(path) as store:
        sound(store)
        if rows_of(store.connection, old.columns) != old.rows:
            raise Broken(f"migrating again lost rows of schema {old.version}")
    if child.returncode == 0:
        return "after"
    return "migration" if old.version else "creation"


def as_it_was_or_whole(path: Path, old: Old) -> None:
    """Check that a killed migration left either the old or the new schema, and all rows."""
    if not path.exists() and old.path is None:
        return
    with closing(sqlite3.connect(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        rows = rows_of(connection, old.columns)
        if version not in (old.version, VERSION):
            raise Broken(f"a migration from {old.version} was left at {version}")
        if problems := schema_problems(connection):
            raise Broken(f"a migration from {old.version} was left at {version}: {'; '.join(problems)}")
        if (
            rows != old.rows
            or _integrity(connection) != "ok"
            or connection.execute("PRAGMA foreign_key_check").fetchall()
        ):
            raise Broken(f"a migration from {old.version} damaged what was there")


def sound(store: Store) -> None:
    """Check that the pages, references and seals of a record are intact.

    Raises:
        Broken: if it does.
    """
    if flaws := check(store):
        raise Broken(f"the database is not sound: {'; '.join(flaws)}")


def _opener(path: Path, step: int = 0) -> subprocess.Popen[str]:
    """Start what opens a database at the next line; it has imported all that it needs."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.store.opener", str(path), str(step)],
        cwd=PROJECT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    child.stdout.readline()
    return child


def _integrity(connection: sqlite3.Connection) -> str:
    return str(connection.execute("PRAGMA integrity_check").fetchone()[0])


def _tables(connection: sqlite3.Connection) -> list[str]:
    names = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
    return [name for (name,) in names if name in (*TABLES, *FROM_ELSEWHERE)]


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    schema, _, name = table.partition(".")
    return [row[1] for row in connection.execute(f"PRAGMA {schema}.table_info({name})")]


def _shared(connection: sqlite3.Connection, table: str) -> list[str]:
    newest = _columns(connection, f"now.{table}")
    return [name for name in _columns(connection, f"main.{table}") if name in newest]


def _texts(table: str, names: Iterable[str]) -> list[str]:
    return [f"inflated({name})" if name in DEFLATED.get(table, ()) else name for name in names]


def rows_of(connection: sqlite3.Connection, columns: Columns) -> Rows:
    """Return all rows of these tables and columns, sorted."""
    add_functions(connection)
    return {
        table: sorted(connection.execute(f"SELECT {','.join(_texts(table, names))} FROM {table}"), key=repr)
        for table, names in columns.items()
    }


COMMIT = Fault(
    "commit",
    "SIGKILL while the record is written, made or migrated",
    300,
    "0 partial rows; integrity and foreign keys clean",
    shelf,
    trial,
    limit_s=60.0,
)
