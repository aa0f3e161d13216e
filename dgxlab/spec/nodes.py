"""Values read from YAML that remember who wrote them, and the sentences that say what is wrong with them.

Errors have a file, a line, a key and, for an unknown key, the nearest known one.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn, Union

from pydantic import ValidationError

from dgxlab.errors import SpecError

Scalar = Union[str, int, float, bool, None]

MAX_LISTED = 100
"""Problems that one error lists; a hostile file can have a hundred thousand."""
MAX_EXPLAINED = 1000
"""pydantic's errors that are looked into: finding the nearest key takes time, and more are never listed."""

Loc = tuple[Union[str, int], ...]
"""The place of a value in the tree: keys and list positions, from the top."""


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


def locate(root: Node, loc: Loc, text: str) -> Problem:
    """Return the problem at `loc`, marked by the deepest value that is there; a missing key still gets its name.

    Positions in a scalar that is written in place of a list of one are left out.
    """
    node, depth = root, 0
    for part in loc:
        value = node.value
        if isinstance(value, dict) and part in value:
            node = value[str(part)]
        elif isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value):
            node = value[part]
        else:
            break
        depth += 1
    if isinstance(node.value, dict) and depth < len(loc) and isinstance(loc[depth], str):
        depth += 1
    return Problem(node.mark, loc[:depth], text)


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


_WANTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a map",
    "model_type": "a map",
    "model_attributes_type": "a map",
    "dataclass_type": "a map",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def explain(error: ValidationError, tree: Node, schema: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each of pydantic's errors, in the order of the spec's keys.

    Args:
        error: What validation raised.
        tree: The values with their marks.
        schema: The JSON Schema, for the names of known keys.
    """
    problems = []
    for detail in error.errors(include_url=False)[:MAX_EXPLAINED]:
        # pydantic marks a bad key, as opposed to a bad value below it, with a last part "[key]".
        is_key = detail["loc"][-1:] == ("[key]",)
        loc: Loc = detail["loc"][:-1] if is_key else detail["loc"]
        if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            text = f"unknown key{nearest(str(loc[-1]), _known_keys(schema, loc[:-1]))}"
        else:
            text = str(detail.get("ctx", {}).get("error", detail["msg"])) if is_key else _sentence(detail)
        problem = locate(tree, loc, text)
        if detail["type"] == "string_type" and isinstance(detail["input"], (int, float)):
            # how to write a number as text, where text is wanted; a shell takes off quotes of its own
            quoted = f'"{shown(detail["input"])}"'
            cure = f"write --set '{dotted(problem.loc)}={quoted}'" if problem.mark == SET else f"quote it: {quoted}"
            problem = replace(problem, text=f"{problem.text}: {cure}")
        problems.append(problem)
    return problems


def _sentence(detail: Mapping[str, Any]) -> str:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "missing":
        return "missing"
    if kind == "value_error":
        short = isinstance(value, (str, int, float))
        return f"{context['error']}, not {shown(value)}" if short else str(context["error"])
    if kind == "literal_error":
        return f"must be {context['expected'].replace(chr(39), '')}, not {shown(value)}"
    if kind in ("too_short", "string_too_short"):
        return "must not be empty: nothing would be measured" if kind == "too_short" else "must not be empty"
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"must be {words} {context[key]}, not {shown(value)}"
    if kind in _WANTED:
        return f"must be {_WANTED[kind]}, not {shown(value)}"
    return printable(str(detail["msg"]), 200)


def _known_keys(schema: Mapping[str, Any], loc: Loc) -> list[str]:
    """Return the keys that the schema knows for the map at `loc`."""
    part = _followed(schema, schema)
    for step in loc:
        if isinstance(step, int):
            deeper = part["items"]
        else:
            deeper = part.get("properties", {}).get(step) or next(iter(part["patternProperties"].values()))
        part = _followed(deeper, schema)
    return list(part.get("properties", {}))


def _followed(part: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = part.get("$ref")
    followed: Mapping[str, Any] = schema["$defs"][reference.rsplit("/", 1)[-1]] if reference else part
    return followed
