"""From spec files to one tree: `extends` chains, what a child's value does to its parent's, and `--set key=value`.

maps             merge, key by key
models.NAME      merges with a model of its own kind; of another kind (path, synthetic, derived) it replaces it
session          merges, but effect and cycles replace one another
gates            append, and no child can remove one. A gate with the identity of an inherited one refines it in its
                 place: what the child writes counts (`expect: null` too), the rest is inherited, but for `cases`
                 where the child says another `expect`. The identity of a parity gate is op, backend and env, of an
                 engaged gate its marker and tools, of the others all but what they must reach and their time
other lists      replace
name, hypothesis are the file's own and never inherited; a spec without a name is called like its file
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from dgxlab.project import spec_at
from dgxlab.spec.nodes import SET, Loc, Mark, Node, Problem, dotted, fail, nearest, plain, printable, refuse, shown
from dgxlab.spec.yaml_file import MAX_DEPTH, read_file, read_value
from dgxlab.tools import CHECKS

MODEL_KINDS = frozenset({"path", "synthetic", "derived"})
"""A model entry has one of these keys."""

SESSION_KINDS = frozenset({"effect", "cycles"})
"""A session has one of these keys at most."""

LIMITS = ("expect", "tests", "engaged", "kld_ratio_at_most", "kld_at_most", "ppl_ratio_at_most", "limit_s")
"""Keys of a gate that say what it must reach, and in which time."""

OWN = ("name", "hypothesis")
"""Keys that say what a file is: a child does not inherit them."""

MUST_REACH = ("expect", "unsupported", "cases")
"""What a parity gate must reach; `--set` may change it, and the gate is marked."""
_GATE_KEYS = (*MUST_REACH, "limit_s")
"""What may be set in a gate; anything else would make another gate of it, and so remove it."""


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


def _drop_other_kind(loc: Loc, entries: dict[str, Node], stated: set[str]) -> dict[str, Node]:
    """Return a model's or the session's entries without the key that `stated` ones replace; any other map as it is."""
    kinds = SESSION_KINDS if loc == ("session",) else MODEL_KINDS if len(loc) == 2 and loc[0] == "models" else set()
    if not stated & kinds:
        return entries
    return {key: node for key, node in entries.items() if key in stated or key not in kinds}


def override(tree: Node, setting: str) -> Node:
    """Return the tree with one value replaced.

    A key that is not there yet is added, and validation refuses it when it is none of the spec's. List positions are
    numbers: `bench.0.llama-bench.n_prompt=[512]`, or `bench[0]...`.

    Raises:
        SpecError: if it is not `key=value`, the value is not YAML, or the path does not exist.
    """
    key, equals, text = setting.partition("=")
    parts = re.sub(r"\[([0-9]+)\]", r".\1", key.strip()).split(".")
    if not equals or not all(parts) or len(parts) > MAX_DEPTH:
        fail(SET, (), f"'{printable(setting)}' is not key=value, as in session.cycles=4")
    if parts[0] == "extends":
        fail(SET, ("extends",), "is read before --set: write a file that extends the other one")
    if parts[0] == "gates" and (len(parts) != 4 or parts[2] != "backend-ops" or parts[3] not in _GATE_KEYS):
        only = f"only gates.N.backend-ops.{{{','.join(_GATE_KEYS)}}} can be set: no gate can be removed or exchanged"
        fail(SET, tuple(parts), f"{only}; add one in a file that extends this one")
    return _put((), tree, parts, Node(read_value(text, tuple(parts)).value, SET))


def changed_gates(tree: Node) -> set[int]:
    """Return the places of the gates for which `--set` said what they must reach; the tree is a valid spec."""
    entries: Any = tree.value
    gates = [gate.value for gate in entries["gates"].value] if "gates" in entries else []
    bodies = {place: gate["backend-ops"].value for place, gate in enumerate(gates) if "backend-ops" in gate}
    return {place for place, body in bodies.items() if any(key in body and body[key].mark == SET for key in MUST_REACH)}


# -- extends ----------------------------------------------------------------------------------------------------------


def _read_chain(path: Path) -> list[Node]:
    """Return the file's tree, then its parent's, and so on; `extends` taken out."""
    chain: list[Node] = []
    names: list[str] = []
    identities: list[str] = []
    mark = Mark("")
    while True:
        name = label(path)
        try:
            identity = os.path.realpath(path)
        except (OSError, ValueError):
            identity = str(path)
        if identity in identities:
            circle = [*names[identities.index(identity) :], name]
            fail(mark, ("extends",), f"goes round in a circle: {' -> '.join(circle)}")
        names.append(name)
        identities.append(identity)
        entries = dict(_entries(read_file(path, name, named_at=mark if mark.source else None)))
        parent = entries.pop("extends", None)
        chain.append(Node(entries, Mark(name, 1)))
        if parent is None:
            return chain
        if not isinstance(parent.value, str) or not parent.value:
            fail(parent.mark, ("extends",), f"must be the name of one spec file, not {shown(plain(parent))}")
        mark, path = parent.mark, spec_at(absolute_path(path.parent / parent.value))


def _entries(node: Node) -> dict[str, Node]:
    if not isinstance(node.value, dict):
        fail(node.mark, (), f"must hold a map of keys, not {shown(plain(node))}")
    return node.value


# -- merging ----------------------------------------------------------------------------------------------------------


def _merge(loc: Loc, parent: Node, child: Node) -> Node:
    if isinstance(parent.value, dict) and isinstance(child.value, dict):
        kept = _drop_other_kind(loc, parent.value, set(child.value))
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
        if not identity or identity not in places:
            gates.append(gate)
            continue
        place = places[identity]
        inherited = gates[place]
        ((kind, body),), ((_, stated),) = _entries(inherited).items(), _entries(gate).items()
        if "expect" in _entries(stated):  # a count and the list of cases belong together
            kept = {key: value for key, value in _entries(body).items() if key != "cases"}
            inherited = Node({kind: Node(kept, body.mark)}, inherited.mark)
        gates[place] = _merge(("gates", place), inherited, gate)
    return gates


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
    if kind in {checker.gate.name for checker in CHECKS.values()}:
        return json.dumps([kind, {k: v for k, v in body.items() if k not in LIMITS}], sort_keys=True)
    if kind == "backend-ops":
        return json.dumps([kind, body.get("op"), body.get("backend"), body.get("env") or {}], sort_keys=True)
    tools = body.get("tools")
    return json.dumps([kind, body.get("stderr"), sorted(map(str, tools if isinstance(tools, list) else [tools]))])


# -- --set -------------------------------------------------------------------------------------------------------------


def _put(loc: Loc, node: Node, parts: list[str], value: Node) -> Node:
    if not parts:
        return value
    if isinstance(node.value, list):
        items = node.value
        place = int(parts[0]) if re.fullmatch("[0-9]{1,6}", parts[0]) else len(items)
        if place >= len(items):
            fail(SET, (*loc, parts[0]), f"{dotted(loc)} is a list of {len(items)}: say its place, counted from 0")
        changed = _put((*loc, place), items[place], parts[1:], value)
        return Node([*items[:place], changed, *items[place + 1 :]], node.mark if parts[1:] else SET)
    if not isinstance(node.value, dict):
        fail(SET, (*loc, parts[0]), f"there is no such key: {dotted(loc)} is neither a map nor a list")
    # a model's name may hold dots: the longest key that exists wins
    known = [n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in node.value]
    length = known[0] if known else 1
    key, rest = ".".join(parts[:length]), parts[length:]
    if loc == ("models",) and key not in node.value:
        fail(SET, (*loc, key), f"no such model{nearest(key, node.value)}")
    below = node.value.get(key, Node({}, SET))
    entries = _drop_other_kind(loc, node.value, {key})
    return Node({**entries, key: _put((*loc, key), below, rest, value)}, node.mark)
