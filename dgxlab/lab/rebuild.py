"""Rebuild a record from the folders of jobs on hosts, and from the archives of raw files here.

Both have all that the record has of a job (plan, journal, final status), except the time at which it was intended.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from dgxlab import audit
from dgxlab.errors import CheckFailed, DgxlabError, HostError, JobLost, SpecError, command, one_line
from dgxlab.ingest import ingest
from dgxlab.lab import Lab, Watch, noted, raw
from dgxlab.lab.jobs import adopt, follow, record_end
from dgxlab.lab.raw import SUFFIX, content, listing, read_final_status
from dgxlab.model import events
from dgxlab.replies import LIVE, SLURMS_WORD
from dgxlab.store import Damaged, Store, copies
from dgxlab.transport import retry
from dgxlab.transport.host import Host, read_plan


@dataclass(frozen=True)
class Rebuilt:
    """The result of a rebuild: ids of the added jobs, and (id, reason) of those that could not be added."""

    added: tuple[str, ...]
    left: tuple[tuple[str, str], ...]


def mend(path: Path, note: Callable[[str], None]) -> None:
    """Replace a damaged or missing database by its newest sound copy; a damaged one is renamed and kept.

    Raises SpecError if it cannot be opened for a reason other than its content, or its folder is not writable.
    """
    wrong = _wrong(path) if path.exists() else ""
    if path.exists() and not wrong:
        return
    try:
        with TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
            # copy the copies: opening one migrates it to the current schema
            candidates = (Path(shutil.copy(copy, folder)) for copy in reversed(copies(path)))
            sound = next((copy for copy in candidates if not _wrong(copy)), None)
            if wrong:
                aside = path.with_name(f"{path.name}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")
                for suffix in ("", "-wal", "-shm"):
                    with suppress(FileNotFoundError):
                        Path(f"{path}{suffix}").rename(f"{aside}{suffix}")
                note(f"{wrong}; it is now {aside}")
            if sound:
                sound.rename(path)
                note(f"{path} begins with its newest sound copy, {sound.name}")
    except OSError as error:
        raise SpecError(f"{path} cannot be made again: {error}", next=command("df", path.parent)) from error


def _wrong(path: Path) -> str:
    try:
        with Store.open(path, create=False) as store:
            problems = audit.check(store)
    except Damaged as error:
        return error.message
    return f"{path} is not sound: {problems[0]}" if problems else ""


def rebuild(lab: Lab, hosts: Sequence[Host], watch: Watch) -> Rebuilt:
    """Add every job whose end is not in the record, from its archive here or from the hosts.

    Existing rows are unchanged, so an interrupted rebuild can be repeated to continue. Raises HostError if a host
    cannot be reached.
    """
    left: dict[str, str] = {}
    added: list[str] = []
    for path in sorted(lab.raw.glob(f"*{SUFFIX}")):
        job_id = path.name.removesuffix(SUFFIX)
        if _settled(lab, job_id):
            continue
        try:
            _from_archive(lab, job_id, path, watch)
        except DgxlabError as error:
            left[job_id] = error.message
        else:
            added.append(job_id)
    # hosts come last: the files here were checked when fetched, the host's may have been damaged since
    for host in hosts:
        for there in retry.again_if_known(host, host.jobs, noted(watch)):
            # nothing was measured, or everything is recorded
            if there.state in ("absent", "staged") or _settled(lab, there.job_id):
                continue
            try:
                adopt(lab, host, there.job_id, watch)
                if there.state not in LIVE:  # do not wait for a running job: `jobs` and `attach` know it now
                    with suppress(JobLost):  # its journal up to the agent's death is in the record now
                        follow(lab, host, there.job_id, watch)
                _credit(lab, there.job_id)
            except HostError:
                raise
            except DgxlabError as error:
                left[there.job_id] = error.message
            else:
                added.append(there.job_id)
                left.pop(there.job_id, None)
    return Rebuilt(tuple(added), tuple(left.items()))


def _settled(lab: Lab, job_id: str) -> bool:
    job = lab.store.find_job(job_id)
    return job is not None and (job.ended or job.state == "lost" or bool(job.rejected))


def _from_archive(lab: Lab, job_id: str, path: Path, watch: Watch) -> None:
    """Record a job from its raw files, completely or not at all."""
    files = listing(path)
    text, journal = content(path, "plan.json"), content(path, "journal.jsonl")
    try:
        plan, rc = read_plan(json.loads(text)), read_final_status(content(path, "rc")) if "rc" in files else None
        word = content(path, SLURMS_WORD) if SLURMS_WORD in files else b""
        if plan.specs:
            host = str(plan.specs[0]["host"])
        else:  # the plan lacks the client's name of the host: use the host's own name
            first = events.read(json.loads(journal.partition(b"\n")[0]))
            if not isinstance(first, events.JobEvent):
                raise ValueError("its journal does not begin with the job")
            host = first.facts.hostname
        if plan.job_id != job_id:
            raise ValueError(f"they are of job {plan.job_id!r}")
    except (ValueError, LookupError, RecursionError) as error:
        raise CheckFailed(f"{path} holds no job of this dgxlab: {error}", next=command("ls", "-l", path)) from error
    with lab.store.transaction():
        lab.store.intend(plan, host, staged=text.decode())
        ingest(lab.store, job_id, journal.splitlines(keepends=True))
        record_end(lab.store, job_id, rc, one_line(word.decode(errors="replace"), 300))
        _credit(lab, job_id)
        raw.archive(lab, lab.store.job(job_id), None, watch)


def _credit(lab: Lab, job_id: str) -> None:
    """Record which dgxlab started a job: the version that sent its agent."""
    if version := lab.store.job(job_id).agent_version:
        lab.store.update_job(job_id, dgxlab_version=version)
