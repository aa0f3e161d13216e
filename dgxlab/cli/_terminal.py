"""Terminal output: reports drawn with rich, verdicts in colour, and a progress bar below the lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, Markdown, MarkdownContext, Paragraph, TableDataElement, TableElement, TextElement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text, TextType

from dgxlab.cli._display import Lines, position
from dgxlab.cli._out import as_typed
from dgxlab.errors import one_line
from dgxlab.report.cells import OUTCOME, OUTCOMES

COLOURS = {"good": "green", "bad": "red", "open": "cyan"}  # of outcomes; rich leaves colours out where NO_COLOR is set
_GAP = 2  # blanks between the columns of a drawn table
_WORD = 40  # max length of a word in a drawn table that is not broken into lines


def draw(markdown: str) -> None:
    """Draw a markdown report on stdout."""
    Console(highlight=False).print(_Page(markdown, hyperlinks=False), crop=False)


def draw_lines(text: str) -> None:
    """Draw plain lines on stdout, the outcome of each, or of each cell of a text table, in its colour."""
    console = Console(highlight=False, soft_wrap=True)
    for line in text.splitlines():
        drawn = Text(line)
        for cell in re.finditer(r"\S+(?: \S+)*", line):
            _coloured(drawn, *cell.span())
        console.print(drawn)


def _coloured(text: Text, start: int = 0, end: int | None = None) -> Text:
    """Colour the outcome that a part of a text begins with, if it does."""
    if outcome := OUTCOME.match(text.plain, start, len(text.plain) if end is None else end):
        text.stylize(COLOURS[OUTCOMES[outcome[1]]], *outcome.span(1))
    return text


class _Paragraph(Paragraph):
    """A paragraph that may begin with a verdict."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        _coloured(self.text)
        yield from super().__rich_console__(console, options)


class _Title(Heading):
    """A left-aligned heading."""

    LEVEL_ALIGN = {}  # noqa: RUF012 - its parent's


class _Summary(TextElement):
    """A <details> block: its summary is printed as a heading, and its content unfolded below."""

    def on_text(self, context: MarkdownContext, text: TextType) -> None:
        """Take the summary's text, without tags."""
        self.heading = re.sub(r"<[^>]*>", "", str(text)).strip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.heading:
            yield Text(f"{self.heading}:", style="bold")


class _Rows(TableElement):
    """A table that breaks texts but never numbers: a number cut short is a wrong number.

    Where even so the terminal is too narrow, each row is a list of its cells.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if table := self.table(options.max_width):
            yield table
            return
        for row in self.cells():
            yield Rule(style="dim")
            yield row

    def cells(self) -> Iterator[Table]:
        """Yield each row as lines of column and cell."""
        header, *body = self.rows()
        for row in body:
            lines = Table.grid(Column(overflow="fold", style="dim"), Column(overflow="fold"), padding=(0, 2, 0, 0))
            for column, cell in zip(header, row, strict=True):
                lines.add_row(column.content, _coloured(cell.content))
            yield lines

    def rows(self) -> list[list[TableDataElement]]:
        """Return the cells of the header and of each row."""
        header = self.header.row.cells if self.header and self.header.row else []
        return [header, *(row.cells for row in (self.body.rows if self.body else []))]

    def table(self, room: int) -> Table | None:
        """Return the table to draw, its widest columns narrowed to fit into `room`; None if that is impossible."""
        drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
        header, *rows = self.rows()
        body = [[_coloured(cell.content) for cell in row] for row in rows]
        least, widths = [], []
        for cell, *values in zip(header, *body, strict=True):
            number = cell.justify == "right"
            parts = [part for value in values for part in ([value.plain] if number else value.plain.split())]
            word = max(map(cell_len, [*cell.content.plain.split(), *parts]), default=1)
            least.append(word if number else min(word, _WORD))
            widths.append(max(cell_len(each.plain) for each in (cell.content, *values)))
            for value in values:
                value.no_wrap = number
        # rich itself would narrow the widest column even where only others can be
        for _ in range(sum(widths) + _GAP * (len(widths) - 1) - room):
            wide = [(width, place) for place, width in enumerate(widths) if width > least[place]]
            if not wide:
                return None
            widths[max(wide)[1]] -= 1
        for cell, width in zip(header, widths, strict=True):
            drawn.add_column(cell.content, justify=cell.justify, overflow="fold", width=width)
        for row in body:
            drawn.add_row(*row)
        return drawn


class _Page(Markdown):
    """A report in markdown, as rich draws it."""

    elements = {  # noqa: RUF012
        **Markdown.elements,
        "heading_open": _Title,
        "table_open": _Rows,
        "html_block": _Summary,
        "paragraph_open": _Paragraph,
    }


class Bar:
    """Prints the events of a job as lines, above one progress bar; `arms` is as in `Lines`."""

    def __init__(self, arms: int = 1) -> None:
        self.console = Console(stderr=True, highlight=False)
        text = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))  # what is cut
        columns = (SpinnerColumn(), text, BarColumn(10), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=self.console, transient=True, expand=True)
        self.task = self.progress.add_task("waiting", total=None)
        self.lines = Lines(arms)

    def show(self, event: Any) -> None:
        """Print the lines of an event, and update the bar."""
        for line in self.lines.of(event):
            self.console.print(as_typed(one_line(line)), markup=False)
        if event.event == "progress":
            self._move(event.note, event.done, event.total or None)
        elif event.event == "chain":
            self._move(f"{event.id} {position(event)}", event.done, event.total)
            self.progress.refresh()  # runs may be shorter than the refresh interval
        elif event.event == "lock" and event.state in ("waiting", "building"):
            what = "the device" if event.state == "waiting" else "another build"
            self.progress.update(self.task, description=f"waiting for {what}")
        elif event.event == "step" and event.state == "started":
            self.progress.remove_task(self.task)  # a reset task would keep the total of the previous step
            self.task = self.progress.add_task(str(event.id), total=None)

    def _move(self, text: str, done: float, total: float | None) -> None:
        self.progress.update(self.task, description=one_line(text), completed=done, total=total)
