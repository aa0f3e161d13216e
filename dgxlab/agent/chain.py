"""Holds one chain of an A/B session: burn-in, then baseline and candidate in turn, each a fresh process.

Nobody is asked on the way, and nobody is shown a value: what is told of a chain is how it stands, never what it says.
Whether a cycle counts, and whether another follows, is asked of `slots` and `stats`, as the verdict does afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from dgxlab.agent.conditions import HOST
from dgxlab.agent.cooling import Cooling, NotCool
from dgxlab.agent.measure import Attempt
from dgxlab.agent.runs import Runs
from dgxlab.agent.slots import (
    Slot,
    burn_in_of,
    burns_in,
    chain_of,
    comparisons,
    flaw,
    goes_on,
    planned,
    wanted,
)
from dgxlab.errors import AGAIN, ConditionsError, DgxlabError, GateFailed
from dgxlab.model import BASELINE, BURN_IN, CANDIDATE, ChainStep
from dgxlab.stats import (
    BURN_IN_RUNS,
    SCREEN_DRIFT_LIMIT,
    Chain,
    burn_in_settled,
    cycles_needed,
    fewest_cycles,
    mde,
    median,
    sigma_bound,
)
from dgxlab.units import duration, percent

WAITED_S = 5.0
"""A device that had to be waited for any longer has cooled meanwhile: the next run is no neighbour of the last."""

IDLE = 2
"""After so many cycles in which the candidate's path never ran, it is not expected to run."""

Ranges = dict[str, tuple[float, float]]


class ChainRunner:
    """One chain that is held.

    Args:
        runs: Launches and records its runs.
        progress: Called before each with the step's id, its number, how many are expected, and what it is.
    """

    def __init__(self, step: ChainStep, runs: Runs, progress: Callable[[str, int, int, str], None]) -> None:
        limit = min(step.drift_limit, SCREEN_DRIFT_LIMIT) if step.screen else step.drift_limit
        self._step = replace(step, drift_limit=limit)
        self._comparisons = comparisons(step)
        self._runs = runs
        self._progress = progress
        self._slots: list[Slot] = []
        """Of every run, in order; of those in one place the last counts."""
        self._at = (BURN_IN, 1)
        self._idle = 0
        """Candidate runs in which the path under test did not run."""
        self._around: Ranges = {}
        self._failed: Attempt | None = None
        self._cooling = Cooling(runs.telemetry.temperature, self._tell_cooling) if step.thermal == "cold" else None
        self._took: list[float] = []

    def carry_out(self) -> DgxlabError | None:
        """Hold the chain to its end; return why there can be no verdict, None if there can.

        Raises:
            ConditionsError: if no chain of this job makes sense on a device in this state.
            HostBusy: if somebody else has the device for too long.
        """
        try:
            return self._burn_in() or self._choose() or self._alternate()
        except NotCool as error:
            self._tell("done", error.message)
            return error

    # -- the schedule -------------------------------------------------------------------------------------------------

    def _burn_in(self) -> DgxlabError | None:
        """Run the baseline until it has settled; return why it cannot be run, if so."""
        failures = 0
        while burns_in(self._step, self._burn_in_values()):
            number = self._number(BURN_IN) + 1
            attempt = self._run(BURN_IN, number)
            failures = 0 if attempt.fields["status"] == "valid" else failures + 1
            if failures == 2:
                self._tell("done", f"the baseline failed twice in a row: {attempt.fields['reason']}")
                return self._runs.failure(f"{self._step.id}, {BURN_IN} {number}", attempt)
            self._tell("burn-in", "; ".join(filter(None, (self._said(), self._unsettled()))))
            if self._cooling and number == 1:
                self._cooling.find_gate()
        return None

    def _choose(self) -> DgxlabError | None:
        """Fix the number of cycles by what the burn-in says; return why they would claim nothing, if so.

        The candidate has not run yet: nothing that it does can make the chain longer or shorter.
        """
        step = self._step
        if step.cycles:
            return None
        cycles, needed, least = planned(step, self._slots), wanted(step, self._slots), fewest_cycles(step.claims)
        if cycles < least:
            why = f"{duration(step.max_s)} allow {cycles} cycles after the burn-in, and its session needs {least}"
            self._tell("done", why)
            return ConditionsError(f"{step.id} ({step.baseline.tool}): {why}", next=f"{AGAIN} with --max-minutes MORE")
        self._step = replace(step, cycles=cycles)
        sigmas = [sigma_bound(values) for values in self._burn_in_values()]
        known = [sigma for sigma in sigmas if sigma is not None]
        finds = f", to find {percent(mde(max(known), cycles, step.claims))}" if len(known) == len(sigmas) else ""
        capped = f": {duration(step.max_s)} allow no more, {needed} would find {percent(step.effect)}"
        self._tell("burn-in", f"{cycles} cycles{finds}{capped if cycles < needed else ''}")
        return None

    def _alternate(self) -> DgxlabError | None:
        """Run the chain itself; return why too little of it counts, if so."""
        self._run(BASELINE, 0)
        self._tell("running", self._said())
        while self._goes_on():
            cycle = self._done + 1
            self._run(CANDIDATE, cycle)
            self._tell("running", self._said())
            self._run(BASELINE, cycle)
            self._tell("running" if self._goes_on() else "done", self._said())
        return self._shortfall()

    def _goes_on(self) -> bool:
        never = self._idle == self._done == IDLE
        return not never and goes_on(self._step, self._chains())

    def _shortfall(self) -> DgxlabError | None:
        """Return why a comparison cannot be judged: of those that cannot, the one of which the least counts."""
        step, done = self._step, self._done
        needed = 1 if step.screen else max(cycles_needed(step.cycles), fewest_cycles(step.claims))
        short = [(one, f) for one, f in zip(self._comparisons, self._flaws(), strict=True) if done - len(f) < needed]
        if not short:
            return None
        comparison, flaws = max(short, key=lambda each: len(each[1]))
        cells = {cell.key: cell.label for cell in self._step.baseline.cells}
        of = f" for {cells[comparison.baseline]}" if len(short) < len(self._comparisons) else ""
        count = f"{done - len(flaws)} of {done} cycles count and {needed} are needed"
        cycle, why = list(flaws.items())[-1]
        kind = GateFailed if self._failed and self._failed.fields["status"] == "discarded" else ConditionsError
        return kind(
            f"{self._step.id} ({self._step.baseline.tool}) gives no verdict{of}: {count}; cycle {cycle}: {why}",
            details="\n".join(f"cycle {cycle}: {why}" for cycle, why in flaws.items()),
            next=self._runs.log(self._failed) if self._failed else AGAIN,
        )

    # -- one run ------------------------------------------------------------------------------------------------------

    def _run(self, role: str, cycle: int) -> Attempt:
        """Fill one place of the chain: run again what lost rows, which is no fault of the conditions.

        A place that is a block begins with runs that only warm the device; one of them that fails ends it.
        """
        self._at = (role, cycle)
        step = self._step.candidate if role == CANDIDATE else self._step.baseline
        absent = () if role == CANDIDATE else self._step.absent
        name, waited, begin = f"{self._step.id}-{role}-{cycle}", 0.0, time.monotonic()
        block_s, warm, lost = 0.0 if role == BURN_IN else self._step.block_s, 0.0, 0
        number = 0
        while True:
            took = self._ready()
            warm = warm or time.monotonic() + block_s
            if self._slots and (number or not block_s):  # otherwise it has no neighbour to be away from
                waited += took
            self._progress(self._step.id, self._places + 1, self._total, f"{step.tool}, {role} {cycle}")
            warms = time.monotonic() < warm
            attempt = self._runs.launch(step, f"{name}-{number}" if number else name, absent, pin=self._step.pin)
            lost += attempt.again == "rows"
            again = lost < step.attempts if attempt.again == "rows" else warms and attempt.fields["status"] == "valid"
            self._record(attempt, waited, again=again, warms=warms)
            if not again:
                if role != CANDIDATE and not (role == BURN_IN and self._step.block_s):
                    self._took.append(time.monotonic() - begin)
                return attempt
            self._tell("burn-in" if role == BURN_IN else "running", f"{self._said()}; it is run again")
            number += 1

    def _ready(self) -> float:
        """Have the device, cool enough where that matters; return how long it had to be waited for."""
        waited = self._runs.hold()
        while self._cooling and self._cooling.wait():
            waited += self._runs.hold()
        return waited

    def _record(self, attempt: Attempt, waited: float, *, again: bool, warms: bool) -> None:
        """Note what ran, with what the chain knows against it."""
        role, cycle = self._at
        fields = attempt.fields
        flags = list(fields["flags"])
        if waited > WAITED_S:
            reason = f"the device had to be waited for, {duration(waited)}, right before it"
            flags.insert(0, _flag("waited", reason, hard=True))
        if warms:
            reason = f"warmed the device, as runs in the first {duration(self._step.block_s)} of a block do"
            flags.insert(0, _flag("warming", reason, hard=True))
        hard = [flag["reason"] for flag in flags if flag["hard"]]
        wrong = flaw(fields["status"], fields["reason"], hard)
        values = _values(fields["results"]) if fields["status"] == "valid" else {}
        self._slots.append(Slot(role, cycle, values, wrong, fields["seconds"]))
        if role == CANDIDATE and fields["status"] == "discarded" and attempt.again != "disturbed":
            self._idle += 1
        self._around = _ranges((row["name"], row["median"]) for row in fields["telemetry"])
        if fields["status"] != "valid" and attempt.again != "disturbed" and role != BURN_IN and not again:
            self._failed = attempt
        if not again and (unsettled := self._unsettled()):
            flags.append(_flag("unsettled", unsettled, hard=False))
        step = self._step.candidate if role == CANDIDATE else self._step.baseline
        self._runs.record(step, {**fields, "flags": flags}, chain=self._step.id, role=role, cycle=cycle)
        stuck = [flag["reason"] for flag in flags if flag["kind"] == "stuck_clock" and flag["hard"]]
        if stuck and role == BURN_IN:
            raise ConditionsError(stuck[0], next=AGAIN)

    # -- how it stands ------------------------------------------------------------------------------------------------

    def _tell(self, state: str, note: str = "") -> None:
        (role, cycle), done, total = self._at, self._places, self._total
        # by the baseline's runs alone: how much longer the candidate's take is what nobody is to be shown
        left = sum(self._took) / len(self._took) * (total - done) if self._took and total else None
        self._runs.journal.emit(
            "chain",
            id=self._step.id,
            state=state,
            role=role,
            cycle=cycle,
            cycles=self._cycles,
            done=done,
            total=total,
            valid=self._done - max(map(len, self._flaws())),
            drift=self._drift(),
            conditions=self._around,
            left_s=0.0 if state == "done" else left,
            note=note,
        )

    def _tell_cooling(self, note: str) -> None:
        now = self._runs.telemetry.now()
        self._around = _ranges(pair for values in now.values() for pair in values.items())
        self._tell("cooling", note)

    def _said(self) -> str:
        """Return what is wrong with what ran last, "" for nothing."""
        role, cycle = self._at
        wrong = self._slots[-1].flaw
        if role == BASELINE and cycle and not wrong:
            flaws = dict.fromkeys(found[cycle] for found in self._flaws() if cycle in found)
            return f"cycle {cycle} does not count: {'; '.join(flaws)}" if flaws else ""
        return f"{role} {cycle} {wrong}" if wrong else ""

    def _unsettled(self) -> str:
        """Return that the last run of burn-in was the last that there may be, "" when it was not, or all is well."""
        values = self._burn_in_values()
        if self._at[0] != BURN_IN or burns_in(self._step, values) or all(map(burn_in_settled, values)):
            return ""
        return f"the burn-in did not settle in {self._number(BURN_IN)} runs"

    @property
    def _done(self) -> int:
        """Cycles so far."""
        return max(0, self._number(BASELINE) - 1)

    @property
    def _cycles(self) -> int:
        """Cycles that there will be, as far as that is decided; 0 before the burn-in has."""
        return self._step.cycles and max(self._step.cycles, self._done + self._goes_on())

    @property
    def _total(self) -> int:
        """Places that there will be, burn-in included, as far as that is decided; 0 before."""
        cycles = self._cycles
        return max(BURN_IN_RUNS[0], self._number(BURN_IN)) + 2 * cycles + 1 if cycles else 0

    @property
    def _places(self) -> int:
        """Places that have a run."""
        return sum(map(self._number, (BURN_IN, BASELINE, CANDIDATE)))

    def _number(self, role: str) -> int:
        return len({slot.cycle for slot in self._slots if slot.role == role})

    def _flaws(self) -> list[dict[int, str]]:
        """Return which cycles so far do not count, and why, for each comparison."""
        if not self._done:
            return [{} for _ in self._comparisons]
        found = (chain.invalid_cycles() for chain in self._chains())
        return [{i: why for i, why in flaws.items() if i <= self._done} for flaws in found]

    def _chains(self) -> list[Chain]:
        return [chain_of(self._step, comparison, self._slots) for comparison in self._comparisons]

    def _drift(self) -> float | None:
        """Return how far the last two runs of the baseline are apart, burn-in included, at most of all comparisons."""
        places = {(slot.role, slot.cycle): slot.values for slot in self._slots if slot.role != CANDIDATE}
        last = list(places.values())[-2:]
        keys = [(one.baseline, one.metric) for one in self._comparisons]
        pairs = [[values[key] for values in last if key in values] for key in keys]
        return max((abs(math.log(pair[1] / pair[0])) for pair in pairs if len(pair) == 2), default=None)

    def _burn_in_values(self) -> list[list[float | None]]:
        return burn_in_of(self._step, self._slots)


def _flag(kind: str, reason: str, *, hard: bool) -> dict[str, Any]:
    return {"device": HOST, "kind": kind, "hard": hard, "reason": reason}


def _values(results: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """Return one value a cell and metric of a run."""
    measured = ((result["cell"], m) for result in results for m in result["measurements"])
    return {(cell, m["metric"]): median(m["samples"]) for cell, m in measured}


def _ranges(seen: Iterable[tuple[str, float]]) -> Ranges:
    """Return the lowest and the highest of each quantity, over the devices."""
    found: Ranges = {}
    for name, value in seen:
        low, high = found.get(name, (value, value))
        found[name] = (min(low, value), max(high, value))
    return found
