"""Reports on a terminal: the same words and numbers as in markdown, laid out for reading."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from dgxlab.cli._options import Format
from dgxlab.cli._out import Out, clean, mute

WORD = 24
"""Characters of a word that is not broken into lines."""


def show(out: Out, value: Any, markdown: Callable[[], str]) -> None:
    """Print a report: through rich where people look at it, else as markdown, or as JSON where that was asked for.

    Args:
        value: The record.
        markdown: Renders it.
    """
    if out.format is Format.json or not sys.stdout.isatty():
        out.result(value, markdown)
    else:
        _draw(clean(markdown()))


def _draw(text: str) -> None:
    from rich.console import Console

    try:
        Console(highlight=False).print(_page(text), crop=False)
    except BrokenPipeError:  # the reader left early
        mute(sys.stdout)


def _page(text: str) -> Any:
    """Parse markdown that `report` made into what rich draws."""
    from rich import box
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.markdown import Heading, Markdown, TableElement
    from rich.measure import Measurement
    from rich.table import Table

    class Title(Heading):
        """A heading at the left, whatever its level."""

        LEVEL_ALIGN = {}  # noqa: RUF012 - its parent's

    class Rows(TableElement):
        """A table that breaks texts and never numbers: one that is cut short is another number."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            table = self.table()
            needed = Measurement.get(console, options.update(max_width=10_000), table).minimum
            # rather wider than the terminal, which then wraps the lines
            yield from console.render(table, options.update(max_width=max(options.max_width, needed)))

        def table(self) -> Table:
            made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
            header = self.header.row.cells if self.header and self.header.row else []
            body = [[cell.content for cell in row.cells] for row in (self.body.rows if self.body else [])]
            for cell, *texts in zip(header, *body, strict=True):
                number = cell.justify == "right"
                parts = [part for text in (cell.content, *texts) for part in ([text] if number else text.split())]
                least = max((part.cell_len for part in parts), default=1)
                width = least if number else min(least, WORD)
                made.add_column(cell.content, justify=cell.justify, no_wrap=number, overflow="fold", min_width=width)
            for row in body:
                made.add_row(*row)
            return made

    class Page(Markdown):
        """Everything in a report."""

        elements = {**Markdown.elements, "heading_open": Title, "table_open": Rows}  # noqa: RUF012 - its parent's

    return Page(text, hyperlinks=False)
