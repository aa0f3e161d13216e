"""Keep a series in order: `check` it on a pin, `refresh` it for another one, `export` it from a checkout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dgxlab.errors import PatchError
from dgxlab.series.export import Exported, export
from dgxlab.series.lines import write_whole
from dgxlab.series.patchfile import NO_BLOB, Patch
from dgxlab.series.series import Series, inspect, lay, read
from dgxlab.series.stack import Stack
from dgxlab.source.cache import PinCache

__all__ = ["Exported", "Refreshed", "check", "export", "refresh"]


@dataclass(frozen=True)
class Refreshed:
    """What a refresh did.

    Attributes:
        series: The series as it is now on disk.
        changed: Names of the patch files that were written.
    """

    series: Series
    changed: tuple[str, ...]


def check(root: Path, name: str, cache: PinCache, pin: str) -> list[str]:
    """Return what is wrong with a series on a pin, nothing when all is well.

    All is well when every file is listed once and readable, every patch was made on the very files of the pin and
    gives the files that it names, and each is written as `git format-patch` would write it again.

    Raises:
        SpecError: if the pin is not in the cache.
    """
    cache.require(pin)
    series, problems = inspect(root, name)
    if series is None or problems:
        return problems
    with Stack.on(cache, pin) as stack:
        try:
            for patch in series.patches:
                stack.push(name, patch)
                problems += _badly_written(patch, stack.format())
            lay(stack, series)
        except PatchError as error:
            problems += [error.message, *error.details.splitlines()]
    return problems


def refresh(root: Path, name: str, cache: PinCache, pin: str) -> Refreshed:
    """Make a series fit a pin by three-way merges, and write it anew; nothing is written unless all of it fits.

    What a patch was made on must be in the cache: the pin it was made for, or one with the same files.

    Raises:
        SpecError: if the pin is not in the cache or the series cannot be read.
        PatchError: if a patch conflicts; `details` has a line for every place.
    """
    cache.require(pin)
    series = read(root, name)
    _find_bases(cache, series)
    written = []
    with Stack.on(cache, pin) as stack:
        for patch in series.patches:
            stack.merge(name, patch)
            written.append(Patch.parse(patch.name, stack.format()))
        lay(stack, series)
    changed = [new for new, old in zip(written, series.patches, strict=True) if new.content != old.content]
    for patch in changed:
        write_whole(root / "patches" / name / patch.name, patch.content)
    return Refreshed(Series(name, tuple(written), series.overlays), tuple(patch.name for patch in changed))


def _badly_written(patch: Patch, again: bytes) -> list[str]:
    if patch.content == again:
        return []
    ours, theirs = patch.content.splitlines(), again.splitlines()
    same = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
    return [f"{patch.name}, line {same + 1}: not as git format-patch writes it; dgxlab patch refresh mends it"]


def _find_bases(cache: PinCache, series: Series) -> None:
    """Apply a series to the pins at hand: what its later patches were made on exists only where its first ones went."""
    bases = {change.old_blob for patch in series.patches for change in patch.changes} - {"", NO_BLOB}
    listed = cache.git.run("cat-file", "--batch-check=%(objecttype)", input="".join(f"{base}\n" for base in bases))
    if "missing" not in listed:
        return
    for pin in cache.pins():
        with Stack.on(cache, pin) as stack:
            try:
                for patch in series.patches:
                    stack.push(series.name, patch)
                return
            except PatchError:
                continue
