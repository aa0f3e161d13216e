"""Traces as kernels/trace writes them, and what llama-batched-bench prints above them."""

from collections.abc import Iterator, Mapping, Sequence

PROGRAM = "/build/bin/llama-batched-bench"
ROW = '{{"n_batch": {n_batch}, "n_ubatch": 512, "is_pp_shared": 0, "pp": {pp}, "tg": {tg}, "pl": {pl}, "n_threads": 1}}'

Kernels = Mapping[str, Sequence[int]]
"""The durations of each kernel in a pass, in ns, by its whole name."""


def tokens(pp: int, tg: int, sizes: Sequence[int], repetitions: int = 3, n_batch: int = 2048) -> Iterator[int]:
    """Yield the tokens of every pass of a run: a first one of 16, then prompts and steps; the last row is repeated."""
    yield 16
    for pl in [*sizes] * (repetitions + 1) + [sizes[-1]]:
        yield from (min(n_batch, pp * pl - at) for at in range(0, pp * pl, n_batch))
        yield from [pl] * tg


def trace(
    passes: Sequence[tuple[int, Kernels]], *, program: str = PROGRAM, device: int = 0, dropped: int = 0, early: int = 0
) -> str:
    """Return a trace: loading, and these passes, a microsecond between them, each as long as its kernels.

    A kernel starts `early` ns before the last one has ended.
    """
    names = list(dict.fromkeys(["[memcpy host to device]", *(name for _, kernels in passes for name in kernels)]))
    lines = [f"trace\t1\t{program}\t4711"]
    lines += [f"kernel\t{at}\t{device}\t1,1,1\t128,1,1\t32\t{name}" for at, name in enumerate(names)]
    marks, launches, now = [], ["launch\t0\t7\t0\t100\t99999"], 1_000_000
    for n_tokens, kernels in passes:
        begin = now
        for name, durations in kernels.items():
            for ns in durations:
                launches.append(f"launch\t{names.index(name)}\t7\t0\t{now}\t{ns}")
                now += ns - early
        now += early
        marks.append(f"pass\t{n_tokens}\t{begin}\t{now}")
        now += 1000
    return "\n".join([*lines, *marks, *launches, f"end\t{len(marks)}\t{len(launches)}\t{dropped}", ""])


def output(
    pp: int, tg: int, sizes: Sequence[int], kernels: Kernels, repetitions: int = 3, n_batch: int = 2048, early: int = 0
) -> str:
    """Return the output of a run in which every pass launches the same kernels."""
    rows = [ROW.format(pp=pp, tg=tg, pl=pl, n_batch=n_batch) for pl in [*sizes] * (repetitions + 1)]
    passes = [(count, kernels) for count in tokens(pp, tg, sizes, repetitions, n_batch)]
    return "\n".join([*rows, trace(passes, early=early)])
