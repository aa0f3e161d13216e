"""Run one chain of an A/B session: burn-in, then baseline and candidate in turn, each run a fresh process.

No value is shown while the chain runs. `chains` and `stats` decide whether a cycle counts and whether another follows;
the verdict uses the same functions later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from dgxlab import chains
from dgxlab.agent.environment import settings
from dgxlab.agent.measure import Attempt, Workbench
from dgxlab.errors import AGAIN, ConditionsError, DgxlabError, GateFailed, more_minutes
from dgxlab.model import BASELINE, BURN_IN, CANDIDATE, ChainStep
from dgxlab.model.events import ChainEvent, RunEvent, flag
from dgxlab.model.reasons import Code, says_not_engaged
from dgxlab.stats import BURN_IN_RUNS, Chain, burn_in_settled, cycles_needed, fewest_cycles, mde, median, sigma_bound
from dgxlab.units import duration, percent, ranges

_WAITED_S = 5.0  # after a longer wait the device has cooled: the next run does not count as a neighbour of the last
_TIMED_RUNS = 3  # runs of a burn-in that say how long one takes; the first is often slow
_ABOVE_C = 3.0  # max degrees C above the lowest temperature seen, when a run begins
STILL_S = 30.0  # without a new lowest temperature for this long, the device has stopped cooling
LIMIT_S = 900.0  # max wait for the device to cool
LOOK_S = 1.0  # pause between two looks at the temperature
KNOWN_S = 5.0  # a temperature that is unknown for longer counts as not available


class ChainRunner:
    """Runs one chain step of a plan."""

    def __init__(self, step: ChainStep, bench: Workbench) -> None:
        self._step = step
        self._comparisons = chains.comparisons(step)
        self._bench = bench
        self._runs: list[chains.ChainRun] = []  # all runs in order, repeated ones too
        self._at = (BURN_IN, 1)
        self._around: dict[str, tuple[float, float]] = {}
        self._failed: RunEvent | None = None
        self._cooling = _Cooling(bench.telemetry.temperature, self._tell_cooling) if step.thermal == "cold" else None
        self._took: list[float] = []

    def carry_out(self) -> DgxlabError | None:
        """Run the chain to its end; return an error if too few cycles count for a verdict, else None.

        Raises:
            ConditionsError: if the device's state rules out every chain of this job.
            HostBusy: if other jobs or users hold the device for too long.
        """
        try:
            if error := self._burn_in():
                return error
            self._choose()
            return self._alternate()
        except _NotCool as error:
            self._tell("done", error.message)
            return error

    def _burn_in(self) -> DgxlabError | None:
        """Run the baseline until it has settled; return an error if it cannot be run."""
        failures = 0
        while chains.needs_burn_in(self._step, self._burn_in_values()):
            number = self._number(BURN_IN) + 1
            attempt = self._run(BURN_IN, number)
            failures = 0 if attempt.run.status == "valid" else failures + 1
            if failures == 2:
                self._tell("done", f"the baseline failed twice in a row: {attempt.run.reason}")
                return self._bench.failure(f"{self._step.id}, {BURN_IN} {number}", attempt)
            unsettled = flag(Code.UNSETTLED, hard=False, runs=number).reason if self._unsettled() else ""
            ended = not chains.needs_burn_in(self._step, self._burn_in_values())
            short = [each.reason for each in attempt.run.flags if ended and each.kind == Code.TOO_SHORT.key]
            self._tell("burn-in", "; ".join(filter(None, (self._last_flaw(), unsettled, *short))))
            if self._cooling and number == 1:
                self._cooling.find_gate()
            if number >= _TIMED_RUNS and (error := self._too_short()):
                return error
        if all(run.flaw for run in self._runs):  # the cycles would be no better, and without known noise the most
            return self._given_up(f"no run of the burn-in counts; the last: {self._last_flaw()}", AGAIN)
        return None

    def _choose(self) -> None:
        """Fix the number of cycles from the burn-in, before the candidate runs."""
        step = self._step
        if step.cycles:
            return
        cycles, needed = chains.cycles_planned(step, self._runs), chains.cycles_wanted(step, self._runs)
        self._step = replace(step, cycles=cycles)
        sigmas = [sigma_bound(values) for values in self._burn_in_values()]
        known = [sigma for sigma in sigmas if sigma is not None]
        finds = f", to find {percent(mde(max(known), cycles, step.claims))}" if len(known) == len(sigmas) else ""
        capped = f": {duration(step.max_s)} allow no more; {needed} are needed to find {percent(step.effect)}"
        self._tell("burn-in", f"{cycles} cycles{finds}{capped if cycles < needed else ''}")

    def _too_short(self) -> DgxlabError | None:
        """Return an error if the time limit allows too few cycles for the session's claims."""
        step, least = self._step, fewest_cycles(self._step.claims)
        allowed = chains.cycles_allowed(step, self._runs)
        if allowed is None or allowed >= least:
            return None
        why = f"{duration(step.max_s)} allow {allowed} of the {least} cycles that its session needs"
        # the other chains keep their shares; if these are too short as well, the next attempt says so before it builds
        others_s = sum(chain.max_s for chain in self._bench.plan.chains) - step.max_s
        return self._given_up(why, more_minutes(others_s + chains.seconds_of(step, self._runs, least)))

    def _given_up(self, why: str, mend: str) -> DgxlabError:
        self._tell("done", why)
        return ConditionsError(f"{self._step.id} ({self._step.baseline.tool}): {why}", next=mend)

    def _alternate(self) -> DgxlabError | None:
        """Run the cycles; return an error if too few of them count."""
        self._run(BASELINE, 0)
        self._tell("running", self._last_flaw())
        while self._goes_on():
            cycle = self.done + 1
            self._run(CANDIDATE, cycle)
            self._tell("running", self._last_flaw())
            self._run(BASELINE, cycle)
            self._tell("running" if self._goes_on() else "done", self._last_flaw())
        return self._shortfall()

    def _goes_on(self) -> bool:
        return chains.over(self._step, self._chains(), self._runs) is None

    def _shortfall(self) -> DgxlabError | None:
        """Return why a comparison cannot be judged; of several, the one with the fewest valid cycles."""
        step, done = self._step, self.done
        needed = 1 if step.screen else max(cycles_needed(step.cycles), fewest_cycles(step.claims))
        pairs = zip(self._comparisons, self._flaws(), strict=True)
        short = [(comparison, flaws) for comparison, flaws in pairs if done - len(flaws) < needed]
        if not short:
            return None
        comparison, flaws = max(short, key=lambda each: len(each[1]))
        label = next(cell.label for cell in step.baseline.cells if cell.key == comparison.baseline)
        of = f" for {label}" if len(short) < len(self._comparisons) else ""
        count = f"{done - len(flaws)} of {done} cycles count and {needed} are needed"
        cycle, why = list(flaws.items())[-1]
        (why, *_) = chains.flaws_of_runs(comparison, self._runs).get(cycle, [why])
        kind = GateFailed if self._failed and self._failed.status == "discarded" else ConditionsError
        return kind(  # its verdicts have the reason of every cycle
            f"{step.id} ({step.baseline.tool}) gives no verdict{of}: {count}; cycle {cycle}: {why}",
            next=self._bench.log(self._failed.raw["stderr"].path) if self._failed else AGAIN,
        )

    # -- one run ------------------------------------------------------------------------------------------------------

    def _run(self, role: str, cycle: int) -> Attempt:
        """Run one position; repeat a run that lost rows. A block begins with warm-up runs, unless one fails."""
        self._at = (role, cycle)
        step = self._step.candidate if role == CANDIDATE else self._step.baseline
        absent = () if role == CANDIDATE else self._step.absent
        name, waited, begin = f"{self._step.id}-{role}-{cycle}", 0.0, time.monotonic()
        block_s, warm, lost = 0.0 if role == BURN_IN else self._step.block_s, 0.0, 0
        number = 0
        while True:
            took = self._bench.hold()
            while self._cooling and self._cooling.wait():  # another job may have taken the device meanwhile
                took += self._bench.hold()
            warm = warm or time.monotonic() + block_s
            if self._runs and (number or not block_s):  # the first run has no neighbour
                waited += took
            self._bench.progress(self._step.id, self._places + 1, self._total, f"{step.tool}, {role} {cycle}")
            warms = time.monotonic() < warm
            attempt = self._bench.measure(step, f"{name}-{number}" if number else name, absent, pin=self._step.pin)
            lost += attempt.again == "rows"
            again = lost < step.attempts if attempt.again == "rows" else warms and attempt.run.status == "valid"
            self._record(attempt, waited, again=again, warms=warms)
            if not again:
                if role != CANDIDATE and not (role == BURN_IN and self._step.block_s):
                    self._took.append(time.monotonic() - begin)
                return attempt
            self._tell("burn-in" if role == BURN_IN else "running", f"{self._last_flaw()}; it is run again")
            number += 1

    def _record(self, attempt: Attempt, waited: float, *, again: bool, warms: bool) -> None:
        """Record a run with the flags that only the chain knows."""
        (role, cycle), run = self._at, attempt.run
        flags = list(run.flags)
        if waited > _WAITED_S:
            flags.insert(0, flag(Code.WAITED, hard=True, seconds=waited))
        if warms:
            flags.insert(0, flag(Code.WARMING, hard=True, block_s=self._step.block_s))
        run = replace(run, flags=tuple(flags), chain=self._step.id, role=role, cycle=cycle)
        wrong = chains.flaw(run.status, run.reason, run.hard)
        results = run.results if run.status == "valid" else ()
        values = {(result.cell, m.metric): median(m.samples) for result in results for m in result.measurements}
        idle = any(says_not_engaged(str(reason)) for reason in run.reasons[:1])
        self._runs.append(chains.ChainRun(role, cycle, values, wrong, run.seconds, idle, run.reason))
        self._around = ranges((row.name, row.median) for row in run.telemetry)
        if run.status != "valid" and attempt.again != "disturbed" and role != BURN_IN and not again:
            self._failed = run
        if not again and self._unsettled():
            flags.append(flag(Code.UNSETTLED, hard=False, runs=self._number(BURN_IN)))
        self._bench.journal.emit(replace(run, flags=tuple(flags)))
        stuck = [each.reason for each in flags if each.kind == Code.STUCK_CLOCK.key]
        if stuck and role == BURN_IN:
            raise ConditionsError(stuck[0], next=AGAIN)

    # -- how far it is -------------------------------------------------------------------------------------------------

    def _tell(self, state: str, note: str = "") -> None:
        (role, cycle), done, total = self._at, self._places, self._total
        # from the baseline's runs alone: the duration of the candidate's would reveal the effect
        left = sum(self._took) / len(self._took) * (total - done) if self._took and total else None
        self._bench.journal.emit(
            ChainEvent(
                id=self._step.id,
                state=state,
                role=role,
                cycle=cycle,
                cycles=self._cycles,
                done=done,
                total=total,
                valid=self.done - max(map(len, self._flaws())),
                drift=self._drift(),
                conditions=self._around,
                left_s=0.0 if state == "done" else left,
                note=note,
            )
        )

    def _tell_cooling(self, note: str) -> None:
        now = self._bench.telemetry.now()
        self._around = ranges(pair for values in now.values() for pair in values.items())
        self._tell("cooling", note)

    def _last_flaw(self) -> str:
        role, cycle = self._at
        wrong = self._runs[-1].flaw
        if role == BASELINE and cycle and not wrong:
            flaws = dict.fromkeys(flaws[cycle] for flaws in self._flaws() if cycle in flaws)
            return f"cycle {cycle} does not count: {'; '.join(flaws)}" if flaws else ""
        return wrong

    def _unsettled(self) -> bool:
        values = self._burn_in_values()
        ended = not chains.needs_burn_in(self._step, values)
        return self._at[0] == BURN_IN and ended and not all(map(burn_in_settled, values))

    @property
    def done(self) -> int:
        """Number of cycles that were run, whether they count or not."""
        return max(0, self._number(BASELINE) - 1)

    @property
    def _cycles(self) -> int:
        """Number of cycles, 0 until the burn-in has decided it."""
        return self._step.cycles and max(self._step.cycles, self.done + self._goes_on())

    @property
    def _total(self) -> int:
        """Number of positions, burn-in included; 0 until that is decided."""
        cycles = self._cycles
        return max(BURN_IN_RUNS[0], self._number(BURN_IN)) + 2 * cycles + 1 if cycles else 0

    @property
    def _places(self) -> int:
        return sum(map(self._number, (BURN_IN, BASELINE, CANDIDATE)))

    def _number(self, role: str) -> int:
        return len({run.cycle for run in self._runs if run.role == role})

    def _flaws(self) -> list[dict[int, str]]:
        """For each comparison, return the cycles so far that do not count, with the reason."""
        invalid = (chain.invalid_cycles() for chain in self._chains())
        return [{i: why for i, why in flaws.items() if i <= self.done} for flaws in invalid]

    def _chains(self) -> list[Chain]:
        return [chains.chain_of(self._step, comparison, self._runs) for comparison in self._comparisons]

    def _drift(self) -> float | None:
        """Return the distance of the last two baseline runs, burn-in included; the largest over all comparisons."""
        places = {(run.role, run.cycle): run.values for run in self._runs if run.role != CANDIDATE}
        last = list(places.values())[-2:]
        keys = [(comparison.baseline, comparison.metric) for comparison in self._comparisons]
        pairs = [[values[key] for values in last if key in values] for key in keys]
        return max((abs(math.log(pair[1] / pair[0])) for pair in pairs if len(pair) == 2), default=None)

    def _burn_in_values(self) -> list[list[float | None]]:
        return chains.burn_in_values(self._step, self._runs)


# -- `thermal: cold`: a run begins when the device is nearly as cool as it gets by itself ------------------------------


class _NotCool(ConditionsError):
    """The device does not cool, or its temperature is unknown: this chain ends, the next one is still tried."""


class _Cooling:
    """The temperature gate of one chain, in degrees C; `tell` is called with a sentence whenever a wait begins."""

    def __init__(self, temperature: Callable[[], float | None], tell: Callable[[str], None]) -> None:
        self._temperature, self._tell = temperature, tell
        self._gate: float | None = None

    def find_gate(self) -> None:
        """After a first run, leave the device idle until its temperature stops falling."""
        begin = since = time.monotonic()
        lowest = self._look()
        self._tell(f"cooling from {lowest:.1f} °C until it gets no cooler")
        while (now := time.monotonic()) - since < STILL_S and now - begin < LIMIT_S:
            time.sleep(LOOK_S)
            seen = self._look()
            if seen < lowest:
                lowest, since = seen, time.monotonic()
        self._gate = lowest + _ABOVE_C

    def wait(self) -> bool:
        """Wait until a run may begin, the first at once; return whether it had to wait. Raises _NotCool."""
        seen = self._look()
        if self._gate is None or seen <= self._gate:
            return False
        self._tell(f"cooling from {seen:.1f} °C to {self._gate:.1f} °C")
        deadline = time.monotonic() + LIMIT_S
        while seen > self._gate:
            if time.monotonic() >= deadline:
                least = f"{self._gate:.1f} °C within {duration(LIMIT_S)}"
                raise _NotCool(f"the device did not cool to {least}: it is at {seen:.1f} °C", next=AGAIN)
            time.sleep(LOOK_S)
            seen = self._look()
        return True

    def _look(self) -> float:
        deadline = time.monotonic() + KNOWN_S
        while (seen := self._temperature()) is None:
            if time.monotonic() >= deadline:
                raise _NotCool(
                    "thermal: cold needs the device's temperature, and this host tells none; thermal: hot needs none",
                    next=f"dgxlab doctor {settings().name}",
                )
            time.sleep(min(LOOK_S, KNOWN_S / 10))
        return seen
