"""The shape of a spec file, as strict pydantic models; a string under each field is its help in editors.

A map is decoded to a record of dgxlab.model. If the record's fields are the keys, the record itself is used here, with
`Keys`, and its own strings are the help. Most gates and benchmarks are built from the tools' declarations. Rules
between fields are in checks.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product
from textwrap import dedent
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, create_model
from pydantic.json_schema import GenerateJsonSchema

from dgxlab import model
from dgxlab.spec import fields
from dgxlab.spec.fields import Keys, Many, Maybe, OneKind, Strict
from dgxlab.tools import BENCHES, CHECKS, Benchmark, Key, keys_of

_SOURCES = (model.UPSTREAM, "pypi:llama-cpp-python==0.3.30")
"""Default sources of a pin."""

# -- what tools declare -----------------------------------------------------------------------------------------------


class _EntrySpec(Strict):
    """An entry of a tool, whose keys and axes are the fields."""

    exclude: fields.Exclude = Field(
        default_factory=list, description="Cells to leave out: those that have all the values of an entry."
    )
    env: fields.Env = Field(default_factory=dict, description="Environment of this entry, besides the spec's.")


class _CheckSpec(Strict):
    """A gate of a tool, whose keys are the fields."""

    env: fields.Env = Field(default_factory=dict, description="Environment of this gate, besides the spec's.")


def _declared(base: type[Strict], name: str, record: Any, keys: Mapping[str, Key], axes: Collection[str] = ()) -> Any:
    """Return the type of a map that is decoded to a tool's record; missing keys get the record's defaults.

    The keys name types of `fields`; those of `axes` become the record's `axes`.
    """
    members: dict[str, Any] = {}
    for key_name, key in keys.items():
        if key.must:
            members[key_name] = (key.kind, Field(description=key.about))
        elif key.default in (None, ""):
            members[key_name] = (f"Maybe[{key.kind}]", Field(None, description=key.about))
        else:
            members[key_name] = (key.kind, Field(key.default, description=key.about))
    members["limit_s"] = (fields.Seconds, Field(record.limit_s, description="Longest time of one launch, in seconds."))

    def decoded(given: Strict) -> Any:
        values = {key_name: _frozen(value) for key_name, value in given if value is not None}
        varied = {axis: values.pop(axis) for axis in axes if axis in values}
        return record(**values, axes=varied) if axes else record(**values)

    spec = create_model(name, __base__=base, __doc__=record.__doc__, __module__=fields.__name__, **members)
    return Annotated[spec, AfterValidator(decoded)]


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return {key: _frozen(each) for key, each in value.items()} if isinstance(value, dict) else value


def _entry(bench: type[Benchmark]) -> Any:
    axes = {name: Key(f"Many[{axis.kind}]", axis.about, default="") for name, axis in bench.axis_keys.items()}
    args = "Further raw arguments, the same for every cell; flags that have a key of their own are refused."
    keys = {**keys_of(bench), **({"args": Key("Args", args, default=[])} if axes else {}), **axes}
    return _declared(_EntrySpec, f"{bench.name.title().replace('-', '')}Spec", bench, keys, axes)


def _check(check: type[model.Check]) -> Any:
    return _declared(_CheckSpec, f"{check.__name__}Spec", check, keys_of(check))


# mypy cannot see types that are made at run time
_maybe: Any = Maybe
_many: Any = Many
_literal: Any = Literal

_benches: dict[str, Any] = {
    name.replace("-", "_"): (_maybe[_entry(bench)], Field(None, alias=name)) for name, bench in BENCHES.items()
}
_about = "One benchmark; its lists expand to a matrix of cells."
BenchSpec: Any = create_model("BenchSpec", __base__=OneKind, __doc__=_about, **_benches)

_ParityGateSpec = Annotated[
    model.ParityGate,
    Keys(
        "overridden",
        op=fields.Op,
        backend=fields.Name,
        expect=fields.Counted | None,
        unsupported=fields.Whole | None,
        env=fields.Env,
        limit_s=fields.Seconds,
        cases=Annotated[fields.Cases | None, AfterValidator(lambda cases: cases or "")],
        engaged=fields.Line,
        where=Annotated[dict[fields.Column, _many[fields.Param]], AfterValidator(_frozen)],
    ),
]
_EngagedGateSpec = Annotated[
    model.EngagedGate, Keys(stderr=fields.Line, tools=Annotated[_many[_literal[tuple(BENCHES)]], AfterValidator(tuple)])
]
_gates: dict[str, Any] = {
    "backend_ops": (_maybe[_ParityGateSpec], Field(None, alias="backend-ops")),
    "engaged": (_maybe[_EngagedGateSpec], None),
    **{name: (_maybe[_check(check)], None) for name, check in CHECKS.items()},
}
_about = "A correctness check before anything is measured."
GateSpec: Any = create_model("GateSpec", __base__=OneKind, __doc__=_about, **_gates)

# -- the other parts --------------------------------------------------------------------------------------------------

Recipe = Annotated[model.SyntheticModel, Keys("vocab_pin")]
SessionSpec = Annotated[
    model.Session,
    Keys(
        "min_effect",
        effect=fields.Share,
        cycles=Annotated[int, Field(ge=2, le=100)],
        thermal=Literal["hot", "cold"],
        drift_limit=fields.Half,
        block_minutes=Annotated[float, Field(gt=0, le=1440)],
    ),
]


class LlamaCpp(Strict):
    """Which llama.cpp is built."""

    pin: fields.Commit
    """The full commit id, 40 hex digits, as `dgxlab pin b6900` prints it; quote one that could be a number."""
    sources: Many[fields.Source] = Field(default_factory=lambda: list(_SOURCES))
    """Where the pin is looked for, in order: git URLs, clones, sdists as pypi:llama-cpp-python==0.3.30."""


class DerivedSpec(Strict):
    """A model in another type, made from any other model by the build's own llama-quantize."""

    of: fields.Name
    """The name of the model to make it from: a file, a recipe, or another derived one."""
    quant: model.Quant = "F32"
    """A type that llama-quantize knows, or NVFP4 as in synthetic; F32 keeps every value."""
    pure: bool = False
    """Every tensor in quant (llama-quantize --pure), without the mixture that Q4_K_M and others are."""
    imatrix: Maybe[fields.ModelPath] = None
    """A file of llama-imatrix on the host, as /... or ~/...; types below 3 bits need one."""
    allow_requantize: bool = False
    """Also from a quantised source; the model is marked: good for speed, not for quality."""


class ModelSpec(OneKind):
    """A model: a GGUF file that is on the host, a recipe, or what is made from another model."""

    path: Maybe[fields.ModelPath] = None
    """A GGUF file on the host, as /... or ~/..."""
    synthetic: Maybe[Recipe] = None
    """A model to write; every key has a default."""

    derived: Maybe[DerivedSpec] = None
    """A model to make from another one, in another type."""


class MatrixSpec(Strict):
    """Values to combine: each combination is an experiment of its own, named after the file and its values."""

    env: dict[fields.EnvKey, Many[str]] = Field(default_factory=dict)
    """Variables, each with a list of values."""
    cmake: dict[fields.CMakeKey, Many[fields.CMakeValue]] = Field(default_factory=dict)
    """CMake definitions, each with a list of values."""

    def arms(self) -> Iterator[list[tuple[str, str, str]]]:
        """Yield each combination as (env or cmake, key, value); the last key varies first."""
        axes = [
            [(part, key, value) for value in values]
            for part, keys in (("env", self.env), ("cmake", self.cmake))
            for key, values in keys.items()
        ]
        yield from map(list, product(*axes))


class ExperimentSpec(Strict):
    """One arm: a build of llama.cpp and what to measure on it. A file that extends another names only what differs."""

    model_config = ConfigDict(title="dgxlab experiment")

    extends: Maybe[fields.Line] = None
    """The spec file that this one starts from, relative to this file. Maps merge, gates append, other lists replace."""
    name: fields.Name
    """What results and reports call it, the file's name; only outside experiments/ may it be another. Not inherited."""
    hypothesis: str = ""
    """What this arm is to show, in a sentence. Never inherited."""
    host: fields.HostName = "local"
    """A name in hosts.yaml; local needs no entry there."""
    llama_cpp: LlamaCpp
    """Which llama.cpp is built."""
    series: fields.Few[fields.SeriesName] = Field(default_factory=list)
    """Patch series of patches/ to apply, in order; `name:1-2,4` applies some of its patches alone."""
    cmake: dict[fields.CMakeKey, fields.CMakeValue] = Field(default_factory=dict)
    """CMake definitions; true and false become ON and OFF."""
    env: fields.Env = Field(default_factory=dict)
    """Environment of every gate and benchmark; values are text."""
    matrix: Maybe[MatrixSpec] = None
    """A sweep: lists of values for env and cmake, an experiment for each combination."""
    models: dict[fields.Name, ModelSpec] = Field(default_factory=dict)
    """Models by the names that bench entries use."""
    gates: list[GateSpec] = Field(default_factory=list)
    """Correctness checks. They append to inherited ones; the same gate stated again refines the inherited one."""
    bench: Maybe[Annotated[list[BenchSpec], Field(min_length=1)]] = None
    """What to measure, in order."""
    holdout: Maybe[Annotated[list[BenchSpec], Field(min_length=1)]] = None
    """Entries as in bench, of other cells, which `dgxlab try` measures for a promotion alone and never shows."""
    session: SessionSpec = Field(default_factory=model.Session)
    """How an A/B session is run."""

    def record(self, path: str, root: str) -> model.Experiment:
        """Return the experiment; `path` is the spec file and `root` the project folder, both absolute."""
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
            bench=tuple(entry.kind[1] for entry in self.bench or ()),
            session=self.session,
            holdout=tuple(entry.kind[1] for entry in self.holdout or ()),
        )

    def model_records(self) -> dict[str, model.Model]:
        """Return the models by name; those with a missing or circular source are left out, and refused by `checks`."""
        return {name: record for name in self.models if (record := self._model(name, ()))}

    def _model(self, name: str, derived: tuple[str, ...]) -> model.Model | None:
        """Return a model, None without a source; `derived` are the models that are made from it."""
        if name not in self.models or name in derived:
            return None
        kind, spec = self.models[name].kind
        if kind == "path":
            return model.FileModel(spec)
        if isinstance(spec, model.SyntheticModel):
            return replace(spec, vocab_pin=self.llama_cpp.pin if spec.vocab else "")
        source = self._model(spec.of, (*derived, name))
        how = {key: value for key, value in spec if key != "of" and value is not None}
        return model.DerivedModel(source, **how) if source else None


def _described(schema: dict[str, Any], record: type) -> dict[str, Any]:
    """Add the strings under a record's fields; pydantic would read all sources for them at each command."""
    keys = schema["properties"]
    with suppress(OSError):  # a type that was made at run time has no source, and its descriptions already
        nodes = ast.walk(ast.parse(dedent(inspect.getsource(record))))
        definition = next(node for node in nodes if isinstance(node, ast.ClassDef))
        for field, text in pairwise(definition.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(about))) if name in keys:
                    keys[name].setdefault("description", inspect.cleandoc(about))
    return schema


class SpecSchema(GenerateJsonSchema):
    """Makes the JSON Schema of a spec for editors: as strict as `load`, and without what would mislead them."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        """Describe the fields."""
        return _described(super().model_schema(schema), schema["cls"])

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        """Describe the fields."""
        return _described(super().dataclass_schema(schema), schema["cls"])

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False: a key is its own title."""
        return False

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        """Allow only keys that match the pattern, if there is one."""
        described = super().dict_schema(schema)
        return described | ({"additionalProperties": False} if "patternProperties" in described else {})

    def default_schema(self, schema: Any) -> dict[str, Any]:
        """Drop a default that only means "left out": it may be no valid value."""
        described = super().default_schema(schema)
        default = described.get("default")
        below = isinstance(default, (int, float)) and (
            default < described.get("minimum", default) or default <= described.get("exclusiveMinimum", default - 1)
        )
        if default in (None, "", [], {}) or below:
            described.pop("default", None)
        return described
