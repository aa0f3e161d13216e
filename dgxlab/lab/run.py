"""`run`: build, gate and measure what is not up to date, and record it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgxlab import series
from dgxlab.errors import DgxlabError
from dgxlab.lab.base import Lab, Side, Watch
from dgxlab.lab.jobs import carry_out, join, settle
from dgxlab.lab.provision import prepare
from dgxlab.lab.todo import device_of, left_to_do, make_plan
from dgxlab.model import WAIT_S, Device, Experiment, Source


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        job_id: The last job that ran, "" when everything was up to date.
        planned: Cells that the experiment names.
        reused: Those that needed no measuring.
        source: The tree that it was about.
        device: What it was about.
        measured: Cells that have a valid run from this job.
        error: What went wrong, None when nothing did; what was measured before it is in the store.
    """

    job_id: str
    planned: int
    reused: int
    source: Source
    device: Device
    measured: int = 0
    error: DgxlabError | None = None


def run(
    lab: Lab,
    experiment: Experiment,
    *,
    watch: Watch,
    again: bool = False,
    tree: Path | None = None,
    bench: bool = True,
    wait_s: float = WAIT_S,
) -> Outcome:
    """Build, gate and measure what is not up to date, and record it.

    Args:
        again: Measure everything, up to date or not.
        tree: A llama.cpp checkout to build instead of the experiment's series; its results are marked dirty.
        bench: False for the gates alone, which then always run.
        wait_s: How long the job may wait for its devices, 0 for not at all.

    Raises:
        DgxlabError: for whatever ends it before a job runs; what a job itself reports is in the outcome.
        Interrupted: on Ctrl-C while a job runs; the job goes on.
    """
    host = lab.connect(experiment.host)  # a name that nobody knows is told before anything is fetched
    source = resolve(lab, experiment, tree, watch)
    side = Side(experiment, source)
    resumed = settle(lab, host, experiment.digest, watch)
    probe = prepare(host, [side], watch)
    todo = left_to_do(lab.store, side, probe, again=again and not resumed, bench=bench)
    if bench and not todo.nothing and not resumed:
        resumed = join(lab, host, experiment.digest, [source], probe, watch, of=[experiment])
        todo = left_to_do(lab.store, side, probe) if resumed else todo
    reused, device = todo.planned - len(todo.cells), device_of(experiment, source, probe)
    if todo.nothing:
        return Outcome(resumed, todo.planned, reused, source, device)
    job = make_plan(lab.store, side, todo, probe, bench=bench, wait_s=wait_s)
    measured: set[tuple[str, str]] = set()
    error = carry_out(lab, host, job, probe, _noting(measured, watch), of=[experiment])
    return Outcome(job.job_id, todo.planned, reused, source, device, len(measured), error)


def _noting(measured: set[tuple[str, str]], watch: Watch) -> Watch:
    """Return a watch that also notes every cell that gets a valid run, once though it be repeated."""

    def see(event: Mapping[str, Any]) -> None:
        if event["event"] == "run" and event["status"] == "valid":
            measured.update((event["id"], result["cell"]) for result in event["results"])
        watch(event)

    return see


def resolve(lab: Lab, experiment: Experiment, tree: Path | None, watch: Watch) -> Source:
    """Return the tree to build, made in the client's cache before any network call to the host.

    Raises:
        SpecError: if no source has the pin.
        PatchError: if the series does not apply to it.
    """
    lab.cache.ensure(experiment.pin, experiment.sources, lambda note: watch(_told(note)))
    if tree is not None:
        return series.apply_tree(lab.cache, experiment.pin, tree)
    root = Path(experiment.root)
    return series.apply(lab.cache, experiment.pin, [series.read(root, name) for name in experiment.series])


def _told(note: str) -> dict[str, Any]:
    """Return what git says: a sentence is a note, a percentage moves the bar."""
    if "%" in note:
        return {"event": "progress", "id": "pin", "done": 0, "total": 0, "note": note}
    return {"event": "note", "note": note}
