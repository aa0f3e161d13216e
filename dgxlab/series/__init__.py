"""Patch series: applied to a pin in the client's cache, checked, carried to another pin, made from a checkout.

series      a series as patches/ has it (patchfile: one patch as git format-patch writes it)
stack       patches applied one on another without a work tree
checkout    a llama.cpp checkout as a source, and a series made from one
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from dgxlab.errors import PatchError, SpecError
from dgxlab.model import Source, digest
from dgxlab.series.checkout import apply_tree, export
from dgxlab.series.patchfile import NO_BLOB, Patch
from dgxlab.series.series import Series, inspect, list_all, names, read, write_whole
from dgxlab.series.stack import Stack
from dgxlab.source.cache import PINS, PinCache, check_pin

__all__ = ["Series", "apply", "apply_tree", "check", "export", "list_all", "names", "read", "refresh"]

RECIPE = 1
"""Version of how a series becomes commits; part of the name under which an outcome is remembered."""

MADE = "refs/dgxlab/series/"


@dataclass(frozen=True)
class Refreshed:
    """What a refresh did.

    Attributes:
        series: The series as it is now on disk.
        changed: Names of the patch files that were written.
    """

    series: Series
    changed: tuple[str, ...]


def apply(cache: PinCache, pin: str, series: Sequence[Series]) -> Source:
    """Return the tree that series make of a pin, in order: the same commit for every user on every machine.

    An outcome is remembered in the cache, under the digests of the series; asking again only looks for it there.

    Raises:
        SpecError: if the pin is not in the cache, or two series want the same name or overlay.
        PatchError: if a patch does not apply: series, patch, file and hunk are named.
    """
    check_pin(pin)
    _refuse_clashes(series)
    refs = tuple(each.ref for each in series)
    ref = MADE + digest([RECIPE, pin, refs], 40) if series else PINS + pin
    known = cache.git.attempt("cat-file", "--batch-check", input=f"{ref}^{{commit}}\n{ref}^{{tree}}\n").text.split()
    if known[1::3] == ["commit", "tree"]:
        return Source(pin, known[3], known[0], refs)
    cache.require(pin)
    with Stack.on(cache, pin) as stack:
        for each in series:
            # Series are made on the pin. One that changes a file that another has changed is merged, but only after it
            # applied to the pin alone, blob by blob: that also puts what it was made on into the cache.
            put = stack.push
            if stack.touches(each.paths):
                apply(cache, pin, [each])
                put = stack.merge
            for patch in each.patches:
                put(each.name, patch)
            _lay(stack, each)
        cache.git.run("update-ref", ref, stack.commit)
        return Source(pin, stack.tree(), stack.commit, refs)


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
                if patch.content != (again := stack.format()):
                    pairs = [*zip_longest(patch.content.splitlines(), again.splitlines())]
                    line = next((number for number, (ours, new) in enumerate(pairs, 1) if ours != new), len(pairs))
                    problem = "not as git format-patch writes it; dgxlab patch refresh mends it"
                    problems.append(f"{patch.name}, line {line}: {problem}")
            _lay(stack, series)
        except PatchError as error:
            problems += [error.message, *error.details.splitlines()]
    return problems


def refresh(root: Path, name: str, cache: PinCache, pin: str) -> Refreshed:
    """Make a series fit a pin by three-way merges, and write it anew; nothing is written unless all of it fits.

    What a patch was made on must be in the cache: the pin it was made for, or one with the same files.

    Raises:
        SpecError: if the pin is not in the cache or the series cannot be read.
        PatchError: if a patch conflicts; `details` has a line for every file.
    """
    cache.require(pin)
    series = read(root, name)
    bases = {change.old_blob for patch in series.patches for change in patch.changes} - {"", NO_BLOB}
    listed = cache.git.run("cat-file", "--batch-check=%(objecttype)", input="".join(f"{base}\n" for base in bases))
    if "missing" in listed:
        # what later patches were made on exists only where the first ones went: apply all to the pins at hand
        for known in cache.pins():
            with suppress(PatchError), Stack.on(cache, known) as stack:
                for patch in series.patches:
                    stack.push(name, patch)
                break
    written = []
    with Stack.on(cache, pin) as stack:
        for patch in series.patches:
            stack.merge(name, patch)
            written.append(Patch.parse(patch.name, stack.format()))
        _lay(stack, series)
    changed = [new for new, old in zip(written, series.patches, strict=True) if new.content != old.content]
    for patch in changed:
        write_whole(root / "patches" / name / patch.name, patch.content)
    return Refreshed(Series(name, tuple(written), series.overlays), tuple(patch.name for patch in changed))


def _lay(stack: Stack, series: Series) -> None:
    if series.overlays:
        stack.overlay(series.name, {overlay.dest: overlay.content for overlay in series.overlays})


def _refuse_clashes(series: Iterable[Series]) -> None:
    """Raise a SpecError when series get in one another's way without git seeing it."""
    owners: dict[str, str] = {}
    seen: set[str] = set()
    for each in series:
        if each.name in seen:
            raise SpecError(f"series {each.name} is there twice", next="list it once")
        seen.add(each.name)
        for overlay in each.overlays:
            owner = owners.setdefault(overlay.dest, each.name)
            if owner != each.name:
                raise SpecError(
                    f"series {owner} and {each.name} both overlay {overlay.dest}", next="use one of the two"
                )
