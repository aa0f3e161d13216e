"""What differs between two experiments, and which of their launches are compared."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dgxlab.compare import MUST_AGREE, Difference, differences, pairs, refuse
from dgxlab.errors import SpecError
from dgxlab.model import EngagedGate, Expectation, Experiment, FileModel, Session
from dgxlab.spec import load
from dgxlab.tools import GreedyGate, Launch
from tests import toy
from tests.conftest import PROJECT

COUNTED, ON_STDERR = "expect 4/4, unsupported 1", "on stderr of serve, profile"
GREEDY = GreedyGate("m", env={"A": "1"}, against={"X": None, "Y": ""})


@pytest.fixture
def baseline(tmp_path: Path) -> Experiment:
    return toy.experiment(tmp_path, "0" * 40, tmp_path)


def test_the_same_experiment_differs_in_nothing(baseline: Experiment) -> None:
    assert differences(baseline, replace(baseline, name="other", path="/elsewhere", hypothesis="faster")) == []


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"pin": "1" * 40}, ["pin: 000000000000 -> 111111111111"]),
        ({"series": ("w4a16", "shapes")}, ["series: - -> w4a16 shapes"]),
        ({"cmake": {"GGML_LTO": "ON"}}, ["cmake GGML_LTO: - -> ON"]),
        ({"env": {"GGML_X": "1"}}, ["env GGML_X: - -> 1"]),
        ({"env": {"GGML_X": ""}}, ['env GGML_X: - -> ""']),
        ({"host": "dgx"}, ["host: local -> dgx"]),
        ({"session": Session(cycles=4)}, ["session cycles: 0 -> 4"]),
        ({"gates": (toy.parity(5),)}, [f"gates MUL_MAT CPU: {COUNTED} -> expect 5/5, unsupported 1"]),
        ({"gates": (toy.parity(), EngagedGate("here:", ("serve", "profile")))}, [f"gates 'here:': - -> {ON_STDERR}"]),
        (
            {"gates": (toy.parity(), replace(toy.parity(5), where={"n": (1, 2), "k": (4,)}, engaged="on"))},
            [f"gates MUL_MAT CPU: {COUNTED} -> {COUNTED}; expect 5/5, unsupported 1, where n=1,2 k=4, 'on' on stderr"],
        ),
        ({"gates": (toy.parity(), GREEDY)}, ["gates greedy of m A=1: - -> model m, n_ubatch 512, against -X Y=, "]),
        ({"models": {"m": FileModel("/other.gguf")}}, ["models m: "]),
    ],
)
def test_each_difference_is_named(baseline: Experiment, changes: dict[str, object], lines: Sequence[str]) -> None:
    differ = differences(baseline, replace(baseline, **changes))  # type: ignore[arg-type]
    assert all(str(each).startswith(start) for each, start in zip(differ, lines, strict=True))


def bench(baseline: Experiment, **changes: object) -> Experiment:
    return replace(baseline, bench=(baseline.bench[0], toy.llama_bench(**changes), baseline.bench[2]))


@pytest.mark.parametrize(
    ("left", "right", "line"),
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
    baseline: Experiment, left: dict[str, object], right: dict[str, object], line: str
) -> None:
    differ = differences(bench(baseline, **left), bench(baseline, **right))
    assert [str(each) for each in differ] == [line]
    if line.startswith("matrix"):
        with pytest.raises(SpecError, match=r"--allow matrix"):
            refuse(differ, (), "c.yaml")
    refuse(differ, ("matrix",), "c.yaml")


def test_an_entry_that_only_one_has_is_a_matrix_that_differs(baseline: Experiment) -> None:
    shorter = replace(baseline, bench=baseline.bench[:2])
    assert [str(each) for each in differences(baseline, shorter)] == ["matrix bench[2]: batched-bench -> -"]
    swapped = replace(baseline, bench=(baseline.bench[1], baseline.bench[0], baseline.bench[2]))
    assert [each.what for each in differences(baseline, swapped)] == ["matrix", "matrix"]


@pytest.mark.parametrize("what", MUST_AGREE)
def test_what_must_agree_is_refused_unless_allowed(what: str) -> None:
    differ = [Difference("pin", "", "a", "b"), Difference(what, "x", "1", "2"), Difference(what, "y", "1", "2")]
    with pytest.raises(SpecError, match=f"--allow {what}") as caught:
        refuse(differ, [other for other in MUST_AGREE if other != what], "c.yaml")
    assert caught.value.details.splitlines() == [f"{what} x: 1 -> 2", f"{what} y: 1 -> 2"]
    refuse(differ, MUST_AGREE, "c.yaml")


def after(launch: Launch, flag: str) -> str:
    return launch.argv[launch.argv.index(flag) + 1]


@pytest.mark.parametrize(
    ("left", "right", "labels", "flag", "words"),
    [
        # a setting that differs does not keep two cells apart
        ({"axes": {"n_threads": (1,)}}, {"axes": {"n_threads": (2,)}}, "pp16 pp32 tg4", "-t", ("1", "2")),
        # each value of an axis has its own, in the baseline's order
        ({"axes": {"n_ubatch": (64, 128)}}, {"axes": {"n_ubatch": (128, 64)}}, "pp16 pp32 tg4", "-ub", ("64", "64")),
        # of matrices that differ nothing but the common cells is launched
        ({"n_prompt": (16, 32, 64)}, {"n_prompt": (64, 16), "n_gen": (8,)}, "pp16 pp64", "-p", ("16,64", "64,16")),
        ({"n_prompt": (16, 32, 64)}, {"n_prompt": (64, 16), "n_gen": (8,)}, "pp16 pp64", "-n", ("0", "0")),
    ],
)
def test_cells_are_paired_by_what_they_measure(
    baseline: Experiment, left: dict[str, object], right: dict[str, object], labels: str, flag: str, words: object
) -> None:
    before, candidate = list(pairs(bench(baseline, **left), bench(baseline, **right)))[1]
    sides = ([cell.label.split()[0] for cell in launch.cells] for launch in (before, candidate))
    assert list(sides) == [labels.split()] * 2
    assert (after(before, flag), after(candidate, flag)) == words


def test_nothing_in_common_is_refused(baseline: Experiment) -> None:
    entries = (replace(baseline, bench=baseline.bench[number : number + 1]) for number in (0, 1))
    with pytest.raises(SpecError, match="in common"):
        list(pairs(*entries))


def test_entries_that_read_other_models_differ(baseline: Experiment) -> None:
    models = {"m": FileModel("/m.gguf"), "n": FileModel("/n.gguf")}
    left, right = (
        replace(baseline, models=models, bench=tuple(toy.llama_bench(model=name) for name in names))
        for names in (("m", "n"), ("n", "m"))
    )
    differ = differences(left, right)
    assert [str(each) for each in differ] == ["models bench[0]: m -> n", "models bench[1]: n -> m"]
    with pytest.raises(SpecError, match="--allow models"):
        refuse(differ, (), "c.yaml")
    assert [(a.model, b.model) for a, b in pairs(left, right)] == [("m", "n"), ("n", "m")]


def test_two_engines_are_compared_only_where_their_models_may_differ(baseline: Experiment) -> None:
    own = replace(baseline, bench=(toy.serve(),))
    words = "vllm serve /m/x --enforce-eager --quantization=fp8 --dtype bfloat16 --kv-cache-dtype fp8"
    vllm = toy.serve(model="", engine="vllm", command=(*words.split(), "--max-model-len", "4096"), ready_s=900.0)
    other = replace(own, name="other", bench=(vllm,))
    differ = differences(own, other)
    assert [str(each) for each in differ if each.what == "models"] == ["models bench[0]: m -> -"]
    assert "arguments bench[0] engine: llama-server -> vllm" in map(str, differ)
    assert not any(each.what == "matrix" for each in differ)
    assert [str(each) for each in differ if each.what == "engines"] == [
        "engines bench[0] weights: toy.gguf -> x, fp8, bfloat16",
        "engines bench[0] KV: f16, f16 -> fp8",
        "engines bench[0] state: f32 -> auto",
        "engines bench[0] context: 256 -> 4096",
    ]
    with pytest.raises(SpecError, match="--allow models --allow engines compares them all the same"):
        refuse(differ, (), other.path)
    with pytest.raises(SpecError, match="--allow engines compares them all the same"):
        refuse(differ, ("models",), other.path)
    ((left, right),) = pairs(own, other)
    assert [cell.params for cell in left.cells] == [cell.params for cell in right.cells]


def test_the_shipped_candidate_differs_in_its_series_and_what_comes_with_it() -> None:
    left, right = (load(PROJECT / "experiments" / "cpu" / f"{name}.yaml") for name in ("quickstart", "shapes-cpu"))
    differ = {each.what: each for each in differences(left, right)}
    assert differ["series"].candidate == "backend-ops-shapes"
    assert differ.keys() == {"series", "gates", "matrix"}
    assert left.gates[0].expect == Expectation(1103, 1103)  # type: ignore[union-attr]
