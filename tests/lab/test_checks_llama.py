"""Gates on a model with the real llama.cpp on this machine's CPU: a vocabulary, NVFP4 with scales, its exact values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from dgxlab import audit, synth
from dgxlab.lab import provision
from dgxlab.model import DerivedModel, GreedyGate, PerplexityGate, SyntheticModel
from dgxlab.source import PinCache
from dgxlab.spec import load
from tests.conftest import PIN, PROJECT, Bench
from tests.lab.test_run import kinds

pytestmark = pytest.mark.llama

RECIPE = SyntheticModel(
    *("llama", 1, 256, 512, 4, 4, 32000), quant="NVFP4", vocab="llama-spm", vocab_pin=PIN, scales=True
)
MODELS = {"nv": RECIPE, "exact": DerivedModel(RECIPE, "F32"), "plain": replace(RECIPE, quant="F16")}
GREEDY = GreedyGate("nv", n_prompt=20, n_gen=8, n_ubatch=16, against={"SOME_OTHER_ENVIRONMENT": "1"})
PERPLEXITY = PerplexityGate("nv", "exact", n_ctx=64, chunks=4, n_ubatch=64, kld_at_most=0.0001, ppl_ratio_at_most=1.001)


def test_a_client_reads_the_vocabulary_from_its_cache(pin_cache: PinCache, tmp_path: Path) -> None:
    """For a host without gguf the model is written here, with the same tokenizer."""
    file = provision.vocabulary(pin_cache, RECIPE, tmp_path)
    synth.write(RECIPE, tmp_path / "f16.gguf", file)
    fields = gguf.GGUFReader(tmp_path / "f16.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    assert len(fields["tokenizer.ggml.tokens"].contents()) == 32000


def test_they_pass_where_nothing_differs(make_bench: Callable[[], Bench]) -> None:
    """The prompt's tokens are its words and the first; NVFP4 on the CPU is near its exact values, F16 is not it."""
    bench = make_bench()
    experiment = load(PROJECT / "experiments" / "cpu" / "quickstart.yaml")
    experiment = replace(experiment, name="gated", models=MODELS, gates=(GREEDY, PERPLEXITY), bench=())
    outcome, events = bench.run(experiment, kind="gate")
    assert outcome.error is None
    greedy, perplexity = kinds(events, "check")
    assert {reading["n_prompt"] for reading in greedy["readings"].values()} == {21}
    assert {reading["n_gen"] for reading in greedy["readings"].values()} == {8}
    assert 0 <= perplexity["readings"]["arm"]["kld"] <= 0.0001
    assert perplexity["readings"]["reference"]["ppl"] > 1000  # of 32,000 tokens by chance
    assert audit.check(bench.lab.store) == []

    paths = {event["name"]: event["path"] for event in kinds(events, "model")}
    kept, exact = ({tensor.name: tensor for tensor in gguf.GGUFReader(paths[name]).tensors} for name in ("nv", "exact"))
    assert kept["blk.0.ffn_down.weight"].tensor_type.name == "NVFP4"
    assert kept["output.weight"].tensor_type.name == kept["token_embd.weight"].tensor_type.name == "F16"
    assert {tensor.tensor_type.name for tensor in exact.values()} == {"F32"}
    assert kept["blk.0.ffn_down.scale"].data[0] == exact["blk.0.ffn_down.scale"].data[0] != 1

    wrong = replace(PERPLEXITY, reference="plain", kld_at_most=0.00001)
    outcome, events = bench.run(replace(experiment, gates=(wrong,)), kind="gate")
    assert outcome.error is not None
    assert outcome.error.exit_code == 5
    (failed,) = kinds(events, "check")
    assert failed["readings"]["arm"]["kld"] > 0.0001
    assert failed["reasons"] == [f"the KLD is {failed['readings']['arm']['kld']:.6f}, at most 1e-05 is allowed"]
