"""Damaged output: every parser takes a value exactly as it stands in the text, or refuses it, and never raises."""

import random
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgxlab.agent.parse import backend_ops, batched_bench, llama_bench
from dgxlab.agent.parse.gate import judge_gate, read_gate
from dgxlab.agent.parse.lines import plain
from dgxlab.agent.parse.ninja import first_error, progress
from dgxlab.agent.parse.parsed import Parsed
from dgxlab.model import Cell, Expectation, ParityGate
from faults.damage import Parse, damage_lines, damaged, misread, numbers_of, traceable
from tests.agent.parse.captures import batched_cell, capture, kernel_cell, llama_cell

KERNELS = [kernel_cell(t, n) for n in (1, 2, 512) for t in ("q4_0", "nvfp4", "q4_K")]
LLAMA = [llama_cell(512, 0), llama_cell(2048, 0), llama_cell(0, 32)]
BATCHED = [batched_cell(16, 4, pl) for pl in (1, 2, 4)]
TOOLS = [
    pytest.param(backend_ops.parse, "h200/tbo-perf-mul_mat.sql", KERNELS, id="backend-ops"),
    pytest.param(llama_bench.parse, "h200/llama-bench-q4_k.jsonl", LLAMA, id="llama-bench"),
    pytest.param(batched_bench.parse, "cpu/batched-bench-twice.jsonl", BATCHED, id="batched-bench"),
]
quick = settings(max_examples=200, deadline=None, database=None, derandomize=True)


def check_complete(parsed: Parsed, cells: Sequence[Cell]) -> None:
    """Every cell has a positive, finite result or there is a problem; no cell has two."""
    keys = [r.cell for r in parsed.results]
    assert len(set(keys)) == len(keys)
    assert set(keys) <= {cell.key for cell in cells}
    assert parsed.problems or len(keys) == len(cells)
    assert all(0 < value < float("inf") for value in numbers_of(parsed))


@pytest.mark.parametrize(("parse", "name", "cells"), TOOLS)
@quick
@given(rnd=st.randoms(use_true_random=False))
def test_damaged_lines_never_make_a_new_number(parse: Parse, name: str, cells: list[Cell], rnd: random.Random) -> None:
    """Lines lost, doubled, cut and spliced: what is read was in the undamaged text, exactly."""
    text = capture(name)
    lines = damage_lines(text.split("\n"), rnd)
    parsed = parse("\n".join(lines), cells)
    check_complete(parsed, cells)
    # A splice can cut two numbers into a third that stands in the damaged text; nothing else may appear.
    assert set(numbers_of(parsed)) <= traceable(parse, text) | traceable(parse, "\n".join(lines))


@pytest.mark.parametrize(("parse", "name", "cells"), TOOLS)
@quick
@given(rnd=st.randoms(use_true_random=False))
def test_damaged_text_is_read_exactly_or_refused(
    parse: Parse, name: str, cells: list[Cell], rnd: random.Random
) -> None:
    """NaN, signs, colours, quotes and holes anywhere: every value can be traced to the text that was given."""
    text = damaged(capture(name), rnd)
    parsed = parse(text, cells)
    check_complete(parsed, cells)
    assert misread(parse, text, cells) == ""


@pytest.mark.parametrize(("parse", "name", "cells"), TOOLS)
@quick
@given(rnd=st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(parse: Parse, name: str, cells: list[Cell], rnd: random.Random) -> None:
    """Shuffled rows and cells give the same results; llama-batched-bench's cold rows stay the first."""
    cold = len(cells) if parse is batched_bench.parse else 0
    lines = capture(name).split("\n")
    tail = lines[cold:]
    rnd.shuffle(tail)
    parsed = parse("\n".join([*lines[:cold], *tail]), cells)
    assert parsed == parse(capture(name), cells)
    shuffled = rnd.sample(cells, len(cells))
    again = parse(capture(name), shuffled)
    assert {r.cell: r for r in again.results} == {r.cell: r for r in parsed.results}


@pytest.mark.parametrize(("parse", "name", "cells"), TOOLS)
@settings(quick, max_examples=100)
@given(text=st.text())
def test_any_text_is_read_without_an_exception(parse: Parse, name: str, cells: list[Cell], text: str) -> None:
    """Text from anywhere, alone and behind the start of a row, gives no result and a problem."""
    start = capture(name).split("VALUES")[0] if parse is backend_ops.parse else '{"n_prompt": 512, '
    for whole in (text, start + text):
        parsed = parse(whole, cells)
        assert parsed.results == ()
        assert parsed.problems


def own_section(text: str) -> str:
    """Return what stands under the headers of CUDA0."""
    parts = re.split(r"^Backend [0-9]+/[0-9]+: ", text, flags=re.MULTILINE)
    return "".join(part for part in parts[1:] if part.partition("\n")[0].rstrip() == "CUDA0")


@quick
@given(rnd=st.randoms(use_true_random=False))
def test_a_damaged_gate_never_passes_on_less(rnd: random.Random) -> None:
    """A gate passes only while its 45 green cases, one summary of 45/45 and the backend's OK are all in the text."""
    text = damaged(capture("h200/tbo-test-SSM_CONV.txt"), rnd)
    reading = read_gate(text, "CUDA0")
    if not judge_gate(reading, 0, ParityGate("SSM_CONV", "CUDA0", Expectation(45, 45), 0)):
        own, status, _ = own_section(plain(text)).partition("\n  Backend CUDA0: OK")
        assert status
        assert own.count("tests passed") == own.count("  45/45 tests passed") == 1
        assert len(re.findall(r"OK\s*$", own, re.MULTILINE)) >= 45
        assert not re.search(r"\bFAIL\s*$", own, re.MULTILINE)
    for count in (reading.passed, reading.total):
        assert count is None or re.search(rf"(?<![0-9]){count}(?![0-9])", plain(text))


@quick
@given(rnd=st.randoms(use_true_random=False))
def test_a_damaged_failing_gate_stays_failed(rnd: random.Random) -> None:
    """No damage to lines turns 2 of 6 into a pass of 6, and no failing case is made up."""
    whole = capture("cpu/tbo-test-failing.txt")
    text = "\n".join(damage_lines(whole.split("\n"), rnd))
    reading = read_gate(text, "CPU")
    assert judge_gate(reading, 0, ParityGate("MUL_MAT", "CPU", Expectation(6, 6)))
    assert all(case in plain(text) for case in reading.failed)


@quick
@given(text=st.text())
def test_any_text_fails_a_gate(text: str) -> None:
    """Nothing passes by chance."""
    assert judge_gate(read_gate(text, "CPU"), 0, ParityGate("MUL_MAT", "CPU"))
    assert judge_gate(read_gate("Backend 1/1: CPU\n" + text, "CPU"), 0, ParityGate("MUL_MAT", "CPU"))


@quick
@given(rnd=st.randoms(use_true_random=False), text=st.text())
def test_a_build_log_is_quoted_not_invented(rnd: random.Random, text: str) -> None:
    """Each line of the first error is a line of the log, without colours; progress never counts past its end."""
    name = rnd.choice(["compile", "link", "cuda", "ptxas", "arch", "missing", "colour"])
    log = damaged(capture(f"cpu/build/{name}.log"), rnd) + "\n" + text
    quoted = {line.strip()[:290] for line in plain(log).split("\n")}
    assert all(line.strip()[:290] in quoted for line in first_error(log).split("\n") if line)
    for line in log.split("\n"):
        counted = progress(line)
        assert counted is None or (counted[0] <= counted[1] and counted[2] in plain(line))
