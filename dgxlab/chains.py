"""The places of a chain, what ran in them, the values that they make, and when the chain is over.

The agent that holds a chain and the client that judges it call the same functions: what made a cycle invalid on the
host makes it invalid in the record. The agent carries this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from dgxlab.model import BASELINE, BURN_IN, CANDIDATE, PROTOCOL, ChainStep
from dgxlab.stats import (
    BURN_IN_RUNS,
    PLANNING_RUNS,
    Chain,
    another_cycle,
    burn_in_needed,
    cycles_for,
    hopeless,
    median,
)
from dgxlab.tools import BENCHES
from dgxlab.units import metric

IDLE_CYCLES = 2
"""A candidate whose path under test ran in none of its first cycles is not expected to run."""


class Over(Enum):
    """Why no further cycle follows."""

    COMPLETE = "complete"
    """Every cycle was run, and those that may follow for flawed ones."""
    HOPELESS = "hopeless"
    """Too few cycles could count for any comparison."""
    IDLE = "idle"
    """The candidate's path under test never ran."""


@dataclass(frozen=True)
class Comparison:
    """Two cells that a chain compares, by one metric.

    Attributes:
        baseline: Cell.key in the baseline's runs.
        candidate: Cell.key in the candidate's.
        metric: Name in `units`.
    """

    baseline: str
    candidate: str
    metric: str


@dataclass(frozen=True)
class Slot:
    """What ran in one place of a chain.

    Attributes:
        role: BURN_IN, BASELINE or CANDIDATE.
        cycle: Baselines count from 0, the others from 1; cycle i is baseline i - 1, candidate i, baseline i.
        values: One a cell and metric; none where the run gave none.
        flaw: Why no verdict may use the run, "" when it may.
        seconds: That the run took.
        idle: Whether the path under test was to run and did not.
    """

    role: str
    cycle: int
    values: Mapping[tuple[str, str], float] = field(default_factory=dict)
    flaw: str = ""
    seconds: float = 0.0
    idle: bool = False


def comparisons(step: ChainStep) -> tuple[Comparison, ...]:
    """Return what a chain compares, in the order of its cells."""
    pairs = zip(step.baseline.cells, step.candidate.cells, strict=True)
    return tuple(
        Comparison(baseline.key, candidate.key, name)
        for baseline, candidate in pairs
        for name, size in BENCHES[step.baseline.tool].compared.items()
        if baseline.params.get(size, 1)
    )


def flaw(status: str, reason: str, hard: Sequence[str]) -> str:
    """Return why no verdict may use a run, "" when it may.

    Args:
        hard: The reasons of its hard flags.
    """
    return f"{status}: {reason}" if status != "valid" else "; ".join(hard)


def burn_in_of(step: ChainStep, slots: Iterable[Slot]) -> list[list[float | None]]:
    """Return what the runs of the burn-in gave each comparison, None where that says nothing about how values settle.

    Args:
        slots: Of a chain, in the order in which they ran; of those in one place the last counts.
    """
    ran = {slot.cycle: slot for slot in slots if slot.role == BURN_IN}
    # where each run waits for a temperature, the first began at any
    count = {cycle: not slot.flaw and not (step.thermal == "cold" and cycle == 1) for cycle, slot in ran.items()}
    return [
        [
            slot.values.get((comparison.baseline, comparison.metric)) if count[cycle] else None
            for cycle, slot in ran.items()
        ]
        for comparison in comparisons(step)
    ]


def burns_in(step: ChainStep, burn_in: Iterable[Sequence[float | None]]) -> bool:
    """Return whether a burn-in with these values, as `burn_in_of` gives them, needs another run."""
    fewest = BURN_IN_RUNS[0] if step.cycles else PLANNING_RUNS
    return any(burn_in_needed(values, fewest) for values in burn_in)


def wanted(step: ChainStep, slots: Iterable[Slot]) -> int:
    """Return how many cycles a chain needs: the number fixed by hand, or what its burn-in asks for."""
    return step.cycles or cycles_for(burn_in_of(step, slots), step.effect, step.claims)


def planned(step: ChainStep, slots: Iterable[Slot]) -> int:
    """Return how many cycles a chain is to have: those that are wanted, or as many as its limit of time allows.

    The number comes from the baseline's runs alone. It may be less than the claims of the session need, even 0: such a
    chain does not begin.

    Args:
        slots: Of a chain, in the order in which they ran, its whole burn-in among them.
    """
    slots = list(slots)
    most = wanted(step, slots)
    took = [slot.seconds for slot in slots if slot.role == BURN_IN]
    if step.cycles or not step.max_s or not took:
        return most
    # a candidate is taken to be as fast as its baseline: how fast it is must not decide
    places = (step.max_s - sum(took)) / (step.block_s + median(took))
    return min(most, max(0, int((places - 1) // 2)))


def chain_of(step: ChainStep, comparison: Comparison, slots: Iterable[Slot], protocol: int = PROTOCOL) -> Chain:
    """Return the chain of one comparison.

    Args:
        slots: Of a chain, in the order in which they ran, its burn-in among them; of those in one place the last
            counts.
        protocol: By which it was held.
    """
    slots = list(slots)
    ran = {(slot.role, slot.cycle): slot for slot in slots}
    baselines = _in_a_row(ran, BASELINE, 0)
    candidates = _in_a_row(ran, CANDIDATE, 1)
    burn_in = [slot for (role, _), slot in ran.items() if role == BURN_IN]
    last = burn_in[-1].values if burn_in and not burn_in[-1].flaw else {}
    return Chain(
        [slot.values.get((comparison.baseline, comparison.metric)) for slot in baselines],
        [slot.values.get((comparison.candidate, comparison.metric)) for slot in candidates],
        better=metric(comparison.metric).better,
        drift_limit=step.drift_limit,
        cycles=planned(step, slots),
        flaws=_flaws(baselines, candidates),
        before=last.get((comparison.baseline, comparison.metric)),
        protocol=protocol,
    )


def whole_cycles(chain: Chain) -> int:
    """Return how many cycles of a chain were run to their second baseline."""
    return max(0, min(len(chain.a) - 1, len(chain.b)))


def over(step: ChainStep, chains: Sequence[Chain], slots: Iterable[Slot] = ()) -> Over | None:
    """Return why no further cycle follows, None where one does.

    A chain goes on for the sake of those comparisons that can still be judged.

    Args:
        chains: One a comparison, all equally long.
        slots: What ran in the chain, in order.
    """
    done, needed = whole_cycles(chains[0]), chains[0].planned
    if done == IDLE_CYCLES == sum(slot.idle for slot in slots if slot.role == CANDIDATE):
        return Over.IDLE
    if step.screen:
        return None if done < needed else Over.COMPLETE
    unflawed = [done - sum(cycle <= done for cycle in chain.flawed()) for chain in chains]
    still = [count for count in unflawed if not hopeless(needed, done, count)]
    if not still:
        return Over.HOPELESS
    return None if another_cycle(needed, done, min(still)) else Over.COMPLETE


def _in_a_row(ran: Mapping[tuple[str, int], Slot], role: str, first: int) -> list[Slot]:
    slots: list[Slot] = []
    while (role, first + len(slots)) in ran:
        slots.append(ran[role, first + len(slots)])
    return slots


def _flaws(baselines: Sequence[Slot], candidates: Sequence[Slot]) -> dict[int, str]:
    """Return what is wrong with each cycle besides drift, by its number."""
    flaws = {}
    for cycle, candidate in enumerate(candidates, 1):
        three = (*baselines[cycle - 1 : cycle], candidate, *baselines[cycle : cycle + 1])
        if wrong := [f"{slot.role} {slot.cycle} {slot.flaw}" for slot in three if slot.flaw]:
            flaws[cycle] = "; ".join(wrong)
    return flaws
