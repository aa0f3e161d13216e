"""Patch series: what lies in patches/<name>/, and the tree that series make of a pin.

A series is a `series` file with one patch file name a line, in order, `#` comments, and lines `overlay SRC DEST` that
copy a file of kernels/ into the tree. Its digest covers every byte that can reach the tree, so the outcome on a pin is
remembered under it.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dgxlab.errors import SpecError
from dgxlab.model import NAME, SeriesRef, Source, digest
from dgxlab.series.checkout import apply_tree
from dgxlab.series.lines import Line, parse
from dgxlab.series.patchfile import Patch
from dgxlab.series.stack import Stack
from dgxlab.source.cache import PINS, PinCache, check_pin

__all__ = ["Overlay", "Series", "apply", "apply_tree", "inspect", "list_all", "names", "read"]

RECIPE = 1
"""Version of how a series becomes commits; part of the name under which an outcome is remembered."""

MADE = "refs/dgxlab/series/"

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")
_SIZE_LIMIT = 16 << 20
"""Bytes of one patch or overlay file."""


@dataclass(frozen=True)
class Overlay:
    """A file of kernels/ that is copied into the tree.

    Attributes:
        source: Its path in the project, under kernels/.
        dest: Its path in the tree.
        content: What it held when the series was read.
    """

    source: str
    dest: str
    content: bytes = field(repr=False)


@dataclass(frozen=True)
class Series:
    """A series as it was read.

    Attributes:
        name: Its folder under patches/.
        patches: In the order in which they apply.
        overlays: Laid over the tree after the patches.
    """

    name: str
    patches: tuple[Patch, ...]
    overlays: tuple[Overlay, ...] = ()

    @property
    def digest(self) -> str:
        """Sha256 over the names and bytes of patches and overlays, in order."""
        total = hashlib.sha256()
        for label, content in [
            *((f"patch {patch.name}", patch.content) for patch in self.patches),
            *((f"overlay {overlay.dest}", overlay.content) for overlay in self.overlays),
        ]:
            total.update(f"{label} {len(content)}\n".encode() + content)
        return total.hexdigest()

    @property
    def ref(self) -> SeriesRef:
        """How plans and the store name it."""
        return SeriesRef(self.name, self.digest)

    @property
    def paths(self) -> list[str]:
        """Every path of the tree that it touches."""
        return sorted({path for patch in self.patches for path in patch.paths} | {o.dest for o in self.overlays})


def read(root: Path, name: str) -> Series:
    """Read the series patches/<name> of the project at `root`, overlay files as they are on disk now.

    Raises:
        SpecError: if there is none, or anything in it is wrong; `details` has every problem.
    """
    series, problems = inspect(root, name)
    if series is None or problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise SpecError(
            f"series {name}: {problems[0]}{more}", next=f"mend patches/{name}/series", details="\n".join(problems)
        )
    return series


def names(root: Path) -> list[str]:
    """Return the names of the folders in patches/ that hold a `series` file."""
    return sorted(path.parent.name for path in (root / "patches").glob("*/series"))


def list_all(root: Path) -> list[Series]:
    """Read every series of the project, by name.

    Raises:
        SpecError: if one is wrong.
    """
    return [read(root, name) for name in names(root)]


def apply(cache: PinCache, pin: str, series: Sequence[Series]) -> Source:
    """Return the tree that series make of a pin, in order, the same commit for everybody everywhere.

    An outcome is remembered in the cache; asking again only looks whether it is still there.

    Raises:
        SpecError: if the pin is not in the cache, or two series want the same name or overlay.
        PatchError: if a patch does not apply: series, patch, file and hunk are named.
    """
    check_pin(pin)
    _refuse_clashes(series)
    refs = tuple(one.ref for one in series)
    made = MADE + digest([RECIPE, pin, refs], 40) if series else PINS + pin
    known = cache.git.attempt("cat-file", "--batch-check", input=f"{made}^{{commit}}\n{made}^{{tree}}\n").text.split()
    if known[1::3] == ["commit", "tree"]:
        return Source(pin, known[3], known[0], refs)
    cache.require(pin)
    with Stack.on(cache, pin) as stack:
        for one in series:
            _put_beside(cache, stack, one)
        cache.git.run("update-ref", made, stack.commit)
        return Source(pin, stack.tree(), stack.commit, refs)


def put(stack: Stack, series: Series) -> None:
    """Put a whole series on top of a stack: each patch as its own commit, then the overlays as one.

    Raises:
        PatchError: if it does not apply.
    """
    for patch in series.patches:
        stack.push(series.name, patch)
    lay(stack, series)


def lay(stack: Stack, series: Series) -> None:
    """Put a series' overlays on top of a stack, if it has any.

    Raises:
        PatchError: if the tree has such a file already.
    """
    if series.overlays:
        stack.overlay(series.name, {overlay.dest: overlay.content for overlay in series.overlays})


def _put_beside(cache: PinCache, stack: Stack, series: Series) -> None:
    """Put a series on a stack that may hold others.

    Series are made on the pin. One that changes a file that another has changed is merged, but only after it has been
    seen to apply to the pin alone, blob by blob: that also puts what it was made on into the cache.
    """
    if not stack.touches(series.paths):
        put(stack, series)
        return
    apply(cache, stack.pin, [series])
    for patch in series.patches:
        stack.merge(series.name, patch)
    lay(stack, series)


def inspect(root: Path, name: str) -> tuple[Series | None, list[str]]:
    """Read a series and return it with every problem that its files have; None when it cannot be made sense of."""
    if not NAME.fullmatch(name):
        return None, [f"{name!r} is no name for a series"]
    folder = root / "patches" / name
    if not (folder / "series").is_file():
        near = difflib.get_close_matches(name, names(root), 1)
        return None, [f"there is no {folder / 'series'}" + (f"; is it {near[0]}?" if near else "")]
    problems: list[str] = []
    try:
        lines = parse(_content(root, f"patches/{name}/series").decode())
    except ValueError as error:
        return None, [str(error)]
    patches, overlays = [], []
    for line in lines:
        try:
            if line.dest:
                overlays.append(read_overlay(root, line))
            else:
                patches.append(_read_patch(root, name, line.name))
        except ValueError as error:
            problems.append(str(error))
    listed = {line.name for line in lines}
    problems += [
        f"{path.name} is not in its series file" for path in sorted(folder.glob("*.patch")) if path.name not in listed
    ]
    series = Series(name, tuple(patches), tuple(overlays))
    return series, problems + _clashes_inside(series)


def read_overlay(root: Path, line: Line) -> Overlay:
    """Read the file that an overlay line names.

    Raises:
        ValueError: if it may not be one, or is not there.
    """
    for path in (line.name, line.dest):
        if not all(_PART.fullmatch(part) for part in path.split("/")):
            raise ValueError(f"overlay {path}: not a plain relative path")
    if not line.name.startswith("kernels/"):
        raise ValueError(f"overlay {line.name}: not under kernels/")
    try:
        return Overlay(line.name, line.dest, _content(root, line.name))
    except ValueError as error:
        raise ValueError(f"overlay {line.name}: {error}") from error


def _read_patch(root: Path, series: str, name: str) -> Patch:
    try:
        if not NAME.fullmatch(name) or not name.endswith(".patch"):
            raise ValueError("a patch is a file NAME.patch beside the series file")
        return Patch.parse(name, _content(root, f"patches/{series}/{name}"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _content(root: Path, path: str) -> bytes:
    """Read a file of the project; no part of its path may be a symbolic link."""
    place = root
    for part in Path(path).parts:
        place /= part
        if place.is_symlink():
            raise ValueError(f"{place.relative_to(root)} is a symbolic link")
    if not place.is_file():
        raise ValueError("there is no such file")
    if place.stat().st_size > _SIZE_LIMIT:
        raise ValueError(f"it has more than {_SIZE_LIMIT >> 20} MB")
    return place.read_bytes()


def _clashes_inside(series: Series) -> list[str]:
    patched = {path: patch.name for patch in series.patches for path in patch.paths}
    return [
        f"{patched[overlay.dest]} changes {overlay.dest}, which is an overlay: change {overlay.source}"
        for overlay in series.overlays
        if overlay.dest in patched
    ]


def _refuse_clashes(series: Iterable[Series]) -> None:
    """Raise a SpecError when series get in one another's way without git seeing it."""
    owners: dict[str, str] = {}
    seen: list[Series] = []
    for one in series:
        if one.name in {other.name for other in seen}:
            raise SpecError(f"series {one.name} is there twice", next="list it once")
        for dest in [overlay.dest for overlay in one.overlays]:
            if dest in owners:
                raise SpecError(f"series {owners[dest]} and {one.name} both overlay {dest}", next="use one of the two")
            owners[dest] = one.name
        seen.append(one)
