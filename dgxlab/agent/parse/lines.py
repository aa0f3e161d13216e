"""Text as a program printed it, one line at a time: colours removed, JSON rows decoded strictly."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NoReturn

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def plain(text: str) -> str:
    """Return the text without terminal colours."""
    return ANSI.sub("", text)


def json_rows(text: str, tool: str) -> tuple[list[dict[str, Any] | None], list[str]]:
    """Decode the lines that start with `{`; every other line is somebody's diagnostics.

    Args:
        text: Standard output of the tool.
        tool: Its name, for the sentences.

    Returns:
        One entry a row in the order printed, None for a broken one, and a sentence for each broken row: cut short,
        with something printed in the middle, with NaN or Infinity, with a key twice.
    """
    rows: list[dict[str, Any] | None] = []
    problems: list[str] = []
    # Only \n ends a line: str.splitlines would also cut at characters that a file name may hold.
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("{"):
            row, why = decode(line)
            rows.append(row)
            problems += [f"line {number} of {tool}'s output is a broken row: {why}"] if why else []
    return rows, problems


def decode(text: str) -> tuple[Any, str]:
    """Decode JSON strictly: return its value and "", or None and why not."""
    try:
        value = json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except RecursionError:
        return None, "nested too deeply"
    except ValueError as error:
        return None, str(error)
    return value, ""


def _refuse(token: str) -> NoReturn:
    raise ValueError(f"{token} is not a number")


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row:
            raise ValueError(f"{key} is there twice")
        row[key] = value
    return row
