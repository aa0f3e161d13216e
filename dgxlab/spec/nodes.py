"""Values read from YAML that remember who wrote them, and the sentences that say what is wrong with them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Union

from dgxlab.errors import SpecError

Scalar = Union[str, int, float, bool, None]

MAX_LISTED = 100
"""Problems that one error lists; a hostile file can have a hundred thousand."""

Loc = tuple[Union[str, int], ...]
"""Where a value stands in the tree: keys and list positions, from the top."""


class Mark(NamedTuple):
    """Who wrote a value: a file and a line, or `--set`."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


SET = Mark("--set")


class Node(NamedTuple):
    """A YAML value and its mark.

    Attributes:
        value: A map of nodes, a list of nodes, or a scalar.
        mark: Of an entry in a map, the line of its key; of an item in a list, its own first line.
    """

    value: Union[dict[str, Node], list[Node], Scalar]
    mark: Mark


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and where."""

    mark: Mark
    loc: Loc
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.mark), dotted(self.loc), self.text) if part)


def refuse(problems: Sequence[Problem], *, next: str = "") -> NoReturn:
    """Raise one SpecError for all problems, by line: its message is the first, its details list all if there are more.

    Raises:
        SpecError: always.
    """
    ordered = sorted(problems, key=lambda problem: (problem.mark.source, problem.mark.line or 0))
    lines = list(dict.fromkeys(str(problem) for problem in ordered))
    if len(lines) > MAX_LISTED:
        lines[MAX_LISTED:] = [f"... and {len(lines) - MAX_LISTED} more"]
    raise SpecError(lines[0], next=next, details="\n".join(lines) if len(lines) > 1 else "")


def fail(mark: Mark, loc: Loc, text: str) -> NoReturn:
    """Raise SpecError for a single problem."""
    refuse([Problem(mark, loc, text)])


def plain(node: Node) -> Any:
    """Return the node's value without marks."""
    value = node.value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def find(root: Node, loc: Iterable[str | int]) -> tuple[Node, Loc]:
    """Follow `loc` as far as it exists.

    Returns:
        The deepest node there is, and its loc. Positions in a scalar that stands for a list of one are left out.
    """
    node = root
    found: Loc = ()
    for part in loc:
        value = node.value
        if isinstance(value, dict) and part in value:
            node = value[str(part)]
        elif isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value):
            node = value[part]
        else:
            break
        found = (*found, part)
    return node, found


def locate(root: Node, loc: Loc, text: str) -> Problem:
    """Return the problem at `loc`, marked by the deepest value that stands there; a missing key still gets its name."""
    node, found = find(root, loc)
    if isinstance(node.value, dict) and len(found) < len(loc) and isinstance(loc[len(found)], str):
        found = (*found, loc[len(found)])
    return Problem(node.mark, found, text)


def dotted(loc: Loc) -> str:
    """Write a loc as people type it: `bench[0].llama-bench.n_prompt`."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{printable(part)}"
    return text.removeprefix(".")


def printable(text: str, length: int = 60) -> str:
    """Return text that is safe in one line of a message: escapes instead of control characters, and not too long."""
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text[:length])
    return safe if len(text) <= length else safe + "..."


def shown(value: Any) -> str:
    """Return a value as a message quotes it."""
    if isinstance(value, str):
        return f"'{printable(value)}'"
    if isinstance(value, dict):
        return "a map" if value else "an empty map"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return "nothing" if value is None else json.dumps(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the nearest known name, else the known names if they are few, else nothing."""
    names = sorted(known)
    close = difflib.get_close_matches(name[:64].lower(), [n.lower() for n in names], n=1, cutoff=0.6)
    if close:
        return f"; did you mean {next(n for n in names if n.lower() == close[0])}?"
    return f"; known: {', '.join(names)}" if 0 < len(names) <= 12 else ""
