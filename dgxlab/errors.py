"""One tree of errors, one exit code a class.

Every error is one sentence that says what happened and why, and the next command to type.
`cli` is the only place that turns an error into text and an exit code.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

AGAIN = "run the same command again"
"""A value of `next`, perhaps followed by " with OPTION" or " without OPTION"; `cli` prints what was typed."""

UNSEEN = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
"""A regex of characters that control a terminal, change the text direction, or are unpaired surrogates."""


def one_line(text: str, at_most: int = 0) -> str:
    r"""Return text as one line of visible characters, cut to `at_most` characters; 0 is no limit.

    >>> one_line("disk full\nnext: reboot\x1b[2J")
    'disk full next: reboot\\u001b[2J'
    """
    line = escaped(re.sub(r"[\t\n\v\f\r\x85\u2028\u2029]+", " ", text))
    return line if not at_most or len(line) <= at_most else f"{line[: at_most - 1]}…"


def escaped(text: str) -> str:
    r"""Return text with every UNSEEN character replaced by \uXXXX, its JSON escape."""
    return re.sub(UNSEEN, lambda match: f"\\u{ord(match[0]):04x}", text)


def longer(wait_s: float) -> str:
    """Return the `next` of a command that waited `wait_s` for a device: it waits twice as long, an hour at least."""
    return f"{AGAIN} with --wait {max(60.0, wait_s / 30):.0f}"


def more_minutes(least_s: float) -> str:
    """Return the `next` of a session that needs `least_s`: a tenth more, as some runs are slower than others."""
    return f"{AGAIN} with --max-minutes {math.ceil(1.1 * least_s / 60)}"


def edit(path: object) -> str:
    """Return the command that opens a file in the user's own editor."""
    return f"${{EDITOR:-vi}} {shlex.quote(str(path))}"


def command(*words: object) -> str:
    """Return a command to type, with each word quoted for the shell; a leading ~/ still means the home folder."""
    texts = [str(word) for word in words]
    return " ".join(f"~/{shlex.quote(t[2:])}" if t.startswith("~/") and len(t) > 2 else shlex.quote(t) for t in texts)


def install(requirement: str) -> str:
    """Return the command that installs a package where this program runs."""
    return command(sys.executable, "-m", "pip", "install", requirement)


@contextmanager
def needs(requirement: str, purpose: str) -> Iterator[None]:
    """Raise UsageError if a module imported inside is missing: what the package is for, and how it is installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{purpose}, and there is no module {error.name}"
        raise UsageError(message, next=install(requirement)) from None


class DgxlabError(Exception):
    """Any expected error that ends a command.

    Args:
        message: One sentence: what happened and its cause.
        next: The command to type next; AGAIN for the same one, "" for none.
        details: Lines to show below the sentence, e.g. the first compiler error.
    """

    exit_code = 1

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        cls.exit_code = exit_code or cls.exit_code

    def __init__(self, message: str, *, next: str = "", details: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.next = next
        self.details = details


class UsageError(DgxlabError, exit_code=2):
    """The command line asks for something that cannot be done as written."""


class HostError(DgxlabError, exit_code=3):
    """The host cannot be reached or is not trusted, or no source could be asked for a tag or a branch."""


class RemoteError(DgxlabError, exit_code=4):
    """A command on the host failed: a tool crashed, timed out or printed nonsense."""


class GateFailed(DgxlabError, exit_code=5):
    """A correctness gate did not pass."""


class PatchError(DgxlabError, exit_code=6):
    """A patch does not apply to the pin."""


class BuildFailed(DgxlabError, exit_code=7):
    """A build failed: cmake, the compiler, or the check of the files that they made."""


class ConditionsError(DgxlabError, exit_code=8):
    """The measuring conditions were not reached, or the verdict is invalid."""


class SpecError(DgxlabError, exit_code=9):
    """An experiment, a series or a configuration file is wrong."""


class HostBusy(DgxlabError, exit_code=10):
    """Another job or program uses the device."""


class CheckFailed(DgxlabError, exit_code=11):
    """A check that the user asked for failed."""


class JobLost(DgxlabError, exit_code=12):
    """A job ended without a valid final status, or its host no longer has it."""


class BudgetSpent(DgxlabError, exit_code=13):
    """A loop has used the time or the number of tries that it may."""


class Interrupted(DgxlabError, exit_code=130):
    """The user stopped the client; the job goes on."""

    job_id = ""  # of the job that goes on, "" for none or several


@contextmanager
def access(path: Path, verb: str, kind: type[DgxlabError]) -> Iterator[None]:
    """Raise an error of this kind if the system refuses that `path` is `verb` inside: "read" or "written"."""
    try:
        yield
    except OSError as error:
        look = command("ls", "-ld", path.parent, path)
        raise kind(f"{path} cannot be {verb}: {error.strerror}", next=look) from error


def by_exit_code(code: int) -> type[DgxlabError]:
    """Return the class whose exit code is `code`, or DgxlabError for an unknown one."""
    return next((kind for kind in DgxlabError.__subclasses__() if kind.exit_code == code), DgxlabError)
