"""The one place that writes: results to stdout, everything else to stderr."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TextIO

from dgxlab.cli._options import Format
from dgxlab.errors import AGAIN, UNSEEN, DgxlabError, escaped, one_line

CONTROL = rf"(?:\x1b\[|\x9b)[0-9;?]*[ -/]*[@-~]|{UNSEEN}"
"""What a tool on a host could send to take over a terminal, or to show text in another order than it has; a regex,
compiled when first something is printed."""


OF_A_RECORD = ("run", "ab", "noise", "gate", "report", "jobs", "attach", "cancel", "logs", "import", "export")
"""Commands that take --db."""


class Out:
    """Prints in the chosen format."""

    def __init__(self, format: Format = Format.human, quiet: bool = False) -> None:
        self.format = format
        self.quiet = quiet

    def result(self, value: Any, human: str | Callable[[], str]) -> None:
        """Print a command's result: `value`, which may hold records, as JSON, or the text for people."""
        if self.format is Format.json:
            import json

            from dgxlab.model import to_json

            text = escaped(json.dumps(value, indent=2, ensure_ascii=False, default=to_json))
        else:
            text = clean(human if isinstance(human, str) else human())  # some of it may be a host's own words
        if text:
            _write(sys.stdout, text.rstrip("\n"))

    def lines(self, values: Iterable[Any], human: Callable[[], str]) -> None:
        """Print a result that has any number of parts: one JSON value a line, or the text for people."""
        if self.format is Format.json:
            import json

            text = "\n".join(json.dumps(value, ensure_ascii=False, allow_nan=False) for value in values)
            _write(sys.stdout, escaped(text))
        else:
            _write(sys.stdout, clean(human()))

    def note(self, text: str) -> None:
        """Print a line about what goes on."""
        if text and not self.quiet:
            _write(sys.stderr, clean(text))


def write_bytes(chunk: bytes) -> None:
    """Write a piece of a file to stdout: as it is, but without control sequences where that is a terminal."""
    if sys.stdout.isatty():
        chunk = clean(chunk.decode(errors="replace")).encode()
    try:
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        mute(sys.stdout)


def agreed(question: str) -> bool:
    """Ask on stderr, for stdout is the result's; anything but a yes is a no, the end of stdin and Ctrl-C too."""
    sys.stderr.write(clean(f"{question} [y/N]: "))
    sys.stderr.flush()
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        answer = ""
    if not (answer and sys.stdin.isatty()):  # where no terminal has shown an Enter
        sys.stderr.write("\n")
    return answer.strip().lower() in ("y", "yes")


def clean(text: str) -> str:
    """Return text without terminal control sequences."""
    return re.sub(CONTROL, "", text)


def plural(number: int, word: str) -> str:
    """Return a count with its word: `1 problem`, `no problems`."""
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"


def table(rows: Sequence[Mapping[str, str]], *, right: Collection[str] = ()) -> str:
    """Return rows below their columns' names, each a line, and each column as wide as it must be.

    Args:
        rows: At least one; all have the first one's columns.
        right: Columns of numbers.
    """
    columns = list(rows[0])
    rows = [{column: one_line(text) for column, text in row.items()} for row in rows]
    widths = {column: max(len(column), *(len(row[column]) for row in rows)) for column in columns}
    lines = [{column: column for column in columns}, *rows]
    padded = ((line[c].rjust(widths[c]) if c in right else line[c].ljust(widths[c]) for c in columns) for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def show_error(error: DgxlabError) -> None:
    """Print an error: one sentence, what belongs below it, the next command."""
    details = error.details.splitlines()
    if details and details[0] in error.message:  # a list whose first item is in the sentence already
        del details[0]
    lines = [f"error: {one_line(error.message)}", *(f"  {line}" for line in details)]
    if error.next:
        lines.append(f"next: {one_line(as_typed(error.next))}")
    _write(sys.stderr, clean("\n".join(lines)))


def as_typed(next: str) -> str:
    """Return the command to type: this one again where that mends it, and of the same record where one was named."""
    if next.startswith(AGAIN):
        return typed() + next.removeprefix(AGAIN).removeprefix(" with")
    words = next.split()
    if words[:1] == ["dgxlab"] and words[1] in OF_A_RECORD and (db := _named_db()):
        return f"{next} --db {shlex.quote(db)}"
    return next


def typed() -> str:
    """Return the command that runs, as it was typed."""
    return shlex.join(["dgxlab", *sys.argv[1:]])


def _named_db() -> str:
    """Return what this command line says after --db."""
    for word, after in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        if word == "--db" or word.startswith("--db="):
            return word.partition("=")[2] or after
    return ""


def _write(stream: TextIO, text: str) -> None:
    """Write a line; a reader that left early (`| head`) misses it, and the command keeps its own exit code."""
    try:
        stream.write(text + "\n")
        stream.flush()
    except BrokenPipeError:
        mute(stream)


def mute(stream: TextIO) -> None:
    """Let whatever is still written to a stream whose reader left go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
