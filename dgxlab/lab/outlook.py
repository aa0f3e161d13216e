"""What a session of an experiment will be able to see on a host, and how long it takes, by what was measured there."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dgxlab import judgement, plan, stats
from dgxlab.agent.slots import comparisons
from dgxlab.model import (
    ChainStep,
    CheckStep,
    Experiment,
    FileModel,
    GateStep,
    NoiseFloor,
    Plan,
    Session,
    Source,
    gpu_backends,
    model_id,
)
from dgxlab.store import Store, gate_digest


@dataclass(frozen=True)
class Expected:
    """One comparison of a session to come.

    Attributes:
        label: Of the cell.
        model: That it is measured on, "" for none.
        metric: Name in `units`.
        sigma: Relative, from run to run.
        session: That measured it.
        mde: Smallest effect that is found with a chance of 80 %, a share.
        needed: Cycles that find the wanted effect, None if 100 do not.
        chosen: Cycles that a burn-in with this noise asks for, to find the effect that the spec names.
    """

    label: str
    model: str
    metric: str
    sigma: float
    session: str
    mde: float
    needed: int | None
    chosen: int


@dataclass(frozen=True)
class Outlook:
    """A session to come.

    Attributes:
        effect: The wanted one, a share.
        family: Claims of the session, known or not.
        cycles: As the spec has it, or as many as the burn-ins will probably ask for; None where nothing is known.
        fixed: Whether the spec has it.
        needed: Cycles that find the effect in every cell that is known, None if 100 do not.
        seconds: Of the session with `cycles`, without builds; None where something in it was never run there.
        seconds_needed: The same with as many cycles as are needed.
        claims: Those whose noise floor is known.
        unknown: Labels of the cells of the others.
    """

    effect: float
    family: int
    cycles: int | None
    fixed: bool
    needed: int | None
    seconds: float | None
    seconds_needed: float | None
    claims: tuple[Expected, ...]
    unknown: tuple[str, ...]


def outlook(store: Store, experiment: Experiment, source: Source, effect: float) -> Outlook:
    """Return what an A/B session with an experiment as its baseline will see.

    The device is the one that computed last on the host of that name; it is not asked.

    Args:
        effect: That is to be found, a share.

    Raises:
        SpecError: if the experiment measures nothing.
    """
    made = plan.make_ab(experiment, experiment, (source, source), job_id=experiment.name)
    chains, device = list(made.chains), _device(store, experiment.host, made)
    count = sum(len(comparisons(chain)) for chain in chains)
    known: list[Expected] = []
    unknown: list[str] = []
    for chain in chains:
        floors = {(floor.cell, floor.metric): floor for floor in _floors(store, experiment, chain, device)}
        for comparison in comparisons(chain):
            label = next(cell.label for cell in chain.baseline.cells if cell.key == comparison.baseline)
            if floor := floors.get((comparison.baseline, comparison.metric)):
                known.append(_expected(label, chain, floor, effect, experiment.session))
            elif label not in unknown:
                unknown.append(label)
    cycles = experiment.session.cycles or max((one.chosen for one in known), default=None)
    needed = [one.needed for one in known]
    enough = None if None in needed else max((each for each in needed if each), default=None)
    times = _Times(store, made, device)
    return Outlook(
        effect=effect,
        family=count,
        cycles=cycles,
        fixed=bool(experiment.session.cycles),
        needed=enough,
        seconds=cycles and times.session(cycles),
        seconds_needed=enough and times.session(enough),
        claims=tuple(known),
        unknown=tuple(unknown),
    )


def command(name: str, experiment: Experiment, *words: str) -> str:
    """Return a command on an experiment's own host, as one would type it here."""
    from dgxlab.spec.resolve import label  # where no spec is read, reading this would be the slower half of a command

    return shlex.join(["dgxlab", name, label(Path(experiment.path)), "--host", experiment.host, *words])


def _expected(label: str, chain: ChainStep, floor: NoiseFloor, effect: float, session: Session) -> Expected:
    # a burn-in takes the upper bound of the noise in its differences
    bound = floor.sigma * stats.bound_factor(stats.PLANNING_RUNS - 1)
    chosen = session.cycles or stats.cycles_at(bound, session.effect, chain.claims)
    needed = stats.to_see(effect, floor.sigma, chain.claims)
    return Expected(
        label,
        chain.baseline.model,
        floor.metric,
        floor.sigma,
        floor.session,
        stats.mde(floor.sigma, chosen, chain.claims),
        needed and max(needed, stats.fewest_cycles(chain.claims)),
        chosen,
    )


def _device(store: Store, host: str, made: Plan) -> str:
    """Return the id of the GPUs, or of the processor, that computed last on a host; "" where none did."""
    found = store.rows(
        """SELECT device_id FROM arms JOIN jobs USING (job_id) JOIN devices USING (device_id)
           WHERE host = ? AND (uuids <> '[]') = ? ORDER BY intent_at DESC LIMIT 1""",
        (host, bool(gpu_backends(made.arms[0].cmake))),
    )
    return str(found[0]["device_id"]) if found else ""


def _floors(store: Store, experiment: Experiment, chain: ChainStep, device: str) -> Sequence[NoiseFloor]:
    name = chain.baseline.model
    model = _model(store, experiment, name, device) if name else ""
    return judgement.noise_floors(store, device, [cell.key for cell in chain.baseline.cells], model)


def _model(store: Store, experiment: Experiment, name: str, device: str) -> str:
    """Return a model's identity; of a file, as the host last said."""
    model = experiment.models[name]
    if not isinstance(model, FileModel):
        return model_id(model)
    found = store.rows(
        """SELECT model_id FROM inputs JOIN jobs USING (job_id)
           WHERE job_id IN (SELECT job_id FROM arms WHERE device_id = ?) AND inputs.name = ?
           AND (path = ?3 OR substr(?3, 1, 2) = '~/' AND substr(path, -length(substr(?3, 2))) = substr(?3, 2))
           ORDER BY intent_at DESC LIMIT 1""",
        (device, name, model.path),
    )
    return str(found[0]["model_id"]) if found else "unknown"


class _Times:
    """How long the parts of a session took on a device when they were last run."""

    def __init__(self, store: Store, made: Plan, device: str) -> None:
        self._chains = [(chain, _seconds_of_runs(store, chain, device)) for chain in made.chains]
        gates = [step for step in made.steps if isinstance(step, (GateStep, CheckStep))]
        # both arms have about the baseline's gates
        self._gates = [2 * _seconds_of_gate(store, gate, device) for gate in gates]

    def session(self, cycles: int) -> float | None:
        """Return the seconds of a session of that many cycles, None where a part is not known."""
        total = sum(self._gates)
        for chain, seconds in self._chains:
            burn_in = stats.BURN_IN_RUNS[0] if chain.cycles else stats.PLANNING_RUNS
            total += burn_in * seconds + (2 * cycles + 1) * (chain.block_s + seconds)
        return total if math.isfinite(total) else None


def _seconds_of_runs(store: Store, chain: ChainStep, device: str) -> float:
    """Return how long a launch takes that gives these cells: of one with more cells, too long rather than too short."""
    keys = [cell.key for cell in chain.baseline.cells]
    marks = ",".join("?" * len(keys))
    found = store.rows(
        f"""SELECT runs.seconds FROM runs JOIN arms USING (job_id, arm) JOIN rows USING (run_id)
            WHERE device_id = ? AND status = 'valid' AND rows.cell IN ({marks})
            GROUP BY runs.run_id HAVING count(*) = ? ORDER BY started DESC LIMIT 9""",  # noqa: S608 - marks alone
        (device, *keys, len(keys)),
    )
    return stats.median([row["seconds"] for row in found]) if found else math.inf


def _seconds_of_gate(store: Store, gate: GateStep | CheckStep, device: str) -> float:
    if isinstance(gate, CheckStep):
        found = store.rows(
            """SELECT checks.seconds FROM checks JOIN arms USING (job_id, arm)
               WHERE device_id = ? AND gate_digest = ? ORDER BY at DESC LIMIT 1""",
            (device, gate_digest(gate.gate, gate.env)),
        )
        return float(found[0]["seconds"]) if found else math.inf
    found = store.rows(
        """SELECT gates.seconds FROM gates JOIN arms USING (job_id, arm)
           WHERE device_id = ? AND op = ? AND backend = ? ORDER BY at DESC LIMIT 1""",
        (device, gate.gate.op, gate.gate.backend),
    )
    return float(found[0]["seconds"]) if found else math.inf
