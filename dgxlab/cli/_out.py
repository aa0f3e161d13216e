"""The only output module: results to stdout, everything else to stderr; reports are drawn on a terminal."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TextIO

from typer import Option

from dgxlab.errors import AGAIN, UNSEEN, DgxlabError, escaped, one_line

CONTROL = rf"(?:\x1b\[|\x9b)[0-9;?]*[ -/]*[@-~]|{UNSEEN}"
"""Text from a host that could control a terminal or change the order of shown text; a regex, compiled at the first
output."""

OF_A_RECORD = ("run", "ab", "noise", "gate", "report", "jobs", "attach", "cancel", "logs", "import", "export")
"""Commands that take --db."""

Format = StrEnum("Format", ["human", "json"])
FormatOption = Annotated[Format, Option("--format", help="How to print the result on stdout.")]
QuietOption = Annotated[bool, Option("--quiet", "-q", help="No progress on stderr, only errors.")]


@dataclass(frozen=True)
class Out:
    """Prints in the chosen format."""

    format: FormatOption = Format.human
    quiet: QuietOption = False

    def result(self, value: Any, human: str | Callable[[], str]) -> None:
        """Print a command's result: `value`, which may hold records, as JSON, or the text for people."""
        if self.format is Format.json:
            from dgxlab.model import to_json

            text = escaped(json.dumps(value, indent=2, ensure_ascii=False, default=to_json))
        else:
            text = clean(human if isinstance(human, str) else human())  # part of it may come from a host
        if text:
            _write(sys.stdout, text.rstrip("\n"))

    def lines(self, values: Iterable[Any], human: Callable[[], str]) -> None:
        """Print a result of several parts: one JSON value per line, or the text for people."""
        if self.format is Format.json:
            text = "\n".join(json.dumps(value, ensure_ascii=False, allow_nan=False) for value in values)
            _write(sys.stdout, escaped(text))
        else:
            _write(sys.stdout, clean(human()))

    def report(self, value: Any, markdown: Callable[[], str]) -> None:
        """Print a report: drawn on a terminal, else as markdown, or as JSON if requested."""
        if self.format is Format.json or not sys.stdout.isatty():
            self.result(value, markdown)
            return
        from dgxlab.cli._terminal import draw

        with _reader(sys.stdout):
            draw(clean(markdown()))

    def note(self, text: str) -> None:
        """Print a progress line to stderr."""
        if text and not self.quiet:
            _write(sys.stderr, clean(text))


def write_bytes(content: bytes) -> None:
    """Write a file to stdout unchanged; on a terminal without control sequences."""
    if sys.stdout.isatty():
        content = clean(content.decode(errors="replace")).encode()
    with _reader(sys.stdout):
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()


def agreed(question: str) -> bool:
    """Ask on stderr, since stdout carries the result. Anything but yes is no, also end of input and Ctrl-C."""
    sys.stderr.write(clean(f"{question} [y/N]: "))
    sys.stderr.flush()
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        answer = ""
    if not (answer and sys.stdin.isatty()):  # no terminal has echoed an Enter
        sys.stderr.write("\n")
    return answer.strip().lower() in ("y", "yes")


def clean(text: str) -> str:
    """Return text without terminal control sequences."""
    return re.sub(CONTROL, "", text)


def plural(number: int, word: str) -> str:
    """Return a count with its word: `1 problem`, `no problems`."""
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"


def table(rows: Sequence[Mapping[str, str]], *, right: Collection[str] = ()) -> str:
    """Return rows as a table below their column names; columns in `right` are right-aligned."""
    columns = list(rows[0])
    lines = [columns, *([one_line(row[column]) for column in columns] for row in rows)]
    padded = []
    for number, column in enumerate(columns):
        width = max(len(line[number]) for line in lines)
        padded.append([line[number].rjust(width) if column in right else line[number].ljust(width) for line in lines])
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))


def show_error(error: DgxlabError) -> None:
    """Print an error: one sentence, its details, the next command."""
    details = error.details.splitlines()
    known = int(bool(details) and details[0] in error.message)  # the sentence may contain the first detail
    lines = [f"error: {one_line(error.message)}", *(f"  {line}" for line in details[known:])]
    lines += [f"next: {one_line(as_typed(error.next))}"] if error.next else []
    _write(sys.stderr, clean("\n".join(lines)))


def as_typed(next: str) -> str:
    """Return the command to type: for AGAIN the current one, with --db if it was given."""
    if next.startswith(AGAIN):
        return typed() + next.removeprefix(AGAIN).removeprefix(" with")
    words = next.split()
    if words[:1] == ["dgxlab"] and words[1] in OF_A_RECORD:
        for word, after in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
            if word == "--db" or word.startswith("--db="):
                return f"{next} --db {shlex.quote(word.partition('=')[2] or after)}"
    return next


def typed() -> str:
    """Return the current command as it was typed."""
    return shlex.join(["dgxlab", *sys.argv[1:]])


def _write(stream: TextIO, text: str) -> None:
    with _reader(stream):
        stream.write(text + "\n")
        stream.flush()


@contextmanager
def _reader(stream: TextIO) -> Iterator[None]:
    """Write to a reader that may close early (`| head`): the rest is dropped, and the exit code is unchanged."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
