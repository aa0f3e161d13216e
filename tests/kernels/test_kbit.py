"""Codebook quantisation: the kernels' own source on an emulated GPU, its defects, and the library."""

import ctypes
import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.kernels.conftest import both_orders, fails, run
from tests.kernels.emulate import EMULATOR, KERNELS, compile_emulated, copy_kernels, plant

NAME = "kbit"

FORMAT = {
    "a subnormal scale twice as large": "(float) code * «(1.0f / 16384.0f)→(1.0f / 8192.0f)» : x;",
    "a scale rounded down": "(((bits + «0x3FFFF→0» + (bits >> 19 & 1)) >> 19)",
    "the middle above": "code += middles[«code + (1 << b) - 1→code + (1 << b)»] < scaled",
    "a block of zeros by zero": "fmaxf(largest, «1e-8f→0.0f»));\n        int         code   = «0→scaled != scaled»;",
    "the largest of half a block": "for (int i = «KBIT_WARP / 2→KBIT_WARP / 4»; i > 0; i /= 2) {",
    "planes of the next bit": "__ballot_sync(0xFFFFFFFF, code >> «b→(b ^ 1)» & 1);",
    "infinity not flagged": "if ((__float_as_uint(v) & 0x7F800000) == «0x7F800000→0x7F800001») {",
    "nibbles exchanged": "codes[i] = of[i / 2] >> «i % 2→(1 - i % 2)» * 4 & 0x0F0F0F0F;",
    "bits of codes exchanged": "exchange(of[0], of[1], 1, «0x55555555→0x33333333»);",
    "the fifth plane's other nibble": "(planes[4] >> («i % 2→(1 - i % 2)» * 4 + i / 2) & 0x01010101)",
    "pieces exchanged": "pieces_[slot(at / PIECES, «at % PIECES→(at % PIECES ^ 1)»)];",
    "lanes not waited for": "write(const F place) const {\n        «__syncwarp();→»",
    "rows of a tile by fours": "tile / units * KBIT_ROWS + lane / 4 + which * «8→4»;",
    "blocks of a tile exchanged": "const int64_t block = tile % units * 4 + «lane % 4→(3 - lane % 4)»;",
    "rows beyond the matrix repacked": "const bool    there = «row < n→row <= n» && block < blocks_of_row;",
    "scales beyond K_dim": "scales[part] = «there→row < n» ? absmax[row * blocks_of_row + block] : 0;",
    "words of an odd number of bits": "of_odd * KBIT_WARP + «lane * 2→lane» + word - of_odd",
    "a mask of one bit less": "return v & ((1u << «bits→(bits - 1)») - 1) << shift;",
    "not across words": "? __funnelshift_r(low, «words[first / 32 + 1]→0», at - shift)",
    "the scale of the other row": "table + at) * scale[«which→1 - which»], v[e]);",
}
"""Defects of kbit.cuh."""

PRODUCT = {
    "entries of a pair exchanged": "(codebook[«entry & MASK→entry >> C::K & MASK»], codebook[entry >> C::K & MASK]);",
    "bytes exchanged": "lane, 0x5504 | «first % 32 / 8→(3 - first % 32 / 8)» << 4);",
    "one row's scale for both": "words_[buffer][i / 2].scale(T(), «i % 2→0»);",
    "the codes of one row twice": "words_[buffer][mt].of + «C::K→0», 2 * j + i, scale[mt][1], 1,",
    "activations exchanged": "of % 4, token % 8 * 4 + «of / 4→(3 - of / 4)»);",
    "activations of the unit before": "const int k     = («unit + of→max(unit + of - 1, 0)») * KBIT_UNIT",
    "tokens beyond the last copied": "if («token_ + token < p_.m→true» && k < p_.k_dim) {",
    "activations beyond K_dim copied": "if (token_ + token < p_.m && «k < p_.k_dim→true») {",
    "activations copied where they are read": "last, «stage == 0 ? KBIT_STAGES - 1 : stage - 1→stage»);",
    "activations not waited for": "no warp still reads the stage before\n                        «__syncthreads();→»",
    "weights of the unit before": "load((i + C::AHEAD) % BUFFERS, «unit + i + C::AHEAD→unit + i», last);",
    "k of activations exchanged": "{«i == 0→i != 0» ? b[nt].x : b[nt].z, i == 0 ? b[nt].y : b[nt].w};",
    "a part's last unit left out": "* p.units * part / «p.parts→(p.parts + (part == p.parts))»;",
    "added up too early": "last = w4a16_count(counter, done) + done == «of→of - done»;",
    "a counter left": "*counter = «0→1»;",
    "partial sums of one part": "(p.parts + kbit_tiles(p.strips)) + «part→0» + tile) * C::SUMS",
    "a tile's first part left out": "kbit_partials<C>(p_, «first→first + 1», tile)",
    "rows beyond N written": "if («row < p.n→row <= p.n» && column < p.m) {",
    "a token beyond M written": "if (row < p.n && «column < p.m→column <= p.m») {",
    "a slice of tokens too few": "return «kbit_over(m, KBIT_MOST_TOKENS)→(m > 64 ? m / 64 : 1)»; }",
}
"""Defects of kbit_gemm.cuh."""

BITS = ("5", "2")
"""Numbers of bits that between them have every way through the source: a pair across words, quadruples by a permute."""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the proof with every defect of both files, of which EMULATOR_DEFECT chooses one."""
    folder = tmp_path_factory.mktemp("broken")
    kernels = copy_kernels(folder)
    plant(kernels / NAME / "kbit.cuh", dict(enumerate(FORMAT.values())))
    plant(kernels / NAME / "kbit_gemm.cuh", dict(enumerate(PRODUCT.values(), len(FORMAT))))
    return compile_emulated(kernels, EMULATOR / "kbit.cpp", folder / "program", "-O1")


def test_the_format_and_what_must_be_seen(emulated: Path) -> None:
    """Every E4M4 byte, flags, refusals; wrong outputs, layouts and workspaces, and the published mapping, are seen."""
    ran = run(emulated, "general")
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("ok  ") == 28


@pytest.mark.parametrize("k", range(2, 6))
@both_orders
def test_the_kernels_are_right_on_the_emulator(emulated: Path, k: int, reverse: bool) -> None:
    """Every type, tails of M, N and K_dim, one-hot activations and scales, asymmetric codebooks, 1 to 16 splits."""
    ran = run(emulated, "edges", str(k), reverse=reverse)
    assert ran.returncode == 0, ran.stderr
    assert "FAIL" not in ran.stderr
    assert ran.stderr.count("ok  ") == 60


@pytest.mark.parametrize("number", range(len(FORMAT) + len(PRODUCT)), ids=[*FORMAT, *PRODUCT])
def test_a_defect_is_found(broken: Path, number: int) -> None:
    proofs = [("general",), *(("edges", k) for k in BITS)]
    assert any(fails(broken, *proof, defect=number, reverse=reverse) for reverse in (False, True) for proof in proofs)


@pytest.mark.parametrize(("verb", "right_forward"), [("published-reduction", True), ("published-pipeline", False)])
def test_the_published_races_are_seen(emulated: Path, verb: str, right_forward: bool) -> None:
    """The first writer overwrites what others added before; two stages are read too early, or overwritten."""
    assert (run(emulated, verb).returncode == 0) is right_forward
    assert run(emulated, verb, reverse=True).returncode == 1


# -- the library ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kbit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kbit", KERNELS / NAME / "kbit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def library(kbit: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> object:
    """Return the library of the emulated kernels, whose device memory is NumPy's."""
    out = tmp_path_factory.mktemp("library") / "kbit.so"
    compile_emulated(KERNELS, EMULATOR / "kbit_library.cpp", out, "-O1", "-shared", "-fPIC")
    return kbit.Library(out)


def aligned(count: int, dtype: type) -> np.ndarray:
    """Return zeros at a multiple of 256, as device memory is."""
    size = count * np.dtype(dtype).itemsize
    raw = np.zeros(size + 256, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + size].view(dtype)


def memory(library: "object", array: np.ndarray) -> None:
    """Tell the emulator that it may copy from there."""
    library._library.emulated_memory(ctypes.c_void_p(at(array)), ctypes.c_size_t(array.nbytes))


def at(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("k", range(2, 6))
def test_the_library_quantises_and_multiplies(kbit: ModuleType, library: "object", k: int) -> None:
    """From float32 weights to a product: each step is NumPy's from the definitions, in float64."""
    random, (m, n, k_dim) = np.random.default_rng(k), (3, 20, 96)
    blocks = n * k_dim // 32
    weights, book = aligned(n * k_dim, np.float32), aligned(1 << k, np.float32)
    weights[:], book[:] = random.normal(size=n * k_dim), kbit.codebook(k)
    planes, absmax, flags = aligned(blocks * k, np.uint32), aligned(blocks, np.uint8), aligned(3, np.int32)
    library.call("quantise", at(weights), 2, at(book), k, n * k_dim, at(planes), at(absmax), 3, at(flags), 0)
    assert flags.tolist() == [0, 0, 0]

    rows = weights.reshape(blocks, 32).astype(np.float64)
    largest = np.abs(rows).max(1, keepdims=True)
    nearest = np.abs((rows / largest)[..., None] - book).argmin(-1)
    bits = planes.reshape(blocks, k, 1) >> np.arange(32, dtype=np.uint32) & 1
    assert np.array_equal((bits << np.arange(k).reshape(k, 1)).sum(1), nearest)
    exponent, mantissa = absmax >> 4, absmax & 15
    scale = np.where(exponent == 0, mantissa / 16 * 2.0**-10, (1 + mantissa / 16) * 2.0 ** (exponent - 11.0))
    assert np.all(np.abs(scale - largest[:, 0]) <= largest[:, 0] / 32)
    exact = book.astype(np.float64)[nearest] * scale[:, None]

    plain = aligned(n * k_dim, np.float32)
    library.call("dequantise", at(planes), at(absmax), 3, at(book), k, n * k_dim, at(plain), plain.size, 2, 0)
    assert np.array_equal(plain, exact.astype(np.float32).ravel())
    gap = np.diff(book).max() / 2
    assert np.all(np.abs(plain.reshape(rows.shape) - rows) <= (gap + 1 / 32) * largest + 1e-6)

    tiles = aligned(library.size("words_of_tiles", k, n, k_dim), np.uint32)
    scales = aligned(library.size("words_of_scales", n, k_dim) * 4, np.uint8)
    library.call("repack", at(planes), at(absmax), k, n, k_dim, at(tiles), at(scales), 0)
    a, c = aligned(m * k_dim, np.float16), aligned(m * n, np.float16)
    a[:] = random.normal(size=m * k_dim)
    memory(library, a)
    workspace = aligned(library.size("workspace_of", k, m, n, k_dim), np.uint8)
    operands = (at(a), 0, m, at(tiles), at(scales), at(book), k, n, k_dim)
    library.call("gemm", *operands, at(c), at(workspace), workspace.size, 0)
    must = a.reshape(m, k_dim).astype(np.float64) @ exact.reshape(n, k_dim).T
    assert np.abs(c.reshape(m, n) - must).max() < 2e-3 * np.abs(must).max()


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("quantise", (64, 2, 64, 6, 64, 64, 64, 3, 64, 0), "k must be 2, 3, 4 or 5"),
        ("quantise", (64, 2, 64, 4, 33, 64, 64, 3, 64, 0), "multiple of 32"),
        ("quantise", (64, 7, 64, 4, 64, 64, 64, 3, 64, 0), "type is not supported"),
        ("dequantise", (64, 64, 3, 64, 4, 64, 64, 63, 0, 0), "too small"),
        ("dequantise", (64, 64, 1, 64, 4, 64, 64, 64, 0, 0), "type is not supported"),
        ("repack", (64, 64, 4, 1, 48, 64, 64, 0), "K_dim must be a multiple of 32"),
        ("repack", (66, 64, 4, 1, 32, 64, 64, 0), "not aligned"),
        ("gemm", (64, 0, 0, 64, 64, 64, 4, 1, 32, 64, 256, 0, 0), "a token at least"),
        ("gemm", (64, 0, 1, 64, 64, 64, 4, 1, 32, 64, 256, 0, 0), "too small"),
        ("gemm", (64, 2, 1, 64, 64, 64, 4, 1, 32, 64, 256, 1 << 20, 0), "type is not supported"),
    ],
)
def test_the_library_says_what_is_wrong(library: "object", name: str, arguments: tuple[int, ...], why: str) -> None:
    """Before any memory is touched."""
    with pytest.raises(ValueError, match=why):
        library.call(name, *arguments)


def test_a_codebook_of_other_bits_is_refused(kbit: ModuleType) -> None:
    with pytest.raises(ValueError, match="k must be 2, 3, 4 or 5, not 6"):
        kbit.codebook(6)


def test_the_codebook_is_symmetric_and_its_gaps_are_the_published_ones(kbit: ModuleType) -> None:
    """Half of the largest gap: .372, .228, .163, .126."""
    for k, half in ((2, 0.372), (3, 0.228), (4, 0.163), (5, 0.126)):
        book = np.array(kbit.codebook(k))
        assert np.allclose(book, -book[::-1], atol=1e-12)
        assert abs(book).max() == 1
        assert np.diff(book).max() / 2 == pytest.approx(half, abs=6e-4)


def test_the_tables_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """No error beyond the bound, the floors in dB, at most 0.3 dB for E4M4; a search of scales and Lloyd help."""
    monkeypatch.syspath_prepend(KERNELS / NAME)
    tables = importlib.import_module("tables")
    x = tables.normal(1 << 15)
    for k, floor in ((2, 7.3), (3, 14.6), (4, 20.4), (5, 24.9)):
        entries = np.array(tables.kbit.codebook(k))
        plain = tables.quantised(x, entries, "e4m4")
        assert (np.abs(x - plain) / np.abs(x).max(1, keepdims=True)).max() <= tables.bound(k)
        noise = tables.decibels(x, plain)
        assert noise > floor
        assert tables.decibels(x, tables.quantised(x, entries, "f16")) - noise < 0.3
        chosen, scales = tables.searched(x, tables.lloyd(k, rounds=3))
        assert tables.decibels(x, chosen * scales) > noise + 0.7


def test_the_operations_of_a_published_tile() -> None:
    """64 x 128 outputs by 64 of k: 8 warps' 32 products of 16 x 8 x 16 each are four times the published 262,144."""
    products = 8 * 32
    assert products * (16 * 8 * 16) == 64 * 128 * 64
    assert 2 * products * (16 * 8 * 16) == 1_048_576 == 4 * 262_144
