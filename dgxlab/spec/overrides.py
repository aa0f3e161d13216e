"""`--set key=value`: one value put into the tree, by the path that errors print."""

from __future__ import annotations

import re
from typing import Any

from dgxlab.spec.nodes import SET, Loc, Node, dotted, fail, nearest, printable
from dgxlab.spec.resolve import drop_other_kind
from dgxlab.spec.yaml_file import MAX_DEPTH, read_value

_INDEX = re.compile(r"[0-9]{1,6}")
MUST_REACH = ("expect", "unsupported", "cases")
"""What a parity gate must reach; `--set` may change it, and the gate is marked."""
_GATE_KEYS = (*MUST_REACH, "limit_s")
"""What may be set in a gate; anything else would make another gate of it, and so remove it."""


def apply(tree: Node, override: str) -> Node:
    """Return the tree with one value replaced.

    A key that is not there yet is added, and validation refuses it when it is none of the spec's. List positions are
    numbers: `bench.0.llama-bench.n_prompt=[512]`, or `bench[0]...`.

    Raises:
        SpecError: if it is not `key=value`, the value is not YAML, or the path does not exist.
    """
    key, equals, text = override.partition("=")
    parts = re.sub(r"\[([0-9]+)\]", r".\1", key.strip()).split(".")
    if not equals or not all(parts) or len(parts) > MAX_DEPTH:
        fail(SET, (), f"'{printable(override)}' is not key=value, as in session.cycles=4")
    if parts[0] == "extends":
        fail(SET, ("extends",), "is read before --set: write a file that extends the other one")
    if parts[0] == "gates":
        _check_gate_path(parts)
    return _put((), tree, parts, Node(read_value(text, tuple(parts)).value, SET))


def changed_gates(tree: Node) -> set[int]:
    """Return the places of the gates for which `--set` said what they must reach; the tree is a valid spec."""
    entries: Any = tree.value
    gates = [gate.value for gate in entries["gates"].value] if "gates" in entries else []
    bodies = {place: gate["backend-ops"].value for place, gate in enumerate(gates) if "backend-ops" in gate}
    return {place for place, body in bodies.items() if any(key in body and body[key].mark == SET for key in MUST_REACH)}


def _check_gate_path(parts: list[str]) -> None:
    if len(parts) != 4 or parts[2] != "backend-ops" or parts[3] not in _GATE_KEYS:
        fail(
            SET,
            tuple(parts),
            f"only gates.N.backend-ops.{{{','.join(_GATE_KEYS)}}} can be set: no gate can be removed or exchanged; "
            "add one in a file that extends this one",
        )


def _put(loc: Loc, node: Node, parts: list[str], value: Node) -> Node:
    if not parts:
        return value
    if isinstance(node.value, list):
        return _put_item(loc, node.value, parts, value)
    if not isinstance(node.value, dict):
        fail(SET, (*loc, parts[0]), f"there is no such key: {dotted(loc)} is neither a map nor a list")
    key, rest = _split(node.value, parts)
    if loc == ("models",) and key not in node.value:
        fail(SET, (*loc, key), f"no such model{nearest(key, node.value)}")
    below = node.value.get(key, Node({}, SET))
    entries = drop_other_kind(loc, node.value, {key})
    return Node({**entries, key: _put((*loc, key), below, rest, value)}, node.mark)


def _put_item(loc: Loc, items: list[Node], parts: list[str], value: Node) -> Node:
    place = int(parts[0]) if _INDEX.fullmatch(parts[0]) else len(items)
    if place >= len(items):
        fail(SET, (*loc, parts[0]), f"{dotted(loc)} is a list of {len(items)}: say its place, counted from 0")
    changed = _put((*loc, place), items[place], parts[1:], value)
    return Node([*items[:place], changed, *items[place + 1 :]], items[place].mark if parts[1:] else SET)


def _split(entries: dict[str, Node], parts: list[str]) -> tuple[str, list[str]]:
    """Take the next key off a path; a model's name may hold dots, so the longest key that exists wins."""
    for length in range(len(parts), 0, -1):
        key = ".".join(parts[:length])
        if key in entries:
            return key, parts[length:]
    return parts[0], parts[1:]
