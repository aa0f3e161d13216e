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

_INDEX = re.compile(r"index ([0-9a-f]+)\.\.([0-9a-f]+)(?: (\d{6}))?")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*", re.DOTALL)
_MODE = re.compile(r"(?:old mode|new mode|new file mode|deleted file mode) (\d{6})")
_DIFFSTAT = re.compile(rb"(?:\A|\n)---\n(?: [^\n]*\n)* \d+ files? changed[^\n]*\n(?: [^\n]*\n)*\n*\Z")
_MOVE = re.compile(r"(rename|copy) (from|to) (.*)")


class PatchSyntaxError(ValueError):
    """A patch file is not what `git format-patch --full-index` writes; the message has the line number."""


@dataclass(frozen=True)
class Hunk:
    """One hunk: the line where it starts, in the file before and after; the first line is 1."""

    line: int
    new_line: int


@dataclass(frozen=True)
class Change:
    """What a patch does to one file.

    Attributes:
        old_path: The file before, "" for a new one.
        new_path: The file after, "" for a removed one.
        old_blob: Blob id before: NO_BLOB for a new file, "" where the patch names none (a pure rename or mode change).
        new_blob: Blob id after, likewise.
        hunks: In order; none for a rename or a mode change.
        text: The file's part of the patch.
    """

    old_path: str
    new_path: str
    old_blob: str
    new_blob: str
    hunks: tuple[Hunk, ...]
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
        changes = tuple(_Reader(content).changes())
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


class _Reader:
    """Walks over the lines of a patch file."""

    def __init__(self, content: bytes) -> None:
        # at newlines only: a carriage return belongs to the line
        self.lines = [line + b"\n" for line in content.removesuffix(b"\n").split(b"\n")]
        self.at = 0

    def changes(self) -> Iterator[Change]:
        if not self.lines or not self.lines[0].startswith(b"From "):
            raise PatchSyntaxError("line 1: a patch file starts with `From `, as git format-patch writes it")
        while self.at < len(self.lines) and not self.lines[self.at].startswith(b"diff --git "):
            self.at += 1
        if self.at == len(self.lines):
            raise PatchSyntaxError("it changes nothing")
        while self.at < len(self.lines):
            yield self._change()

    def _change(self) -> Change:
        start = self.at
        header = self._header()
        hunks = []
        while self._peek().startswith("@@ "):
            hunks.append(self._hunk())
        self._skip_end()
        if hunks and "old" not in header:
            raise self._wrong("hunks without `---` and `+++` lines")
        if hunks and not header.get("old_blob"):
            raise PatchSyntaxError(f"line {start + 1}: no blob ids: write it with git format-patch --full-index")
        old, new = self._paths(start, header)
        text = b"".join(self.lines[start : self.at])
        return Change(old, new, header.get("old_blob", ""), header.get("new_blob", ""), tuple(hunks), text)

    def _header(self) -> dict[str, str]:
        """Read from `diff --git` to the first hunk."""
        found = {"git": self._peek()}
        self.at += 1
        while self.at < len(self.lines):
            line = self._peek()
            if match := _INDEX.fullmatch(line):
                self._read_index(match, found)
            elif match := _MODE.fullmatch(line):
                self._check_mode(match[1])
                found[line.rpartition(" ")[0]] = match[1]
            elif match := _MOVE.fullmatch(line):
                found[f"{match[2]} path"] = match[3]
            elif line.startswith(("--- ", "+++ ")):
                found["old" if line.startswith("-") else "new"] = line[4:].removesuffix("\t")
            elif not line.startswith(("similarity index ", "dissimilarity index ")):
                break
            self.at += 1
        if line := self._peek():
            if line.startswith(("GIT binary patch", "Binary files ")):
                raise self._wrong("binary patches are refused")
            if not line.startswith(("@@ ", "diff --git ")):
                raise self._wrong(f"unexpected {line[:40]!r}")
        return found

    def _read_index(self, match: re.Match[str], found: dict[str, str]) -> None:
        if len(match[1]) != 40 or len(match[2]) != 40:
            raise self._wrong("shortened blob ids: write it with git format-patch --full-index")
        if match[3]:
            self._check_mode(match[3])
        found["old_blob"], found["new_blob"] = match[1], match[2]

    def _check_mode(self, mode: str) -> None:
        if mode not in MODES:
            raise self._wrong(f"mode {mode}: only plain files, no symbolic links and no submodules")

    def _hunk(self) -> Hunk:
        match = _HUNK.fullmatch(self._peek())
        if not match:
            raise self._wrong("a damaged hunk header")
        before, after = int(match[2] or 1), int(match[4] or 1)
        self.at += 1
        while before > 0 or after > 0:
            # an editor may have removed the one space of an empty context line; git reads that too
            kind = self.lines[self.at][:1] if self.at < len(self.lines) else b"end"
            if kind not in (b" ", b"\n", b"-", b"+", b"\\"):
                raise self._wrong("the hunk is shorter than its header says")
            before -= kind in (b" ", b"\n", b"-")
            after -= kind in (b" ", b"\n", b"+")
            self.at += 1
        if before < 0 or after < 0:
            raise self._wrong("the hunk does not fit its header")
        if self._peek().startswith("\\ "):
            self.at += 1
        return Hunk(int(match[1]), int(match[3]))

    def _skip_end(self) -> None:
        """Accept the signature and empty lines that end a patch file, and nothing else between two files."""
        if self._peek() == "-- ":
            self.at = len(self.lines)
        while self.at < len(self.lines) and not self._peek():
            self.at += 1
        if self.at < len(self.lines) and not self._peek().startswith("diff --git "):
            raise self._wrong(f"unexpected {self._peek()[:40]!r}")

    def _paths(self, start: int, header: dict[str, str]) -> tuple[str, str]:
        """Return the file before and after, "" for none; they must agree with the `diff --git` line."""
        names = header["git"].removeprefix("diff --git ")
        half = (len(names) - 5) // 2
        old = header.get("from path") or _strip(header.get("old", ""), "a/") or names[2 : 2 + half]
        new = header.get("to path") or _strip(header.get("new", ""), "b/") or names[-half:]
        old, new = (new if old == "/dev/null" else old), (old if new == "/dev/null" else new)
        if names != f"a/{old} b/{new}":
            raise PatchSyntaxError(f"line {start + 1}: its paths do not agree, or need quoting: {names}")
        for path in (old, new):
            if problem := path_problem(path):
                raise PatchSyntaxError(f"line {start + 1}: {path!r} {problem}")
        created, removed = "new file mode" in header, "deleted file mode" in header
        if created != (header.get("old_blob") == NO_BLOB) or removed != (header.get("new_blob") == NO_BLOB):
            raise PatchSyntaxError(f"line {start + 1}: the blob ids do not agree with a file made or removed")
        return "" if created else old, "" if removed else new

    def _peek(self) -> str:
        if self.at >= len(self.lines):
            return ""
        return self.lines[self.at].decode(errors="surrogateescape").removesuffix("\n")

    def _wrong(self, problem: str) -> PatchSyntaxError:
        return PatchSyntaxError(f"line {self.at + 1}: {problem}")


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


def _strip(path: str, prefix: str) -> str:
    return path if path == "/dev/null" else path.removeprefix(prefix)
