"""W4A16: the kernels' own source on an emulated GPU, and their reference."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gguf import quants

from tests.kernels.conftest import KERNELS, Q4, blocks_of, ggml, reference, run
from tests.kernels.emulate import EMULATOR, Defect, compile_emulated, plant
from tests.kernels.packed import unpacked

NAME = "w4a16_gemm"
KERNEL = KERNELS / NAME / "w4a16_gemm.cuh"
WGMMA = KERNEL.with_name("w4a16_wgmma.cuh")
PACKED = KERNEL.with_name("w4a16_packed.cuh")
PACKED_WGMMA = KERNEL.with_name("w4a16_packed_wgmma.cuh")
PACKED_MMA = KERNEL.with_name("w4a16_packed_mma.cuh")
PLAN = KERNEL.with_name("w4a16_plan.cuh")
PROGRAM = EMULATOR / "w4a16.cpp"

TABLES = {
    "planned": "w4a16_sm_90a",
    "planned-plain": "w4a16_sm_90",
    "planned-121": "w4a16_sm_80",
    "planned-packed": "w4a16_sm_90a_packed",
    "planned-plain-packed": "w4a16_sm_90_packed",
}
"""By rung: the table that plans."""

ROUND = 5120
"""So much of k that a block goes round its stages."""

ROUNDED = ("planned", "planned-packed", "planned-plain-packed")
"""The rungs whose stages are filled by other warps."""

BARRIER = "        // all copies of this step are there for all, and nobody reads what was read in the step before\n"
THERE = "w4a16_wait_for(stages_.w_full + w_.stage, w_.parity);\n"
X_THERE = "w4a16_wait_for(stages_.x_full + x_.stage, x_.parity);\n"
RELEASE = "            this->release_unit();\n"
RELEASE_ACTIVATIONS = "        if (s % STEPS == 0 && before) {\n            release_activations();\n        }\n"
PRODUCTS_END = "        w4a16_wgmma_wait<1>();\n"

GENERAL = {
    "a row beyond m written": Defect("if («row + 16 * mt < p_.m»)", ("row + 16 * mt <= p_.m",)),
    "a column beyond n written": Defect("if («to_col >= p_.n»)", ("to_col > p_.n",)),
    "another column's power of two": Defect("p_.undo[«to_col»]", ("col",)),
    "a minimum's high bits": Defect("(both >> 4 & 0x0F0F) | («m» >> 2", ("s",)),
    "the other block's scale": Defect("«half ? 0x3232 : 0x1010»", ("half ? 0x1010 : 0x3232",)),
    "counters left as they were": Defect("counters[i] = «0»;", ("1",)),
    "outputs brought back too far": Defect("(exponent - «14») << 23", ("13",)),
    "a column not scaled": Defect("if («w4a16_scale(taken_as) != 1.0f»)", ("w4a16_scale(taken_as) == 0.0f",)),
    "no barrier": Defect(f"        {BARRIER}«                __syncthreads();\n»", ("",)),
    "a copy not waited for": Defect(
        f"«w4a16_wait<C::X_STAGES - 2>();\n»        {BARRIER}", ("w4a16_wait<C::X_STAGES - 1>();",)
    ),
}
"""Defects of the mma.sync kernel and of what comes before it."""

PAIRS = {
    "the largest of two columns for each": Defect("const int col  = «threadIdx.x / 4 % cols»;", ("0",)),
}
"""The same of the conversion of columns by twos, which takes more than 128 of them."""

SUMS = {
    "a part left out": Defect("part.begin + p.units - 1) + «1»;", ("0",)),
    "a slot of the other tile": Defect(" + «(w4a16_begin(p, b + i) < part.begin)» : 0;", ("0",)),
}
"""The same of what adds up the parts of a tile, for all kernels."""

BY_WGMMA = {
    "activations not waited for": Defect(f"«        {X_THERE}»", ("",)),
    "the first weights not waited for": Defect(f"this->clear();\n        «{THERE}»", ("",)),
    "a unit's weights not waited for": Defect(f"else if (more) {{\n            «{THERE}»", ("",)),
    "weights copied before others were read": Defect(
        "        «w4a16_wait_for(stages_.w_free + w_.stage, w_.parity ^ 1);\n»", ("",)
    ),
    "core matrices the other way round": Defect(
        "«(uint64_t) (128 >> 4) << 16 | (uint64_t) (512 >> 4) << 32»",
        ("(uint64_t) (512 >> 4) << 16 | (uint64_t) (128 >> 4) << 32",),
    ),
    "the order of the other kernel": Defect("«w4a16_order::CORES»", ("w4a16_order::FRAGMENTS",)),
}
"""The same of the wgmma kernel."""

OF_PACKED = {
    "a unit's weights not waited for": Defect(
        "        «w4a16_wait_for(stages_.w_full + w_.stage, w_.parity);\n»", ("",)
    ),
    "weights copied before others were read": Defect(
        "            «w4a16_wait_for(stages.w_free + w.stage, w.parity ^ 1);\n»", ("",)
    ),
    "activations copied before others were read": Defect(
        "            «w4a16_wait_for(stages.x_free + x.stage, x.parity ^ 1);\n»", ("",)
    ),
    "strips beyond m copied": Defect("«min(C::STRIPS, strips - first)»", ("C::STRIPS",)),
    "the scales of rows exchanged": Defect("(scales, «rows[0]», «rows[1]», ", ("rows[1]", "rows[0]")),
    "low nibbles for high ones": Defect("(u.q[1] >> «4» & 0x0F0F0F0F)", ("0",)),
    "another power of two of a row": Defect("w4a16_power_of_two(«24» + 127 -", ("25",)),
}
"""The same of packing, and of what both products of packed weights have."""

BY_PACKED_WGMMA = {
    "activations not waited for": Defect(f"            «{X_THERE}»", ("",)),
    "weights released before their last codes are read": Defect(
        f"load_codes(s + 2);\n«»        }} else if (s == 2) {{\n«{RELEASE}»",
        ("if (s == 0) { this->release_unit(); }", ""),
    ),
    "activations released while they are multiplied": Defect(
        f"«»{PRODUCTS_END}«{RELEASE_ACTIVATIONS}»", (RELEASE_ACTIVATIONS, "")
    ),
    "fragments overwritten while they are multiplied": Defect(f"«{PRODUCTS_END}»", ("",)),
}
"""The same of the product of packed weights on wgmma."""

BY_PACKED_MMA = {
    "the first activations not waited for": Defect(f"        «{X_THERE}»", ("",)),
    "activations not waited for": Defect(
        "                «w4a16_wait_for(stages_.x_full + next.stage, next.parity);\n»", ("",)
    ),
    "activations of the stage before": Defect("activations(«next.stage», (i + 1)", ("x_.stage",)),
    "activations of other columns": Defect("const uint4 b = «b_[nt % 2]»;", ("b_[0]",)),
    "activations released before they are read": Defect(
        "        if («last_of_stage») {\n            // the copy engine", ("i % PIECES == PIECES - 2",)
    ),
    "the next unit's codes for the last ones": Defect("if («i == 5») {", ("i == 4",)),
    "high nibbles for low ones": Defect("«(high ? codes.w : codes.z)»", ("(high ? codes.z : codes.w)",)),
    "a share not taken apart": Defect("/ (4 * C::MT) == «nt»)", ("nt + 1",)),
}
"""The same of the product of packed weights on mma.sync."""

DEFECTS = [
    *((KERNEL, ("planned-plain",), what, defect) for what, defect in GENERAL.items()),
    *((KERNEL, ("planned-plain", *ROUNDED), what, defect) for what, defect in SUMS.items()),
    *((KERNEL, ("planned",), what, defect) for what, defect in PAIRS.items()),
    *((WGMMA, ("planned",), what, defect) for what, defect in BY_WGMMA.items()),
    *((PACKED, ("planned-packed", "planned-plain-packed"), what, defect) for what, defect in OF_PACKED.items()),
    *((PACKED_WGMMA, ("planned-packed",), what, defect) for what, defect in BY_PACKED_WGMMA.items()),
    *((PACKED_MMA, ("planned-plain-packed",), what, defect) for what, defect in BY_PACKED_MMA.items()),
]
"""The file of each, the rungs that show it, its name."""

NARROW = {
    "add_rungs": "true, 128, 32, 32, 32, 3, 8, 2",
    "add_wgmma_rungs": "128, 32, 2, 4, 8, 2",
    "add_packed_wgmma_rungs": "128, 32, 2, 5, 256, 5, 1",
    "add_packed_mma_rungs": "128, 32, 32, 32, 2, 128, 6, 2",
}
"""By what adds rungs: the configuration that sm_90's tables have for 32 columns."""


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the proof compiled for the CPU."""
    return compile_emulated(KERNELS, PROGRAM, tmp_path_factory.mktemp("emulated") / "w4a16")


def rows_of(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Return rows of so many random blocks; a row's scales are of one size, each row's twice the one before's.

    The first row's are denormals, beside the largest minima, those of the 31st f16's largest, those of the last of
    several 0.
    """
    _, _, size, n_scales = Q4[kind]
    random = np.random.default_rng(9)
    found = random.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    shape = (rows, blocks, n_scales)
    exponents = np.maximum(np.arange(rows)[:, None, None] % 31 - random.integers(0, 3, shape), 0)
    scales = (random.integers(0, 2, shape) << 15 | exponents << 10 | random.integers(0, 1024, shape)).astype("<u2")
    scales[0, :, 1:] |= 30 << 10
    scales[1:][-1:] = 0
    found[..., : 2 * n_scales] = scales.view(np.uint8)
    return found


@pytest.mark.parametrize("kind", Q4)
def test_the_reference_agrees_with_gguf(host: Path, kind: str) -> None:
    """Random blocks, as the gguf package reads them in float: to the rounding of a term."""
    blocks = blocks_of(kind, 500)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(blocks, Q4[kind][0]).reshape(-1)
    found = reference(host, kind, blocks)
    terms = np.repeat(np.abs(found).reshape(-1, 32).max(axis=1), 32)
    assert len(found) == 500 * Q4[kind][1]
    assert (np.abs(found - expected) <= 2.0**-22 * terms).all()


@pytest.mark.llama
@pytest.mark.parametrize("kind", Q4)
def test_the_reference_agrees_with_ggml(host: Path, kind: str, llama_bin: Path) -> None:
    """The same through the CPU's own conversion in the real library; Q4_0 bit for bit."""
    blocks = blocks_of(kind, 500)
    found = reference(host, kind, blocks)
    out = ggml(llama_bin, kind, blocks, found.size)
    terms = np.repeat(np.abs(found).reshape(-1, 32).max(axis=1), 32)
    assert (np.abs(found - out) <= (0 if kind == "q4_0" else 2.0**-22) * terms).all()


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_every_kernel_is_right_on_the_emulator(emulated: Path, reverse: bool) -> None:
    """Each product, tails in m, n and k, wild scales, refusals; whichever thread runs first."""
    ran = run(emulated, "edges", reverse=reverse)
    assert ran.returncode == 0, ran.stderr
    assert "FAIL" not in ran.stderr
    assert ran.stderr.count("ok  ") == 120


def test_the_tables_are_right_on_the_emulator(emulated: Path) -> None:
    """Every number of columns at which a table changes, those beside it, and what there is no plan for."""
    ran = run(emulated, "tables")
    assert ran.returncode == 0, ran.stderr
    found = re.findall(r"ok   (planned\S*) (\S+) m=65 n=(\d+) k=512", ran.stderr)
    for kind in Q4:
        for rung, table in TABLES.items():
            columns = [int(n) for name, each, n in found if (name, each) == (rung, kind)]
            assert columns[:6] == [15, 16, 17, 31, 32, 33]
            assert columns == [n + beside for n in switches_of(table) for beside in (-1, 0, 1)]
    assert ran.stderr.count("what cannot be is refused") == 2
    assert ran.stderr.count("what cannot be packed is refused") == 2


def switches_of(table: str) -> list[int]:
    """Return the numbers of columns at which a table of the source goes on to its next row."""
    rows = re.search(rf"struct {table} \{{(.*?)\n    \}};", PLAN.read_text(), re.DOTALL)
    assert rows
    return [int(n) for n in re.findall(r"\{(\d+), ", rows[1])]


@pytest.mark.parametrize(("m", "blocks"), [(37, 24), (16, 8), (1, 16)])
@pytest.mark.parametrize("kind", Q4)
def test_weights_are_packed_as_documented(emulated: Path, host: Path, kind: str, m: int, blocks: int) -> None:
    """Unpacked by the layout alone they are the reference's, to the rounding of scales beside a row's largest."""
    k = blocks * 32
    rows = rows_of(kind, m, k // Q4[kind][1])
    argv = [emulated, "packed", kind, str(m), str(k)]
    ran = subprocess.run(argv, input=rows.tobytes(), capture_output=True, check=True)
    weights, terms = unpacked(kind, np.frombuffer(ran.stdout, np.uint8), m, k)
    expected = reference(host, kind, rows).reshape(m, k)
    largest = np.abs(expected).max(axis=1, keepdims=True)
    assert (largest[:-1] > 0).all()
    assert np.isfinite(terms).all()
    assert (np.abs(weights - expected) <= 2.0**-11 * terms + 2.0**-19 * largest).all()


@pytest.mark.parametrize(("m", "n"), [(15, 1), (17, 31), (64, 8), (127, 129), (128, 128), (255, 2)])
@pytest.mark.parametrize("kind", Q4)
def test_tails_are_right_on_the_emulator(emulated: Path, kind: str, m: int, n: int) -> None:
    """Just below, at and just above the tiles; of the table's configuration, its shares of the work as well."""
    planned = [(rung, 768) for rung in TABLES if rung != "planned-121"]
    for rung, k in planned:
        ran = run(emulated, "shape", kind, str(m), str(n), str(k), rung)
        assert (ran.returncode, ran.stderr) == (0, f"ok   {rung} {kind} m={m} n={n} k={k}\n")


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("rung", ROUNDED)
@pytest.mark.parametrize("kind", Q4)
def test_stages_are_used_again_on_the_emulator(emulated: Path, kind: str, rung: str, reverse: bool) -> None:
    """Blocks that have more units than stages: what is free and what is there is waited for each time."""
    ran = run(emulated, "shape", kind, "129", "17", str(ROUND), rung, reverse=reverse)
    assert (ran.returncode, ran.stderr) == (0, f"ok   {rung} {kind} m=129 n=17 k={ROUND}\n")


def test_the_error_is_a_part_of_mmqs(emulated: Path) -> None:
    """At most a fifth for Q4_0; for Q4_K at most 0.7 on uniform inputs, 0.4 on Gaussian ones."""
    ran = run(emulated, "nmse")
    ratios = re.findall(r"ok   (\S+) (q4_.) .* (uniform|Gaussian) nmse: .* ratio (\S+), limit (\S+)", ran.stderr)
    limits = {(rung, kind, how): float(limit) for rung, kind, how, _, limit in ratios}
    assert ran.returncode == 0, ran.stderr
    assert all(0 < float(ratio) <= float(limit) for _, _, _, ratio, limit in ratios)
    for rung in ROUNDED:
        assert {where[1:]: limit for where, limit in limits.items() if where[0] == rung} == {
            ("q4_0", "uniform"): 0.2,
            ("q4_0", "Gaussian"): 0.2,
            ("q4_K", "uniform"): 0.7,
            ("q4_K", "Gaussian"): 0.4,
        }


def narrow(folder: Path) -> None:
    """Leave a copy what products of 17 to 32 columns take: the compiler has many defects to see."""
    plan, variants = folder / PLAN.name, folder / "variants.cuh"
    rows, tables = re.subn(
        r"ROWS\[\] = \{.*?\{32, +(\S.*?\(\))\},.*?\n    \};",
        r"ROWS[] = {{INT64_MAX, \1}};",
        plan.read_text(),
        flags=re.DOTALL,
    )
    plan.write_text(rows)
    assert tables == len(TABLES)
    text = variants.read_text()
    for adds, configuration in NARROW.items():
        text, calls = re.subn(rf" {adds}<.*>\(rungs\);", f" {adds}<{configuration}>(rungs);", text)
        assert calls >= 2
    variants.write_text(text)


@pytest.fixture(scope="session")
def defective(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a proof that has every defect, none of them unless EMULATOR_DEFECT is its number."""
    folder = tmp_path_factory.mktemp("defective")
    shutil.copytree(KERNELS, folder / "kernels", ignore=shutil.ignore_patterns("build"))
    for file in {file for file, *_ in DEFECTS}:
        defects = {i: defect for i, (each, _, _, defect) in enumerate(DEFECTS) if each == file}
        plant(folder / "kernels" / NAME / file.name, defects)
    narrow(folder / "kernels" / NAME)
    return compile_emulated(folder / "kernels", PROGRAM, folder / "program", "-O0")


@pytest.mark.slow
@pytest.mark.parametrize("rung", ["planned-plain", *ROUNDED])
def test_without_a_defect_it_is_right(defective: Path, rung: str) -> None:
    """So that it is the defect that the next test finds."""
    for kind in Q4:
        assert run(defective, "shape", kind, "129", "17", "1280", rung).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "rung"),
    [pytest.param(i, rung, id=f"{rung}: {what}") for i, (_, rungs, what, _) in enumerate(DEFECTS) for rung in rungs],
)
def test_a_defect_of_the_kernel_is_found(
    defective: Path, monkeypatch: pytest.MonkeyPatch, number: int, rung: str
) -> None:
    """Each fails a product of either type, or crashes, of some inputs and order of the threads."""
    monkeypatch.setenv("EMULATOR_DEFECT", str(number))
    k = ROUND if rung in ROUNDED else 1280
    size = ("17", "130", "512") if DEFECTS[number][3] in PAIRS.values() else ("129", "17", str(k))
    assert any(
        run(defective, "shape", kind, *size, rung, *wild, reverse=reverse).returncode != 0
        for wild in ((), ("wild",))
        for kind in Q4
        for reverse in (False, True)
    )
