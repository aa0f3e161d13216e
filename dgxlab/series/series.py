"""A series as patches/<name>/ has it: a `series` file, its patch files, and overlays, which are files of kernels/.

The `series` file has one patch file name a line, in order, `#` comments, and `overlay SRC DEST` lines that copy a file
of kernels/ into the tree.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dgxlab.errors import SpecError
from dgxlab.model import NAME, SeriesRef
from dgxlab.series.patchfile import Patch

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")
_SIZE_LIMIT = 16 << 20
"""Bytes of one patch or overlay file."""


@dataclass(frozen=True)
class Line:
    """One entry of a `series` file: a patch, or an overlay when `dest` is set.

    Attributes:
        name: The patch file, or the overlay's source.
        dest: Where the overlay goes, else "".
        comments: The comment and empty lines above it.
    """

    name: str
    dest: str = ""
    comments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*self.comments, f"overlay {self.name} {self.dest}" if self.dest else self.name])


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


def names(root: Path) -> list[str]:
    """Return the names of the folders in patches/ that hold a `series` file."""
    return sorted(path.parent.name for path in (root / "patches").glob("*/series"))


def list_all(root: Path) -> list[Series]:
    """Read every series of the project, by name.

    Raises:
        SpecError: if one is wrong.
    """
    return [read(root, name) for name in names(root)]


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


def inspect(root: Path, name: str) -> tuple[Series | None, list[str]]:
    """Read a series and return it with every problem of its files; None where there is no readable `series` file."""
    if not NAME.fullmatch(name):
        return None, [f"{name!r} is no name for a series"]
    folder = root / "patches" / name
    if not (folder / "series").is_file():
        near = difflib.get_close_matches(name, names(root), 1)
        return None, [f"there is no {folder / 'series'}" + (f"; is it {near[0]}?" if near else "")]
    try:
        lines = parse(_content(root, f"patches/{name}/series").decode())
    except ValueError as error:
        return None, [str(error)]
    problems: list[str] = []
    patches: list[Patch] = []
    overlays: list[Overlay] = []
    for line in lines:
        try:
            if line.dest:
                overlays.append(read_overlay(root, line))
            elif not NAME.fullmatch(line.name) or not line.name.endswith(".patch"):
                problems.append(f"{line.name}: a patch is a file NAME.patch beside the series file")
            else:
                patches.append(Patch.parse(line.name, _content(root, f"patches/{name}/{line.name}")))
        except ValueError as error:
            problems.append(str(error) if line.dest else f"{line.name}: {error}")
    unlisted = {path.name for path in folder.glob("*.patch")} - {line.name for line in lines}
    problems += [f"{file} is not in its series file" for file in sorted(unlisted)]
    patched = {path: patch.name for patch in patches for path in patch.paths}
    problems += [
        f"{patched[overlay.dest]} changes {overlay.dest}, which is an overlay: change {overlay.source}"
        for overlay in overlays
        if overlay.dest in patched
    ]
    return Series(name, tuple(patches), tuple(overlays)), problems


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


def parse(text: str) -> list[Line]:
    """Read a `series` file.

    Raises:
        ValueError: naming the line that is wrong, listed twice, or when there is none.
    """
    lines: list[Line] = []
    comments: list[str] = []
    for number, raw in enumerate(text.splitlines(), 1):
        words = raw.split()
        if not words or raw.lstrip().startswith("#"):
            comments.append(raw)
            continue
        line = Line(words[0], comments=tuple(comments))
        if words[0] == "overlay" and len(words) == 3:
            line = Line(words[1], words[2], tuple(comments))
        elif len(words) != 1:
            raise ValueError(f"line {number}: neither a patch file nor `overlay SRC DEST`: {raw.strip()}")
        if line.name in {other.name for other in lines} or line.dest in {other.dest for other in lines} - {""}:
            raise ValueError(f"line {number}: {line.dest or line.name} is listed twice")
        lines.append(line)
        comments = []
    if not lines:
        raise ValueError("it lists nothing: a build would be called patched and be stock")
    return lines


def render(lines: Sequence[Line]) -> str:
    """Return the text of a `series` file; `parse` gives the same lines again."""
    return "".join(f"{line}\n" for line in lines)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is never seen half-written."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    part.replace(path)


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
