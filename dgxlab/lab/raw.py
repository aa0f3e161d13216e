"""What a job's programs printed, byte for byte: fetched when the job has ended, checked against the record, kept."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from dgxlab.agent.job import final_status
from dgxlab.errors import CheckFailed, DgxlabError, UsageError, command
from dgxlab.lab.archive import RawFile, content, incoming, listing, path_of
from dgxlab.lab.base import Lab, Watch, noted
from dgxlab.model import CheckStep, about, events, from_json
from dgxlab.model.events import FinalStatus
from dgxlab.store import Job, Store
from dgxlab.transport import retry
from dgxlab.transport.host import Host
from dgxlab.units import size

AT_ONCE = 64 << 20
"""Raw files of up to so many bytes come when their job ends; larger ones when somebody asks for them."""

PAUSES_S = (1.0, 2.0, 4.0)
"""Pauses between attempts: shorter than for a job, whose results would be missing."""

WHOLE_JOB = {
    "plan.json": "the plan",
    "journal.jsonl": "every event",
    "rc": "the final status",
    "agent.err": "the agent's stderr",
    "raw/telemetry-host.jsonl": "the host's condition, twice a second",
    "raw/telemetry-gpu.csv": "the GPUs' condition, twice a second",
}
STREAMS = {".out": "stdout", ".err": "stderr", ".log": "output", ".txt": "text"}


def keep(lab: Lab, host: Host, job_id: str, watch: Watch) -> None:
    """Fetch what is not kept yet of a job that has ended, unless it is large.

    Whatever goes wrong is a note: the results are recorded. So is Ctrl-C, which must not say that the job goes on.
    """
    if path_of(lab.raw, job_id).exists():
        return
    try:
        _fetch(lab, host, lab.store.job(job_id), watch, AT_ONCE)
    except (DgxlabError, KeyboardInterrupt) as error:
        why = error.message if isinstance(error, DgxlabError) else "interrupted"
        noted(watch)(f"the raw files of job {job_id} stay on {host.name} ({why}); to fetch them: dgxlab logs {job_id}")


def kept(lab: Lab, job: Job, where: str | None, watch: Watch) -> tuple[Path, dict[str, RawFile]]:
    """Return a job's archive and the files in it by path, fetched first where they are not here; always checked.

    Args:
        where: The host, where it has another name here than in the record.

    Raises:
        UsageError: if the job has not ended, as far as the record knows.
        JobLost: if the host has it no more.
        CheckFailed: if a file is not what was recorded.
    """
    path = path_of(lab.raw, job.job_id)
    if path.exists():
        return path, _checked(lab.store, job, path, command("rm", path))
    if not job.ended and job.state != "lost":
        raise UsageError(f"job {job.job_id} has not ended in this record", next=f"dgxlab attach {job.job_id}")
    host = lab.connect(where or job.host)
    noted(watch)(f"fetching the raw files of job {job.job_id} from {host.name}")
    return path, _fetch(lab, host, job, watch)


def describe(job: Job, path: str) -> str:
    """Return what a raw file is: `run:3 llama-bench stdout`."""
    name = PurePosixPath(path)
    steps = {str(step["id"]).replace(":", "-"): step for step in json.loads(job.plan_json)["steps"]}
    stems = [stem for stem in steps if name.stem == stem or name.stem.startswith(f"{stem}-")]
    if not stems or name.suffix not in STREAMS:
        return WHOLE_JOB.get(path, "")
    stem = max(stems, key=len)
    words = (*_step(steps[stem]), name.stem[len(stem) + 1 :], STREAMS[name.suffix])
    return " ".join(filter(None, words))


def _step(step: Mapping[str, Any]) -> tuple[str, ...]:
    if step["kind"] == "gate":
        return step["id"], step["gate"]["op"], step["gate"]["backend"]
    if step["kind"] == "check":
        return step["id"], about(from_json(CheckStep, step).gate)
    return step["id"], step.get("tool", "")


def _fetch(lab: Lab, host: Host, job: Job, watch: Watch, limit: int = sys.maxsize) -> dict[str, RawFile]:
    """Fetch in one round trip, more where the connection is cut; nothing is kept that was not checked."""

    def attempt() -> dict[str, RawFile]:
        with incoming(path_of(lab.raw, job.job_id)) as part:
            told = host.raw(job.job_id, limit, part.write)
            if told.size > limit:
                raise UsageError(f"they are {size(told.size)}")
            part.flush()
            why = host.entry.typed(command("ls", "-lR", f"{host.transport.root}/jobs/{job.job_id}"))
            return _checked(lab.store, job, Path(part.name), why, told.at_most)

    return retry.again(host, attempt, noted(watch), PAUSES_S)


def _checked(store: Store, job: Job, path: Path, next: str, at_most: int = sys.maxsize) -> dict[str, RawFile]:
    """Return the files of an archive.

    Raises:
        CheckFailed: if one is not what was recorded, or missing; names it.
    """
    files = listing(path, at_most)
    _compare(job, files, _recorded(store, job), next)
    if "rc" in files:
        try:
            for known in (_final, _ending):
                _compare(job, files, known(path), next)
        except (ValueError, RecursionError) as error:
            raise CheckFailed(f"rc of job {job.job_id} or its journal cannot be read: {error}", next=next) from error
    elif job.ended:
        raise CheckFailed(f"rc of job {job.job_id} is missing", next=next)
    return files


def _compare(job: Job, files: Mapping[str, RawFile], known: Mapping[str, str], next: str) -> None:
    for name, sha256 in known.items():
        found = files[name].sha256 if name in files else "missing"
        if found != sha256:
            raise CheckFailed(
                f"{name} of job {job.job_id} is not what was recorded: its sha256 is {found[:16]}, not {sha256[:16]}",
                next=next,
            )


def _recorded(store: Store, job: Job) -> dict[str, str]:
    """Return the sha256 of every file that the record knows: the output of gates and runs, and the plan."""
    found = store.rows(
        "SELECT raw FROM runs WHERE job_id = :job UNION ALL SELECT raw FROM gates WHERE job_id = :job"
        " UNION ALL SELECT raw FROM checks WHERE job_id = :job",
        {"job": job.job_id},
    )
    streams = [stream for row in found for stream in json.loads(row["raw"]).values()]
    plan = hashlib.sha256(job.plan_json.encode()).hexdigest()
    return {"plan.json": plan, **{stream["path"]: stream["sha256"] for stream in streams}}


def final_word(content: bytes) -> FinalStatus:
    """Return what a job's rc says.

    Raises:
        ValueError: if it is no final status, or was damaged.
    """
    if (told := final_status(content)) is None:
        raise ValueError("it is no final status, or was damaged")
    return from_json(FinalStatus, told)


def _final(path: Path) -> dict[str, str]:
    """Return the journal's sha256 as the job's last word has it."""
    sha256 = final_word(content(path, "rc"))["journal_sha256"]
    return {"journal.jsonl": sha256} if sha256 else {}


def _ending(path: Path) -> Mapping[str, str]:
    """Return the sha256 of each raw file as the last line of the journal has it; older agents wrote none."""
    whole, _, _ = content(path, "journal.jsonl").rpartition(b"\n")  # a full disk tore the last line of older agents
    *_, last = whole.splitlines() or [b""]
    found: Mapping[str, str] = events.read(json.loads(last)).get("raw", {}) if last else {}
    return found
