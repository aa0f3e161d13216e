"""llama.cpp's own tools load, quantise and measure what `synth` writes."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from dgxlab import gguf_header, quantise, synth
from dgxlab.errors import RemoteError, SpecError
from dgxlab.model import SyntheticModel, quantisation

pytestmark = pytest.mark.llama

RECIPES = {
    "Q4_0": SyntheticModel(quant="Q4_0", n_embd=96, n_ff=160, n_head=3, n_head_kv=1, n_vocab=33),
    "Q4_K": SyntheticModel(quant="Q4_K", n_embd=256, n_ff=512, n_head=4, n_head_kv=2, n_vocab=7),
}


@pytest.fixture(scope="module", params=sorted(RECIPES))
def quantized(request: pytest.FixtureRequest, llama_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = RECIPES[request.param]
    folder = tmp_path_factory.mktemp("model")
    synth.write(recipe, folder / "f16.gguf")
    out = folder / f"{recipe.quant}.gguf"
    argv = [llama_bin / "llama-quantize", "--pure", folder / "f16.gguf", out, recipe.quant, "1"]
    subprocess.run([str(arg) for arg in argv], check=True, capture_output=True)
    return out


def run(*argv: object) -> str:
    return subprocess.run([str(arg) for arg in argv], check=True, capture_output=True, text=True).stdout


def test_every_weight_has_the_type_asked_for(quantized: Path) -> None:
    types = {t.tensor_type.name for t in gguf.GGUFReader(quantized).tensors if "norm" not in t.name}
    assert types == {quantized.stem}


def test_llama_bench_measures_it(quantized: Path, llama_bin: Path) -> None:
    out = run(llama_bin / "llama-bench", "-m", quantized, "-t", 1, "-p", 32, "-n", 4, "-r", 2, "-o", "jsonl")
    rows = [json.loads(line) for line in out.splitlines()]
    recipe = RECIPES[quantized.stem]
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [(32, 0), (0, 4)]
    assert {row["model_n_params"] for row in rows} == {sum(tensor.size for tensor in synth.tensors(recipe))}
    assert all(len(row["samples_ns"]) == 2 and min(row["samples_ns"]) > 0 for row in rows)


@pytest.mark.parametrize("quant", ["NVFP4", "MXFP4_MOE"])
@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35", "qwen35moe", "qwen3next"])
def test_experts_and_delta_nets_are_quantised_and_run(arch: Any, quant: str, llama_bin: Path, tmp_path: Path) -> None:
    """llama-quantize takes what is written, gives the types that were asked, and llama-bench measures the result."""
    recipe = SyntheticModel(
        arch=arch, n_layer=4, n_embd=256, n_ff=512, n_head_kv=2, n_vocab=300, quant=quant, scales=quant == "NVFP4"
    )
    if arch == "qwen35" and quant == "MXFP4_MOE":
        with pytest.raises(SpecError):
            synth.check(recipe)
        return
    synth.check(recipe)
    synth.write(recipe, tmp_path / "f16.gguf")
    files = {"bin": llama_bin, "in": tmp_path / "f16.gguf", "out": tmp_path / "quantised.gguf"}
    how = quantisation(recipe)
    run(*(arg.format(**files) for arg in quantise.argv(how)))
    source, header = gguf_header.read(files["in"]), gguf_header.read(files["out"])
    quantise.check_types(how, source, header)
    assert header.architecture == arch
    assert header.parameters == sum(tensor.size for tensor in synth.tensors(recipe))
    with pytest.raises(RemoteError, match="did not make Q4_0"):
        quantise.check_types(replace(how, quant="Q4_0"), source, header)
    (row,) = map(
        json.loads,
        run(
            llama_bin / "llama-bench", "-m", files["out"], "-t", 2, "-p", 32, "-n", 0, "-r", 1, "-o", "jsonl"
        ).splitlines(),
    )
    assert row["model_type"].startswith(arch)
    assert row["model_n_params"] == sum(tensor.size for tensor in synth.tensors(recipe))
