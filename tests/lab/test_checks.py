"""Gates on models and kernels, with toys that misbehave as the real ones do: what passes, what fails and why."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgxlab import audit, judgement, report
from dgxlab.errors import GateFailed, SpecError
from dgxlab.lab.raw import describe
from dgxlab.model import Experiment, HostEntry, Session
from dgxlab.tools import GreedyGate, HarnessGate, PerplexityGate
from dgxlab.transport.host import Host
from tests import toy
from tests.lab.conftest import ToyLab, kinds, undisturbed

GREEDY = GreedyGate("m", n_prompt=8, n_gen=4, against={"TOY": "same"})
PERPLEXITY = PerplexityGate("m", "m", n_ctx=64, chunks=4, against={"TOY": "worse"}, kld_ratio_at_most=0.5)


GROWTH = PerplexityGate("m", "m", n_ctx=128, chunks=2, n_ubatch=1, n_ctx_short=64, kld_growth_at_most=1.5)


def gated(toy_lab: ToyLab, *gates: Any, **changes: Any) -> Experiment:
    return toy_lab.experiment(gates=gates, bench=(toy.llama_bench(),), **changes)


def test_both_kinds_pass_before_anything_is_measured(toy_lab: ToyLab) -> None:
    experiment = gated(toy_lab, GREEDY, PERPLEXITY)
    outcome, events = toy_lab.run_well(experiment)
    greedy, perplexity = kinds(events, "gate")
    assert greedy["readings"]["arm"] == greedy["readings"]["against"]
    assert (greedy["readings"]["arm"]["n_prompt"], greedy["readings"]["arm"]["n_gen"]) == (9, 4)
    assert [command["role"] for command in perplexity["commands"]] == ["reference", "arm", "against"]
    assert [command["env"] for command in perplexity["commands"]] == [{"TOY": "worse"}, {}, {"TOY": "worse"}]
    assert "--device" not in perplexity["commands"][0]["argv"]  # m is its own reference, and is run where the arm is
    assert [perplexity["readings"][role]["kld"] for role in ("arm", "against")] == [0.001, 0.004]
    order = [event["event"] for event in undisturbed(events)]
    assert [event for event in order if event in ("gate", "run")] == ["gate", "gate", "run"]
    job = toy_lab.root / "jobs" / outcome.job_id
    assert not list(job.glob("*.logits"))
    described = describe(toy_lab.lab.store.job(outcome.job_id), "raw/gate-1-against.err")
    assert described == "gate:1 perplexity of m against m against stderr"
    assert {file["path"] for file in perplexity["raw"].values()} <= {
        f"raw/{file.name}" for file in (job / "raw").iterdir()
    }
    assert audit.check(toy_lab.lab.store) == []
    page = report.render(report.collect(toy_lab.lab.store, "toy"), wide=True)
    assert "against TOY=same" in page
    assert "KLD 0.001000, there 0.004000, 0.25 times" in page
    assert "KLD at most 0.5 times" in page
    again, _ = toy_lab.run(experiment)
    assert again.job_id == ""


def test_a_growth_of_errors_is_measured_at_two_contexts(toy_lab: ToyLab) -> None:
    _, events = toy_lab.run_well(gated(toy_lab, GROWTH))
    (gate,) = kinds(events, "gate")
    options = [dict(zip(command["argv"], command["argv"][1:], strict=False)) for command in gate["commands"]]
    assert [command["role"] for command in gate["commands"]] == ["reference", "arm", "short_reference", "short"]
    assert [(each["-c"], each["-ub"]) for each in options] == [("128", "1")] * 2 + [("64", "1")] * 2
    assert [each.get("--chunks") for each in options] == ["2", None, "4", None]
    assert audit.check(toy_lab.lab.store) == []


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        (GreedyGate("m", n_gen=4, env={"TOY": "crash"}, against={"TOY": None}), "the arm: llama-completion was killed"),
        (PerplexityGate("m", "m", env={"TOY": "short"}, kld_at_most=1.0), "the arm: it computed 3 of 4 chunks"),
        (
            PerplexityGate("m", "m", env={"TOY": "worse"}, against={"TOY": None}, kld_ratio_at_most=0.5),
            "the KLD is 4 times that in the environment of against (0.004000 and 0.001000), at most 0.5 is allowed",
        ),
    ],
)
def test_what_fails_says_why_and_nothing_is_measured(toy_lab: ToyLab, gate: Any, reason: str) -> None:
    error, events = toy_lab.fail(GateFailed, gated(toy_lab, gate))
    assert reason in error.message
    assert kinds(events, "run") == []
    (row,) = toy_lab.lab.store.rows("SELECT status, reasons FROM checks")
    assert row["status"] == "failed"
    assert reason in row["reasons"]
    assert reason in report.render(report.collect(toy_lab.lab.store, "toy"), wide=True)
    assert audit.check(toy_lab.lab.store) == []


@pytest.mark.parametrize("gate", [GREEDY, replace(PERPLEXITY, kld_ratio_at_most=1.5)])
def test_a_last_line_that_was_lost_is_asked_for_again(toy_lab: ToyLab, gate: Any, tmp_path: Path) -> None:
    env = {"TOY": "first is cut", "TOY_COUNT": str(tmp_path / "calls")}
    _, events = toy_lab.run_well(gated(toy_lab, replace(gate, env=env, against={"TOY": None})))
    (asked,) = kinds(events, "gate")
    assert [command["role"] for command in asked["commands"]].count("arm") == 2
    assert {"arm stdout", "arm-1 stdout"} <= asked["raw"].keys()
    assert "problem" not in asked["readings"]["arm"]
    assert audit.check(toy_lab.lab.store) == []


@pytest.mark.parametrize(
    ("env", "against", "reason"),
    [
        ({"TOY_PATH": "1"}, {"TOY_PATH": None}, ""),
        ({"TOY_PAHT": "1"}, {"TOY_PAHT": None}, "the path under test did not run: 'toy-path: on' is not on the stderr"),
        ({"TOY_PATH": "1"}, {"TOY_PAHT": "1"}, "the path under test ran on both sides: 'toy-path: on' is on the"),
    ],
)
def test_a_gate_on_a_path_fails_where_another_ran(toy_lab: ToyLab, env: Any, against: Any, reason: str) -> None:
    asked = replace(GREEDY, env=env, against=against, engaged="toy-path: on")
    outcome, _ = toy_lab.run(gated(toy_lab, asked))
    assert (outcome.error is None) == (not reason)
    assert reason in str(outcome.error or "")
    assert audit.check(toy_lab.lab.store) == []


def test_a_gate_that_changed_is_asked_again(toy_lab: ToyLab) -> None:
    toy_lab.run(gated(toy_lab, PERPLEXITY))
    looser = PerplexityGate(**{**vars(PERPLEXITY), "kld_ratio_at_most": 0.75})
    _, events = toy_lab.run_well(gated(toy_lab, PERPLEXITY, looser))
    assert [event["gate"]["kld_ratio_at_most"] for event in kinds(events, "gate")] == [0.75]


def test_a_session_asks_before_and_after_its_chains(toy_lab: ToyLab) -> None:
    baseline = gated(toy_lab, session=Session(cycles=8, drift_limit=0.5))
    bad = GreedyGate("m", n_gen=4, expect="0" * 32)
    for name, gate, when in (("good", GREEDY, ["before", "after"]), ("bad", bad, [])):
        candidate = gated(toy_lab, gate, name=name, env={"TOY": "half"}, session=baseline.session)
        session, events = toy_lab.run(candidate, "ab", baseline=baseline)
        asked = [event["id"] for event in kinds(events, "gate")]
        assert asked == ["gate:0", "gate:0:after"][: max(1, len(when))]
        claims = judgement.recorded(toy_lab.lab.store, session.job_id)
        page = report.render(report.collect_session(toy_lab.lab.store, session.job_id), wide=True)
        if when:
            assert {claim.verdict.verdict for claim in claims} == {"slower"}
            assert [f"| good | {word} | greedy of m |" in page for word in when] == [True, True]
        else:
            assert {claim.verdict.verdict for claim in claims} == {"invalid"}
            assert "failed for bad " in page
    assert audit.check(toy_lab.lab.store) == []


MAKEFILE = """\
test:
\tmkdir -p $(OUT)
\t$(CC) -I.. -DARCH='"$(ARCH)"' -o $(OUT)/harness harness.c
\t$(OUT)/harness test
operators:
\t@echo 'ok   an operator is registered' >&2; echo passed >&2
"""
HARNESS = """
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include "common/check.cuh"
#include "first.h"
int main(void) {
    const char * how = getenv("TOY") ? getenv("TOY") : "";
    if (!strcmp(how, "nothing")) { return 0; }
    if (!strcmp(how, "crash")) { abort(); }
    said(1, "the checker fails what is wrong");
    int right = said(strcmp(how, "wrong") && FIRST_RUNG, "every code on " ARCH " is exact");
    if (strcmp(how, "cut")) { fprintf(stderr, "%s\\n", right ? "passed" : "FAILED"); }
    return !right;
}
"""
CHECK_CUH = """
static int said(int right, const char * what) {
    fprintf(stderr, "%s %s%s\\n", right ? "ok  " : "FAIL", what, right ? "" : ": 3 of 4096 differ");
    return right;
}
"""


@pytest.fixture
def kernel_lab(toy_lab: ToyLab) -> ToyLab:
    """A lab whose project has a kernel that compiles with the C compiler, and leftovers beside it."""
    files = {"toy/Makefile": MAKEFILE, "toy/harness.c": HARNESS, "common/check.cuh": CHECK_CUH}
    files |= {"toy/README.md": "# toy", "toy/first.h": "#define FIRST_RUNG 1\n"}
    for name, text in files.items():
        path = toy_lab.folder / "kernels" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (toy_lab.folder / "kernels" / "toy" / "build").mkdir()
    (toy_lab.folder / "kernels" / "toy" / "build" / "harness").write_bytes(b"\x7fELF\xff")
    return toy_lab


def test_a_kernels_own_tests_are_compiled_and_run_on_the_host(kernel_lab: ToyLab) -> None:
    gate = HarnessGate("toy", "sm_90")
    outcome, events = kernel_lab.run_well(gated(kernel_lab, gate))
    (event,) = kinds(events, "gate")
    assert event["readings"]["arm"] == {"passed": 2, "failed": [], "verdict": "passed"}
    assert event["commands"][0]["argv"][-2] == "ARCH=sm_90"
    job = kernel_lab.root / "jobs" / outcome.job_id
    assert not (job / "gate-0").exists()
    assert "on sm_90" in (job / event["raw"]["arm stderr"]["path"]).read_text()
    assert audit.check(kernel_lab.lab.store) == []
    assert "| harness of toy |" in report.render(report.collect(kernel_lab.lab.store, "toy"), wide=True)

    assert kernel_lab.run(gated(kernel_lab, gate))[0].job_id == ""
    (kernel_lab.folder / "kernels" / "common" / "check.cuh").write_text(CHECK_CUH + "\n")
    assert len(kinds(kernel_lab.run(gated(kernel_lab, gate))[1], "gate")) == 1


def test_the_gate_of_a_checkout_compiles_what_that_has_of_the_kernel(kernel_lab: ToyLab, tmp_path: Path) -> None:
    checkout, copy = tmp_path / "checkout", Path("ggml", "first.h")
    toy.git(tmp_path, "clone", "-q", str(kernel_lab.repository), str(checkout))
    (kernel_lab.folder / "patches" / "over").mkdir(parents=True)
    (kernel_lab.folder / "patches" / "over" / "series").write_text(f"overlay kernels/toy/first.h {copy}\n")
    experiment = gated(kernel_lab, HarnessGate("toy"), series=("over",))
    digests = []
    for text in ("#define FIRST_RUNG 2\n", "#define FIRST_RUNG 0\n"):
        (checkout / copy).parent.mkdir(exist_ok=True)
        (checkout / copy).write_text(text)
        _, events = kernel_lab.run(experiment, tree=checkout)
        (event,) = kinds(events, "gate")
        digests.append(event["inputs"]["kernels/toy"])
        assert (event["status"], len(event["readings"]["arm"]["failed"])) == (
            ("passed", 0) if "2" in text else ("failed", 1)
        )
    assert digests[0] != digests[1]


def test_another_target_of_a_kernel_runs_other_tests(kernel_lab: ToyLab) -> None:
    """As the operators of a library that needs torch: a gate of their own, beside the kernel's."""
    gates = gated(kernel_lab, HarnessGate("toy", tests=2), HarnessGate("toy", target="operators", tests=1))
    _, events = kernel_lab.run_well(gates)
    assert [event["readings"]["arm"]["passed"] for event in kinds(events, "gate")] == [2, 1]
    page = report.render(report.collect(kernel_lab.lab.store, "toy"), wide=True)
    assert ["| harness of toy |" in page, "| harness of toy operators |" in page] == [True, True]


def test_path_prepend_names_the_python_of_a_gate(kernel_lab: ToyLab) -> None:
    """Also that of dgxlab's own virtual environment, which is otherwise the last on PATH."""
    own = Path(sys.executable).parent
    recipe = "python:\n\t@echo 'ok   '`command -v python3` >&2; echo passed >&2\n"
    (kernel_lab.folder / "kernels" / "toy" / "Makefile").write_text(recipe)
    host = Host(kernel_lab.host.transport, HostEntry("local", path_prepend=(str(own),)))
    lab = replace(kernel_lab, lab=replace(kernel_lab.lab, connect=lambda name: host), host=host)
    outcome, events = lab.run_well(gated(lab, HarnessGate("toy", target="python", tests=1)), "gate")
    (event,) = kinds(events, "gate")
    printed = lab.root / "jobs" / outcome.job_id / event["raw"]["arm stderr"]["path"]
    assert printed.read_text() == f"ok   {own / 'python3'}\npassed\n"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("", "expected 3 tests, got 2"),
        ("wrong", "failed: every code on native is exact: 3 of 4096 differ"),
        ("nothing", "no test was run"),
        ("cut", "the harness does not end with 'passed'"),
        ("crash", "the arm: make ended with exit status 2"),
    ],
)
def test_a_harness_must_say_that_it_tested(kernel_lab: ToyLab, how: str, reason: str) -> None:
    error, _ = kernel_lab.fail(
        GateFailed, gated(kernel_lab, HarnessGate("toy", env={"TOY": how}, tests=0 if how else 3))
    )
    assert reason in error.message
    assert audit.check(kernel_lab.lab.store) == []


def test_a_kernel_that_is_not_there_is_refused_before_anything_is_sent(kernel_lab: ToyLab) -> None:
    with pytest.raises(SpecError, match=r"kernels/tiles has no Makefile"):
        kernel_lab.run(gated(kernel_lab, HarnessGate("tiles")))


def test_an_experiment_of_which_only_gates_ran_is_reported_with_its_hypothesis(toy_lab: ToyLab) -> None:
    toy_lab.run_well(toy_lab.experiment(hypothesis="fast"), kind="gate")
    assert report.collect(toy_lab.lab.store, "toy").hypothesis == "fast"
