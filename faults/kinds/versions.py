"""Two versions of dgxlab on one host and one record: each must cope with what the other leaves or still does."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import dgxlab
from faults.aftermath import appeared, measured
from faults.fault import Broken, Fault
from faults.host import Box, box, ended, two_cells

BENCH, CELLS = two_cells(2), 4

EDITS: Mapping[str, tuple[str, str, str]] = {
    "another agent": ("__init__.py", "__version__ = ", "__version__ = '9.' "),
    "new events": (
        "agent/files.py",
        "        self._seq += 1\n",
        "        self._seq += 1\n"
        "        hint = {'seq': self._seq, 't': 0.0, 'event': 'hint', 'of': event.event}\n"
        "        os.write(self._fd, json.dumps(hint).encode() + b'\\n')\n"
        "        self._seq += 1\n",
    ),
    "new fields": ("model/plan.py", "    specs: tuple", "    urgency: int = 1\n    specs: tuple"),
    "another protocol": ("model/plan.py", "PROTOCOL = ", "PROTOCOL = 90 + "),
}
"""The change of each other version: a file, a text in it, and the replacement."""

ALLOWED = (0, 4, 9, 12, 130)
"""Valid exit codes: done; the other's output cannot be read; its record cannot; its job is gone; it was ended."""
ALSO: Mapping[str, int] = {"rebuild": 11, "attach": 2, "cancel": 2}
"""Further valid exit codes by command: some jobs could not be recorded; the job was removed."""


@dataclass(frozen=True, kw_only=True)
class Versions(Box):
    """A box, and other versions of dgxlab, each in a folder named after it."""

    others: Path

    def env(self, version: str) -> dict[str, str]:
        """Return the environment in which a version runs; "" is the present one."""
        return {**self.there.here.env, **({"PYTHONPATH": str(self.others / version)} if version else {})}


@contextmanager
def _versions() -> Iterator[Versions]:
    with tempfile.TemporaryDirectory(prefix="dgxlab-versions-") as name, box() as host:
        for version, (file, old, new) in EDITS.items():
            package = Path(name, version, "dgxlab")
            shutil.copytree(Path(dgxlab.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
            text = (package / file).read_text()
            if text.count(old) != 1:
                raise RuntimeError(f"{file} has {old!r} {text.count(old)} times")
            (package / file).write_text(text.replace(old, new))
        yield Versions(host.there, host.proxy, others=Path(name))


def _trial(place: Versions, random: Random) -> str:
    """Start a job with one version and do anything with the other; then the first has everything measured once."""
    name, change = f"versions-{random.getrandbits(40):010x}", random.choice(list(EDITS))
    first, second = random.sample(("", change), 2)
    spec = place.spec(name, ms=random.choice((50, 200)), bench=BENCH)
    record = place.database.with_name(f"{name}.db")
    child = place.start("run", spec, "--host", "box", env=place.env(first))
    job = appeared(place, name).job_id
    if killed := random.random() < 0.5:
        time.sleep(random.random())
        child.kill()
        child.communicate()
    met: list[str] = []
    actions = {
        "jobs": ("jobs", "--host", "box"),
        "attach": ("attach", job, "--host", "box", "--db", record),
        "run": ("run", spec, "--host", "box"),
        "clean": ("host", "clean", "box", "--older-than", "0", "--yes"),
        "cancel": ("cancel", job, "--host", "box", "--db", record),
        "rebuild": ("db", "rebuild", place.database.with_name(f"{name}-again.db"), "--host", "box"),
    }
    for action in random.sample(list(actions), 2):
        ran = place.run(*actions[action], env=place.env(second))
        if ran.rc not in (*ALLOWED, ALSO.get(action)):
            raise Broken(f"{action} by {second or 'this version'} ended with {ran.rc}: {ran.err}")
        met.append(f"{action} {ran.rc}")
    if not killed and (ran := ended(child)).rc not in ALLOWED:
        raise Broken(f"run by {first or 'this version'} ended with {ran.rc}: {ran.err}")
    place.run("run", spec, "--host", "box", env=place.env(first)).good(f"the run after {met}")
    measured(place, name, CELLS, at_most=2 if change == "another protocol" else 1)
    return f"{change} {'second' if second else 'first'}"


VERSIONS = Fault(
    "versions",
    "two versions of the program by turns on one host and one record: other agents, events, fields, protocols",
    50,
    "read or refused; everything measured once",
    _versions,
    _trial,
)
