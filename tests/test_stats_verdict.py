"""Verdicts: a chain worked by hand, Holm, what must be invalid, promotion and screens."""

import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgxlab import stats
from dgxlab.stats import Chain, VerdictCode, VerdictReason
from dgxlab.stats.distributions import t_quantile
from dgxlab.stats.precision import standard_error
from dgxlab.stats.verdict import Verdict, holm

CLEAN = Chain(
    a=[100.1, 99.7, 100.4, 99.9, 100.2, 99.6, 100.3, 99.8, 100.0],
    b=[103.1, 102.7, 103.5, 103.0, 102.8, 103.3, 102.6, 103.2],
)
BRACKET = Chain([100, 100], [150])


def noisy(source: random.Random, effect: float = 0.0, sigma: float = 0.006, k: int = 8) -> Chain:
    """Return a chain on a stationary box."""
    a = [100 * math.exp(source.gauss(0, sigma)) for _ in range(k + 1)]
    return Chain(a, [100 * (1 + effect) * math.exp(source.gauss(0, sigma)) for _ in range(k)])


def codes(verdict: Verdict) -> tuple[VerdictCode, ...]:
    return tuple(reason.code for reason in verdict.reasons if isinstance(reason, VerdictReason))


def inverse(chain: Chain) -> Chain:
    return Chain([1 / value for value in chain.a if value], [1 / value for value in chain.b if value], better="lower")


def test_a_chain_worked_by_hand() -> None:
    a, b = [100.0, 101.0, 100.0, 99.0, 100.0, 101.0], [101.0, 102.0, 103.0, 100.0, 101.0]
    verdict = stats.judge(Chain(a, b, before=101.5))
    d = [math.log(run) - (math.log(x) + math.log(y)) / 2 for run, (x, y) in zip(b, pairwise(a), strict=True)]
    mean = sum(d) / 5
    variance = sum((each - mean) ** 2 for each in d) / 4
    runs = [math.log(value) for value in (101.5, *a)]
    triples = list(zip(runs, runs[1:], runs[2:], strict=False))
    bends = sum((x - 2 * y + z) ** 2 for x, y, z in triples) / 6 / 5
    steps = -sum((y - x) * (z - y) for x, y, z in triples) / 5
    shared = max(bends / 4, min(bends, steps)) / 2
    error = math.sqrt((variance + shared) / 5)
    dof = round((variance + shared) ** 2 / (variance**2 / 4 + 7 * bends**2 / 45), 1)
    assert dof == 4.5
    assert (verdict.verdict, verdict.valid_cycles, verdict.cycles) == ("inconclusive", 5, 5)
    assert verdict.confidence == 0.99
    assert verdict.effect == pytest.approx(math.exp(mean) - 1, rel=1e-12)
    assert verdict.spread == pytest.approx(math.sqrt(variance), rel=1e-12)
    for interval, probability in ((verdict.ci, 0.995), (verdict.same_ci, 0.95)):
        half = t_quantile(probability, dof) * error
        assert interval == pytest.approx((math.exp(mean - half) - 1, math.exp(mean + half) - 1), rel=1e-9)
    seen = (t_quantile(0.995, dof) + t_quantile(0.8, dof)) * error
    assert verdict.mde == pytest.approx(math.exp(seen) - 1, rel=1e-9)
    assert verdict.p == pytest.approx(2 * stats.t_tail(mean / error, dof), rel=1e-9)


def test_faster_slower_and_the_direction_of_the_metric() -> None:
    up = stats.judge(CLEAN)
    assert (up.verdict, codes(up)) == ("faster", (VerdictCode.ABOVE,))
    assert up.reasons == ("the 99 % interval lies above 0",)
    assert up.effect == pytest.approx(0.0303, abs=1e-4)
    time = stats.judge(replace(CLEAN, better="lower"))
    assert (time.verdict, time.effect, time.ci) == ("slower", up.effect, up.ci)
    down = stats.judge(inverse(CLEAN))
    assert (down.verdict, codes(down)) == ("faster", (VerdictCode.BELOW,))
    assert down.p == pytest.approx(up.p)


def test_same_needs_a_narrow_interval_around_nothing() -> None:
    source = random.Random(3)  # noqa: S311 - not for secrets
    quiet = stats.judge(noisy(source, sigma=0.002))
    assert (quiet.verdict, codes(quiet)) == ("same", (VerdictCode.INSIDE,))
    assert quiet.interval == quiet.same_ci
    loud = stats.judge(noisy(source, sigma=0.03))
    assert (loud.verdict, codes(loud)[0]) == ("inconclusive", VerdictCode.OPEN)
    assert loud.interval == loud.ci
    assert loud.ci is not None
    assert loud.ci[0] < 0 < loud.ci[1]


def test_how_many_cycles_would_settle_an_inconclusive_chain() -> None:
    source = random.Random(5)  # noqa: S311 - not for secrets
    verdicts = (stats.judge(replace(noisy(source, 0.008), protocol=2)) for _ in range(100))
    verdict = next(verdict for verdict in verdicts if verdict.verdict == "inconclusive")

    def settles(k: int) -> bool:
        distance = abs(math.log1p(verdict.effect or 0))
        error = standard_error(verdict.spread or 0, k, k - 1)
        different, same = ((t_quantile(p, k - 1) + t_quantile(0.8, k - 1)) * error for p in (0.995, 0.95))
        return different <= distance or distance + same <= math.log(1.01)

    assert verdict.k_to_settle is not None
    assert settles(verdict.k_to_settle)
    assert not settles(verdict.k_to_settle - 1)
    assert verdict.reasons[1] == VerdictReason(VerdictCode.SETTLED_BY, cycles=verdict.k_to_settle)
    on_the_margin = stats.judge(Chain([100] * 7, [101 * 1.05, 101 / 1.05] * 3))
    assert (on_the_margin.k_to_settle, codes(on_the_margin)[:2]) == (None, (VerdictCode.OPEN, VerdictCode.HOPELESS))


def test_invalid_cycles_are_named() -> None:
    chain = replace(CLEAN, a=[*CLEAN.a[:8], 80.0, 80.1, 80.0], b=[*CLEAN.b, 82.5, 82.4], cycles=10)
    verdict = stats.judge(chain)
    assert (verdict.verdict, verdict.valid_cycles, verdict.cycles) == ("faster", 9, 10)
    assert (list(verdict.flaws), codes(verdict)[-1]) == ([8], VerdictCode.NOT_COUNTED)
    assert verdict.reasons[-1] == VerdictReason(VerdictCode.NOT_COUNTED, cycle=8, flaw=verdict.flaws[8])


def test_too_few_valid_cycles() -> None:
    flaws = dict.fromkeys((1, 3, 5, 7), "a hardware slowdown")
    verdict = stats.judge(replace(CLEAN, flaws=flaws))
    assert (verdict.verdict, verdict.effect, verdict.ci, verdict.p) == ("invalid", None, None, None)
    assert (verdict.valid_cycles, verdict.cycles, verdict.flaws) == (4, 8, flaws)
    assert codes(verdict) == (VerdictCode.TOO_FEW, *[VerdictCode.NOT_COUNTED] * 4)
    del flaws[7]
    chain = replace(CLEAN, flaws=flaws)
    assert stats.judge(chain).verdict == "faster"
    assert codes(stats.judge_session([chain] * 24)[0])[0] is VerdictCode.TOO_FEW_FOR_CLAIMS
    short = stats.judge(Chain([100, 101, 100, 101], [110, 111, 110]))
    assert (short.verdict, short.valid_cycles, short.cycles) == ("invalid", 3, 3)


def test_a_failed_run_has_no_value() -> None:
    a, b = [*CLEAN.a[:3], None, *CLEAN.a[4:]], [None, *CLEAN.b[1:]]
    assert stats.judge(replace(CLEAN, a=a, flaws={3: "the run failed", 4: "the run failed"})).verdict == "faster"
    assert codes(stats.judge(replace(CLEAN, a=a, flaws={3: "the run failed"}))) == (VerdictCode.NO_VALUE,)
    assert stats.judge(replace(CLEAN, b=b, flaws={1: "the run failed"})).valid_cycles == 7
    assert codes(stats.judge(replace(CLEAN, b=b))) == (VerdictCode.NO_VALUE,)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0, 0.0, -5.0, "7", True, [], {}, 10**400, None])
@pytest.mark.parametrize("arm", ["a", "b"])
def test_what_is_no_measurement_is_invalid(arm: str, bad: Any) -> None:
    values = [*getattr(CLEAN, arm)]
    values[2] = bad
    verdict = stats.judge(replace(CLEAN, **{arm: values}))
    assert (verdict.verdict, verdict.effect, verdict.ci, verdict.mde, verdict.p) == ("invalid", None, None, None, None)
    assert verdict.reasons[0].startswith(f"{arm}[2] is ")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"a": [], "b": []}, VerdictCode.UNPAIRED),
        ({"a": [100.0], "b": []}, VerdictCode.NO_CANDIDATES),
        ({"a": CLEAN.a[:5], "b": CLEAN.b[:4]}, VerdictCode.TOO_FEW),
        ({"b": CLEAN.b[:7]}, VerdictCode.UNPAIRED),
        ({"cycles": 9}, VerdictCode.CUT),
        ({"a": CLEAN.a[:8], "cycles": 8}, VerdictCode.CUT),
        ({"cycles": 5}, VerdictCode.TOO_LONG),
        ({"better": "bigger"}, VerdictCode.DIRECTION),
        ({"drift_limit": 0}, VerdictCode.DRIFT_LIMIT),
        ({"drift_limit": math.nan}, VerdictCode.DRIFT_LIMIT),
        ({"flaws": {9: "x"}}, VerdictCode.NO_CYCLE),
        ({"flaws": {0: "x"}}, VerdictCode.NO_CYCLE),
    ],
)
def test_chains_that_cannot_be_judged(change: dict[str, Any], code: VerdictCode) -> None:
    verdict = stats.judge(replace(CLEAN, **change))
    assert (verdict.verdict, codes(verdict)) == ("invalid", (code,))


VALUE = st.one_of(st.floats(), st.integers(), st.none(), st.floats(min_value=90, max_value=110))


@given(st.lists(VALUE, max_size=12), st.lists(VALUE, max_size=12), VALUE, st.sampled_from(["higher", "lower"]))
def test_nothing_raises_and_nothing_is_not_a_number(a: list[Any], b: list[Any], before: Any, better: str) -> None:
    whole = Chain(a[: len(b) + 1], b[: max(0, len(a) - 1)], better, drift_limit=1e9, before=before)
    for chain in (Chain(a, b, better), whole):
        verdict = stats.judge(chain)
        assert verdict.verdict in stats.VERDICTS
        assert verdict.reasons
        numbers = [verdict.effect, verdict.mde, verdict.p, *(verdict.ci or ())]
        assert all(number is None or math.isfinite(number) for number in numbers)
        assert (verdict.effect is None) == (verdict.verdict == "invalid")


def test_values_without_any_spread_are_flagged() -> None:
    verdict = stats.judge(Chain([100] * 9, [103] * 8))
    assert (verdict.effect, codes(verdict)) == (pytest.approx(0.03), (VerdictCode.ABOVE, VerdictCode.NO_SPREAD))
    assert verdict.ci == pytest.approx((0.0156, 0.0446), abs=1e-4)
    assert stats.judge(Chain([1000] * 9, [1000] * 8)).verdict == "same"


@pytest.mark.parametrize(
    ("a", "b", "word"), [(100, 101, "inconclusive"), (1000, 1010, "faster"), (12.0, 12.5, "faster")]
)
def test_a_last_digit_is_a_noise_of_its_own(a: float, b: float, word: str) -> None:
    near = [b, b, b + (0.1 if b % 1 else 0)] * 6  # 12.5 and 12.6: printed with one decimal
    verdict = stats.judge(Chain([a] * 19, near))
    assert (verdict.verdict, verdict.k_to_settle) == (word, None)


def test_false_claims_and_power_on_a_stationary_box() -> None:
    source = random.Random(11)  # noqa: S311 - not for secrets
    nothing = [stats.judge(noisy(source)).verdict for _ in range(3000)]
    claims = nothing.count("faster") + nothing.count("slower")
    assert 0.004 <= claims / 3000 <= 0.016
    two = [stats.judge(noisy(source, 0.02)).verdict for _ in range(1000)]
    assert two.count("faster") >= 950
    assert two.count("slower") == 0


@given(st.lists(st.floats(min_value=0, max_value=0.03), max_size=12))
def test_holm_claims_what_the_textbook_claims(p_values: list[float]) -> None:
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    factor, expected = len(p_values), {}
    for index in order:
        expected[index] = factor
        if p_values[index] * factor > 0.01:
            expected |= dict.fromkeys(set(order) - set(expected), factor)
            break
        factor -= 1
    assert holm(p_values) == [expected[i] for i in range(len(p_values))]


def test_cells_of_a_session_share_the_error() -> None:
    source = random.Random(2)  # noqa: S311 - not for secrets
    weak = next(c for _ in range(500) if 0.004 < (stats.judge(c := noisy(source, 0.01)).p or 0) < 0.009)
    alone, *_ = stats.judge_session([weak, Chain([], [])])
    assert (alone.verdict, alone.confidence) == ("faster", 0.99)
    among, strong, broken, *_ = stats.judge_session([weak, CLEAN, Chain([], []), *(noisy(source) for _ in range(8))])
    assert (among.verdict, strong.verdict, broken.verdict) == ("inconclusive", "faster", "invalid")
    assert among.p == alone.p
    assert (strong.confidence, among.confidence) == (1 - 0.01 / 10, 1 - 0.01 / 9)
    assert among.ci is not None
    assert among.ci[0] < 0 < among.ci[1]
    assert VerdictCode.HOLM in codes(among)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_an_interval_clears_0_exactly_for_a_claim(seed: int, cells: int) -> None:
    source = random.Random(seed)  # noqa: S311 - not for secrets
    for verdict in stats.judge_session([noisy(source, source.choice([0, 0.01, -0.01])) for _ in range(cells)]):
        assert verdict.ci is not None
        assert verdict.p is not None
        claimed = verdict.verdict in ("faster", "slower")
        assert claimed == (not verdict.ci[0] <= 0 <= verdict.ci[1])
        assert claimed == (verdict.p <= 1 - verdict.confidence)


def test_the_noise_of_an_a_a_session() -> None:
    source = random.Random(4)  # noqa: S311 - not for secrets
    squares = [(stats.sigma(stats.judge(noisy(source))) or 0) ** 2 for _ in range(1000)]
    assert math.sqrt(sum(squares) / 1000) == pytest.approx(0.006, rel=0.04)
    assert stats.sigma(stats.judge(Chain([], []))) is None


def test_promotion_needs_two_per_cent_and_three_noise_floors() -> None:
    verdict = stats.judge(CLEAN)
    assert verdict.ci is not None
    assert 0.02 < verdict.ci[0] < 0.027
    assert verdict.noise == pytest.approx(max(filter(None, map(stats.sigma_bound, (CLEAN.a, CLEAN.b)))))
    assert stats.promoted(verdict) == (verdict.ci[0] > 3 * (verdict.noise or 1))
    for each in (verdict, stats.judge(inverse(CLEAN))):
        assert stats.promoted(replace(each, noise=0.005))
        assert stats.promoted(each, 0.005)
        assert not stats.promoted(each, 0.009)
    for unknown in (None, 0.0, -1.0, math.nan, 2.0):
        assert not stats.promoted(replace(verdict, noise=unknown))
    assert not stats.promoted(stats.judge(replace(CLEAN, better="lower")), 0.005)
    small = stats.judge(replace(CLEAN, b=[b * 0.99 for b in CLEAN.b if b]))
    assert small.verdict == "faster"
    assert not stats.promoted(small, 0.005)


@pytest.mark.parametrize(
    ("a", "b", "better", "word", "code"),
    [
        ([100, 101], 103.0, "higher", "faster", VerdictCode.BEATS_BOTH),
        ([100, 101], 102.3, "higher", "inconclusive", VerdictCode.WITHIN),
        ([100, 101], 98.0, "higher", "slower", VerdictCode.LOSES_TO_BOTH),
        ([100, 101], 98.0, "lower", "faster", VerdictCode.BEATS_BOTH),
        ([100, 101], 100.5, "higher", "inconclusive", VerdictCode.WITHIN),
        ([100, 102.1], 110.0, "higher", "invalid", VerdictCode.BRACKET),
        ([100, math.nan], 110.0, "higher", "invalid", VerdictCode.NO_VALUE),
    ],
)
def test_a_screen_must_beat_both_baselines(a: list[float], b: float, better: str, word: str, code: VerdictCode) -> None:
    verdict = stats.screen(Chain(a, [b], better), 0.006)
    assert (verdict.verdict, verdict.screen, verdict.ci, codes(verdict)) == (word, True, None, (code,))
    assert (verdict.effect is None) == (word == "invalid")


@pytest.mark.parametrize(
    ("chain", "noise", "cycles", "code"),
    [
        *((BRACKET, noise, None, VerdictCode.NO_NOISE) for noise in (None, 0.0, math.nan, -0.01, 6.0)),
        (BRACKET, 0.006, 1, VerdictCode.UNKNOWN_NOISE),
        (CLEAN, 0.006, None, VerdictCode.NOT_ONE_BRACKET),
        (replace(BRACKET, b=[]), 0.006, None, VerdictCode.UNPAIRED),
    ],
)
def test_what_is_no_screen(chain: Chain, noise: float | None, cycles: int | None, code: VerdictCode) -> None:
    verdict = stats.screen(chain, noise, cycles)
    assert (verdict.verdict, verdict.screen, codes(verdict)) == ("invalid", True, (code,))


@pytest.mark.parametrize(
    ("times", "cycles", "word"), [(3, None, "faster"), (3, 8, "inconclusive"), (3, 1000, "faster"), (3.4, 8, "faster")]
)
def test_noise_from_few_cycles_is_trusted_less(times: float, cycles: int | None, word: str) -> None:
    assert stats.screen(Chain([100, 100], [100 * math.exp(times * 0.006)]), 0.006, cycles).verdict == word
