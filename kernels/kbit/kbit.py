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
TILE_K, TILE_N = 128, 16
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

    return torch.ops.kbit


def _check(t: Any, name: str, beside: Any, dtypes: tuple[Any, ...], elements: int = 0) -> None:
    """Raise what is wrong with a tensor. Sentences are made where they are raised: torch.compile cannot trace them."""
    if not beside.is_cuda or t.device != beside.device:
        raise ValueError(f"kbit: {name} is on {t.device}: all tensors must be on one CUDA device")
    if t.dtype not in dtypes:
        raise TypeError(f"kbit: {name} must be {' or '.join(map(str, dtypes))}, it is {t.dtype}")
    if not t.is_contiguous():
        raise ValueError(f"kbit: {name} must be contiguous")
    if t.numel() < elements:
        raise ValueError(f"kbit: {name} must have {elements} elements, it has {t.numel()}")


def _check_sizes(k: int, N: int = 1, K_dim: int = 32) -> None:
    if k not in (2, 3, 4, 5):
        raise ValueError(f"kbit: k must be 2, 3, 4 or 5, not {k}")
    if N < 1 or K_dim < 32 or K_dim % 32:
        raise ValueError(f"kbit: K_dim must be a multiple of 32, and N positive, not {K_dim} and {N}")


def quantise(x: Any, book: Any, k: int, absmax_dtype: Any = None) -> tuple[Any, Any]:
    """Return planes, int32 [blocks, k], and absmax of each block of 32: uint8 (E4M4), or float16. Waits for the GPU."""
    import torch

    _check_sizes(k)
    _check(x, "x", x, (torch.float16, torch.bfloat16, torch.float32))
    _check(book, "codebook", x, (torch.float32,), 1 << k)
    if x.numel() % 32 or not x.numel():
        raise ValueError(f"kbit: x must have a positive multiple of 32 elements, it has {x.numel()}")
    packed, absmax, flags = operators().quantise(x, book, k, absmax_dtype or torch.uint8)
    not_finite, beyond, not_ascending = flags.tolist()
    if not_ascending:
        raise ValueError("kbit: the codebook must be finite and ascend")
    if not_finite:
        raise ValueError("kbit: x has NaN or infinity")
    if beyond:
        raise ValueError("kbit: an absmax is beyond 31, or 65504 in float16: scale x, or take float16 for absmax")
    return packed, absmax


def dequantise(packed: Any, absmax: Any, book: Any, k: int, dtype: Any = None, *, out: Any = None) -> Any:
    """Return all weights in one row, float16 unless another dtype is asked for; or write them to `out`, for graphs."""
    import torch

    _check_sizes(k)
    blocks = packed.numel() // k
    _check(packed, "packed", packed, (torch.int32,), k)
    _check(absmax, "absmax", packed, (torch.uint8, torch.float16), blocks)
    _check(book, "codebook", packed, (torch.float32,), 1 << k)
    if out is None:
        out = packed.new_empty((32 * blocks,), dtype=dtype or torch.float16)
    _check(out, "out", packed, (torch.float16, torch.bfloat16, torch.float32), 32 * blocks)
    return operators().dequantise.out(packed, absmax, book, k, out=out)


def kbit_repack_for_gemm(
    packed: Any, absmax: Any, K_dim: int, N: int, k: int, tile_k: int = TILE_K, tile_n: int = TILE_N
) -> tuple[Any, Any]:
    """Return planes and E4M4 scales of W[N, K_dim] in the order of `kbit_gemm`."""
    import torch

    _check_sizes(k, N, K_dim)
    if (tile_k, tile_n) != (TILE_K, TILE_N):
        raise ValueError(f"kbit: tiles are of tile_k={TILE_K} by tile_n={TILE_N}, not {tile_k} by {tile_n}")
    _check(packed, "packed", packed, (torch.int32,), N * K_dim // 32 * k)
    _check(absmax, "absmax", packed, (torch.uint8,), N * K_dim // 32)
    return tuple(operators().repack_for_gemm(packed, absmax, K_dim, N, k))


def kbit_gemm(A: Any, B_packed: Any, absmax: Any, codebook: Any, k: int, N: int, K_dim: int) -> Any:
    """Return A W^T, [M, N] of A's type: fused, or for many tokens by the library after unpacking."""
    import torch

    _check_sizes(k, N, K_dim)
    _check(A, "A", A, (torch.float16, torch.bfloat16), K_dim)
    if A.dim() != 2 or A.shape[1] != K_dim:
        raise ValueError(f"kbit: A must be [M, {K_dim}], it is {list(A.shape)}")
    blocks = -(-N // TILE_N) * -(-K_dim // TILE_K) * TILE_N * TILE_K // 32
    _check(B_packed, "B_packed", A, (torch.int32,), blocks * k)
    _check(absmax, "absmax", A, (torch.uint8,), blocks)
    _check(codebook, "codebook", A, (torch.float32,), 1 << k)
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
