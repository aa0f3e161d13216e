"""Programs and libraries of a build that were replaced since they were installed: none is run, and none is recorded."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from dgxlab.agent.files import sha256
from faults.fault import Broken, Fault
from faults.host import CELLS, Box, box
from faults.hostile import Canary, canary


@dataclass(frozen=True)
class Built:
    """A host with one build.

    Attributes:
        folder: Its folder.
        digests: The sha256 of each of its programs and libraries.
        spy: What a program that was put in another's place calls first.
    """

    there: Box
    folder: Path
    digests: Mapping[str, str]
    spy: Canary

    @property
    def work(self) -> Path:
        """The folder in which it was compiled."""
        (work,) = self.there.root.glob("work/*/cmake/bin")
        return work

    def current(self) -> dict[str, str]:
        """Return the sha256 of what lies in its bin now."""
        return {path.name: sha256(path) for path in (self.folder / "bin").iterdir()}


@contextmanager
def _built() -> Iterator[Built]:
    with box() as there:
        (folder,) = there.root.glob("builds/*")
        spies = there.there.here.folder / "spies"
        spies.mkdir()
        yield Built(there, folder, Built(there, folder, {}, Canary(spies)).current(), canary(spies))


def _trial(place: Built, random: Random) -> str:
    """Change the build in one way, measure something new, and see that it was measured with what had been built."""
    change = random.choice(CHANGES)
    programs = [name for name in sorted(place.digests) if not name.startswith("lib")]
    name, victim = f"bin-{random.getrandbits(40):010x}", random.choice((random.choice(programs), "libggml.so.0"))
    if random.random() < 0.5:
        time.sleep(1.2)  # then its digests were noted by the run before
    change(place, place.folder / "bin" / victim, random)
    ran = place.there.run("run", place.there.spec(name), "--host", "box")
    word = f"{change.__name__[1:]} {'library' if victim.startswith('lib') else 'program'}"
    place.spy.check(word)
    ran.good(f"a run after {word} {victim}")
    (job,) = place.there.jobs(name)
    with place.there.store() as store:
        (arm,) = store.rows("SELECT binaries, libraries FROM arms WHERE job_id = ?", (job["job_id"],))
    recorded = {**json.loads(arm["binaries"]), **json.loads(arm["libraries"])}
    current = place.current()
    if recorded != current or current.items() - place.digests.items():
        raise Broken(f"after {word} {victim} there is {current}, recorded is {recorded}, and built was {place.digests}")
    place.there.check(name, jobs=1, cells=CELLS)
    return word


def _wrapped(place: Built, victim: Path, random: Random) -> None:
    real = place.spy.program.with_name(victim.name)
    shutil.move(victim, real)
    victim.write_text(f'#!/bin/sh\n{place.spy.program}\nexec {real} "$@"\n')
    victim.chmod(0o755)


def _compiled(place: Built, victim: Path, random: Random) -> None:
    """Wrap it where it was compiled, and let it be installed from there."""
    _wrapped(place, (place.work / victim.name).resolve(), random)
    shutil.rmtree(place.folder)


def _edited(place: Built, victim: Path, random: Random) -> None:
    """Change a byte in place, and set the times back."""
    before, content = victim.stat(), bytearray(victim.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    with victim.open("r+b") as file:
        file.write(content)
    os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))


def _truncated(place: Built, victim: Path, random: Random) -> None:
    os.truncate(victim, random.randrange(victim.stat().st_size))


def _swapped(place: Built, victim: Path, random: Random) -> None:
    """Give it the content of another of the build's files, as a file of its own, a hard link or a symbolic one."""
    other = random.choice([path for path in sorted(victim.parent.iterdir()) if path != victim])
    victim.unlink()
    random.choice(
        (lambda: shutil.copy2(other, victim), lambda: victim.hardlink_to(other), lambda: victim.symlink_to(other))
    )()


def _linked(place: Built, victim: Path, random: Random) -> None:
    """Put a link to its own bytes in its place: there, others lie beside it."""
    away = place.spy.program.with_name(victim.name)
    shutil.move(victim, away)
    victim.symlink_to(away)


def _added(place: Built, victim: Path, random: Random) -> None:
    """Put a library beside it that the loader would take before the system's."""
    shutil.copy2(victim, victim.with_name(random.choice(("libc.so.6", "libggml-cuda.so", "libm.so.6"))))


def _removed(place: Built, victim: Path, random: Random) -> None:
    victim.unlink()


def _stamped(place: Built, victim: Path, random: Random) -> None:
    """Damage the stamp."""
    stamp = place.folder / "stamp.json"
    whole = stamp.read_text()
    stamp.write_text(
        random.choice(("", "[]", "{}", "null", whole[: random.randrange(len(whole))], whole.replace('"bin', '"Bin')))
    )


CHANGES: tuple[Callable[[Built, Path, Random], None], ...] = (
    *(_wrapped, _compiled, _edited, _truncated, _swapped, _linked, _added, _removed, _stamped),
)

REPLACED = Fault(
    "replaced",
    "programs, libraries and stamps of a build that were wrapped, edited, swapped, linked, added or removed",
    100,
    "none is run, the recorded digests are those of the job's own programs",
    _built,
    _trial,
)
