"""What differs between two experiments, and which of their launches are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dgxlab.compare import MUST_AGREE, Difference, differences, pairs, refuse
from dgxlab.errors import SpecError
from dgxlab.model import BatchedBench, EngagedGate, Expectation, Experiment, FileModel, LlamaBench, Session
from dgxlab.spec import load
from tests import toy

PROJECT = Path(__file__).resolve().parent.parent


@pytest.fixture
def baseline(tmp_path: Path) -> Experiment:
    """The toy: one entry of each tool."""
    return toy.experiment(tmp_path, "0" * 40, tmp_path)


def texts(one: Experiment, two: Experiment) -> list[str]:
    """Return each difference as it is printed."""
    return [str(found) for found in differences(one, two)]


def labels(one: Experiment, two: Experiment) -> list[list[tuple[str, str]]]:
    """Return the cells that are compared, a list a launch."""
    found = pairs(one, two)
    return [[(a.label, b.label) for a, b in zip(x.cells, y.cells, strict=True)] for x, y in found]


def test_the_same_experiment_differs_in_nothing(baseline: Experiment) -> None:
    """Whatever it is called, and wherever its file lies."""
    assert differences(baseline, replace(baseline, name="other", path="/elsewhere", hypothesis="faster")) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pin": "1" * 40}, ["pin: 000000000000 -> 111111111111"]),
        ({"series": ("w4a16", "shapes")}, ["series: - -> w4a16 shapes"]),
        ({"cmake": {"GGML_LTO": "ON"}}, ["cmake GGML_LTO: - -> ON"]),
        ({"env": {"GGML_X": "1"}}, ["env GGML_X: - -> 1"]),
        ({"env": {"GGML_X": ""}}, ['env GGML_X: - -> ""']),
        ({"host": "dgx"}, ["host: local -> dgx"]),
        ({"session": Session(cycles=4)}, ["session cycles: 0 -> 4"]),
        ({"gates": (toy.parity(5),)}, ["gates MUL_MAT CPU: "]),
        ({"gates": (toy.parity(), EngagedGate("here:"))}, ["gates here:: - -> "]),
        ({"models": {"m": FileModel("/other.gguf")}}, ["models m: "]),
    ],
)
def test_each_difference_is_named(baseline: Experiment, changes: dict[str, object], said: Sequence[str]) -> None:
    """What, which one, and how both sides have it."""
    found = texts(baseline, replace(baseline, **changes))  # type: ignore[arg-type]
    assert len(found) == len(said)
    assert all(text.startswith(start) for text, start in zip(found, said, strict=True))


def bench(baseline: Experiment, **changes: object) -> Experiment:
    """Return the experiment with another llama-bench entry."""
    return replace(baseline, bench=(baseline.bench[0], toy.llama_bench(**changes), baseline.bench[2]))


@pytest.mark.parametrize(
    ("one", "two", "said"),
    [
        ({"axes": {"n_threads": (1,)}}, {"axes": {"n_threads": (2,)}}, "arguments bench[1] n_threads: 1 -> 2"),
        ({}, {"axes": {"n_ubatch": (512,)}}, "arguments bench[1] n_ubatch: - -> 512"),
        ({}, {"args": ("--numa", "distribute")}, "arguments bench[1] args: - -> --numa distribute"),
        ({}, {"repetitions": 9}, "arguments bench[1] repetitions: 5 -> 9"),
        ({}, {"env": {"TOY": "slow"}}, "env bench[1] TOY: - -> slow"),
        ({}, {"n_gen": (4, 8)}, "matrix bench[1] n_gen: [4] -> [4,8]"),
        ({"axes": {"n_batch": (64, 128)}}, {"axes": {"n_batch": (64,)}}, "matrix bench[1] n_batch: [64,128] -> [64]"),
    ],
)
def test_a_setting_may_differ_and_an_axis_may_not(
    baseline: Experiment, one: dict[str, object], two: dict[str, object], said: str
) -> None:
    """One value in each arm is how the tool is called; several are what is measured."""
    before, after = bench(baseline, **one), bench(baseline, **two)
    assert texts(before, after) == [said]
    found = differences(before, after)
    if said.startswith("matrix"):
        with pytest.raises(SpecError, match=r"--allow matrix"):
            refuse(found, (), "c.yaml")
    refuse(found, ("matrix",), "c.yaml")


def test_an_entry_that_only_one_has_is_a_matrix_that_differs(baseline: Experiment) -> None:
    """So is another tool at the same place."""
    shorter = replace(baseline, bench=baseline.bench[:2])
    assert texts(baseline, shorter) == ["matrix bench[2]: batched-bench -> -"]
    swapped = replace(baseline, bench=(baseline.bench[1], baseline.bench[0], baseline.bench[2]))
    assert [one.what for one in differences(baseline, swapped)] == ["matrix", "matrix"]


@pytest.mark.parametrize("what", MUST_AGREE)
def test_what_must_agree_is_refused_unless_allowed(what: str) -> None:
    """With the option that allows it, and every difference of the kind below."""
    found = [Difference("pin", "", "a", "b"), Difference(what, "x", "1", "2"), Difference(what, "y", "1", "2")]
    with pytest.raises(SpecError, match=f"--allow {what}") as caught:
        refuse(found, [other for other in MUST_AGREE if other != what], "c.yaml")
    assert caught.value.details.splitlines() == [f"{what} x: 1 -> 2", f"{what} y: 1 -> 2"]
    refuse(found, MUST_AGREE, "c.yaml")


def test_cells_are_paired_by_what_they_measure(baseline: Experiment) -> None:
    """A setting that differs does not keep two cells apart, and each launch has its own flags."""
    one = bench(baseline, axes={"n_threads": (1,)})
    two = bench(baseline, axes={"n_threads": (2,)})
    assert labels(one, two)[1] == [("pp16", "pp16"), ("pp32", "pp32"), ("tg4", "tg4")]
    before, after = list(pairs(one, two))[1]
    assert before.argv[before.argv.index("-t") + 1] == "1"
    assert after.argv[after.argv.index("-t") + 1] == "2"
    assert [cell.key for cell in before.cells] != [cell.key for cell in after.cells]


def test_every_setting_of_an_axis_finds_its_own(baseline: Experiment) -> None:
    """A launch a setting, in the baseline's order, whatever the candidate's."""
    one = bench(baseline, axes={"n_ubatch": (64, 128)})
    two = bench(baseline, axes={"n_ubatch": (128, 64)})
    found = [(before.argv, after.argv) for before, after in list(pairs(one, two))[1:3]]
    assert all(a[a.index("-ub") + 1] == b[b.index("-ub") + 1] for a, b in found)


def test_where_matrices_differ_the_common_cells_are_compared(baseline: Experiment) -> None:
    """In the order of the baseline; nothing else is launched."""
    one = bench(baseline, n_prompt=(16, 32, 64), n_gen=(4,))
    two = bench(baseline, n_prompt=(64, 16), n_gen=(8,))
    assert labels(one, two)[1] == [("pp16", "pp16"), ("pp64", "pp64")]
    before, after = list(pairs(one, two))[1]
    assert before.argv[before.argv.index("-p") + 1] == "16,64"
    assert after.argv[after.argv.index("-n") + 1] == "0"


def test_nothing_in_common_is_refused(baseline: Experiment) -> None:
    """There is nothing to compare."""
    one, two = replace(baseline, bench=baseline.bench[:1]), replace(baseline, bench=baseline.bench[1:2])
    with pytest.raises(SpecError, match="in common"):
        list(pairs(one, two))


def test_models_by_another_name_are_models_that_differ(baseline: Experiment) -> None:
    """The same weights quantised otherwise may be compared, where that is allowed."""
    other = replace(
        baseline,
        models={**baseline.models, "n": FileModel("/n.gguf")},
        bench=tuple(replace(b, model="n") if isinstance(b, (LlamaBench, BatchedBench)) else b for b in baseline.bench),
    )
    assert {one.what for one in differences(baseline, other)} == {"models"}
    assert [(a.model, b.model) for a, b in pairs(baseline, other)] == [("", ""), ("m", "n"), ("m", "n")]


def test_entries_that_exchange_their_models_differ(baseline: Experiment) -> None:
    """The same models are read all in all, and each entry reads another."""
    models = {"m": FileModel("/m.gguf"), "n": FileModel("/n.gguf")}
    one, two = (
        replace(baseline, models=models, bench=tuple(toy.llama_bench(model=name) for name in names))
        for names in (("m", "n"), ("n", "m"))
    )
    assert texts(one, two) == ["models bench[0]: m -> n", "models bench[1]: n -> m"]
    with pytest.raises(SpecError, match="--allow models"):
        refuse(differences(one, two), (), "c.yaml")


def test_the_shipped_candidate_differs_in_its_series_and_what_comes_with_it() -> None:
    """A spec that extends another names only what differs, and measures other shapes here."""
    one, two = (load(PROJECT / "experiments" / "cpu" / f"{name}.yaml") for name in ("quickstart", "shapes-cpu"))
    found = differences(one, two)
    assert next(d for d in found if d.what == "series").candidate == "backend-ops-shapes"
    assert {d.what for d in found} == {"series", "gates", "matrix"}
    assert one.gates[0].expect == Expectation(1103, 1103)  # type: ignore[union-attr]
