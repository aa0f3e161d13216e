"""Experiment specs: from a YAML file to an `Experiment` of dgxlab.model. Nothing after this package sees YAML.

yaml_file   the strict loader; every value keeps the file and line that wrote it (scalars: what one value means)
resolve     `extends`, and what a child's value does to its parent's
overrides   `--set key=value`
models      the shape of a file, as pydantic models (entries: gates and benchmarks, fields: the types of values)
checks      what must hold between fields
explain     pydantic's errors as sentences
flags       which flags of llama.cpp's tools a spec says by a key

Only this package imports yaml and pydantic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema

from dgxlab import project
from dgxlab.errors import command
from dgxlab.model import Experiment, ParityGate
from dgxlab.spec import checks, explain, overrides, resolve
from dgxlab.spec.models import ExperimentSpec
from dgxlab.spec.nodes import Mark, Node, locate, plain, refuse
from dgxlab.spec.overrides import changed_gates

__all__ = ["json_schema", "load"]


def load(path: Path, overrides: Sequence[str] = (), host: str | None = None) -> Experiment:
    """Read an experiment spec and everything it extends.

    Args:
        path: The YAML file.
        overrides: `key=value` each, as given to `--set`, applied in order after `extends`.
        host: Stands for the spec's host when given.

    Raises:
        SpecError: naming file, line and key of the first thing that is wrong; its details list all of them.
    """
    tree = _tree(path, overrides, host)
    next_command = command("dgxlab", "plan", resolve.label(path))
    try:
        spec = ExperimentSpec.model_validate(plain(tree))
    except ValidationError as error:
        refuse(explain.explain(error, tree, json_schema()), next=next_command)
    if problems := [locate(tree, loc, text) for loc, text in checks.check(spec)]:
        refuse(problems, next=next_command)
    absolute = resolve.absolute_path(path)
    record = spec.record(str(absolute), str(project.root(absolute)))
    changed = changed_gates(tree)
    gates = (
        replace(gate, overridden=True) if place in changed and isinstance(gate, ParityGate) else gate
        for place, gate in enumerate(record.gates)
    )
    return replace(record, gates=tuple(gates))


@cache
def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a spec file, for editors.

    Little is required, because a file that extends another one may leave out what it inherits.
    """
    schema = ExperimentSpec.model_json_schema(schema_generator=_Schema)
    for part in (schema, schema["$defs"]["LlamaCpp"]):
        part.pop("required", None)
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema}


class _Schema(GenerateJsonSchema):
    """Leaves out what misleads in an editor, and is as strict about the keys of open maps as `load` is."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False: a key is its own title."""
        return False

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        """Allow no keys but those of the pattern."""
        described = super().dict_schema(schema)
        return {**described, "additionalProperties": False} if "patternProperties" in described else described

    def default_schema(self, schema: Any) -> dict[str, Any]:
        """Keep a default that is a value."""
        described = super().default_schema(schema)
        return {key: value for key, value in described.items() if key != "default" or value is not None}


def _tree(path: Path, settings: Sequence[str], host: str | None) -> Node:
    tree = resolve.resolve(path)
    for setting in settings:
        tree = overrides.apply(tree, setting)
    given = dict(tree.value) if isinstance(tree.value, dict) else {}
    if host is not None:
        given["host"] = Node(host, Mark("--host"))
    name = Node(path.stem, Mark(resolve.label(path), 1))
    return Node({"name": name, **given}, tree.mark)
