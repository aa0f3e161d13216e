"""Sessions to report on: real plans, carried out by replaying what the tools printed on an H200."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dgxlab import plan as planning
from dgxlab.chains import comparisons
from dgxlab.ingest import ingest
from dgxlab.model import (
    BASELINE,
    BURN_IN,
    CANDIDATE,
    PROTOCOL,
    Cell,
    CellResult,
    ChainStep,
    Expectation,
    Experiment,
    Facts,
    FileModel,
    GateStep,
    Measurement,
    ModelStep,
    Noise,
    ParityGate,
    Plan,
    RunStep,
    Source,
    SyntheticModel,
    digest,
    model_id,
    to_json,
)
from dgxlab.model import Session as SessionSpec
from dgxlab.store import Store
from dgxlab.tools import BENCHES, BackendOpsBench, BatchedBench, LlamaBench
from dgxlab.tools.parity import read_gate
from dgxlab.units import metric
from tests.journals import PIN, Journal, facts, source

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "h200"
GPU = {
    "index": "0",
    "uuid": "GPU-1a69cc14-368f-55e1-37d3-65d35bcf62fe",
    "name": "NVIDIA H200",
    "driver_version": "580.159.04",
    "compute_cap": "9.0",
}
H200 = replace(facts("host-h200", "h200-7"), details={"cpu": "Xeon", "cpus": 16, "gpus": [GPU]})
RECIPE = SyntheticModel(n_layer=8, n_embd=4096, n_ff=14336, n_head=32, n_head_kv=8, n_vocab=32000, quant="Q4_K")

WRITE = os.environ.get("GOLDEN") == "write"


def agrees(text: str, path: Path) -> bool:
    """Compare with a golden file; `GOLDEN=write pytest tests/report tests/published` writes them, to be read."""
    if WRITE:
        path.write_text(text)
    return text == path.read_text()


Tool = Callable[[RunStep], tuple[CellResult, ...]]


CYCLES = 9
"""Cycles of a chain: enough for the claims of a whole session, although two do not count."""


def h200(**changes: Any) -> Experiment:
    """Return the experiment whose output golden/h200 holds: gate, op shapes, single stream, concurrency."""
    fields: dict[str, Any] = {
        "name": "h200",
        "hypothesis": "stock MMQ is bound by weights up to n=8",
        "pin": PIN,
        "path": "/lab/experiments/h200.yaml",
        "root": "/lab",
        "host": "h200",
        "sources": ("https://github.com/ggml-org/llama.cpp",),
        "cmake": {"GGML_CUDA": "ON", "CMAKE_CUDA_ARCHITECTURES": "90"},
        "models": {"q4k": RECIPE},
        "gates": (ParityGate("MUL_MAT", "CUDA0", Expectation(1103, 1103), 306),),
        "bench": (
            BackendOpsBench(
                "MUL_MAT", "CUDA0", {"type_a": ("q4_0", "q4_K"), "m": (4096,), "n": (1, 8, 512), "k": (14336,)}
            ),
            LlamaBench("q4k", (512, 2048), (32,), {"n_ubatch": (2048,)}, repetitions=4),
            BatchedBench("q4k", (128,), (64,), (8, 32, 64), {"n_ubatch": (2048,)}),
        ),
    }
    return Experiment(**{**fields, **changes})


def capture(step: RunStep) -> tuple[CellResult, ...]:
    """Return what the real parser reads for a step from the real capture."""
    files = {
        "backend-ops": "tbo-perf-mul_mat.sql",
        "llama-bench": "llama-bench-q4_k.jsonl",
        "batched-bench": "batched-bench-q4_k.jsonl",
    }
    text = (GOLDEN / files[step.tool]).read_text()
    if step.tool == "batched-bench":  # captured once, behind another row: as if the second time were like the first
        text = 2 * text.partition("\n")[2]
    parsed = BENCHES[step.tool].parse(text, step.cells)
    assert parsed.problems == ()
    return parsed.results


def numbers(value: float = 100.0, samples: int = 1) -> Tool:
    """Return a tool that gives every cell the same values of its tool's first metric."""
    metrics = {"backend-ops": ("time_us", "us"), "llama-bench": ("avg_ts", "t/s"), "batched-bench": ("speed_pp", "t/s")}

    def tool(step: RunStep) -> tuple[CellResult, ...]:
        metric, unit = metrics[step.tool]
        values = tuple(value + i for i in range(samples))
        return tuple(CellResult(c.key, (Measurement(c.key, metric, unit, values),), {"at": value}) for c in step.cells)

    return tool


def fails(reason: str, status: str = "failed") -> Callable[[RunStep], tuple[str, str]]:
    return lambda step: (status, reason)


def valid(step: RunStep) -> tuple[str, str]:
    return "valid", ""


def places(cycles: int) -> list[tuple[str, int]]:
    """Return the places of a chain in their order, after a burn-in of two."""
    turns = [place for cycle in range(1, cycles + 1) for place in ((CANDIDATE, cycle), (BASELINE, cycle))]
    return [(BURN_IN, 1), (BURN_IN, 2), (BASELINE, 0), *turns]


def session_of_two(
    store: Store,
    job_id: str,
    *,
    kind: str = "ab",
    noise: float | None = None,
    dirty: bool = False,
    candidate: Mapping[str, Any] | None = None,
    host: Facts = H200,
    protocol: int = PROTOCOL,
    **changes: Any,
) -> Session:
    """Begin a session of w4a16, a series with its own flags and environment, against stock h200; or of h200 alone.

    `noise` is the floor of every cell, `candidate` what else differs in it, `dirty` says that it is a checkout.
    """
    stock = h200(**{"session": SessionSpec(cycles=CYCLES), **changes})
    other, trees = stock, (source(), source())
    if kind != "noise":
        cmake, env = {**stock.cmake, "GGML_CUDA_FA": "OFF"}, {"GGML_CUDA_W4A16": "1"}
        other = replace(stock, name="w4a16", hypothesis="tiles beat MMQ", series=("w4a16",), cmake=cmake, env=env)
        other, trees = replace(other, **(candidate or {})), (source(), source(["w4a16"], dirty=dirty))
    plan = planning.make_ab(stock, other, trees, job_id=job_id, kind=kind)
    steps = list(plan.steps)
    for place, step in enumerate(steps):
        if isinstance(step, ChainStep) and noise:
            known = [Noise(each.baseline, each.metric, noise, 8, "20261101-090000-noise") for each in comparisons(step)]
            steps[place] = replace(step, noise=tuple(known))
    return Session(store, other, job_id, host=host, plan=replace(plan, steps=tuple(steps), protocol=protocol))


class Session:
    """A job made by the real planner, its journal written step by step."""

    def __init__(
        self,
        store: Store,
        experiment: Experiment,
        job_id: str,
        *,
        tree: Source | None = None,
        host: Facts = H200,
        host_name: str = "h200",
        wanted: Callable[[str, Mapping[str, str], Cell], bool] = lambda model, env, cell: True,
        plan: Plan | None = None,
    ) -> None:
        self.store = store
        self.plan = plan or planning.make(experiment, tree or source(), job_id=job_id, wanted=wanted)
        store.intend(self.plan, host_name, "0.1.0")
        # sessions later in the alphabet are later in time, also in the clock that tells which is newest
        at = 1_763_640_000.0 + 100_000 * sum(ord(c) for c in job_id)
        store.update_job(job_id, intent_at=at)
        self.journal = Journal(self.plan, host, at)
        self.journal.job()

    def build(self, **model: Any) -> Session:
        """Every arm has its build, every model is there, with these changes."""
        for arm in self.plan.arms:
            self.journal.build(arm.name)
        for step in self.plan.steps:
            if isinstance(step, ModelStep):
                self.model(step, **model)
        return self

    def model(self, step: ModelStep, **changes: Any) -> None:
        """A model is there; a file's identity comes from its path, its content being what it may."""
        identity = model_id(step.recipe or FileModel(step.path))
        path = step.path.replace("~", "/home/me").replace("{models}", "/home/me/.dgxlab/models")
        fields = {"name": step.model, "model_id": identity, "path": path, "recipe": step.recipe}
        self.journal.model(**{**fields, **changes})

    def gates(self, text: str | None = None, *, after: bool = False, **changes: Any) -> Session:
        """Every parity gate was run, before or after the chains, and printed `text`, by default the real 1103/1103."""
        for step in self.plan.steps:
            if isinstance(step, GateStep) and isinstance(step.gate, ParityGate) and step.id.endswith(":after") == after:
                reading = read_gate(text or (GOLDEN / "tbo-test-mul_mat.txt").read_text(), step.gate.backend)
                counts = {"total": reading.total, "unsupported": reading.unsupported, "passed": reading.passed}
                about = {"id": step.id, "arm": step.arm, "gate": step.gate, "env": step.env}
                self.journal.gate(**{**about, "argv": step.commands[0].argv, **counts, **changes})
        return self

    def runs(
        self,
        tool: Tool = capture,
        ends: Callable[[RunStep], tuple[str, str]] = valid,
        only: Sequence[str] = ("backend-ops", "llama-bench", "batched-bench"),
        **changes: Any,
    ) -> Session:
        """Every planned run of these tools was done."""
        for step in self.plan.steps:
            if not isinstance(step, RunStep) or step.tool not in only:
                continue
            status, reason = ends(step)
            results = to_json(tool(step)) if status == "valid" else []
            fields = {
                **self._fields(step, status, reason, results),
                "argv": [word.replace("{bin}", "/b/bin").replace("{model:", "/m/{") for word in step.argv],
            }
            self.journal.run(**{**fields, **changes})
        return self

    def chains(self, value: Callable[[ChainStep, str, int], float | None], **changes: Any) -> Session:
        """Every chain was held, with two runs of burn-in; each run gave all of its cells this value, or none."""
        for step in self.plan.chains:
            for role, cycle in places(step.cycles):
                self.place(step, role, cycle, value(step, role, cycle), **changes)
        return self

    def place(self, step: ChainStep, role: str, cycle: int, value: float | None, **changes: Any) -> None:
        """One run of a chain gave this value for each comparison; None for one that failed."""
        run = step.candidate if role == CANDIDATE else step.baseline
        results = []
        for cell in run.cells if value is not None else ():
            told = tuple(
                Measurement(cell.key, name, metric(name).unit, (value,)) for name in BENCHES[run.tool].compared
            )
            results.append(CellResult(cell.key, told, {"at": value}))
        ended = ("failed", "killed by SIGKILL") if value is None else ("valid", "")
        fields = {**self._fields(run, *ended, to_json(results)), "chain": step.id, "role": role, "cycle": cycle}
        self.journal.run(**{**fields, **changes})

    def _fields(self, step: RunStep, status: str, reason: str, results: Any) -> dict[str, Any]:
        models = {s.model: s.recipe or FileModel(s.path) for s in self.plan.steps if isinstance(s, ModelStep)}
        return {
            "id": step.id,
            "arm": step.arm,
            "tool": step.tool,
            "model_id": model_id(models[step.model]) if step.model else "",
            "argv": list(step.argv),
            "env": dict(step.env),
            "env_digest": digest(step.env, 16),
            "status": status,
            "reason": reason,
            "results": results,
            "cells": {cell.key: to_json(cell) for cell in step.cells},
        }

    def end(self, status: str = "done", exit_code: int = 0) -> Session:
        self.journal.end(status, exit_code)
        return self.save()

    def save(self) -> Session:
        ingest(self.store, self.plan.job_id, self.journal.lines())
        return self


def whole(store: Store, job_id: str = "20261120-103000-h200-a", **options: Any) -> Session:
    return Session(store, options.pop("experiment", h200()), job_id, **options).build().gates().runs().end()
