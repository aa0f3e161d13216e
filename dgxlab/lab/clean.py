"""List and remove files on a host. Running jobs and measurements without a copy here are kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dgxlab.errors import CheckFailed, JobLost, RemoteError, SpecError, UsageError
from dgxlab.lab import Lab, Watch, noted, raw
from dgxlab.lab.jobs import follow
from dgxlab.replies import LIVE, SHARED, Item
from dgxlab.transport.bundle import bundle
from dgxlab.transport.host import Host

_DAY_S = 86400.0


@dataclass(frozen=True)
class Candidate:
    """One item on the host, and why it is kept; "" if it is to be removed."""

    item: Item
    kept: str


@dataclass(frozen=True)
class Cleaned:
    """The items that were removed, and those that should have been but were kept."""

    removed: tuple[Item, ...]
    kept: tuple[Candidate, ...]


def survey(lab: Lab | None, host: Host, kinds: Collection[str], older_than_days: float) -> list[Candidate]:
    """Return every item on a host, and whether `clean` may remove it: one of `kinds`, not used in so many days.

    Without a record, all jobs are kept.
    """
    items = host.inventory()
    running = next((item.name for item in items if item.state in LIVE), "")

    def objection(item: Item) -> str:
        if item.kind == "sources":  # small, and needed by every build
            return "never removed"
        if item.kind not in kinds:
            return "not asked for"
        if item.kind == "jobs" and item.state not in ("done", "lost"):
            words = {"running": "it runs", "queued": "it will run", "staged": "it was never started"}
            return words.get(item.state, f"it is {item.state}")
        if item.kind in SHARED and running:
            return f"job {running} runs"
        if item.name == bundle().digest:
            return "this dgxlab's own agent"
        if item.kind != "leftovers" and item.age_s < older_than_days * _DAY_S:
            return f"used in the last {older_than_days:g} days"
        if item.kind == "jobs" and (lab is None or lab.store.find_job(item.name) is None):
            return f"this record does not know it; first: dgxlab attach {item.name} --host {host.name}"
        return ""

    return [Candidate(item, objection(item)) for item in items]


def clean(lab: Lab | None, host: Host, candidates: Sequence[Candidate], watch: Watch) -> Cleaned:
    """Remove the candidates that nothing keeps, jobs only after their journal and raw files were copied here.

    Raises HostError if the connection is lost; each item is then removed or intact, and repeating removes the rest.
    """
    chosen = {(each.item.kind, each.item.name): each.item for each in candidates if not each.kept}
    kept: dict[tuple[str, str], str] = {}
    for key, item in chosen.items():
        if lab is not None and item.kind == "jobs" and (reason := _save(lab, host, item, watch)):
            kept[key] = reason
    removal = host.remove([item for key, item in chosen.items() if key not in kept])
    kept |= {(kind, name): reason for kind, name, reason in removal.kept}
    stays = tuple(Candidate(item, kept[key]) for key, item in chosen.items() if kept.get(key))
    return Cleaned(tuple(item for key, item in chosen.items() if key in removal.removed), stays)


def _save(lab: Lab, host: Host, item: Item, watch: Watch) -> str:
    """Copy a job's journal and raw files here; return why that failed, "" on success."""
    job = lab.store.job(item.name)
    try:
        if job.journal_bytes < item.journal_bytes or not (job.ended or job.state == item.state == "lost"):
            noted(watch)(f"reading the rest of job {job.job_id}")
            with suppress(JobLost):  # its journal up to the agent's death is in the record now
                follow(lab, host, job.job_id, lambda event: None)
        raw.archive(lab, lab.store.job(job.job_id), host.name, watch)
    except (RemoteError, SpecError, UsageError, CheckFailed, JobLost) as error:
        return error.message
    return ""
