"""The shape of a spec file, as strict pydantic models; a string under each field is its help in editors.

A map becomes a record of dgxlab.model: where the record's fields are the keys, the record itself is declared here, with
`Keys`, and its own strings are the help.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.json_schema import GenerateJsonSchema

from dgxlab import model
from dgxlab.spec.entries import BenchSpec, GateSpec
from dgxlab.spec.fields import (
    CMakeKey,
    CMakeValue,
    Commit,
    Env,
    Few,
    Keys,
    Line,
    Many,
    Maybe,
    ModelPath,
    Name,
    OneKind,
    Share,
    Source,
    Strict,
)

SOURCES = ("https://github.com/ggml-org/llama.cpp", "pypi:llama-cpp-python==0.3.30")
"""Where a pin is looked for when a spec does not say."""

Recipe = Annotated[model.SyntheticModel, Keys("vocab_pin")]

SessionSpec = Annotated[
    model.Session,
    Keys(
        "min_effect",
        effect=Share,
        cycles=Annotated[int, Field(ge=2, le=100)],
        thermal=Literal["hot", "cold"],
        drift_limit=Annotated[float, Field(gt=0, le=0.5)],
        block_minutes=Annotated[float, Field(gt=0, le=1440)],
    ),
]


class LlamaCpp(Strict):
    """Which llama.cpp is built."""

    pin: Commit
    """The full commit id, 40 hex digits; quote it when it could be read as a number."""
    sources: Many[Source] = Field(default_factory=lambda: list(SOURCES))
    """Where the pin is looked for, in order: git URLs, clones, sdists as pypi:llama-cpp-python==0.3.30."""


class DerivedSpec(Strict):
    """A synthetic model that was quantised, in another type: the exact values of its blocks as F32."""

    of: Name
    """The name of a synthetic model."""
    quant: model.Quant = "F32"
    """A type that llama-quantize knows; F32 keeps every value."""


class ModelSpec(OneKind):
    """A model: a GGUF file that is on the host, a recipe, or what is made from a model of one."""

    path: Maybe[ModelPath] = None
    """A GGUF file on the host, as /... or ~/..."""
    synthetic: Maybe[Recipe] = None
    """A model to write; every key has a default."""

    derived: Maybe[DerivedSpec] = None
    """A model to make from a synthetic one."""


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
    session: SessionSpec = Field(default_factory=model.Session)
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
            cmake=self.cmake,
            env=self.env,
            models=self.model_records(),
            gates=tuple(gate.kind[1] for gate in self.gates),
            bench=tuple(entry.record() for entry in self.bench or ()),
            session=self.session,
        )

    def model_records(self) -> dict[str, model.Model]:
        """Return the models; one that is derived of no synthetic model is left out, and refused elsewhere."""
        recipes = {
            name: replace(spec.synthetic, vocab_pin=self.llama_cpp.pin if spec.synthetic.vocab else "")
            for name, spec in self.models.items()
            if spec.synthetic
        }
        records: dict[str, model.Model] = {}
        for name, spec in self.models.items():
            if spec.path is not None:
                records[name] = model.FileModel(spec.path)
            elif spec.derived and spec.derived.of in recipes:
                records[name] = model.DerivedModel(recipes[spec.derived.of], spec.derived.quant)
            elif spec.synthetic:
                records[name] = recipes[name]
        return records


class SpecSchema(GenerateJsonSchema):
    """Leaves out what misleads in an editor, and is as strict about the keys of open maps as `load` is."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False: a key is its own title."""
        return False

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        """Allow no keys but those of the pattern."""
        described = super().dict_schema(schema)
        return {**described, "additionalProperties": False} if "patternProperties" in described else described

    def default_schema(self, schema: Any) -> dict[str, Any]:
        """Keep a default that a file could say: that of a key to be left out may be none of its values."""
        described = super().default_schema(schema)
        default = described.get("default")
        below = isinstance(default, (int, float)) and (
            default < described.get("minimum", default) or default <= described.get("exclusiveMinimum", default - 1)
        )
        if default in (None, "") or below:
            described.pop("default", None)
        return described
