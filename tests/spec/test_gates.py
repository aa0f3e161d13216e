"""Gates on a model, and the models that they need: what a spec may say, and what it is refused for."""

from __future__ import annotations

import json

import pytest

from dgxlab.model import (
    DerivedModel,
    Expectation,
    Experiment,
    GreedyGate,
    HarnessGate,
    ParityGate,
    PerplexityGate,
    SyntheticModel,
    from_json,
    model_id,
    to_json,
)
from dgxlab.spec import load
from tests.spec.specs import BASE, PIN, child_refusal, read, write

MODELS = """\
models:
  nv: {synthetic: {n_vocab: 32000, vocab: llama-spm, quant: NVFP4, scales: true}}
  exact: {derived: {of: nv}}
  mute: {synthetic: {}}
"""
PERPLEXITY = "perplexity: {model: nv, reference: exact"


def test_models_and_gates_are_read() -> None:
    """A vocabulary is the pin's; what is derived is made of a recipe, whatever that is called; defaults are ours."""
    text = MODELS + "gates:\n  - greedy: {model: nv, against: {FAST: null}}\n"
    experiment = read(
        text + f"  - {PERPLEXITY}, against: {{FAST: null}}, kld_ratio_at_most: 0.5}}\nenv: {{FAST: '1'}}\n"
    )
    recipe = SyntheticModel(n_vocab=32000, vocab="llama-spm", vocab_pin=PIN, scales=True, quant="NVFP4")
    assert experiment.models["nv"] == recipe
    assert experiment.models["exact"] == DerivedModel(recipe, "F32")
    assert experiment.gates[1:] == (
        GreedyGate("nv", against={"FAST": None}),
        PerplexityGate("nv", "exact", against={"FAST": None}, kld_ratio_at_most=0.5),
    )
    assert from_json(Experiment, json.loads(json.dumps(to_json(experiment)))) == experiment


def test_gates_say_which_cases_which_path_and_how_many_tests() -> None:
    """What came later is read, written only where it is said, and refines an inherited gate."""
    lines = [
        "backend-ops: {op: MUL_MAT, backend: CPU, cases: 0123456789abcdef, engaged: 'fast: on'}",
        "greedy: {model: nv, against: {FAST: null}, engaged: 'fast: on'}",
        f"{PERPLEXITY}, kld_at_most: 1, engaged: 'fast: on'}}",
        "harness: {kernel: toy, tests: 72}",
    ]
    experiment = read(MODELS + "gates:\n" + "".join(f"  - {line}\n" for line in lines) + "env: {FAST: '1'}\n")
    parity, *others = experiment.gates
    assert isinstance(parity, ParityGate)
    assert (parity.expect, parity.cases, parity.engaged) == (Expectation(1103, 1103), "0123456789abcdef", "fast: on")
    assert [gate.engaged for gate in others if not isinstance(gate, (HarnessGate, ParityGate))] == ["fast: on"] * 2
    assert others[-1] == HarnessGate("toy", tests=72)
    assert from_json(Experiment, json.loads(json.dumps(to_json(experiment)))) == experiment
    assert {"cases", "engaged", "overridden"}.isdisjoint(to_json(ParityGate("MUL_MAT", "CPU")))


def test_another_count_is_of_another_list() -> None:
    """A child that expects more cases does not inherit the list of fewer."""
    write(BASE.replace("unsupported: 306", "unsupported: 306, cases: 0123456789abcdef"), "listed.yaml")
    same, more = (
        load(write(f"extends: listed.yaml\ngates: [backend-ops: {{op: MUL_MAT, backend: CPU, {change}}}]\n")).gates
        for change in ("unsupported: 0", "expect: 1236/1236")
    )
    assert same == (ParityGate("MUL_MAT", "CPU", Expectation(1103, 1103), 0, cases="0123456789abcdef"),)
    assert more == (ParityGate("MUL_MAT", "CPU", Expectation(1236, 1236), 306),)


def test_what_came_later_does_not_change_a_recipe_without_it() -> None:
    """Models of before keep their identity; with a vocabulary, or scales, they have another one."""
    assert model_id(SyntheticModel()) == "synthetic-ce8d157383808fe4"
    assert "vocab" not in to_json(SyntheticModel())
    others = [SyntheticModel(scales=True), SyntheticModel(vocab="llama-spm"), DerivedModel(SyntheticModel(), "F32")]
    assert len({model_id(model) for model in (SyntheticModel(), *others)}) == 4


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("greedy: {model: nv}", "gates[1].greedy: compares with nothing: give against, expect or both"),
        ("greedy: {model: nw, expect: x}", "gates[1].greedy.expect: must be an md5"),
        (
            "greedy: {model: nw, against: {A: '1'}}",
            "gates[1].greedy.model: no model 'nw' under models; known: exact, mute, nv",
        ),
        ("greedy: {model: mute, against: {A: '1'}}", "model mute has no vocabulary: give its recipe vocab: llama-spm"),
        (
            "greedy: {model: nv, against: {GGML_CUDA_FORCE_MMQ: '1'}}",
            "against changes nothing: the arm's environment is that",
        ),
        ("greedy: {model: nv, against: {LD_PRELOAD: x}}", "cannot be set: it changes which libraries load"),
        (f"{PERPLEXITY}}}", "has no limit: give kld_ratio_at_most, kld_at_most or ppl_ratio_at_most"),
        (f"{PERPLEXITY}, kld_ratio_at_most: 0.5}}", "kld_ratio_at_most needs against"),
        (f"{PERPLEXITY}, against: {{A: '1'}}, kld_at_most: 1}}", "against is of no use without kld_ratio_at_most"),
        (f"{PERPLEXITY}, n_ctx: 64, chunks: 3, kld_at_most: 1}}", "counts 93 tokens and llama-perplexity wants 100"),
        (f"{PERPLEXITY}, kld_at_most: 0}}", "gates[1].perplexity.kld_at_most: must be more than 0"),
        ("harness: {kernel: ../x}", "gates[1].harness.kernel: must be a name"),
        ("harness: {kernel: x}", "gates[1].harness.tests: missing"),
        ("backend-ops: {op: ADD, backend: CPU, cases: x}", "gates[1].backend-ops.cases: must be a digest of cases"),
        ("harness: {kernel: x, arch: sm90}", "gates[1].harness.arch: must be an architecture by nvcc's name"),
        (
            "perplexity: {model: nv, reference: q, kld_at_most: 1}",
            "gates[1].perplexity.reference: no model 'q' under models",
        ),
    ],
)
def test_a_gate_that_proves_nothing_is_refused(text: str, sentence: str) -> None:
    """Before anything is built, with its place."""
    error = child_refusal(f"{MODELS}gates: [{text}]")
    assert sentence in f"{error.message}\n{error.details}"


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("{synthetic: {vocab: llama-spm}}", "n_vocab 1000 is not what vocab llama-spm has: 32000"),
        ("{synthetic: {vocab: falcon}}", "vocab 'falcon' cannot be used: supported is llama-spm"),
        ("{synthetic: {quant: NVFP4, n_ff: 96}}", "n_ff 96 is no multiple of 64, the block length of NVFP4"),
        ("{derived: {of: q4k}}", "models.m.derived.of: no synthetic model 'q4k' under models"),
        ("{derived: {of: m}}", "models.m.derived.of: no synthetic model 'm' under models; known: small"),
    ],
)
def test_a_model_that_cannot_be_made_is_refused(model: str, sentence: str) -> None:
    """A recipe with the wrong number of tokens, and what is derived of nothing that is made."""
    error = child_refusal(f"models: {{m: {model}}}")
    assert sentence in f"{error.message}\n{error.details}"


def test_the_same_gate_in_a_child_refines_it() -> None:
    """Its limits may be others; another environment is another gate."""
    write(BASE, "base.yaml")
    write(f"extends: base.yaml\n{MODELS}gates:\n  - {PERPLEXITY}, kld_at_most: 0.5}}\n", "parent.yaml")
    refined, other = f"{PERPLEXITY}, kld_at_most: 0.25}}", f"{PERPLEXITY}, kld_at_most: 1, env: {{B: '1'}}}}"
    experiment = load(write(f"extends: parent.yaml\ngates:\n  - {refined}\n  - {other}\n"))
    assert [gate.kld_at_most for gate in experiment.gates if isinstance(gate, PerplexityGate)] == [0.25, 1]
