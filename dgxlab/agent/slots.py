"""The places of a chain, what ran in them, and the chains of values that they make.

Whoever holds a chain asks here whether it needs another cycle, and whoever judges it later asks here for the same
values: what made a cycle invalid on the host makes it invalid in the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dgxlab.model import BASELINE, CANDIDATE, ChainStep
from dgxlab.stats import Chain, another_cycle, hopeless
from dgxlab.units import metric

CLAIMS: Mapping[str, tuple[str, ...]] = {
    "backend-ops": ("time_us",),
    "llama-bench": ("avg_ts",),
    "batched-bench": ("speed_pp", "speed_tg"),
}
"""The metrics of a tool's cell that get a verdict. Others are the same runs in other words, and claim nothing more."""


@dataclass(frozen=True)
class Claim:
    """One thing that a chain may say: about one metric of two cells that are compared.

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
    """

    role: str
    cycle: int
    values: Mapping[tuple[str, str], float] = field(default_factory=dict)
    flaw: str = ""


def claims(step: ChainStep) -> tuple[Claim, ...]:
    """Return what a chain makes claims about, in the order of its cells.

    A batched-bench cell without generation, or without a prompt, has one speed only.
    """
    pairs = zip(step.baseline.cells, step.candidate.cells, strict=True)
    return tuple(
        Claim(one.key, two.key, name)
        for one, two in pairs
        for name in CLAIMS[step.baseline.tool]
        if one.params.get({"speed_pp": "pp", "speed_tg": "tg"}.get(name, ""), 1)
    )


def flaw(status: str, reason: str, hard: Sequence[str]) -> str:
    """Return why no verdict may use a run, "" when it may.

    Args:
        hard: The reasons of its hard flags.
    """
    return f"{status}: {reason}" if status != "valid" else "; ".join(hard)


def chain_of(step: ChainStep, claim: Claim, slots: Iterable[Slot]) -> Chain:
    """Return the chain of one claim, from the slots of a chain in the order in which they ran, burn-in or not."""
    ran = {(slot.role, slot.cycle): slot for slot in slots}
    baselines = _in_a_row(ran, BASELINE, 0)
    candidates = _in_a_row(ran, CANDIDATE, 1)
    return Chain(
        [slot.values.get((claim.baseline, claim.metric)) for slot in baselines],
        [slot.values.get((claim.candidate, claim.metric)) for slot in candidates],
        better=metric(claim.metric).better,
        drift_limit=step.drift_limit,
        cycles=step.cycles,
        flaws=_flaws(baselines, candidates),
    )


def whole_cycles(chain: Chain) -> int:
    """Return how many cycles of a chain were run to their second baseline."""
    return max(0, min(len(chain.a) - 1, len(chain.b)))


def goes_on(step: ChainStep, chains: Sequence[Chain]) -> bool:
    """Return whether another cycle follows, for the sake of those claims that can still be judged.

    Args:
        chains: One a claim, all equally long.
    """
    done = whole_cycles(chains[0])
    if step.screen:
        return done < step.cycles
    valid = [done - sum(cycle <= done for cycle in chain.invalid_cycles()) for chain in chains]
    open_ = [count for count in valid if not hopeless(step.cycles, done, count)]
    return bool(open_) and another_cycle(step.cycles, done, min(open_))


def _in_a_row(ran: Mapping[tuple[str, int], Slot], role: str, first: int) -> list[Slot]:
    found: list[Slot] = []
    while (role, first + len(found)) in ran:
        found.append(ran[role, first + len(found)])
    return found


def _flaws(baselines: Sequence[Slot], candidates: Sequence[Slot]) -> dict[int, str]:
    """Return what is wrong with each cycle besides drift, by its number."""
    found = {}
    for cycle, candidate in enumerate(candidates, 1):
        three = (*baselines[cycle - 1 : cycle], candidate, *baselines[cycle : cycle + 1])
        if wrong := [f"{slot.role} {slot.cycle} {slot.flaw}" for slot in three if slot.flaw]:
            found[cycle] = "; ".join(wrong)
    return found
