"""Real output of every tool and format: what is read of it, value by value."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dgxlab.errors import SpecError, UsageError
from dgxlab.imported import Imported, open_file
from dgxlab.model import to_json
from dgxlab.tools.reading import Row

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name: str, tool: str = "", format: str = "") -> Imported:
    return open_file(GOLDEN / name, tool, format)


def values(row: Row) -> dict[str, tuple[str, tuple[float, ...]]]:
    return {each.metric: (each.unit, each.values) for each in row.values}


READINGS: dict[str, list[str]] = {}
"""By capture, lines of JSON: the file with its tool and format, then each row that is read of it."""
for line in (GOLDEN / "readings.jsonl").read_text().splitlines():
    if line.startswith('{"file": '):
        READINGS[json.loads(line)["file"]] = lines = []
    lines.append(line)


@pytest.mark.parametrize("name", READINGS)
def test_real_output_is_known_by_its_looks_and_read_value_by_value(name: str) -> None:
    imported = golden(name)
    tool, kind = imported.tool, imported.format
    about: dict[str, Any] = to_json(imported.reading)
    rows = about.pop("rows")
    assert list(map(json.dumps, [{"file": name, "tool": tool, "format": kind, **about}, *rows])) == READINGS[name]
    assert golden(name, tool, kind) == golden(name, tool) == golden(name, format=kind) == imported


def harness(tmp_path: Path, *rows: dict[str, object]) -> Imported:
    path = tmp_path / "harness.jsonl"
    path.write_text("compiling\n" + "".join(json.dumps(row) + "\n" for row in rows))
    return open_file(path)


def test_a_harness_of_a_kernel(tmp_path: Path) -> None:
    good = {"kernel": "w4a16", "m": 512, "passed": True, "time_us": [10.5, 11], "flops": 2e12, "sm_mhz": 1980}
    imported = harness(tmp_path, {**good, "cold": True}, {"kernel": "w4a16", "m": 8, "passed": False, "time_us": 3.25})
    assert (imported.tool, imported.format) == ("harness", "jsonl")
    cold, failed = imported.reading.rows
    assert (cold.label, failed.label) == ("kernel=w4a16 m=512 cold", "kernel=w4a16 m=8")
    assert values(cold) == {"time_us": ("us", (10.5, 11.0)), "flops": ("FLOPS", (2e12,)), "sm_mhz": ("MHz", (1980.0,))}
    assert [bool(each.discarded) for each in (*cold.values, *failed.values)] == [False, False, False, True]


def test_a_harness_has_names_of_its_own_for_units(tmp_path: Path) -> None:
    row = {"kernel": "dequant", "rows": 4096, "time_us": [31.5], "tflops": 3.61, "clock": 1980, "gpu": "NVIDIA X"}
    reading = harness(tmp_path, {**row, "gbps": 1073.741824}, {**row, "bandwidth_gb_s": 4300}).reading
    first, second = reading.rows
    assert values(first) == {
        "time_us": ("us", (31.5,)),
        "flops": ("FLOPS", (3.61e12,)),
        "clock_mhz": ("MHz", (1980.0,)),
        "bandwidth_gb_s": ("GiB/s", (1000.0,)),
    }
    assert values(second)["bandwidth_gb_s"] == ("GiB/s", (4300e9 / 2**30,))
    assert first.params == {"kernel": "dequant", "rows": 4096}
    assert reading.provenance == {"gpu": "NVIDIA X"}


def test_a_harness_too_is_compared_with_the_peaks_of_its_gpu(tmp_path: Path) -> None:
    named = {"kernel": "dequant", "case": "small", "gpu": "NVIDIA H200"}
    for row, notes in (
        ({**named, "time_us": [5, 5], "bandwidth_gb_s": [6442, 6442]}, 0),
        ({**named, "time_us": [500], "bandwidth_gb_s": [6442, 6442]}, 2),
        ({**named, "time_us": 1, "tflops": 9000}, 1),
        ({"kernel": "gemm", "case": "down", "time_us": 1, "tflops": 9000}, 0),
    ):
        assert ["cannot be true" in note for note in harness(tmp_path, row).reading.notes] == [True] * notes


def test_what_dgxlab_exports_of_operations_comes_back(tmp_path: Path) -> None:
    sql = golden("h200/tbo-perf-mul_mat.sql").reading
    names = ("time_us", "flops", "memory_kb", "n_runs")
    shared = {"test_mode": "perf", "supported": 1, "passed": 1, "pin": "e3a7", "job_id": "20261120-103506-h200-1"}
    params = "type_a={type_a},type_b=f32,m={m},n={n},k={k},bs=[1,1],nr=[1,1]"
    rows = [
        {"op_name": "MUL_MAT", "backend_name": "CUDA0", "op_params": params.format(**row.params), **shared}
        | {name: values(row)[name][1][0] for name in names}
        for row in sql.rows
    ]
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    imported = open_file(path)
    assert (imported.tool, imported.format) == ("test-backend-ops", "jsonl")
    assert [row.values for row in imported.reading.rows] == [row.values for row in sql.rows]
    assert imported.reading.provenance == {"job_id": "20261120-103506-h200-1", "pin": "e3a7"}


@pytest.mark.parametrize("name", ["llama-benchy", "vllm-bench", "guidellm", "aiperf"])
def test_a_client_that_writes_another_file_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file.json"
    whole = json.loads((GOLDEN / "cpu" / f"{name}.json").read_text())
    key = {"vllm-bench": "completed", "aiperf": "input_config"}.get(name, "benchmarks")
    kept = {"pp_req_throughput": None} if name == "llama-benchy" else {}  # by which it is known
    path.write_text(json.dumps({**whole, key: None, **kept}))
    with pytest.raises(SpecError, match="it lacks what this client writes"):
        open_file(path)
    path.write_text(json.dumps(whole)[:-9])
    with pytest.raises(SpecError, match="it is no JSON object"):
        open_file(path)


def test_requests_that_failed_are_told() -> None:
    assert golden("cpu/vllm-bench.json").reading.notes == ("1 of 12 requests failed, and are in no figure",)


def test_the_command_for_a_path_that_looks_like_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-log").write_text('{"kernel": 1}\n')
    with pytest.raises(SpecError) as caught:
        open_file(Path("-log"))
    assert caught.value.next == "sed -n 1p -- -log"
    with pytest.raises(UsageError) as missing:
        open_file(Path("-gone"))
    assert missing.value.next == "ls -l -- -gone"


def test_the_same_file_packed_or_with_other_line_ends(tmp_path: Path) -> None:
    plain = golden("h200/tbo-perf-gdn.txt")
    packed, crlf, grey = tmp_path / "log.gz", tmp_path / "crlf.txt", tmp_path / "grey.txt"
    packed.write_bytes(gzip.compress(plain.content))
    crlf.write_bytes(plain.content.replace(b"\n", b"\r\n"))
    grey.write_bytes(plain.content.replace(b"\x1b[1;34m", b"").replace(b"\x1b[0m", b""))
    assert open_file(packed).import_id == plain.import_id
    for path in (packed, crlf, grey):
        assert open_file(path).reading == plain.reading


@pytest.mark.parametrize(
    ("name", "tool", "sentence"),
    [
        ("h200/ncu-gdn.csv", "llama-bench", "line 2: a profiler or sanitizer was watching"),
        ("h200/tbo-perf-mul_mat.csv", "", "it is not output of any tool that can be imported"),
        ("h200/telemetry-gpu.csv", "", "it is not output of any tool that can be imported"),
        ("h200/telemetry-gpu.csv", "llama-bench", "it is not output of llama-bench"),
        (
            "h200/llama-bench-q4_k.json",
            "test-backend-ops",
            "it is output of llama-bench (json), not of test-backend-ops",
        ),
        ("cpu/tbo-perf-wrong-backend.sql", "", "test-backend-ops printed no value in it"),
        ("cpu/tbo-test-wrong-backend.txt", "", "test-backend-ops printed no value in it"),
        ("cpu/tbo-test-no-params.txt", "", "line 7: backend CPU ran 0 of 0 cases"),
        ("cpu/tbo-test-abort.txt", "", "line 7: the case MUL_MAT(type_a=q4_0,"),
        ("cpu/batched-bench-no-tg.jsonl", "", "line 1: a broken row"),
    ],
)
def test_what_has_no_value_is_refused(name: str, tool: str, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        golden(name, tool)
    assert caught.value.message.startswith(f"{GOLDEN / name}")
    assert sentence in caught.value.message
    assert caught.value.next.startswith(("head ", "sed -n ", "zcat "))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "it is empty"),
        (b" \r\n\n", "it is empty"),
        (gzip.compress(b"", mtime=0), "it is empty"),
        (gzip.compress(b"x" * 1000, mtime=0)[:-12], "a gzip archive that was cut short"),
        (b"\x1f\x8b\x08\x00garbage, for sure", "gzip archive"),
        (gzip.compress(bytes(65 << 20), mtime=0), "more than 64 MiB"),
        ("us/run".encode("utf-16"), "it is UTF-16"),
        (b"SQLite format 3\0" + bytes(100), "a damaged SQLite database"),
        (gzip.compress(b"SQLite format 3\0" + bytes(100), mtime=0), "it is an SQLite database"),
        (b"Backend 1/1: CPU\n\0", "line 2: it is binary"),
        (b"one\ntwo \xff\n", "line 2: it is not UTF-8"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=sentence):
        open_file(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"kernel": 1}\n', "line 1: a row without time_us and any of case, m, n, k, rows, cols: no harness's"),
        ('{"kernel": "x", "case": "a"}\n', "line 1: a row without time_us: no harness's"),
        ('{"kernel": "x", "time_us": 1}\n', "line 1: a row without any of case, m, n, k, rows, cols"),
        ('{"kernel": "x", "case": "a", "time_us": 1}\n\n{"time_us": 1, "m": 2}\n', "line 3: a row without kernel"),
        ('{"kernel": 1\n', "line 1: a broken row: Expecting ',' delimiter"),
        ('{"kernel": "x", "m": 1, "time_us": []}\n', "line 1: time_us is an empty list"),
        ('{"kernel": "x", "m": 1, "time_us": [2, -3]}\n', "line 1: time_us is -3, below 0"),
        ('{"kernel": "x", "m": 1, "time_us": 1, "tflops": -3}\n', "line 1: tflops is -3, below 0"),
        ('{"kernel": "x", "m": 1, "time_us": 1, "tflops": 1e300}\n', "line 1: tflops is 1e+300, too large"),
        ('{"kernel": "x", "m": 1, "time_us": 1, "flops": 1, "tflops": 1}\n', "flops is there twice, once as tflops"),
        ('x{"kernel": 1}\n{"kernel": 1}\n', "line 1: a broken row: its { is missing, or text comes before it"),
        ('{"n_prompt": 512, "avg_ts": 3}\n', "line 1: its row has no n_gen"),
        ('{"n_prompt": 512, "n_gen": 0.5, "avg_ts": 3}\n', "line 1: n_gen is 0.5, not a whole number"),
        ('[\n  {\n    "n_prompt": 512\n  }\n', "its JSON array does not end"),
        ("INSERT INTO test_backend_ops (a) VALUES ('1');\n", "line 1: its row has no test_mode"),
        ("INSERT INTO test_backend_ops (test_mode) VALUES ('test');\n", "line 1: its row has no backend_name"),
        ("INSERT INTO test_backend_ops (test_mode) VALUES ('grad');\n", "line 1: a row of mode grad"),
        ("INSERT INTO test_backend_ops (a, a) VALUES ('1', '2');\n", "line 1: a broken row"),
        ('build_commit,n_prompt,n_gen,avg_ts\n"a","1","0","3"\n', "line 2: its row has no stddev_ts"),
        ('build_commit,n_prompt\n"a"\n', "line 2: a broken row: 1 columns below a header of 2"),
        ("| model | size | test | t/s |\n| x | 1 | warm | 3.00 ± 1.00 |\n", "line 2: its test is none of"),
        ("| model | size | test | t/s |\n| x | 1 | pp12 | 3 |\n", "line 2: its speed is not of the form"),
        ("| model | size | test | t/s |\n| 1 | pp12 | 3.00 ± 1.00 |\n", "line 2: a broken row: 3 columns below"),
        ('{"speed_pp": 1, "pp": true}\n', "line 1: pp is True, not a number"),
        ('{"speed_pp": 1, "pp": 1.5}\n', "line 1: pp is 1.5, not a whole number"),
        ("Final estimate: PPL = nan +/- nan\n", "line 1: the final estimate cannot be read"),
        ("Final estimate: PPL = 7.3734 +/- 0.29000\n" * 2, "line 2: PPL is there twice"),
    ],
)
def test_a_row_that_is_not_whole_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        open_file(path)
    assert sentence in caught.value.message


def test_output_of_two_tools_must_be_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "both"
    parts = [(GOLDEN / "h200" / f"llama-bench-q4_k.{suffix}").read_text() for suffix in ("sql", "md")]
    path.write_text("".join(parts))
    with pytest.raises(SpecError, match=r"llama-bench \(sql\) and llama-bench \(md\)"):
        open_file(path)
    assert len(open_file(path, format="md").reading.rows) == 3


@pytest.mark.parametrize(
    ("name", "tool", "format", "sentence"),
    [
        ("absent", "", "", "cannot read"),
        ("", "", "", "cannot read"),
        ("log", "llama-server", "", "no tool 'llama-server' can be read; there are test-backend-ops, "),
        ("log", "llama-bench", "console", "llama-bench has no format 'console'; there are json, jsonl, sql, csv, md"),
        ("log", "", "xml", "no tool has a format 'xml'"),
    ],
)
def test_what_was_typed_wrong(tmp_path: Path, name: str, tool: str, format: str, sentence: str) -> None:
    (tmp_path / "log").write_text("Backend 1/1: CPU\n")
    with pytest.raises(UsageError, match=sentence) as caught:
        open_file(tmp_path / name, tool, format)
    assert caught.value.next
