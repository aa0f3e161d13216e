"""llama.cpp's own tools load, quantise and measure what `synth` writes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import gguf
import pytest

from dgxlab import synth
from dgxlab.model import SyntheticModel

pytestmark = pytest.mark.llama

RECIPES = {
    "Q4_0": SyntheticModel(quant="Q4_0", n_embd=96, n_ff=160, n_head=3, n_head_kv=1, n_vocab=33),
    "Q4_K": SyntheticModel(quant="Q4_K", n_embd=256, n_ff=512, n_head=4, n_head_kv=2, n_vocab=7),
}


@pytest.fixture(scope="module", params=sorted(RECIPES))
def quantized(request: pytest.FixtureRequest, llama_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic model after llama-quantize --pure."""
    recipe = RECIPES[request.param]
    folder = tmp_path_factory.mktemp("model")
    synth.write(recipe, folder / "f16.gguf")
    out = folder / f"{recipe.quant}.gguf"
    argv = [llama_bin / "llama-quantize", "--pure", folder / "f16.gguf", out, recipe.quant, "1"]
    subprocess.run([str(arg) for arg in argv], check=True, capture_output=True)
    return out


def run(*argv: object) -> str:
    """Run a tool and return its stdout."""
    return subprocess.run([str(arg) for arg in argv], check=True, capture_output=True, text=True).stdout


def test_every_weight_has_the_type_asked_for(quantized: Path) -> None:
    """Pure: each matrix is in the type, so a kernel for that type meets every product."""
    types = {t.tensor_type.name for t in gguf.GGUFReader(quantized).tensors if "norm" not in t.name}
    assert types == {quantized.stem}


def test_llama_bench_measures_it(quantized: Path, llama_bin: Path) -> None:
    """Prompt and generation rows with the recipe's own number of weights."""
    out = run(llama_bin / "llama-bench", "-m", quantized, "-t", 1, "-p", 32, "-n", 4, "-r", 2, "-o", "jsonl")
    rows = [json.loads(line) for line in out.splitlines()]
    recipe = RECIPES[quantized.stem]
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [(32, 0), (0, 4)]
    assert {row["model_n_params"] for row in rows} == {sum(tensor.size for tensor in synth.tensors(recipe))}
    assert all(len(row["samples_ns"]) == 2 and min(row["samples_ns"]) > 0 for row in rows)


def test_batched_bench_measures_it(quantized: Path, llama_bin: Path) -> None:
    """Rows for one and two sequences, asked again as the agent does: the tool may exit before its rows are written."""
    argv = [llama_bin / "llama-batched-bench", "-m", quantized, "-t", 1, "-c", 2048, "-npp", 16, "-ntg", 4]
    for _ in range(10):
        out = run(*argv, "-npl", "1,2,2,2,2", "--output-format", "jsonl")
        rows = re.findall(r'"pl": (\d+),.*"speed_tg": ([0-9.]+)', out)
        if len(rows) >= 2:
            break
    assert [int(pl) for pl, _ in rows[:2]] == [1, 2]
    assert all(float(speed) > 0 for _, speed in rows)
