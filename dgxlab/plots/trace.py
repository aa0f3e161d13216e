"""What a session of two arms has to show of its chains over time, before anybody draws it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dgxlab import judgement, stats, units
from dgxlab.agent.slots import Comparison, comparisons
from dgxlab.errors import UsageError
from dgxlab.judgement import Judged
from dgxlab.model import BASELINE, CANDIDATE, SESSIONS, ChainStep
from dgxlab.report import Provenance
from dgxlab.report.ask import label, plan_of
from dgxlab.report.session import Session
from dgxlab.report.verdicts import PREFIX

if TYPE_CHECKING:
    from dgxlab.store import Store

Row = Mapping[str, Any]

CONDITIONS = (
    {"temperature.gpu": ("GPU temperature", "°C"), "clocks.sm": ("SM clock", "MHz")},
    {"cpu_temp_c": ("CPU temperature", "°C"), "cpu_mhz": ("CPU clock", "MHz")},
)
"""What is shown under a chain, by the name under which it was sampled: the processor's where no GPU was."""


@dataclass(frozen=True)
class Point:
    """One run of a chain, as one comparison sees it.

    Attributes:
        at: The middle of the run, in seconds after its chain began.
        role: BURN_IN, BASELINE or CANDIDATE.
        cycle: See `agent.slots.Slot`.
        value: Median of its counted samples in the metric's stored unit; None where it gave none.
        counts: The verdict stands on it.
    """

    at: float
    role: str
    cycle: int
    value: float | None
    counts: bool


@dataclass(frozen=True)
class Panel:
    """One comparison over time.

    Attributes:
        label: Names the cell, and the metric where a cell has several.
        metric: Name in `units`.
        points: In the order in which they ran.
        verdict: In words, with the interval.
        means: Of baseline and candidate over the cycles that count; None where there is none.
        discards: From when to when each cycle went that does not count.
    """

    label: str
    metric: str
    points: tuple[Point, ...]
    verdict: str
    means: tuple[float | None, float | None]
    discards: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Sampled:
    """One quantity of one device during one run."""

    at: float
    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Conditions:
    """One quantity over time; `devices` has a list of runs for each device, by its name."""

    label: str
    unit: str
    devices: Mapping[str, tuple[Sampled, ...]]


@dataclass(frozen=True)
class Held:
    """One chain.

    Attributes:
        title: Tool and model.
        seconds: From the beginning of its first run to the end of its last.
        panels: One a comparison.
        conditions: Under which it was held.
    """

    title: str
    seconds: float
    panels: tuple[Panel, ...]
    conditions: tuple[Conditions, ...]


@dataclass(frozen=True)
class Trace:
    """All chains of a session.

    Attributes:
        what: What is compared.
        arms: Names of baseline and candidate.
        origins: Where its numbers come from.
        chains: Those of which anything ran.
    """

    what: str
    arms: tuple[str, str]
    origins: tuple[Provenance, ...]
    chains: tuple[Held, ...]


RUNS = """SELECT run_id, chain, role, cycle, started, seconds, status
          FROM chain_runs JOIN runs USING (run_id) WHERE job_id = ? ORDER BY position"""

SAMPLES = """SELECT run_id, cell, metric, value FROM samples JOIN runs USING (run_id)
             WHERE job_id = ? AND discarded IS NULL ORDER BY run_id, cell, metric, ordinal"""

TELEMETRY = """SELECT run_id, device, name, median, min, max FROM telemetry JOIN runs USING (run_id)
               WHERE job_id = ? ORDER BY position, device"""


def trace(store: Store, job_id: str) -> Trace:
    """Return what the chains of a session were, run by run.

    Raises:
        UsageError: if there is no such session, it has no chains, or it has not ended: nobody is shown a value before.
    """
    job = store.job(job_id)
    if job.kind not in SESSIONS:
        raise UsageError(f"session {job_id} is a {job.kind} and held no chains", next=f"dgxlab report {job_id}")
    session = Session(store, job, plan_of(job))
    if not session.ended:
        raise UsageError(
            f"session {job_id} has not ended, and nothing of its chains is shown before", next=f"dgxlab attach {job_id}"
        )
    reader = _Reader(store, job_id, job.kind)
    chains = [reader.held(step) for step in session.plan.chains if step.id in reader.runs]
    if not chains:
        raise UsageError(f"session {job_id} ended before any run of a chain", next=f"dgxlab report {job_id}")
    models = {step.baseline.model for step in session.plan.chains}
    arms = [session.baseline, *([session.candidate] if session.candidate else [])]
    origins = tuple(session.origin(arm, models) for arm in arms)
    return Trace(session.what, (arms[0].name, arms[-1].name), origins, tuple(chains))


class _Reader:
    """Everything that one session's chains left, read once."""

    def __init__(self, store: Store, job_id: str, kind: str) -> None:
        self.runs: dict[str, list[Row]] = {}
        for row in store.rows(RUNS, (job_id,)):
            self.runs.setdefault(row["chain"], []).append(row)
        samples: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
        for row in store.rows(SAMPLES, (job_id,)):
            samples[row["run_id"], row["cell"], row["metric"]].append(row["value"])
        self._values = {key: stats.median(found) for key, found in samples.items()}
        self._telemetry: defaultdict[str, list[Row]] = defaultdict(list)
        for row in store.rows(TELEMETRY, (job_id,)):
            self._telemetry[row["run_id"]].append(row)
        seen = {row["name"] for found in self._telemetry.values() for row in found}
        self._sampled = next((names for names in CONDITIONS if seen.intersection(names)), {})
        self._kind = kind
        self._judged = {(one.chain, one.comparison): one for one in judgement.recorded(store, job_id)}

    def held(self, step: ChainStep) -> Held:
        """Return one chain."""
        runs = self.runs[step.id]
        title = " ".join(filter(None, (step.baseline.tool, step.baseline.model)))
        seconds = max(run["started"] + run["seconds"] for run in runs) - _began(runs)
        names = _names(step)
        panels = tuple(self._panel(step, comparison, names[comparison]) for comparison in comparisons(step))
        return Held(title, seconds, panels, tuple(self._conditions(runs)))

    def _panel(self, step: ChainStep, comparison: Comparison, name: str) -> Panel:
        runs = self.runs[step.id]
        judged = self._judged.get((step.id, comparison))
        places = {(run["role"], run["cycle"]): run["run_id"] for run in runs}
        counted = _counted(judged)
        points = []
        for run in runs:
            cell = comparison.candidate if run["role"] == CANDIDATE else comparison.baseline
            value = self._values.get((run["run_id"], cell, comparison.metric))
            role, cycle = run["role"], run["cycle"]
            counts = (role, cycle) in counted and places[role, cycle] == run["run_id"]
            points.append(Point(_middle(run) - _began(runs), role, cycle, value, counts))
        means = (judged.baseline, judged.candidate) if judged else (None, None)
        said, discards = _said(self._kind, judged), _discards(points, judged)
        return Panel(name, comparison.metric, tuple(points), said, means, discards)

    def _conditions(self, runs: Sequence[Row]) -> Iterator[Conditions]:
        began = _began(runs)
        for name, (text, unit) in self._sampled.items():
            devices: dict[str, list[Sampled]] = {}
            for run in runs:
                for row in self._telemetry[run["run_id"]]:
                    if row["name"] == name:
                        seen = Sampled(_middle(run) - began, row["min"], row["median"], row["max"])
                        devices.setdefault(row["device"], []).append(seen)
            if devices:
                yield Conditions(text, unit, {device: tuple(devices[device]) for device in sorted(devices)})


def _began(runs: Sequence[Row]) -> float:
    """Return the earliest time: a clock may have been set back in between."""
    return float(min(run["started"] for run in runs))


def _middle(run: Row) -> float:
    return float(run["started"] + run["seconds"] / 2)


def _names(step: ChainStep) -> dict[Comparison, str]:
    """Name a chain's comparisons: by their cells, and by the metric where a cell has several."""
    found = comparisons(step)
    labels = {cell.key: label(cell) for cell in step.baseline.cells}
    several = len({one.metric for one in found}) > 1
    return {one: f"{labels[one.baseline]} {units.metric(one.metric).label if several else ''}".strip() for one in found}


def _counted(judged: Judged | None) -> set[tuple[str, int]]:
    """Return the places on which a verdict stands: its cycles that count, each with both of its baselines."""
    if judged is None:
        return set()
    cycles = [cycle for cycle in range(1, judged.verdict.cycles + 1) if cycle not in judged.verdict.flaws]
    return {place for i in cycles for place in ((BASELINE, i - 1), (CANDIDATE, i), (BASELINE, i))}


def _discards(points: Sequence[Point], judged: Judged | None) -> tuple[tuple[float, float], ...]:
    """Return from where to where the cycles reach that do not count, as far as they were run."""
    found = []
    for cycle in sorted(judged.verdict.flaws) if judged else ():
        mine = ((BASELINE, cycle - 1), (CANDIDATE, cycle), (BASELINE, cycle))
        times = [point.at for point in points if (point.role, point.cycle) in mine]
        if times:
            found.append((min(times), max(times)))
    return tuple(found)


def _said(kind: str, judged: Judged | None) -> str:
    """Say a verdict: `slower -7.20 % (-10.17 to -4.13)`, or why it is invalid."""
    if judged is None:
        return "no verdict"
    found = judged.verdict
    said = PREFIX[kind] + found.verdict
    if found.effect is None:
        return f"{said}: {found.reasons[0]}" if found.reasons else said
    said += f" {100 * found.effect:+.2f} %"
    return f"{said} ({' to '.join(f'{100 * bound:+.2f}' for bound in found.interval)})" if found.interval else said
