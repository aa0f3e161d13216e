"""Detect measured values that exceed what their GPU can do. The values are kept, and their run gets a soft flag.

The flag is not hard, since hard flags discard cycles: the agent did not have this one, and a verdict would then use
other cycles than the chain on the host. An impossible number is also no condition of the machine: it is a repeatable
mistake in the kernel or the tool.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any

from dgxlab import roofline, synth, units
from dgxlab.model import FileModel
from dgxlab.model.experiment import Recipe, root_of
from dgxlab.model.wire import decoder
from dgxlab.roofline import Peaks, Weights
from dgxlab.store import Store
from dgxlab.tools import BENCHES
from dgxlab.tools.rows import case_params

Row = Mapping[str, Any]

DEVICE = "SELECT names FROM devices JOIN arms USING (device_id) WHERE job_id = ? AND arm = ?"
MODEL = "SELECT path, recipe, contents FROM inputs WHERE job_id = ? AND model_id = ?"
CELL = "SELECT label, params FROM cells WHERE cell = ?"
RUNS = "SELECT run_id, job_id, arm, tool, model_id FROM runs ORDER BY started, run_id"
EXTREMES = """SELECT run_id, cell, metric, min(value) AS least, max(value) AS most, rows.raw
              FROM samples JOIN rows USING (run_id, cell)
              WHERE discarded IS NULL GROUP BY run_id, cell, metric ORDER BY rows.rowid, metric"""


@dataclass(frozen=True)
class Extremes:
    """Minimum and maximum of one metric of a cell in a run, of the samples that count, with the tool's own row."""

    cell: str
    metric: str
    least: float
    most: float
    raw: Row


class Guard:
    """Compares the values of runs with the peaks of their GPUs; reads each device, model and cell only once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._peaks: dict[tuple[str, ...], Peaks | None] = {}
        self._models: dict[tuple[str, str], Row] = {}
        self._cells: dict[str, tuple[str, Row]] = {}
        self._possible: dict[tuple[str, ...], float] = {}

    def implausible(self, run: Row, extremes: Iterable[Extremes]) -> str:
        """Return why a run's numbers are physically impossible; "" if they are possible or cannot be checked.

        `run` is a row of `runs`, of which job_id, arm, tool and model_id are read.
        """
        key = (run["job_id"], run["arm"], run["tool"])
        if key not in self._peaks:
            (row,) = self._store.rows(DEVICE, key[:2])
            self._peaks[key] = roofline.together(json.loads(row["names"]), alone=BENCHES[run["tool"]].one_device)
        if (peaks := self._peaks[key]) is None:
            return ""
        reasons = [why for each in extremes if (why := self._of_cell(run, each, peaks))]
        more = f"; and {len(reasons) - 1} more of this run" if len(reasons) > 1 else ""
        return reasons[0] + more if reasons else ""

    def _of_cell(self, run: Row, extremes: Extremes, peaks: Peaks) -> str:
        """Return why a cell's most demanding sample is impossible, else "": if it is possible, so are the others."""
        metric = units.metric(extremes.metric)
        value, sign = (extremes.least, -1) if metric.better == "lower" else (extremes.most, 1)
        case, kilobytes, model = (str(extremes.raw.get(name, "")) for name in ("op_params", "memory_kb", "model_type"))
        cell = (run["job_id"], run["arm"], run["tool"], run["model_id"] or "", extremes.cell, extremes.metric)
        alike = (*cell, case, kilobytes, model)
        if sign * value <= self._possible.get(alike, -math.inf):
            return ""
        if extremes.cell not in self._cells:
            (row,) = self._store.rows(CELL, (extremes.cell,))
            self._cells[extremes.cell] = row["label"], json.loads(row["params"])
        label, params = self._cells[extremes.cell]
        params = {**case_params(case), **params}
        if BENCHES[run["tool"]].one_device and not str(params.get("backend_name", "")).startswith("CUDA"):
            return ""
        moved = int(kilobytes) * 1024 if kilobytes.isdecimal() else None
        key = (run["job_id"], run["model_id"])
        if run["model_id"] and key not in self._models:
            (self._models[key],) = self._store.rows(MODEL, key)
        weights = _weights(self._models.get(key), model)
        why = roofline.implausible(metric.name, params, value, peaks, weights=weights, moved=moved)
        if not why:
            self._possible[alike] = sign * value
        return f"{label}: {why}" if why else ""


def impossible_runs(store: Store) -> Iterator[str]:
    """Yield a sentence for each run in the record with physically impossible numbers."""
    guard = Guard(store)
    decode = lru_cache(maxsize=1)(json.loads)  # the row repeats for each metric
    recorded: defaultdict[str, list[Extremes]] = defaultdict(list)
    for row in store.rows(EXTREMES):
        extremes = Extremes(row["cell"], row["metric"], row["least"], row["most"], decode(row["raw"]))
        recorded[row["run_id"]].append(extremes)
    for run in store.rows(RUNS):
        if reason := guard.implausible(run, recorded[run["run_id"]]):
            yield f"run {run['run_id']} is kept, and cannot be true: {reason}"


def _weights(model: Row | None, called: str) -> Weights | None:
    """Return the weights that every token uses: of a recipe, else by a file's header, else estimated from its name."""
    if model is None:
        return None
    if model["recipe"] is not None and (weights := _of_recipe(model["recipe"])):
        return weights
    contents = json.loads(model["contents"] or "{}")
    if contents.get("per_token") and contents["bits"]:
        number = 8 * contents["per_token"] / contents["bits"]
        if 2 * number > contents["parameters"]:  # no experts: theirs may have other bits than the file
            return Weights(number, contents["bits"], roofline.path_of(contents["type"]))
    if model["recipe"] is not None:
        return None
    name = PurePosixPath(model["path"]).name
    return roofline.weights_of(f"{name} {called}", called or name)


@lru_cache(maxsize=64)
def _of_recipe(recipe: str) -> Weights | None:
    try:
        model = decoder(Recipe)(json.loads(recipe))
    except ValueError:  # written by a dgxlab with other fields
        return None
    root, quant = root_of(model), model.quant
    if isinstance(root, FileModel):
        return None
    return Weights(float(synth.active(root)), roofline.bits_of(quant), roofline.path_of(quant))
