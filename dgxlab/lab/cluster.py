"""Hosts that start their jobs through Slurm: which node, which time limit, what is built before."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from dgxlab.agent.slurm import BEFORE_LIMIT_S
from dgxlab.errors import DgxlabError, JobLost, SpecError, edit
from dgxlab.lab import Lab, Side, Watch, noted
from dgxlab.lab.jobs import join, start_and_follow
from dgxlab.lab.outlook import least_s
from dgxlab.model import BuildStep, Plan
from dgxlab.plan import new_job_id
from dgxlab.store import Store
from dgxlab.transport.host import ClusterNode, Host, Probe
from dgxlab.units import duration

RESTARTS = 5  # how often a job that Slurm ended for others is followed by another one
GOES_ON = "a new job does what is missing"
_FOR_OTHERS = re.compile(r"\b(PREEMPTED|NODE_FAIL|BOOT_FAIL)\b")
_GPU_ALONE = {"gres": "", "constraint": "", "nodelist": "", "exclusive": False, "extra": ()}
"""Options of jobs that measure and not of those that only build."""


def same_gpus(host: Host, node: ClusterNode) -> bool:
    """Return whether the next job on a node has the GPUs of the last one: a part of a node may be other GPUs each time.

    Only then may its results be completed, and its noise decide.
    """
    slurm = host.entry.slurm
    if not slurm or slurm.exclusive or not node.facts or not node.facts.details.get("gpus"):
        return True
    return not (slurm.gres or any(word.startswith(("--gpus", "-G")) for word in slurm.extra))


def may_go_on(host: Host, error: DgxlabError | None) -> bool:
    """Return whether Slurm ended a job for reasons that are not the job's own."""
    return bool(host.entry.slurm and isinstance(error, JobLost) and _FOR_OTHERS.search(error.message))


def refuse_short(store: Store, host: Host, job: Plan, device: str) -> None:
    """Raise SpecError if the time limit is shorter than a plan takes at least, given earlier runs on the device."""
    slurm = host.entry.slurm
    needs = least_s(store, job, device) + 2 * BEFORE_LIMIT_S
    if slurm and needs > slurm.limit_s:
        why = f"slurm.time of host {host.name} is {slurm.time}, and the plan needs {duration(needs)} or more"
        raise SpecError(f"{why}, of which Slurm takes the last two minutes", next=edit(host.entry.file))


def build_first(lab: Lab, host: Host, job: Plan, sides: Sequence[Side], probe: Probe, watch: Watch) -> bool:
    """Build a plan's arms where slurm.build says so, and return whether it says so.

    What is built there is used if compilers and processor are those of the node; if not, the node builds it again. A
    build that another client has begun is followed to its end, and one that Slurm ended for others begins again.

    Raises DgxlabError: the error of the job that builds.
    """
    slurm = host.entry.slurm
    if slurm is None or slurm.build is None:
        return False
    given = {**slurm.build, "extra": tuple(slurm.build.get("extra", ()))}
    where = host.at(replace(slurm, **{**_GPU_ALONE, **given}) if slurm.build else None)
    steps = tuple(step for step in job.steps if isinstance(step, BuildStep))
    # with a baseline its subject is not that of a run, so that no client takes it for one
    baseline = job.baseline or job.experiment
    first = replace(job, kind="gate", baseline=baseline, steps=steps, node="")
    noted(watch)("building first, without a GPU")
    if join(lab, host, first.subject, sides, probe, watch):
        return True
    for left in reversed(range(RESTARTS + 1)):
        first = replace(first, job_id=new_job_id(f"{job.name}-build"))
        error = start_and_follow(lab, where, first, probe, watch)
        if error and not (left and may_go_on(where, error)):
            raise error
        if error is None:
            break
        noted(watch)(f"{error}: {GOES_ON}")
    return True
