"""Generated blocks of a markdown document: the text between two markers is replaced, everything else is unchanged.

    <!-- dgxlab:report form=ops experiment=stock,w4a16 cells="q4_K n=512" -->
    ...
    <!-- /dgxlab -->

Each marker is on a line of its own. In fenced code blocks and between backticks, markers are plain text.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dgxlab.errors import AGAIN, SpecError, access, command, edit

BEGIN = re.compile(r"<!--\s*dgxlab:report((?:\s[^<>]*)?)-->")
END = re.compile(r"<!--\s*/dgxlab\s*-->")
HINT = re.compile(r"(?<!\\)<!-*\s*/?\s*dgxlab\b", re.IGNORECASE)
"""What looks like a marker and is none is refused, except behind a backslash, as in a table."""

WORD = re.compile(r'\s*([A-Za-z][\w-]*)=(?:"([^"]*)"|([^\s"=]+))(?=\s|$)')
"""A key with its value; quotes are needed only around blanks."""

SWITCHES = ("wide",)  # keys that may come without a value, which then is yes

FENCE = re.compile(r"(?P<mark>`{3,}(?=[^`]*$)|~{3,})")
CODE = re.compile(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)")

WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
"""A file without any of these bits is read-only, also for root, who could write it."""

SESSION_PAGE = re.compile(r"\]\((sessions/([0-9a-f]{6})\.md)(?:#[\w-]+)?\)")
"""A link to the page of a session, which is named by the session's alias."""

BOM = "\N{ZERO WIDTH NO-BREAK SPACE}"


@dataclass(frozen=True)
class Block:
    """One block: the line of its first marker, from 1, the keys of that marker, and the text between the markers."""

    line: int
    words: Mapping[str, str]
    text: str


class Document:
    """A markdown document and its blocks."""

    def __init__(self, path: Path) -> None:
        """Read a document.

        Raises SpecError if it cannot be read, is not UTF-8, or has a malformed marker (with the line).
        """
        self.path = path
        with access(path, "read", SpecError):
            self._bytes = path.read_bytes()
        self._lines = _decoded(path, self._bytes).split("\n")
        self._spans = list(_spans(path, self._lines))
        self.blocks = tuple(
            Block(begin + 1, words, "\n".join(self._lines[begin + 1 : end])) for begin, end, words in self._spans
        )

    def session_pages(self) -> Iterator[tuple[int, Path, str]]:
        """Yield the first link to each session's page: its line, from 1, the linked file, and the session's alias."""
        links = [
            (n, link) for n, line in _outside_fences(self._lines) for link in SESSION_PAGE.finditer(CODE.sub("", line))
        ]
        for number, link in {link[1]: (number, link) for number, link in reversed(links)}.values():
            yield number + 1, self.path.parent / link[1], link[2]

    def with_texts(self, texts: Sequence[str]) -> bytes:
        """Return the document as bytes, with the text of each block replaced; `texts` has one for each block, in order.

        Line endings are those of each block's first marker.
        """
        lines: list[str] = []
        after = 0
        for (begin, end, _), text in zip(self._spans, texts, strict=True):
            lines += self._lines[after : begin + 1]
            lines += _between(text, self._lines[begin])
            after = end
        return "\n".join([*lines, *self._lines[after:]]).encode()

    def is_stale(self, block: Block, text: str) -> bool:
        """Return whether a block's text differs from `text`, its new one."""
        return block.text != "\n".join(_between(text, self._lines[block.line - 1]))

    def write(self, content: bytes) -> bool:
        """Replace the file's content atomically; return whether it differs from the content that was read.

        A symbolic link is kept, and so are the file's permissions. A read-only file is never replaced, although the
        folder may allow it. Raises SpecError if it cannot be written or is read-only, or another program changed it
        since it was read.
        """
        if content == self._bytes:
            return False
        target = self.path.resolve()
        beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        with access(self.path, "written", SpecError):
            if target.read_bytes() != self._bytes:
                message = f"{self.path} was changed by another program meanwhile and is left as it is"
                raise SpecError(message, next=AGAIN)
            like = target.stat()
            if not (like.st_mode & WRITABLE and os.access(target, os.W_OK)):
                raise SpecError(f"{self.path} is read-only and is left as it is", next=command("ls", "-l", target))
            try:
                _write_beside(beside, content, like)
                beside.replace(target)
            finally:
                with contextlib.suppress(OSError):
                    beside.unlink()
        return True


def _write_beside(path: Path, content: bytes, like: os.stat_result) -> None:
    """Write a file to disk (fsync), with the permissions and owner of `like`."""
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        with contextlib.suppress(PermissionError):  # the file of another user in a shared folder
            os.fchown(file.fileno(), like.st_uid, like.st_gid)
        os.fchmod(file.fileno(), stat.S_IMODE(like.st_mode))
        os.fsync(file.fileno())


def _decoded(path: Path, content: bytes) -> str:
    if content.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in content:
        raise SpecError(f"{path} is not UTF-8 text", next=f"file {shlex.quote(str(path))}")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{path}:{line}: byte 0x{content[error.start]:02x} is not UTF-8", next=edit(path)) from error


def _between(text: str, marker: str) -> list[str]:
    """Return the lines of a block: the text between two blank lines, with the line ending of the marker."""
    carriage = "\r" if marker.endswith("\r") else ""
    return [line + carriage for line in ["", *text.strip("\n").split("\n"), ""]]


def _spans(path: Path, lines: Sequence[str]) -> Iterator[tuple[int, int, Mapping[str, str]]]:
    """Yield the first and last line of each block, and the keys of its marker."""
    begun: tuple[int, Mapping[str, str]] | None = None
    for number, line in _outside_fences(lines):
        shown = line.removeprefix(BOM).removesuffix("\r").rstrip(" \t")
        if match := BEGIN.fullmatch(shown):
            if begun is not None:
                raise _refused(path, number, f"a block begins inside the one of line {begun[0] + 1}")
            begun = number, _words(path, number, match[1])
        elif END.fullmatch(shown):
            if begun is None:
                raise _refused(path, number, "the end of a block that did not begin")
            yield begun[0], number, begun[1]
            begun = None
        elif HINT.search(CODE.sub("", shown)):
            alone = "a marker stands alone on its line, without blanks before it"
            unknown = "neither <!-- dgxlab:report form=... --> nor <!-- /dgxlab -->"
            raise _refused(path, number, alone if BEGIN.search(shown) or END.search(shown) else unknown)
    if begun is not None:
        raise _refused(path, begun[0], "the block has no end: a line <!-- /dgxlab --> is missing")


def _outside_fences(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    fence = ""
    for number, line in enumerate(lines):
        text = line.strip(" \t\r")
        match = FENCE.match(text)
        if fence:
            closes = match and match["mark"].startswith(fence) and text == match["mark"]
            fence = "" if closes else fence
        elif match and not re.match(r"(?: {4}| {0,3}\t)", line):
            fence = match["mark"]
        else:
            yield number, line


def _words(path: Path, number: int, text: str) -> Mapping[str, str]:
    words: dict[str, str] = {}
    rest = text.strip()
    while rest:
        first, *others = rest.split(maxsplit=1)
        if first in SWITCHES:
            rest = f"{first}=yes {''.join(others)}"
        match = WORD.match(rest)
        if match is None:
            raise _refused(path, number, f'{rest.split()[0]!r} is not key=value or key="several words"')
        key, value = match[1], match[3] if match[2] is None else match[2]
        if key in words:
            raise _refused(path, number, f"{key} is given twice")
        words[key] = value
        rest = rest[match.end() :].lstrip()
    return words


def _refused(path: Path, number: int, why: str) -> SpecError:
    return SpecError(f"{path}:{number + 1}: {why}", next=edit(path))
