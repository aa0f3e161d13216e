"""Codebook quantisation of 2 to 5 bits: torch operators, or C functions where torch is not.

    import kbit
    book = torch.tensor(kbit.codebook(4), device="cuda")
    packed, absmax = kbit.quantise(weights, book, 4)                     # weights [N, K_dim], K_dim a multiple of 32
    tiles, scales = kbit.kbit_repack_for_gemm(packed, absmax, K_dim, N, 4)
    y = kbit.kbit_gemm(x, tiles, scales, book, 4, N, K_dim)              # x [M, K_dim] float16 or bfloat16; y [M, N]

The first use compiles the kernels, for a minute. What is wrong raises ValueError or TypeError.
"""

import ctypes
import itertools
import math
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TILE_K, TILE_N = 256, 16
"""What `kbit_repack_for_gemm` makes tiles of."""


def codebook(k: int) -> list[float]:
    """Return the 2^k means of N(0,1) over equiprobable bins, ascending, by the largest magnitude."""
    if k not in (2, 3, 4, 5):
        raise ValueError(f"k must be 2, 3, 4 or 5, not {k}")
    count, normal = 1 << k, statistics.NormalDist()
    ends = [normal.inv_cdf(i / count) for i in range(1, count)]
    density = [0.0, *(math.exp(-x * x / 2) for x in ends), 0.0]
    # the mean over a bin: the difference of densities at its ends by its probability, which all bins share
    return [(low - high) / density[-2] for low, high in itertools.pairwise(density)]


# -- torch ------------------------------------------------------------------------------------------------------------


_OPERATORS: list[Any] = []


def operators() -> Any:
    """Return torch.ops.kbit, once it is compiled and loaded; torch.compile sees through this after the first call."""
    if not _OPERATORS:
        _OPERATORS.append(_load())
    return _OPERATORS[0]


def _load() -> Any:
    import torch
    from torch.utils import cpp_extension

    cpp_extension.load(
        "kbit",
        [str(HERE / "kbit_library.cu"), str(HERE / "kbit_torch.cpp")],
        extra_cuda_cflags=["-O3", "-use_fast_math"],
        extra_include_paths=[str(HERE), str(HERE.parent / "w4a16_gemm")],
        is_python_module=False,
    )

    @torch.library.register_fake("kbit::gemm")
    def _(a: Any, tiles: Any, scales: Any, book: Any, k: int, n: int, k_dim: int) -> Any:
        return a.new_empty((a.shape[0], n))

    @torch.library.register_fake("kbit::dequantise")
    def _(packed: Any, absmax: Any, book: Any, k: int, dtype: Any) -> Any:
        return packed.new_empty((packed.numel() // k * 32,), dtype=dtype)

    return torch.ops.kbit


def quantise(x: Any, book: Any, k: int, absmax_dtype: Any = None) -> tuple[Any, Any]:
    """Return planes, int32 [blocks, k], and absmax of each block of 32: uint8 (E4M4), or float16. Waits for the GPU."""
    import torch

    return tuple(operators().quantise(x, book, k, absmax_dtype or torch.uint8))


def dequantise(packed: Any, absmax: Any, book: Any, k: int, dtype: Any = None, *, out: Any = None) -> Any:
    """Return all weights in one row, float16 unless another dtype is asked for; or write them to `out`, for graphs."""
    import torch

    if out is not None:
        return operators().dequantise.out(packed, absmax, book, k, out=out)
    return operators().dequantise(packed, absmax, book, k, dtype or torch.float16)


def kbit_repack_for_gemm(
    packed: Any, absmax: Any, K_dim: int, N: int, k: int, tile_k: int = TILE_K, tile_n: int = TILE_N
) -> tuple[Any, Any]:
    """Return planes and E4M4 scales of W[N, K_dim] in the order of `kbit_gemm`."""
    return tuple(operators().repack_for_gemm(packed, absmax, K_dim, N, k, tile_k, tile_n))


def kbit_gemm(A: Any, B_packed: Any, absmax: Any, codebook: Any, k: int, N: int, K_dim: int) -> Any:
    """Return A W^T, [M, N] of A's type: fused, or for many tokens by the library after unpacking."""
    return operators().gemm(A, B_packed, absmax, codebook, k, N, K_dim)


# -- without torch ----------------------------------------------------------------------------------------------------


class Library:
    """The C functions of kbit_library.cu: pointers are integers, a status that is not 0 raises ValueError."""

    def __init__(self, path: Path) -> None:
        """Load a shared library: `nvcc -shared -Xcompiler -fPIC -I../w4a16_gemm kbit_library.cu -o kbit.so`."""
        self._library = ctypes.CDLL(str(path))
        self._library.kbit_error.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: int) -> None:
        """Call kbit_<name>_any: pointers and sizes are 64 bits wide, which C's int takes too.

        Raises:
            ValueError: what is wrong with the arguments.
        """
        status = self._library[f"kbit_{name}_any"](*map(ctypes.c_int64, arguments))
        if status:
            raise ValueError(self._library.kbit_error(status).decode())

    def size(self, name: str, *arguments: int) -> int:
        """Return kbit_<name>: words_of_tiles, words_of_scales, workspace_of or most_tokens."""
        function = self._library[f"kbit_{name}"]
        function.restype = ctypes.c_int64
        return int(function(*map(ctypes.c_int64, arguments)))
