"""The plan of an A/B session: what is built, gated and measured by turns, and in which order."""

from dataclasses import replace
from pathlib import Path

import pytest

from dgxlab import compare, plan
from dgxlab.errors import SpecError
from dgxlab.model import ChainStep, GateStep, ModelStep, ParityGate, Plan, Source, from_json, to_json
from dgxlab.model.experiment import DerivedModel, EngagedGate, Experiment, FileModel, Session, SyntheticModel, root_of
from dgxlab.spec import load
from dgxlab.stats import fewest_cycles
from dgxlab.synth.tensors import EXPERTS
from dgxlab.tools import PerplexityGate
from tests import toy
from tests.conftest import PROJECT

PIN = "0" * 40
STOCK, PATCHED = Source(PIN, "t" * 40, PIN), Source(PIN, "u" * 40, "c" * 40)


@pytest.fixture
def baseline(tmp_path: Path) -> Experiment:
    return toy.experiment(tmp_path, PIN, tmp_path, name="stock", session=Session(cycles=7, drift_limit=0.03))


def session_of(
    first: Experiment, two: Experiment, sources: tuple[Source, Source] = (STOCK, PATCHED), kind: str = "ab"
) -> Plan:
    return plan.make_ab(first, two, sources, job_id="j", kind=kind)


def ids(session: Plan) -> list[str]:
    return [step.id for step in session.steps]


def test_both_arms_are_built_and_gated_before_anything_is_measured_and_gated_again(baseline: Experiment) -> None:
    session = session_of(baseline, replace(baseline, name="new", series=("s",)))
    assert ids(session) == [
        *("build:stock", "build:new", "model:m:stock"),
        *(f"probe:{tool}:stock" for tool in ("test-backend-ops", "llama-bench", "llama-batched-bench")),
        "model:m:new",
        *(f"probe:{tool}:new" for tool in ("test-backend-ops", "llama-bench", "llama-batched-bench")),
        *("gate:0", "gate:1", "chain:0", "chain:1", "chain:2", "gate:0:after", "gate:1:after"),
    ]
    assert [step.arm for step in session.steps if isinstance(step, GateStep)] == ["stock", "new", "stock", "new"]
    assert [arm.source for arm in session.arms] == [STOCK, PATCHED]
    assert (session.kind, session.name, session.baseline) == ("ab", "stock-vs-new", baseline.digest)


def test_a_chain_holds_both_arms_of_one_entry(baseline: Experiment) -> None:
    session = session_of(baseline, replace(baseline, name="new", env={"TOY": "x"}))
    chains = list(session.chains)
    assert {(c.baseline.arm, c.candidate.arm, c.cycles, c.drift_limit) for c in chains} == {("stock", "new", 7, 0.03)}
    assert [chain.baseline.tool for chain in chains] == ["backend-ops", "llama-bench", "batched-bench"]
    assert [(c.baseline.env, c.candidate.env) for c in chains] == [({}, {"TOY": "x"})] * 3
    assert len(list(session.runs)) == 6


def test_the_level_of_a_ledger_decides_over_a_number_of_cycles_by_hand(baseline: Experiment) -> None:
    """With fewer cycles than the level needs no verdict is possible, however clear the effect."""
    new = replace(baseline, name="new", series=("s",))
    cycles = []
    for level in (0.0, 0.05, 1e-4):
        session = plan.make_ab(baseline, new, (STOCK, PATCHED), job_id="j", level=level)
        cycles.append({chain.cycles for chain in session.chains})
        assert all(chain.cycles >= fewest_cycles(chain.claims) for chain in session.chains)
    assert cycles == [{7}, {7}, {10}]


def test_an_experiment_against_itself_is_one_arm(baseline: Experiment) -> None:
    session = session_of(baseline, baseline, (STOCK, STOCK), "noise")
    assert [arm.name for arm in session.arms] == ["stock"]
    named = [step for step in ids(session) if step.startswith(("build", "gate"))]
    assert named == ["build:stock", "gate:0", "gate:0:after"]
    assert all(chain.baseline == chain.candidate and chain.arms == ("stock",) for chain in session.chains)
    assert len(list(session.runs)) == 3


def test_the_same_spec_on_two_trees_is_no_session_with_itself(baseline: Experiment) -> None:
    with pytest.raises(SpecError, match="both called stock"):
        session_of(baseline, baseline)
    with pytest.raises(SpecError, match="both called stock"):
        session_of(baseline, replace(baseline, env={"TOY": "x"}), (STOCK, STOCK))


def test_a_screen_is_one_bracket_without_gates_after_it(baseline: Experiment) -> None:
    session = session_of(baseline, replace(baseline, name="new", env={"TOY": "x"}), kind="screen")
    assert {(chain.cycles, chain.screen) for chain in session.chains} == {(1, True)}
    assert not [step for step in ids(session) if step.endswith(":after")]


def test_the_marker_of_the_path_under_test_must_not_be_on_the_baseline(baseline: Experiment) -> None:
    both, new = EngagedGate("both:"), EngagedGate("new:", ("llama-bench",))
    candidate = replace(baseline, name="new", gates=(both, new), env={"TOY": "x"})
    session = session_of(replace(baseline, gates=(both,)), candidate)
    markers = {chain.baseline.tool: (chain.candidate.markers, chain.absent) for chain in session.chains}
    assert markers["llama-bench"] == (("both:", "new:"), ("new:",))
    assert markers["backend-ops"] == (("both:",), ())


def test_a_model_of_one_name_may_be_another_in_each_arm(baseline: Experiment) -> None:
    two = replace(baseline, name="new", models={"m": SyntheticModel()})
    steps = {step.id: step for step in session_of(baseline, two).steps}
    assert steps["model:m:stock"].path == dict(baseline.models)["m"].path  # type: ignore[union-attr]
    assert steps["model:m:new"].recipe == SyntheticModel()  # type: ignore[union-attr]
    assert "llama-quantize" in session_of(baseline, two).arm("new").targets


def test_what_a_session_is_about_tells_its_kind_and_both_sides(baseline: Experiment) -> None:
    two = replace(baseline, name="new", models={"m": FileModel("/n.gguf")})
    sessions = [session_of(baseline, two), session_of(two, baseline), session_of(baseline, two, kind="screen")]
    single = plan.make(two, PATCHED, job_id="j")
    assert single.subject == two.digest
    assert len({each.subject for each in (*sessions, single)}) == 4


def test_a_session_survives_the_way_to_the_host(baseline: Experiment) -> None:
    session = session_of(baseline, replace(baseline, name="new", env={"TOY": "x"}))
    back = from_json(Plan, to_json(session))
    assert (back, back.digest) == (session, session.digest)
    assert isinstance(back.steps[-3], ChainStep)


def test_a_gate_on_a_model_brings_its_model_program_and_flags(baseline: Experiment) -> None:
    recipe = SyntheticModel(n_vocab=32000, vocab="llama-spm", vocab_pin=PIN, quant="NVFP4")
    gate = PerplexityGate("nv", "exact", against={"FAST": None}, kld_ratio_at_most=0.5)
    models = {"exact": DerivedModel(recipe, "F32"), "unused": SyntheticModel(), "nv": recipe}
    gated = replace(baseline, models=models, gates=(gate,), bench=(), env={"FAST": "1", "B": "2"})
    job = plan.make(gated, STOCK, job_id="j", bench=False)
    assert ids(job) == ["build:stock", "model:nv", "model:exact", "probe:llama-perplexity", "gate:0"]
    assert job.arms[0].targets == ("llama-perplexity", "llama-quantize")
    made_of, check = job.steps[2], job.steps[-1]
    assert isinstance(made_of, ModelStep)
    assert (made_of.of, made_of.make, made_of.quantize[1]) == ("nv", (), "--allow-requantize")
    assert isinstance(check, GateStep)
    assert [(command.role, command.model, dict(command.env)) for command in check.commands] == [
        ("reference", "exact", {"B": "2"}),
        ("arm", "nv", {"FAST": "1", "B": "2"}),
        ("against", "nv", {"B": "2"}),
    ]
    assert check.env == {"FAST": "1", "B": "2"}
    assert ["none" in command.argv for command in check.commands] == [True, False, False]  # --device none
    assert from_json(Plan, to_json(job)) == job


def test_a_model_that_is_its_own_reference_is_run_where_the_arm_is(baseline: Experiment) -> None:
    gate = PerplexityGate("nv", "nv", against={"FAST": None}, kld_at_most=0.01)
    recipe = SyntheticModel(n_vocab=32000, vocab="llama-spm", vocab_pin=PIN)
    gated = replace(baseline, models={"nv": recipe}, gates=(gate,), bench=(), env={"FAST": "1"})
    check = plan.make(gated, STOCK, job_id="j", bench=False).steps[-1]
    assert isinstance(check, GateStep)
    reference, arm, _ = check.commands
    assert (reference.env, arm.env) == ({}, {"FAST": "1"})
    assert "none" not in reference.argv
    assert reference.argv[-4:] == arm.argv[-4:]


def test_what_came_later_changes_no_plan_without_it(baseline: Experiment) -> None:
    recipes = replace(baseline, models={"m": SyntheticModel()})
    steps = to_json(plan.make(recipes, STOCK, job_id="j"))["steps"]
    (step,) = [step for step in steps if step["kind"] == "model"]
    assert sorted(step) == ["arm", "id", "kind", "limit_s", "make", "model", "path", "quantize", "recipe"]
    assert '"vocab"' not in step["make"][3]


def test_a_candidates_gate_is_held_against_the_one_in_its_environment(baseline: Experiment) -> None:
    gates = tuple(ParityGate(op, "CPU", env=env) for op, env in (("MUL_MAT", {}), ("MUL_MAT", {"A": "1"}), ("ADD", {})))
    others = (*gates[1:2], replace(gates[0], env={"B": "1"}), ParityGate("MUL", "CPU"))
    session = session_of(replace(baseline, gates=gates), replace(baseline, name="new", series=("s",), gates=others))
    steps = {step.id: step for step in session.steps if isinstance(step, GateStep)}
    assert [steps[f"gate:{n}"].like for n in range(6)] == ["", "", "", "gate:1", "gate:0", ""]
    assert steps["gate:3:after"].like == "gate:1"


PAIRS = [
    ("spark-w4a16", "spark-w4a16-on"),
    ("spark-w4a16", "spark-w4a16-packed"),
    ("h200-w4a16-decode-q4_0", "h200-w4a16-decode-q4_0-on"),
    ("h200-w4a16-draft", "h200-w4a16-draft-on"),
    ("h200-w4a16-products", "h200-w4a16-products-on"),
    ("h200-fa-w4a16-streams", "h200-fa-w4a16-streams-default"),
    ("spark-nvfp4", "spark-nvfp4-routed"),
    ("spark-fp4", "spark-fp4-accumulate"),
    ("spark-gdn", "spark-gdn-on"),
    ("h200-nvfp4-moe", "h200-nvfp4-moe-graphs"),
    ("h200-nvfp4-moe", "h200-nvfp4-moe-speed"),
    ("h200-nvfp4-moe-products", "h200-nvfp4-moe-products-on"),
    ("h200-nvfp4-moe", "h200-nvfp4-moe-on"),
    ("spark-gdn-bf16", "spark-gdn-bf16-on"),
    ("h200-gdn-conv", "h200-gdn-conv-on"),
    ("cpu-kq-mask", "cpu-kq-mask-on"),
    ("h200-kq-mask", "h200-kq-mask-on"),
    ("h200-kq-mask-on", "h200-kq-mask-moe"),
    ("h200-kq-mask", "h200-nvfp4-all"),
]


@pytest.mark.parametrize("thermal", ["hot", "cold"])
@pytest.mark.parametrize("names", PAIRS, ids=lambda names: names[1])
def test_each_pair_is_one_command(names: tuple[str, str], thermal: str) -> None:
    """Both arms run the same launches, apart from the environment; the candidate alone must print its marker."""
    files = [next(PROJECT.glob(f"experiments/*/{name}.yaml")) for name in names]
    arms = [load(file, [f"session.thermal={thermal}"]) for file in files]
    baseline, candidate = arms
    assert (baseline.series, baseline.cmake) == (candidate.series, candidate.cmake)
    compare.refuse(compare.differences(baseline, candidate), (), candidate.path)
    session = session_of(baseline, candidate, (STOCK, STOCK))
    assert {chain.thermal for chain in session.chains} == {thermal}
    assert all(chain.baseline.env != chain.candidate.env for chain in session.chains)
    assert any(chain.absent for chain in session.chains)
    gates = {step.arm for step in session.steps if isinstance(step, GateStep)}
    assert gates == set(names)


def test_no_router_decides_a_kld() -> None:
    """Tokens with other experts than the reference's decide a mean, whatever the arms do: so all experts are used."""
    unused = {}
    for experiment in map(load, PROJECT.glob("experiments/*/*.yaml")):
        for gate in experiment.gates:
            model = root_of(experiment.models[gate.model]) if isinstance(gate, PerplexityGate) else None
            if isinstance(model, SyntheticModel) and model.arch in EXPERTS:
                unused[experiment.name, model.quant] = model.n_expert - model.n_expert_used
    assert unused == {("h200-nvfp4-moe-on", "NVFP4"): 0, ("spark-fp4-accumulate", "MXFP4_MOE"): 0}
