"""llama.cpp's own compare-llama-bench.py at the pin reads what we hand on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dgxlab.exported import collect, collect_imported, write
from dgxlab.imported import open_file, record
from dgxlab.source import PinCache
from dgxlab.store import Store
from tests.journals import PIN, source
from tests.report.worlds import GOLDEN

pytestmark = pytest.mark.llama

CANDIDATE = source(["w4a16"]).commit[:8]


@pytest.fixture(scope="module")
def script(pin_cache: PinCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripts") / "compare-llama-bench.py"
    shown = ["git", "-C", str(pin_cache.path), "show", f"{PIN}:scripts/compare-llama-bench.py"]
    path.write_bytes(subprocess.run(shown, capture_output=True, check=True).stdout)
    return path


def table(script: Path, file: Path, tool: str) -> list[list[str]]:
    argv = [sys.executable, script, "--tool", tool, "-i", file, "-b", PIN[:8], "-c", CANDIDATE]
    ran = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=file.parent)
    assert ran.returncode == 0, ran.stderr
    lines = [line for line in ran.stdout.splitlines() if line.startswith("|") and not line.startswith("|:")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("suffix", [".sqlite", ".jsonl", ".csv"])
def test_of_llama_bench(script: Path, store: Store, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"runs{suffix}"
    write(file, [collect(store, "llama-bench")])
    header, *rows = table(script, file, "llama-bench")
    assert header == ["Model", "Test", f"t/s {PIN[:8]}", f"t/s {CANDIDATE}", "Speedup"]
    means = {row["n_prompt"]: row["avg_ts"] for row in collect(store, "llama-bench", name="h200").rows}
    assert [(row[1], row[-1]) for row in rows] == [("pp512", "1.50"), ("pp2048", "1.50"), ("tg32", "1.50")]
    assert [row[2] for row in rows] == [f"{means[n]:.2f}" for n in (512, 2048, 0)]


@pytest.mark.parametrize("suffix", [".sqlite", ".jsonl", ".csv"])
def test_of_an_imported_file(script: Path, store: Store, tmp_path: Path, suffix: str) -> None:
    printed = [json.loads(line) for line in (GOLDEN / "llama-bench-q4_k.jsonl").read_text().splitlines()]
    rows = [{**row, "build_commit": PIN[:8]} for row in printed]
    rows += [
        {
            **row,
            "build_commit": CANDIDATE,
            "avg_ts": row["avg_ts"] * 2,
            "samples_ns": [ns / 2 for ns in row["samples_ns"]],
        }
        for row in printed
    ]
    two = tmp_path / "two.jsonl"
    two.write_text("".join(json.dumps(row) + "\n" for row in rows))
    record(store, open_file(two, "", ""))
    file = tmp_path / f"runs{suffix}"
    write(file, [collect_imported(store, "two.jsonl")])
    _, *compared = table(script, file, "llama-bench")
    assert [(row[1], row[-1]) for row in compared] == [("pp512", "2.00"), ("pp2048", "2.00"), ("tg32", "2.00")]


@pytest.mark.parametrize("suffix", [".sqlite", ".jsonl", ".csv"])
def test_of_test_backend_ops(script: Path, store: Store, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"ops{suffix}"
    write(file, [collect(store, "test-backend-ops")])
    header, *rows = table(script, file, "test-backend-ops")
    assert header[-3:] == [f"TFLOPS {PIN[:8]}", f"TFLOPS {CANDIDATE}", "Speedup"]
    assert len(rows) == 6
    assert {row[-1] for row in rows} == {"1.50"}
    assert any("type_a=q4_0,type_b=f32,m=4096,n=1,k=14336" in cell for row in rows for cell in row)
