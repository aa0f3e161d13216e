"""The figure of adopting a log that somebody else's test-backend-ops printed."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from bench.figure import Figure, figure, take_turns
from dgxlab.imported import open_file, record, rows_of
from dgxlab.store import Store

CASES = 10_000

HEAD = (
    "Testing 2 devices\n\nBackend 1/2: CUDA0\n  Device description: NVIDIA H200\n"
    "  Device memory: 143155 MB (142629 MB free)\n\n"
)
TAIL = "  Backend CUDA0: \x1b[1;32mOK\x1b[0m\nBackend 2/2: CPU\n  Skipping\n2/2 backends passed\n\x1b[1;32mOK\x1b[0m\n"


def adopt(quick: bool) -> Figure:
    """Time the import of a large console log into an empty record."""
    cases = CASES // 100 if quick else CASES
    with tempfile.TemporaryDirectory(prefix="dgxlab-bench-") as folder:
        log = write_log(Path(folder), cases)
        turns = range(2 if quick else 7)
        sides = iter([Path(folder) / f"{turn}.db" for turn in turns])
        (walls,) = take_turns(len(turns), lambda: _adopt(log, next(sides), cases))
    return figure("import", f"import of a {cases:,}-case test-backend-ops log", walls, "s", 1.0)


def write_log(folder: Path, cases: int) -> Path:
    """Write a log as the console prints it: diagnostics between every fourth case and its result."""
    lines = []
    for n in range(1, cases + 1):
        time_us = 5 + n / 8
        case = f"  MUL_MAT(type_a=q4_0,type_b=f32,m=4096,n={n},k=14336,bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1): "
        if n % 4 == 0:
            case += "ggml_backend_cuda_graph_compute: CUDA graph warmup complete\n"
        work = 2 * 4096 * 14336 * n
        shown, per_second = f"{work / 1e9:6.2f} GFLOP/run", f"{work / time_us / 1e6:6.2f} TFLOPS"
        lines.append(
            f"{case}         {10_000:8d} runs - {time_us:8.2f} us/run - {shown} - \x1b[1;34m{per_second}\x1b[0m\n"
        )
    path = folder / "perf.log"
    path.write_text(f"{HEAD}{''.join(lines)}{TAIL}")
    return path


def _adopt(log: Path, db: Path, cases: int) -> float:
    """Return the seconds from a file to a record on this machine's disk."""
    with Store.open(db) as store:
        begin = time.perf_counter()
        found = open_file(log)
        record(store, found)
        seconds = time.perf_counter() - begin
        counted = len(rows_of(store, found.import_id))
    if counted != cases:
        raise RuntimeError(f"{counted} of {cases} cases arrived")
    return seconds
