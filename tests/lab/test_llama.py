"""The real llama.cpp at the pin, on this machine's CPU: the whole loop, a patched arm, gates on a model, sessions."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from dgxlab import audit, judgement, report, synth
from dgxlab.judgement import Judged
from dgxlab.lab import provision
from dgxlab.lab.outlook import outlook
from dgxlab.lab.session import Outcome
from dgxlab.model import DerivedModel, Expectation, Experiment, HostEntry, ParityGate, Session, SyntheticModel
from dgxlab.source import PinCache
from dgxlab.spec import load
from dgxlab.tools import GreedyGate, LlamaBench, PerplexityGate
from tests.conftest import PROJECT, Bench, Quickstart
from tests.journals import PIN
from tests.lab.conftest import kinds

pytestmark = pytest.mark.llama


def test_quickstart_is_gated_measured_and_not_measured_again(quickstart: Quickstart) -> None:
    assert quickstart.outcome.error is None
    (gate,) = kinds(quickstart.events, "gate")
    assert (
        gate["readings"]["arm"]["passed"],
        gate["readings"]["arm"]["total"],
        gate["readings"]["arm"]["unsupported"],
    ) == (1103, 1103, 306)
    runs = kinds(quickstart.events, "run")
    measured = {result["cell"] for run in runs if run["status"] == "valid" for result in run["results"]}
    assert len(measured) == quickstart.outcome.planned == 12
    assert audit.check(quickstart.bench.lab.store) == []
    outcome, events = quickstart.bench.run(quickstart.experiment)
    assert (outcome.job_id, outcome.reused) == ("", 12)
    assert [event for event in events if event["event"] != "note"] == []


def test_quickstart_report(quickstart: Quickstart) -> None:
    collected = report.collect(quickstart.bench.lab.store, "quickstart")
    page = report.render(collected)
    assert "| MUL_MAT | CPU | 1103/1103 | 306 | 1103 | passed |" in page
    assert [len(table.rows) for table in collected.tables] == [1, 6, 3, 3]
    assert page.count("pin e3a74b299085") == 1


def test_a_patched_build(make_bench: Callable[[], Bench], llama_bin: Path) -> None:
    """Of another tree than the stock one, with programs of its own; only what the patch touches is compiled again."""
    bench = make_bench()
    experiment = replace(load(PROJECT / "experiments" / "cpu" / "shapes-cpu.yaml"), gates=(ParityGate("SQR", "CPU"),))
    outcome, events = bench.run(experiment, kind="gate")
    assert outcome.error is None
    (build,) = kinds(events, "build")
    assert [ref["name"] for ref in build["source"]["series"]] == ["backend-ops-shapes"]
    stock = json.loads((llama_bin.parent / "stamp.json").read_text())
    assert stock["source"]["tree"] != build["source"]["tree"]
    assert stock["binaries"]["test-backend-ops"] != build["binaries"]["test-backend-ops"]
    log = bench.root / "jobs" / outcome.job_id / "build-shapes-cpu.log"
    compiled = [line for line in log.read_text().splitlines() if "Building C" in line] if log.exists() else []
    assert all("test-backend-ops.cpp" in line for line in compiled)


OPERATIONS = {"GATED_DELTA_NET": 36, "SSM_CONV": 45, "MUL_MAT_ID": 789}
"""Cases of the pin for what models with experts or a gated delta net add."""


@pytest.mark.usefixtures("llama_bin")
def test_experts_and_delta_nets_are_gated(make_bench: Callable[[], Bench]) -> None:
    gates = tuple(ParityGate(op, "CPU", Expectation(count, count)) for op, count in OPERATIONS.items())
    experiment = load(PROJECT / "experiments" / "cpu" / "quickstart.yaml")
    outcome, events = make_bench().run(replace(experiment, models={}, gates=gates, bench=()), kind="gate")
    assert outcome.error is None
    counted = {event["gate"]["op"]: event["readings"]["arm"] for event in kinds(events, "gate")}
    assert {op: (reading["passed"], reading["total"]) for op, reading in counted.items()} == {
        op: (count, count) for op, count in OPERATIONS.items()
    }


RECIPE = SyntheticModel(
    *("llama", 1, 256, 512, 4, 4, 32000), quant="NVFP4", vocab="llama-spm", vocab_pin=PIN, scales=True
)
MODELS = {"nv": RECIPE, "exact": DerivedModel(RECIPE, "F32"), "plain": replace(RECIPE, quant="F16")}
GREEDY = GreedyGate("nv", n_prompt=20, n_gen=8, n_ubatch=16, against={"SOME_OTHER_ENVIRONMENT": "1"})
PERPLEXITY = PerplexityGate("nv", "exact", n_ctx=64, chunks=4, n_ubatch=64, kld_at_most=0.0001, ppl_ratio_at_most=1.001)


def test_a_client_reads_the_vocabulary_from_its_cache(pin_cache: PinCache, tmp_path: Path) -> None:
    file = provision.vocabulary(pin_cache, RECIPE, tmp_path)
    synth.write(RECIPE, tmp_path / "f16.gguf", file)
    fields = gguf.GGUFReader(tmp_path / "f16.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    assert len(fields["tokenizer.ggml.tokens"].contents()) == 32000


def test_they_pass_where_nothing_differs(make_bench: Callable[[], Bench]) -> None:
    bench = make_bench()
    experiment = load(PROJECT / "experiments" / "cpu" / "quickstart.yaml")
    experiment = replace(experiment, name="gated", models=MODELS, gates=(GREEDY, PERPLEXITY), bench=())
    outcome, events = bench.run(experiment, kind="gate")
    assert outcome.error is None
    greedy, perplexity = kinds(events, "gate")
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
    (failed,) = kinds(events, "gate")
    assert failed["readings"]["arm"]["kld"] > 0.0001
    assert [reason["code"] for reason in failed["reasons"]] == ["kld"]


ATTEMPTS = 3
"""How often a session is held where other programs make a verdict invalid, or one that counts too uncertain."""


@pytest.fixture
def bench(quickstart: Quickstart) -> Bench:
    return quickstart.bench


def arm(name: str) -> Experiment:
    """Return a shipped experiment at half its sizes, with a gate of a second instead of half a minute."""
    experiment = load(PROJECT / "experiments" / "cpu" / f"{name}.yaml")
    (entry,) = experiment.bench
    assert isinstance(entry, LlamaBench)
    small = replace(entry, n_prompt=(128,), n_gen=(16,))
    return replace(experiment, gates=(ParityGate("SQR", "CPU"),), bench=(small,))


def of_the_prompt(claims: list[Judged]) -> Judged:
    return max(claims, key=lambda claim: claim.baseline or 0.0)


def valid(claims: list[Judged]) -> bool:
    return "invalid" not in {claim.verdict.verdict for claim in claims}


def settled(claims: list[Judged]) -> bool:
    return valid(claims) and of_the_prompt(claims).verdict.verdict != "inconclusive"


def hold(
    bench: Bench, baseline: Experiment, candidate: Experiment, enough: Callable[[list[Judged]], bool], kind: str = "ab"
) -> tuple[Outcome, list[Any]]:
    """Hold a session, and again while its verdicts are not `enough`: other programs make the machine wander."""
    for _ in range(ATTEMPTS):
        session, events = bench.run(candidate, kind, baseline=baseline)
        if enough(judgement.recorded(bench.lab.store, session.job_id)):
            break
    return session, events


def test_a_slower_arm_is_called_slower(bench: Bench) -> None:
    wide = Session(cycles=5, drift_limit=0.5)
    baseline, candidate = (replace(arm(name), session=wide) for name in ("threads-2", "threads-1"))
    session, events = hold(bench, baseline, candidate, settled)
    assert session.error is None
    claims = judgement.recorded(bench.lab.store, session.job_id)
    assert [claim.comparison.metric for claim in claims] == ["avg_ts", "avg_ts"]
    prompt = of_the_prompt(claims)
    assert (prompt.verdict.verdict, prompt.promoted) == ("slower", False)
    assert prompt.verdict.effect is not None
    assert prompt.verdict.effect < 0
    assert audit.check(bench.lab.store) == []
    runs = [event for event in events if event["event"] == "run" and event["role"] != "burn-in"]
    assert [run["role"] for run in runs[:5]] == ["baseline", "candidate", "baseline", "candidate", "baseline"]
    gates = [event["id"] for event in events if event["event"] == "gate"]
    assert gates == ["gate:0", "gate:1", "gate:0:after", "gate:1:after"]


def test_an_experiment_against_itself(bench: Bench) -> None:
    claim = replace(arm("threads-1"), session=Session(cycles=5))
    session, events = hold(bench, claim, claim, valid, kind="noise")
    assert session.error is None
    assert len([event for event in events if event["event"] == "build"]) == 1
    claims = judgement.recorded(bench.lab.store, session.job_id)
    assert len(claims) == 2
    for each in claims:
        assert not each.promoted
        assert each.verdict.effect is not None
    cells = [each.comparison.baseline for each in claims]
    (model,) = {row["model_id"] for row in bench.lab.store.rows("SELECT model_id FROM verdicts")}
    (device,) = bench.lab.store.devices(session.job_id).values()
    noises = judgement.noises(bench.lab.store, device.id, cells, model)
    assert {noise.session for noise in noises} == {session.job_id}
    assert {noise.cell for noise in noises} == set(cells)
    source = bench.lab.store.job(session.job_id).plan.arms[0].source
    ahead = outlook(bench.lab.store, HostEntry("local"), arm("threads-1"), source, 0.5)
    assert {claim.label for claim in ahead.claims} == {"pp128", "tg16"}
    assert ahead.unknown == ()
    assert ahead.seconds is not None
    assert ahead.seconds > 0
