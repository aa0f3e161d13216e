"""Damaged output: every parser takes a value exactly as it stands in the text, or refuses it, and never raises."""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgxlab.agent.parse import backend_ops, batched_bench, llama_bench
from dgxlab.agent.parse.gate import judge_gate, read_gate
from dgxlab.agent.parse.lines import plain
from dgxlab.agent.parse.ninja import first_error, progress
from dgxlab.agent.parse.parsed import Parsed
from dgxlab.model import Cell, Expectation
from tests.agent.parse.captures import batched_cell, capture, kernel_cell, llama_cell

Parse = Callable[[str, Sequence[Cell]], Parsed]

KERNELS = [kernel_cell(t, n) for n in (1, 2, 512) for t in ("q4_0", "nvfp4", "q4_K")]
LLAMA = [llama_cell(512, 0), llama_cell(2048, 0), llama_cell(0, 32)]
BATCHED = [batched_cell(128, 64, pl) for pl in (8, 32, 64)]
TOOLS = [
    pytest.param(backend_ops.parse, "h200/tbo-perf-mul_mat.sql", KERNELS, id="backend-ops"),
    pytest.param(llama_bench.parse, "h200/llama-bench-q4_k.jsonl", LLAMA, id="llama-bench"),
    pytest.param(batched_bench.parse, "h200/batched-bench-q4_k.jsonl", BATCHED, id="batched-bench"),
]
NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
QUOTED = re.compile(r"[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?")
NOISE = [
    "\x1b[1;31m",
    "nan",
    "-nan",
    "NaN",
    "inf",
    "-",
    "-1",
    "0",
    "'",
    '"',
    "{",
    "}",
    "');",
    "\r",
    "\x00",
    "\ufffd",
    "e9",
]
NOISE_LINES = [
    "ggml_backend_cuda_graph_compute: CUDA graph warmup complete",
    "#0  0x00007f64512dec17 in __GI___wait4 (pid=15209)",
    "{",
    "{}",
    "[]",
    "INSERT INTO test_backend_ops (",
    "  0/0 tests passed",
    "Backend 1/1: CPU",
    "  Backend CUDA0: \x1b[1;32mOK\x1b[0m",
    "\x1b[1;32mOK\x1b[0m",
]

quick = settings(max_examples=200, deadline=None, database=None, derandomize=True)


def damage_lines(lines: list[str], rnd: random.Random) -> list[str]:
    """Delete, double, swap, cut, or splice lines, or put one in."""
    at, other = rnd.randrange(len(lines)), rnd.randrange(len(lines))
    cut = rnd.randrange(len(lines[at]) + 1)
    return rnd.choice(
        [
            lines[:at] + lines[at + 1 :],
            [*lines[:at], lines[at], *lines[at:]],
            [*lines[:at], lines[other], *lines[at + 1 :]],
            [*lines[:at], lines[at][:cut], *lines[at + 1 :]],
            [*lines[:at], lines[at][:cut] + lines[other][cut:], *lines[at + 1 :]],
            [*lines[:at], lines[at][:cut] + lines[other], *lines[at + 1 :]],
            [*lines[:at], rnd.choice(NOISE_LINES), *lines[at:]],
            [*lines[:at], lines[at][:cut]],
        ]
    ) or [""]


def damage_text(text: str, rnd: random.Random) -> str:
    """Put noise anywhere, in a number's place or inside it, or cut some characters out."""
    at = rnd.randrange(len(text) + 1)
    numbers = list(NUMBER.finditer(text))
    noise = rnd.choice(NOISE)
    if numbers and rnd.random() < 0.5:
        number = rnd.choice(numbers)
        start, end = rnd.choice([number.span(), (number.start(), number.start()), (number.start() + 1, number.end())])
        return text[:start] + noise + text[end:]
    return text[:at] + rnd.choice([noise + text[at:], text[at + rnd.randrange(1, 40) :]])


def damaged(text: str, rnd: random.Random, *, characters: bool) -> str:
    """Damage a log one to four times."""
    for _ in range(rnd.randrange(1, 5)):
        if characters and rnd.random() < 0.6:
            text = damage_text(text, rnd)
        else:
            text = "\n".join(damage_lines(text.split("\n"), rnd))
    return text


def numbers_of(parsed: Parsed) -> list[float]:
    """Return every value that was read, thrown away or not."""
    return [v for r in parsed.results for m in r.measurements for v in (*m.samples, *m.discarded)]


def traceable(parse: Parse, text: str) -> set[float]:
    """Return what a text can give, worked out without the parsers: its numbers, or the speeds of its whole rows."""
    if parse is backend_ops.parse:
        return {float(value) for value in text.split("'") if QUOTED.fullmatch(value)}
    found: set[float] = set()
    for line in text.split("\n"):
        try:
            row: dict[str, Any] = json.loads(line)
            found |= speeds(row) if isinstance(row, dict) else set()
        except (ValueError, KeyError, TypeError, ZeroDivisionError, OverflowError):
            continue
    return found


def speeds(row: dict[str, Any]) -> set[float]:
    """Return the speeds that a row's own tokens and times give."""
    if "samples_ns" in row:
        return {(row["n_prompt"] + row["n_gen"]) / (ns / 1e9) for ns in row["samples_ns"]}
    pp, tg = row["pp"] * row["pl"], row["tg"] * row["pl"]
    return {pp / row["t_pp"], tg / row["t_tg"], (pp + tg) / row["t"]}


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
    text = damaged(capture(name), rnd, characters=True)
    parsed = parse(text, cells)
    check_complete(parsed, cells)
    assert set(numbers_of(parsed)) <= traceable(parse, text)


@pytest.mark.parametrize(("parse", "name", "cells"), TOOLS)
@quick
@given(rnd=st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(parse: Parse, name: str, cells: list[Cell], rnd: random.Random) -> None:
    """Shuffled rows and cells give the same results; llama-batched-bench's cold row stays the first."""
    cold = 1 if parse is batched_bench.parse else 0
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
    text = damaged(capture("h200/tbo-test-SSM_CONV.txt"), rnd, characters=True)
    reading = read_gate(text, "CUDA0")
    if not judge_gate(reading, 0, Expectation(45, 45), 0):
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
    assert judge_gate(reading, 0, Expectation(6, 6), None)
    assert all(case in text for case in reading.failed)


@quick
@given(text=st.text())
def test_any_text_fails_a_gate(text: str) -> None:
    """Nothing passes by chance."""
    assert judge_gate(read_gate(text, "CPU"), 0, None, None)
    assert judge_gate(read_gate("Backend 1/1: CPU\n" + text, "CPU"), 0, None, None)


@quick
@given(rnd=st.randoms(use_true_random=False), text=st.text())
def test_a_build_log_is_quoted_not_invented(rnd: random.Random, text: str) -> None:
    """Each line of the first error is a line of the log, without colours; progress never counts past its end."""
    name = rnd.choice(["compile", "link", "cuda", "ptxas", "arch", "missing", "colour"])
    log = damaged(capture(f"cpu/build/{name}.log"), rnd, characters=True) + "\n" + text
    quoted = {line.strip()[:290] for line in plain(log).split("\n")}
    assert all(line.strip()[:290] in quoted for line in first_error(log).split("\n") if line)
    for line in log.split("\n"):
        counted = progress(line)
        assert counted is None or (counted[0] <= counted[1] and counted[2] in plain(line))
