"""Options that more than one command has, defined once."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dgxlab.errors import SpecError


class Format(StrEnum):
    """How results are printed."""

    human = "human"
    json = "json"


class Word(StrEnum):
    """What a chain may say."""

    faster = "faster"
    slower = "slower"
    same = "same"
    inconclusive = "inconclusive"
    invalid = "invalid"


class Same(StrEnum):
    """What both arms of a session must have alike."""

    matrix = "matrix"
    models = "models"
    session = "session"
    host = "host"


FormatOption = Annotated[Format, typer.Option("--format", help="How to print the result on stdout.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr, only errors.")]
DbOption = Annotated[
    Path | None,
    typer.Option("--db", envvar="DGXLAB_DB", help="The database; results.db of this project by default."),
]
HostOption = Annotated[str | None, typer.Option("--host", help="Run on this host instead of the spec's.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one value of the spec; may be given again."),
]
TrustSourceOption = Annotated[
    bool, typer.Option("--trust-source", help="Fetch from a package that dgxlab does not know the digest of.")
]
FailOnOption = Annotated[
    list[Word] | None,
    typer.Option("--fail-on", help="Exit with 11 where this is a verdict; may be given again."),
]
AllowOption = Annotated[
    list[Same] | None,
    typer.Option("--allow", help="Compare arms that differ in this too; may be given again."),
]
WaitOption = Annotated[
    int,
    typer.Option("--wait", metavar="MINUTES", min=0, help="Wait so long for a device that others use; 0: not at all."),
]
MaxMinutesOption = Annotated[
    float | None,
    typer.Option(
        "--max-minutes",
        metavar="MINUTES",
        help="Let the chains take so long at most, builds and gates left out: fewer cycles then, and a larger MDE.",
        show_default=False,
    ),
]
SpecArgument = Annotated[
    str, typer.Argument(help="The experiment's YAML file, or its name in experiments/.", show_default=False)
]
JobArgument = Annotated[str, typer.Argument(help="A job's id, or enough of its beginning.", show_default=False)]


def seconds(max_minutes: float | None) -> float:
    """Return a limit of minutes in seconds, 0 for none.

    Raises:
        SpecError: if it leaves no time at all.
    """
    if max_minutes is not None and not 0 < max_minutes < math.inf:
        raise SpecError(f"{max_minutes:g} minutes are no time to measure in", next="dgxlab ab --help")
    return 60 * (max_minutes or 0.0)
