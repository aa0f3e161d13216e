"""The screen: one bracket, enough to drop a bad idea early, never to keep a good one."""

from __future__ import annotations

import math
from dataclasses import replace

from dgxlab.stats.chain import SCREEN_DRIFT_LIMIT, Chain
from dgxlab.stats.student import t_quantile
from dgxlab.stats.verdict import Verdict, invalid

SCREEN_NOISE = 2.77
"""1.96 sqrt(2): by more noise floors than this, two runs of the same thing differ in one of twenty pairs."""


def screen(chain: Chain, noise: float | None, noise_cycles: int | None = None) -> Verdict:
    """Return what a single bracket a_0 b_1 a_1 says; it is never `same`.

    The bracket must close within 2 %, and the candidate beat both baselines, or lose to both, by 2.77 noise floors. A
    noise floor from few cycles may be too low itself: then t takes the place of 1.96, which makes it 3.34 of them where
    they come from 8 cycles. (With 2.77 of those, 3 % of screens of identical programs claim a difference.)

    Args:
        chain: Of one cycle; its own drift limit holds where it is tighter than 2 %.
        noise: The host's noise floor, a share; without one there is no screen.
        noise_cycles: How many valid cycles of A/A sessions it comes from; None for a floor that is well known.
    """
    found = _screen(replace(chain, drift_limit=min(chain.drift_limit, SCREEN_DRIFT_LIMIT)), noise, noise_cycles)
    return replace(found, better=chain.better, screen=True)


def _screen(chain: Chain, noise: float | None, noise_cycles: int | None) -> Verdict:
    done = len(chain.b)
    if noise is None or not 0 < noise < 1:
        return invalid(done, "a screen needs the noise floor of this host, from an A/A session")
    if noise_cycles is not None and noise_cycles < 2:
        return invalid(done, f"{noise_cycles} cycles tell no noise floor")
    if defect := chain.defect():
        return invalid(done, defect)
    if done != 1:
        return invalid(done, f"a screen is one bracket, not {done} cycles")
    if flaws := chain.invalid_cycles():
        return invalid(done, f"the bracket does not count: {flaws[1]}", flaws=flaws)
    (effect,), half_open = chain.differences(), _half_open(chain)
    assert effect is not None
    floors = SCREEN_NOISE if noise_cycles is None else t_quantile(0.975, noise_cycles - 1) * math.sqrt(2)
    clear = abs(effect) - half_open > floors * noise
    word = ("faster" if (effect > 0) == (chain.better == "higher") else "slower") if clear else "inconclusive"
    does = ("beats both baselines by" if word == "faster" else "loses to both baselines by") if clear else "is within"
    reason = f"one bracket, in which the candidate {does} {floors:.3g} noise floors of {100 * noise:.2g} %"
    return Verdict(word, done, (reason,), effect=math.expm1(effect), valid_cycles=1)


def _half_open(chain: Chain) -> float:
    """Return how far the two baselines lie from their middle."""
    before, after = chain.a
    assert before is not None
    assert after is not None
    return abs(math.log(before) - math.log(after)) / 2
