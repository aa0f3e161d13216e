"""What must hold between the fields of a spec: names exist, gates have evidence, matrices measure something."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from dgxlab import synth
from dgxlab.errors import SpecError
from dgxlab.spec import flags
from dgxlab.spec.entries import BenchSpec, LlamaBenchSpec
from dgxlab.spec.fields import shell_text
from dgxlab.spec.models import ExperimentSpec
from dgxlab.spec.nodes import Loc, nearest, shown

MAX_CELLS = 100_000
"""Cells of one experiment; ten times what a plan has to stand."""

SECRET = re.compile(r"(.*_)?(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(API|ACCESS|PRIVATE)_KEY)")
"""Names of variables whose values are nobody's business: what a spec says is recorded, printed and kept in git."""

Finding = tuple[Loc, str]
"""Where, and what is wrong."""


def check(spec: ExperimentSpec) -> Iterator[Finding]:
    """Yield everything that is wrong with a spec whose fields are valid one by one."""
    yield from _something_to_do(spec)
    yield from _recipes(spec)
    yield from _engaged(spec)
    yield from _secrets(spec)
    yield from _compiler_flags(spec)
    for place, entry in enumerate(spec.bench or []):
        tool, body = entry.kind
        for rule in _ENTRY_RULES:
            for loc, text in rule(spec, tool, body):
                yield ("bench", place, tool, *loc), text
    yield from _size(spec.bench or [])


def _compiler_flags(spec: ExperimentSpec) -> Iterator[Finding]:
    for name, value in spec.cmake.items():
        if wrong := shell_text(name, value):
            yield ("cmake", name), wrong


def _something_to_do(spec: ExperimentSpec) -> Iterator[Finding]:
    if not spec.bench and not any(gate.backend_ops for gate in spec.gates):
        yield ("bench",), "missing: with neither bench nor a parity gate there is nothing to do"


def _recipes(spec: ExperimentSpec) -> Iterator[Finding]:
    for name, model in spec.models.items():
        if model.synthetic:
            try:
                synth.check(model.synthetic.record())
            except SpecError as error:
                yield ("models", name, "synthetic"), error.message


def _engaged(spec: ExperimentSpec) -> Iterator[Finding]:
    measured = {entry.kind[0] for entry in spec.bench or []}
    for place, gate in enumerate(spec.gates):
        if gate.engaged and not measured.intersection(gate.engaged.tools):
            text = f"none of its tools is in bench, which has {', '.join(sorted(measured)) or 'nothing'}"
            yield ("gates", place, "engaged"), f"{text}: a gate without evidence"


def _secrets(spec: ExperimentSpec) -> Iterator[Finding]:
    gates = (("gates", place, *gate.kind) for place, gate in enumerate(spec.gates) if gate.backend_ops)
    bench = (("bench", place, *entry.kind) for place, entry in enumerate(spec.bench or []))
    text = "looks like a secret, and a spec is recorded: it belongs to the host's env in hosts.yaml"
    yield from ((("env", name), text) for name in filter(SECRET.fullmatch, spec.env))
    for part, place, kind, body in (*gates, *bench):
        yield from (((part, place, kind, "env", name), text) for name in filter(SECRET.fullmatch, body.env))


# -- one bench entry --------------------------------------------------------------------------------------------------


def _model(spec: ExperimentSpec, tool: str, body: Any) -> Iterator[Finding]:
    name = getattr(body, "model", None)
    if name is not None and name not in spec.models:
        yield ("model",), f"no model {shown(name)} under models{nearest(name, spec.models)}"


def _sizes(spec: ExperimentSpec, tool: str, body: Any) -> Iterator[Finding]:
    if isinstance(body, LlamaBenchSpec) and not body.n_prompt and not body.n_gen:
        yield (), "measures nothing: give n_prompt, n_gen or both"


def _args(spec: ExperimentSpec, tool: str, body: Any) -> Iterator[Finding]:
    args = getattr(body, "args", [])
    for place, why in flags.refused(tool, args).items():
        yield ("args", place), f"{shown(args[place])} {why}"


def _exclude(spec: ExperimentSpec, tool: str, body: Any) -> Iterator[Finding]:
    """Refuse what excludes nothing: a typo there would measure what was to be left out."""
    axes = {name: set(values) for name, values in body.axes().items() if values}
    for place, entry in enumerate(body.exclude):
        for name, value in entry.items():
            if name not in axes:
                yield ("exclude", place, name), f"is not varied in this entry{nearest(name, axes)}"
            elif value not in axes[name]:
                yield ("exclude", place, name), f"excludes nothing: {shown(value)} is not among {name}'s values"
        if tool == "llama-bench" and {"n_prompt", "n_gen"} <= entry.keys():
            yield ("exclude", place), "excludes nothing: a cell has n_prompt or n_gen, never both"


_ENTRY_RULES: tuple[Callable[[ExperimentSpec, str, Any], Iterator[Finding]], ...] = (_model, _sizes, _args, _exclude)


def _size(bench: list[BenchSpec]) -> Iterator[Finding]:
    total = 0
    for place, entry in enumerate(bench):
        total += _cells(entry)
        if total > MAX_CELLS:
            yield ("bench", place), f"makes more than {MAX_CELLS:,} cells: measure less, or split the experiment"
            return


def _cells(entry: BenchSpec) -> int:
    lengths = {name: len(values) for name, values in entry.kind[1].axes().items()}
    if entry.llama_bench:
        sizes = lengths.pop("n_prompt") + lengths.pop("n_gen")
        return sizes * math.prod(lengths.values())
    return math.prod(lengths.values())
