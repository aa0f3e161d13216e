"""Damaged pages of the record: `db check` must notice, and `db rebuild` must restore the record."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from dgxlab import audit
from dgxlab.errors import DgxlabError
from dgxlab.lab.rebuild import mend
from dgxlab.store import Damaged, Store
from faults.fault import Broken, Fault
from tests.audit.conftest import JOBS, cut
from tests.conftest import PROJECT
from tests.elsewhere import an_import, from_elsewhere
from tests.journals import dump

PAGE = 4096
SECTOR = 512
MENDED = 8
"""One of this many trials rebuilds the record."""


@dataclass(frozen=True)
class Shelf:
    """A record, and its content.

    Attributes:
        folder: The folder of a trial.
        record: The bytes of the database.
        before: The same when some of it was not written yet.
        truth: Its rows by table.
    """

    folder: Path
    record: bytes
    before: bytes
    truth: Mapping[str, list[dict[str, Any]]]

    def anew(self) -> Path:
        """Restore the record and a copy of it for a trial, and return its path."""
        shutil.rmtree(self.folder, ignore_errors=True)
        path = self.folder / "results.db"
        copy = self.folder / "results.db.backups" / "20260101T000000.000000Z-v8.db"
        copy.parent.mkdir(parents=True)
        for file in (path, copy):
            file.write_bytes(self.record)
        return path


@contextmanager
def shelf() -> Iterator[Shelf]:
    """Yield a record with two jobs of results.db, and rows that no job makes."""
    with TemporaryDirectory(prefix="dgxlab-pages-") as name:
        path = cut(Path(shutil.copy(PROJECT / "results.db", name)), JOBS[:2])
        before = path.read_bytes()
        with Store.open(path) as store:
            from_elsewhere(store)
            if problems := audit.check(store):
                raise Broken(f"the record is not sound before it is damaged: {problems[0]}")
            truth = dump(store)
        yield Shelf(Path(name) / "trial", path.read_bytes(), before, truth)


def _garbage(content: bytes, at: int, random: Random, place: Shelf) -> bytes:
    return content[:at] + random.randbytes(PAGE) + content[at + PAGE :]


def _zeros(content: bytes, at: int, random: Random, place: Shelf) -> bytes:
    return content[:at] + bytes(PAGE) + content[at + PAGE :]


def _sector(content: bytes, at: int, random: Random, place: Shelf) -> bytes:
    at += SECTOR * random.randrange(PAGE // SECTOR)
    return content[:at] + random.randbytes(SECTOR) + content[at + SECTOR :]


def _flip(content: bytes, at: int, random: Random, place: Shelf) -> bytes:
    at += random.randrange(PAGE)
    return content[:at] + bytes([content[at] ^ 1 << random.randrange(8)]) + content[at + 1 :]


def _other_page(content: bytes, at: int, random: Random, place: Shelf) -> bytes:
    other = PAGE * random.randrange(len(content) // PAGE)
    return content[:at] + content[other : other + PAGE] + content[at + PAGE :]


def _lost_write(content: bytes, at: int, random: Random, place: Shelf) -> bytes:
    return content[:at] + place.before[at : at + PAGE] + content[at + PAGE :]


def _cut(content: bytes, at: int, random: Random, place: Shelf) -> bytes:
    return content[: at + random.choice((0, random.randrange(PAGE)))]


WAYS: Mapping[str, Callable[[bytes, int, Random, Shelf], bytes]] = {
    "garbage": _garbage,
    "zeros": _zeros,
    "a sector": _sector,
    "a bit": _flip,
    "another page": _other_page,
    "a lost write": _lost_write,
    "cut": _cut,
}


def trial(place: Shelf, random: Random) -> str:
    """Damage a page; check that this is noticed, that no write ends in a traceback, and that a rebuild works."""
    path, word = place.anew(), random.choice(tuple(WAYS))
    path.write_bytes(WAYS[word](place.record, PAGE * random.randrange(len(place.record) // PAGE), random, place))
    if path.read_bytes() == place.record:
        return "nothing changed"
    problems = _told(path)
    if problems is None:  # a page that is free, or bytes of one between its rows
        with Store.open(path) as store:
            if dump(store) != place.truth:
                raise Broken(f"{word}: the check says nothing, and the record holds something else")
    with suppress(DgxlabError), Store.open(path) as store:
        store.put("imports", an_import(b"n=2: 2.5 us\n"))
        store.update_job(place.truth["jobs"][0]["job_id"], next="x")
    if random.randrange(MENDED) == 0:
        path = place.anew()
        path.write_bytes(WAYS[word](place.record, PAGE * random.randrange(len(place.record) // PAGE), random, place))
        _mended(place, path)
        return f"{word}, mended"
    return word if problems else f"{word} of no row"


def _told(path: Path) -> str | None:
    """Return what `db check` says, None where it finds nothing.

    Raises:
        Broken: if it does not say how to go on.
    """
    try:
        with Store.open(path, create=False) as store:
            problems = audit.check(store)
    except Damaged as error:
        if error.next != f"dgxlab db rebuild {path}":
            raise Broken(f"it does not say what mends it: {error.next}") from error
        return error.message
    except DgxlabError as error:
        return error.message
    return problems[0] if problems else None


def _mended(place: Shelf, path: Path) -> None:
    mend(path, lambda sentence: None)
    with Store.open(path, create=False) as store:
        if problems := audit.check(store):
            raise Broken(f"a record that was made again is not sound: {problems[0]}")
        if dump(store) != place.truth:
            raise Broken("a record that was made again is another one")


PAGES = Fault(
    "pages",
    "damaged pages of the record: garbage, zeros, flipped bits, torn, swapped, lost writes, a cut file",
    2000,
    "told, with what mends it; 0 tracebacks; made again, it is the same",
    shelf,
    trial,
)
