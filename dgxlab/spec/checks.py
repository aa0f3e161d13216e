"""Rules between the fields of a spec: names exist, gates have evidence, matrices are not empty."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dgxlab import quantise, synth
from dgxlab.errors import SpecError
from dgxlab.model import (
    GPU_BACKENDS,
    Bench,
    Check,
    Experiment,
    FileModel,
    Model,
    SyntheticModel,
    canonical,
    environments,
    gpu_backends,
    quantisation,
    root_of,
)
from dgxlab.project import Specs
from dgxlab.spec import resolve
from dgxlab.spec.fields import unsafe_flags
from dgxlab.spec.models import ExperimentSpec
from dgxlab.spec.nodes import Loc, nearest, shown
from dgxlab.tools import Benchmark, keys_of, launches

_MAX_CELLS = 100_000  # cells of one experiment; ten times the most that a plan is tested with
_SECRET = re.compile(r"(.*_)?(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(API|ACCESS|PRIVATE)_KEY)")
"""Names of variables that hold secrets: a spec is recorded, printed and kept in git."""
_CUDA_KEYS = "GGML_CUDA: true and CMAKE_CUDA_ARCHITECTURES"
_KNOWN = ("CPU", *GPU_BACKENDS.values())  # llama.cpp has more, which are not checked
_NO_TEXT = "model {name} has no vocabulary: give its recipe vocab: llama-spm"
_Finding = tuple[Loc, str]  # place and text of a problem


def check(spec: ExperimentSpec, session: Mapping[str, Any]) -> Iterator[_Finding]:
    """Yield the place and a sentence of each problem of a spec whose fields are valid.

    `session` are the keys of its `session` that the file sets itself, without defaults.
    """
    if not spec.bench and all(gate.engaged for gate in spec.gates):
        yield ("bench",), "missing: with neither bench nor a gate that runs by itself there is nothing to do"
    for name, value in spec.cmake.items():
        if wrong := unsafe_flags(name, value):
            yield ("cmake", name), wrong
    yield from _recipes(spec)
    yield from _secrets(spec)
    yield from _gpu_builds(spec)
    yield from _gates(spec)
    total = 0
    for (part, place, tool), body in _bodies(spec):
        if part == "gates":
            continue
        for loc, text in _entry(spec, body):
            yield (part, place, tool, *loc), text
        lengths = {name: len(values) for name, values in _axes(body).items()}
        sizes = sum(lengths.pop(name) for name in body.either) if body.either else 1
        before, total = total, total + sizes * math.prod(lengths.values())
        if before <= _MAX_CELLS < total:
            yield (part, place), f"makes more than {_MAX_CELLS:,} cells: measure less, or split the experiment"
    if {"effect", "cycles"} <= session.keys():
        yield ("session", "cycles"), "fixes by hand what effect decides: give one of the two"
    if "block_minutes" in session and spec.session.thermal == "cold":
        yield ("session", "block_minutes"), "runs an arm until it is warm, which thermal: cold forbids"


def misnamed(experiment: Experiment, known: Specs) -> Iterator[_Finding]:
    """Yield a name that another file in experiments/ has, or that is not the file's own there: results are shared."""
    path, name, others = Path(experiment.path), shown(experiment.name), namesakes(experiment, known)
    if path.is_relative_to(Path(experiment.root, "experiments")) and experiment.name != path.stem:
        other = f", and {name} is {others}" if others else ""
        yield ("name",), f"must be the file's, {shown(path.stem)}: results are kept by name{other}"
    elif others:
        yield ("name",), f"{name} is {others} too: results are kept by name"


def namesakes(experiment: Experiment, known: Specs) -> str:
    """Return the other files of an experiment's name among the project's, "" for none."""
    own = Path(experiment.path).resolve()
    return " and ".join(resolve.label(file) for file in known.get(experiment.name, ()) if file.resolve() != own)


def held_out(experiment: Experiment) -> Iterator[_Finding]:
    """Yield the entries of `holdout` with a cell that bench has too, whatever its repetitions and arguments."""

    def cells(*entries: Bench) -> set[tuple[str, ...]]:
        every = launches(replace(experiment, bench=entries)) if entries else ()
        return {
            (each.tool, each.model, canonical(each.env), canonical(cell.params), cell.label)
            for each in every
            for cell in each.cells
        }

    measured = cells(*experiment.bench) if experiment.holdout else set()
    for place, entry in enumerate(experiment.holdout):
        for *_, label in sorted(measured & cells(entry))[:1]:
            yield ("holdout", place), f"holds {label} out, which bench measures and shows"


def _bodies(spec: ExperimentSpec) -> Iterator[tuple[Loc, Any]]:
    for part, entries in (("gates", spec.gates), ("bench", spec.bench or []), ("holdout", spec.holdout or [])):
        for place, entry in enumerate(entries):
            kind, body = entry.kind
            yield (part, place, kind), body


def _gpu_builds(spec: ExperimentSpec) -> Iterator[_Finding]:
    """Refuse settings that need a GPU backend that is not built: llama.cpp would silently measure the processor."""
    wrong = [key for key in GPU_BACKENDS if spec.cmake.get(key, "ON") not in ("ON", "OFF")]
    yield from ((("cmake", key), f"must be true or false, not {shown(spec.cmake[key])}") for key in wrong)
    built = gpu_backends(spec.cmake)
    for loc, body in _bodies(spec):
        if max(getattr(body, "axes", {}).get("n_gpu_layers", [0])) > 0 and not built:
            why = "no GPU backend is built, and the processor would be measured"
            yield (*loc, "n_gpu_layers"), f"{why}: cmake needs {_CUDA_KEYS}"
        name = getattr(body, "backend", "")
        kind = name.rstrip("0123456789")
        if name == "CUDA" or (kind not in _KNOWN and kind.lower() in map(str.lower, _KNOWN)):
            yield (*loc, "backend"), f"must be a backend's exact name, as CUDA0 or CPU, not {shown(name)}"
        for key, backend in GPU_BACKENDS.items():
            if kind == backend and backend not in built:
                needed = _CUDA_KEYS if key == "GGML_CUDA" else f"{key}: true"
                yield (*loc, "backend"), f"{name} is not built: cmake needs {needed}"


def _recipes(spec: ExperimentSpec) -> Iterator[_Finding]:
    records = spec.model_records()
    for name, model in spec.models.items():
        record = records.get(name)
        if model.derived and not record:
            known = [other for other in records if other != name]
            text = f"no model {shown(model.derived.of)} under models{nearest(model.derived.of, known)}"
            if model.derived.of in spec.models:
                text = f"{shown(model.derived.of)} is not made from a path or a synthetic model in the end"
            yield ("models", name, "derived", "of"), text
        if record is None or isinstance(record, FileModel):
            continue
        how, root = quantisation(record), root_of(record)
        try:
            if isinstance(root, SyntheticModel):
                synth.check(replace(root, quant=how.quant))
            quantise.check_source(how, None)
        except SpecError as error:
            yield ("models", name, model.kind[0]), error.message


def _secrets(spec: ExperimentSpec) -> Iterator[_Finding]:
    text = "looks like a secret, and a spec is recorded: it belongs to the host's env in hosts.yaml"
    for loc, body in [((), spec), *_bodies(spec)]:
        for key in ("env", "against"):
            yield from (((*loc, key, name), text) for name in filter(_SECRET.fullmatch, getattr(body, key, {})))


def _gates(spec: ExperimentSpec) -> Iterator[_Finding]:
    """Check that gates have evidence, that their models exist, and that they could fail and pass."""
    records = spec.model_records()
    measured = {entry.kind[0] for entry in spec.bench or []}
    for place, gate in enumerate(spec.gates):
        kind, body = gate.kind
        if gate.engaged and not measured.intersection(gate.engaged.tools):
            text = f"none of its tools is in bench, which has {', '.join(sorted(measured)) or 'nothing'}"
            yield ("gates", place, kind), f"{text}: a gate without evidence"
        for key in ("model", "reference"):
            name = getattr(body, key, "")
            if name and name not in spec.models:
                yield ("gates", place, kind, key), f"no model {shown(name)} under models{nearest(name, spec.models)}"
            elif name in records and not _has_text(records[name]):
                yield ("gates", place, kind, key), _NO_TEXT.format(name=name)
        if isinstance(body, Check):
            arm, other = environments(body, spec.env)
            if getattr(body, "against", {}) and arm == other:
                yield ("gates", place, kind), "against changes nothing: the arm's environment is that already"
            yield from ((("gates", place, kind), text) for text in body.flaws())


def _has_text(record: Model) -> bool:
    root = root_of(record)
    return not isinstance(root, SyntheticModel) or bool(root.vocab)


def _axes(entry: Benchmark) -> dict[str, Sequence[Any]]:
    """Return the varied keys of an entry, sizes included."""
    varied: dict[str, Sequence[Any]] = {}
    for name in keys_of(entry):
        value = getattr(entry, name)
        if isinstance(value, dict):
            varied |= value
        elif isinstance(value, tuple):
            varied[name] = value
    return varied | getattr(entry, "axes", {})


def _entry(spec: ExperimentSpec, body: Benchmark) -> Iterator[_Finding]:
    """Check a bench entry's cells and exclusions: with a typo, excluded cells would be measured."""
    name, args, either = getattr(body, "model", None), getattr(body, "args", ()), body.either
    axes = {axis: values for axis, values in _axes(body).items() if values}
    yield from (((), text) for text in body.flaws())
    if name and name not in spec.models:
        yield ("model",), f"no model {shown(name)} under models{nearest(name, spec.models)}"
    elif body.vocabulary and name in (records := spec.model_records()) and not _has_text(records[name]):
        yield ("model",), _NO_TEXT.format(name=name)
    if either and not any(axis in axes for axis in either):
        yield (), f"measures nothing: give {', '.join(either)} or both"
    for place, why in body.refused(args).items():
        yield ("args", place), f"{shown(args[place])} {why}"
    for place, rule in enumerate(body.exclude):
        for axis, value in rule.items():
            if axis not in axes:
                yield ("exclude", place, axis), f"is not varied in this entry{nearest(axis, axes)}"
            elif value not in axes[axis]:
                yield ("exclude", place, axis), f"excludes nothing: {shown(value)} is not among {axis}'s values"
        if either and rule.keys() >= set(either):
            yield ("exclude", place), f"excludes nothing: a cell has {' or '.join(either)}, never both"
