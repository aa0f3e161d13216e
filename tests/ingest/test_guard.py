"""Measured values that no GPU reaches: kept, flagged, and said by `db check`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from dgxlab.ingest import impossible_runs, ingest
from dgxlab.model import Cell, CellResult, DerivedModel, FileModel, Measurement, SyntheticModel, digest, model_id
from dgxlab.model.events import HOST
from dgxlab.store import ROOFLINE, Store, check
from dgxlab.units import METRICS
from tests.journals import Journal, arm, cell, facts, intend, plan, result

JOB = "20261120-120000-cuda-1"
H200 = "NVIDIA H200"
WIDE = SyntheticModel(n_layer=8, n_embd=4096, n_ff=14336, n_head=32, n_head_kv=8, n_vocab=32000, quant="Q4_K_M")
"""1.745e9 weights in its layers."""


def begun(*gpus: str, cuda: str = "ON", **model: Any) -> Journal:
    """Return the beginning of a journal on a host with these GPUs."""
    built = dataclasses.replace(arm(), cmake={"GGML_CUDA": cuda})
    details = {"gpus": [{"name": name, "uuid": f"GPU-{number}"} for number, name in enumerate(gpus)]}
    host = dataclasses.replace(facts(), details=details)
    fields = {"recipe": WIDE, "model_id": model_id(WIDE), **model}
    return Journal(plan(JOB, [built]), host).job().build().model(**fields)


def run_of(journal: Journal, *results: tuple[Cell, CellResult], **changes: Any) -> Journal:
    fields = {"tool": results[0][0].tool, "model_id": model_id(WIDE), **changes}
    cells = {cell.key: cell for cell, _ in results}
    return journal.run(cells=cells, results=[result for _, result in results], **fields)


def op(metrics: Mapping[str, float], **raw: Any) -> tuple[Cell, CellResult]:
    """Return an operation and what a run said of it."""
    params = {"op_name": "MUL_MAT", "backend_name": "CUDA0", "type_a": "q4_0", "m": 4096, "n": 1, "k": 14336}
    params |= {name: raw.pop(name) for name in list(raw) if name in params}
    cell = Cell("backend-ops", f"{params['op_name']} n={params['n']}", params)
    row = {"memory_kb": "32328", "op_params": "type_a=q4_0,k_v=0", **raw}
    measured = tuple(Measurement(cell.key, name, METRICS[name].unit, (value,)) for name, value in metrics.items())
    return cell, CellResult(cell.key, measured, row)


def speeds(value: float, n: int = 512, n_gen: int = 0) -> tuple[Cell, CellResult]:
    cell = Cell("llama-bench", f"pp{n}" if n else f"tg{n_gen}", {"n_prompt": n, "n_gen": n_gen})
    return cell, CellResult(cell.key, (Measurement(cell.key, "avg_ts", "t/s", (value / 2, value)),), {})


def told(store: Store, journal: Journal) -> list[str]:
    """Fold a journal and return the flags; whatever they say, every sample is there and the record is sound."""
    intend(store, journal)
    ingest(store, JOB, journal.lines())
    measured = [m for event in journal.events for result in event.get("results", ()) for m in result["measurements"]]
    expected = sum(len(m["samples"]) + len(m["discarded"]) for m in measured)
    assert store.rows("SELECT count(*) AS n FROM samples") == [{"n": expected}]
    assert {row["status"] for row in store.rows("SELECT status FROM runs")} == {"valid"}
    assert check(store) == []
    flags = store.rows("SELECT device, kind, hard, reason FROM flags ORDER BY run_id")
    assert {(row["device"], row["kind"], row["hard"]) for row in flags} <= {(HOST, ROOFLINE, 0)}
    reasons = [row["reason"] for row in flags]
    assert [problem.partition(": ")[2] for problem in impossible_runs(store)] == reasons
    return reasons


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"flops": 3.606e15}, "3606 TFLOPS are 1.8 times the 1979 TFLOPS of H200 in int8"),
        ({"time_us": 1.437}, "23037 GB/s are 1.4 times the 16727 GB/s of H200's cache"),
        ({"bandwidth_gb_s": 20000.0}, "21475 GB/s are 1.3 times the 16727 GB/s of H200's cache"),
        (
            {"time_us": 50.0, "memory_kb": 512 << 10},
            "10737 GB/s, 12% of it from the cache, are 2.0 times the 4800 GB/s of H200",
        ),
    ],
)
def test_what_no_h200_reaches_is_flagged(store: Store, metrics: dict[str, float], reason: str) -> None:
    measured = dict(metrics)
    raw = {"memory_kb": str(measured.pop("memory_kb"))} if "memory_kb" in metrics else {}
    assert told(store, run_of(begun(H200), op(measured, **raw))) == [f"MUL_MAT n=1: {reason}"]


@pytest.mark.parametrize("raw", [{"op_name": "GET_ROWS"}, {"op_params": "type=f32,v=1"}, {"memory_kb": "?"}])
def test_bytes_that_an_operation_does_not_touch_say_nothing(store: Store, raw: dict[str, str]) -> None:
    metrics = {"bandwidth_gb_s": 4000.0} if raw.get("memory_kb") else {"bandwidth_gb_s": 40000.0}
    assert told(store, run_of(begun(H200), op(metrics, **raw))) == []


def test_prompts_and_tokens_of_a_recipe(store: Store) -> None:
    journal = run_of(begun(H200), speeds(700e3), speeds(6000.0, 0, 32))
    (reason,) = told(store, journal)
    assert reason == (
        "pp512: 700000 t/s with 1.74483B parameters: 2443 TFLOPS are 1.2 times the 1979 TFLOPS of H200 in int8; "
        "and 1 more of this run"
    )


def test_tokens_of_a_file_by_its_name(store: Store) -> None:
    file = {"recipe": None, "path": "/models/Qwen3-32B-Q4_K_M.gguf", "model_id": f"file-{digest('a file', 16)}"}
    journal = begun(H200, **file)
    for speed in (200.0, 400.0):
        run_of(journal, speeds(speed, 0, 32), model_id=file["model_id"])
    assert told(store, journal) == [
        "tg32: 400 t/s with 32B parameters of 4 bits: 6400 GB/s are 1.3 times the 4800 GB/s of H200"
    ]


@pytest.mark.parametrize("recipe", [None, DerivedModel(source=FileModel("/models/exact.gguf"), quant="Q4_K")])
def test_tokens_of_a_file_by_its_header(store: Store, recipe: DerivedModel | None) -> None:
    header = {"architecture": "llama", "parameters": 33_000_000_000, "type": "Q4_K", "bits": 4.5, "requantised": False}
    contents = {**header, "per_token": 18_000_000_000, "files": {}, "fidelity": {}}
    identity = f"file-{digest('no size in its name', 16)}"
    journal = begun(H200, recipe=recipe, path="/models/weights.gguf", model_id=identity, contents=contents)
    for speed in (200.0, 400.0):
        run_of(journal, speeds(speed, 0, 32), model_id=identity)
    assert told(store, journal) == [
        "tg32: 400 t/s with 32B parameters of 4.5 bits: 7200 GB/s are 1.5 times the 4800 GB/s of H200"
    ]


def test_bits_of_experts_say_nothing_of_a_token(store: Store) -> None:
    header = {"architecture": "qwen3moe", "parameters": 33_000_000_000, "type": "Q4_K", "bits": 4.5}
    contents = {**header, "requantised": False, "per_token": 2_000_000_000, "files": {}, "fidelity": {}}
    identity = f"file-{digest('experts', 16)}"
    journal = begun(H200, recipe=None, path="/models/weights.gguf", model_id=identity, contents=contents)
    assert told(store, run_of(journal, speeds(9000.0, 0, 32), model_id=identity)) == []


def test_a_small_model_may_stay_in_the_cache(store: Store) -> None:
    small = SyntheticModel(n_layer=4, n_embd=1024, n_ff=4096, n_head=16, n_head_kv=8, n_vocab=8000)
    journal = begun(H200, recipe=small, model_id=model_id(small))
    assert told(store, run_of(journal, speeds(300e3, 0, 32), model_id=model_id(small))) == []


@pytest.mark.parametrize(
    ("model", "metric", "value", "streams", "reason"),
    [
        (
            *("Qwen3-32B-NVFP4A16", "speed_pp", 24444.0, 64),
            "1564 TFLOPS are 14.6 times the 107 TFLOPS of GB10 in bf16, and more than the 427 TFLOPS of fp4",
        ),
        (
            *("Qwen3-Coder-30B-A3B-FP8", "speed_pp", 99000.0, 32),
            "594 TFLOPS are 2.8 times the 213 TFLOPS of GB10 in fp8, and more than the 427 TFLOPS of fp4",
        ),
        (
            *("Qwen3-Coder-30B-A3B-FP8", "speed_pp", 151990.0, 64),
            "911.9 TFLOPS are 4.3 times the 213 TFLOPS of GB10 in fp8, and more than the 427 TFLOPS of fp4",
        ),
        ("Qwen3-32B-NVFP4A16", "speed_out", 24444.0, 64, "1564 TFLOPS are 14.6 times"),
        ("Qwen3-32B-NVFP4A16", "speed_tg", 200.0, 8, "read once for 8 sequences"),
        ("Qwen3-32B-NVFP4A16", "speed_out", 200.0, 8, "read once for 8 sequences"),
        ("Qwen3-32B-NVFP4A16", "speed_pp", 800.0, 64, ""),
        ("served", "speed_pp", 1e9, 64, ""),
    ],
)
def test_speeds_of_a_server(store: Store, model: str, metric: str, value: float, streams: int, reason: str) -> None:
    """The published speeds of a vLLM on a GB10, whose model is no model of the spec."""
    served = Cell("serve", f"B{streams}", {"pp": 512, "tg": 128, "pl": streams}, {"engine": "vllm"})
    measured = Measurement(served.key, metric, "t/s", (value,))
    row = served, CellResult(served.key, (measured,), {"server": {"model": f"/models/{model}"}})
    flags = told(store, run_of(begun("NVIDIA GB10"), row, model_id=""))
    assert len(flags) == bool(reason)
    assert all(reason in flag for flag in flags)


def test_several_gpus_reach_more_together(store: Store) -> None:
    journal = run_of(begun(H200, H200), speeds(900e3), op({"flops": 3.0e15}), tool="llama-bench")
    assert told(store, run_of(journal, op({"flops": 3.0e15}))) == [
        "MUL_MAT n=1: 3000 TFLOPS are 1.5 times the 1979 TFLOPS of H200 in int8"
    ]


COLD = dataclasses.replace(result(cell(), [9.0]).measurements[0], discarded=(1e9,))


@pytest.mark.parametrize(
    ("journal", "measured"),
    [
        (begun("NVIDIA RTX 9090"), speeds(1e9)),
        (begun(H200, "NVIDIA RTX 9090"), speeds(1e9)),
        (begun(H200, "NVIDIA GB10"), speeds(1e9)),
        (begun(), speeds(1e9)),
        (begun(H200, cuda="OFF"), speeds(1e9)),
        (begun(H200), op({"flops": 1e18}, backend_name="CPU")),
        (begun(H200), (cell(), CellResult(cell().key, (COLD,), {}))),
    ],
)
def test_what_has_no_known_peak_is_believed(store: Store, journal: Journal, measured: tuple[Cell, CellResult]) -> None:
    assert told(store, run_of(journal, measured)) == []
