"""When a gate on a model passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dgxlab.agent.parse.judge import judge_check, shown
from dgxlab.model import GreedyGate, HarnessGate, PerplexityGate

TEXT = {"md5": "a" * 32, "bytes": 90, "n_prompt": 65, "n_gen": 32}
OTHER = {**TEXT, "md5": "b" * 32}
GREEDY = GreedyGate("m", against={"FAST": None})
ENGAGED = replace(GREEDY, engaged="fast: on")

RATIO = PerplexityGate("m", "exact", against={"FAST": None}, kld_ratio_at_most=0.5)
LIMIT = PerplexityGate("m", "exact", kld_at_most=0.01, ppl_ratio_at_most=1.01)


def said(kld: float, ratio: float = 1.0) -> dict[str, Any]:
    """Return what a comparison printed."""
    return {"kld": kld, "kld_error": 0.0, "ppl_ratio": ratio, "ppl_ratio_error": 0.0, "same_top_p": 99.0}


REFERENCE = {"ppl": 10.0, "ppl_error": 0.1}


@pytest.mark.parametrize(
    ("gate", "readings", "reasons"),
    [
        (GREEDY, {"arm": TEXT, "against": TEXT}, []),
        (
            GREEDY,
            {"arm": TEXT, "against": OTHER},
            [f"the text is another one than in the environment of against: md5 {'a' * 32}, there {'b' * 32}"],
        ),
        (replace(GREEDY, against={}, expect="a" * 32), {"arm": TEXT}, []),
        (
            replace(GREEDY, against={}, expect="b" * 32),
            {"arm": TEXT},
            [f"expected md5 {'b' * 32}, got {'a' * 32}"],
        ),
        (GREEDY, {"arm": TEXT}, ["the environment of against was not run"]),
        (
            GREEDY,
            {"arm": {**TEXT, "n_gen": 12}, "against": {**TEXT, "n_gen": None}},
            [
                "the arm generated 12 of 32 tokens",
                "the environment of against generated an unknown number of 32 tokens",
            ],
        ),
        (
            replace(GREEDY, against={}),
            {"arm": {**TEXT, "bytes": 0, "n_prompt": None}},
            ["the arm printed no text", "the arm does not say how many tokens the prompt has"],
        ),
        (GREEDY, {"arm": TEXT, "against": {"problem": "it crashed"}}, ["the environment of against: it crashed"]),
        (RATIO, {"reference": REFERENCE, "arm": said(0.002), "against": said(0.00401)}, []),
        (
            RATIO,
            {"reference": REFERENCE, "arm": said(0.002), "against": said(0.004)},  # 0.0020004 is printed as 0.002 too
            ["the KLD is 0.5 times that in the environment of against (0.002000 and 0.004000), at most 0.5 is allowed"],
        ),
        (
            RATIO,
            {"reference": REFERENCE, "arm": said(0.0), "against": said(0.000001)},
            [
                "the KLD in the environment of against prints as 0.000001: too small to compare with, "
                "a wider model has more"
            ],
        ),
        (
            RATIO,
            {"reference": {"problem": "it computed none of 4 chunks"}},
            ["the reference: it computed none of 4 chunks"],
        ),
        (RATIO, {"arm": said(0.001), "against": said(0.004)}, ["the reference was not run"]),
        (LIMIT, {"reference": REFERENCE, "arm": said(0.01, 0.9902)}, []),
        (ENGAGED, {"arm": {**TEXT, "engaged": True}, "against": {**TEXT, "engaged": False}}, []),
        (
            ENGAGED,
            {"arm": {**TEXT, "engaged": False}, "against": {**TEXT, "engaged": True}},
            [
                "the path under test did not run: 'fast: on' is not on the stderr of the arm",
                "the path under test ran on both sides: 'fast: on' is on the stderr of the environment of against too",
            ],
        ),
        (
            replace(LIMIT, engaged="fast: on"),
            {"reference": REFERENCE, "arm": {**said(0.001), "engaged": False}},
            ["the path under test did not run: 'fast: on' is not on the stderr of the arm"],
        ),
        (HarnessGate("toy", tests=72), {"arm": {"passed": 72, "failed": [], "verdict": "passed"}}, []),
        (
            HarnessGate("toy", tests=1691),
            {"arm": {"passed": 1, "failed": [], "verdict": "passed"}},
            ["expected 1691 tests, got 1"],
        ),
        (LIMIT, {"reference": REFERENCE, "arm": said(0.0101)}, ["the KLD is 0.010100, at most 0.01 is allowed"]),
        (
            LIMIT,
            {"reference": REFERENCE, "arm": said(0.001, 0.989)},
            ["the perplexity is 0.989000 times the reference's, at most 1.01 and its inverse are allowed"],
        ),
        (
            LIMIT,
            {"reference": REFERENCE, "arm": said(float("nan"), float("nan"))},
            [
                "the KLD is nan, at most 0.01 is allowed",
                "the perplexity is nan times the reference's, at most 1.01 and its inverse are allowed",
            ],
        ),
    ],
)
def test_a_gate_passes_on_evidence_alone(gate: Any, readings: dict[str, Any], reasons: list[str]) -> None:
    """Each way to fail has its sentence; rounding counts against the arm, NaN is never within a limit."""
    assert list(judge_check(gate, readings)) == reasons


def test_what_was_found_is_said_whatever_comes_of_it() -> None:
    """Both texts where they differ, both KLDs and their ratio, nothing of what was not read."""
    assert shown(GREEDY, {"arm": TEXT, "against": OTHER}) == (
        f"md5 {'a' * 32}, 65 + 32 tokens",
        f"md5 {'b' * 32}, 65 + 32 tokens",
    )
    assert shown(RATIO, {"arm": said(0.001), "against": said(0.004)})[0] == "KLD 0.001000, there 0.004000, 0.25 times"
    assert shown(RATIO, {"arm": {"problem": "it crashed"}}) == ()
