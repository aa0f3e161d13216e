"""From spec files to one tree: `extends` chains, and what a child's value does to its parent's.

maps             merge, key by key
models.NAME      merges with a model of its own kind; of another kind (path, synthetic, derived) it replaces it
session          merges, but effect and cycles replace one another
gates            append, and no child can remove one. A gate with the identity of an inherited one refines it where it
                 stands: what the child writes counts (`expect: null` too), the rest is inherited, but for `cases`
                 where the child says another `expect`. The identity of a parity gate is op, backend and env, of an
                 engaged gate its marker and tools, of the others all but what they must reach and their time
other lists      replace
name, hypothesis are the file's own and never inherited; a spec without a name is called like its file
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dgxlab.project import spec_at
from dgxlab.spec.nodes import Loc, Mark, Node, Problem, fail, plain, printable, refuse, shown
from dgxlab.spec.yaml_file import read_file

MODEL_KINDS = frozenset({"path", "synthetic", "derived"})
"""A model entry has one of these keys."""

SESSION_KINDS = frozenset({"effect", "cycles"})
"""A session has one of these keys at most."""

LIMITS = ("expect", "tests", "engaged", "kld_ratio_at_most", "kld_at_most", "ppl_ratio_at_most", "limit_s")
"""Keys of a gate that say what it must reach, and in which time."""

OWN = ("name", "hypothesis")
"""Keys that say what a file is: a child does not inherit them."""


def resolve(path: Path) -> Node:
    """Read a spec file and everything it extends, and merge them into one tree without `extends`.

    Raises:
        SpecError: if a file cannot be read or is no map, or `extends` is no file name or runs in a circle.
    """
    chain = _read_chain(path)
    tree = chain.pop()
    _refuse_repeated_gates(tree)
    while chain:
        inherited = Node({k: v for k, v in _entries(tree).items() if k not in OWN}, tree.mark)
        child = chain.pop()
        _refuse_repeated_gates(child)
        tree = _merge((), inherited, child)
    return tree


def label(path: Path) -> str:
    """Return what errors call a file: its path from the current folder when it is below it."""
    absolute = absolute_path(path)
    cwd = Path.cwd()
    return printable(str(absolute.relative_to(cwd) if absolute.is_relative_to(cwd) else absolute), 300)


def absolute_path(path: Path) -> Path:
    """Return the path from the root, without `..`; symbolic links are kept, because people know a file by its name."""
    return Path(os.path.abspath(path))  # noqa: PTH100 -- resolve() follows links


def drop_other_kind(loc: Loc, entries: dict[str, Node], stated: set[str]) -> dict[str, Node]:
    """Return a model's or the session's entries without the key that `stated` ones replace; any other map as it is."""
    kinds = SESSION_KINDS if loc == ("session",) else MODEL_KINDS if len(loc) == 2 and loc[0] == "models" else set()
    if not stated & kinds:
        return entries
    return {key: node for key, node in entries.items() if key in stated or key not in kinds}


# -- extends ----------------------------------------------------------------------------------------------------------


def _read_chain(path: Path) -> list[Node]:
    """Return the file's tree, then its parent's, and so on; `extends` taken out."""
    chain: list[Node] = []
    seen: dict[str, str] = {}
    mark = Mark("")
    while True:
        identity, name = _identity(path), label(path)
        if identity in seen:
            names = list(seen.values())
            circle = [*names[list(seen).index(identity) :], name]
            fail(mark, ("extends",), f"goes round in a circle: {' -> '.join(circle)}")
        seen[identity] = name
        entries = dict(_entries(read_file(path, name, named_at=mark if mark.source else None)))
        parent = entries.pop("extends", None)
        chain.append(Node(entries, Mark(name, 1)))
        if parent is None:
            return chain
        mark = parent.mark
        path = spec_at(absolute_path(path.parent / _parent_name(parent)))


def _parent_name(node: Node) -> str:
    if not isinstance(node.value, str) or not node.value:
        fail(node.mark, ("extends",), f"must be the name of one spec file, not {shown(plain(node))}")
    return node.value


def _identity(path: Path) -> str:
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):
        return str(path)


def _entries(node: Node) -> dict[str, Node]:
    if not isinstance(node.value, dict):
        fail(node.mark, (), f"must hold a map of keys, not {shown(plain(node))}")
    return node.value


# -- merging ----------------------------------------------------------------------------------------------------------


def _merge(loc: Loc, parent: Node, child: Node) -> Node:
    if isinstance(parent.value, dict) and isinstance(child.value, dict):
        kept = drop_other_kind(loc, parent.value, set(child.value))
        merged = {**kept, **child.value}
        both = {key: _merge((*loc, key), kept[key], child.value[key]) for key in kept.keys() & child.value.keys()}
        return Node({**merged, **both}, child.mark)
    if loc == ("gates",) and isinstance(parent.value, list) and isinstance(child.value, list):
        return Node(_merge_gates(parent.value, child.value), child.mark)
    return child


def _merge_gates(parent: list[Node], child: list[Node]) -> list[Node]:
    gates = list(parent)
    places = {_gate_identity(gate): place for place, gate in enumerate(parent)}
    for gate in child:
        identity = _gate_identity(gate)
        if identity and identity in places:
            place = places[identity]
            gates[place] = _merge(("gates", place), _without_cases(gates[place], gate), gate)
        else:
            gates.append(gate)
    return gates


def _without_cases(parent: Node, child: Node) -> Node:
    """Return an inherited gate without its list of cases where the child expects a count: they belong together."""
    ((kind, body),), ((_, stated),) = _entries(parent).items(), _entries(child).items()
    if "expect" not in _entries(stated):
        return parent
    return Node({kind: Node({k: v for k, v in _entries(body).items() if k != "cases"}, body.mark)}, parent.mark)


def _refuse_repeated_gates(tree: Node) -> None:
    """Refuse two gates of one identity in one file: which of them counts would be a guess."""
    node = _entries(tree).get("gates")
    first: dict[str, Node] = {}
    problems = []
    for place, gate in enumerate(node.value if node and isinstance(node.value, list) else []):
        identity = _gate_identity(gate)
        if identity and identity in first:
            text = f"is the same gate as at line {first[identity].mark.line}"
            problems.append(Problem(gate.mark, ("gates", place), text))
        first.setdefault(identity, gate)
    if problems:
        refuse(problems)


def _gate_identity(gate: Node) -> str:
    """Return what tells a gate from others, or "" for one that validation will refuse anyway."""
    value: Any = plain(gate)
    if not isinstance(value, dict) or len(value) != 1:
        return ""
    ((kind, body),) = value.items()
    if not isinstance(body, dict):
        return ""
    if kind in ("greedy", "perplexity", "harness"):
        return json.dumps([kind, {k: v for k, v in body.items() if k not in LIMITS}], sort_keys=True)
    if kind == "backend-ops":
        return json.dumps([kind, body.get("op"), body.get("backend"), body.get("env") or {}], sort_keys=True)
    tools = body.get("tools")
    return json.dumps([kind, body.get("stderr"), sorted(map(str, tools if isinstance(tools, list) else [tools]))])
