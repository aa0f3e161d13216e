"""What must hold between the fields of a spec: names exist, gates have evidence, matrices measure something."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dgxlab import synth
from dgxlab.errors import SpecError
from dgxlab.model import GPU_BACKENDS, DerivedModel, Model, SyntheticModel, environments, gpu_backends
from dgxlab.spec import flags
from dgxlab.spec.entries import BenchSpec, LlamaBenchSpec
from dgxlab.spec.fields import shell_text
from dgxlab.spec.models import ExperimentSpec
from dgxlab.spec.nodes import Loc, nearest, shown

MAX_CELLS = 100_000
"""Cells of one experiment; ten times what a plan has to stand."""

SECRET = re.compile(r"(.*_)?(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(API|ACCESS|PRIVATE)_KEY)")
"""Names of variables whose values are nobody's business: what a spec says is recorded, printed and kept in git."""
FEWEST_TOKENS = 100
"""Fewer than so many are no statistics for llama-perplexity, which then prints none and exits 0."""

Finding = tuple[Loc, str]
"""Where, and what is wrong."""


def check(spec: ExperimentSpec) -> Iterator[Finding]:
    """Yield everything that is wrong with a spec whose fields are valid one by one."""
    yield from _something_to_do(spec)
    yield from _recipes(spec)
    yield from _engaged(spec)
    yield from _secrets(spec)
    yield from _compiler_flags(spec)
    yield from _gpu_builds(spec)
    yield from _on_models(spec)
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


CUDA_KEYS = "GGML_CUDA: true and CMAKE_CUDA_ARCHITECTURES"


def _gpu_builds(spec: ExperimentSpec) -> Iterator[Finding]:
    """Refuse what needs a GPU backend that is not built: llama.cpp would measure the processor without a word."""
    wrong = [key for key in GPU_BACKENDS if spec.cmake.get(key, "ON") not in ("ON", "OFF")]
    yield from ((("cmake", key), f"must be true or false, not {shown(spec.cmake[key])}") for key in wrong)
    built = gpu_backends(spec.cmake)
    for part, entries in (("gates", spec.gates), ("bench", spec.bench or [])):
        for place, entry in enumerate(entries):
            kind, body = entry.kind
            layers = max(getattr(body, "n_gpu_layers", None) or [0])
            if layers > 0 and not built:
                text = f"no GPU backend is built, and the processor would be measured: cmake needs {CUDA_KEYS}"
                yield (part, place, kind, "n_gpu_layers"), text
            name = getattr(body, "backend", "")
            for key, backend in GPU_BACKENDS.items():
                if name.rstrip("0123456789") == backend and backend not in built:
                    needed = CUDA_KEYS if key == "GGML_CUDA" else f"{key}: true"
                    yield (part, place, kind, "backend"), f"{name} is not built: cmake needs {needed}"


def _something_to_do(spec: ExperimentSpec) -> Iterator[Finding]:
    if not spec.bench and all(gate.engaged for gate in spec.gates):
        yield ("bench",), "missing: with neither bench nor a gate that runs by itself there is nothing to do"


def _recipes(spec: ExperimentSpec) -> Iterator[Finding]:
    for name, model in spec.models.items():
        made = model.derived and spec.models.get(model.derived.of)
        recipe = model.synthetic or (made.synthetic if made else None)
        if model.derived and not recipe:
            known = [other for other, found in spec.models.items() if found.synthetic]
            text = f"no synthetic model {shown(model.derived.of)} under models{nearest(model.derived.of, known)}"
            yield ("models", name, "derived", "of"), text
        if recipe:
            try:
                synth.check(replace(recipe, quant=model.derived.quant) if model.derived else recipe)
            except SpecError as error:
                yield ("models", name, model.kind[0]), error.message


def _engaged(spec: ExperimentSpec) -> Iterator[Finding]:
    measured = {entry.kind[0] for entry in spec.bench or []}
    for place, gate in enumerate(spec.gates):
        if gate.engaged and not measured.intersection(gate.engaged.tools):
            text = f"none of its tools is in bench, which has {', '.join(sorted(measured)) or 'nothing'}"
            yield ("gates", place, "engaged"), f"{text}: a gate without evidence"


def _secrets(spec: ExperimentSpec) -> Iterator[Finding]:
    gates = (("gates", place, *gate.kind) for place, gate in enumerate(spec.gates) if not gate.engaged)
    bench = (("bench", place, *entry.kind) for place, entry in enumerate(spec.bench or []))
    text = "looks like a secret, and a spec is recorded: it belongs to the host's env in hosts.yaml"
    yield from ((("env", name), text) for name in filter(SECRET.fullmatch, spec.env))
    for part, place, kind, body in (*gates, *bench):
        for key in ("env", "against"):
            names = filter(SECRET.fullmatch, getattr(body, key, {}))
            yield from (((part, place, kind, key, name), text) for name in names)


def _on_models(spec: ExperimentSpec) -> Iterator[Finding]:
    """Check the gates that run a whole model."""
    records = spec.model_records()
    for place, gate in enumerate(spec.gates):
        kind, body = gate.kind
        if kind not in ("greedy", "perplexity"):
            continue
        for key in ("model", "reference"):
            name = getattr(body, key, None)
            if name is None:
                continue
            if name not in spec.models:
                yield ("gates", place, kind, key), f"no model {shown(name)} under models{nearest(name, spec.models)}"
            elif (found := records.get(name)) and not has_text(found):
                yield ("gates", place, kind, key), f"model {name} has no vocabulary: give its recipe vocab: llama-spm"
        for text in _evidence(spec, kind, body):
            yield ("gates", place, kind), text


def has_text(found: Model) -> bool:
    """Tell whether a model has a tokenizer, as far as the spec knows."""
    recipe = found.source if isinstance(found, DerivedModel) else found
    return not isinstance(recipe, SyntheticModel) or bool(recipe.vocab)


def _evidence(spec: ExperimentSpec, kind: str, body: Any) -> Iterator[str]:
    """Yield why a gate on a model could only pass, or never."""
    arm, other = environments(body.record(), spec.env)
    if body.against and arm == other:
        yield "against changes nothing: the arm's environment is that already"
    if kind == "greedy":
        if not body.against and body.expect is None:
            yield "compares with nothing: give against, expect or both"
        return
    if body.kld_ratio_at_most is not None and not body.against:
        yield "kld_ratio_at_most needs against, the environment that the arm is held against"
    if body.against and body.kld_ratio_at_most is None:
        yield "against is of no use without kld_ratio_at_most"
    if (body.kld_ratio_at_most, body.kld_at_most, body.ppl_ratio_at_most) == (None, None, None):
        yield "has no limit: give kld_ratio_at_most, kld_at_most or ppl_ratio_at_most"
    if (counted := (body.n_ctx - 1 - body.n_ctx // 2) * body.chunks) < FEWEST_TOKENS:
        yield f"counts {counted} tokens and llama-perplexity wants {FEWEST_TOKENS}: raise chunks or n_ctx"


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
