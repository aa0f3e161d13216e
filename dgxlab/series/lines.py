"""The file patches/<name>/series: one patch file name a line, in order, `#` comments, and `overlay SRC DEST` lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
        return "".join(f"{c}\n" for c in self.comments) + (
            f"overlay {self.name} {self.dest}" if self.dest else self.name
        )


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


def render(lines: list[Line]) -> str:
    """Return the text of a `series` file; `parse` gives the same lines again."""
    return "".join(f"{line}\n" for line in lines)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is never seen half-written."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    part.replace(path)
