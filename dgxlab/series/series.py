"""A series in patches/<name>/: a `series` file, its patch files, and overlays, which are files of kernels/.

Patches that another pin needs are in patches/<name>/<12 digits of the pin>/, with a `series` file of their own. Results
name a series by its content, so patches for a new pin leave those for the old one as they were.

A line of the `series` file is the name of a patch file, in order, a `#` comment, or `overlay SRC DEST`, which copies a
file of kernels/ to the path DEST of the tree.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from dgxlab.errors import SpecError, command
from dgxlab.model import NAME, SeriesRef, spans
from dgxlab.series.patchfile import Patch

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")
_SIZE_LIMIT = 16 << 20  # bytes of one patch or overlay file


@dataclass(frozen=True)
class SeriesLine:
    """One line of a `series` file, with the comment lines above it; `dest` is "" unless it is an overlay."""

    name: str  # the patch file, or the overlay's source
    dest: str = ""
    comments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*self.comments, f"overlay {self.name} {self.dest}" if self.dest else self.name])


@dataclass(frozen=True)
class Overlay:
    """A file that is copied from kernels/ into the tree: `source` is its path in the project, `dest` in the tree."""

    source: str
    dest: str
    content: bytes = field(repr=False)


@dataclass(frozen=True)
class Series:
    """A series with the contents of its files: patches in order of application, and overlays, which come after them."""

    name: str
    patches: tuple[Patch, ...]
    overlays: tuple[Overlay, ...] = ()
    place: str = ""  # its folder in the project: patches/NAME, or one for a pin in there
    whole: Series | None = None  # the series that it is a part of

    @property
    def folder(self) -> str:
        """The name of its folder in patches/: a part has that of the whole."""
        return (self.whole or self).name

    @property
    def digest(self) -> str:
        """Sha256 over the names and bytes of patches and overlays, in order."""
        total = hashlib.sha256()
        for patch in self.patches:
            total.update(f"patch {patch.name} {len(patch.content)}\n".encode() + patch.content)
        for overlay in self.overlays:
            total.update(f"overlay {overlay.dest} {len(overlay.content)}\n".encode() + overlay.content)
        return total.hexdigest()

    @property
    def ref(self) -> SeriesRef:
        """Name and digest, as plans and the record name the series."""
        return SeriesRef(self.name, self.digest)

    @property
    def paths(self) -> set[str]:
        """The paths of the tree that it touches."""
        return {path for patch in self.patches for path in patch.paths} | {overlay.dest for overlay in self.overlays}


def names(root: Path) -> list[str]:
    """Return the names of a project's series: the folders in patches/ that have a `series` file."""
    return sorted(path.parent.name for path in (root / "patches").glob("*/series"))


def begun(root: Path) -> list[str]:
    """Return the names of the folders in patches/ that `dgxlab new series` has made and that have no patches yet."""
    folders = [path.parent for path in (root / "patches").glob("*/README.md") if NAME.fullmatch(path.parent.name)]
    return sorted(path.name for path in folders if not [*path.rglob("series"), *path.rglob("*.patch")])


def unknown(root: Path, name: str) -> SpecError:
    """Return the error for a name that is not in `names`: its folder has no patches, or there is no such series."""
    if name in begun(root):
        return SpecError(f"series {name} has no patches yet", next=first_export(name))
    near = difflib.get_close_matches(name, [*names(root), *begun(root)], 1)
    message = f"{root / 'patches'} has no series {name!r}" + (f"; there is {near[0]!r}" if near else "")
    return SpecError(message, next="dgxlab patch list")


def first_export(name: str) -> str:
    """Return the command that makes the patches of a series."""
    return command("dgxlab", "patch", "export", name, "--tree", "CHECKOUT", "-m", "SUBJECT")


def own_place(name: str, pin: str) -> str:
    """Return the path, in the project, of a series' own patches for a pin."""
    return f"patches/{name}/{pin[:12]}"


def place_for(root: Path, name: str, pin: str) -> str:
    """Return the path, in the project, of a series' patches for a pin: its own place if it has one."""
    own = own_place(name, pin)
    return own if pin and (root / own / "series").is_file() else f"patches/{name}"


def folder_for(root: Path, name: str, pin: str, *, beside: bool) -> Path:
    """Return the folder to write a series' patches for a pin to, with `beside` its own place for that pin.

    Raises SpecError if a symbolic link is on the way: a repository's could lead anywhere.
    """
    place = own_place(name, pin) if beside else place_for(root, name, pin)
    if link := _link(root, place):
        raise SpecError(f"{link} is a symbolic link, and nothing is written there", next=command("ls", "-l", link))
    return root / place


def own_pins(root: Path, name: str) -> list[str]:
    """Return the first 12 digits of each pin for which a series has patches of its own."""
    return sorted(path.parent.name for path in (root / "patches" / name).glob("*/series"))


def read(root: Path, name: str, pin: str = "") -> Series:
    """Read the series patches/<name> of the project `root`, for a pin.

    `name` is as `model.SERIES` has it: `w4a16:1-2` is its first two patches, with all overlays. Raises SpecError if
    there is none, it has problems, which `details` lists, or no such patch.
    """
    name, _, numbers = name.partition(":")
    series, problems = _inspect(root, name, pin)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        message, mend = f"series {name}: {problems[0]}{more}", f"mend the files in {series.place}"
        raise SpecError(message, next=mend, details="\n".join(problems))
    return _part(series, numbers) if numbers else series


def _part(series: Series, numbers: str) -> Series:
    wanted, count = spans(numbers), len(series.patches)
    if not all(1 <= first <= last <= count for first, last in wanted):
        message = f"series {series.name} has the patches 1 to {count}, and no {numbers}"
        raise SpecError(message, next="dgxlab patch list")
    numbered = enumerate(series.patches, 1)
    chosen = tuple(patch for number, patch in numbered if any(first <= number <= last for first, last in wanted))
    return replace(series, name=f"{series.name}:{numbers}", patches=chosen, whole=series)


def _inspect(root: Path, name: str, pin: str) -> tuple[Series, list[str]]:
    """Return the series patches/<name>, for a pin, and the problems of its files; SpecError if there is none."""
    if not NAME.fullmatch(name):
        raise SpecError(f"{name!r} is no name for a series", next="dgxlab patch list")
    place = place_for(root, name, pin)
    folder = root / place
    if not (folder / "series").is_file():
        raise unknown(root, name)
    try:
        lines = parse(content_of(root, f"{place}/series").decode())
    except ValueError as error:
        return Series(name, (), place=place), [str(error)]
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
                patches.append(Patch.parse(line.name, content_of(root, f"{place}/{line.name}")))
        except ValueError as error:
            problems.append(str(error) if line.dest else f"{line.name}: {error}")
    unlisted = {path.name for path in folder.glob("*.patch")} - {line.name for line in lines}
    problems += [f"{file} is not in its series file: list it there or remove it" for file in sorted(unlisted)]
    for patch in patches:
        for overlay in overlays:
            if overlay.dest in patch.paths:
                problem = f"changes {overlay.dest}, which is an overlay: change {overlay.source}"
                problems.append(f"{patch.name} {problem}")
    return Series(name, tuple(patches), tuple(overlays), place), problems


def read_overlay(root: Path, line: SeriesLine) -> Overlay:
    """Read the file of an overlay line; ValueError if a path is not allowed or there is no such file."""
    try:
        if not all(_PART.fullmatch(part) for path in (line.name, line.dest) for part in path.split("/")):
            raise ValueError("not two plain relative paths")
        if not line.name.startswith("kernels/"):
            raise ValueError("not a file of kernels/")
        return Overlay(line.name, line.dest, content_of(root, line.name))
    except ValueError as error:
        raise ValueError(f"overlay {line.name} {line.dest}: {error}") from error


def parse(text: str) -> list[SeriesLine]:
    """Read the text of a `series` file; `str` of a line writes it again. ValueError names the first wrong line."""
    lines: list[SeriesLine] = []
    comments: list[str] = []
    for number, raw in enumerate(text.splitlines(), 1):
        words = raw.split()
        if not words or raw.lstrip().startswith("#"):
            comments.append(raw)
            continue
        line = SeriesLine(words[0], comments=tuple(comments))
        if words[0] == "overlay" and len(words) == 3:
            line = SeriesLine(words[1], words[2], tuple(comments))
        elif len(words) != 1:
            raise ValueError(f"line {number}: neither a patch file nor `overlay SRC DEST`: {raw.strip()}")
        if line.name in {other.name for other in lines} or line.dest in {other.dest for other in lines} - {""}:
            raise ValueError(f"line {number}: {line.dest or line.name} is listed twice")
        lines.append(line)
        comments = []
    if not lines:
        raise ValueError("it lists nothing: a build would be called patched and be stock")
    return lines


def content_of(root: Path, path: str) -> bytes:
    """Read the file at `path` below `root`; ValueError if missing or over 16 MB, or if the path has a symbolic link."""
    if link := _link(root, path):
        raise ValueError(f"{link.relative_to(root)} is a symbolic link")
    place = root / path
    if not place.is_file():
        raise ValueError("there is no such file")
    if place.stat().st_size > _SIZE_LIMIT:
        raise ValueError(f"it has more than {_SIZE_LIMIT >> 20} MB")
    return place.read_bytes()


def _link(root: Path, path: str) -> Path | None:
    """Return the first part of `path` below `root` that is a symbolic link."""
    parts = (root / part for part in (*reversed(Path(path).parents), Path(path)))
    return next((part for part in parts if part != root and part.is_symlink()), None)
