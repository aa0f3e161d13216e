"""Experiment specs: from a YAML file to an `Experiment` of dgxlab.model. Nothing after this package sees YAML.

yaml_file   the strict loader; every value keeps its file and line
nodes       those values, and errors as sentences about them
resolve     `extends`, merging a child into its parent, and `--set key=value`
models      the shape of a file, as pydantic models (fields: the types of values)
checks      rules between fields
hosts       hosts.yaml

Only this package imports yaml and pydantic.
"""

from __future__ import annotations

import json
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
from dgxlab.spec import checks, resolve
from dgxlab.spec.models import ExperimentSpec, SpecSchema
from dgxlab.spec.nodes import Mark, Node, explain, locate, plain, refuse

__all__ = ["json_schema", "load"]


def load(path: Path, overrides: Sequence[str] = (), host: str | None = None) -> Experiment:
    """Read an experiment spec and everything it extends.

    Args:
        overrides: `key=value` each, as given to `--set`, applied in order after `extends`.
        host: Instead of the spec's host when given.

    Raises:
        SpecError: naming file, line and key of the first thing that is wrong; its details list all of them.
    """
    tree = resolve.resolve(path)
    for setting in overrides:
        tree = resolve.override(tree, setting)
    given: Any = tree.value
    if host is not None:
        given = {**given, "host": Node(host, Mark("--host"))}
    tree = Node({"name": Node(path.stem, Mark(resolve.label(path), 1)), **given}, tree.mark)
    values, next_command = plain(tree), command("dgxlab", "plan", resolve.label(path))
    # as JSON, whose lists may become tuples; a file's name may hold bytes that are no UTF-8
    text = json.dumps(values, ensure_ascii=False).encode("utf-8", "replace")
    try:
        spec = ExperimentSpec.model_validate_json(text)
    except ValidationError as error:
        refuse(explain(error, tree, json_schema()), next=next_command)
    if problems := [locate(tree, loc, text) for loc, text in checks.check(spec, values.get("session", {}))]:
        refuse(problems, next=next_command)
    absolute = resolve.absolute_path(path)
    record = spec.record(str(absolute), str(project.root(absolute)))
    if problems := [locate(tree, loc, text) for loc, text in checks.held_out(record)]:
        refuse(problems, next=next_command)
    changed = resolve.changed_gates(tree)
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
    schema = ExperimentSpec.model_json_schema(schema_generator=SpecSchema)
    for part in (schema, schema["$defs"]["LlamaCpp"]):
        part.pop("required", None)
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema}
