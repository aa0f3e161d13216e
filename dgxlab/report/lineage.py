"""Where numbers come from, in full: the source, the build, the machine and the inputs of each experiment."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dgxlab import units
from dgxlab.errors import UsageError
from dgxlab.model import SESSIONS
from dgxlab.report import ask as asking
from dgxlab.report.evidence import machine
from dgxlab.report.numbers import Value
from dgxlab.report.query import Query
from dgxlab.report.records import ArmsTable, Column, Origin, Provenance
from dgxlab.report.session import WORDS
from dgxlab.report.tables import backend_of

if TYPE_CHECKING:
    from dgxlab.store import Job, Store

TOOLS = ("cc", "cxx", "cmake", "nvcc", "machine")
"""What of a toolchain is said, in this order."""

BUILT = """SELECT arms.*, jobs.job_id AS job FROM arms JOIN jobs USING (job_id)
           WHERE job_id = ? AND (? = '' OR arm = ?) ORDER BY arm"""


def lineage(store: Store, wanted: Query) -> ArmsTable:
    """Return a column for each experiment, of its newest session or of the sessions that are named.

    Raises:
        UsageError: if one of them built nothing.
    """
    found: list[tuple[Job, Mapping[str, Any]]] = []
    for name in wanted.experiment:
        ask = asking.of_arm(store, name, wanted.host)
        assert ask.job is not None  # its newest session
        found += [(ask.job, row) for row in _built(store, ask.job, name)]
    for session in wanted.session:
        job = store.job(session)
        found += [(job, row) for row in _built(store, job)]
    names = [row["arm"] for _, row in found]
    labels = [
        name if names.count(name) == 1 else f"{name} in {job.job_id}"
        for name, (job, _) in zip(names, found, strict=True)
    ]
    origins = tuple(
        Origin(label, origin(store, job, row["arm"])) for label, (job, row) in zip(labels, found, strict=True)
    )
    facts = [dict(_facts(store, job, row)) for job, row in found]
    rows: list[dict[str, Value]] = []
    for what in dict.fromkeys(what for one in facts for what in one):
        values = {f"arm.{number}": one.get(what) for number, one in enumerate(facts)}
        if any(values.values()):
            rows.append({"what": what, **values})
    columns = (Column("what", "what"), *(Column(f"arm.{number}", label) for number, label in enumerate(labels)))
    return ArmsTable("provenance", "Provenance", columns, tuple(rows), origins[0].provenance, origins=origins)


def _built(store: Store, job: Job, name: str = "") -> list[dict[str, Any]]:
    found = store.rows(BUILT, (job.job_id, name, name))
    if not found:
        raise UsageError(f"session {job.job_id} has built nothing", next=f"dgxlab report {job.job_id}")
    return found


def origin(store: Store, job: Job, name: str) -> Provenance:
    """Return one arm's side of a session, from its plan; a build that never was has no id."""
    arm = asking.plan_of(job).arm(name)
    source = arm.source
    built = store.rows("SELECT build_id FROM arms WHERE job_id = ? AND arm = ?", (job.job_id, name))
    device = store.devices(job.job_id).get(name)
    return Provenance(
        name,
        (job.job_id,),
        source.pin,
        source.series,
        source.tree,
        built[0]["build_id"] if built else None,
        machine(job, device),
        source.dirty,
        device=device,
        backend=backend_of(arm.cmake, ()),
    )


def _facts(store: Store, job: Job, row: Mapping[str, Any]) -> Iterable[tuple[str, Value]]:
    """Yield everything that is known, an empty value for what is not."""
    source, cmake, tools = (
        asking.plan_of(job).arm(row["arm"]).source,
        json.loads(row["cmake"]),
        json.loads(row["toolchain"]),
    )
    yield "session", job.job_id
    yield "kind", WORDS.get(job.kind, job.kind) if job.kind in SESSIONS else job.kind
    yield "ended", job.state
    yield "pin", row["pin"]
    yield "tree", row["tree"]
    yield "commit", row["commit_id"]
    yield "series", ", ".join(f"{ref.name}@{ref.digest}" for ref in source.series) or "none"
    yield "dirty", "yes, somebody's checkout" if row["dirty"] else "no"
    yield "build", row["build_id"]
    yield "cmake definitions", " ".join(f"{name}={value}" for name, value in sorted(cmake.items()))
    for tool in TOOLS:
        yield tool, tools.get(tool, "")
    for program, digest in sorted(json.loads(row["binaries"]).items()):
        yield f"sha256 of {program}", digest
    yield "host", machine(job, store.devices(job.job_id).get(row["arm"]))
    yield from _machine(job)
    for model in store.rows("SELECT * FROM inputs WHERE job_id = ? ORDER BY name, model_id", (job.job_id,)):
        how = "synthetic, recipe" if model["recipe"] else "file"
        yield f"model {model['name']}", f"{how} {model['model_id']}, {units.size(model['size'])}, {model['digest']}"
    yield "dgxlab", job.dgxlab_version
    yield "agent", job.agent_version
    yield "protocol", job.protocol


def _machine(job: Job) -> Iterable[tuple[str, Value]]:
    details: Mapping[str, Any] = (job.facts or {}).get("details", {})
    driver = details.get("driver", {})
    memory = details.get("memory_mib")
    yield "os", ", ".join(filter(None, (details.get("os"), details.get("kernel"))))
    yield "processor", details.get("cpu")
    yield "memory", None if memory is None else units.size(memory << 20)
    yield (
        "GPU",
        ", ".join(f"{gpu['name']} (sm {gpu.get('compute_cap')})" for gpu in details.get("gpus", []) if gpu.get("name")),
    )
    yield "driver", ", CUDA ".join(filter(None, (driver.get("version"), driver.get("cuda"))))
