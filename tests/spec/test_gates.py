"""Gates on a model, and the models that they need: what a spec may say, and what it is refused for."""

import json

import pytest

from dgxlab import model
from dgxlab.model import DerivedModel, Expectation, ParityGate, SyntheticModel, model_id, to_json
from dgxlab.spec import load
from dgxlab.tools import GreedyGate, HarnessGate, PerplexityGate
from tests.spec.specs import BASE, PIN, child_refusal, read, write

MODELS = """\
models:
  nv: {synthetic: {n_vocab: 32000, vocab: llama-spm, quant: NVFP4, scales: true}}
  exact: {derived: {of: nv}}
  mute: {synthetic: {}}
"""
PERPLEXITY = "perplexity: {model: nv, reference: exact"
GROWTH = f"{PERPLEXITY}, kld_growth_at_most: 1.5"


def test_models_and_gates_are_read() -> None:
    """A vocabulary is the pin's; what is derived is made of a recipe, whatever that is called; defaults are ours."""
    gates = [
        "greedy: {model: nv, against: {FAST: null}}",
        f"{PERPLEXITY}, against: {{FAST: null}}, kld_ratio_at_most: 0.5}}",
        "backend-ops: {op: MUL_MAT, backend: CPU, cases: 0123456789abcdef, engaged: 'fast: on'}",
        "greedy: {model: nv, against: {FAST: null}, seed: 1, engaged: 'fast: on'}",
        f"{PERPLEXITY}, kld_at_most: 1, engaged: 'fast: on'}}",
        "harness: {kernel: toy, tests: 72}",
    ]
    experiment = read(MODELS + "gates:\n" + "".join(f"  - {gate}\n" for gate in gates) + "env: {FAST: '1'}\n")
    recipe = SyntheticModel(n_vocab=32000, vocab="llama-spm", vocab_pin=PIN, scales=True, quant="NVFP4")
    assert experiment.models["nv"] == recipe
    assert experiment.models["exact"] == DerivedModel(recipe, "F32")
    cases, fast = "0123456789abcdef", "fast: on"
    assert experiment.gates == (
        ParityGate("MUL_MAT", "CPU", Expectation(1103, 1103), 306, cases=cases, engaged=fast),
        GreedyGate("nv", against={"FAST": None}),
        PerplexityGate("nv", "exact", against={"FAST": None}, kld_ratio_at_most=0.5),
        GreedyGate("nv", against={"FAST": None}, seed=1, engaged=fast),
        PerplexityGate("nv", "exact", kld_at_most=1, engaged=fast),
        HarnessGate("toy", tests=72),
    )
    assert model.from_json(model.Experiment, json.loads(json.dumps(to_json(experiment)))) == experiment
    assert {"cases", "engaged", "overridden"}.isdisjoint(to_json(ParityGate("MUL_MAT", "CPU")))


def test_a_child_that_expects_more_cases_does_not_inherit_the_list_of_fewer() -> None:
    write(BASE.replace("unsupported: 306", "unsupported: 306, cases: 0123456789abcdef"), "listed.yaml")
    same, more = (
        load(write(f"extends: listed.yaml\ngates: [backend-ops: {{op: MUL_MAT, backend: CPU, {change}}}]\n")).gates
        for change in ("unsupported: 0", "expect: 1236/1236")
    )
    assert same == (ParityGate("MUL_MAT", "CPU", Expectation(1103, 1103), 0, cases="0123456789abcdef"),)
    assert more == (ParityGate("MUL_MAT", "CPU", Expectation(1236, 1236), 306),)


def test_keys_of_later_versions_do_not_change_a_recipe_without_them() -> None:
    assert model_id(SyntheticModel()) == "synthetic-ce8d157383808fe4"
    assert "vocab" not in to_json(SyntheticModel())
    others = [SyntheticModel(scales=True), SyntheticModel(vocab="llama-spm"), DerivedModel(SyntheticModel(), "F32")]
    assert len({model_id(recipe) for recipe in (SyntheticModel(), *others)}) == 4


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("greedy: {model: nv}", "gates[1].greedy: compares with nothing: give against, expect or both"),
        ("greedy: {model: nw, expect: x}", "gates[1].greedy.expect: must be an md5"),
        ("greedy: {model: nw, against: {A: '1'}}", "gates[1].greedy.model: no model 'nw' under models; known: exact, "),
        ("greedy: {model: mute, against: {A: '1'}}", "model mute has no vocabulary: give its recipe vocab: llama-spm"),
        ("greedy: {model: nv, against: {GGML_CUDA_FORCE_MMQ: '1'}}", "against changes nothing: the arm's environment"),
        ("greedy: {model: nv, against: {LD_PRELOAD: x}}", "cannot be set: it changes which libraries load"),
        (f"{PERPLEXITY}}}", "has no limit: give kld_ratio_at_most, kld_at_most or ppl_ratio_at_most"),
        (f"{PERPLEXITY}, kld_ratio_at_most: 0.5}}", "kld_ratio_at_most needs against"),
        ("perplexity: {model: nv, reference: nv, kld_at_most: 1}", "is its own reference: give against"),
        (f"{PERPLEXITY}, n_ctx: 64, chunks: 3, kld_at_most: 1}}", "counts 93 tokens and llama-perplexity wants 100"),
        (f"{PERPLEXITY}, kld_at_most: 1, n_ctx_short: 64}}", "n_ctx_short and kld_growth_at_most need each other"),
        (
            f"{GROWTH}, n_ctx: 4096, n_ctx_short: 256, n_ubatch: 256}}",
            "kld_growth_at_most is vacuous unless n_ubatch <",
        ),
        (f"{GROWTH}, n_ctx: 256, n_ctx_short: 256, n_ubatch: 1}}", "kld_growth_at_most is vacuous unless n_ubatch <"),
        (f"{GROWTH}, n_ctx: 230, n_ctx_short: 16, n_ubatch: 1, chunks: 1}}", "counts 98 tokens"),
        (f"{PERPLEXITY}, kld_at_most: 0}}", "gates[1].perplexity.kld_at_most: must be more than 0"),
        ("harness: {kernel: ../x}", "gates[1].harness.kernel: must be a name"),
        ("harness: {kernel: x, tests: 1, program: tool}", "gates[1].harness: program and model need each other"),
        ("harness: {kernel: x}", "gates[1].harness.tests: missing"),
        ("harness: {kernel: x, arch: sm90}", "gates[1].harness.arch: must be an architecture by nvcc's name"),
        ("backend-ops: {op: ADD, backend: CPU, cases: x}", "gates[1].backend-ops.cases: must be a digest of cases"),
        ("perplexity: {model: nv, reference: q, kld_at_most: 1}", "gates[1].perplexity.reference: no model 'q' under "),
    ],
)
def test_a_gate_that_proves_nothing_is_refused(text: str, sentence: str) -> None:
    error = child_refusal(f"{MODELS}gates: [{text}]")
    assert sentence in f"{error.message}\n{error.details}"


def test_the_same_gate_in_a_child_refines_it() -> None:
    """Its limits may be others; another environment is another gate."""
    write(BASE, "base.yaml")
    write(f"extends: base.yaml\n{MODELS}gates:\n  - {PERPLEXITY}, kld_at_most: 0.5}}\n", "parent.yaml")
    refined, other = f"{PERPLEXITY}, kld_at_most: 0.25}}", f"{PERPLEXITY}, kld_at_most: 1, env: {{B: '1'}}}}"
    experiment = load(write(f"extends: parent.yaml\ngates:\n  - {refined}\n  - {other}\n"))
    assert [gate.kld_at_most for gate in experiment.gates if isinstance(gate, PerplexityGate)] == [0.25, 1]
