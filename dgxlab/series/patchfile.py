"""One patch file as `git format-patch` writes it, read strictly.

The reader parses everything that git would apply: every file, hunk and blob id. It refuses anything unknown (a binary
patch, a quoted path, a diff without blob ids) instead of skipping it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

NO_BLOB = "0" * 40  # blob id in the index line for a missing file
MODES = ("100644", "100755")  # plain files: a symbolic link or a submodule could point outside the tree

# The header of one file in a patch, in git's order, up to its first hunk.
_HEADER = re.compile(
    r"diff --git (?P<names>.*)\n"
    r"(?:old mode (?P<mode0>\d{6})\nnew mode (?P<mode1>\d{6})\n)?"
    r"(?:(?P<kind>new|deleted) file mode (?P<mode2>\d{6})\n)?"
    r"(?:(?:dis)?similarity index .*\n)?"
    r"(?:(?:rename|copy) from (?P<source>.*)\n(?:rename|copy) to (?P<target>.*)\n)?"
    r"(?:index (?P<blob0>[0-9a-f]+)\.\.(?P<blob1>[0-9a-f]+)(?: (?P<mode3>\d{6}))?\n)?"
    r"(?:--- (?P<old>.*)\n\+\+\+ (?P<new>.*)\n)?"
)
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*\n")
_DIFFSTAT = re.compile(rb"(?:\A|\n)---\n(?: [^\n]*\n)* \d+ files? changed[^\n]*\n(?: [^\n]*\n)*\n*\Z")


class PatchSyntaxError(ValueError):
    """A file is not what `git format-patch --full-index` writes; the message has the line number."""


@dataclass(frozen=True)
class Change:
    """What a patch does to one file: path and blob id before and after, and the text of that part.

    A file that does not exist before or after has the path "" and the blob NO_BLOB there. Both blobs are "" in a pure
    rename or mode change, where git writes none.
    """

    old_path: str
    new_path: str
    old_blob: str
    new_blob: str
    text: bytes

    @property
    def paths(self) -> frozenset[str]:
        """The paths before and after."""
        return frozenset({self.old_path, self.new_path} - {""})


@dataclass(frozen=True)
class Patch:
    """One patch of a series: name and content of its file, and a change for each file of the tree that it touches."""

    name: str
    content: bytes
    changes: tuple[Change, ...]

    @classmethod
    def parse(cls, name: str, content: bytes) -> Patch:
        """Read a patch file; PatchSyntaxError if git would write it otherwise, or a path is outside the tree."""
        changes = tuple(_changes(content))
        touched = [path for change in changes for path in sorted(change.paths)]
        if twice := sorted({path for path in touched if touched.count(path) > 1}):
            raise PatchSyntaxError(f"{twice[0]} is there twice")
        return cls(name, content, changes)

    @property
    def message(self) -> tuple[bytes, bytes]:
        """The mail header (author, date and subject), and the body of the commit message, without a diffstat."""
        header, _, body = (self.content.partition(b"\ndiff --git ")[0] + b"\n").partition(b"\n\n")
        return header + b"\n\n", _DIFFSTAT.sub(b"\n", body).strip(b"\n")

    @property
    def diff(self) -> bytes:
        """The patch without its message."""
        return b"".join(change.text for change in self.changes)

    @property
    def paths(self) -> frozenset[str]:
        """The paths of the tree that it touches."""
        return frozenset().union(*(change.paths for change in self.changes))


def _changes(content: bytes) -> Iterator[Change]:
    text = content.decode(errors="surrogateescape").removesuffix("\n") + "\n"
    if not text.startswith("From "):
        raise _wrong(text, 0, "a patch file starts with `From `, as git format-patch writes it")
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
    for name in ("mode0", "mode1", "mode2", "mode3"):
        if header[name] and header[name] not in MODES:
            problem = f"mode {header[name]}: only plain files, no symbolic links and no submodules"
            raise _wrong(text, header.start(name), problem)
    full_index = "write it with git format-patch --full-index"
    if any(blob and len(blob) != 40 for blob in header.group("blob0", "blob1")):
        raise _wrong(text, header.start("blob0"), f"shortened blob ids: {full_index}")
    if has_hunks and not header["old"]:
        raise _wrong(text, header.end(), "hunks without `---` and `+++` lines")
    if has_hunks and not header["blob0"]:
        raise _wrong(text, header.start(), f"no blob ids: {full_index}")


def _after_hunks(text: str, place: int) -> int:
    """Return the end of the hunks that begin at `place`."""
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
    """Return the start of the next file: after empty lines, or the end after a patch's signature."""
    if text.startswith("-- \n", place):
        return len(text)
    while text.startswith("\n", place):
        place += 1
    if place < len(text) and not text.startswith("diff --git ", place):
        line = text[place : text.index("\n", place)]
        is_binary = line.startswith(("GIT binary patch", "Binary files "))
        raise _wrong(text, place, "binary patches are refused" if is_binary else f"unexpected {line[:40]!r}")
    return place


def _paths(text: str, header: re.Match[str]) -> tuple[str, str]:
    """Return the file before and after, "" for none; they must agree with the `diff --git` line."""
    names = header["names"]
    half = (len(names) - 5) // 2
    # a name with a space has a tab after it
    sides = [(header[name] or "").removesuffix("\t") for name in ("old", "new")]
    old = header["source"] or sides[0].removeprefix("a/") or names[2 : 2 + half]
    new = header["target"] or sides[1].removeprefix("b/") or names[-half:]
    old, new = (new if old == "/dev/null" else old), (old if new == "/dev/null" else new)
    if names != f"a/{old} b/{new}":
        raise _wrong(text, header.start(), f"its paths do not agree, or need quoting: {names}")
    if unsafe := [path for path in (old, new) if not _is_plain(path)]:
        raise _wrong(text, header.start(), f"{unsafe[0]!r} is no plain path of the tree")
    is_new, is_removed = header["kind"] == "new", header["kind"] == "deleted"
    if is_new != (header["blob0"] == NO_BLOB) or is_removed != (header["blob1"] == NO_BLOB):
        raise _wrong(text, header.start(), "the blob ids do not agree with a new or removed file")
    return "" if is_new else old, "" if is_removed else new


def _wrong(text: str, place: int, problem: str) -> PatchSyntaxError:
    line = text.count("\n", 0, place) + 1
    return PatchSyntaxError(f"line {line}: {problem}")


def _is_plain(path: str) -> bool:
    """Return whether a patch may touch a path: it stays inside the tree, is not git's own, and needs no quoting."""
    parts = {part.lower().rstrip(". ") for part in path.split("/")}
    return parts.isdisjoint({"", ".git", "git~1"}) and not re.search(r'[\x00-\x1f\x7f"\\]', path)
