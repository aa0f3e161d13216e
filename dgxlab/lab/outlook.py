"""What a session of an experiment will be able to see on a host, and how long it takes, by what was measured there."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from dgxlab import judgement, plan, stats
from dgxlab.chains import comparisons
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
        label: The cell's label.
        model: The model's name, "" for none.
        metric: Name in `units`.
        sigma: Noise from run to run, a share.
        session: The session that measured this noise.
        mde: The smallest effect that is found with a chance of 80 %, a share.
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
        effect: The wanted effect, a share.
        family: How many claims the session makes.
        cycles: As in the spec, or as many as the burn-ins will probably ask for; None where no noise is known.
        fixed: Whether the spec sets the cycles.
        needed: Cycles that find the effect in every cell whose noise is known, None if 100 do not.
        seconds: How long a session of `cycles` takes, without builds; None where a part of it never ran there.
        seconds_needed: The same for `needed` cycles.
        claims: The claims whose noise floor is known.
        unknown: Labels of the cells of the other claims.
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
        effect: The effect to find, a share.

    Raises:
        SpecError: if the experiment measures nothing.
    """
    session = plan.make_ab(experiment, experiment, (source, source), job_id=experiment.name)
    rows = store.rows(
        """SELECT device_id FROM arms JOIN jobs USING (job_id) JOIN devices USING (device_id)
           WHERE host = ? AND (uuids <> '[]') = ? ORDER BY intent_at DESC LIMIT 1""",
        (experiment.host, bool(gpu_backends(session.arms[0].cmake))),
    )
    device = str(rows[0]["device_id"]) if rows else ""
    claims: list[Expected] = []
    unknown: dict[str, None] = {}
    for chain in session.chains:
        labels = {cell.key: cell.label for cell in chain.baseline.cells}
        model = _model(store, experiment, chain.baseline.model, device)
        floors = {
            (floor.cell, floor.metric): floor for floor in judgement.noise_floors(store, device, [*labels], model)
        }
        for comparison in comparisons(chain):
            if floor := floors.get((comparison.baseline, comparison.metric)):
                claims.append(_expected(labels[comparison.baseline], chain, floor, effect, experiment.session))
            else:
                unknown[labels[comparison.baseline]] = None
    cycles = experiment.session.cycles or max((claim.chosen for claim in claims), default=None)
    needed = [claim.needed for claim in claims]
    enough = None if None in needed else max(filter(None, needed), default=None)
    return Outlook(
        effect=effect,
        family=sum(len(comparisons(chain)) for chain in session.chains),
        cycles=cycles,
        fixed=bool(experiment.session.cycles),
        needed=enough,
        seconds=cycles and _seconds(store, session, device, cycles),
        seconds_needed=enough and _seconds(store, session, device, enough),
        claims=tuple(claims),
        unknown=tuple(unknown),
    )


def command(name: str, experiment: Experiment, *words: str) -> str:
    """Return a command on an experiment's own host, as it is typed in this folder."""
    from dgxlab.spec.resolve import label  # imported late: it is the slower half of a command that reads no spec

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


def _model(store: Store, experiment: Experiment, name: str, device: str) -> str:
    """Return a model's identity, "" for no model; of a file, as the host last said."""
    if not name:
        return ""
    model = experiment.models[name]
    if not isinstance(model, FileModel):
        return model_id(model)
    rows = store.rows(
        """SELECT model_id FROM inputs JOIN jobs USING (job_id)
           WHERE job_id IN (SELECT job_id FROM arms WHERE device_id = ?) AND inputs.name = ?
           AND (path = ?3 OR substr(?3, 1, 2) = '~/' AND substr(path, -length(substr(?3, 2))) = substr(?3, 2))
           ORDER BY intent_at DESC LIMIT 1""",
        (device, name, model.path),
    )
    return str(rows[0]["model_id"]) if rows else "unknown"


def _seconds(store: Store, session: Plan, device: str, cycles: int) -> float | None:
    """Return how long a session of that many cycles will take, by when its parts last ran; None if one never did."""
    total = 0.0
    for step in session.steps:
        if isinstance(step, (GateStep, CheckStep)):
            if isinstance(step, CheckStep):
                table, which, asked = "checks", "gate_digest = ?", [gate_digest(step.gate, step.env)]
            else:
                table, which, asked = "gates", "op = ? AND backend = ?", [step.gate.op, step.gate.backend]
            rows = store.rows(
                f"""SELECT {table}.seconds FROM {table} JOIN arms USING (job_id, arm)
                    WHERE device_id = ? AND {which} ORDER BY at DESC LIMIT 1""",  # noqa: S608 - words from here alone
                (device, *asked),
            )
            total += 2 * float(rows[0]["seconds"]) if rows else math.inf  # both arms have about the baseline's gates
        elif isinstance(step, ChainStep):
            keys = [cell.key for cell in step.baseline.cells]
            marks = ",".join("?" * len(keys))
            # a launch with these cells: one with more cells takes too long rather than too short
            rows = store.rows(
                f"""SELECT runs.seconds FROM runs JOIN arms USING (job_id, arm) JOIN rows USING (run_id)
                    WHERE device_id = ? AND status = 'valid' AND rows.cell IN ({marks})
                    GROUP BY runs.run_id HAVING count(*) = ? ORDER BY started DESC LIMIT 9""",  # noqa: S608 - marks alone
                (device, *keys, len(keys)),
            )
            seconds = stats.median([row["seconds"] for row in rows]) if rows else math.inf
            burn_in = stats.BURN_IN_RUNS[0] if step.cycles else stats.PLANNING_RUNS
            total += burn_in * seconds + (2 * cycles + 1) * (step.block_s + seconds)
    return total if math.isfinite(total) else None
