"""Predict which effects an A/B session can detect, and how long it takes, from earlier runs on the device."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from dgxlab import judgement, plan, stats
from dgxlab.agent.environment import Settings
from dgxlab.agent.facts import host_id
from dgxlab.chains import comparisons, shortest_burn_in
from dgxlab.errors import SpecError, more_minutes
from dgxlab.model import (
    BuildStep,
    ChainStep,
    Experiment,
    FileModel,
    GateStep,
    HostEntry,
    Model,
    ModelStep,
    ParityGate,
    Plan,
    RunStep,
    Session,
    Source,
    Step,
    canonical,
    gpu_backends,
    model_read,
)
from dgxlab.store import Store, gate_digest
from dgxlab.units import duration


@dataclass(frozen=True)
class Expected:
    """The prediction for one comparison: a metric of a cell."""

    label: str
    model: str
    metric: str
    floor: float  # the noise floor, a share
    session: str  # the A/A session that measured it
    mde: float  # minimum effect that is detected with a probability of 80 %, a share
    needed: int | None  # cycles needed to detect the wanted effect, None if over 100
    chosen: int  # cycles that a burn-in with this noise floor would choose for the spec's effect


@dataclass(frozen=True)
class Outlook:
    """The prediction for a session."""

    effect: float  # the wanted effect, a share
    family: int  # how many claims the session makes
    cycles: int | None  # from the spec, or as the burn-ins will probably choose; None if no noise floor is known
    fixed: bool  # whether the spec sets the cycles
    needed: int | None  # cycles needed to detect the effect in every cell with a known noise floor, None if over 100
    seconds: float | None  # duration of a session of `cycles`, without builds; None if a part of it never ran there
    seconds_needed: float | None
    claims: tuple[Expected, ...]
    unknown: tuple[str, ...]  # labels of the cells whose noise floor is not known


def outlook(store: Store, host: HostEntry, experiment: Experiment, source: Source, effect: float) -> Outlook:
    """Return the prediction for an A/B session of a baseline that is to find an effect, a share.

    The host is not contacted: the device is that of `device_on`. Raises SpecError if the experiment measures nothing.
    """
    session = plan.make_ab(experiment, experiment, (source, source), job_id=experiment.name)
    device = device_on(store, host, session)
    earlier = _Earlier(store, session, device)
    claims: list[Expected] = []
    unknown: dict[str, None] = {}
    for chain in session.chains:
        labels = {cell.key: cell.label for cell in chain.baseline.cells}
        known = judgement.of_itself(store, device, [*labels], earlier.model(chain.baseline))
        for comparison in comparisons(chain):
            label, metric = labels[comparison.baseline], comparison.metric
            by, verdict = known.get((comparison.baseline, metric), ("", None))
            if verdict and verdict.noise:
                reach = _reach(chain, verdict.noise, effect, experiment.session)
                claims.append(Expected(label, chain.baseline.model, metric, verdict.noise, by, *reach))
            else:
                unknown[label] = None
    cycles = experiment.session.cycles or max((claim.chosen for claim in claims), default=None)
    needed = [claim.needed for claim in claims]
    enough = None if None in needed else max(filter(None, needed), default=None)
    return Outlook(
        effect=effect,
        family=sum(len(comparisons(chain)) for chain in session.chains),
        cycles=cycles,
        fixed=bool(experiment.session.cycles),
        needed=enough,
        seconds=cycles and earlier.session_s(cycles),
        seconds_needed=enough and earlier.session_s(enough),
        claims=tuple(claims),
        unknown=tuple(unknown),
    )


def jobs_on(store: Store, host: HostEntry) -> list[str]:
    """Return the jobs that ran on a host as hosts.yaml sets it now, the last one first.

    `local` may have been another machine in the record: only jobs of this one are its own. An older agent reported its
    processors alone: where they were not set, its other settings are taken for none.
    """
    own = Settings(env=host.env, processors=host.processors or ()).digest
    rows = store.rows(
        """SELECT job_id FROM jobs WHERE host = ? AND host_id = coalesce(?, host_id) AND ? = coalesce(
               json_extract(facts, '$.details.settings'), nullif(json_extract(facts, '$.details.processors'), '[]'), '')
           ORDER BY intent_at DESC""",
        (host.name, host_id() if host.name == "local" else None, own),
    )
    return [row["job_id"] for row in rows]


def device_on(store: Store, host: HostEntry, job: Plan) -> str:
    """Return the id of the last device of `jobs_on` that is of the kind that a job needs; "" if there is none."""
    rows = store.rows(
        """SELECT device_id FROM json_each(?) JOIN arms ON job_id = value JOIN devices USING (device_id)
           WHERE (uuids <> '[]') = ? ORDER BY key LIMIT 1""",
        (canonical(jobs_on(store, host)), bool(gpu_backends(job.arms[0].cmake))),
    )
    return str(rows[0]["device_id"]) if rows else ""


def model_on(store: Store, model: Model, device: str) -> str:
    """Return a model's id; for a file, the one last seen on the device's hosts, "unknown" for none."""
    rows = store.rows(
        """SELECT model_id, path, recipe FROM inputs JOIN jobs USING (job_id)
           WHERE job_id IN (SELECT job_id FROM arms WHERE device_id = ?) ORDER BY intent_at""",
        (device,),
    )
    return model_read(model, rows)


def noise_command(experiment: Experiment) -> str:
    """Return the command that measures an experiment's noise on its host, to be typed in the current folder."""
    from dgxlab.spec.resolve import label  # imported late: half the time of a short command

    return shlex.join(["dgxlab", "noise", label(Path(experiment.path)), "--host", experiment.host])


def _reach(chain: ChainStep, floor: float, effect: float, session: Session) -> tuple[float, int | None, int]:
    """Return what a chain with this noise floor can detect: `mde`, `needed` and `chosen` of its `Expected`."""
    chosen = session.cycles or stats.planned_cycles([floor], session.effect, chain.claims)
    needed = stats.cycles_to_detect(effect, floor, chain.claims)
    return stats.mde(floor, chosen, chain.claims), needed and max(needed, stats.fewest_cycles(chain.claims)), chosen


def least_s(store: Store, job: Plan, device: str) -> float:
    """Return a duration that a job will not fall below, from earlier runs of its parts; parts that never ran take 0.

    So do builds and models, which may be there already. The blocks of a chain take time in any case.
    """
    earlier = _Earlier(store, job, device)
    chains = [_chain_s(chain, _fewest(chain), earlier.run_s(chain.baseline) or 0.0) for chain in job.chains]
    others = [earlier.step_s(step) for step in job.steps if isinstance(step, GateStep | RunStep)]
    return sum(filter(None, (*chains, *others)))


def expected(store: Store, job: Plan, device: str, *, anew: bool = False) -> dict[str, float | None]:
    """Return how long each step of a job took when it last ran on a device, in seconds; None if it never did.

    A launch takes the median of the last ones. A build or a model that an earlier step of the job makes takes 0. With
    `anew`, a build takes as long as the longest one, as later ones of the same pin compile only what has changed, and
    that a model was reused tells no time.
    """
    earlier, times = _Earlier(store, job, device), dict[str, float | None]()
    products: set[str] = set()
    for step in job.steps:
        product = step.id
        if isinstance(step, ModelStep):
            product = f"{step.path} {canonical(step.recipe)}"  # models that are made of files have no path yet
        elif isinstance(step, BuildStep):
            arm = job.arm(step.arm)
            product = f"{arm.source.tree} {canonical(arm.cmake)}"
        times[step.id] = 0.0 if product in products else earlier.step_s(step, anew=anew)
        products.add(product)
    return times


def shared(store: Store, job: Plan, device: str) -> Plan:
    """Return a session whose chains share --max-minutes by how long each takes at least; equally if that is not known.

    If one never ran on the device, the times are of the last device that ran them all: only the proportions matter.

    Raises SpecError if chains that ran before, with just these cells, take more than the limit with the fewest cycles
    of their claims.
    """
    if not (limit := sum(chain.max_s for chain in job.chains)):
        return job

    def takes(where: str) -> dict[str, float]:
        earlier = _Earlier(store, job, where)
        runs = ((chain, earlier.run_s(chain.baseline, exactly=True)) for chain in job.chains)
        return {chain.id: _chain_s(chain, _fewest(chain), run_s) or 0.0 for chain, run_s in runs}

    here = takes(device)
    if (least := sum(here.values())) > limit:
        message = f"{duration(limit)} are too short: by its earlier runs this session takes {duration(least)} or more"
        raise SpecError(message, next=more_minutes(least))
    times: dict[str, float] | None = here
    if not all(here.values()):
        others = store.rows(
            """SELECT device_id FROM rows JOIN runs USING (run_id) JOIN arms USING (job_id, arm)
               WHERE cell = ? GROUP BY device_id ORDER BY max(started) DESC""",
            (next(chain.baseline.cells[0].key for chain in job.chains),),
        )
        times = next((each for row in others if all((each := takes(row["device_id"])).values())), None)
    if not times:
        return job
    whole = sum(times.values())
    steps = (replace(s, max_s=limit * times[s.id] / whole) if isinstance(s, ChainStep) else s for s in job.steps)
    return replace(job, steps=tuple(steps))


class _Earlier:
    """What the parts of a job took in earlier jobs on a device, with the same models."""

    def __init__(self, store: Store, job: Plan, device: str) -> None:
        self.store, self.job, self.device = store, job, device
        steps = (step for step in job.steps if isinstance(step, ModelStep))
        self._models = {
            (step.arm, step.model): model_on(store, step.recipe or FileModel(step.path), device) for step in steps
        }

    def model(self, step: RunStep) -> str:
        """Return the id of the model that a launch reads, as `model_on` does; "" for no model."""
        return self._models[step.arm, step.model] if step.model else ""

    def step_s(self, step: Step, *, anew: bool = False) -> float | None:
        """Return the seconds of a step as `expected` does."""
        if isinstance(step, BuildStep):
            sql = """SELECT seconds FROM arms JOIN jobs USING (job_id) WHERE device_id = ? AND cmake = ? AND NOT reused
                     ORDER BY pin = ? DESC, iif(?, seconds, intent_at) DESC LIMIT 1"""
            arm = self.job.arm(step.arm)
            return self._seconds(sql, self.device, canonical(arm.cmake), arm.source.pin, anew)
        if isinstance(step, ModelStep):
            sql = """SELECT inputs.seconds FROM inputs JOIN jobs USING (job_id)
                     WHERE job_id IN (SELECT job_id FROM arms WHERE device_id = ?) AND model_id = ?
                     AND NOT (? AND reused IS TRUE) ORDER BY reused IS TRUE, intent_at DESC LIMIT 1"""
            made = step.recipe is not None  # a file is only read, which takes its time again
            return self._seconds(sql, self.device, self._models[step.arm, step.model], anew and made)
        if isinstance(step, GateStep):
            return self._gate_s(step)
        if isinstance(step, ChainStep):
            return _chain_s(step, _fewest(step), self.run_s(step.baseline))
        return self.run_s(step) if isinstance(step, RunStep) else 0.0

    def session_s(self, cycles: int) -> float | None:
        """Return the seconds of a session of so many cycles, given as A/A; None if a part of it never ran."""
        chains = [_chain_s(chain, cycles, self.run_s(chain.baseline)) for chain in self.job.chains]
        gates = [self._gate_s(step) for step in self.job.steps if isinstance(step, GateStep)]
        times = [*chains, *gates, *gates]  # both arms have about the baseline's gates
        return None if None in times else sum(filter(None, times))

    def _gate_s(self, step: GateStep) -> float | None:
        same = gate_digest(step.gate, step.env)
        if isinstance(step.gate, ParityGate):  # of the same op, which takes about as long, where this one has never run
            table, which, asked = "gates", "op = ? AND backend = ?", [step.gate.op, step.gate.backend]
        else:
            models = {name: self._models[step.arm, name] for name in {each.model for each in step.commands} if name}
            of_models = "(SELECT key, value FROM json_each(?) EXCEPT SELECT key, value FROM json_each(inputs))"
            table, which = "checks", f"gate_digest = ? AND NOT EXISTS {of_models}"
            asked = [same, canonical(models)]
        sql = f"""SELECT {table}.seconds FROM {table} JOIN arms USING (job_id, arm)
                  WHERE device_id = ? AND {which} ORDER BY gate_digest = ? DESC, at DESC LIMIT 1"""  # noqa: S608 - from here
        return self._seconds(sql, self.device, *asked, same)

    def run_s(self, step: RunStep, *, exactly: bool = False) -> float | None:
        """Return the median seconds of the last launches with these cells.

        Such with more cells count too, as too long is the better estimate, but not if it must be `exactly` these.
        """
        keys = [cell.key for cell in step.cells]
        marks = ",".join("?" * len(keys))
        more = "AND count(*) = (SELECT count(*) FROM rows AS each WHERE each.run_id = runs.run_id)" * exactly
        rows = self.store.rows(
            f"""SELECT runs.seconds FROM runs JOIN arms USING (job_id, arm) JOIN rows USING (run_id)
                WHERE device_id = ? AND coalesce(model_id, '') = ? AND status = 'valid' AND rows.cell IN ({marks})
                GROUP BY runs.run_id HAVING count(*) = ? {more} ORDER BY started DESC LIMIT 9""",  # noqa: S608 - from here
            (self.device, self.model(step), *keys, len(keys)),
        )
        return stats.median([row["seconds"] for row in rows]) if rows else None

    def _seconds(self, sql: str, *values: object) -> float | None:
        rows = self.store.rows(sql, values)
        return float(rows[0]["seconds"]) if rows else None


def _chain_s(step: ChainStep, cycles: int, run_s: float | None) -> float | None:
    return None if run_s is None else shortest_burn_in(step) * run_s + (2 * cycles + 1) * (step.block_s + run_s)


def _fewest(step: ChainStep) -> int:
    return step.cycles or stats.fewest_cycles(step.claims)
