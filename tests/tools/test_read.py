"""Real output of every tool and format: what is read of it, value by value."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from dgxlab.errors import SpecError, UsageError
from dgxlab.imported import Imported, open_file
from dgxlab.tools.batched_bench import COLD
from dgxlab.tools.reading import Row

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name: str, tool: str = "", format: str = "") -> Imported:
    """Read a capture."""
    return open_file(GOLDEN / name, tool, format)


def values(row: Row) -> dict[str, tuple[str, tuple[float, ...]]]:
    """Return a row's values by metric, with their units."""
    return {each.metric: (each.unit, each.values) for each in row.values}


@pytest.mark.parametrize(
    ("name", "tool", "format", "rows"),
    [
        ("h200/tbo-perf-gdn.txt", "test-backend-ops", "console", 12),
        ("h200/tbo-perf-mmid.txt", "test-backend-ops", "console", 20),
        ("h200/tbo-perf-mul_mat.sql", "test-backend-ops", "sql", 21),
        ("h200/tbo-test-mul_mat.txt", "test-backend-ops", "console", 1),
        ("h200/tbo-test-mul_mat.sql.gz", "test-backend-ops", "sql", 1),
        ("cpu/tbo-test-mul_mat.txt.gz", "test-backend-ops", "console", 1),
        ("h200/llama-bench-q4_k.json", "llama-bench", "json", 3),
        ("h200/llama-bench-q4_k.jsonl", "llama-bench", "jsonl", 3),
        ("h200/llama-bench-q4_k.sql", "llama-bench", "sql", 3),
        ("h200/llama-bench-q4_k.csv", "llama-bench", "csv", 3),
        ("h200/llama-bench-q4_k.md", "llama-bench", "md", 3),
        ("cpu/llama-bench-q4_0.jsonl", "llama-bench", "jsonl", 8),
        ("h200/batched-bench-q4_k.txt", "llama-batched-bench", "console", 4),
        ("h200/batched-bench-q4_k.jsonl", "llama-batched-bench", "jsonl", 4),
        ("cpu/batched-bench-shared.jsonl", "llama-batched-bench", "jsonl", 3),
        ("cpu/batched-bench-abort.jsonl", "llama-batched-bench", "jsonl", 2),
        ("cpu/perplexity.txt", "llama-perplexity", "console", 1),
        ("cpu/perplexity-kld.txt", "llama-perplexity", "console", 1),
    ],
)
def test_every_format_is_known_by_its_looks(name: str, tool: str, format: str, rows: int) -> None:
    """Tool and format are found, and are the same when they are named."""
    imported = golden(name)
    assert (imported.tool, imported.format, len(imported.reading.rows)) == (tool, format, rows)
    assert golden(name, tool, format) == golden(name, tool) == golden(name, format=format) == imported


def test_times_of_kernels_from_the_console() -> None:
    """As printed, diagnostics between a case and its result; GiB/s as what they are; FLOPS in full."""
    first, *_ = golden("h200/tbo-perf-gdn.txt", "test-backend-ops").reading.rows
    assert first.label == "GATED_DELTA_NET head_count=32 head_size=128 n_seq_tokens=1 kda=0"
    assert (first.params["op_name"], first.params["backend_name"], first.params["head_size"]) == (
        *("GATED_DELTA_NET", "CUDA0"),
        128,
    )
    assert values(first) == {
        "time_us": ("us", (2.30,)),
        "n_runs": ("runs", (435564.0,)),
        "memory_kb": ("kB", (4160.0,)),
        "bandwidth_gb_s": ("GiB/s", (1724.59,)),
    }
    cut = golden("h200/tbo-perf-mmid.txt").reading
    assert values(cut.rows[0])["flops"] == ("FLOPS", (3.61e12,))
    assert cut.provenance == {"device_description": "NVIDIA H200"}
    (note,) = cut.notes
    assert "MUL_MAT_ID(type_a=q4_0,type_b=f32,n_mats=32" in note


def test_times_of_kernels_from_sql() -> None:
    """Every digit that is there, and the commit and the times that the console has not."""
    reading = golden("h200/tbo-perf-mul_mat.sql").reading
    assert values(reading.rows[0]) == {
        "time_us": ("us", (14.388455,)),
        "flops": ("FLOPS", (8162135152842.867188,)),
        "memory_kb": ("kB", (32328.0,)),
        "n_runs": ("runs", (69864.0,)),
    }
    assert reading.rows[0].params["type_a"] == "q4_0"
    assert reading.provenance == {
        "build_commit": "unknown",
        "test_time": "2026-11-20T10:35:06Z to 2026-11-20T10:35:35Z",
    }


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("h200/tbo-test-mul_mat.txt", (1103, 1103, 306)),
        ("h200/tbo-test-mul_mat.sql.gz", (1103, 1103, 306)),
        ("h200/tbo-test-SSM_CONV.txt", (45, 45, 0)),
        ("cpu/tbo-test-failing.txt", (2, 6, 3)),
        ("cpu/tbo-test-failing.sql", (1, 3, 1)),
        ("cpu/tbo-test-nan.txt", (5, 6, 3)),
    ],
)
def test_counts_of_a_parity_test(name: str, counts: tuple[int, int, int]) -> None:
    """Passed, of how many, and how many more were not supported; each failure of the console is a note."""
    reading = golden(name).reading
    (row,) = reading.rows
    assert values(row) == {
        metric: ("cases", (float(count),))
        for metric, count in zip(("passed", "total", "unsupported"), counts, strict=True)
    }
    failures = [note for note in reading.notes if note.startswith("failed: MUL_MAT(type_a=q4_0,")]
    assert len(failures) == (counts[1] - counts[0] if name.endswith(".txt") else 0)


def test_each_repetition_of_llama_bench() -> None:
    """The mean as printed, and beside it every repetition's time; what all rows share is provenance."""
    reading = golden("h200/llama-bench-q4_k.json").reading
    assert [row.label for row in reading.rows] == ["pp512", "pp2048", "tg32"]
    assert values(reading.rows[0]) == {
        "avg_ts": ("t/s", (36377.077234,)),
        "stddev_ts": ("t/s", (2389.197365,)),
        "samples_ns": ("ns", (15924028.0, 13906936.0, 13571540.0, 13597312.0, 13640221.0)),
    }
    assert reading.rows[0].params == {"n_prompt": 512, "n_gen": 0, "n_depth": 0}
    assert (reading.provenance["gpu_info"], reading.provenance["model_size"]) == ("NVIDIA H200", 1129201664)
    assert reading.provenance["settings"]["n_ubatch"] == 2048
    rows = golden("cpu/llama-bench-q4_0.jsonl").reading.rows
    assert rows[0].label == "pp32 type_k=f16 flash_attn=0"
    assert len({row.label for row in rows}) == len(rows) == 8


@pytest.mark.parametrize("format", ["sql", "csv"])
def test_means_of_llama_bench(format: str) -> None:
    """Mean and spread to six decimals, with all the provenance of the JSON."""
    reading = golden(f"h200/llama-bench-q4_k.{format}").reading
    assert {each.metric for each in reading.rows[0].values} == {"avg_ts", "stddev_ts"}
    assert reading.provenance.keys() == golden("h200/llama-bench-q4_k.json").reading.provenance.keys()
    assert reading.provenance["settings"]["tensor_split"] == "0.00"


def test_the_page_of_llama_bench() -> None:
    """Two decimals, the columns under their full names, and no more provenance than is printed."""
    reading = golden("h200/llama-bench-q4_k.md").reading
    assert values(reading.rows[2]) == {"avg_ts": ("t/s", (912.20,)), "stddev_ts": ("t/s", (9.50,))}
    assert [row.params["n_gen"] for row in reading.rows] == [0, 0, 32]
    assert reading.provenance == {
        "build_commit": "unknown",
        "build_number": "0",
        "backends": "CUDA",
        "model_type": "llama ?B Q4_K - Medium",
        "model_size": "1.05 GiB",
        "model_n_params": "2.01 B",
        "settings": {"n_gpu_layers": 99, "n_ubatch": 2048},
    }


def test_many_sequences_at_once() -> None:
    """From the console to its decimals, from JSON lines to the microsecond; that the first row is cold is said."""
    console, lines = (golden(f"h200/batched-bench-q4_k.{suffix}").reading for suffix in ("txt", "jsonl"))
    assert [row.label for row in console.rows] == ["pp128 tg64 B1", "pp128 tg64 B8", "pp128 tg64 B32", "pp128 tg64 B64"]
    assert values(console.rows[1])["speed_pp"] == ("t/s", (34174.34,))
    assert values(lines.rows[1])["t_pp"] == ("s", (0.028893,))
    assert console.provenance["settings"]["n_threads_batch"] == 16
    assert console.notes == lines.notes == (COLD,)


def test_perplexity_and_divergence() -> None:
    """The final estimate with its error; every statistic of a divergence under its own name."""
    (row,) = golden("cpu/perplexity.txt").reading.rows
    assert values(row) == {"PPL": ("", (652167.4787,)), "PPL error": ("", (68426.30882,))}
    assert row.params == {"n_chunk": 8, "n_ctx": 128, "n_batch": 128, "n_seq": 1}
    (row,) = golden("cpu/perplexity-kld.txt").reading.rows
    statistics = values(row)
    assert len(statistics) == 43
    expected = {
        "Mean KLD": ("", (0.159924,)),
        "Mean KLD error": ("", (0.007902,)),
        "99.9% KLD": ("", (1.165946,)),
        "Mean PPL(Q)-PPL(base)": ("", (-871.802599,)),
        "Cor(ln(PPL(Q)), ln(PPL(base)))": ("%", (97.09,)),
        "Minimum Δp": ("%", (-0.090,)),
        "Same top p error": ("%", (2.210,)),
    }
    assert {name: statistics[name] for name in expected} == expected


def harness(tmp_path: Path, *rows: dict[str, object]) -> Imported:
    """Write rows as a harness does, and read them."""
    path = tmp_path / "harness.jsonl"
    path.write_text("compiling\n" + "".join(json.dumps(row) + "\n" for row in rows))
    return open_file(path)


def test_a_harness_of_a_kernel(tmp_path: Path) -> None:
    """Names that end in a unit are values, lists are samples, the rest is what was measured; a failed shape is kept."""
    good = {"kernel": "w4a16", "m": 512, "passed": True, "time_us": [10.5, 11], "flops": 2e12, "sm_mhz": 1980}
    imported = harness(tmp_path, {**good, "cold": True}, {"kernel": "w4a16", "m": 8, "passed": False, "time_us": 3.25})
    assert (imported.tool, imported.format) == ("harness", "jsonl")
    cold, failed = imported.reading.rows
    assert (cold.label, failed.label) == ("kernel=w4a16 m=512 cold", "kernel=w4a16 m=8")
    assert values(cold) == {
        "time_us": ("us", (10.5, 11.0)),
        "flops": ("FLOPS", (2e12,)),
        "sm_mhz": ("MHz", (1980.0,)),
    }
    assert [bool(each.discarded) for each in (*cold.values, *failed.values)] == [False, False, False, True]


def test_a_harness_has_names_of_its_own_for_units(tmp_path: Path) -> None:
    """TFLOPS become FLOPS exactly, GB/s of 10^9 the record's GiB/s; what all rows were made on is provenance."""
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
    """Of the GPU that it names; 30 MB may come from an L2 of 60 MiB, 3 GB may not."""
    named = {"kernel": "dequant", "case": "small", "gpu": "NVIDIA H200"}
    for row, notes in (
        ({**named, "time_us": [5, 5], "bandwidth_gb_s": [6442, 6442]}, 0),
        ({**named, "time_us": [500], "bandwidth_gb_s": [6442, 6442]}, 2),
        ({**named, "time_us": 1, "tflops": 9000}, 1),
        ({"kernel": "gemm", "case": "down", "time_us": 1, "tflops": 9000}, 0),
    ):
        assert ["cannot be true" in note for note in harness(tmp_path, row).reading.notes] == [True] * notes


def test_what_dgxlab_exports_of_operations_comes_back(tmp_path: Path) -> None:
    """As test-backend-ops's, not a harness's: the same values, and where each came from."""
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


def test_the_command_for_a_path_that_looks_like_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind `--` it is a path."""
    monkeypatch.chdir(tmp_path)
    Path("-log").write_text('{"a": 1}\n')
    with pytest.raises(SpecError) as caught:
        open_file(Path("-log"))
    assert caught.value.next == "sed -n 1p -- -log"
    with pytest.raises(UsageError) as missing:
        open_file(Path("-gone"))
    assert missing.value.next == "ls -l -- -gone"


def test_the_same_file_packed_or_with_other_line_ends(tmp_path: Path) -> None:
    """Packed it is the same file; with CRLF or without colours it is another one that says the same."""
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
        ("h200/ncu-gdn.csv", "", "line 2: a profiler or sanitizer was watching"),
        ("h200/tbo-perf-mul_mat.csv", "", "line 2: the csv of test-backend-ops has neither times nor verdicts"),
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
    """With the file, the line where there is one, why, and the command that shows it."""
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
        (b"SQLite format 3\0" + bytes(100), "it is an SQLite database"),
        (b"Backend 1/1: CPU\n\0", "line 2: it is binary"),
        (b"one\ntwo \xff\n", "line 2: it is not UTF-8"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    """Nothing, half an archive, another encoding, something else altogether."""
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=sentence):
        open_file(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"a": 1}\n', "line 1: a row without kernel and time_us and any of case, m, n, k, rows, cols: no harness's"),
        ('{"kernel": "x", "case": "a"}\n', "line 1: a row without time_us: no harness's"),
        ('{"kernel": "x", "time_us": 1}\n', "line 1: a row without any of case, m, n, k, rows, cols"),
        ('{"kernel": "x", "case": "a", "time_us": 1}\n\n{"time_us": 1, "m": 2}\n', "line 3: a row without kernel"),
        ('{"a": 1\n', "line 1: a broken row: Expecting ',' delimiter"),
        ('{"kernel": "x", "m": 1, "time_us": []}\n', "line 1: time_us is an empty list"),
        ('{"kernel": "x", "m": 1, "time_us": [2, -3]}\n', "line 1: time_us is -3, below 0"),
        ('{"kernel": "x", "m": 1, "time_us": 1, "tflops": -3}\n', "line 1: tflops is -3, below 0"),
        ('{"kernel": "x", "m": 1, "time_us": 1, "tflops": 1e300}\n', "line 1: tflops is 1e+300, too large"),
        ('{"kernel": "x", "m": 1, "time_us": 1, "flops": 1, "tflops": 1}\n', "flops is there twice, once as tflops"),
        ('x{"time_us": 1}\n{"time_us": 1}\n', "line 1: a broken row: its { is missing, or text comes before it"),
        ('{"n_prompt": 512, "avg_ts": 3}\n', "line 1: a row without n_gen"),
        ('{"n_prompt": 512, "n_gen": 0.5, "avg_ts": 3}\n', "line 1: n_gen is 0.5, not a whole number"),
        ('[\n  {\n    "n_prompt": 512\n  }\n', "its JSON array does not end"),
        ("INSERT INTO test_backend_ops (a) VALUES ('1');\n", "line 1: a row without test_mode"),
        ("INSERT INTO test_backend_ops (test_mode) VALUES ('test');\n", "line 1: a row without backend_name"),
        ("INSERT INTO test_backend_ops (test_mode) VALUES ('grad');\n", "line 1: a row of mode grad"),
        ("INSERT INTO test_backend_ops (a, a) VALUES ('1', '2');\n", "line 1: a broken row"),
        ('build_commit,n_prompt,n_gen,avg_ts\n"a","1","0","3"\n', "line 2: a row without stddev_ts"),
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
    """Never a traceback, never a value of half a row."""
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        open_file(path)
    assert sentence in caught.value.message


def test_output_of_two_tools_must_be_told_apart(tmp_path: Path) -> None:
    """`-o md -oe sql` on one stream is both: the one that is named is read."""
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
    """A file, tool or format that there is not; what there is is said."""
    (tmp_path / "log").write_text("Backend 1/1: CPU\n")
    with pytest.raises(UsageError, match=sentence) as caught:
        open_file(tmp_path / name, tool, format)
    assert caught.value.next
