"""Jobs on a host: started, followed, settled.

A job's intent is in the store before the host hears of it, and everything after that is reading a journal: whatever
dies in between, the next command finds the job and goes on from where the store stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dgxlab import __version__
from dgxlab.errors import DgxlabError, Interrupted, JobLost, by_exit_code
from dgxlab.ingest import ingest
from dgxlab.lab import raw
from dgxlab.lab.base import Lab, Watch, noted
from dgxlab.lab.provision import send
from dgxlab.model import Experiment, Plan, Source
from dgxlab.store import Job, Store, the_one
from dgxlab.transport import retry
from dgxlab.transport.host import Host, JobStatus, Probe


def start(lab: Lab, host: Host, experiment: Experiment, job: Plan, probe: Probe, watch: Watch) -> JobStatus:
    """Send what the host lacks, record the intent, and start the job detached."""
    send(lab.cache, host, job, probe, watch)
    lab.store.intend(job, experiment, host.name, __version__)
    status = retry.again(host, lambda: host.submit(job), noted(watch))
    watch({"event": "note", "note": f"job {job.job_id} runs on {host.name}"})
    return status


def follow(lab: Lab, host: Host, job_id: str, watch: Watch) -> DgxlabError | None:
    """Ingest a job's journal as it grows, from where the store stands; return what went wrong in it.

    A job whose end is in the store is not asked for again: the host may have deleted it.

    Raises:
        Interrupted: on Ctrl-C; the job goes on.
    """
    job = lab.store.job(job_id)
    if job.ended:
        return _ending(job)
    with interruptible(lab.store, job_id):
        for piece in retry.follow(host, job_id, job.journal_bytes, noted(watch)):
            for event in ingest(lab.store, job_id, piece.splitlines(keepends=True)):
                watch(event)
        return conclude(lab, host, retry.again(host, lambda: host.status(job_id), noted(watch)), watch)


def conclude(lab: Lab, host: Host, status: JobStatus, watch: Watch) -> DgxlabError | None:
    """Record how a job ended, fetch its raw files, and return its error, None for a good end.

    Raises:
        JobLost: if the agent died without a final word; what it measured before is kept.
    """
    job_id, rc = status.job_id, status.rc
    if status.state != "done" or rc is None:
        lab.store.set_state(job_id, "lost")
        if status.state == "lost":
            raw.keep(lab, host, job_id, watch)
        raise _lost(host, status)
    told = {name: rc.get(name, "") for name in ("message", "next")}
    job = lab.store.set_state(
        job_id, rc["status"], exit_code=int(rc["exit_code"]), error=told["message"], next=told["next"]
    )
    raw.keep(lab, host, job_id, watch)
    return _ending(job)


def _lost(host: Host, status: JobStatus) -> JobLost:
    cause = f"its agent on {host.name} is gone and left no final status (killed, or a reboot)"
    if status.state == "absent":
        cause = f"its folder on {host.name} was deleted before its end was recorded"
    return JobLost(
        f"job {status.job_id} was lost: {cause}",
        next="dgxlab run again: what it measured is kept, only the rest is measured",
    )


def _ending(job: Job) -> DgxlabError | None:
    """Return the error that a job ended with, as the store has it."""
    if not job.exit_code:
        return None
    if job.state == "cancelled":
        return Interrupted(f"job {job.job_id} was cancelled", next="dgxlab run again to go on")
    message = job.error or f"job {job.job_id} ended with exit code {job.exit_code}"
    return by_exit_code(job.exit_code)(message, next=job.next, details=job.details)


def settle(lab: Lab, host: Host, experiment: Experiment | None, watch: Watch) -> str:
    """Bring every unfinished job of a host to where the host has it; wait only for this experiment's own.

    A job whose client died is finished here: staged or started as it was intended, its journal ingested.

    Returns:
        The id of the experiment's job that was waited for, "" when there was none.
    """
    resumed = ""
    for job in lab.store.unfinished(host.name):
        mine = experiment is not None and job.experiment == experiment.digest
        status = host.status(job.job_id)
        if mine and status.state in ("absent", "staged"):
            status = host.submit(job.plan)
        if mine and status.state == "running":
            watch({"event": "note", "note": f"job {job.job_id} of this experiment still runs: following it"})
        if status.state == "absent":
            lab.store.set_state(job.job_id, "lost")
        elif status.state in ("done", "lost") or mine:
            resumed = job.job_id if mine else resumed
            _follow_quietly(lab, host, job.job_id, watch)
    return resumed


def find(lab: Lab, text: str, where: str | None) -> tuple[Host, str]:
    """Return a job's host and id, given its id or enough of its beginning.

    Args:
        where: A host whose jobs are looked through, whoever started them; None for the jobs of the record.

    Raises:
        UsageError: if there is no such job, or more than one.
    """
    if where is None:
        job_id = the_one(lab.store.job_ids(text), text, "; if another laptop started it, name its host with --host")
        return lab.connect(lab.store.job(job_id).host), job_id
    host = lab.connect(where)
    there = [job.job_id for job in host.jobs() if job.job_id.startswith(text)]
    return host, the_one(there, text, f" on host {where}")


def adopt(lab: Lab, host: Host, job_id: str, watch: Watch) -> None:
    """Record a job that another client started, unless it is recorded: from here on it is one of ours.

    Raises:
        JobLost: if the host does not have it.
        RemoteError: if its plan cannot be used.
    """
    if lab.store.find_job(job_id) is None:
        lab.store.intend(_plan(host, job_id, watch), None, host.name, __version__)


def join(lab: Lab, host: Host, experiment: Experiment, source: Source, probe: Probe, watch: Watch) -> str:
    """Follow a job of this experiment and tree that another client started and that still runs.

    Returns:
        Its id, "" when there is none.
    """
    for job_id, asked in probe.running.items():
        if asked != experiment.digest or lab.store.find_job(job_id):
            continue
        plan = _plan(host, job_id, watch)
        if [arm.source for arm in plan.arms] == [source]:
            lab.store.intend(plan, experiment, host.name, __version__)
            noted(watch)(f"job {job_id} of this experiment was started elsewhere and still runs: following it")
            _follow_quietly(lab, host, job_id, watch)
            return job_id
    return ""


def _plan(host: Host, job_id: str, watch: Watch) -> Plan:
    return retry.again(host, lambda: host.plan(job_id), noted(watch))


def _follow_quietly(lab: Lab, host: Host, job_id: str, watch: Watch) -> None:
    """Follow an old job; how it ended is recorded, and what is left of it is measured now."""
    try:
        error = follow(lab, host, job_id, watch)
    except JobLost as lost:
        error = lost
    if error is not None:
        watch({"event": "note", "note": f"an earlier job ended badly: {error.message}"})


@contextmanager
def interruptible(store: Store, job_id: str) -> Iterator[None]:
    """Turn Ctrl-C into how to go on, once there is a job."""
    try:
        yield
    except KeyboardInterrupt:
        if store.find_job(job_id) is None:
            raise
        raise Interrupted(
            f"stopped watching; job {job_id} goes on", next=f"dgxlab attach {job_id}, or dgxlab cancel {job_id}"
        ) from None
