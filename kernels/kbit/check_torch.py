"""The operators of kbit.py on a GPU: a line for each check, `passed` at the end, as a harness.

python kernels/kbit/check_torch.py
"""

import sys
from collections.abc import Callable
from typing import Any

import kbit
import torch

FAILED: list[str] = []


def said(passed: bool, what: str, why: str = "") -> None:
    print(f"{'ok  ' if passed else 'FAIL'} {what}{': ' + why if why and not passed else ''}", file=sys.stderr)
    if not passed:
        FAILED.append(what)


def weights_of(packed: Any, absmax: Any, book: Any, k: int, rows: int) -> Any:
    """Return the weights in float64, from planes and bytes by the format's definition."""
    bits = packed.long().unsqueeze(-1) >> torch.arange(32, device=packed.device) & 1
    codes = (bits << torch.arange(k, device=packed.device).view(1, k, 1)).sum(1)
    # by a table: pow on a GPU may be off by a bit, and products halfway between two floats then go the other way
    values = [(m / 16 if e == 0 else 1 + m / 16) * 2.0 ** (max(e, 1) - 11) for e in range(16) for m in range(16)]
    scale = torch.tensor(values, dtype=torch.float64, device=packed.device)[absmax.long()]
    return (book.double()[codes] * scale.unsqueeze(1)).view(rows, -1)


def products() -> None:
    for k in (2, 3, 4, 5):
        book = torch.tensor(kbit.codebook(k), device="cuda")
        for dtype in (torch.float16, torch.bfloat16):
            w = torch.randn(300, 1056, device="cuda", dtype=dtype) * 0.1
            packed, absmax = kbit.quantise(w, book, k)
            exact = weights_of(packed, absmax, book, k, 300)
            plain = kbit.dequantise(packed, absmax, book, k, torch.float32).view(300, 1056)
            said(torch.equal(plain, exact.float()), f"K={k} {dtype}: dequantised")
            out = torch.empty_like(plain)
            kbit.dequantise(packed, absmax, book, k, out=out)
            said(torch.equal(plain, out), f"K={k} {dtype}: dequantised to out")
            tiles, scales = kbit.kbit_repack_for_gemm(packed, absmax, 1056, 300, k)
            for m in (1, 7, 16, 33, 64, 200, 700):
                a = torch.randn(m, 1056, device="cuda", dtype=dtype)
                y = kbit.kbit_gemm(a, tiles, scales, book, k, 300, 1056)
                error = (y.double() - a.double() @ exact.T).norm() / (a.double() @ exact.T).norm()
                said(
                    bool(error < (1e-3 if dtype == torch.float16 else 8e-3)),
                    f"K={k} {dtype} M={m}: product",
                    str(error),
                )


def graphs_and_streams() -> None:
    book = torch.tensor(kbit.codebook(4), device="cuda")
    packed, absmax = kbit.quantise(torch.randn(768, 2048, device="cuda"), book, 4)
    tiles, scales = kbit.kbit_repack_for_gemm(packed, absmax, 2048, 768, 4)
    a = torch.randn(9, 2048, device="cuda", dtype=torch.float16)
    once = kbit.kbit_gemm(a, tiles, scales, book, 4, 768, 2048)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kbit.kbit_gemm(a, tiles, scales, book, 4, 768, 2048)
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    said(torch.equal(y, once), "100 replays of a graph")
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for i in range(100):
        with torch.cuda.stream(streams[i % 2]):
            results.append(kbit.kbit_gemm(a, tiles, scales, book, 4, 768, 2048))
    torch.cuda.synchronize()
    said(all(torch.equal(each, once) for each in results), "two streams")
    compiled = torch.compile(
        lambda x: kbit.kbit_gemm(x, tiles, scales, book, 4, 768, 2048) + 1, backend="eager", fullgraph=True
    )
    said(torch.equal(compiled(a), once + 1), "in a compiled function")


def refused(what: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except (ValueError, TypeError) as error:
        said(str(error).startswith("kbit: "), f"refused: {what}", str(error))
    else:
        said(False, f"refused: {what}", "no error")


def refusals() -> None:
    book = torch.tensor(kbit.codebook(4), device="cuda")
    w = torch.randn(32, 64, device="cuda")
    packed, absmax = kbit.quantise(w, book, 4)
    tiles, scales = kbit.kbit_repack_for_gemm(packed, absmax, 64, 32, 4)
    a = torch.randn(3, 64, device="cuda", dtype=torch.float16)
    said(kbit.kbit_gemm(a, tiles, scales, book, 4, 32, 64).shape == (3, 32), "a product of 3 tokens")
    for k in (1, 6):
        refused(f"K={k}", lambda k=k: kbit.quantise(w, book, k))
    refused("NaN", lambda: kbit.quantise(torch.full_like(w, torch.nan), book, 4))
    refused("infinity", lambda: kbit.quantise(torch.full_like(w, torch.inf), book, 4))
    refused("absmax above 31", lambda: kbit.quantise(w * 100, book, 4))
    refused("an unsorted codebook", lambda: kbit.quantise(w, book.flip(0), 4))
    refused("a size that is no multiple of 32", lambda: kbit.quantise(w.flatten()[:33], book, 4))
    refused("K_dim no multiple of 32", lambda: kbit.kbit_repack_for_gemm(packed, absmax, 48, 32, 4))
    refused("other tiles", lambda: kbit.kbit_repack_for_gemm(packed, absmax, 64, 32, 4, 64, 128))
    refused("M=0", lambda: kbit.kbit_gemm(a[:0], tiles, scales, book, 4, 32, 64))
    refused("A on the CPU", lambda: kbit.kbit_gemm(a.cpu(), tiles, scales, book, 4, 32, 64))
    refused("weights on the CPU", lambda: kbit.kbit_gemm(a, tiles.cpu(), scales, book, 4, 32, 64))
    refused("A float32", lambda: kbit.kbit_gemm(a.float(), tiles, scales, book, 4, 32, 64))
    refused("A of another width", lambda: kbit.kbit_gemm(a, tiles, scales, book, 4, 32, 96))
    refused("weights too few", lambda: kbit.kbit_gemm(a, tiles, scales, book, 4, 64, 64))
    refused("out too small", lambda: kbit.dequantise(packed, absmax, book, 4, out=torch.empty(64, device="cuda")))
    refused(
        "out of float64",
        lambda: kbit.dequantise(packed, absmax, book, 4, out=torch.empty(2048, device="cuda").double()),
    )
    zero, scale = kbit.quantise(torch.zeros(32, 64, device="cuda"), book, 4)
    said(not kbit.dequantise(zero, scale, book, 4).any(), "a matrix of zeros comes back")


if __name__ == "__main__":
    products()
    graphs_and_streams()
    refusals()
    print("FAILED" if FAILED else "passed", file=sys.stderr)
    sys.exit(bool(FAILED))
