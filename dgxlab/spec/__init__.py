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
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema

from dgxlab import project
from dgxlab.errors import command
from dgxlab.model import NAME, Experiment, ParityGate
from dgxlab.spec import checks, resolve
from dgxlab.spec.models import ExperimentSpec, SpecSchema
from dgxlab.spec.nodes import Mark, Node, Problem, explain, locate, plain, refuse

_MAX_ARMS = 1000


def load(path: Path, overrides: Sequence[str] = (), host: str | None = None) -> Experiment:
    """Read an experiment spec and everything it extends.

    The `overrides`, `key=value` each as given to `--set`, are applied in order after `extends`. Raises SpecError, which
    names file, line and key of the first thing that is wrong, with all in its details; a sweep is refused too.
    """
    tree = _tree(path, overrides, host)
    if matrix := resolve.map_of(tree).get("matrix"):
        _spec(path, tree)
        problem = Problem(matrix.mark, ("matrix",), "makes several experiments, and one is needed here")
        refuse([problem], next=command("dgxlab", "run", resolve.label(path)))
    return _experiment(path, tree, _known(path))


def load_all(path: Path, overrides: Sequence[str] = (), host: str | None = None) -> list[Experiment]:
    """Read the experiments of a spec: one, or with `matrix` one for each combination of its values. Raises as `load`.

    An experiment of a sweep is called after the file's name and its values, as `threads-8-ON`.
    """
    tree, known = _tree(path, overrides, host), _known(path)
    if (matrix := _spec(path, tree).matrix) is None:
        return [_experiment(path, tree, known)]
    mark, arms = resolve.map_of(tree)["matrix"].mark, list(islice(matrix.arms(), _MAX_ARMS + 1))
    if len(arms) > _MAX_ARMS:
        refuse([Problem(mark, ("matrix",), f"makes more than {_MAX_ARMS} experiments: split it")])
    experiments = [_experiment(path, resolve.arm(tree, chosen), known) for chosen in arms]
    names = [
        "-".join([one.name, *(re.sub(r"[^A-Za-z0-9._-]+", "_", value) for _, _, value in chosen)])
        for one, chosen in zip(experiments, arms, strict=True)
    ]
    named = [replace(experiment, name=name) for experiment, name in zip(experiments, names, strict=True)]
    for experiment in named:
        name = experiment.name
        if not NAME.fullmatch(name):
            text = f"would call an experiment {name!r}: give a shorter name"
        elif names.count(name) > 1:
            text = f"would call two experiments {name!r}: let their values differ in letters or digits"
        elif others := checks.namesakes(experiment, known):
            text = f"would call an experiment {name!r}, which is {others}"
        else:
            continue
        refuse([Problem(mark, ("matrix",), text)])
    return named


def _tree(path: Path, overrides: Sequence[str], host: str | None) -> Node:
    tree = resolve.resolve(path)
    for setting in overrides:
        tree = resolve.override(tree, setting)
    given = dict(resolve.map_of(tree))
    if host is not None:
        given["host"] = Node(host, Mark("--host"))
    return Node({"name": Node(path.stem, Mark(resolve.label(path), 1)), **given}, tree.mark)


def _spec(path: Path, tree: Node) -> ExperimentSpec:
    # as JSON, whose lists may become tuples; a file's name may hold bytes that are no UTF-8
    text = json.dumps(plain(tree), ensure_ascii=False).encode("utf-8", "replace")
    try:
        return ExperimentSpec.model_validate_json(text)
    except ValidationError as error:
        mend = ""
        for wrong in error.errors():
            if wrong["loc"] == ("llama_cpp", "pin") and wrong["type"] == "value_error" and wrong["input"]:
                mend = command("dgxlab", "pin", wrong["input"])  # a tag or the beginning of an id: it prints the id
        refuse(explain(error, tree, json_schema()), next=mend)


def _known(path: Path) -> project.Specs:
    return project.specs(project.root(resolve.absolute_path(path)))


def _experiment(path: Path, tree: Node, known: project.Specs) -> Experiment:
    spec = _spec(path, tree)
    session = plain(tree).get("session", {})
    if problems := [locate(tree, loc, text) for loc, text in checks.check(spec, session)]:
        refuse(problems)
    absolute = resolve.absolute_path(path)
    record = spec.record(str(absolute), str(project.root(absolute)))
    wrong = (*checks.misnamed(record, known), *checks.held_out(record))
    if problems := [locate(tree, loc, text) for loc, text in wrong]:
        renamed = resolve.label(absolute.with_stem(f"{path.stem}-{absolute.parent.name}"))
        # a name that only moving the file changes
        shared = record.name == path.stem and checks.namesakes(record, known)
        refuse(problems, next=command("mv", "-n", resolve.label(path), renamed) if shared else "")
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
