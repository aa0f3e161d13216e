"""What is on a host and what of it may be removed: nothing that runs, nothing measured that is not safe here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dgxlab.errors import CheckFailed, JobLost, RemoteError, SpecError, UsageError
from dgxlab.lab import Lab, Watch, noted, raw
from dgxlab.lab.jobs import follow
from dgxlab.replies import SHARED, Item
from dgxlab.transport.bundle import bundle
from dgxlab.transport.host import Host

DAY_S = 86400.0

RECENT = "used in the last"


@dataclass(frozen=True)
class Candidate:
    """One thing on the host, and why it stays, "" when it goes."""

    item: Item
    kept: str

    @property
    def recent(self) -> bool:
        """Whether it stays for its age alone."""
        return self.kept.startswith(RECENT)


@dataclass(frozen=True)
class Cleaned:
    """What a cleaning removed, and what was to go and stayed."""

    removed: tuple[Item, ...]
    kept: tuple[Candidate, ...]


def survey(lab: Lab | None, host: Host, kinds: Collection[str], older_than_days: float) -> list[Candidate]:
    """Return everything on the host with what becomes of it.

    Args:
        lab: The record that knows the jobs; without one every job stays.
        kinds: Kinds of things that may go.
        older_than_days: Keep what was used since then.
    """
    items = host.inventory()
    running = next((item.name for item in items if item.state == "running"), "")

    def objection(item: Item) -> str:
        if item.kind == "sources":  # small, and what every build starts from
            return "never removed"
        if item.kind not in kinds:
            return "not asked for"
        if item.kind == "jobs" and item.state not in ("done", "lost"):
            return {"running": "it runs", "staged": "it was never started"}.get(item.state, f"it is {item.state}")
        if item.kind in SHARED and running:
            return f"job {running} runs"
        if item.name == bundle().digest:
            return "this dgxlab's own agent"
        if item.kind != "leftovers" and item.age_s < older_than_days * DAY_S:
            return f"{RECENT} {older_than_days:g} days"
        if item.kind == "jobs" and (lab is None or lab.store.find_job(item.name) is None):
            return f"this record does not know it; first: dgxlab attach {item.name} --host {host.name}"
        return ""

    return [Candidate(item, objection(item)) for item in items]


def clean(lab: Lab | None, host: Host, candidates: Sequence[Candidate], watch: Watch) -> Cleaned:
    """Remove what goes; a job only once this record has all that it wrote, and its raw files are here.

    Raises:
        HostError: if the host is lost on the way; what was removed is whole, and the same again removes the rest.
    """
    chosen = [candidate.item for candidate in candidates if not candidate.kept]
    kept: dict[tuple[str, str], str] = {}
    if lab is not None:
        kept = {("jobs", item.name): _save(lab, host, item, watch) for item in chosen if item.kind == "jobs"}
    removal = host.remove([item for item in chosen if not kept.get(_key(item))])
    kept |= {(kind, name): reason for kind, name, reason in removal.kept}
    return Cleaned(
        tuple(item for item in chosen if _key(item) in removal.removed),
        tuple(Candidate(item, kept[_key(item)]) for item in chosen if kept.get(_key(item))),
    )


def _key(item: Item) -> tuple[str, str]:
    return item.kind, item.name


def _save(lab: Lab, host: Host, item: Item, watch: Watch) -> str:
    """Bring all that a job wrote here; return why that cannot be done, "" when it is done.

    Raises:
        HostError: if the host is gone.
    """
    job = lab.store.job(item.name)
    try:
        if job.journal_bytes < item.journal_bytes or not (job.ended or job.state == item.state == "lost"):
            noted(watch)(f"reading the rest of job {job.job_id}")
            with suppress(JobLost):  # what it wrote before its agent died is in the record now
                follow(lab, host, job.job_id, lambda event: None)
        raw.kept(lab, lab.store.job(job.job_id), host.name, watch)
    except (RemoteError, SpecError, UsageError, CheckFailed, JobLost) as error:
        return error.message
    return ""
