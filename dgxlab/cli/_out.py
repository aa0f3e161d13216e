"""The only output module: results to stdout, everything else to stderr; reports are drawn on a terminal."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TextIO

from typer import Option

from dgxlab.errors import AGAIN, UNSEEN, DgxlabError, Interrupted, escaped, one_line

CONTROL = rf"(?:\x1b\[|\x9b)[0-9;?]*[ -/]*[@-~]|{UNSEEN}"
"""A regex of what could control a terminal or change the order of shown text; compiled at the first output."""

_LEAST = 20
"""Width in which the shortened last column of a table can still be read."""

Format = StrEnum("Format", ["human", "json"])
FormatOption = Annotated[Format, Option("--format", help="How to print the result on stdout.")]
QuietOption = Annotated[bool, Option("--quiet", "-q", help="No progress on stderr, only errors.")]


@dataclass(frozen=True)
class Out:
    """Prints a command's output in the chosen format."""

    format: FormatOption = Format.human
    quiet: QuietOption = False

    def result(self, value: Any, human: str | Callable[[], str], *, outcomes: bool = False) -> None:
        """Print a command's result to stdout: `value`, which may hold dataclasses, as JSON, else the text `human`.

        On a terminal, `outcomes` in the text, as `faster` and `failed`, are coloured.
        """
        if self.format is Format.json:
            from dgxlab.model import to_json

            _write(sys.stdout, escaped(json.dumps(value, indent=2, ensure_ascii=False, default=to_json)))
            return
        text = clean(human if isinstance(human, str) else human()).rstrip("\n")  # part of it may come from a host
        if outcomes and sys.stdout.isatty():
            from dgxlab.cli._terminal import draw_lines

            with _reader(sys.stdout):
                draw_lines(text)
        elif text:
            _write(sys.stdout, text)

    def lines(self, values: Iterable[Any], human: Callable[[], str], *, outcomes: bool = False) -> None:
        """Print a result of several parts as `result` does, but each value as a line of JSON."""
        if self.format is Format.json:
            text = "\n".join(json.dumps(value, ensure_ascii=False, allow_nan=False) for value in values)
            _write(sys.stdout, escaped(text))
        else:
            self.result(None, human, outcomes=outcomes)

    def report(self, value: Any, markdown: Callable[[], str]) -> None:
        """Print a report to stdout: as JSON if requested, else as markdown, which is drawn on a terminal."""
        if self.format is Format.json or not sys.stdout.isatty():
            self.result(value, lambda: as_typed(markdown()))
            return
        from dgxlab.cli._terminal import draw

        with _reader(sys.stdout):
            draw(clean(as_typed(markdown())))

    def note(self, text: str) -> None:
        """Print a line to stderr, unless --quiet is given."""
        if text and not self.quiet:
            _write(sys.stderr, clean(as_typed(text)))


def ring() -> None:
    """Ring the bell of the terminal, if stderr is one."""
    if sys.stderr.isatty():
        sys.stderr.write("\a")
        sys.stderr.flush()


def write_bytes(content: bytes) -> None:
    """Write bytes to stdout; on a terminal, control sequences are removed."""
    if sys.stdout.isatty():
        content = clean(content.decode(errors="replace")).encode()
    with _reader(sys.stdout):
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()


def agreed(question: str) -> bool:
    """Ask a question on stderr, since stdout has the result; return whether the answer is yes."""
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
    """Return a number with a noun: `1 problem`, `2 problems`, `no problems`."""
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"


def table(rows: Sequence[Mapping[str, str]], *, right: Collection[str] = (), cut: bool = False) -> str:
    """Return rows, at least one, as a text table with a header; columns named in `right` are right-aligned.

    On a terminal too narrow for it the last column is shortened, if it may be `cut`. Where that does not suffice, each
    row is a list of its cells that have a text.
    """
    columns = list(rows[0])
    lines = [columns, *([one_line(row[column]) for column in columns] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else sum(widths) + 2 * len(widths)
    left = room - sum(widths[:-1]) - 2 * len(widths[:-1])
    if left < widths[-1] and not (cut and left >= _LEAST):
        names = [column.ljust(max(map(len, columns)) + 2) for column in columns]
        pairs = ([(name, cell) for name, cell in zip(names, line, strict=True) if cell] for line in lines[1:])
        return "\n\n".join("\n".join(_folded(name, cell, room) for name, cell in row) for row in pairs)
    for line in lines:
        line[-1] = line[-1] if len(line[-1]) <= left else f"{line[-1][: left - 1]}…"
        for number, column in enumerate(columns):
            line[number] = line[number].rjust(widths[number]) if column in right else line[number].ljust(widths[number])
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _folded(name: str, cell: str, room: int) -> str:
    """Return a name and a text beside it, broken into lines at blanks."""
    wrap = textwrap.TextWrapper(room, name, " " * len(name), break_long_words=False, break_on_hyphens=False)
    return wrap.fill(cell)


def show_error(error: DgxlabError) -> None:
    """Print an error to stderr: its sentence, its details, the next command. That the user stopped it is none."""
    details = error.details.splitlines()
    known = int(bool(details) and details[0] in error.message)  # the sentence may contain the first detail
    mark = "" if isinstance(error, Interrupted) else "error: "
    lines = [f"{mark}{one_line(error.message)}", *(f"  {line}" for line in details[known:])]
    lines = [*map(as_typed, lines), *([f"next: {one_line(as_typed(error.next))}"] if error.next else [])]
    _write(sys.stderr, clean("\n".join(lines)))


def as_typed(text: str) -> str:
    """Return an error's `next`, or sentences, with commands to type: --db is in each of them if it was given.

    AGAIN is the current command.
    """
    if text.startswith(AGAIN):
        how, *option = shlex.split(text.removeprefix(AGAIN)) or ["with"]
        if how == "without":
            return shlex.join(["dgxlab", *_without([*option, ""], sys.argv[1:])])
        return shlex.join(["dgxlab", *_without(option, sys.argv[1:]), *option])
    pairs = zip(sys.argv, [*sys.argv[1:], ""], strict=True)
    given = [word.partition("=")[2] or after for word, after in pairs if word == "--db" or word.startswith("--db=")]
    if not given:
        return text
    from dgxlab.cli import app

    names = [each.name for each in app.registered_commands] + [each.name for each in app.registered_groups]
    # a sentence may also be about dgxlab itself, or have a command with its --db
    command = rf"\bdgxlab (?=(?:{'|'.join(map(str, names))})\b)(?![^`;\n]* --db\b)"
    return re.sub(command, lambda _: f"dgxlab --db {shlex.quote(given[-1])} ", text)


def _without(option: Sequence[str], words: Iterable[str]) -> Iterator[str]:
    """Yield the words of a command but an option and its value, if `option` gives it another value."""
    name, value = option if len(option) == 2 else ("", "")
    # which give each key a value of its own
    key = f"{value.partition('=')[0]}=" if name in ("--set", "--assume") else ""
    rest = iter(words)
    for word in rest:
        if name and word == name:
            given = next(rest, "")
            yield from () if given.startswith(key) else (word, given)
        elif not name or not word.startswith(f"{name}={key}"):
            yield word


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
