"""Patch series: applied to a pin in the client's cache, checked, ported to another pin, made from a checkout.

series      the files of a series in patches/
patchfile   one patch as git format-patch writes it
stack       patches applied on top of each other without a working tree
checkout    from a llama.cpp checkout to a source or to a series

A series is made on a pin: each patch names the blobs that it changes. A source (`model.Source`) is a tree to build.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from dgxlab.errors import PatchError, SpecError
from dgxlab.model import Source, digest
from dgxlab.series.checkout import apply_tree, bases, changed_lines, diff, export, remake, untracked
from dgxlab.series.patchfile import NO_BLOB, Patch
from dgxlab.series.series import (
    Series,
    begun,
    content_of,
    first_export,
    folder_for,
    names,
    own_pins,
    place_for,
    read,
    unknown,
)
from dgxlab.series.stack import Stack, changed_files
from dgxlab.source.cache import PINS, PinCache, check_pin
from dgxlab.source.programs import write_whole

_RECIPE = 1  # version of the algorithm that turns a series into commits; part of the cache key of a result

_OUTCOMES = "refs/dgxlab/series/"


def apply(cache: PinCache, pin: str, series: Sequence[Series]) -> Source:
    """Apply series to a pin, in order, and return the result as a source: the same commit for every user and machine.

    The cache keeps the result.

    Raises:
        SpecError: if the pin is not in the cache, or two series want the same name or overlay.
        PatchError: if a patch does not apply: series, patch, file and hunk are named.
    """
    check_pin(pin)
    _refuse_clashes(series)
    refs = tuple(each.ref for each in series)
    ref = _OUTCOMES + digest([_RECIPE, pin, refs], 40) if series else PINS + pin
    known = cache.git.attempt("cat-file", "--batch-check", input=f"{ref}^{{commit}}\n{ref}^{{tree}}\n").text.split()
    if known[1::3] == ["commit", "tree"]:
        return Source(pin, known[3], known[0], refs)
    cache.require(pin)
    with Stack.on(cache, pin) as stack:
        for each in series:
            # Series are made on the pin. A part of a series, and a series that changes a file changed by another, is
            # merged, but only after the series applied to the pin alone, blob by blob: that also puts its base blobs
            # into the cache.
            put = stack.push
            if each.whole or {path for _, path in changed_files(stack.git, pin, stack.commit)} & each.paths:
                apply(cache, pin, [each.whole or each])
                put = stack.merge
            for patch in each.patches:
                put(each, patch)
            stack.overlay(each)
        cache.git.run("update-ref", ref, stack.commit)
        return Source(pin, stack.tree(), stack.commit, refs)


def check(root: Path, name: str, cache: PinCache, pin: str, *, beside: bool = False) -> dict[str, str]:
    """Return the problems of the series patches/<name> of the project `root` on a pin: sentences, and what mends each.

    A series has no problem if every file is listed once and readable, every patch changes exactly the blobs that it
    names into those that it names, none is what a merge left over, and `git format-patch` would write each patch
    identically. With `beside`, other pins need the patches too: what mends a patch that moved keeps them. Raises
    SpecError if the pin is not in the cache.
    """
    cache.require(pin)
    try:
        series = read(root, name, pin)
    except SpecError as error:
        return dict.fromkeys(error.details.splitlines() or [error.message], error.next)
    problems: dict[str, str] = {}
    with Stack.on(cache, pin, beside=beside) as stack:
        try:
            for patch in series.patches:
                for path in sorted(path for path in patch.paths if path.endswith((".orig", ".rej"))):
                    mend = f"remove it in a checkout, then dgxlab patch export {name} --tree CHECKOUT"
                    problems[f"{patch.name} adds {path}, which a merge left over"] = mend
                stack.push(series, patch)
                if patch.content != stack.format():
                    mend = f"dgxlab patch refresh {name} --pin {pin}"
                    problems[f"{patch.name} is not as git format-patch writes it; dgxlab patch refresh mends it"] = mend
            stack.overlay(series)
        except PatchError as error:
            problems |= dict.fromkeys([error.message, *error.details.splitlines()[1:]], error.next)
    return problems


def refresh(root: Path, name: str, cache: PinCache, pin: str, *, beside: bool = False) -> list[str]:
    """Port the series patches/<name> of the project `root` to a pin by three-way merges.

    With `beside` the ported patches get a folder for this pin, and those for other pins stay as they are.

    Returns the names of the patch files that changed. Nothing is written unless all patches merge. The blobs that a
    patch was made on must be in the cache, so it must hold the old pin, or one with the same files.

    Raises:
        SpecError: if the pin is not in the cache or the series cannot be read.
        PatchError: if a patch conflicts; `details` has a line for every file.
    """
    cache.require(pin)
    series, folder = read(root, name, pin), folder_for(root, name, pin, beside=beside)
    blobs = {change.old_blob for patch in series.patches for change in patch.changes} - {"", NO_BLOB}
    listed = cache.git.run("cat-file", "--batch-check=%(objecttype)", input="".join(f"{blob}\n" for blob in blobs))
    if "missing" in listed:
        # the base of a later patch exists only after the earlier ones: apply all to every cached pin
        for known in cache.pins():
            with suppress(PatchError), Stack.on(cache, known) as stack:
                for patch in series.patches:
                    stack.push(series, patch)
                break
    written = []
    with Stack.on(cache, pin) as stack:
        for patch in series.patches:
            stack.merge(series, patch)
            written.append(Patch.parse(patch.name, stack.format()))
        stack.overlay(series)
    folder.mkdir(exist_ok=True)
    changed = [patch.name for patch in written if write_whole(folder / patch.name, patch.content)]
    write_whole(folder / "series", content_of(root, f"{series.place}/series"))  # last: it makes the folder count
    return changed


def _refuse_clashes(series: Iterable[Series]) -> None:
    """Raise a SpecError if series conflict in a way that git does not detect."""
    owners: dict[str, tuple[str, str]] = {}
    seen: set[str] = set()
    for each in series:
        if each.name in seen:
            raise SpecError(f"series {each.name} is there twice", next="list it once")
        seen.add(each.name)
        for overlay in each.overlays:
            owner, source = owners.setdefault(overlay.dest, (each.name, overlay.source))
            if source != overlay.source:
                message = f"series {owner} and {each.name} overlay {overlay.dest} with {source} and {overlay.source}"
                raise SpecError(message, next="use one of the two")
