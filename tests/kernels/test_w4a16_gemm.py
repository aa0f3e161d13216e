"""W4A16: the kernels' own source on an emulated GPU, and their reference."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gguf import quants

from tests.kernels.conftest import Q4, assert_right, blocks_of, both_orders, fails, ggml, reference, run
from tests.kernels.emulate import EMULATOR, KERNELS, compile_emulated, copy_kernels, plant
from tests.kernels.packed import unpacked

NAME = "w4a16_gemm"
KERNEL = KERNELS / NAME / "w4a16_gemm.cuh"
WGMMA = KERNEL.with_name("w4a16_wgmma.cuh")
PACKED = KERNEL.with_name("w4a16_packed.cuh")
PACKED_WGMMA = KERNEL.with_name("w4a16_packed_wgmma.cuh")
PACKED_MMA = KERNEL.with_name("w4a16_packed_mma.cuh")
PLAN = KERNEL.with_name("w4a16_plan.cuh")
PROGRAM = EMULATOR / f"{NAME}.cpp"

TABLES = {
    "planned": "w4a16_sm_90a",
    "planned-plain": "w4a16_sm_90",
    "planned-121": "w4a16_sm_80",
    "planned-packed": "w4a16_sm_90a_packed",
    "planned-plain-packed": "w4a16_sm_90_packed",
    "planned-121-packed": "w4a16_sm_120_packed",
}
"""By rung: the table that plans; the last one has a single row."""

ROUND = 5120
"""So much of k that a block goes round its stages."""

ROUNDED = ("planned", "planned-packed", "planned-plain-packed")
"""The rungs whose stages are filled by other warps."""

BARRIER = "        // all copies of this step are there for all, and nobody reads what was read in the step before\n"
WAIT = "«w4a16_wait_for(stages_.{}_full + {}.stage, {}.parity);\n→»"
W_THERE, X_THERE = WAIT.format("w", "w_", "w_"), WAIT.format("x", "x_", "x_")
FREE = "«w4a16_wait_for(stages.{0}_free + {0}.stage, {0}.parity ^ 1);\n→»"
RELEASE = "        if (s % STEPS == 0 && before) {\n            release_activations();\n        }\n"
PRODUCTS_END = "        w4a16_wgmma_wait<1>();\n"
PAIRS = "const int col  = «threadIdx.x / 4 % cols→0»;"
"""In the conversion of columns by twos, which takes more than 128 of them."""

PLAIN, TABLE, ON_WGMMA, ON_MMA = (("planned-plain",), ("planned",), ("planned-packed",), ("planned-plain-packed",))
PACKS, SUMS = (*ON_WGMMA, *ON_MMA), (*PLAIN, *ROUNDED)

DEFECTS = [
    (KERNEL, PLAIN, "a row beyond m written", "if («row + 16 * mt < p_.m→row + 16 * mt <= p_.m»)"),
    (KERNEL, PLAIN, "a column beyond n written", "if («to_col >= p_.n→to_col > p_.n»)"),
    (KERNEL, PLAIN, "another column's power of two", "p_.undo[«to_col→col»]"),
    (KERNEL, PLAIN, "a minimum's high bits", "(both >> 4 & 0x0F0F) | («m→s» >> 2"),
    (KERNEL, PLAIN, "the other block's scale", "«half ? 0x3232 : 0x1010→half ? 0x1010 : 0x3232»"),
    (KERNEL, PLAIN, "counters left as they were", "counters[i] = «0→1»;"),
    (KERNEL, PLAIN, "outputs brought back too far", "(exponent - «14→13») << 23"),
    (KERNEL, PLAIN, "a column not scaled", "if («w4a16_scale(taken_as) != 1.0f→w4a16_scale(taken_as) == 0.0f»)"),
    (KERNEL, PLAIN, "no barrier", f"        {BARRIER}«                __syncthreads();\n→»"),
    (
        KERNEL,
        PLAIN,
        "a copy not waited for",
        f"«w4a16_wait<C::X_STAGES - 2>();→w4a16_wait<C::X_STAGES - 1>();»\n        {BARRIER}",
    ),
    (KERNEL, SUMS, "a part left out", "part.begin + p.units - 1) + «1→0»;"),
    (KERNEL, SUMS, "a slot of the other tile", " + «(w4a16_begin(p, b + i) <= part.begin)→0» : 0;"),
    (KERNEL, TABLE, "the largest of two columns for each", PAIRS),
    (WGMMA, TABLE, "activations not waited for", f"        {X_THERE}"),
    (WGMMA, TABLE, "the first weights not waited for", f"this->clear();\n        {W_THERE}"),
    (WGMMA, TABLE, "a unit's weights not waited for", f"else if (more) {{\n            {W_THERE}"),
    (WGMMA, TABLE, "weights copied too early", FREE.format("w").replace("w.", "w_.").replace("stages.", "stages_.")),
    (WGMMA, TABLE, "core matrices exchanged", "(uint64_t) («128→512» >> 4) << 16 | (uint64_t) («512→128» >> 4) << 32"),
    (WGMMA, TABLE, "the order of the other kernel", "«w4a16_order::CORES→w4a16_order::FRAGMENTS»"),
    (PACKED, PACKS, "a unit's weights not waited for", f"        {W_THERE}"),
    (PACKED, PACKS, "weights copied too early", f"            {FREE.format('w')}"),
    (PACKED, PACKS, "activations copied too early", f"            {FREE.format('x')}"),
    (PACKED, PACKS, "strips beyond m copied", "«min(C::STRIPS, strips - first)→C::STRIPS»"),
    (PACKED, PACKS, "the scales of rows exchanged", "(scales, «rows[0]→rows[1]», «rows[1]→rows[0]», "),
    (PACKED, PACKS, "low nibbles for high ones", "(u.q[1] >> «4→0» & 0x0F0F0F0F)"),
    (PACKED, PACKS, "another power of two of a row", "w4a16_power_of_two(«24→25» + 127 -"),
    (PACKED_WGMMA, ON_WGMMA, "activations not waited for", f"            {X_THERE}"),
    (
        *(PACKED_WGMMA, ON_WGMMA, "weights released before their last codes are read"),
        "load_codes(s + 2);\n«→if (s == 0) { this->release_unit(); }»        } else if (s == 2) {\n"
        "            «this->release_unit();\n→»",
    ),
    (PACKED_WGMMA, ON_WGMMA, "activations released while in use", f"«→{RELEASE}»{PRODUCTS_END}«{RELEASE}→»"),
    (PACKED_WGMMA, ON_WGMMA, "fragments overwritten while in use", f"«{PRODUCTS_END}→»"),
    (PACKED_MMA, ON_MMA, "the first activations not waited for", f"        {X_THERE}"),
    (PACKED_MMA, ON_MMA, "activations not waited for", f"                {WAIT.format('x', 'next', 'next')}"),
    (PACKED_MMA, ON_MMA, "activations of the stage before", "activations(«next.stage→x_.stage», (i + 1)"),
    (PACKED_MMA, ON_MMA, "activations of other columns", "const uint4 b = «b_[nt % 2]→b_[0]»;"),
    (
        *(PACKED_MMA, ON_MMA, "activations released before they are read"),
        "        if («last_of_stage→i % PIECES == PIECES - 2») {\n            // the copy engine",
    ),
    (PACKED_MMA, ON_MMA, "the next unit's codes for the last ones", "if («i == 5→i == 4») {"),
    (PACKED_MMA, ON_MMA, "high nibbles for low ones", "«(high ? codes.w : codes.z)→(high ? codes.z : codes.w)»"),
    (PACKED_MMA, ON_MMA, "a share not taken apart", "/ (4 * C::MT) == «nt→nt + 1»)"),
]
"""The file of each, the rungs that show it, its name, the defect."""

NARROW = {
    "add_rungs": "true, 128, 32, 32, 32, 3, 8, 2",
    "add_wgmma_rungs": "128, 32, 2, 4, 8, 2",
    "add_packed_wgmma_rungs": "128, 32, 2, 5, 256, 5, 1",
    "add_packed_mma_rungs": "128, 32, 32, 32, 2, 128, 6, 2",
}
"""By what adds rungs: the configuration that sm_90's tables have for 32 columns."""


def rows_of(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Return rows of so many random blocks; a row's scales are of one size, each row's twice the one before's.

    The first row's are denormals, beside the largest minima, those of the 31st f16's largest, those of the last of
    several 0.
    """
    _, _, size, n_scales = Q4[kind]
    random = np.random.default_rng(9)
    packed = random.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    shape = (rows, blocks, n_scales)
    exponents = np.maximum(np.arange(rows)[:, None, None] % 31 - random.integers(0, 3, shape), 0)
    scales = (random.integers(0, 2, shape) << 15 | exponents << 10 | random.integers(0, 1024, shape)).astype("<u2")
    scales[0, :, 1:] |= 30 << 10
    scales[1:][-1:] = 0
    packed[..., : 2 * n_scales] = scales.view(np.uint8)
    return packed


@pytest.mark.parametrize("kind", Q4)
def test_the_reference_agrees_with_gguf(host: Path, kind: str) -> None:
    """Random blocks, as the gguf package reads them in float: to the rounding of a term."""
    blocks = blocks_of(kind, 500)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(blocks, Q4[kind][0]).reshape(-1)
    weights = reference(host, kind, blocks)
    terms = np.repeat(np.abs(weights).reshape(-1, 32).max(axis=1), 32)
    assert len(weights) == 500 * Q4[kind][1]
    assert (np.abs(weights - expected) <= 2.0**-22 * terms).all()


@pytest.mark.llama
@pytest.mark.parametrize("kind", Q4)
def test_the_reference_agrees_with_ggml(host: Path, kind: str, llama_bin: Path) -> None:
    """The same through the CPU's own conversion in the real library; Q4_0 bit for bit."""
    blocks = blocks_of(kind, 500)
    weights = reference(host, kind, blocks)
    out = ggml(llama_bin, kind, blocks, weights.size)
    terms = np.repeat(np.abs(weights).reshape(-1, 32).max(axis=1), 32)
    assert (np.abs(weights - out) <= (0 if kind == "q4_0" else 2.0**-22) * terms).all()


@pytest.mark.llama
def test_the_harness_calls_ggml(tmp_path: Path, llama_bin: Path) -> None:
    """What times llama.cpp's product beside ours gets that product, here the CPU's, for CUDA's is not here."""
    shim = tmp_path / "libshim.so"
    source = "extern void * ggml_backend_cpu_init(void); void * ggml_backend_cuda_init(int device);"
    body = "void * ggml_backend_cuda_init(int device) { (void) device; return ggml_backend_cpu_init(); }"
    linked = [f"-L{llama_bin}", "-l:libggml-cpu.so.0", "-l:libggml-base.so.0", f"-Wl,-rpath,{llama_bin}"]
    argv = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(shim), *linked]
    subprocess.run(argv, input=source + body, text=True, check=True)
    rival = compile_emulated(KERNELS, EMULATOR / "w4a16_rival.cpp", tmp_path / "rival", "-ldl")
    ran = subprocess.run([rival, shim], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("ok   product ") == 6


@both_orders
def test_every_kernel_is_right_on_the_emulator(emulated: Path, reverse: bool) -> None:
    """Each product, tails in m, n and k, wild scales, refusals; whichever thread runs first."""
    assert_right(emulated, 120, reverse=reverse)


def test_the_tables_are_right_on_the_emulator(emulated: Path) -> None:
    """Every number of columns at which a table changes, those beside it, and what there is no plan for."""
    ran = run(emulated, "tables")
    assert ran.returncode == 0, ran.stderr
    cases = re.findall(r"ok   (planned\S*) (\S+) m=65 n=(\d+) k=512", ran.stderr)
    for kind in Q4:
        for rung, table in TABLES.items():
            columns = [int(n) for name, each, n in cases if (name, each) == (rung, kind)]
            assert table == "w4a16_sm_120_packed" or {15, 16, 17, 31, 32, 33} <= set(columns)
            assert columns == [n + beside for n in switches_of(table) for beside in (-1, 0, 1)]
    assert re.findall(r"(\w+ \w+) is refused", ran.stderr).count("cannot be") == 2
    assert re.findall(r"(\w+ \w+) is refused", ran.stderr).count("be packed") == 2
    assert ran.stderr.count("ok   wide tiles are planned where they fill the GPU") == 2


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
    for rung in TABLES.keys() - {"planned-121"}:
        ran = run(emulated, "shape", kind, str(m), str(n), "768", rung)
        assert (ran.returncode, ran.stderr) == (0, f"ok   {rung} {kind} m={m} n={n} k=768\n")


@both_orders
@pytest.mark.parametrize("rung", ROUNDED)
@pytest.mark.parametrize("kind", Q4)
def test_stages_are_used_again_on_the_emulator(emulated: Path, kind: str, rung: str, reverse: bool) -> None:
    """Blocks that have more units than stages: what is free and what is there is waited for each time."""
    ran = run(emulated, "shape", kind, "129", "17", str(ROUND), rung, reverse=reverse)
    assert (ran.returncode, ran.stderr) == (0, f"ok   {rung} {kind} m=129 n=17 k={ROUND}\n")


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
    assert tables == len(TABLES) - 1
    text = variants.read_text()
    for adds, configuration in NARROW.items():
        text, calls = re.subn(rf" {adds}<.*>\(rungs\);", f" {adds}<{configuration}>(rungs);", text)
        assert calls >= 2
    variants.write_text(text)


@pytest.fixture(scope="module")
def defective(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a proof that has every defect, none of them unless EMULATOR_DEFECT is its number."""
    folder = tmp_path_factory.mktemp("defective")
    kernels = copy_kernels(folder)
    for file in {file for file, *_ in DEFECTS}:
        defects = {i: defect for i, (each, _, _, defect) in enumerate(DEFECTS) if each == file}
        plant(kernels / NAME / file.name, defects)
    narrow(kernels / NAME)
    return compile_emulated(kernels, PROGRAM, folder / "program", "-O0")


@pytest.mark.parametrize("rung", ["planned-plain", *ROUNDED])
def test_without_a_defect_it_is_right(defective: Path, rung: str) -> None:
    for kind in Q4:
        assert run(defective, "shape", kind, "129", "17", "1280", rung).returncode == 0


@pytest.mark.parametrize(
    ("number", "rung"),
    [pytest.param(i, rung, id=f"{rung}: {what}") for i, (_, rungs, what, _) in enumerate(DEFECTS) for rung in rungs],
)
def test_a_defect_of_the_kernel_is_found(defective: Path, number: int, rung: str) -> None:
    """Each fails a product of either type, or crashes, of some inputs and order of the threads."""
    k = ROUND if rung in ROUNDED else 1280
    size = ("17", "130", "512") if DEFECTS[number][3] == PAIRS else ("129", "17", str(k))
    assert any(
        fails(defective, "shape", kind, *size, rung, *wild, defect=number, reverse=reverse)
        for wild in ((), ("wild",))
        for kind in Q4
        for reverse in (False, True)
    )
