"""Damaged output: every parser takes a value exactly as the text has it, or refuses it, and never raises."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgxlab.model import Cell, Expectation, ParityGate
from dgxlab.tools import backend_ops, batched_bench, llama_bench
from dgxlab.tools.parity import judge_gate, read_gate
from dgxlab.tools.rows import plain
from faults.damage import Parse, damaged
from tests.tools.captures import batched_cell, capture, kernel_cell, llama_cell

KERNELS = [kernel_cell(t, n) for n in (1, 2, 512) for t in ("q4_0", "nvfp4", "q4_K")]
LLAMA = [llama_cell(512, 0), llama_cell(2048, 0), llama_cell(0, 32)]
BATCHED = [batched_cell(16, 4, pl) for pl in (1, 2, 4)]
TOOLS = [
    pytest.param(backend_ops.parse, "h200/tbo-perf-mul_mat.sql", KERNELS, id="backend-ops"),
    pytest.param(llama_bench.parse, "h200/llama-bench-q4_k.jsonl", LLAMA, id="llama-bench"),
    pytest.param(batched_bench.parse, "cpu/batched-bench-twice.jsonl", BATCHED, id="batched-bench"),
]
quick = settings(max_examples=200, deadline=None, database=None, derandomize=True)


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
    """Return what is under the headers of CUDA0."""
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
@given(text=st.text())
def test_any_text_fails_a_gate(text: str) -> None:
    """Nothing passes by chance."""
    for whole in (text, "Backend 1/1: CPU\n" + text):
        assert judge_gate(read_gate(whole, "CPU"), 0, ParityGate("MUL_MAT", "CPU"))
