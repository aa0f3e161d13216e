"""Print the tables of errors: the bound of each number of bits, and signal to quantisation noise on N(0,1).

python kernels/kbit/tables.py [LIBGGML_BASE]     a libggml-base.so of llama.cpp, whose own types are measured beside
"""

import ctypes
import sys

import kbit
import numpy as np

COUNT = 1 << 18
CODES = np.array(
    [m / 16 * 2.0**-10 if e == 0 else (1 + m / 16) * 2.0 ** (e - 11) for e in range(16) for m in range(16)]
)
"""What the bytes of E4M4 mean, ascending."""

GGML = {"mxfp4": 39, "nvfp4": 40, "q4_K": 12, "iq4_xs": 23}
"""By ggml's name: the number of a type beside which ours are to be seen."""


def normal(count: int = COUNT, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count // 32, 32))


def nearest(values: np.ndarray, entries: np.ndarray) -> np.ndarray:
    """Return for each value the nearest of ascending entries."""
    return entries[np.searchsorted((entries[1:] + entries[:-1]) / 2, values)]


def decibels(x: np.ndarray, y: np.ndarray) -> float:
    """Return signal to quantisation noise in dB."""
    return float(10 * np.log10(np.square(x).sum() / np.square(x - y).sum()))


def quantised(x: np.ndarray, entries: np.ndarray, absmax: str) -> np.ndarray:
    """Return what blocks come back as, codes by the exact largest magnitude; absmax is e4m4 or f16."""
    largest = np.abs(x).max(1, keepdims=True)
    scales = nearest(largest, CODES) if absmax == "e4m4" else largest.astype(np.float16).astype(float)
    return nearest(x / largest, entries) * scales


def searched(x: np.ndarray, entries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return entries and scales; each block takes the E4M4 scale of the smallest error, of the 28 up to its largest."""
    best, scales, errors = np.zeros_like(x), np.ones((len(x), 1)), np.full((len(x), 1), np.inf)
    top = np.searchsorted(CODES, np.abs(x).max(1, keepdims=True)) + 2
    for step in range(28):
        scale = CODES[np.clip(top - step, 1, 255)]
        y = nearest(x / scale, entries)
        error = np.square(x - y * scale).sum(1, keepdims=True)
        best, scales = np.where(error < errors, y, best), np.where(error < errors, scale, scales)
        errors = np.minimum(error, errors)
    return best, scales


def lloyd(k: int, rounds: int = 100) -> np.ndarray:
    """Return the codebook that Lloyd's iteration finds for blocks of N(0,1) whose scales are searched."""
    x, entries = normal(1 << 16, 2), np.array(kbit.codebook(k))
    for _ in range(rounds):
        chosen, scales = searched(x, entries)
        weights = np.broadcast_to(np.square(scales), x.shape)
        # the mean of each entry's elements by their scales, which count by their squares
        entries = np.array(
            [np.average((x / scales)[chosen == each], weights=weights[chosen == each]) for each in entries]
        )
        entries = (entries - entries[::-1]) / 2
        entries /= np.abs(entries).max()
    return entries


def ggml(library: ctypes.CDLL, name: str, x: np.ndarray) -> np.ndarray:
    """Return what one of ggml's types makes of x."""
    values = np.ascontiguousarray(x.reshape(-1, 256), np.float32)
    library.ggml_row_size.restype = ctypes.c_size_t
    size = library.ggml_row_size(GGML[name], ctypes.c_int64(256)) * len(values)
    blocks, back = np.zeros(size, np.uint8), np.zeros_like(values)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointers = [ctypes.c_void_p(each.ctypes.data) for each in (values, blocks)]
    library.ggml_quantize_chunk(GGML[name], *pointers, *map(ctypes.c_int64, (0, len(values), 256)), None)
    library[f"dequantize_row_{name}"](pointers[1], ctypes.c_void_p(back.ctypes.data), ctypes.c_int64(values.size))
    return back.reshape(x.shape).astype(float)


def bound(k: int) -> float:
    """Return the bound of an error by the block's largest magnitude: half of the largest gap and E4M4's 1/32."""
    return float(np.diff(kbit.codebook(k)).max() / 2 + 1 / 32)


def main(library: str | None = None) -> None:
    x = normal()
    print("| K | bytes a weight | bound | worst | plain, f16 | plain, E4M4 | Lloyd, searched |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for k in range(2, 6):
        entries, best = np.array(kbit.codebook(k)), lloyd(k)
        plain = quantised(x, entries, "e4m4")
        worst = (np.abs(x - plain) / np.abs(x).max(1, keepdims=True)).max()
        chosen, scales = searched(x, best)
        noise = [decibels(x, each) for each in (quantised(x, entries, "f16"), plain, chosen * scales)]
        cells = [f"{k / 8 + 1 / 32:.5f}", f"{bound(k):.3f}", f"{worst:.3f}", *(f"{each:.2f}" for each in noise)]
        print(f"| {k} | {' | '.join(cells)} |")
    if library:
        loaded = ctypes.CDLL(library)
        print("\n" + ", ".join(f"{name} {decibels(x, ggml(loaded, name, x)):.1f} dB" for name in GGML))


if __name__ == "__main__":
    main(*sys.argv[1:2])
