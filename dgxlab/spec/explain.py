"""From what pydantic finds wrong to sentences with a file, a line, a key and the nearest known key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from dgxlab.spec.nodes import SET, Loc, Node, Problem, dotted, locate, nearest, printable, shown

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
}
_BOUNDS = {"greater_than_equal": ("at least", "ge"), "greater_than": ("more than", "gt")}
_BOUNDS |= {"less_than_equal": ("at most", "le"), "less_than": ("less than", "lt")}


MAX_EXPLAINED = 1000
"""Errors that are looked into: finding the nearest key takes time, and more are never listed."""


def explain(error: ValidationError, tree: Node, schema: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each of pydantic's errors, in the order of the spec's keys.

    Args:
        error: What validation raised.
        tree: The values with their marks.
        schema: The JSON Schema, for the names of known keys.
    """
    return [_problem(detail, tree, schema) for detail in error.errors(include_url=False)[:MAX_EXPLAINED]]


def _problem(detail: Mapping[str, Any], tree: Node, schema: Mapping[str, Any]) -> Problem:
    # pydantic marks a bad key, as opposed to a bad value below it, with a last part "[key]".
    loc: Loc = detail["loc"][:-1] if detail["loc"][-1:] == ("[key]",) else detail["loc"]
    if detail["type"] == "extra_forbidden":
        return locate(tree, loc, f"unknown key{nearest(str(loc[-1]), _known_keys(schema, loc[:-1]))}")
    if loc != detail["loc"]:
        return locate(tree, loc, str(detail.get("ctx", {}).get("error", detail["msg"])))
    problem = locate(tree, loc, _sentence(detail))
    return replace(problem, text=problem.text + _quoting(detail, problem))


def _sentence(detail: Mapping[str, Any]) -> str:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "missing":
        return "missing"
    if kind == "value_error":
        return f"{context['error']}{_instead(value)}"
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


def _instead(value: Any) -> str:
    """Return what stands there, when it is short enough to be of use."""
    return f", not {shown(value)}" if isinstance(value, (str, int, float)) else ""


def _quoting(detail: Mapping[str, Any], problem: Problem) -> str:
    """Return how to write a number as text, where text is wanted; a shell takes off quotes of its own."""
    if detail["type"] != "string_type" or not isinstance(detail["input"], (int, float)):
        return ""
    quoted = f'"{shown(detail["input"])}"'
    return f": write --set '{dotted(problem.loc)}={quoted}'" if problem.mark == SET else f": quote it: {quoted}"


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
