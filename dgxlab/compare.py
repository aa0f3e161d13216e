"""Compare two experiments: the differences of their specs, and the pairs of launches to compare.

A candidate may differ from its baseline in its build and its arguments. Cells, models, session and host must agree, or
they could cause the measured difference. An axis with one value is an argument of the tool, not part of the matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from dgxlab.errors import AGAIN, SpecError, command, edit
from dgxlab.model import Bench, Cell, EngagedGate, Experiment, Gate, ParityGate, about, canonical, to_json, type_of
from dgxlab.tools import Benchmark, Launch, ServeBench, keys_of
from dgxlab.tools.llama_server import setup

MUST_AGREE = ("matrix", "models", "engines", "session", "host")
"""Kinds of difference that are refused unless allowed by name."""
_ARGUMENTS = ("args", "repetitions", "engine", "command", "slots", "ready_s", "stall_s")
# keys of a bench entry that are arguments of the tool: cells do not depend on them
_ABSENT = "-"


@dataclass(frozen=True)
class Difference:
    """One difference between the specs of two experiments."""

    what: str  # pin, series, cmake, env, arguments, gates, or one of MUST_AGREE
    name: str  # which one of that kind, "" if there is only one
    baseline: str  # the baseline's value, _ABSENT if it has none
    candidate: str

    def __str__(self) -> str:
        return f"{' '.join(filter(None, (self.what, self.name)))}: {self.baseline} -> {self.candidate}"


def differences(baseline: Experiment, candidate: Experiment) -> list[Difference]:
    """Return all differences between two specs, except name and hypothesis."""
    return [
        *differing("pin", {"": baseline.pin[:12]}, {"": candidate.pin[:12]}),
        *differing("series", {"": " ".join(baseline.series)}, {"": " ".join(candidate.series)}),
        *differing("cmake", baseline.cmake, candidate.cmake),
        *differing("env", baseline.env, candidate.env),
        *differing("gates", _gates(baseline), _gates(candidate)),
        *_of_bench(baseline.bench, candidate.bench),
        *_of_models(baseline, candidate),
        *_of_engines(baseline, candidate),
        *differing("session", to_json(baseline.session), to_json(candidate.session)),
        *differing("host", {"": baseline.host}, {"": candidate.host}),
    ]


def refuse(differ: Iterable[Difference], allow: Collection[str], path: str) -> None:
    """Raise SpecError if the specs of two arms differ in one of MUST_AGREE, unless that kind is in `allow`.

    The error names all of them; `path` is the candidate's spec, which it tells the user to edit.
    """
    wrong = [each for each in differ if each.what in MUST_AGREE and each.what not in allow]
    if wrong:
        allowing = " ".join(f"--allow {kind}" for kind in MUST_AGREE if kind in {each.what for each in wrong})
        message = f"the arms differ in what must be the same, {wrong[0]}; {allowing} compares them all the same"
        raise SpecError(message, next=edit(path), details="\n".join(map(str, wrong)))


def pairs(baseline: Experiment, candidate: Experiment, cells: Collection[str] = ()) -> list[tuple[Launch, Launch]]:
    """Return pairs of launches, a baseline's and a candidate's, whose cells are compared in order.

    If the matrices differ, they have only the common cells, and with `cells` only those with these labels; raises
    SpecError if there is none.
    """
    matched = [
        pair
        for left, right in zip(baseline.bench, candidate.bench, strict=False)
        if type(left) is type(right) and isinstance(left, Benchmark) and left.compared
        for pair in _paired(left, right, {**baseline.env, **left.env}, {**candidate.env, **right.env}, cells)
    ]
    if not matched and cells:
        others = dict.fromkeys(cell.label for launch, _ in pairs(baseline, candidate) for cell in launch.cells)
        raise SpecError(
            f"the two experiments have no cell of {', '.join(cells)} in common",
            next=f"{AGAIN} with {command('--cell', next(iter(others)))}",
            details=f"they have {', '.join(others)}",
        )
    if not matched:
        raise SpecError("the two experiments have no cell in common", next=edit(candidate.path))
    return matched


def differing(what: str, left: Mapping[str, Any], right: Mapping[str, Any], where: str = "") -> Iterator[Difference]:
    """Yield a `Difference` of kind `what` for each name whose values differ; `where`, if any, precedes the name.

    A missing name equals None, "" and (); only in `env` does "" differ from a missing name.
    """

    def shown(value: Any) -> str:
        if what == "env" and value == "":  # set to empty differs from unset
            return '""'
        if value is None or value in ("", ()):
            return _ABSENT
        return value if isinstance(value, str) else canonical(value).replace('"', "")

    for name in dict.fromkeys((*left, *right)):
        before, after = shown(left.get(name)), shown(right.get(name))
        if before != after:
            yield Difference(what, " ".join(filter(None, (where, name))), before, after)


def _gates(experiment: Experiment) -> dict[str, str]:
    """Return each gate in words by what it checks; the expected count is part of its value, not of its key."""
    gates: dict[str, str] = {}
    for name, value in map(_gate, experiment.gates):
        gates[name] = "; ".join(filter(None, (gates.get(name), value)))  # of others by this name too
    return gates


def _gate(gate: Gate) -> tuple[str, str]:
    if isinstance(gate, EngagedGate):
        return repr(gate.stderr), f"on stderr of {', '.join(gate.tools)}"
    every = {**to_json(gate), "expect": getattr(gate, "expect", None)}
    fields = {key: value for key, value in every.items() if value not in (None, "", {}) and key != "limit_s"}
    name = f"{fields.pop('op')} {fields.pop('backend')}" if isinstance(gate, ParityGate) else about(gate)
    if env := fields.pop("env", None):  # the same check in another environment is another gate
        name += f" {_words(env)}"
    marker = fields.pop("engaged", None)
    demands = [f"{key} {_words(value)}" for key, value in fields.items()]
    return name, ", ".join([*demands, *([f"{marker!r} on stderr"] if marker else [])])


def _words(value: Any) -> str:
    """Return a gate's setting in words: `1103/1103`, `n=1,2`, `-GGML_X` for a variable that is unset."""
    if isinstance(value, Mapping):
        return " ".join(f"-{name}" if each is None else f"{name}={_words(each)}" for name, each in value.items())
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _of_models(left: Experiment, right: Experiment) -> Iterator[Difference]:
    """Yield differences in models of the common entries: another name, or another model by the same name."""
    shared: dict[str, None] = {}
    for number, (before, after) in enumerate(zip(left.bench, right.bench, strict=False)):
        names = [getattr(entry, "model", "") for entry in (before, after)]
        if type(before) is type(after) and any(names):
            yield from differing("models", {f"bench[{number}]": names[0]}, {f"bench[{number}]": names[1]})
            shared |= dict.fromkeys(name for name in names if name in left.models and name in right.models)
    mine, theirs = ({name: to_json(side.models[name]) for name in shared} for side in (left, right))
    yield from differing("models", mine, theirs)


def _of_engines(left: Experiment, right: Experiment) -> Iterator[Difference]:
    """Yield what servers of two engines differ in besides: their speeds are not of the engines alone."""
    for number, (before, after) in enumerate(zip(left.bench, right.bench, strict=False)):
        if isinstance(before, ServeBench) and isinstance(after, ServeBench) and before.engine != after.engine:
            yield from differing("engines", _setup(left, before), _setup(right, after), f"bench[{number}]")


def _setup(side: Experiment, entry: ServeBench) -> dict[str, str]:
    env = {**side.env, **entry.env}
    cell = next(entry.launches(env, lambda model, cell: True)).cells[0]
    return setup(cell, type_of(side.models.get(entry.model)), env, side.cmake)


def _of_bench(left: Sequence[Bench], right: Sequence[Bench]) -> Iterator[Difference]:
    for number, (before, after) in enumerate(zip_longest(left, right)):
        where = f"bench[{number}]"
        tools = [entry.name if entry else _ABSENT for entry in (before, after)]
        if tools[0] != tools[1]:
            yield Difference("matrix", where, *tools)
            continue
        free = _argument_axes(before, after)
        yield from differing("matrix", _matrix(before, free), _matrix(after, free), where)
        yield from differing("arguments", _arguments(before, free), _arguments(after, free), where)
        yield from differing("env", before.env, after.env, where)


def _matrix(entry: Bench, free: Collection[str]) -> dict[str, Any]:
    """Return the axes that distinguish an entry's cells, without the settings `free`."""
    names = (name for name in keys_of(entry) if name not in ("model", *_ARGUMENTS))
    axes = {name: values for name, values in _axes(entry).items() if name not in free}
    return {**{name: getattr(entry, name) for name in (*names, "exclude")}, **axes}


def _arguments(entry: Bench, free: Collection[str]) -> dict[str, Any]:
    arguments = {name: values[0] for name, values in _axes(entry).items() if name in free}
    for name in _ARGUMENTS:
        if hasattr(entry, name):
            value = getattr(entry, name)
            arguments[name] = " ".join(value) if isinstance(value, tuple) else value
    return arguments


def _argument_axes(left: Bench, right: Bench) -> set[str]:
    """Return the axes with at most one value in both entries: such axes are arguments of the tool."""
    axes = (_axes(left), _axes(right))
    return {name for name in (*axes[0], *axes[1]) if all(len(side.get(name, ())) <= 1 for side in axes)}


def _axes(entry: Bench) -> Mapping[str, Sequence[Any]]:
    return getattr(entry, "axes", {})


def _paired(
    left: Bench, right: Bench, left_env: Mapping[str, str], right_env: Mapping[str, str], labels: Collection[str]
) -> Iterator[tuple[Launch, Launch]]:
    free = {*_argument_axes(left, right), *_ARGUMENTS}

    def name(cell: Cell) -> str:
        return canonical({k: v for k, v in {**cell.fixed, **cell.params}.items() if k not in free})

    def launches(entry: Bench, env: Mapping[str, str], wanted: Collection[str] | None = None) -> list[Launch]:
        assert isinstance(entry, Benchmark)
        expanded = entry.launches(env, lambda model, cell: wanted is None or name(cell) in wanted)
        return [launch for launch in expanded if launch.cells]

    mine, theirs = (
        {name(cell) for launch in launches(entry, env) for cell in launch.cells if not labels or cell.label in labels}
        for entry, env in ((left, left_env), (right, right_env))
    )
    common = mine & theirs
    of_right = {name(cell): (launch, cell) for launch in launches(right, right_env, common) for cell in launch.cells}
    for launch in launches(left, left_env, common):
        matches = [of_right[name(cell)] for cell in launch.cells]
        yield launch, replace(matches[0][0], cells=tuple(cell for _, cell in matches))
