"""What the commands of a gate showed, held against what the gate asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dgxlab.model import AGAINST, ARM, REFERENCE, Check, GreedyGate, HarnessGate, PerplexityGate

Readings = Mapping[str, Mapping[str, Any]]
"""By role: what a command printed, or under `problem` why that is nothing."""

LAST_DIGIT = 1e-6
"""Of a KLD as llama-perplexity prints it."""

WHERE = {ARM: "the arm", AGAINST: "the environment of against", REFERENCE: "the reference"}


def judge_check(gate: Check, readings: Readings) -> tuple[str, ...]:
    """Return why a gate did not pass, one sentence a reason; () when it did."""
    readings = {role: readings[role] for role in roles(gate) if role in readings}
    problems = [f"{WHERE[role]}: {said['problem']}" for role, said in readings.items() if "problem" in said]
    if problems:  # what comes after a command that failed was not run
        return tuple(problems)
    if missing := [WHERE[role] for role in roles(gate) if role not in readings]:
        return (f"{missing[0]} was not run",)
    if isinstance(gate, HarnessGate):
        return tuple(_harness(gate, readings[ARM]))
    found = _greedy(gate, readings) if isinstance(gate, GreedyGate) else _perplexity(gate, readings)
    return (*_engaged(gate, readings), *found)


def roles(gate: Check) -> tuple[str, ...]:
    """Return the commands that a gate has, by what they show."""
    return (*((REFERENCE,) if isinstance(gate, PerplexityGate) else ()), ARM, *((AGAINST,) if gate.against else ()))


def shown(gate: Check, readings: Readings) -> tuple[str, ...]:
    """Return what was found, in words."""
    arm, other = (readings.get(role, {}) for role in (ARM, AGAINST))
    if isinstance(gate, GreedyGate):
        sizes = f", {arm['n_prompt']} + {arm['n_gen']} tokens" if "md5" in arm else ""
        return tuple(f"md5 {found}{sizes}" for found in dict.fromkeys(filter(None, (arm.get("md5"), other.get("md5")))))
    if isinstance(gate, HarnessGate):
        return (f"{arm['passed']} of {arm['passed'] + len(arm['failed'])} tests passed",) if "passed" in arm else ()
    if "kld" not in arm:
        return ()
    ratio = kld_ratio(readings)
    against = f", there {other['kld']:.6f}" if "kld" in other else ""
    times = f", {ratio:.3g} times" if ratio is not None else ""
    return (f"KLD {arm['kld']:.6f}{against}{times}", f"perplexity {arm['ppl_ratio']:.6f} times the reference's")


def kld_ratio(readings: Readings) -> float | None:
    """Return the arm's KLD divided by that of the other environment; None where there is none or it is 0."""
    arm, other = (readings.get(role, {}).get("kld") for role in (ARM, AGAINST))
    return float(arm / other) if arm is not None and other else None


def _harness(gate: HarnessGate, tests: Mapping[str, Any]) -> Iterator[str]:
    if failed := tests["failed"]:
        yield f"failed: {failed[0]}{f' and {len(failed) - 1} more' if len(failed) > 1 else ''}"
    elif not tests["passed"]:
        yield "no test was run"
    elif tests["verdict"] != "passed":
        yield "the harness does not end with 'passed'"
    elif gate.tests and tests["passed"] != gate.tests:
        yield f"expected {gate.tests} tests, got {tests['passed']}"


def _engaged(gate: GreedyGate | PerplexityGate, readings: Readings) -> Iterator[str]:
    """Yield where the path under test ran, or did not, other than the gate says."""
    if not gate.engaged:
        return
    if not readings[ARM]["engaged"]:
        yield f"the path under test did not run: {gate.engaged!r} is not on the stderr of {WHERE[ARM]}"
    if gate.against and readings[AGAINST]["engaged"]:
        yield f"the path under test ran on both sides: {gate.engaged!r} is on the stderr of {WHERE[AGAINST]} too"


def _greedy(gate: GreedyGate, readings: Readings) -> Iterator[str]:
    for role, said in readings.items():
        if said["bytes"] == 0:
            yield f"{WHERE[role]} printed no text"
        if said["n_gen"] != gate.n_gen:
            yield f"{WHERE[role]} generated {_count(said['n_gen'])} of {gate.n_gen} tokens"
        if not said["n_prompt"]:
            yield f"{WHERE[role]} does not say how many tokens the prompt has"
    found = readings[ARM]["md5"]
    if gate.expect and found != gate.expect:
        yield f"expected md5 {gate.expect}, got {found}"
    if gate.against and found != readings[AGAINST]["md5"]:
        yield f"the text is another one than in {WHERE[AGAINST]}: md5 {found}, there {readings[AGAINST]['md5']}"


def _count(number: int | None) -> str:
    return "an unknown number" if number is None else str(number)


def _perplexity(gate: PerplexityGate, readings: Readings) -> Iterator[str]:
    arm = readings[ARM]
    if gate.kld_ratio_at_most is not None:
        yield from _ratio(gate.kld_ratio_at_most, arm["kld"], readings[AGAINST]["kld"])
    if gate.kld_at_most is not None and not arm["kld"] <= gate.kld_at_most:
        yield f"the KLD is {arm['kld']:.6f}, at most {gate.kld_at_most:g} is allowed"
    limit, ratio = gate.ppl_ratio_at_most, arm["ppl_ratio"]
    if limit is not None and not (ratio > 0 and max(ratio, 1 / ratio) <= limit):
        yield f"the perplexity is {ratio:.6f} times the reference's, at most {limit:g} and its inverse are allowed"


def _ratio(limit: float, arm: float, other: float) -> Iterator[str]:
    """Compare as printed, with what rounding may hide counted against the arm."""
    if not other > LAST_DIGIT:
        yield f"the KLD in {WHERE[AGAINST]} prints as {other:.6f}: too small to compare with, a wider model has more"
    elif not (arm + LAST_DIGIT / 2) / (other - LAST_DIGIT / 2) <= limit:
        shown = f"{arm:.6f} and {other:.6f}"
        yield f"the KLD is {arm / other:.3g} times that in {WHERE[AGAINST]} ({shown}), at most {limit:g} is allowed"
