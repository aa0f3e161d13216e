"""From spec files to one tree: `extends` chains, merging a child into its parent, and `--set key=value`.

maps             merge, key by key
models.NAME      merges with a model of its own kind; of another kind (path, synthetic, derived) it replaces it
session          merges, but effect and cycles replace one another
gates            append, and no child can remove one. A gate with the identity of an inherited one refines it in its
                 place: what the child writes counts (`expect: null` too), the rest is inherited, except `cases`
                 where the child has another `expect`. The identity of a parity gate is op, backend, env and
                 where, of an engaged gate its marker and tools, of the others all but what they must reach and their
                 time
other lists      replace
name, hypothesis are never inherited; a spec without a name has that of its file
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dgxlab.project import spec_at
from dgxlab.spec.nodes import SET, Loc, Mark, Node, Problem, dotted, fail, nearest, plain, printable, refuse, shown
from dgxlab.spec.yaml_file import MAX_DEPTH, read_file, read_value
from dgxlab.tools import CHECKS

_MODEL_KINDS = {"path", "synthetic", "derived"}  # a model entry has one of these keys
_SESSION_KINDS = {"effect", "cycles"}  # a session has one of these keys at most
_LIMITS = (
    *("expect", "tests", "engaged"),
    *("kld_ratio_at_most", "kld_at_most", "kld_growth_at_most", "ppl_ratio_at_most", "limit_s"),
)
"""Limits of a gate: keys that do not identify it."""
_OWN = ("name", "hypothesis")  # keys that identify a file: a child does not inherit them
_MUST_REACH = ("expect", "unsupported", "cases")
"""Limits of a parity gate that `--set` may change; the gate is then marked."""
_SETTABLE = (*_MUST_REACH, "limit_s")
"""Keys of a gate that `--set` may change; any other key would turn it into another gate."""


def resolve(path: Path) -> Node:
    """Read a spec file and everything it extends, and merge them into one tree without `extends`.

    Raises SpecError if a file cannot be read or is no map, or if `extends` is no file name or circular.
    """
    tree, *children = reversed(_read_chain(path))
    for child in children:
        inherited = Node({key: node for key, node in map_of(tree).items() if key not in _OWN}, tree.mark)
        tree = _merge((), inherited, child)
    return tree


def label(path: Path) -> str:
    """Return a file's name for errors: relative to the current folder if it is below that, else absolute."""
    absolute, cwd = absolute_path(path), Path.cwd()
    return printable(str(absolute.relative_to(cwd) if absolute.is_relative_to(cwd) else absolute), 300)


def absolute_path(path: Path) -> Path:
    """Return the path from the root, without `..`; symbolic links are kept, because people know a file by its name."""
    return Path(os.path.abspath(path))  # noqa: PTH100 -- resolve() follows links


def override(tree: Node, setting: str) -> Node:
    """Return the tree with one value replaced or added, as `--set KEY=VALUE` asks.

    KEY is a dotted path with list positions from 0, as `bench.0.TOOL.n_prompt` or `bench[0]...`; VALUE is YAML. Raises
    SpecError if it has another form, the key's path does not exist, or it must not be changed (a gate's identity).
    """
    key, equals, text = setting.partition("=")
    parts = re.sub(r"\[([0-9]+)\]", r".\1", key.strip()).split(".")
    if not equals or not all(parts) or len(parts) > MAX_DEPTH:
        fail(SET, (), f"'{printable(setting)}' is not key=value, as in session.cycles=4")
    if parts[0] == "extends":
        fail(SET, ("extends",), "is read before --set: write a file that extends the other one")
    if parts[0] == "gates" and (len(parts) != 4 or parts[2] != "backend-ops" or parts[3] not in _SETTABLE):
        only = f"only gates.N.backend-ops.{{{','.join(_SETTABLE)}}} can be set: no gate can be removed or exchanged"
        fail(SET, tuple(parts), f"{only}; add one in a file that extends this one")
    return _put((), tree, parts, Node(read_value(text, tuple(parts)).value, SET))


def arm(tree: Node, chosen: Iterable[tuple[str, str, str]]) -> Node:
    """Return the tree of one experiment of a sweep, given (env or cmake, key, value) for each key of its matrix."""
    entries = dict(map_of(tree))
    mark = entries.pop("matrix").mark
    for part, key, value in chosen:
        entries[part] = _put((part,), entries.get(part, Node({}, mark)), [key], Node(value, mark))
    return Node(entries, tree.mark)


def changed_gates(tree: Node) -> set[int]:
    """Return the positions of the gates whose expectations `--set` changed, in the tree of a valid spec."""
    entries: Any = tree.value
    gates = entries["gates"].value if "gates" in entries else []
    bodies = {place: gate.value["backend-ops"].value for place, gate in enumerate(gates) if "backend-ops" in gate.value}
    return {
        place for place, body in bodies.items() if any(key in body and body[key].mark == SET for key in _MUST_REACH)
    }


def _read_chain(path: Path) -> list[Node]:
    """Return the file's tree, then its parent's, and so on; `extends` taken out."""
    chain: list[Node] = []
    names: dict[str, str] = {}  # by the real path
    mark = Mark("")
    while True:
        name = label(path)
        try:
            real = os.path.realpath(path)
        except (OSError, ValueError):
            real = str(path)
        if real in names:
            circle = [*list(names.values())[list(names).index(real) :], name]
            fail(mark, ("extends",), f"goes round in a circle: {' -> '.join(circle)}")
        names[real] = name
        entries = dict(map_of(read_file(path, name, named_at=mark if chain else None)))
        _refuse_repeated_gates(entries.get("gates"))
        parent = entries.pop("extends", None)
        chain.append(Node(entries, Mark(name, 1)))
        if parent is None:
            return chain
        if not isinstance(parent.value, str) or not parent.value:
            fail(parent.mark, ("extends",), f"must be the name of one spec file, not {shown(plain(parent))}")
        mark, path = parent.mark, spec_at(absolute_path(path.parent / parent.value))


def map_of(node: Node) -> dict[str, Node]:
    """Return the nodes of a map by their keys; raises SpecError for anything else."""
    if not isinstance(node.value, dict):
        fail(node.mark, (), f"must hold a map of keys, not {shown(plain(node))}")
    return node.value


def _merge(loc: Loc, parent: Node, child: Node) -> Node:
    if isinstance(parent.value, dict) and isinstance(child.value, dict):
        kept = _drop_other_kind(loc, parent.value, set(child.value))
        both = {key: _merge((*loc, key), kept[key], child.value[key]) for key in kept.keys() & child.value.keys()}
        return Node({**kept, **child.value, **both}, child.mark)
    if loc != ("gates",) or not isinstance(parent.value, list) or not isinstance(child.value, list):
        return child
    gates = list(parent.value)
    places = {_gate_identity(gate): place for place, gate in enumerate(gates)}
    for gate in child.value:
        place = places.get(_gate_identity(gate) or "new")
        if place is None:
            gates.append(gate)
            continue
        inherited = gates[place]
        ((kind, body),), (stated,) = map_of(inherited).items(), map_of(gate).values()
        if "expect" in map_of(stated):  # a count and the list of cases belong together
            kept = {key: value for key, value in map_of(body).items() if key != "cases"}
            inherited = Node({kind: Node(kept, body.mark)}, inherited.mark)
        gates[place] = _merge(("gates", place), inherited, gate)
    return Node(gates, child.mark)


def _drop_other_kind(loc: Loc, entries: dict[str, Node], stated: set[str]) -> dict[str, Node]:
    """Return a model's or session's entries without the keys that `stated` replaces; other maps are unchanged."""
    kinds = _SESSION_KINDS if loc == ("session",) else _MODEL_KINDS if len(loc) == 2 and loc[0] == "models" else set()
    if not stated & kinds:
        return entries
    return {key: node for key, node in entries.items() if key in stated or key not in kinds}


def _refuse_repeated_gates(gates: Node | None) -> None:
    """Refuse two gates of the same identity in one file: it is ambiguous which one counts."""
    lines: dict[str, int | None] = {}
    problems = []
    for place, gate in enumerate(gates.value if gates and isinstance(gates.value, list) else []):
        identity = _gate_identity(gate)
        if identity and identity in lines:
            problems.append(Problem(gate.mark, ("gates", place), f"is the same gate as at line {lines[identity]}"))
        lines.setdefault(identity, gate.mark.line)
    if problems:
        refuse(problems)


def _gate_identity(gate: Node) -> str:
    """Return a gate's identity, or "" for a gate that validation will refuse anyway."""
    value: Any = plain(gate)
    if not isinstance(value, dict) or len(value) != 1:
        return ""
    ((kind, body),) = value.items()
    if not isinstance(body, dict):
        return ""
    if kind in CHECKS:
        return json.dumps([kind, {k: v for k, v in body.items() if k not in _LIMITS}], sort_keys=True)
    if kind == "backend-ops":
        of = (body.get(key) for key in ("op", "backend"))
        return json.dumps([kind, *of, body.get("env") or {}, body.get("where") or {}], sort_keys=True)
    tools = body.get("tools")
    return json.dumps([kind, body.get("stderr"), sorted(map(str, tools if isinstance(tools, list) else [tools]))])


def _put(loc: Loc, node: Node, parts: list[str], value: Node) -> Node:
    """Return the node with the value at `parts` below it; `loc` is the node's own place."""
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
    length = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in node.value), 1)
    key = ".".join(parts[:length])
    if loc == ("models",) and key not in node.value:
        fail(SET, (*loc, key), f"no such model{nearest(key, node.value)}")
    below = _put((*loc, key), node.value.get(key, Node({}, SET)), parts[length:], value)
    return Node({**_drop_other_kind(loc, node.value, {key}), key: below}, node.mark)
