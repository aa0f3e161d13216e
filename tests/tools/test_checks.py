"""Gates on models and kernels: what their programs print, and when they pass."""

import hashlib
import re
from dataclasses import replace
from typing import Any

import pytest

from dgxlab.spec import load
from dgxlab.tools import GreedyGate, HarnessGate, PerplexityGate, judge_check, targets_of
from tests.conftest import PROJECT
from tests.tools.captures import GOLDEN, capture

TEXT = {"md5": "a" * 32, "bytes": 90, "n_prompt": 65, "n_gen": 32}
OTHER = {**TEXT, "md5": "b" * 32}
GREEDY = GreedyGate("m", against={"FAST": None})
ENGAGED = replace(GREEDY, engaged="fast: on")

RATIO = PerplexityGate("m", "exact", against={"FAST": None}, kld_ratio_at_most=0.5)
LIMIT = PerplexityGate("m", "exact", kld_at_most=0.01, ppl_ratio_at_most=1.01)
GROWTH = PerplexityGate("m", "m", n_ctx=4096, n_ubatch=1, n_ctx_short=256, kld_at_most=0.01, kld_growth_at_most=1.5)
REFERENCE = {"ppl": 10.0, "ppl_error": 0.1}
BROKEN = {"problem": "it crashed"}
PASSED = {"passed": 72, "failed": [], "verdict": "passed"}


def compared(kld: float, ratio: float = 1.0) -> dict[str, Any]:
    return {"kld": kld, "kld_error": 0.0, "ppl_ratio": ratio, "ppl_ratio_error": 0.0, "same_top_p": 99.0}


def against(arm: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {"reference": REFERENCE, "arm": arm, "against": other}


def alone(arm: dict[str, Any]) -> dict[str, Any]:
    return {"reference": REFERENCE, "arm": arm}


def grown(kld: float, short: float) -> dict[str, Any]:
    return {**alone(compared(kld)), "short_reference": REFERENCE, "short": compared(short)}


ON, OFF = {"engaged": True}, {"engaged": False}
NAN = float("nan")


@pytest.mark.parametrize(
    ("gate", "readings", "codes"),
    [
        (GREEDY, against(TEXT, TEXT), ""),
        (GREEDY, against(TEXT, OTHER), "other_text"),
        (replace(GREEDY, against={}, expect="a" * 32), alone(TEXT), ""),
        (replace(GREEDY, against={}, expect="b" * 32), alone(TEXT), "md5"),
        (GREEDY, alone(TEXT), "not_run"),
        (GREEDY, against({**TEXT, "n_gen": 12}, {**TEXT, "n_gen": None}), "generated generated"),
        (replace(GREEDY, against={}), alone({**TEXT, "bytes": 0, "n_prompt": None}), "no_text no_prompt"),
        (GREEDY, against(TEXT, BROKEN), "command"),
        (ENGAGED, against({**TEXT, **ON}, {**TEXT, **OFF}), ""),
        (ENGAGED, against({**TEXT, **OFF}, {**TEXT, **ON}), "arm_not_engaged both_engaged"),
        (RATIO, against(compared(0.002), compared(0.00401)), ""),
        (RATIO, against(compared(0.002), compared(0.004)), "kld_ratio"),  # 0.0020004 is printed as 0.002 too
        (RATIO, against(compared(0.0), compared(0.000001)), "kld_too_small"),
        (RATIO, {"reference": BROKEN}, "command"),
        (RATIO, {"arm": compared(0.001), "against": compared(0.004)}, "not_run"),
        (LIMIT, alone(compared(0.01, 0.9902)), ""),
        (LIMIT, alone(compared(0.0101)), "kld"),
        (LIMIT, alone(compared(0.001, 0.989)), "ppl_ratio"),
        (LIMIT, alone(compared(NAN, NAN)), "kld ppl_ratio"),
        (GROWTH, grown(0.0029, 0.002), ""),
        (GROWTH, grown(0.003, 0.002), "kld_ratio"),  # 0.0030004 is printed as 0.003 too
        (GROWTH, grown(0.0000010, 0.000001), "kld_too_small"),
        (GROWTH, grown(0.012, 0.011), "kld"),
        (GROWTH, grown(0.009, 0.011), "kld"),
        (GROWTH, {**grown(0.002, 0.002), "short": BROKEN}, "command"),
        (GROWTH, alone(compared(0.002)), "not_run"),
        (replace(LIMIT, engaged="fast: on"), alone({**compared(0.001), **OFF}), "arm_not_engaged"),
        (HarnessGate("toy", tests=72), alone(PASSED), ""),
        (HarnessGate("toy", tests=72, engaged="fast: on"), alone({**PASSED, **ON}), ""),
        (HarnessGate("toy", tests=72, engaged="fast: on"), alone({**PASSED, **OFF}), "arm_not_engaged"),
        (HarnessGate("toy", tests=1691), alone(PASSED), "tests"),
        (HarnessGate("toy"), alone({**PASSED, "passed": 0}), "no_test"),
        (HarnessGate("toy"), alone({**PASSED, "verdict": ""}), "no_verdict"),
        (HarnessGate("toy"), alone({**PASSED, "failed": ["a: b", "c: d"]}), "cases_failed"),
    ],
)
def test_a_gate_passes_on_evidence_alone(gate: Any, readings: dict[str, Any], codes: str) -> None:
    assert [reason.code for reason in judge_check(gate, readings)] == codes.split()


def test_a_reason_says_where_and_how_much() -> None:
    (short,) = judge_check(GREEDY, against(TEXT, {**TEXT, "n_gen": 12}))
    assert short.params == {"where": "the environment of against", "count": 12, "wanted": 32}
    (missing,) = judge_check(RATIO, {"arm": compared(0.001), "against": compared(0.004)})
    assert missing.params == {"where": "the reference"}
    (failed,) = judge_check(HarnessGate("toy"), alone({**PASSED, "failed": ["a: b", "c: d"]}))
    assert failed.params == {"case": "a: b", "more": 1}


def test_what_was_read_is_shown() -> None:
    assert tuple(GREEDY.shown({"arm": TEXT, "against": OTHER})) == (
        f"md5 {'a' * 32}, 65 + 32 tokens",
        f"md5 {'b' * 32}, 65 + 32 tokens",
    )
    both = {"arm": compared(0.001), "against": compared(0.004)}
    assert next(RATIO.shown(both)) == "KLD 0.001000, there 0.004000, 0.25 times"
    assert not list(RATIO.shown({"arm": BROKEN}))
    assert list(GROWTH.shown(grown(0.003, 0.002)))[:2] == ["KLD 0.003000", "KLD at n_ctx 256 0.002000"]
    assert list(HarnessGate("toy").shown({"arm": PASSED})) == ["72 of 72 tests passed"]
    assert HarnessGate("toy", tests=72, engaged="fast: on").limits() == ("72 tests pass", "'fast: on' on stderr")


@pytest.mark.parametrize(("n_ubatch", "vacuous"), [(1, False), (511, False), (512, True), (4096, True)])
def test_a_gate_that_reads_no_stored_state_says_so(n_ubatch: int, vacuous: bool) -> None:
    told = "; ".join(replace(LIMIT, n_ubatch=n_ubatch).shown(alone(compared(0.001))))
    assert ("of recurrent states it shows nothing" in told) == vacuous


def test_a_program_of_the_build_is_run_on_a_model() -> None:
    experiment = load(PROJECT / "experiments" / "h200" / "h200-gdn-bf16-on.yaml")
    (gate,) = (gate for gate in experiment.gates if isinstance(gate, HarnessGate) and gate.program)
    (command,) = gate.step(experiment.env, experiment.root)["commands"]
    assert (command.argv, command.model) == (("{bin}/gdn-state-bytes", "{model:text}"), "text")
    assert {"gdn-state-bytes", "llama-perplexity", "llama-batched-bench"} <= targets_of(experiment)


# -- llama-completion -------------------------------------------------------------------------------------------------

OUT, ERR = (GOLDEN / "cpu/completion.out").read_bytes(), capture("cpu/completion.err")


def test_a_text_is_digested_and_its_tokens_counted() -> None:
    md5 = hashlib.md5(OUT, usedforsecurity=False).hexdigest()
    reading = {"md5": md5, "bytes": len(OUT.strip()), "n_prompt": 61, "n_gen": 16}
    assert GREEDY.read("arm", OUT, ERR) == reading
    assert GREEDY.read("arm", b"\n\n", "")["bytes"] == 0


@pytest.mark.parametrize("err", ["", ERR + ERR, ERR.replace("tokens", "words").replace("runs", "steps")])
def test_counts_that_are_not_there_once_are_unknown(err: str) -> None:
    reading = GREEDY.read("arm", OUT, err)
    assert (reading["n_prompt"], reading["n_gen"]) == (None, None)
    assert reading.get("cut", False) == (err != ERR + ERR)


# -- llama-perplexity -------------------------------------------------------------------------------------------------

FIRST, ESTIMATE = capture("cpu/perplexity-reference.out"), capture("cpu/perplexity-reference.err")
COMPARED = capture("cpu/perplexity-compared.out")


def test_perplexities_are_read() -> None:
    reading = RATIO.read("reference", FIRST.encode(), ESTIMATE)
    assert reading == {"ppl": 36861.5399, "ppl_error": 784.80721}
    assert RATIO.read("arm", COMPARED.encode(), "") == {
        "kld": 0.000016,
        "kld_error": 0.0,
        "ppl_ratio": 1.000083,
        "ppl_ratio_error": 0.000239,
        "same_top_p": 96.26,
    }


def test_logits_that_are_the_reference_s_may_have_no_error() -> None:
    """The program takes the root of a variance, which rounding makes negative where nothing differs."""
    same = re.sub(r"(Mean PPL\(Q\)/PPL\(base\) .*± *)\S+", r"\1-nan", COMPARED)
    assert same != COMPARED
    reading = RATIO.read("arm", same.encode(), "")
    assert (reading["ppl_ratio"], "ppl_ratio_error" in reading, "problem" in reading) == (1.000083, False, False)


@pytest.mark.parametrize(
    ("role", "out", "err", "problem", "cut"),
    [
        ("arm", capture("cpu/perplexity-nothing.out"), "", "it computed none of 4 chunks", True),
        ("arm", capture("cpu/perplexity-cut.out"), "", "it computed 3 of 4 chunks", True),
        ("arm", capture("cpu/perplexity-nan.out"), "", "chunk 1 has no finite number: nan", False),
        ("arm", COMPARED.replace("\n   2 ", "\n   3 "), "", "it computed 4 of 4 chunks, not each once", False),
        ("arm", COMPARED.replace("KLD:   0.000016", "KLD:        inf"), "", "kld is no finite number: inf", False),
        ("arm", COMPARED.partition("Mean    KLD")[0], "", "kld was printed 0 times, not once", True),
        ("arm", COMPARED.partition("Same top p:")[0], "", "same_top_p was printed 0 times, not once", True),
        ("arm", COMPARED + COMPARED.partition("======")[2], "", "kld was printed 2 times, not once", False),
        ("arm", "", "", "it computed none of 4 chunks", True),
        ("reference", FIRST.rpartition("[4]")[0], ESTIMATE, "it computed 3 of 4 chunks", True),
        ("reference", FIRST, ESTIMATE.partition("Final")[0], "ppl was printed 0 times, not once", True),
        ("reference", FIRST, ESTIMATE.replace("PPL = 36861.5399", "PPL = nan"), "ppl is no finite number: nan", False),
        ("reference", FIRST.replace("36799.8231", "nan"), ESTIMATE, "chunk 3 has no finite number: nan", False),
        ("reference", "", ESTIMATE, "it computed none of 4 chunks", True),
    ],
)
def test_what_is_not_whole_does_not_count(role: str, out: str, err: str, problem: str, cut: bool) -> None:
    reading = RATIO.read(role, out.encode(), err)
    assert reading == {"problem": problem, **({"cut": True} if cut else {})}


@pytest.mark.parametrize("length", range(0, len(COMPARED), 97))
def test_no_beginning_of_the_output_counts(length: int) -> None:
    assert list(RATIO.read("arm", COMPARED.encode()[:length], "")) == ["problem", "cut"]
