"""Which measured values cannot be true on the GPU that they were measured on: they are kept, and their run is flagged.

The flag is soft. What a chain makes of a run is decided on the host while it goes on, by the hard flags that are known
there: one that came later would let a verdict count other cycles than the chain did. An impossible number is no
condition of the machine either; it is a mistake somewhere between the kernel and the tool's last line, and repeats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any

from dgxlab import roofline, synth, units
from dgxlab.agent.parse.backend_ops import case_params
from dgxlab.model import SyntheticModel
from dgxlab.roofline import Peaks, Weights
from dgxlab.store import Store

Row = Mapping[str, Any]

ROOFLINE = "roofline"
"""The flag's kind."""

RUNS = "SELECT run_id, job_id, arm, tool, model_id FROM runs ORDER BY started, run_id"

MACHINE = "SELECT jobs.facts, arms.cmake FROM jobs JOIN arms USING (job_id) WHERE job_id = ? AND arm = ?"

MODEL = "SELECT path, recipe FROM inputs WHERE job_id = ? AND model_id = ?"

EXTREMES = """SELECT cells.label, cells.params, rows.raw, metric, min(value) AS least, max(value) AS most
              FROM samples JOIN rows USING (run_id, cell) JOIN cells USING (cell)
              WHERE run_id = ? AND discarded IS NULL GROUP BY cell, metric ORDER BY rows.rowid, metric"""


class Guard:
    """Judges runs of a store; what many of them share is looked up once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._peaks: dict[tuple[str, ...], Peaks | None] = {}
        self._models: dict[tuple[str, str], Row] = {}

    def excess(self, run: Row) -> str:
        """Say why numbers of a run cannot be true; "" where nothing speaks against them.

        Args:
            run: Its run_id, job_id, arm, tool and model_id; it is in the store already.
        """
        peaks = self._peaks_of(run)
        if peaks is None:
            return ""
        rows = self._store.rows(EXTREMES, (run["run_id"],))
        found = [why for row in rows if (why := self._of_cell(run, row, peaks))]
        more = f"; and {len(found) - 1} more of this run" if len(found) > 1 else ""
        return found[0] + more if found else ""

    def _of_cell(self, run: Row, row: Row, peaks: Peaks) -> str:
        """Judge the sample of a cell that asks most of the GPU; a metric or a column of a newer agent says nothing."""
        metric, raw = units.METRICS.get(row["metric"]), json.loads(row["raw"])
        params = {**case_params(str(raw.get("op_params", ""))), **json.loads(row["params"])}
        elsewhere = run["tool"] == "backend-ops" and not str(params.get("backend_name", "")).startswith("CUDA")
        if metric is None or elsewhere:
            return ""
        value = row["least" if metric.better == "lower" else "most"]
        counted = str(raw.get("memory_kb", ""))
        moved = int(counted) * 1024 if counted.isdecimal() else None
        weights = _weights(self._model_of(run), raw)
        why = roofline.excess(metric.name, params, value, peaks, weights=weights, moved=moved)
        return f"{row['label']}: {why}" if why else ""

    def _peaks_of(self, run: Row) -> Peaks | None:
        key = (run["job_id"], run["arm"], run["tool"])
        if key not in self._peaks:
            (found,) = self._store.rows(MACHINE, key[:2])
            self._peaks[key] = _peaks(found, alone=run["tool"] == "backend-ops")
        return self._peaks[key]

    def _model_of(self, run: Row) -> Row | None:
        key = (run["job_id"], run["model_id"])
        if run["model_id"] and key not in self._models:
            (self._models[key],) = self._store.rows(MODEL, key)
        return self._models.get(key)


def beyond(store: Store) -> Iterator[str]:
    """Yield a sentence for each run in the record whose numbers cannot be true."""
    guard = Guard(store)
    for run in store.rows(RUNS):
        if reason := guard.excess(run):
            yield f"run {run['run_id']} is kept, and cannot be true: {reason}"


def _peaks(machine: Row, *, alone: bool) -> Peaks | None:
    """Return what a run's GPUs reach together; None for a build without CUDA, and where one of them is not known.

    Args:
        machine: A job's facts, and the cmake definitions of an arm.
        alone: Whether it has one of them: an operation has, a model may have been spread over all.
    """
    if json.loads(machine["cmake"]).get("GGML_CUDA") != "ON" or machine["facts"] is None:
        return None
    gpus = json.loads(machine["facts"]).get("details", {}).get("gpus", [])
    first, *others = [roofline.peaks(gpu.get("name") or "") for gpu in gpus] or [None]
    if first is None or any(other != first for other in others):
        return None
    return first if alone else first.times(len(gpus))


def _weights(model: Row | None, raw: Row) -> Weights | None:
    """Return what every token passes through, as far as it is known: of a recipe exactly, of a file by its names.

    Embeddings and output of a recipe are left out: a prompt looks the ones up, and needs the others once.
    """
    if model is None:
        return None
    if model["recipe"] is not None:
        return _of_recipe(model["recipe"])
    name, said = PurePosixPath(model["path"]).name, str(raw.get("model_type", ""))
    return roofline.weights_of(f"{name} {said}", said or name)


@lru_cache(maxsize=64)
def _of_recipe(recipe: str) -> Weights | None:
    try:
        model = SyntheticModel(**json.loads(recipe))
    except TypeError:  # of a dgxlab with other fields
        return None
    sizes = [tensor.size for tensor in synth.tensors(model) if tensor.name.startswith("blk.") and len(tensor.shape) > 1]
    return Weights(float(sum(sizes)), roofline.bits_of(model.quant), roofline.path_of(model.quant))
