"""One patch file as `git format-patch` writes it, read strictly.

What git would apply is exactly what is read here: every file, every hunk, every blob id. Anything that this reader
does not know (a binary patch, a quoted path, a diff without blob ids) is refused rather than skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

NO_BLOB = "0" * 40
"""What the index line says for a file that is not there."""

MODES = ("100644", "100755")
"""Plain files: a symbolic link or a submodule could point outside the tree."""

_HEADER = re.compile(
    r"diff --git (?P<names>.*)\n"
    r"(?:old mode (?P<mode0>\d{6})\nnew mode (?P<mode1>\d{6})\n)?"
    r"(?:(?P<made>new|deleted) file mode (?P<mode2>\d{6})\n)?"
    r"(?:(?:dis)?similarity index .*\n)?"
    r"(?:(?:rename|copy) from (?P<source>.*)\n(?:rename|copy) to (?P<target>.*)\n)?"
    r"(?:index (?P<blob0>[0-9a-f]+)\.\.(?P<blob1>[0-9a-f]+)(?: (?P<mode3>\d{6}))?\n)?"
    r"(?:--- (?P<old>.*)\n\+\+\+ (?P<new>.*)\n)?"
)
"""What a patch file says of one file, in git's order, up to its first hunk."""

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*\n")
_DIFFSTAT = re.compile(rb"(?:\A|\n)---\n(?: [^\n]*\n)* \d+ files? changed[^\n]*\n(?: [^\n]*\n)*\n*\Z")


class PatchSyntaxError(ValueError):
    """A patch file is not what `git format-patch --full-index` writes; the message has the line number."""


@dataclass(frozen=True)
class Change:
    """What a patch does to one file.

    Attributes:
        old_path: The file before, "" for a new one.
        new_path: The file after, "" for a removed one.
        old_blob: Blob id before: NO_BLOB for a new file, "" where the patch names none (a pure rename or mode change).
        new_blob: Blob id after, likewise.
        text: The file's part of the patch.
    """

    old_path: str
    new_path: str
    old_blob: str
    new_blob: str
    text: bytes

    @property
    def path(self) -> str:
        """The name to show."""
        return self.new_path or self.old_path

    @property
    def paths(self) -> frozenset[str]:
        """Every path that it touches."""
        return frozenset({self.old_path, self.new_path} - {""})


@dataclass(frozen=True)
class Patch:
    """One patch of a series.

    Attributes:
        name: Its file name.
        content: The file as it is.
        changes: What it does, a file each.
    """

    name: str
    content: bytes
    changes: tuple[Change, ...]

    @classmethod
    def parse(cls, name: str, content: bytes) -> Patch:
        """Read a patch file.

        Raises:
            PatchSyntaxError: if it is not what `git format-patch --full-index` writes, or touches what it may not.
        """
        changes = tuple(_changes(content))
        touched = [path for change in changes for path in sorted(change.paths)]
        if twice := sorted({path for path in touched if touched.count(path) > 1}):
            raise PatchSyntaxError(f"{twice[0]} is there twice")
        return cls(name, content, changes)

    @property
    def header(self) -> bytes:
        """The mail header: author, date, subject."""
        return self._preface.partition(b"\n\n")[0] + b"\n\n"

    @property
    def body(self) -> bytes:
        """The commit message below the subject; a diffstat is no part of it."""
        return _DIFFSTAT.sub(b"\n", self._preface.partition(b"\n\n")[2]).strip(b"\n")

    @property
    def _preface(self) -> bytes:
        return self.content.partition(b"\ndiff --git ")[0] + b"\n"

    @property
    def diff(self) -> bytes:
        """The patch without its message."""
        return b"".join(change.text for change in self.changes)

    @property
    def paths(self) -> frozenset[str]:
        """Every path that it touches."""
        return frozenset().union(*(change.paths for change in self.changes))


def _changes(content: bytes) -> Iterator[Change]:
    text = content.decode(errors="surrogateescape").removesuffix("\n") + "\n"
    if not text.startswith("From "):
        raise PatchSyntaxError("line 1: a patch file starts with `From `, as git format-patch writes it")
    place = text.find("\ndiff --git ") + 1
    if not place:
        raise PatchSyntaxError("it changes nothing")
    while place < len(text):
        start, header = place, _HEADER.match(text, place)
        assert header, "a place is where `diff --git ` is"
        place = _after_hunks(text, header.end())
        _check_header(text, header, has_hunks=place > header.end())
        old, new = _paths(text, header)
        part = text[start : (place := _after_end(text, place))]
        yield Change(old, new, header["blob0"] or "", header["blob1"] or "", part.encode(errors="surrogateescape"))


def _check_header(text: str, header: re.Match[str], *, has_hunks: bool) -> None:
    fields = header.groupdict()
    for name in ("mode0", "mode1", "mode2", "mode3"):
        if fields[name] and fields[name] not in MODES:
            problem = f"mode {fields[name]}: only plain files, no symbolic links and no submodules"
            raise _wrong(text, header.start(name), problem)
    blobs = [fields[name] for name in ("blob0", "blob1") if fields[name]]
    if any(len(blob) != 40 for blob in blobs):
        raise _wrong(text, header.start("blob0"), "shortened blob ids: write it with git format-patch --full-index")
    if has_hunks and not fields["old"]:
        raise _wrong(text, header.end(), "hunks without `---` and `+++` lines")
    if has_hunks and not blobs:
        raise _wrong(text, header.start(), "no blob ids: write it with git format-patch --full-index")


def _after_hunks(text: str, place: int) -> int:
    """Return where the hunks end that begin at a place."""
    while text.startswith("@@ ", place):
        match = _HUNK.match(text, place)
        if not match:
            raise _wrong(text, place, "a damaged hunk header")
        before, after = int(match[2] or 1), int(match[4] or 1)
        place = match.end()
        while before > 0 or after > 0:
            # an editor may have removed the one space of an empty context line; git reads that too
            kind = text[place : place + 1]
            if kind not in (" ", "\n", "-", "+", "\\"):
                raise _wrong(text, place, "the hunk is shorter than its header says")
            before -= kind in " \n-"
            after -= kind in " \n+"
            place = text.index("\n", place) + 1
        if before < 0 or after < 0:
            raise _wrong(text, place, "the hunk does not fit its header")
        if text.startswith("\\ ", place):
            place = text.index("\n", place) + 1
    return place


def _after_end(text: str, place: int) -> int:
    """Return where the next file begins: after empty lines, or at the end after the signature of a patch file."""
    if text.startswith("-- \n", place):
        return len(text)
    while text.startswith("\n", place):
        place += 1
    if place < len(text) and not text.startswith("diff --git ", place):
        line = text[place : text.index("\n", place)]
        if line.startswith(("GIT binary patch", "Binary files ")):
            raise _wrong(text, place, "binary patches are refused")
        raise _wrong(text, place, f"unexpected {line[:40]!r}")
    return place


def _paths(text: str, header: re.Match[str]) -> tuple[str, str]:
    """Return the file before and after, "" for none; they must agree with the `diff --git` line."""
    names = header["names"]
    half = (len(names) - 5) // 2
    # a name with a space has a tab after it
    sides = [(header[name] or "").removesuffix("\t") for name in ("old", "new")]
    old = header["source"] or _strip(sides[0], "a/") or names[2 : 2 + half]
    new = header["target"] or _strip(sides[1], "b/") or names[-half:]
    old, new = (new if old == "/dev/null" else old), (old if new == "/dev/null" else new)
    if names != f"a/{old} b/{new}":
        raise _wrong(text, header.start(), f"its paths do not agree, or need quoting: {names}")
    for path in (old, new):
        if problem := path_problem(path):
            raise _wrong(text, header.start(), f"{path!r} {problem}")
    is_made, is_removed = header["made"] == "new", header["made"] == "deleted"
    if is_made != (header["blob0"] == NO_BLOB) or is_removed != (header["blob1"] == NO_BLOB):
        raise _wrong(text, header.start(), "the blob ids do not agree with a file made or removed")
    return "" if is_made else old, "" if is_removed else new


def _strip(path: str, prefix: str) -> str:
    return path if path == "/dev/null" else path.removeprefix(prefix)


def _wrong(text: str, place: int, problem: str) -> PatchSyntaxError:
    line = text.count("\n", 0, place) + 1
    return PatchSyntaxError(f"line {line}: {problem}")


def path_problem(path: str) -> str:
    """Return why a path may not be touched in a tree, or "".

    >>> path_problem("ggml/src/ggml.c"), path_problem("../x"), path_problem("a/.GIT/config")
    ('', 'leaves the tree', 'is inside .git')
    """
    parts = path.split("/")
    if path.startswith("/") or ".." in parts:
        return "leaves the tree"
    if "" in parts or "." in parts:
        return "is no plain path"
    if any(part.lower().rstrip(". ") in (".git", "git~1") for part in parts):
        return "is inside .git"
    if any(ord(letter) < 32 or letter in '"\\\x7f' for letter in path):
        return "has characters that need quoting"
    return ""
