"""YAML values with the file and line that they come from, and error messages about them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

from pydantic import ValidationError

from dgxlab.errors import SpecError, edit

Scalar = str | int | float | bool | None
Loc = tuple[str | int, ...]  # the place of a value in the tree: keys and list positions, from the top
_MAX_LISTED = 100  # max problems in one error; a hostile file can have a hundred thousand
_MAX_EXPLAINED = 1000
"""Max pydantic errors that are explained: finding the nearest key takes time, and more are never listed."""


class Mark(NamedTuple):
    """Where a value is written: a file and a line, or `--set`."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


SET = Mark("--set")


class Node(NamedTuple):
    """A YAML value, of nodes if it is a map or a list. The mark of a map's value is the line of its key."""

    value: dict[str, Node] | list[Node] | Scalar
    mark: Mark


@dataclass(frozen=True)
class Problem:
    """A sentence about a value: `mark` is where it is written, `loc` its place in the tree."""

    mark: Mark
    loc: Loc
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.mark), dotted(self.loc), self.text) if part)


def refuse(problems: Sequence[Problem], *, next: str = "") -> NoReturn:
    """Raise one SpecError for all problems: the message is the first by line; `details` lists all if several.

    Without `next` it opens the file that the first is in.
    """
    ordered = sorted(problems, key=lambda problem: (problem.mark.source, problem.mark.line or 0))
    lines = list(dict.fromkeys(str(problem) for problem in ordered))
    if len(lines) > _MAX_LISTED:
        lines[_MAX_LISTED:] = [f"... and {len(lines) - _MAX_LISTED} more"]
    source, line = ordered[0].mark
    mend = next or ("" if line is None else edit(source))
    raise SpecError(lines[0], next=mend, details="\n".join(lines) if len(lines) > 1 else "")


def fail(mark: Mark, loc: Loc, text: str) -> NoReturn:
    """Raise SpecError for a single problem."""
    refuse([Problem(mark, loc, text)])


def plain(node: Node) -> Any:
    """Return the node's value without marks."""
    value = node.value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def locate(root: Node, loc: Loc, text: str) -> Problem:
    """Return a problem about the value at `loc`, or about the deepest value above it that exists.

    The problem still names the missing key of a map; a position is left out where a scalar replaces the list.
    """
    node, depth = root, 0
    for part in loc:
        value = node.value
        if isinstance(value, dict) and part in value:
            node = value[str(part)]
        elif isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value):
            node = value[part]
        else:
            depth += isinstance(value, dict) and isinstance(part, str)
            break
        depth += 1
    return Problem(node.mark, loc[:depth], text)


def dotted(loc: Loc) -> str:
    """Return a place as users write it: `bench[0].TOOL.n_prompt`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{printable(part)}" for part in loc).removeprefix(".")


def printable(text: str, length: int = 60) -> str:
    """Return text for one line of a message: control characters are escaped, more than `length` characters are cut."""
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text[:length])
    return safe if len(text) <= length else safe + "..."


def shown(value: Any) -> str:
    """Return a value as a message quotes it: text in quotes, `a map`, `an empty list`, else as in JSON."""
    if isinstance(value, str):
        return f"'{printable(value)}'"
    if isinstance(value, (dict, list)):
        return f"{'a' if value else 'an empty'} {'map' if isinstance(value, dict) else 'list'}"
    return "nothing" if value is None else json.dumps(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: `; did you mean X?`, or the known names if few, or ""."""
    names = {known_name.lower(): known_name for known_name in sorted(known)}
    if close := difflib.get_close_matches(name[:64].lower(), names, n=1, cutoff=0.6):
        return f"; did you mean {names[close[0]]}?"
    return f"; known: {', '.join(names.values())}" if 0 < len(names) <= 12 else ""


def elsewhere(tree: Node, key: str) -> str:
    """Return the end of a message about a misplaced key of --set: its path if the files have it once, or ""."""
    places = [loc for loc, node in _below(tree) if loc[-1] == key and node.mark != SET]
    return f"; did you mean {'.'.join(map(str, places[0]))}?" if len(places) == 1 else ""


def _below(node: Node, loc: Loc = ()) -> Iterator[tuple[Loc, Node]]:
    value = node.value
    for key, item in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        yield (*loc, key), item
        yield from _below(item, (*loc, key))


_WANTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a map",
    "model_type": "a map",
    "model_attributes_type": "a map",
    "dataclass_type": "a map",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
}
"""Texts of expected values, by pydantic's error type."""
_SENTENCES = {
    "missing": "missing",
    "too_short": "must not be empty: nothing would be measured",
    "string_too_short": "must not be empty",
}


def explain(error: ValidationError, tree: Node, schema: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each of pydantic's errors; `schema` is the JSON Schema, for the names of known keys."""
    problems = []
    for detail in error.errors(include_url=False)[:_MAX_EXPLAINED]:
        # pydantic marks a bad key, as opposed to a bad value below it, with a last part "[key]".
        is_key = detail["loc"][-1:] == ("[key]",)
        loc: Loc = detail["loc"][:-1] if is_key else detail["loc"]
        if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            other = elsewhere(tree, str(loc[-1])) if locate(tree, loc, "").mark == SET else ""
            text = f"unknown key{other or _meant(schema, loc)}"
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
    if kind == "value_error":
        return (
            f"{context['error']}, not {shown(value)}" if isinstance(value, str | int | float) else str(context["error"])
        )
    return wanted(detail) or _SENTENCES.get(kind) or printable(str(detail["msg"]), 200)


def wanted(detail: Mapping[str, Any]) -> str:
    """Return what a value must be, in words, given one of pydantic's errors; "" if it is not about that."""
    if detail["type"] not in _WANTED:
        return ""
    limits = {name: str(limit).replace("'", "").removesuffix(".0") for name, limit in detail.get("ctx", {}).items()}
    return f"must be {_WANTED[detail['type']].format(**limits)}, not {shown(detail['input'])}"


def _meant(schema: Mapping[str, Any], loc: Loc) -> str:
    """Return the end of a message about an unknown key: the few places one level deeper that have it, or `nearest`."""
    *above, key = loc
    known = _known_keys(schema, above)
    places = [dotted((*above, part, str(key))) for part in known if key in _known_keys(schema, (*above, part))]
    return f"; did you mean {' or '.join(places)}?" if 0 < len(places) <= 3 else nearest(str(key), known)


def _known_keys(schema: Mapping[str, Any], loc: Sequence[str | int]) -> list[str]:
    """Return the keys that the schema knows for the map at `loc`."""
    part = schema
    for step in loc:
        if isinstance(step, int):
            part = part["items"]
        else:
            part = part.get("properties", {}).get(step) or next(iter(part["patternProperties"].values()))
        part = next((each for each in part.get("anyOf", ()) if "$ref" in each), part)  # a map, or nothing
        if "$ref" in part:
            part = schema["$defs"][part["$ref"].rpartition("/")[2]]
    return list(part.get("properties", {}))
