"""The shape of a spec file, as strict pydantic models; a string under each field is its help in editors."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from dgxlab import model
from dgxlab.spec.entries import BenchSpec, GateSpec
from dgxlab.spec.fields import (
    Arch,
    CMakeKey,
    CMakeValue,
    Commit,
    Count,
    Env,
    Few,
    Line,
    Many,
    Maybe,
    ModelPath,
    Name,
    OneKind,
    Quant,
    Share,
    Source,
    Strict,
    Whole,
    Width,
)

SOURCES = ("https://github.com/ggml-org/llama.cpp", "pypi:llama-cpp-python==0.3.30")
"""Where a pin is looked for when a spec does not say."""


class LlamaCpp(Strict):
    """Which llama.cpp is built."""

    pin: Commit
    """The full commit id, 40 hex digits; quote it when it could be read as a number."""
    sources: Many[Source] = Field(default_factory=lambda: list(SOURCES))
    """Where the pin is looked for, in order: git URLs, clones, sdists as pypi:llama-cpp-python==0.3.30."""


class SyntheticSpec(Strict):
    """A model written from a fixed seed: good for shapes and throughput, not for quality."""

    arch: Arch = "llama"
    """Architecture, by llama.cpp's name."""
    n_layer: Annotated[int, Field(ge=1, le=1000)] = 2
    """Number of layers."""
    n_embd: Width = 256
    """Width; a multiple of n_head and of the quantisation's block."""
    n_ff: Width = 1024
    """Width of the feed-forward part; a multiple of the quantisation's block."""
    n_head: Width = 4
    """Attention heads; a multiple of n_head_kv."""
    n_head_kv: Width = 4
    """Key and value heads."""
    n_vocab: Width = 1000
    """Size of the vocabulary, which has no text unless vocab names one."""
    n_ctx_train: Count = 4096
    """Context length that the model states, in tokens."""
    seed: Whole = 0
    """Seed of the weights."""
    quant: Quant = "Q4_0"
    """A type that llama-quantize knows, F16, or NVFP4 for the matrices of layers and F16 for the others."""
    pure: bool = True
    """Every tensor in quant (llama-quantize --pure); of no meaning for NVFP4 and F16."""
    vocab: Maybe[Name] = None
    """Tokenizer of the pin's models/ggml-vocab-NAME.gguf, for gates on text: llama-spm, with n_vocab 32000."""
    scales: bool = False
    """Give every matrix of a layer a scale of its own, as models published in NVFP4 have."""

    def record(self, pin: str) -> model.SyntheticModel:
        """Return the recipe; a vocabulary is the pin's."""
        made = model.SyntheticModel(**self.model_dump(exclude={"vocab"}))
        return replace(made, vocab=self.vocab, vocab_pin=pin) if self.vocab else made


class DerivedSpec(Strict):
    """A synthetic model that was quantised, in another type: the exact values of its blocks as F32."""

    of: Name
    """The name of a synthetic model."""
    quant: Quant = "F32"
    """A type that llama-quantize knows; F32 keeps every value."""


class ModelSpec(OneKind):
    """A model: a GGUF file that is on the host, a recipe, or what is made from a model of one."""

    path: Maybe[ModelPath] = None
    """A GGUF file on the host, as /... or ~/..."""
    synthetic: Maybe[SyntheticSpec] = None
    """A model to write; every key has a default."""

    derived: Maybe[DerivedSpec] = None
    """A model to make from a synthetic one."""


class SessionSpec(Strict):
    """How an A/B session is run."""

    effect: Maybe[Share] = None
    """The effect that is to be found, as in 2% or 0.02: each chain's burn-in decides how many cycles that takes. 2%."""
    cycles: Maybe[Annotated[int, Field(ge=2, le=100)]] = None
    """Candidate runs of a chain, fixed by hand, in place of effect."""
    thermal: Literal["hot", "cold"] = "hot"
    """hot: steady state; cold: each run waits for a temperature."""
    drift_limit: Annotated[float, Field(gt=0, le=0.5)] = 0.05
    """Largest distance of two neighbouring baselines that is no step, as a fraction."""
    pin: bool = False
    """Pin every run to as many processors as it has threads, each of a core of its own where there are enough."""
    block_minutes: Maybe[Annotated[float, Field(gt=0, le=1440)]] = None
    """Run an arm for so long before each run that counts: each arm is then at its own temperature."""


class ExperimentSpec(Strict):
    """One arm: a build of llama.cpp and what to measure on it. A file that extends another names only what differs."""

    model_config = ConfigDict(title="dgxlab experiment")

    extends: Maybe[Line] = None
    """The spec file that this one starts from, relative to this file. Maps merge, gates append, other lists replace."""
    name: Name
    """What results and reports call it; without it the file's name. Never inherited."""
    hypothesis: str = ""
    """What this arm is to show, in a sentence. Never inherited."""
    host: Name = "local"
    """A name in hosts.yaml; local needs no entry there."""
    llama_cpp: LlamaCpp
    """Which llama.cpp is built."""
    series: Few[Name] = Field(default_factory=list)
    """Patch series of patches/ to apply, in order."""
    cmake: dict[CMakeKey, CMakeValue] = Field(default_factory=dict)
    """CMake definitions; true and false become ON and OFF."""
    env: Env = Field(default_factory=dict)
    """Environment of every gate and benchmark; values are text."""
    models: dict[Name, ModelSpec] = Field(default_factory=dict)
    """Models by the names that bench entries use."""
    gates: list[GateSpec] = Field(default_factory=list)
    """Correctness checks. They append to inherited ones; the same gate stated again refines the inherited one."""
    bench: Maybe[Annotated[list[BenchSpec], Field(min_length=1)]] = None
    """What to measure, in order."""
    session: SessionSpec = Field(default_factory=SessionSpec)
    """How an A/B session is run."""

    def record(self, path: str, root: str) -> model.Experiment:
        """Return the experiment.

        Args:
            path: The spec file, absolute.
            root: The project folder, absolute.
        """
        return model.Experiment(
            name=self.name,
            pin=self.llama_cpp.pin,
            sources=tuple(self.llama_cpp.sources),
            path=path,
            root=root,
            host=self.host,
            hypothesis=self.hypothesis,
            series=tuple(self.series),
            cmake=dict(self.cmake),
            env=dict(self.env),
            models=self.model_records(),
            gates=tuple(gate.record() for gate in self.gates),
            bench=tuple(entry.record() for entry in self.bench or ()),
            session=model.Session(**self.session.model_dump(exclude_none=True)),
        )

    def model_records(self) -> dict[str, model.Model]:
        """Return the models; one that is derived of no synthetic model is left out, and refused elsewhere."""
        pin = self.llama_cpp.pin
        recipes = {name: spec.synthetic.record(pin) for name, spec in self.models.items() if spec.synthetic}
        found: dict[str, model.Model] = {}
        for name, spec in self.models.items():
            if spec.path is not None:
                found[name] = model.FileModel(spec.path)
            elif spec.derived and spec.derived.of in recipes:
                found[name] = model.DerivedModel(recipes[spec.derived.of], spec.derived.quant)
            elif spec.synthetic:
                found[name] = recipes[name]
        return found
