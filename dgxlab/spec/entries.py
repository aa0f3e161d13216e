"""Gate and bench entries of a spec file: gates become their records of dgxlab.model, benches are turned into theirs.

Most are made of what the tools declare. A string under each field is its help in editors. What spans several fields is
in checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, create_model

from dgxlab import model
from dgxlab.spec.fields import (
    Cases,
    Counted,
    Env,
    Exclude,
    Keys,
    Line,
    Many,
    Maybe,
    Name,
    OneKind,
    Op,
    Seconds,
    Strict,
    Whole,
)
from dgxlab.tools import BENCHES, CHECKS, Benchmark, Checker, Key

# -- benchmarks -------------------------------------------------------------------------------------------------------


class EntrySpec(Strict):
    """An entry of a tool, whose keys and axes are the fields."""

    tool: ClassVar[Benchmark]

    exclude: Exclude = Field(default_factory=list)
    """Cells to leave out: those that have all the values of an entry."""
    env: Env = Field(default_factory=dict)
    """Environment of this entry, besides the spec's."""

    def axes(self) -> dict[str, list[Any]]:
        """Return what is varied, sizes included."""
        varied: dict[str, list[Any]] = {}
        for name in self.tool.keys:
            value = getattr(self, name)
            if isinstance(value, dict):
                varied |= value
            elif isinstance(value, list):
                varied[name] = value
        return varied | {name: list(values) for name, values in self._settings().items()}

    def _settings(self) -> dict[str, tuple[Any, ...]]:
        return {name: tuple(values) for name in self.tool.axes if (values := getattr(self, name)) is not None}

    def record(self) -> model.Bench:
        """Return the bench entry."""
        fields = {name: _frozen(getattr(self, name)) for name in type(self).model_fields if name not in self.tool.axes}
        entry: model.Bench = self.tool.entry(**fields, **({"axes": self._settings()} if self.tool.axes else {}))
        return entry


def _frozen(value: Any) -> Any:
    """Return a list as a tuple, those in a map too."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return {key: _frozen(each) for key, each in value.items()} if isinstance(value, dict) else value


def _declared(base: type[Strict], name: str, about: str, keys: Mapping[str, Key], limit_s: float) -> Any:
    """Return the model of what a tool declares; the types of its keys are in the words of `fields`."""
    fields: dict[str, Any] = {}
    for key_name, key in keys.items():
        if key.default is None:
            fields[key_name] = (key.kind, Field(description=key.about))
        elif key.default == "":
            fields[key_name] = (f"Maybe[{key.kind}]", Field(None, description=key.about))
        elif key.default in ([], {}):  # an empty default says nothing to editors
            fields[key_name] = (key.kind, Field(default_factory=type(key.default), description=key.about))
        else:
            fields[key_name] = (key.kind, Field(key.default, description=key.about))
    fields["limit_s"] = (Seconds, Field(limit_s, description="Longest time of one launch, in seconds."))
    return create_model(name, __base__=base, __doc__=about, __module__="dgxlab.spec.fields", **fields)


def _entry(bench: Benchmark) -> type[EntrySpec]:
    axes = {name: Key(f"Many[{axis.kind}]", axis.about, default="") for name, axis in bench.axes.items()}
    args = "Further raw arguments, the same for every cell; flags that have a key of their own are refused."
    keys = {**bench.keys, **({"args": Key("Args", args, default=[])} if axes else {}), **axes}
    name = f"{bench.name.title().replace('-', '')}Spec"
    spec: type[EntrySpec] = _declared(EntrySpec, name, bench.about, keys, bench.entry.limit_s)
    spec.tool = bench
    return spec


ENTRIES = {name: _entry(bench) for name, bench in BENCHES.items()}


class _Bench(OneKind):
    """One benchmark; its lists expand to a matrix of cells."""

    def record(self) -> model.Bench:
        """Return the record of the one kind that is there."""
        bench: model.Bench = self.kind[1].record()
        return bench


if TYPE_CHECKING:
    BenchSpec = _Bench
    Tool = str
else:
    kinds = {name.replace("-", "_"): (Maybe[spec], Field(None, alias=name)) for name, spec in ENTRIES.items()}
    BenchSpec = create_model("BenchSpec", __base__=_Bench, __doc__=_Bench.__doc__, **kinds)
    Tool = Literal[tuple(BENCHES)]


# -- gates ------------------------------------------------------------------------------------------------------------


class CheckSpec(Strict):
    """A gate of a tool, whose keys are the fields."""

    env: Env = Field(default_factory=dict)
    """Environment of this gate, besides the spec's."""


def _check(check: Checker) -> Any:
    """Return the type of a gate's map, which becomes the record; what is left out is the record's own default."""
    spec = _declared(CheckSpec, f"{check.gate.__name__}Spec", check.about, check.keys, check.gate.limit_s)

    def record(given: CheckSpec) -> model.Check:
        # not exclude_none, for which a null in against is none too
        gate: model.Check = check.gate(
            **{name: value for name, value in given.model_dump().items() if value is not None}
        )
        return gate

    return Annotated[spec, AfterValidator(record)]


ParityGateSpec = Annotated[
    model.ParityGate,
    Keys(
        "overridden",
        op=Op,
        backend=Name,
        expect=Annotated[Counted | None, AfterValidator(lambda text: text and model.Expectation.parse(text))],
        unsupported=Whole | None,
        env=Env,
        limit_s=Seconds,
        cases=Annotated[Cases | None, AfterValidator(lambda cases: cases or "")],
        engaged=Line,
    ),
]

EngagedGateSpec = Annotated[model.EngagedGate, Keys(stderr=Line, tools=Annotated[Many[Tool], AfterValidator(tuple)])]


class _Gate(OneKind):
    """A correctness check before anything is measured."""

    backend_ops: Maybe[ParityGateSpec] = Field(default=None, alias="backend-ops")
    engaged: Maybe[EngagedGateSpec] = None


if TYPE_CHECKING:
    GateSpec = _Gate
else:
    kinds = {check.gate.name: (Maybe[_check(check)], None) for check in CHECKS.values()}
    GateSpec = create_model("GateSpec", __base__=_Gate, __doc__=_Gate.__doc__, **kinds)
