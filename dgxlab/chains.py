"""The places of a chain, the runs in them, the values per comparison, and when the chain is over.

The agent that holds a chain and the client that judges it call the same functions: what made a cycle invalid on the
host makes it invalid in the record. The agent carries this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from dgxlab import stats
from dgxlab.model import BASELINE, BURN_IN, CANDIDATE, PROTOCOL, ChainStep
from dgxlab.stats import Chain
from dgxlab.tools import BENCHES
from dgxlab.units import metric

IDLE_CYCLES = 2  # if the path under test ran in none of these first cycles, the chain ends


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
class Slot:
    """One run in its place of a chain."""

    role: str
    cycle: int  # baselines count from 0, the others from 1; cycle i is baseline i - 1, candidate i, baseline i
    values: Mapping[tuple[str, str], float] = field(default_factory=dict)  # by cell and metric
    flaw: str = ""  # why no verdict may use the run
    seconds: float = 0.0
    idle: bool = False  # the path under test should have run and did not


def comparisons(step: ChainStep) -> tuple[Comparison, ...]:
    """Return a chain's comparisons, in the order of its cells."""
    pairs = zip(step.baseline.cells, step.candidate.cells, strict=True)
    return tuple(
        Comparison(baseline.key, candidate.key, name)
        for baseline, candidate in pairs
        for name, size in BENCHES[step.baseline.tool].compared.items()
        if baseline.params.get(size, 1)
    )


def flaw(status: str, reason: str, hard: Sequence[str]) -> str:
    """Return why verdicts must not use a run, given the reasons of its hard flags; "" if they may."""
    return f"{status}: {reason}" if status != "valid" else "; ".join(hard)


def burn_in_of(step: ChainStep, slots: Iterable[Slot]) -> list[list[float | None]]:
    """Return the burn-in's values for each comparison; None for a run that does not show how values settle.

    Here and below, `slots` are in the order in which they ran; the last one in each place counts.
    """
    ran = {slot.cycle: slot for slot in slots if slot.role == BURN_IN}
    # in a cold chain the first run begins at any temperature
    counts = {cycle: not slot.flaw and not (step.thermal == "cold" and cycle == 1) for cycle, slot in ran.items()}
    return [
        [
            slot.values.get((comparison.baseline, comparison.metric)) if counts[cycle] else None
            for cycle, slot in ran.items()
        ]
        for comparison in comparisons(step)
    ]


def burns_in(step: ChainStep, burn_in: Iterable[Sequence[float | None]]) -> bool:
    """Return whether a burn-in with these values, as `burn_in_of` gives them, needs another run."""
    fewest = stats.BURN_IN_RUNS[0] if step.cycles else stats.PLANNING_RUNS
    return any(stats.burn_in_needed(values, fewest) for values in burn_in)


def wanted(step: ChainStep, slots: Iterable[Slot]) -> int:
    """Return how many cycles a chain needs: the number in the spec, or the one computed from its burn-in."""
    return step.cycles or stats.planned_cycles(
        map(stats.sigma_bound, burn_in_of(step, slots)), step.effect, step.claims
    )


def planned(step: ChainStep, slots: Iterable[Slot]) -> int:
    """Return how many cycles a chain will have: the wanted number, or as many as its time limit allows.

    It depends on the baseline's runs alone. It may be less than the claims need, even 0: then no cycle begins.
    """
    slots = list(slots)
    most = wanted(step, slots)
    took = [slot.seconds for slot in slots if slot.role == BURN_IN]
    if step.cycles or not step.max_s or not took:
        return most
    # assumes that the candidate is as fast as its baseline: its real speed must not matter
    places = (step.max_s - sum(took)) / (step.block_s + stats.median(took))
    return min(most, max(0, int((places - 1) // 2)))


def chain_of(step: ChainStep, comparison: Comparison, slots: Iterable[Slot], protocol: int = PROTOCOL) -> Chain:
    """Return the chain of one comparison, run by this protocol; its burn-in is among the slots."""
    slots = list(slots)
    ran = {(slot.role, slot.cycle): slot for slot in slots}

    def in_a_row(role: str, first: int) -> list[Slot]:
        row: list[Slot] = []
        while slot := ran.get((role, first + len(row))):
            row.append(slot)
        return row

    baselines, candidates = in_a_row(BASELINE, 0), in_a_row(CANDIDATE, 1)
    flaws = {}
    for cycle, candidate in enumerate(candidates, 1):
        beside = (*baselines[cycle - 1 : cycle], candidate, *baselines[cycle : cycle + 1])
        if wrong := [f"{slot.role} {slot.cycle} {slot.flaw}" for slot in beside if slot.flaw]:
            flaws[cycle] = "; ".join(wrong)
    burn_in = [slot for (role, _), slot in ran.items() if role == BURN_IN]
    last = burn_in[-1].values if burn_in and not burn_in[-1].flaw else {}
    return Chain(
        [slot.values.get((comparison.baseline, comparison.metric)) for slot in baselines],
        [slot.values.get((comparison.candidate, comparison.metric)) for slot in candidates],
        better=metric(comparison.metric).better,
        drift_limit=step.drift_limit,
        cycles=planned(step, slots),
        flaws=flaws,
        before=last.get((comparison.baseline, comparison.metric)),
        protocol=protocol,
    )


def whole_cycles(chain: Chain) -> int:
    """Return how many cycles of a chain are complete, including the baseline run after the candidate."""
    return max(0, min(len(chain.a) - 1, len(chain.b)))


def over(step: ChainStep, chains: Sequence[Chain], slots: Iterable[Slot] = ()) -> Over | None:
    """Return why the chain has ended, None if another cycle follows, for the comparisons that can still be judged.

    `chains` are one a comparison, all equally long.
    """
    done, needed = whole_cycles(chains[0]), chains[0].planned
    if done == IDLE_CYCLES == sum(slot.idle for slot in slots if slot.role == CANDIDATE):
        return Over.IDLE
    if step.screen:
        return None if done < needed else Over.COMPLETE
    unflawed = [done - sum(cycle <= done for cycle in chain.flawed()) for chain in chains]
    still = [count for count in unflawed if not stats.hopeless(needed, done, count)]
    if not still:
        return Over.HOPELESS
    return None if stats.another_cycle(needed, done, min(still)) else Over.COMPLETE
