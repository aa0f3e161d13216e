"""What a form is asked: the keys of a block in a document, or of a command line."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from dgxlab.errors import UsageError

ARMS = ("experiment", "session", "host")
"""Keys of the forms that show what was measured for experiments, or in one session."""

KEYS: Mapping[str, tuple[str, ...]] = {
    "steps": ("experiment", "baseline", "host", "model", "cells", "published"),
    "single-stream": (*ARMS, "model", "cells", "published"),
    "concurrency": (*ARMS, "model", "cells", "published"),
    "ops": (*ARMS, "cells", "published"),
    "gates": (*ARMS, "published"),
    "verdicts": ("experiment", "baseline", "session", "host"),
    "levers": ("experiment",),
    "provenance": ARMS,
    "published": ("table", "source"),
    "imported": ("file", "cells"),
}
"""By form, what it may be asked about."""

LISTS = ("experiment", "session", "cells", "table", "source", "published", "file")
"""Keys that take several values with commas between them."""


@dataclass(frozen=True)
class Query:
    """What to show.

    Attributes:
        form: One of KEYS.
        experiment: Names; each shows the newest of it.
        session: Ids of sessions; each shows what it measured itself.
        baseline: What steps are set against, or what a verdict's candidate was.
        host: Only what was measured there; wherever was newest when "".
        model: Only cells that read it.
        cells: Only cells that have all words of one of these, such as `q4_K n=512` or `pp512`.
        published: Figures to set beside: those that have all words of one of these, such as `seed000 MMQ`.
        table: Names of published tables.
        source: Published figures, by words as in `published`.
        file: Imported files, by their name or the beginning of their id; a list of all when ().
    """

    form: str
    experiment: tuple[str, ...] = ()
    session: tuple[str, ...] = ()
    baseline: str = ""
    host: str = ""
    model: str = ""
    cells: tuple[str, ...] = ()
    published: tuple[str, ...] = ()
    table: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    file: tuple[str, ...] = ()


def query(words: Mapping[str, str]) -> Query:
    """Read what a block or command line says.

    Raises:
        UsageError: if there is no such form, or it does not take such a key, or a value is missing or given twice.
    """
    form = words.get("form", "")
    if form not in KEYS:
        raise UsageError(_unknown("form", form, tuple(KEYS)) if form else f"form is missing; {_there(tuple(KEYS))}")
    values: dict[str, str | tuple[str, ...]] = {}
    for key, text in words.items():
        if key not in ("form", *KEYS[form]):
            raise UsageError(f"form={form} takes no {_unknown('key', key, ('form', *KEYS[form]))}")
        values[key] = _several(key, text) if key in LISTS else text
        if not values[key]:
            raise UsageError(f"{key} has no value")
    made = Query(**values)  # type: ignore[arg-type]  # each key has its type above
    _complete(made)
    return made


def _several(key: str, text: str) -> tuple[str, ...]:
    parts = [" ".join(part.split()) for part in text.split(",")]
    if "" in parts:
        raise UsageError(f"{key} has an empty value between its commas")
    twice = [part for part in parts if parts.count(part) > 1]
    if twice:
        raise UsageError(f"{key} names {twice[0]!r} twice")
    return tuple(parts)


def _complete(made: Query) -> None:
    """See that it is said whom the form is about, once.

    Raises:
        UsageError: if it is not.
    """
    if made.experiment and made.session:
        raise UsageError("experiment and session exclude each other")
    if made.form == "published" and not (made.table or made.source):
        raise UsageError("form=published needs table or source")
    if made.cells and made.form == "imported" and not made.file:
        raise UsageError("cells are of a file")
    if not (made.experiment or made.session or made.form in ("levers", "published", "imported")):
        either = " or session" if "session" in KEYS[made.form] else ""
        raise UsageError(f"form={made.form} needs experiment{either}")
    if made.session and made.baseline:
        raise UsageError("a session has its own baseline")
    if made.session and made.host:
        raise UsageError("a session has its own host")


def _unknown(what: str, name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"{what} {name!r}; " + (f"there is {near[0]!r}" if near else _there(known))


def _there(known: tuple[str, ...]) -> str:
    return f"there are {', '.join(known)}"
