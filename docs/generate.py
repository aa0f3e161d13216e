"""What cog writes into these pages: the commands' help, the keys of a spec, the layers of the program."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from dgxlab import served
from dgxlab.store import Store
from dgxlab.store.schema import VIEWS

ROOT = Path(__file__).parent.parent
SCHEMA = json.loads((ROOT / "schema" / "experiment.schema.json").read_text())


EVERY = ("--db", "--format", "--quiet", "--help")
"""Options of every command, which the program's own help alone shows here."""
MEASURING = ("--host", "--set", "--trust-source", "--wait", "--nodes")
"""Options of every command that measures."""

WITH_MODEL = ("LlamaBenchSpec", "BatchedBenchSpec", "ServeSpec", "ProfileSpec")
"""Entries of a bench that run a model."""
ON_TEXT = ("GreedyGateSpec", "PerplexityGateSpec")
"""Gates that run a model on text."""


def usage(*command: str, without: Collection[str] = ()) -> str:
    """Return a command's help in a code block, 80 columns wide, without these options."""
    argv = [sys.executable, "-m", "dgxlab", *command, "--help"]
    env = {**os.environ, "COLUMNS": "80", "LC_ALL": "C.UTF-8"}
    text = subprocess.run(argv, env=env, capture_output=True, encoding="utf-8", check=True).stdout
    for option in (*EVERY, *without) if command else ():
        text = re.sub(rf"(?m)^  (?:-\w, )?{option}\b.*\n(?:   .*\n)*", "", text)
    text = re.sub(r"\nOptions:\n(?=\n|$)", "", text)
    return f"```text\n{text}```"


def keys(*names: str, without: Collection[str] = ()) -> str:
    """Return a markdown table of the keys that parts of a spec share, without those that the parts `without` share.

    One part has all its own; "" is the top level.
    """
    rows = [row for row in _rows(names[0]) if all(row in _rows(name) for name in names[1:])]
    left_out = [row for row in rows if without and all(row in _rows(name) for name in without)]
    head = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *(row for row in rows if row not in left_out)])


def _rows(name: str) -> list[str]:
    part = SCHEMA["$defs"][name] if name else SCHEMA
    required = part.get("required", [])
    return [
        f"| `{key}` | {_values(schema)} | {'required' if key in required else _default(schema)} | {_meaning(schema)} |"
        for key, schema in part["properties"].items()
    ]


def _meaning(schema: Mapping[str, Any]) -> str:
    text: str = schema.get("description") or _referred(schema).get("description", "")
    return text.replace("|", "\\|")


def _referred(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else {}


def _default(schema: Mapping[str, Any]) -> str:
    """Return a key's default; "all" for a list of every choice, "all but" for most; nothing where there is none."""
    choices = [choice.get("items", {}).get("enum") for choice in schema.get("anyOf", [])]
    if "default" not in schema:
        return ""
    default = schema["default"]
    for every in filter(None, choices if isinstance(default, list) and default else []):
        left = [f"`{choice}`" for choice in every if choice not in default]
        return f"all but {', '.join(left)}" if left else "all"
    return f"`{json.dumps(default)}`"


def _values(schema: Mapping[str, Any]) -> str:
    """Return what a key takes, in words; a list of what the key also takes alone is "or a list"."""
    types = list(dict.fromkeys(_types(schema)))
    alone = [kind for kind in types if not kind.startswith("list of ")]
    also_listed = f"list of {' or '.join(alone)}"
    return ", ".join(alone) + " or a list" if alone and also_listed in types else ", ".join(types)


def _types(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the kinds of value that a key takes, as a reader calls them."""
    if "$ref" in schema:
        yield "map"
    elif "enum" in schema:
        yield ", ".join(f"`{value}`" for value in schema["enum"])
    elif "anyOf" in schema:
        for choice in schema["anyOf"]:
            yield from _types(choice)
    elif schema.get("type") == "array":
        yield f"list of {' or '.join(dict.fromkeys(_types(schema['items'])))}"
    elif isinstance(kind := schema.get("type"), str):
        yield {"object": "map", "string": "text", "boolean": "true or false"}.get(kind, kind)


def tables() -> str:
    """Return a markdown table of the record's tables and views: what one row is, and the key."""
    rows = ["| table or view | one row is | key |", "| --- | --- | --- |"]
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "results.db") as store:
        for name, text in served.tables().items():
            found = store.rows("SELECT name FROM pragma_table_info(?) WHERE pk ORDER BY pk", (name,))
            key = VIEWS.get(name) or [row["name"] for row in found]
            rows.append(f"| `{name}` | {text} | {', '.join(f'`{column}`' for column in key)} |")
    return "\n".join(rows)


def layers() -> str:
    """Return a markdown table of the package's rooms, in the order in which they may import, with what each is for."""
    rows = ["| row | package | what it is for |", "| ---: | --- | --- |"]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    order = next(contract["layers"] for contract in settings if contract["type"] == "layers")
    for number, row in enumerate(order, 1):
        for module in row.split(" | "):
            path = ROOT / module.replace(".", "/")
            text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
            summary = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0].rstrip(".")
            rows.append(f"| {number} | `{module}` | {summary} |")
    return "\n".join(rows)
