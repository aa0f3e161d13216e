"""Chains of alternating runs: from runs to the values that are compared, and when a chain has ended.

A chain's order is burn-in 1, 2, ... (of the baseline), then baseline 0, candidate 1, baseline 1, candidate 2, ... Cycle
i is baseline i - 1, candidate i and baseline i. A run may be repeated in its position; then the last one counts.

The agent, which runs a chain, and the client, which judges it, call the same functions: a cycle that is invalid on the
host is invalid in the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count, takewhile

from dgxlab import stats
from dgxlab.model import BASELINE, BURN_IN, CANDIDATE, PROTOCOL, ChainStep, RunStep
from dgxlab.stats import Chain
from dgxlab.tools import BENCHES, Launch
from dgxlab.units import metric

_IDLE_CYCLES = 2  # if the path under test ran in none of these first cycles, the chain ends


class Over(Enum):
    """Why a chain has ended."""

    COMPLETE = "complete"  # every cycle was run, also the replacements of flawed ones
    HOPELESS = "hopeless"  # too few cycles could count for any comparison
    IDLE = "idle"  # the candidate's path under test never ran


@dataclass(frozen=True)
class Comparison:
    """Two cells that a chain compares, by their Cell.key, and the metric to compare."""

    baseline: str
    candidate: str
    metric: str


@dataclass(frozen=True)
class ChainRun:
    """One run of a chain; `role` and `cycle` are its position."""

    role: str
    cycle: int
    values: Mapping[tuple[str, str], float] = field(default_factory=dict)  # by cell and metric
    flaw: str = ""  # why no verdict may use the run
    seconds: float = 0.0
    idle: bool = False  # the path under test should have run and did not
    refused: str = ""  # why cells of a valid run have no value


def comparisons(step: ChainStep) -> tuple[Comparison, ...]:
    """Return the comparisons of a chain, as `comparisons_of`."""
    return comparisons_of(step.baseline, step.candidate)


def comparisons_of(left: Launch | RunStep, right: Launch | RunStep) -> tuple[Comparison, ...]:
    """Return the comparisons of two launches: one for each pair of cells and each metric that gets a verdict."""
    pairs = zip(left.cells, right.cells, strict=True)
    return tuple(
        Comparison(baseline.key, candidate.key, name)
        for baseline, candidate in pairs
        for name, size in BENCHES[left.tool].compared.items()
        if not size or baseline.params.get(size)
    )


def flaw(status: str, reason: str, hard: Sequence[str]) -> str:
    """Return why verdicts must not use a run, given its status, reason and hard flags in words; "" if they may."""
    return f"{status}: {reason}" if status != "valid" else "; ".join(hard)


def burn_in_values(step: ChainStep, runs: Iterable[ChainRun]) -> list[list[float | None]]:
    """Return, for each comparison, the baseline's value in each burn-in run.

    The value is None for a run with a flaw, and for the first run if `thermal` is cold. Here and below, `runs` are all
    runs of the chain, in the order in which they ran.
    """
    ran = {run.cycle: run for run in runs if run.role == BURN_IN}
    # the first run may begin at any temperature
    counts = {cycle: not run.flaw and not (step.thermal == "cold" and cycle == 1) for cycle, run in ran.items()}
    return [
        [
            run.values.get((comparison.baseline, comparison.metric)) if counts[cycle] else None
            for cycle, run in ran.items()
        ]
        for comparison in comparisons(step)
    ]


def needs_burn_in(step: ChainStep, burn_in: Iterable[Sequence[float | None]]) -> bool:
    """Return whether the burn-in needs another run, given its `burn_in_values`."""
    return any(stats.burn_in_needed(values, shortest_burn_in(step)) for values in burn_in)


def shortest_burn_in(step: ChainStep) -> int:
    """Return the minimum runs of a burn-in, more if they are to choose the cycles."""
    return stats.BURN_IN_RUNS[0] if step.cycles else stats.PLANNING_RUNS


def cycles_wanted(step: ChainStep, runs: Iterable[ChainRun]) -> int:
    """Return how many cycles a chain needs: the number in the spec, else one computed from the burn-in's noise."""
    noises = map(stats.sigma_bound, burn_in_values(step, runs))
    return step.cycles or stats.planned_cycles(noises, step.effect, step.claims)


def cycles_planned(step: ChainStep, runs: Iterable[ChainRun]) -> int:
    """Return how many cycles a chain will have: `cycles_wanted`, or fewer if its time limit allows no more.

    The number depends on the burn-in alone. It may be less than a verdict needs, even 0.
    """
    runs = list(runs)
    wanted, allowed = cycles_wanted(step, runs), cycles_allowed(step, runs)
    return wanted if allowed is None else min(wanted, allowed)


def cycles_allowed(step: ChainStep, runs: Iterable[ChainRun]) -> int | None:
    """Return how many cycles the time limit leaves after a burn-in, its runs to come included; None without a limit."""
    if step.cycles or not step.max_s or not (took := [run.seconds for run in runs if run.role == BURN_IN]):
        return None
    burn_in_s, run_s = _takes(step, took)
    return max(0, int(((step.max_s - burn_in_s) / run_s - 1) // 2))


def seconds_of(step: ChainStep, runs: Iterable[ChainRun], cycles: int) -> float:
    """Return how long a chain takes with so many cycles, given a run or more of its burn-in."""
    burn_in_s, run_s = _takes(step, [run.seconds for run in runs if run.role == BURN_IN])
    return burn_in_s + run_s * (1 + 2 * cycles)


def _takes(step: ChainStep, took: Sequence[float]) -> tuple[float, float]:
    """Return the seconds of a burn-in, its runs to come included, and of each later run.

    Assumes that the candidate is as fast as its baseline: its real speed must not matter.
    """
    each = stats.median(took)
    return sum(took) + each * max(0, stats.PLANNING_RUNS - len(took)), step.block_s + each


def chain_of(step: ChainStep, comparison: Comparison, runs: Iterable[ChainRun], protocol: int = PROTOCOL) -> Chain:
    """Return the `stats.Chain` of one comparison; `protocol` is the version of the protocol of its job."""
    runs = list(runs)
    baselines, candidates = _in_a_row(runs, BASELINE, 0), _in_a_row(runs, CANDIDATE, 1)
    burn_in = list({run.cycle: run for run in runs if run.role == BURN_IN}.values())
    last = burn_in[-1].values if burn_in and not burn_in[-1].flaw else {}
    return Chain(
        [run.values.get((comparison.baseline, comparison.metric)) for run in baselines],
        [run.values.get((comparison.candidate, comparison.metric)) for run in candidates],
        better=metric(comparison.metric).better,
        drift_limit=drift_limit(step),
        cycles=cycles_planned(step, runs),
        flaws={cycle: "; ".join(whys) for cycle, whys in flaws_of_runs(comparison, runs).items()},
        before=last.get((comparison.baseline, comparison.metric)),
        protocol=protocol,
    )


def flaws_of_runs(comparison: Comparison, runs: Iterable[ChainRun]) -> dict[int, list[str]]:
    """Return why runs take their cycles out of a comparison, by cycle, a sentence a run."""
    runs = list(runs)
    baselines, candidates = _in_a_row(runs, BASELINE, 0), _in_a_row(runs, CANDIDATE, 1)

    def wrong(run: ChainRun) -> str:
        cell = comparison.candidate if run.role == CANDIDATE else comparison.baseline
        why = run.flaw or ("" if (cell, comparison.metric) in run.values else run.refused)
        return f"{run.role} {run.cycle} {why}" if why else ""

    flaws = {}
    for cycle, candidate in enumerate(candidates, 1):
        beside = (*baselines[cycle - 1 : cycle], candidate, *baselines[cycle : cycle + 1])
        if whys := list(filter(None, map(wrong, beside))):
            flaws[cycle] = whys
    return flaws


def _in_a_row(runs: Iterable[ChainRun], role: str, first: int) -> list[ChainRun]:
    """Return the last run in each place of an arm, from place `first` on, up to the first place without one."""
    ran = {run.cycle: run for run in runs if run.role == role}
    return [ran[cycle] for cycle in takewhile(ran.__contains__, count(first))]


def drift_limit(step: ChainStep) -> float:
    """Return how far a chain's baselines may be apart, a share: of a screen, which has no neighbours, at most 2 %."""
    return min(step.drift_limit, stats.SCREEN_DRIFT_LIMIT) if step.screen else step.drift_limit


def whole_cycles(chain: Chain) -> int:
    """Return how many cycles have both baseline runs and the candidate run, whether they count or not."""
    return max(0, min(len(chain.a) - 1, len(chain.b)))


def over(step: ChainStep, chains: Sequence[Chain], runs: Iterable[ChainRun]) -> Over | None:
    """Return why a chain has ended, None if another cycle must be run.

    `chains` has the `stats.Chain` of each comparison; those that can no longer be judged need no further cycle.
    """
    done, needed = whole_cycles(chains[0]), chains[0].planned
    idle = {run.cycle: run.idle for run in runs if run.role == CANDIDATE}  # of a run that was repeated the last counts
    if done == _IDLE_CYCLES == sum(idle.values()):
        return Over.IDLE
    if step.screen:
        return None if done < needed else Over.COMPLETE
    unflawed = [done - sum(cycle <= done for cycle in chain.flawed()) for chain in chains]
    still = [count for count in unflawed if not stats.hopeless(needed, done, count)]
    if not still:
        return Over.HOPELESS
    return None if stats.another_cycle(needed, done, min(still)) else Over.COMPLETE
