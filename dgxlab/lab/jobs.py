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
from dgxlab.lab.base import Lab, Watch, noted
from dgxlab.model import Experiment, Plan, Source
from dgxlab.source import PinCache
from dgxlab.store import Store
from dgxlab.transport import retry
from dgxlab.transport.host import Host, JobStatus, Probe, Stdin


def start(lab: Lab, host: Host, experiment: Experiment, job: Plan, probe: Probe, watch: Watch) -> JobStatus:
    """Send what the host lacks, record the intent, and start the job detached."""
    for arm in job.arms:
        _send(lab.cache, host, arm.source, probe, watch)
    lab.store.intend(job, experiment, host.name, __version__)
    status = retry.again(host, lambda: host.submit(job), noted(watch))
    watch({"event": "note", "note": f"job {job.job_id} runs on {host.name}"})
    return status


def follow(lab: Lab, host: Host, job_id: str, watch: Watch) -> DgxlabError | None:
    """Ingest a job's journal as it grows, from where the store stands; return what went wrong in it.

    Raises:
        Interrupted: on Ctrl-C; the job goes on.
    """
    with interruptible(lab.store, job_id):
        offset = lab.store.job(job_id).journal_bytes
        for piece in retry.follow(host, job_id, offset, noted(watch)):
            for event in ingest(lab.store, job_id, piece.splitlines(keepends=True)):
                watch(event)
        return conclude(lab, host, retry.again(host, lambda: host.status(job_id), noted(watch)))


def conclude(lab: Lab, host: Host, status: JobStatus) -> DgxlabError | None:
    """Record how a job ended and return its error, None for a good end.

    Raises:
        JobLost: if the agent died without a final word; what it measured before is kept.
    """
    job_id = status.job_id
    if status.state != "done" or status.rc is None:
        lab.store.set_state(job_id, "lost")
        raise JobLost(
            f"job {job_id} was lost: its agent on {host.name} is gone and left no final status (killed, or a reboot)",
            next="dgxlab run again: what it measured is kept, only the rest is measured",
        )
    code = int(status.rc["exit_code"])
    job = lab.store.job(job_id)
    lab.store.set_state(job_id, status.rc["status"], exit_code=code)
    if code == 0:
        return None
    if status.rc["status"] == "cancelled":
        return Interrupted(f"job {job_id} was cancelled", next="dgxlab run again to go on")
    message = status.rc.get("message") or job.error or f"job {job_id} ended with exit code {code}"
    return by_exit_code(code)(message, next=status.rc.get("next") or job.next or "", details=job.details or "")


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


def _follow_quietly(lab: Lab, host: Host, job_id: str, watch: Watch) -> None:
    """Follow an old job; how it ended is recorded, and what is left of it is measured now."""
    try:
        error = follow(lab, host, job_id, watch)
    except JobLost as lost:
        error = lost
    if error is not None:
        watch({"event": "note", "note": f"an earlier job ended badly: {error.message}"})


def _send(cache: PinCache, host: Host, source: Source, probe: Probe, watch: Watch) -> None:
    """Send the objects that the host lacks: the pin once, a patched tree as its few changed objects."""
    if source.pin in probe.missing:
        watch({"event": "note", "note": f"sending pin {source.pin[:12]} to {host.name}"})
        _send_pack(host, source.pin, source.pin, lambda: cache.pack([source.pin], []), watch)
    if source.commit != source.pin and source.commit in probe.missing:
        _send_pack(host, source.commit, source.pin, lambda: cache.pack([source.commit], [source.pin]), watch)


def _send_pack(host: Host, commit: str, shallow: str, pack: Stdin, watch: Watch) -> None:
    retry.again(host, lambda: host.send_objects(commit, [shallow], pack), noted(watch))


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
