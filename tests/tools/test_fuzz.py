"""Any text in any order: parsers never raise, and take nothing from what no tool printed."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgxlab.model import Cell, ParityGate
from dgxlab.tools import backend_ops, batched_bench, llama_bench
from dgxlab.tools.parity import judge_gate, read_gate
from faults.damage import Parse
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
    start = capture(name).split("VALUES")[0] if parse is backend_ops.parse else '{"n_prompt": 512, '
    for whole in (text, start + text):
        parsed = parse(whole, cells)
        assert parsed.results == ()
        assert parsed.problems


@quick
@given(text=st.text())
def test_any_text_fails_a_gate(text: str) -> None:
    for whole in (text, "Backend 1/1: CPU\n" + text):
        assert judge_gate(read_gate(whole, "CPU"), 0, ParityGate("MUL_MAT", "CPU"))
