"""Start jobs on a host, follow them, and bring unfinished ones to their end.

A job is recorded as intended before the host is contacted; after its start the client only reads its journal. If a
client or connection dies, the next command finds the job and continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from dgxlab import judgement
from dgxlab.errors import AGAIN, DgxlabError, Interrupted, JobLost, RemoteError, SpecError, UsageError, by_exit_code
from dgxlab.ingest import ingest
from dgxlab.lab import Lab, Side, Watch, noted, raw
from dgxlab.lab.progress import Progress
from dgxlab.lab.provision import send
from dgxlab.model import Plan
from dgxlab.replies import LIVE
from dgxlab.store import Damaged, Job, Locked, Store, matching_ids, only_match
from dgxlab.transport import retry
from dgxlab.transport.host import Host, JobStatus, Probe

Begun = Callable[[str], None] | None
"""Called with a job's id once the job is recorded as intended: whatever happens then, it is known."""
INTENT_S = 1800.0
"""A job intended this recently that is not on its host may still be submitted by another command: on a bad connection,
retries take ten minutes of pauses plus the connection timeouts."""
_FOLLOWING = "still runs: following it; options such as --again and --wait are for a new job"
_STARTS = 3
"""Max submits of a job that stays staged: on a busy host the agent may start more slowly than one call waits."""


def start(lab: Lab, host: Host, job: Plan, probe: Probe, watch: Watch, begun: Begun = None) -> JobStatus:
    """Send what a job needs and the host lacks, record that the job is intended, tell `begun`, and start it."""
    send(lab.cache, host, job, probe, watch)
    try:
        lab.store.back_up()
    except SpecError as error:  # a full disk must not prevent the measuring: only the copy is lost
        if isinstance(error, Damaged):
            raise
        noted(watch)(f"the record was not copied: {error.message}")
    job = replace(job, client=lab.client)
    lab.store.intend(job, host.name)
    if begun:
        begun(job.job_id)
    status = _submit(host, job, watch)
    how = f"is queued on {host.name}: {status.slurm}" if status.state == "queued" else f"runs on {host.name}"
    noted(watch)(f"job {job.job_id} {how}")
    return status


def start_and_follow(
    lab: Lab, host: Host, job: Plan, probe: Probe, watch: Watch, begun: Begun = None
) -> DgxlabError | None:
    """Start a job and follow it to its end; return its error, JobLost included: there may be results to report."""
    with _interruptible(lab.store, job.job_id):
        status = start(lab, host, job, probe, watch, begun)
        try:
            if status.state == "lost":
                return conclude(lab, host, status, watch)
            return follow(lab, host, status.job_id, watch)
        except JobLost as lost:
            return lost


def _submit(host: Host, job: Plan, watch: Watch) -> JobStatus:
    """Start a job and check that its agent has started; safe to repeat."""
    for _ in range(_STARTS):
        status = retry.again(host, lambda: host.submit(job), noted(watch))
        if status.state not in ("absent", "staged"):
            return status
    raise _not_yet(host, job.job_id)


def follow(lab: Lab, host: Host, job_id: str, watch: Watch) -> DgxlabError | None:
    """Record a job's journal as it grows, until the job ends; return the job's error, None on success.

    The host is not contacted if the end is recorded already: it may have deleted the job.

    Raises:
        Interrupted: on Ctrl-C; the job goes on.
        Locked: if another program holds the record for minutes; the job goes on.
        SpecError: if this version of dgxlab cannot read the job's plan.
        JobLost, RemoteError: as `conclude`.
    """
    with _interruptible(lab.store, job_id), _waiting(lab.store, job_id, watch):
        job = lab.store.job(job_id)
        if job.ended:
            return ending(lab, job, host)
        _ = job.plan  # raises SpecError: the job could not be judged
        if job.state == "lost":
            status = retry.again_if_known(host, partial(host.status, job_id), noted(watch))
            if status.state in (*LIVE, "done"):
                with lab.store.transaction():  # it was believed lost: delete its verdicts, and what Slurm said
                    lab.store.update_job(job_id, state="running", error="")
                    judgement.record(lab.store, job_id)
        if job.journal_bytes:  # what the job said before is not told again
            status = retry.again_if_known(host, partial(host.status, job_id), noted(watch))
            if status.waits_for:
                noted(watch)(f"job {job_id} waits for {status.waits_for}")
        progress = Progress(lab.store, host.entry, lab.store.job(job_id), watch)

        def take(piece: bytes) -> None:
            for event in ingest(lab.store, job_id, piece.splitlines(keepends=True)):
                progress.see(event)

        status = retry.follow(host, job_id, lab.store.job(job_id).journal_bytes, take, noted(watch))
        return conclude(lab, host, status, watch)


def conclude(lab: Lab, host: Host, status: JobStatus, watch: Watch) -> DgxlabError | None:
    """Record how a job that no longer runs ended, fetch its raw files, and return its error, None on success.

    Raises:
        JobLost: if the agent died without a final status; earlier results are kept.
        RemoteError: if it has not started yet, or began `elsewhere`.
    """
    job_id, rc = status.job_id, status.rc
    if status.state == "absent" and (message := elsewhere(host, lab.store.job(job_id))):
        details = "to ask there, name that machine and root in a hosts.yaml, and the host with --host;\n"
        details += f"if it is gone: dgxlab session reject {job_id} --because 'its host is gone'"
        raise RemoteError(message, next=f"dgxlab report {job_id}", details=details)
    if status.state == "staged" or (status.state == "absent" and _may_come(lab.store.job(job_id))):
        raise _not_yet(host, job_id)
    done = status.state == "done" and rc is not None
    job = record_end(lab.store, job_id, rc if done else None, status.slurm)
    if done or status.state == "lost":
        raw.fetch_small(lab, host, job_id, watch)
    if done:
        return ending(lab, job, host)
    why = f"its agent on {host.name} is gone and left no final status (killed, or a reboot); what it measured is kept"
    if status.state == "absent":
        why = f"its folder on {host.name} was deleted before its end was recorded; what it measured is kept"
    elif status.cause:
        why = f"on {host.name} {status.cause}; what was read of it before is kept, the rest is not believed"
    elif status.slurm:
        why = f"Slurm on {host.name} says {status.slurm}; what it measured is kept"
    raise JobLost(f"job {job_id} was lost: {why}", next=AGAIN)


def record_end(store: Store, job_id: str, rc: Mapping[str, Any] | None, slurm: str = "") -> Job:
    """Record how a job ended, and its verdicts. `rc` is its final status; None records it as lost, for Slurm's word."""
    ending: dict[str, Any] = {"error": slurm and f"Slurm says {slurm}"}
    if rc is not None:
        ending = {"exit_code": rc["exit_code"], "error": rc.get("message", ""), "next": rc.get("next", "")}
    with store.transaction():
        job = store.set_state(job_id, rc["status"] if rc else "lost", **ending)
        judgement.record(store, job_id)
    return job


def _may_come(job: Job) -> bool:
    """Whether another command may still submit a job that is not on its host."""
    return job.state == "intended" and time.time() - job.intent_at < INTENT_S


def elsewhere(host: Host, job: Job) -> str:
    """Return that a job which is absent on its host began on another machine, or below another root; "" if it did not.

    It may go on there. In a merged record several machines may have one name, as all are `local` to themselves.
    """
    if not (job.facts and job.root):
        return ""
    facts = host.probe().facts
    root = facts.details["disk"]["path"]
    if job.root == root and (host.entry.slurm or job.host_id == facts.host_id):  # Slurm's nodes have ids of their own
        return ""
    began = f"job {job.job_id} began on {job.facts['hostname']} ({job.host_id}) below {job.root}"
    now = f"host {host.name} is {facts.hostname} ({facts.host_id}) with the root {root}"
    return f"{began}, and {now}: whether it still runs is not known"


def _not_yet(host: Host, job_id: str) -> RemoteError:
    return RemoteError(f"job {job_id} has not started on {host.name} yet", next=AGAIN)


def ending(lab: Lab, job: Job, host: Host | None = None) -> DgxlabError | None:
    """Return the error of a job that has ended, None on success; its host is not asked, and may be unknown by now."""
    if not job.exit_code:
        return None
    if job.state == "cancelled":
        return Interrupted(f"job {job.job_id} was cancelled", next=AGAIN)
    message = job.error or f"job {job.job_id} ended with exit code {job.exit_code}"
    try:
        mend = (host or lab.connect(job.host)).entry.next_of_agent(job.next)
    except DgxlabError:
        mend = f"dgxlab report {job.job_id}"
    return by_exit_code(job.exit_code)(message, next=mend, details=job.details)


def settle(lab: Lab, host: Host, subject: str | None, watch: Watch) -> str:
    """Bring the record up to date with every unfinished job of a host.

    Jobs that have ended are recorded to their end. A job of `subject` is also started, if its client died before that,
    and followed until it ends; its id is returned, "" without one. Other running jobs, and those `elsewhere`, are left
    alone.
    """
    resumed = ""
    for job in lab.store.unfinished(host.name):
        mine = subject is not None and job.subject == subject
        try:
            plan = job.plan
        except SpecError as error:
            if mine:
                raise
            noted(watch)(error.message)
            continue
        status = retry.again_if_known(host, partial(host.status, job.job_id), noted(watch))
        if status.state == "absent" and (unknown := elsewhere(host, job)):
            noted(watch)(unknown)
            continue
        if mine and status.state in ("absent", "staged"):
            try:
                status = _submit(host, plan, watch)
            except JobLost as lost:  # it ran and was removed before this record saw its end
                noted(watch)(lost.message)
                record_end(lab.store, job.job_id, None)
                continue
        if mine and status.state in LIVE:
            noted(watch)(f"job {job.job_id} of this experiment {_FOLLOWING}")
        if status.state == "absent":
            if not _may_come(job):
                record_end(lab.store, job.job_id, None)
        elif status.state in ("done", "lost") or mine:
            resumed = job.job_id if mine else resumed
            _follow_quietly(lab, host, job.job_id, watch)
    return resumed


def ended(lab: Lab, text: str | None, where: str | None) -> Job | None:
    """Return the job that `find` would, if the record has its end: its host may be unknown by now."""
    job_ids = lab.store.job_ids(text) if text and where is None else []
    job = lab.store.job(job_ids[0]) if len(job_ids) == 1 else None
    return job if job and job.ended else None


def find(lab: Lab, text: str | None, where: str | None) -> tuple[Host, str]:
    """Return the host and id of the job that the user names.

    Args:
        text: A job's id, a unique prefix of it, or its alias; None for the only job that runs.
        where: Search all jobs on the host of this name, of any client; with None, search the record.

    Raises:
        UsageError: if there is no such job, or more than one.
        SpecError: if no hosts.yaml names its host.
    """
    if text is None:
        return _only_running(lab, where)
    if where is None:
        job_id = only_match(
            lab.store.job_ids(text), text, " in this record; for one that another started, add --host HOST"
        )
        job = lab.store.job(job_id)
        try:
            return lab.connect(job.host), job_id
        except SpecError as error:
            if job.state != "lost":
                raise
            message = f"the record has job {job_id} as lost, and its host cannot be asked: {error.message}"
            details = f"to ask it again: {error.next}\n{error.details}"
            raise SpecError(message, next=f"dgxlab report {job_id}", details=details) from error
    host = lab.connect(where)
    matching = matching_ids([job.job_id for job in host.jobs() if job.state != "elsewhere"], text)
    unseen = f" on host {where} below {host.entry.root}; jobs below another root or home can be named only there"
    return host, only_match(matching, text, unseen, next=f"dgxlab jobs --host {where}")


def _only_running(lab: Lab, where: str | None) -> tuple[Host, str]:
    if where is None:
        known = lab.store.unfinished()
        running = [(lab.connect(job.host), job.job_id) for job in known]
        if len(running) > 1:  # the record may not know yet that some have ended
            running = [(host, job_id) for host, job_id in running if host.status(job_id).state in LIVE]
    else:
        host = lab.connect(where)
        running = [(host, job.job_id) for job in host.jobs() if job.state in LIVE]
    if len(running) == 1:
        return running[0]
    asked = f"dgxlab jobs --host {where}" if where else "dgxlab jobs"
    if running:
        ids = "\n".join(job_id for _, job_id in running)
        raise UsageError(f"{len(running)} jobs are running: name one of them", next=asked, details=ids)
    raise UsageError("no job is running" + (f" on host {where}" if where else " that this record knows"), next=asked)


def adopt(lab: Lab, host: Host, job_id: str, watch: Watch) -> None:
    """Record that a job exists which another client started, so that it can be followed; nothing if known.

    Raises JobLost if the host does not have it, and RemoteError if its plan cannot be read.
    """
    if lab.store.find_job(job_id) is None:
        plan, text = retry.again(host, lambda: host.plan(job_id), noted(watch))
        lab.store.intend(plan, host.name, staged=text)


def join(lab: Lab, host: Host, subject: str, sides: Sequence[Side], probe: Probe, watch: Watch) -> str:
    """Follow a running job that measures the same with the same sources, of another client or believed lost.

    Returns its id once it has ended, "" if there is none.
    """
    for job_id, asked in probe.running.items():
        known = lab.store.find_job(job_id)
        if asked != subject or (known and (known.ended or known.rejected)):
            continue
        fetch = partial(host.plan, job_id)
        plan, text = (known.plan, known.plan_json) if known else retry.again(host, fetch, noted(watch))
        if [arm.source for arm in plan.arms] == [side.source for side in sides]:
            lab.store.intend(plan, host.name, staged=text)
            noted(watch)(f"job {job_id} of this experiment was started elsewhere and {_FOLLOWING}")
            _follow_quietly(lab, host, job_id, watch)
            return job_id
    return ""


def _follow_quietly(lab: Lab, host: Host, job_id: str, watch: Watch) -> None:
    """Follow an old job and record its end without raising its error: missing cells are measured next."""
    try:
        error = follow(lab, host, job_id, watch)
    except JobLost as lost:
        error = lost
    if error is not None:
        noted(watch)(f"an earlier job ended badly: {error.message}")


@contextmanager
def _interruptible(store: Store, job_id: str) -> Iterator[None]:
    """Turn Ctrl-C into Interrupted with the command to continue, once the job exists."""
    try:
        yield
    except KeyboardInterrupt:
        if store.find_job(job_id) is None:
            raise
        message = f"stopped watching; job {job_id} goes on, and dgxlab cancel {job_id} ends it"
        stopped = Interrupted(message, next=f"dgxlab attach {job_id}")
        stopped.job_id = job_id
        raise stopped from None


@contextmanager
def _waiting(store: Store, job_id: str, watch: Watch) -> Iterator[None]:
    """Wait while another program holds the record; a timeout says that the job goes on."""
    goes_on = f"job {job_id} goes on"
    try:
        with store.waiting(lambda sentence: noted(watch)(f"{sentence}: waiting for it; {goes_on}")):
            yield
    except Locked as locked:
        raise Locked(f"{locked.message}; {goes_on}", next=f"dgxlab attach {job_id}") from locked
