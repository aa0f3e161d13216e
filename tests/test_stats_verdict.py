"""Verdicts: a chain worked by hand, the exact variance, Holm, and everything that must be invalid."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgxlab import stats
from dgxlab.stats import Chain

CLEAN = Chain(
    a=[100.1, 99.7, 100.4, 99.9, 100.2, 99.6, 100.3, 99.8, 100.0],
    b=[103.1, 102.7, 103.5, 103.0, 102.8, 103.3, 102.6, 103.2],
)


def noisy(source: random.Random, effect: float = 0.0, sigma: float = 0.006, k: int = 8) -> Chain:
    """Return a chain on a stationary box."""
    a = [100 * math.exp(source.gauss(0, sigma)) for _ in range(k + 1)]
    return Chain(a, [100 * (1 + effect) * math.exp(source.gauss(0, sigma)) for _ in range(k)])


def test_a_chain_worked_by_hand() -> None:
    """Five cycles: every number by the printed formula and the printed table."""
    a, b = [100.0, 101.0, 100.0, 99.0, 100.0, 101.0], [101.0, 102.0, 103.0, 100.0, 101.0]
    found = stats.judge(Chain(a, b))
    d = [math.log(one) - (math.log(x) + math.log(y)) / 2 for one, (x, y) in zip(b, pairwise(a), strict=True)]
    mean = sum(d) / 5
    spread = math.sqrt(sum((one - mean) ** 2 for one in d) / 4)
    rows = [tuple(map(math.log, row)) for row in zip(a, a[1:], a[2:], strict=False)]
    bends = sum((x - 2 * y + z) ** 2 for x, y, z in rows) / 24 / 4
    steps = -sum((y - x) * (z - y) for x, y, z in rows) / 4 / 4
    c = max(bends / 3, min(bends, steps))
    error = math.sqrt((spread**2 + 8 * c / 20 + 8 * c / 5) / 5)
    assert found.verdict == "inconclusive"
    assert found.effect == pytest.approx(math.exp(mean) - 1, rel=1e-12)
    assert found.spread == pytest.approx(spread, rel=1e-12)
    low, high = math.exp(mean - 4.604 * error) - 1, math.exp(mean + 4.604 * error) - 1
    assert found.ci == pytest.approx((low, high), rel=1e-3)
    low, high = math.exp(mean - 2.132 * error) - 1, math.exp(mean + 2.132 * error) - 1
    assert found.same_ci == pytest.approx((low, high), abs=2e-6)
    assert found.mde == pytest.approx(math.exp((4.604 + 0.941) * error) - 1, rel=1e-3)
    t = mean / error
    x = t / math.sqrt(4 + t * t)
    assert found.p == pytest.approx(
        1 - x * (1 + (4 / (4 + t * t)) / 2), rel=1e-9
    )  # closed form, four degrees of freedom
    assert (found.valid_cycles, found.cycles, found.confidence) == (5, 5, 0.99)


def test_a_noisy_baseline_is_known_from_itself() -> None:
    """The variance of the mean is what the formula says, for arms of any noise; protocol 2 took them for equal."""
    source = random.Random(12)  # noqa: S311 - not for secrets
    for noise_a, noise_b in ((0.03, 0.003), (0.003, 0.03)):
        means, errors = [], []
        for _ in range(2000):
            a = [math.exp(source.gauss(0, noise_a)) for _ in range(9)]
            found = stats.judge(Chain(a, [math.exp(source.gauss(0, noise_b)) for _ in range(8)]))
            means.append(math.log1p(found.effect or 0))
            errors.append((math.log1p((found.ci or (0, 0))[1]) - means[-1]) / stats.t_quantile(0.995, 7))
        of_mean, said = (math.fsum(x * x for x in values) / 2000 for values in (means, errors))
        assert said == pytest.approx(of_mean, rel=0.1)


def test_faster_slower_and_the_direction_of_the_metric() -> None:
    """More of a throughput is faster, more of a time is slower; the effect is the metric's own."""
    up = stats.judge(CLEAN)
    assert (up.verdict, up.reasons) == ("faster", ("the 99 % interval lies above 0",))
    assert up.effect == pytest.approx(0.0303, abs=1e-4)
    time = stats.judge(replace(CLEAN, better="lower"))
    assert (time.verdict, time.effect, time.ci) == ("slower", up.effect, up.ci)
    inverse = Chain([1 / v for v in CLEAN.a if v], [1 / v for v in CLEAN.b if v], better="lower")
    assert stats.judge(inverse).verdict == "faster"
    assert stats.judge(inverse).p == pytest.approx(up.p)


def test_same_needs_a_narrow_interval_around_nothing() -> None:
    """Never from an interval that merely holds 0."""
    source = random.Random(3)  # noqa: S311 - not for secrets
    quiet = stats.judge(noisy(source, sigma=0.002))
    assert (quiet.verdict, quiet.reasons) == ("same", ("the 90 % interval lies inside +-1 %",))
    loud = stats.judge(noisy(source, sigma=0.03))
    assert loud.verdict == "inconclusive"
    assert loud.ci is not None
    assert loud.ci[0] < 0 < loud.ci[1]


def test_an_inconclusive_chain_says_how_many_cycles_would_settle_it() -> None:
    """The number is the smallest: a chain with the same spread and one cycle less would probably not."""
    source = random.Random(5)  # noqa: S311 - not for secrets
    found = next(one for _ in range(100) if (one := stats.judge(noisy(source, 0.008))).verdict == "inconclusive")
    assert found.k_to_settle is not None
    assert found.spread is not None
    assert found.effect is not None

    assert found.ci is not None
    half = math.log1p(found.ci[1]) - math.log1p(found.effect)
    width = half / stats.t_quantile(0.995, 7) * math.sqrt(8)

    def settles(k: int) -> bool:
        error = width / math.sqrt(k)
        power = stats.t_quantile(0.8, k - 1)
        mean = abs(math.log1p(found.effect or 0))
        claims = (stats.t_quantile(0.995, k - 1) + power) * error <= mean
        return claims or mean + (stats.t_quantile(0.95, k - 1) + power) * error <= math.log(1.01)

    assert settles(found.k_to_settle)
    assert not settles(found.k_to_settle - 1)
    assert found.reasons[1] == f"a new session of {found.k_to_settle} cycles would probably settle it"


def test_what_no_session_would_settle() -> None:
    """An effect on the margin of same is told from neither side."""
    found = stats.judge(Chain([100] * 7, [101 * 1.05, 101 / 1.05] * 3))
    assert (found.verdict, found.k_to_settle) == ("inconclusive", None)
    assert found.reasons[1] == "not even a session of 100 cycles would settle an effect of this size"


@given(st.lists(st.booleans(), min_size=2, max_size=14).filter(lambda mask: sum(mask) >= 2))
def test_standard_error_is_exact_for_any_gaps(valid: list[bool]) -> None:
    """Var(mean d) / E(s_d^2), summed over every run's weight in every difference, is what the formula says."""
    m = sum(valid)
    weights = []  # of the runs a_0 b_1 a_1 ... in d_i
    for cycle in (i for i, counts in enumerate(valid) if counts):
        row = [0.0] * (2 * len(valid) + 1)
        row[2 * cycle], row[2 * cycle + 1], row[2 * cycle + 2] = -0.5, 1.0, -0.5
        weights.append(row)
    mean = [sum(column) / m for column in zip(*weights, strict=True)]
    of_mean = sum(w * w for w in mean)
    of_spread = sum((w - c) ** 2 for row in weights for w, c in zip(row, mean, strict=True)) / (m - 1)
    pairs = sum(one and other for one, other in pairwise(valid))
    assert stats.standard_error(1.0, m, pairs) == pytest.approx(math.sqrt(of_mean / of_spread), rel=1e-12)


def test_a_whole_chain_has_the_printed_factor() -> None:
    """1.161 at 8 cycles, 1.163 at 6."""
    factors = [stats.standard_error(1.0, k, k - 1) * math.sqrt(k) for k in (6, 8)]
    assert factors == pytest.approx([1.163, 1.161], abs=5e-4)


@pytest.mark.parametrize(("cycle", "pairs"), [(1, 6), (4, 5), (8, 6)])
def test_gaps_change_the_error(cycle: int, pairs: int) -> None:
    """An invalid cycle in the middle takes two shared baselines away, one at the end takes one."""
    found = stats.judge(replace(CLEAN, flaws={cycle: "x"}, protocol=2))
    assert found.ci is not None
    half = math.log1p(found.ci[1]) - math.log1p(found.effect or 0)
    error = stats.t_quantile(0.995, 6) * stats.standard_error(found.spread or 0, 7, pairs)
    assert half == pytest.approx(error, rel=1e-9)


def test_invalid_cycles_are_named() -> None:
    """The verdict uses the others and says which were left out."""
    chain = replace(CLEAN, a=[*CLEAN.a[:8], 80.0, 80.1, 80.0], b=[*CLEAN.b, 82.5, 82.4], cycles=10)
    found = stats.judge(chain)
    assert (found.verdict, found.valid_cycles, found.cycles) == ("faster", 9, 10)
    assert list(found.flaws) == [8]
    assert found.reasons[-1] == f"cycle 8 does not count: {found.flaws[8]}"


def test_too_few_valid_cycles() -> None:
    """Four of eight are no verdict, five are one."""
    flaws = dict.fromkeys((1, 3, 5, 7), "a hardware slowdown")
    found = stats.judge(replace(CLEAN, flaws=flaws))
    assert (found.verdict, found.effect, found.ci, found.p) == ("invalid", None, None, None)
    assert (found.valid_cycles, found.cycles, found.flaws) == (4, 8, flaws)
    assert found.reasons[:2] == (
        "4 of 8 cycles are valid, at least 5 must be",
        "cycle 1 does not count: a hardware slowdown",
    )
    del flaws[7]
    assert stats.judge(replace(CLEAN, flaws=flaws)).verdict == "faster"


def test_a_failed_run_has_no_value() -> None:
    """Which is allowed where its cycles are known not to count, and nowhere else."""
    a = [*CLEAN.a[:3], None, *CLEAN.a[4:]]
    assert stats.judge(replace(CLEAN, a=a, flaws={3: "the run failed", 4: "the run failed"})).verdict == "faster"
    found = stats.judge(replace(CLEAN, a=a, flaws={3: "the run failed"}))
    assert (found.verdict, found.reasons) == ("invalid", ("a[3] is None: a measurement is a finite number above 0",))
    b = [None, *CLEAN.b[1:]]
    assert stats.judge(replace(CLEAN, b=b, flaws={1: "the run failed"})).valid_cycles == 7
    assert stats.judge(replace(CLEAN, b=b)).verdict == "invalid"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0, 0.0, -5.0, "7", True, [], {}, 10**400, None])
@pytest.mark.parametrize("arm", ["a", "b"])
def test_what_is_no_measurement_is_invalid(arm: str, bad: Any) -> None:
    """A reason that names it, and no number."""
    values = [*getattr(CLEAN, arm)]
    values[2] = bad
    found = stats.judge(replace(CLEAN, **{arm: values}))
    assert (found.verdict, found.effect, found.ci, found.mde, found.p) == ("invalid", None, None, None, None)
    assert found.reasons[0].startswith(f"{arm}[2] is ")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"a": [], "b": []}, "0 baselines and 0 candidates: k candidates need k + 1 baselines"),
        ({"a": [100.0], "b": []}, "no candidates"),
        ({"a": CLEAN.a[:5], "b": CLEAN.b[:4]}, "4 of 4 cycles are valid, at least 5 must be"),
        ({"b": CLEAN.b[:7]}, "9 baselines and 7 candidates: k candidates need k + 1 baselines"),
        ({"cycles": 9}, "cut after 8 of 9 cycles: nothing is glued across a gap"),
        ({"cycles": 5}, "8 cycles where 5 were planned: at most 2 may follow"),
        ({"better": "bigger"}, "better is 'higher' or 'lower', not 'bigger'"),
        ({"drift_limit": 0}, "a drift limit of 0 is none"),
        ({"drift_limit": math.nan}, "a drift limit of nan is none"),
        ({"flaws": {9: "x"}}, "there is no cycle 9 in a chain of 8"),
        ({"flaws": {0: "x"}}, "there is no cycle 0 in a chain of 8"),
    ],
)
def test_chains_that_cannot_be_judged(change: dict[str, Any], reason: str) -> None:
    """Invalid with its reason, never an exception."""
    found = stats.judge(replace(CLEAN, **change))
    assert (found.verdict, found.reasons[0]) == ("invalid", reason)


VALUE = st.one_of(st.floats(), st.integers(), st.none(), st.floats(min_value=90, max_value=110))


@given(st.lists(VALUE, max_size=12), st.lists(VALUE, max_size=12), st.sampled_from(["higher", "lower"]))
def test_nothing_raises_and_nothing_is_not_a_number(a: list[Any], b: list[Any], better: str) -> None:
    """Whatever the values are; 1e308 against 1e-308 too."""
    chains = [Chain(a, b, better), Chain(a[: len(b) + 1], b[: max(0, len(a) - 1)], better, drift_limit=1e9)]
    for chain in chains:
        found = stats.judge(chain)
        assert found.verdict in stats.VERDICTS
        assert found.reasons
        numbers = [found.effect, found.mde, found.p, *(found.ci or ())]
        assert all(number is None or math.isfinite(number) for number in numbers)
        assert (found.effect is None) == (found.verdict == "invalid")


def test_values_without_any_spread_are_flagged() -> None:
    """Rounded or copied: what their last digit hides is in the interval."""
    found = stats.judge(Chain([100] * 9, [103] * 8))
    assert (found.verdict, found.effect) == ("faster", pytest.approx(0.03))
    assert found.ci == pytest.approx((0.0156, 0.0446), abs=1e-4)
    assert "the cycles do not differ at all: rounded or copied values hide their noise" in found.reasons
    assert stats.judge(Chain([1000] * 9, [1000] * 8)).verdict == "same"


@pytest.mark.parametrize(
    ("a", "b", "word"), [(100, 101, "inconclusive"), (1000, 1010, "faster"), (12.0, 12.5, "faster")]
)
def test_a_last_digit_is_a_noise_of_its_own(a: float, b: float, word: str) -> None:
    """However many cycles there are: all runs of an arm are rounded alike."""
    near = [b, b, b + (0.1 if b % 1 else 0)] * 6  # 12.5 and 12.6: printed with one decimal
    found = stats.judge(Chain([a] * 19, near))
    assert (found.verdict, found.k_to_settle) == (word, None)


def test_runs_that_alternate_are_told() -> None:
    """Low after high, in both arms: the interval does not know of it; independent runs are told once in a hundred."""
    up = [0.01, -0.012, 0.011, -0.009, 0.0105, -0.0115, 0.0095, -0.01, 0.0125] * 2
    row = [100 * math.exp(one) for one in up[:17]]
    assert stats.alternates(Chain(row[::4] * 2, (row[2::4] * 2)[: len(row[::4] * 2) - 1])) is False
    drifting = Chain([100, 98, 96, 94, 92, 90, 88, 86, 84], [99, 97, 95, 93, 91, 89, 87, 85])
    assert not stats.alternates(drifting)
    source, flagged = random.Random(6), []  # noqa: S311 - not for secrets
    for phi in (0.0, -0.8):
        found = 0
        for _ in range(1000):
            noise = [source.gauss(0, 0.01)]
            for _ in range(48):
                noise.append(phi * noise[-1] + source.gauss(0, 0.01))
            values = [math.exp(one) for one in noise]
            found += stats.alternates(Chain(values[::2], values[1::2]))
        flagged.append(found / 1000)
    assert flagged[0] < 0.015
    assert flagged[1] > 0.95


@given(st.floats(min_value=1e-3, max_value=1e3), st.integers(0, 1000))
def test_the_unit_does_not_matter(factor: float, seed: int) -> None:
    """Seconds or milliseconds, tokens or thousands of them: one verdict."""
    chain = noisy(random.Random(seed), 0.01)  # noqa: S311 - not for secrets
    scaled = Chain([factor * (v or 0) for v in chain.a], [factor * (v or 0) for v in chain.b])
    one, other = stats.judge(chain), stats.judge(scaled)
    assert one.verdict == other.verdict
    assert one.ci == pytest.approx(other.ci, rel=1e-6, abs=1e-9)


def test_false_claims_and_power_on_a_stationary_box() -> None:
    """About one in a hundred of identical arms; nearly all of 2 %, never the wrong way round."""
    source = random.Random(11)  # noqa: S311 - not for secrets
    nothing = [stats.judge(noisy(source)).verdict for _ in range(3000)]
    claims = nothing.count("faster") + nothing.count("slower")
    assert 0.004 <= claims / 3000 <= 0.016
    two = [stats.judge(noisy(source, 0.02)).verdict for _ in range(1000)]
    assert two.count("faster") >= 950
    assert two.count("slower") == 0


def test_holm_multiplies_the_smallest_most() -> None:
    """Step-down until one does not pass; the rest keep its factor."""
    assert stats.holm([]) == []
    assert stats.holm([0.5]) == [1]
    assert stats.holm([0.004, 0.001, 0.009]) == [2, 3, 1]
    assert stats.holm([0.006, 0.001, 0.009]) == [2, 3, 2]
    assert stats.holm([0.02, 0.03, 0.04, 0.01]) == [4, 4, 4, 4]


@given(st.lists(st.floats(min_value=0, max_value=0.03), max_size=12))
def test_holm_claims_what_the_textbook_claims(p_values: list[float]) -> None:
    """Sorted, each against alpha / (n - rank), until the first that fails."""
    claimed = set()
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[index] * (len(p_values) - rank) > 0.01:
            break
        claimed.add(index)
    factors = stats.holm(p_values)
    assert {i for i, (p, f) in enumerate(zip(p_values, factors, strict=True)) if p * f <= 0.01} == claimed


def test_cells_of_a_session_share_the_error() -> None:
    """A weak claim among many cells is none, its interval says so, and an invalid cell is not counted."""
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
    assert "held to 1 % over the session's cells (Holm)" in among.reasons


@given(st.integers(0, 10_000), st.integers(1, 12))
def test_an_interval_clears_0_exactly_for_a_claim(seed: int, cells: int) -> None:
    """What is shown and what is said never contradict each other, whatever Holm did."""
    source = random.Random(seed)  # noqa: S311 - not for secrets
    for found in stats.judge_session([noisy(source, source.choice([0, 0.01, -0.01])) for _ in range(cells)]):
        assert found.ci is not None
        assert found.p is not None
        claimed = found.verdict in ("faster", "slower")
        assert claimed == (not found.ci[0] <= 0 <= found.ci[1])
        assert claimed == (found.p <= 1 - found.confidence)


def test_noise_floor_of_an_a_a_session() -> None:
    """The sigma of a run, whatever the drift; None where there is no valid chain."""
    source = random.Random(4)  # noqa: S311 - not for secrets
    squares = [(stats.noise_floor(stats.judge(noisy(source))) or 0) ** 2 for _ in range(1000)]
    assert math.sqrt(sum(squares) / 1000) == pytest.approx(0.006, rel=0.04)
    assert stats.noise_floor(stats.judge(CLEAN)) == pytest.approx((stats.judge(CLEAN).spread or 0) / math.sqrt(1.5))
    assert stats.noise_floor(stats.judge(Chain([], []))) is None


def test_promotion_needs_two_per_cent_and_three_noise_floors() -> None:
    """Of the whole interval; the floor is the chain's own if no other is given."""
    found = stats.judge(CLEAN)
    assert found.ci is not None
    assert 0.02 < found.ci[0] < 0.027
    assert found.noise == pytest.approx(max(filter(None, map(stats.sigma_bound, (CLEAN.a, CLEAN.b)))))
    assert stats.promoted(found) == (found.ci[0] > 3 * (found.noise or 1))
    assert stats.promoted(replace(found, noise=0.005))
    assert not stats.promoted(replace(found, noise=0.009))
    for unknown in (None, 0.0, -1.0, math.nan, 2.0):
        assert not stats.promoted(replace(found, noise=unknown))
    assert not stats.promoted(stats.judge(replace(CLEAN, better="lower")), 0.005)
    small = replace(CLEAN, b=[b * 0.99 for b in CLEAN.b if b])
    assert stats.judge(small).verdict == "faster"
    assert not stats.promoted(stats.judge(small), 0.005)


def test_promotion_is_the_same_for_a_time() -> None:
    """2 % faster is 1/1.02 of the time."""
    inverse = Chain([1 / v for v in CLEAN.a if v], [1 / v for v in CLEAN.b if v], better="lower")
    assert stats.promoted(stats.judge(inverse), 0.005)
    assert not stats.promoted(stats.judge(inverse), 0.009)


@pytest.mark.parametrize(
    ("a", "b", "better", "word"),
    [
        ([100, 101], 103.0, "higher", "faster"),
        ([100, 101], 102.3, "higher", "inconclusive"),
        ([100, 101], 98.0, "higher", "slower"),
        ([100, 101], 98.0, "lower", "faster"),
        ([100, 101], 100.5, "higher", "inconclusive"),
        ([100, 102.1], 110.0, "higher", "invalid"),
        ([100, math.nan], 110.0, "higher", "invalid"),
    ],
)
def test_a_screen_must_beat_both_baselines(a: list[float], b: float, better: str, word: str) -> None:
    """By 2.77 noise floors of 0.6 %, in a bracket that closes within 2 %."""
    found = stats.screen(Chain(a, [b], better), 0.006)
    assert (found.verdict, found.screen, found.ci) == (word, True, None)
    assert (found.effect is None) == (word == "invalid")


@pytest.mark.parametrize("noise", [None, 0.0, math.nan, -0.01, 6.0])
def test_without_a_noise_floor_there_is_no_screen(noise: float | None) -> None:
    """Whatever the bracket says."""
    found = stats.screen(Chain([100, 100], [150]), noise)
    assert (found.verdict, found.screen) == ("invalid", True)
    assert found.reasons == ("a screen needs the noise floor of this host, from an A/A session",)


def test_a_noise_floor_from_few_cycles_is_trusted_less() -> None:
    """2.365 sqrt(2) noise floors from 8 cycles, 1.96 sqrt(2) from very many."""
    near = Chain([100, 100], [100 * math.exp(3 * 0.006)])
    assert stats.screen(near, 0.006).verdict == "faster"
    assert stats.screen(near, 0.006, 8).verdict == "inconclusive"
    assert stats.screen(near, 0.006, 1000).verdict == "faster"
    assert stats.screen(Chain([100, 100], [100 * math.exp(3.4 * 0.006)]), 0.006, 8).verdict == "faster"
    assert stats.screen(near, 0.006, 1).verdict == "invalid"


def test_a_screen_is_one_bracket() -> None:
    """A chain is judged as a chain."""
    assert stats.screen(CLEAN, 0.006).reasons == ("a screen is one bracket, not 8 cycles",)
    assert stats.screen(Chain([100, 100], []), 0.006).verdict == "invalid"
