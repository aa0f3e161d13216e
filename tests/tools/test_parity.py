"""The parity gate's console output, from real runs that passed, failed, crashed, and only looked green."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from dgxlab.model import Expectation, ParityGate, case_digest
from dgxlab.model.reasons import Code, Reason, reason
from dgxlab.tools.parity import GateReading, command, judge_gate, read_gate, unlike
from tests.tools.captures import capture

ALL = Expectation(1103, 1103)
CASE = "MUL_MAT(type_a={},type_b=f32,m=16,n=1,k=256,bs=[1,1],nr={},per=[0,1,2,3],k_v=0,o=1)"
ABORTED = reason(Code.EXITED, program="test-backend-ops", status=134)
Q4 = CASE.format("q4_0", "[1,1]")
SSM = "h200/tbo-test-SSM_CONV.txt"
PINS_OWN = "886b1ca8db5f34c5"
"""Digest of the pin's 1409 cases of MUL_MAT, as experiments/cpu/quickstart.yaml has it."""


def judge(
    reading: GateReading,
    expect: Expectation | None,
    unsupported: int | None,
    ended: Reason | None = None,
    **asked: str,
) -> tuple[str, ...]:
    op = next((case.partition("(")[0] for case in reading.cases), "MUL_MAT")
    gate = ParityGate(**{"op": op, **asked}, backend="", expect=expect, unsupported=unsupported)  # type: ignore[arg-type]
    return tuple(map(str, judge_gate(reading, gate, ended)))


@pytest.mark.parametrize(
    ("name", "backend"), [("h200/tbo-test-mul_mat.txt", "CUDA0"), ("cpu/tbo-test-mul_mat.txt.gz", "CPU")]
)
def test_a_green_mul_mat_gate_passes(name: str, backend: str) -> None:
    reading = read_gate(capture(name), backend)
    assert (reading.passed, reading.total, reading.unsupported) == (1103, 1103, 306)
    assert (reading.summaries, reading.failed, reading.backend_ok, reading.contradictions) == (1, (), True, ())
    assert (len(reading.cases), len(set(reading.cases)), case_digest(reading.cases)) == (1409, 1381, PINS_OWN)
    assert judge(reading, ALL, 306, cases=PINS_OWN) == ()
    assert judge(reading, None, None) == ()
    assert judge(reading, ALL, 300) == ("expected 300 unsupported cases, got 306",)
    assert judge(reading, Expectation(1104, 1104), 306) == ("expected 1104/1104, got 1103/1103",)


@pytest.mark.parametrize(
    ("name", "backend", "sentence"),
    [
        ("cpu/tbo-test-wrong-backend.txt", "CUDA0", "backend CUDA0 was not tested: the program has CPU"),
        ("cpu/tbo-test-unknown-op.txt", "CPU", "ran 0 of 0 cases: nothing was tested"),
        ("cpu/tbo-test-no-params.txt", "CPU", "ran 0 of 0 cases: nothing was tested"),
        ("cpu/tbo-test-usage.txt", "CPU", "backend CPU was not tested: the output names none"),
        ("h200/tbo-test-mul_mat.txt", "CPU", "no summary for backend CPU: no case was run"),
    ],
)
@pytest.mark.parametrize("expect", [None, ALL])
def test_false_greens_are_refused(name: str, backend: str, sentence: str, expect: Expectation | None) -> None:
    assert judge(read_gate(capture(name), backend), expect, None) == (sentence,)


def test_failing_cases_are_given_as_the_program_takes_them_back() -> None:
    text = capture("cpu/tbo-test-failing.txt")
    assert f"[MUL_MAT] ERR = 0.002267569 > 0.000500000   {Q4}: \x1b[1;31mFAIL" in text
    reading = read_gate(text, "CPU")
    assert reading.failed == (Q4, Q4, CASE.format("q4_0", "[2,1]"), CASE.format("q4_0", "[1,2]"))
    assert (reading.passed, reading.total, reading.unsupported, reading.backend_ok) == (2, 6, 3, False)
    assert reading.contradictions == ()
    assert judge(reading, Expectation(6, 6), 3) == (
        "expected 6/6, got 2/6",
        f"failed: {Q4} (ERR = 0.002267569 > 0.000500000) and 3 more",
    )
    cut = read_gate(text[: text.index("FAIL") + 4], "CPU")
    assert (cut.failed, cut.last_case, cut.summaries) == ((Q4,), Q4, 0)


@pytest.mark.parametrize(
    ("name", "backend", "counts", "failed", "rc"),
    [
        # both streams in one file, a second backend skipped
        ("h200/tbo-test-GATED_DELTA_NET.txt", "CUDA0", (36, 36, 0), (), 0),
        (SSM, "CUDA0", (45, 45, 0), (), 0),
        # diagnostics that are longer and hold brackets
        ("cpu/tbo-test-nan.txt", "CPU", (5, 6, 3), (Q4,), 1),
        ("cpu/tbo-test-inf.txt", "CPU", (5, 6, 3), (Q4,), 1),
        # `-o CASE` runs a case as often as the suite has it, and one of the two may fail
        ("cpu/tbo-test-one-case.txt", "CPU", (2, 2, 0), (), 0),
        ("cpu/tbo-test-two-cases.txt", "CPU", (4, 4, 0), (), 0),
        ("cpu/tbo-test-one-of-two.txt", "CPU", (1, 2, 0), (Q4,), 0),
    ],
)
def test_counts_and_failures_of_a_backend(
    name: str, backend: str, counts: tuple[int, int, int], failed: tuple[str, ...], rc: int
) -> None:
    reading = read_gate(capture(name), backend)
    assert ((reading.passed, reading.total, reading.unsupported), reading.failed) == (counts, failed)
    passed = f"{counts[0]} of {counts[1]} cases passed"
    wrong = "".join(f" ({how})" for how in reading.how.values())
    assert judge(reading, None, None) == ((passed, f"failed: {Q4}{wrong}") if failed else ())
    if not failed:
        assert judge(reading, None, None, ABORTED) == (str(ABORTED),)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("cpu/tbo-test-failing.txt", "ERR = 0.002267569 > 0.000500000"),
        ("cpu/tbo-test-nan.txt", "NaN at index 3 (CPU=nan CPU=1.536001)"),
    ],
)
def test_a_failed_case_has_what_was_wrong_the_first_time(name: str, how: str) -> None:
    assert read_gate(capture(name), "CPU").how[Q4] == how


@pytest.mark.parametrize(
    ("case", "how", "rounding"),
    [
        (CASE.format("q4_1", "[1,1]"), "ERR = 0.000612345 > 0.000500000", True),
        (CASE.format("q5_1", "[1,1]"), "ERR = 0.001390982 > 0.000500000", True),
        (CASE.format("q5_1", "[1,1]"), "ERR = 0.002000000 > 0.000500000", False),
        (CASE.format("q5_1", "[1,1]"), "ERR = 0.010000000 > 0.000500000", False),
        (CASE.format("q5_1", "[1,1]"), "NaN at index 3 (CUDA0=nan CPU=1.0)", False),
        (CASE.format("q5_1", "[1,1]").replace("k=256", "k=2560"), "ERR = 0.000612345 > 0.000500000", False),
        (Q4, "ERR = 0.000612345 > 0.000500000", False),
    ],
)
def test_what_rounding_can_make_fail(case: str, how: str, rounding: bool) -> None:
    known = (CASE.format("q4_1", "[2,1]"), "ERR = 0.000512345 > 0.000500000")
    reading = GateReading("CUDA0", failed=(case, known[0]), how=dict([(case, how), known]))
    assert (reading.by_rounding, GateReading("CUDA0").by_rounding) == (rounding, False)


@pytest.mark.parametrize(
    ("kind", "columns", "beyond"),
    [
        (GGMLQuantizationType.Q4_1, 1, 20),
        (GGMLQuantizationType.Q4_1, 2, 0),
        (GGMLQuantizationType.Q5_1, 1, 21),
    ],
)
def test_how_often_rounding_exceeds_the_tolerance(kind: GGMLQuantizationType, columns: int, beyond: int) -> None:
    """Of 10,000 products with random inputs, computed as llama.cpp's CPU code does and as its CUDA kernels do."""
    random = np.random.default_rng(1)
    errors = []
    for _ in range(20):
        weights = quants.quantize(random.uniform(-1, 1, (500, 16, 256)).astype(np.float32), kind)
        given = random.uniform(-1, 1, (500, columns, 256)).astype(np.float32)
        q8_0 = GGMLQuantizationType.Q8_0  # rounds as q8_1 does, which has the sum of a block besides
        rounded = quants.dequantize(quants.quantize(given, q8_0), q8_0)
        cpu = quants.dequantize(weights, kind) @ rounded.swapaxes(1, 2)
        # a block begins with its scale and its offset, each in f16; CUDA multiplies the offset by the sum of `given`
        offsets = np.ascontiguousarray(weights.reshape(500, 16, 8, -1)[..., 2:4]).view(np.float16)[..., 0]
        sums = (given - rounded).reshape(500, columns, 8, 32).sum(3)
        differ = offsets.astype(np.float32) @ sums.swapaxes(1, 2)
        errors += [*((differ**2).sum((1, 2)) / (cpu**2).sum((1, 2)))]
    assert sum(error > 0.0005 for error in errors) == pytest.approx(beyond, abs=1)
    assert max(errors) < 0.002


def test_a_crash_leaves_no_summary() -> None:
    text = capture("cpu/tbo-test-abort.txt")
    assert text.endswith(f"  {Q4}: ")
    reading = read_gate(text, "CPU")
    assert (reading.summaries, reading.passed, reading.total, reading.last_case) == (0, None, None, Q4)
    (sentence,) = judge(reading, ALL, None)
    assert sentence.endswith(f" {Q4}")
    assert judge(reading, ALL, None, ABORTED) == (str(ABORTED), sentence)


LINES = capture(SSM).split("\n")
COLOUR = "\x1b[1;32m"
FIRST_OK = capture(SSM).index(f"{COLOUR}OK") + len(COLOUR)
TWICE = ("2 summaries for backend CUDA0, not one", "the backend is announced 2 times")
NO_VERDICT = ("the output does not say 'Backend CUDA0: OK'",)


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        (2 * capture(SSM), TWICE),
        (
            capture(SSM).replace("2/2 backends passed", "Backend 1/2: CUDA0"),
            (TWICE[1], "the summary counts 45 passed cases, but 46 cases say OK"),
        ),
        (
            capture(SSM).replace("  45/45 tests", "  4ggml: x 5/45 tests"),
            ("the summary for backend CUDA0 cannot be read",),
        ),
        (capture(SSM).replace("  Backend CUDA0: ", "  Backend CUDA1: "), NO_VERDICT),
        (capture(SSM).replace("  Backend CUDA0: ", "Backend 1/3: CPU\n  Backend CUDA0: "), NO_VERDICT),
        ("\n".join(LINES[:8] + LINES[9:]), ("the summary counts 45 passed cases, but 44 cases say OK",)),
        (
            "\n".join([*LINES[:9], "[SSM_CONV] self-check FAIL", *LINES[9:]]),
            ("the summary names 0 failing cases, but 1 lines say FAIL",),
        ),
        # a kernel's printf right before the verdict, or a debug line that ends in OK, changes no count
        (capture(SSM)[: FIRST_OK - len(COLOUR)] + "block 0 thread 0" + capture(SSM)[FIRST_OK - len(COLOUR) :], ()),
        (capture(SSM).replace("  45/45", "w4a16: self-check OK\n  45/45"), ()),
        ("", ("backend CUDA0 was not tested: the output names none",)),
        # 45 times OK, of which one names no case that passed
        (
            capture(SSM)[: capture(SSM).rindex("  SSM_CONV(", 0, FIRST_OK)] + capture(SSM)[FIRST_OK - len(COLOUR) :],
            ("44 lines name a case, but 45 say how one ended",),
        ),
    ],
    ids=["twice", "announced", "damaged", "other", "late", "missing", "stray", "printf", "debug", "empty", "nameless"],
)
def test_a_summary_that_the_output_does_not_bear_out_is_refused(text: str, reasons: tuple[str, ...]) -> None:
    assert judge(read_gate(text, "CUDA0"), Expectation(45, 45), None) == reasons


@pytest.mark.parametrize(
    ("name", "backend"), [("h200/tbo-test-mul_mat.txt", "CUDA0"), ("cpu/tbo-test-failing.txt", "CPU")]
)
def test_text_without_colours_reads_the_same(name: str, backend: str) -> None:
    text = capture(name)
    bare = text.replace("\x1b[1;32m", "").replace("\x1b[1;31m", "").replace("\x1b[0m", "")
    assert read_gate(bare, backend) == read_gate(text, backend)


def test_an_allocation_failure_is_in_the_list_only() -> None:
    text = capture("cpu/tbo-test-one-of-two.txt")
    line = next(line for line in text.split("\n") if "ERR" in line)
    reading = read_gate(text.replace(line + "\n", "failed to allocate tensors [CPU] "), "CPU")
    assert reading.failed == (Q4,)
    assert judge(reading, None, None) == ("1 of 2 cases passed", f"failed: {Q4}")


# -- the list of cases ------------------------------------------------------------------------------------------------


OF_Q4 = r"  MUL_MAT\(type_a=q4_\S+: (?=\x1b\[1;32mOK)"
OTHER = "  MUL_MAT(type_a=f32,type_b=f32,m=16,n=1,k=256,bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1): "


@pytest.mark.parametrize(
    ("pattern", "instead", "reason"),
    [
        (r"MUL_MAT\(", "ADD(", "1409 of 1409 cases are not of MUL_MAT, as ADD(type_a="),
        (OF_Q4, OTHER, f"expected the list of cases {PINS_OWN}, got "),
    ],
)
def test_as_many_cases_that_are_not_the_gates_are_refused(pattern: str, instead: str, reason: str) -> None:
    text, replaced = re.subn(pattern, instead, capture("cpu/tbo-test-mul_mat.txt.gz"))
    assert replaced > 100
    reading = read_gate(text, "CPU")
    assert (reading.passed, reading.total, reading.unsupported, reading.contradictions) == (1103, 1103, 306, ())
    reasons = judge(reading, ALL, 306, op="MUL_MAT", cases=PINS_OWN)
    assert [text[: len(reason)] for text in reasons] == [reason]


def test_lists_of_cases_differ_in_words() -> None:
    assert unlike(["a", "b", "b"], ["b", "a", "b"]) == ""
    assert unlike(["b", "b", "d"], ["a", "b", "c"]) == ("missing: 2, as a; repeated more often: 1, as b; new: 1, as d")


# -- against the real program ------------------------------------------------------------------------------------------

TYPES = "type_a=(q4_0|q4_K),type_b=f32,m=16,n=1,k=256,bs=.1,1.,nr=.2,1."


@pytest.mark.llama
def test_a_case_string_runs_just_that_case(llama_bin: Path) -> None:
    def tested(*args: str) -> GateReading:
        argv = [llama_bin / "test-backend-ops", "test", "-b", "CPU", *args]
        return read_gate(subprocess.run(argv, capture_output=True, text=True, check=True).stdout, "CPU")

    first, second = sorted(set(tested("-o", "MUL_MAT", "-p", TYPES).cases))
    for wanted, total in ((first, 1), (second, 1), (f"{first},{second}", 2)):
        reading = tested("-o", wanted)
        assert (reading.passed, reading.total, reading.unsupported) == (total, total, 0)
        assert reading.last_case in wanted
        assert judge_gate(reading, ParityGate("MUL_MAT", "CPU")) == ()


@pytest.mark.llama
def test_a_gate_may_run_some_cases_of_an_operation(llama_bin: Path) -> None:
    gate = ParityGate("MUL_MAT", "CPU", where={"type_a": ("q4_0", "q4_K"), "n": (1, 2), "k": (256,)})
    argv = [word.replace("{bin}", str(llama_bin)) for word in command(gate)]
    reading = read_gate(subprocess.run(argv, capture_output=True, text=True, check=False).stdout, "CPU")
    assert judge_gate(reading, gate) == ()
    assert reading.total
    assert all(re.search(r"type_a=q4_[0K],.*\bn=[12],k=256,", case) for case in reading.cases)
    assert gate.what == "MUL_MAT where type_a=q4_0,q4_K n=1,2 k=256"
