"""The one place that writes: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

from dgxlab.cli._options import Format
from dgxlab.errors import DgxlabError

CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
"""What a tool on a host could send to take over a terminal."""


class Out:
    """Prints in the chosen format."""

    def __init__(self, format: Format = Format.human, quiet: bool = False) -> None:
        self.format = format
        self.quiet = quiet

    def result(self, value: Any, human: str | Callable[[], str]) -> None:
        """Print a command's result: `value`, or what it returns, as JSON, or the text for people."""
        if self.format is Format.json:
            text = json.dumps(value() if callable(value) else value, indent=2, ensure_ascii=False)
        else:
            text = human if isinstance(human, str) else human()
        if text:
            sys.stdout.write(text.rstrip("\n") + "\n")
            sys.stdout.flush()

    def note(self, text: str) -> None:
        """Print a line about what goes on."""
        if not self.quiet:
            sys.stderr.write(clean(text) + "\n")
            sys.stderr.flush()


def clean(text: str) -> str:
    """Return text without terminal control sequences."""
    return CONTROL.sub("", text)


def show_error(error: DgxlabError) -> None:
    """Print an error: one sentence, what belongs below it, the next command."""
    lines = [f"error: {error.message}"]
    lines += [f"  {line}" for line in error.details.splitlines()]
    if error.next:
        lines.append(f"next: {error.next}")
    sys.stderr.write(clean("\n".join(lines)) + "\n")
