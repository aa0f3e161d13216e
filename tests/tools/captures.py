"""Real output of the tools, from tests/golden, and the cells that it measures."""

import gzip
from functools import cache
from pathlib import Path

from dgxlab.model import Cell

GOLDEN = Path(__file__).parents[1] / "golden"


@cache
def capture(name: str) -> str:
    path = GOLDEN / name
    return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_bytes().decode()


def kernel_cell(type_a: str, n: int, *, backend: str = "CUDA0", **params: str | int) -> Cell:
    shape = {"op_name": "MUL_MAT", "backend_name": backend, "type_a": type_a, "m": 4096, "n": n, "k": 14336}
    return Cell("backend-ops", f"MUL_MAT {type_a} n={n}", {**shape, **params})


def llama_cell(n_prompt: int, n_gen: int, *, repetitions: int = 4, **params: str | int) -> Cell:
    label = f"pp{n_prompt}" if n_prompt else f"tg{n_gen}"
    return Cell("llama-bench", label, {"n_prompt": n_prompt, "n_gen": n_gen, **params}, {"repetitions": repetitions})


def batched_cell(pp: int, tg: int, pl: int) -> Cell:
    return Cell("batched-bench", f"pp{pp} tg{tg} B{pl}", {"pp": pp, "tg": tg, "pl": pl})
