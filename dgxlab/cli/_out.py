"""The one place that writes: results to stdout, everything else to stderr; reports are drawn on a terminal."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TextIO

from dgxlab.errors import AGAIN, UNSEEN, DgxlabError, escaped, one_line

CONTROL = rf"(?:\x1b\[|\x9b)[0-9;?]*[ -/]*[@-~]|{UNSEEN}"
"""What a tool on a host could send to take over a terminal, or to show text in another order than it has; a regex,
compiled when first something is printed."""

OF_A_RECORD = ("run", "ab", "noise", "gate", "report", "jobs", "attach", "cancel", "logs", "import", "export")
"""Commands that take --db."""

WORD = 40
"""Characters of a word in a drawn table that is not broken into lines."""


Format = StrEnum("Format", ["human", "json"])
"""How results are printed."""


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

    def report(self, value: Any, markdown: Callable[[], str]) -> None:
        """Print a report: drawn on a terminal, else as markdown, or as JSON where that was asked for."""
        if self.format is Format.json or not sys.stdout.isatty():
            self.result(value, markdown)
            return
        from rich.console import Console

        try:
            Console(highlight=False).print(_page(clean(markdown())), crop=False)
        except BrokenPipeError:  # the reader left early
            _mute(sys.stdout)

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
        _mute(sys.stdout)


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
    if words[:1] == ["dgxlab"] and words[1] in OF_A_RECORD:
        for word, after in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
            if word == "--db" or word.startswith("--db="):
                return f"{next} --db {shlex.quote(word.partition('=')[2] or after)}"
    return next


def typed() -> str:
    """Return the command that runs, as it was typed."""
    return shlex.join(["dgxlab", *sys.argv[1:]])


def _write(stream: TextIO, text: str) -> None:
    """Write a line; a reader that left early (`| head`) misses it, and the command keeps its own exit code."""
    try:
        stream.write(text + "\n")
        stream.flush()
    except BrokenPipeError:
        _mute(stream)


def _mute(stream: TextIO) -> None:
    """Let whatever is still written to a stream whose reader left go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _page(text: str) -> Any:
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.markdown import Heading, Markdown, MarkdownContext, TableElement, TextElement
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text, TextType

    class Title(Heading):
        """A heading at the left, whatever its level."""

        LEVEL_ALIGN = {}  # noqa: RUF012 - its parent's

    class Summary(TextElement):
        """The heading of a folded part, which is open here; its end shows nothing."""

        def on_text(self, context: MarkdownContext, text: TextType) -> None:
            self.heading = re.sub(r"<[^>]*>", "", str(text)).strip()

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            if self.heading:
                yield Text(f"{self.heading}:", style="bold")

    class Rows(TableElement):
        """A table that breaks texts and never numbers: one that is cut short is another number."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            table = self.table()
            if Measurement.get(console, options.update(max_width=10_000), table).maximum > options.max_width:
                table = self.table(tight=True)
            needed = Measurement.get(console, options.update(max_width=10_000), table).minimum
            # rather wider than the terminal, which then wraps the lines
            yield from console.render(table, options.update(max_width=max(options.max_width, needed)))

        def table(self, *, tight: bool = False) -> Table:
            """Return what is drawn; where that is tight, headers of numbers break at blanks."""
            drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
            header = self.header.row.cells if self.header and self.header.row else []
            body = [[cell.content for cell in row.cells] for row in (self.body.rows if self.body else [])]
            for cell, *values in zip(header, *body, strict=True):
                number = cell.justify == "right"
                parts = [part for value in values for part in ([value.plain] if number else value.plain.split())]
                least = max(map(cell_len, [*cell.content.plain.split(), *parts]), default=1)
                for value in values:
                    value.no_wrap = number
                drawn.add_column(
                    cell.content,
                    justify=cell.justify,
                    overflow="fold",
                    width=least if number and tight else None,
                    min_width=least if number else min(least, WORD),
                )
            for row in body:
                drawn.add_row(*row)
            return drawn

    class Page(Markdown):
        """Everything in a report."""

        elements = {**Markdown.elements, "heading_open": Title, "table_open": Rows, "html_block": Summary}  # noqa: RUF012 - its parent's

    return Page(text, hyperlinks=False)
