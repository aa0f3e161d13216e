"""Seals: a hash chain over the record, which detects rows that another program has changed, added or deleted.

A unit is a job or an imported file with all its rows, or a table whose rows belong to neither. The table `seals` has a
row for each unit. `content` is the sum, modulo 2^256, of the sha256 of the unit's parts; a part is the rows of one line
of a job's journal, or all other rows of the unit. `seal` is the sha256 of the previous seal, the unit's name and its
content, in the order of names, so a deleted unit is detected too: the next seal no longer follows. The last units are
tables, which always exist.

Seals detect mistakes. They are not a signature: a program that recomputes all of them leaves no trace.
"""

# ruff: noqa: S608 - names of tables and columns are the database's own, values are always bound

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

from dgxlab.store.schema import BEHIND_VIEWS, VIEWS

# kinds of units, by the first column of a table's key
OWNERS = {"job_id": "job", "run_id": "job", "gate_id": "job", "check_id": "job"}
OWNERS |= {"import_id": "import", "try_id": "try", "fleet_id": "fleet"}
NUMBERED = ("run_id", "gate_id", "check_id")  # keys that are a job's id, / and the number of a line of its journal
NAMES = {"job": "job {}", "import": "imported file {}", "try": "try {}", "fleet": "fleet {}", "table": "table {}"}

_encode = json.JSONEncoder(separators=(",", ":"), default=bytes.hex).encode


@dataclass(frozen=True)
class _Table:
    name: str
    column: str  # the first of its key, which says what a row belongs to
    place: int  # its number among the columns
    group: str  # which parts have rows in it, as `_group` gives
    everything: str  # SQL for its rows in the order of their keys
    some: str  # SQL for the rows of one part

    def part(self, key: str) -> str:
        return f"{OWNERS[self.column]}/{key}" if self.column in OWNERS else f"table/{self.name}"


class Seals:
    """Updates the seals of a database for the rows that dgxlab writes: `writing` before a write, `close` after it.

    A unit's content changes by the digests of the written rows only. It is never computed from all rows again, so that
    changes by other programs stay detectable, and a broken seal stays broken.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._before: dict[str, int] = {}

    def writing(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Remember the digests of the parts that these rows belong to, before the rows are written.

        Of each row only the first column of its table's key is read.
        """
        place = columns.index(self._tables[table].column)
        for part in {self._tables[table].part(key) for key in {row[place] for row in rows}} - self._before.keys():
            self._before[part] = self._digest(part)

    def close(self) -> None:
        """Update the seals for the parts that `writing` remembered, and forget these parts."""
        grown: defaultdict[str, int] = defaultdict(int)
        for part, before in self._before.items():
            grown[_unit(part)] += self._digest(part) - before
        if any(grown.values()):
            stored = dict(self._connection.execute("SELECT unit, content FROM seals"))
            contents = {unit: _text(int(stored.get(unit, "0"), 16) + growth) for unit, growth in grown.items()}
            _chain(self._connection, contents)
        self.forget()

    def forget(self) -> None:
        """Forget the parts that `writing` remembered, after a rollback."""
        self._before.clear()

    @cached_property
    def _tables(self) -> Mapping[str, _Table]:
        return {table.name: table for table in _tables(self._connection)}

    def _digest(self, part: str) -> int:
        """Return the digest of a part, 0 where it has no row."""
        hashed, empty, owner = hashlib.sha256(), True, part.partition("/")[2]
        for table in self._tables.values():
            if table.group == _group(part) and (rows := self._connection.execute(table.some, (owner,)).fetchall()):
                hashed.update(_encode([table.name, *rows]).encode())
                empty = False
        return 0 if empty else int.from_bytes(hashed.digest(), "big")


def seal_all(connection: sqlite3.Connection) -> None:
    """Compute all seals from the current rows. Earlier changes by other programs are then no longer detected."""
    connection.execute("DELETE FROM seals")
    _chain(connection, _contents(connection))


@contextmanager
def sealed_anew(connection: sqlite3.Connection) -> Iterator[None]:
    """In this block, a migration may change any rows; afterwards all seals are computed again.

    A unit that did not match its seal before the block does not match it afterwards.
    """
    stored = connection.execute("SELECT unit, content, seal FROM seals ORDER BY unit").fetchall()
    contents = _contents(connection)
    yield
    changed = _contents(connection)
    connection.execute("DELETE FROM seals")
    before = after = ""
    for unit, content, seal in stored:
        follows = seal == _link(before, unit, content)
        before = seal
        if unit in contents and unit not in changed:
            continue  # its table is gone
        now = changed[unit] if contents.get(unit) == content else content
        after = _link(after, unit, now) if follows else seal
        connection.execute("INSERT INTO seals VALUES (?, ?, ?)", (unit, now, after))


def broken(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield a sentence for each unit that differs from its content, and for each seal that does not follow."""
    sealed, contents = dict(connection.execute("SELECT unit, content FROM seals")), _contents(connection)
    for unit in sorted(sealed.keys() | contents.keys()):
        kind, _, owner = unit.partition("/")
        name = NAMES.get(kind, "unit {}").format(owner)
        if unit not in contents:
            yield f"{name} is sealed, and its rows are gone"
        elif unit not in sealed:
            yield f"{name} has rows and no seal"
        elif sealed[unit] != contents[unit]:
            yield f"{name} is not what was sealed: rows of it were changed, added or deleted"
    before = ""
    for unit, content, seal in connection.execute("SELECT unit, content, seal FROM seals ORDER BY unit"):
        if seal != _link(before, unit, content):
            yield f"the seal of {unit} does not follow from the one before it: one was changed, added or deleted"
        before = seal


def _chain(connection: sqlite3.Connection, contents: Mapping[str, str]) -> None:
    """Write these contents, and every seal that follows from them."""
    stored = {unit: row for unit, *row in connection.execute("SELECT unit, content, seal FROM seals")}
    before = after = ""
    for unit in sorted(stored.keys() | contents.keys()):
        content, seal = stored.get(unit, ("", ""))
        follows = unit not in stored or seal == _link(before, unit, content)
        now = contents.get(unit, content)
        before, after = seal or before, _link(after, unit, now) if follows else seal
        if (now, after) != (content, seal):
            connection.execute("INSERT OR REPLACE INTO seals VALUES (?, ?, ?)", (unit, now, after))


def _link(before: str, unit: str, content: str) -> str:
    return hashlib.sha256(f"{before} {unit} {content}".encode()).hexdigest()


def _contents(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the content of every unit by name; tables are included even without rows."""
    tables = _tables(connection)
    hashes: defaultdict[str, hashlib._Hash] = defaultdict(hashlib.sha256)
    for table in tables:
        rows = connection.execute(table.everything)
        groups = groupby(rows, itemgetter(table.place)) if table.column in OWNERS else [("", list(rows))]
        for key, group in groups:
            if rows_of_part := [*group]:
                hashes[table.part(key)].update(_encode([table.name, *rows_of_part]).encode())
    sums = {f"table/{table.name}": 0 for table in tables if table.column not in OWNERS}
    for part, hashed in hashes.items():
        sums[_unit(part)] = sums.get(_unit(part), 0) + int.from_bytes(hashed.digest(), "big")
    return {unit: _text(total) for unit, total in sums.items()}


def _unit(part: str) -> str:
    """Return the unit that a part belongs to: a job's part is named JOB or JOB/LINE."""
    return "/".join(part.split("/", 2)[:2])


def _group(part: str) -> str:
    """Return the group of tables that may have rows of a part: of lines, of jobs, of imports, or a table of its own."""
    kind, _, owner = part.partition("/")
    return part if kind == "table" else f"{kind} line" if "/" in owner else kind


def _text(total: int) -> str:
    return f"{total % (1 << 256):064x}"


def _tables(connection: sqlite3.Connection) -> list[_Table]:
    columns = connection.execute(
        """SELECT t.name, c.name FROM sqlite_schema AS t JOIN pragma_table_info(t.name) AS c
           WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite_%' AND c.pk ORDER BY t.name, c.pk"""
    )
    key_of = {name: tuple(column for _, column in group) for name, group in groupby(columns, itemgetter(0))}
    for view, key in VIEWS.items():
        if connection.execute("SELECT 1 FROM sqlite_schema WHERE (type, name) = ('view', ?)", (view,)).fetchone():
            key_of[view] = key
    tables = []
    for name, key in sorted(key_of.items()):
        if name not in ("seals", "_sqlite_migrations", *BEHIND_VIEWS):
            column, keys = key[0], ",".join(key)
            names = [row[1] for row in connection.execute(f"PRAGMA table_info({name})")]
            group = OWNERS.get(column, f"table/{name}") + " line" * (column in NUMBERED)
            where = f"{column} = ?" if column in OWNERS else "? IS NOT NULL"
            everything = f"SELECT * FROM {name} ORDER BY {keys}"
            some = f"SELECT * FROM {name} WHERE {where} ORDER BY {keys}"
            tables.append(_Table(name, column, names.index(column), group, everything, some))
    return tables
