"""Files of a job that are changed: on the host before and after they are ingested, and in the archive here."""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from dgxlab.errors import CheckFailed, DgxlabError
from dgxlab.lab import Lab
from dgxlab.lab.jobs import follow
from dgxlab.lab.raw import RawFile, archive, listing
from dgxlab.replies import final_status
from dgxlab.source import PinCache
from dgxlab.store import Store
from faults.fault import Broken, Fault
from faults.host import BENCH, Box, box
from tests.journals import dump

ALSO = {"batched-bench": {"model": "m", "npp": 16, "ntg": 4, "npl": [1, 2]}}
UNCHECKED = ("agent.err",)
"""Files without a recorded digest: the agent writes this one while it ends."""
BY_COMMAND = 12
"""One of this many trials runs the program itself over ssh; the others call its functions."""

Rows = Mapping[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Left:
    """Two successful jobs, and copies of everything that they left.

    Attributes:
        job_id: The job whose files are changed.
        other: Another job of the same experiment.
        intended: A record that has the job as intended.
        recorded: A record that has all of the job.
        folders: Copies of both jobs' folders.
        archive: A copy of the job's archive of raw files.
        truth: The rows of `recorded`.
        files: The files in `archive`.
    """

    there: Box
    job_id: str
    other: str
    intended: Path
    recorded: Path
    folders: Path
    archive: Path
    truth: Rows
    files: Mapping[str, RawFile]

    @property
    def work(self) -> Path:
        """The folder of a trial."""
        return self.folders.with_name("trial")

    @property
    def on_host(self) -> Path:
        """The job's folder on the host."""
        return self.there.root / "jobs" / self.job_id

    @property
    def kept(self) -> Path:
        """The path of the job's archive."""
        return self.work / "dgxlab" / "raw" / f"{self.job_id}.tar.gz"

    def anew(self, record: Path) -> None:
        """Restore everything for a trial, with one of the records."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.kept.parent.mkdir(parents=True)
        shutil.copy(record, self.work / "results.db")
        shutil.rmtree(self.on_host, ignore_errors=True)
        shutil.copytree(self.folders / self.job_id, self.on_host)

    @contextmanager
    def lab(self) -> Iterator[Lab]:
        """Open the trial's record and the host."""
        with Store.open(self.work / "results.db") as store:
            yield Lab(store, PinCache(self.work / "pins.git"), lambda name: self.there.there.ask(), self.kept.parent)


@contextmanager
def left() -> Iterator[Left]:
    """Run two jobs, and yield copies of what they left."""
    with box() as there:
        spec = there.spec("raw", bench=(*BENCH, ALSO))
        for _ in range(2):
            if (ran := there.run("run", spec, "--again", "--host", "near")).rc != 0:
                raise Broken(f"a run without a fault ended with {ran.rc}: {ran.err}")
        there.check("raw", jobs=2)
        job_id, other = (job["job_id"] for job in there.jobs("raw"))
        copies = there.there.here.folder / "left"
        for job in (job_id, other):
            shutil.copytree(there.root / "jobs" / job, copies / "jobs" / job)
        archive = copies / "archive"
        intended, recorded = copies / "intended.db", copies / "recorded.db"
        data = there.there.here.folder / "home" / ".local" / "share" / "dgxlab" / "raw"
        shutil.copy(data / f"{job_id}.tar.gz", archive)
        with there.store() as store, Store.open(intended) as blank:
            job = store.job(job_id)
            blank.intend(job.plan, "near", job.dgxlab_version, staged=job.plan_json)
        place = Left(there, job_id, other, intended, recorded, copies / "jobs", archive, {}, listing(archive))
        place.anew(intended)
        with place.lab() as lab:
            follow(lab, there.there.ask(), job_id, _quiet)
            truth = dump(lab.store)
        shutil.copy(place.work / "results.db", recorded)
        yield Left(there, job_id, other, intended, recorded, copies / "jobs", archive, truth, place.files)


def trial(place: Left, random: Random) -> str:
    """Change a file at one of three moments, and check that the change is noticed."""
    moment = random.choice((at_ingest, at_fetch, where_kept))
    return moment(place, random)


def at_ingest(place: Left, random: Random) -> str:
    """Change a file after the job ended and before it is ingested."""
    place.anew(place.intended)
    name = _change_on_host(place, random)
    if random.randrange(BY_COMMAND) == 0:
        _attach_by_command(place)
    else:
        with place.lab() as lab:
            _noticed(lambda: follow(lab, place.there.there.ask(), place.job_id, _quiet))
    _check_record(place, name)
    _check_kept(place, name)
    return "ingest"


def at_fetch(place: Left, random: Random) -> str:
    """Change a file after the job was recorded and before its raw files are fetched."""
    place.anew(place.recorded)
    name = _change_on_host(place, random)
    _check_kept(place, name)
    return "fetch"


def where_kept(place: Left, random: Random) -> str:
    """Change the archive."""
    place.anew(place.recorded)
    whole = place.archive.read_bytes()
    if random.random() < 0.5:
        name = random.choice(sorted(set(place.files) - set(UNCHECKED)))
        content = _packed_anew(whole, name, lambda old: _changed(name, old, random, place))
    else:
        name, content = "the archive", _changed("", whole, random, place)
    place.kept.write_bytes(content)
    _check_kept(place, name)
    return "kept"


def _change_on_host(place: Left, random: Random) -> str:
    files = [path for path in place.files if path not in UNCHECKED]
    name = random.choice(("journal.jsonl", random.choice(files), random.choice(files)))
    path = place.on_host / name
    path.write_bytes(_changed(name, path.read_bytes(), random, place))
    return name


def _changed(name: str, content: bytes, random: Random, place: Left) -> bytes:
    """Return other content, truncated, altered, appended to or swapped."""
    while True:
        new = random.choice((_truncated, _altered, _appended, lambda *_: _swapped(name, random, place)))(
            content, random
        )
        if new != content and (name != "rc" or final_status(new) != final_status(content)):
            return new


def _truncated(content: bytes, random: Random) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    return random.choice(
        (content[: random.randrange(len(content) + 1)], b"".join(lines[: random.randrange(len(lines))]))
    )


def _altered(content: bytes, random: Random) -> bytes:
    at = random.randrange(len(content) + 1)
    digits = [place for place, byte in enumerate(content) if byte in b"0123456789"]
    if digits and random.random() < 0.7:
        at = random.choice(digits)
        return content[:at] + random.choice(b"0123456789").to_bytes(1) + content[at + 1 :]
    return content[:at] + bytes(byte ^ 1 << random.randrange(8) for byte in content[at : at + 1]) + content[at + 1 :]


def _appended(content: bytes, random: Random) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    return content + random.choice((b"\n", b"\0", b"1", random.choice(lines), content))


def _swapped(name: str, random: Random, place: Left) -> bytes:
    """Return the content of another file of the job, or of the same file of the other job."""
    other = place.folders / place.other / name
    if random.random() < 0.5 and other.is_file():
        return other.read_bytes()
    return (place.folders / place.job_id / random.choice(sorted(place.files))).read_bytes()


def _packed_anew(archive: bytes, name: str, change: Callable[[bytes], bytes]) -> bytes:
    """Return an archive that is as good as the one given, and has one file changed."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(gzip.decompress(archive))) as old,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as new,
    ):
        for entry in old.getmembers():
            file = old.extractfile(entry)
            content = file.read() if file else b""
            content = change(content) if entry.name == name else content
            entry.size = len(content)
            new.addfile(entry, io.BytesIO(content))
    return gzip.compress(packed.getvalue())


def _attach_by_command(place: Left) -> None:
    env = {**place.there.there.here.env, "XDG_DATA_HOME": str(place.work)}
    ran = place.there.run("attach", place.job_id, "--host", "box", "--db", place.work / "results.db", env=env)
    if "next: " not in ran.err and "to fetch them: dgxlab logs" not in ran.err:
        raise Broken(f"attach ended with {ran.rc} and says nothing of what was changed: {ran.err}")


def _noticed(act: Callable[[], object]) -> DgxlabError | None:
    try:
        act()
    except DgxlabError as error:
        return error
    return None


def _check_record(place: Left, name: str) -> None:
    """Check that the record has nothing that was not measured, and all of it unless its sources were changed."""
    with Store.open(place.work / "results.db") as store:
        recorded = dump(store)
    if name not in ("journal.jsonl", "rc"):
        if recorded != place.truth:
            raise Broken(f"{name} was changed, and what was measured is not all in the record")
        return
    for table, rows in recorded.items():
        if table not in ("jobs", "seals") and (wrong := [row for row in rows if row not in place.truth[table]]):
            raise Broken(f"{name} was changed, and {table} has {wrong[0]}")
    (job,) = recorded["jobs"]
    if job["state"] not in ("lost", "intended", "running") or recorded["runs"]:
        raise Broken(f"{name} was changed, and the job is {job['state']} with {len(recorded['runs'])} runs")


def _check_kept(place: Left, name: str) -> None:
    """See that the raw files can be had as they were, or not at all."""
    with place.lab() as lab:
        archived: list[Mapping[str, RawFile]] = []
        error = _noticed(lambda: archived.append(archive(lab, lab.store.job(place.job_id), None, _quiet)[1]))
    if error is None and archived[0] != place.files:
        raise Broken(f"{name} was changed, and the raw files are taken for what they were")
    if error is not None and not isinstance(error, CheckFailed):
        raise Broken(f"{name} was changed, and the raw files cannot be had because {error.message}")


def _quiet(event: Mapping[str, Any]) -> None:
    """Watch nothing."""


RAW = Fault(
    "raw",
    "truncated, altered, appended, swapped raw outputs, journals and final words, at ingest, at fetch and where kept",
    1000,
    "0 accepted",
    left,
    trial,
)
