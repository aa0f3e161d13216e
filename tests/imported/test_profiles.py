"""Profiles of other tools: the real `ncu --csv` of an H200, and exports of nsys.

No machine of ours has nsys: its files are made here, with the tables and columns that an export of nsys 2024 has.
"""

import re
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from dgxlab.errors import SpecError
from dgxlab.imported import Imported, open_file, record, rows_of
from dgxlab.store import Store

NCU = Path(__file__).resolve().parent.parent / "golden" / "h200" / "ncu-gdn.csv"
PID = 281487861678080
SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER, greenContextId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER,
    registersPerThread INTEGER, gridX INTEGER, gridY INTEGER, gridZ INTEGER, blockX INTEGER, blockY INTEGER,
    blockZ INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    streamId INTEGER, correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER, returnValue INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, domainId INTEGER, textId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,
    greenContextId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, graphId INTEGER,
    graphExecId INTEGER);
"""
NAMES = ("void mul_mat_q<(ggml_type)40, (int)64>(const char *)", "void rms_norm_f32<(int)1024>(const float *)")


def export(path: Path, ranges: Sequence[str] = ("prompt", "step", "step", "step"), changes: Sequence[str] = ()) -> Path:
    """Write an export: in each range a graph of two products and a norm is launched, and runs after the range's end."""
    with closing(sqlite3.connect(path)) as database:
        database.executescript(SCHEMA)
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate((*NAMES, *ranges)))
        database.execute("INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_SCHEMA_VERSION', '3.11.0')")
        for place, name in enumerate(ranges):
            begin, call = 1_000_000 * (place + 1), 100 + place
            where = "(start, end, eventType, text, globalTid, domainId, textId)"
            text, text_id = (name, None) if place % 2 else (None, len(NAMES) + place)  # nsys has them in either
            database.execute(
                f"INSERT INTO NVTX_EVENTS {where} VALUES (?, ?, 59, ?, ?, 0, ?)",  # noqa: S608
                (begin, begin + 1000, text, PID, text_id),
            )
            database.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, 0, 0)",
                (begin + 10, begin + 90, PID, call),
            )
            for node, (kernel, ns) in enumerate(((0, 7000), (1, 2000), (0, 5000))):
                start = begin + 2000 + 10_000 * node
                database.execute(
                    """INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, correlationId, globalPid,
                       demangledName, shortName, graphNodeId) VALUES (?, ?, 0, ?, ?, ?, ?, ?)""",
                    (start, start + ns, call, PID, kernel, kernel, 8589934592 + node),
                )
            database.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, 0, 7, ?, ?, 4096, 2, 0)",
                (begin + 50_000, begin + 51_000, call, PID),
            )
        for change in changes:
            database.execute(change)
        database.commit()
    return path


def numbers(file: Imported) -> dict[tuple[str, str], tuple[float, ...]]:
    return {(row.label, each.metric): each.values for row in file.reading.rows for each in row.values}


def test_an_export_of_nsys(tmp_path: Path) -> None:
    file = open_file(export(tmp_path / "run.sqlite"))
    assert (file.tool, file.format) == ("profile", "nsys")
    assert file.reading.provenance == {"nsys_schema": "3.11.0"}
    values = numbers(file)
    assert values["step products NVFP4: mul_mat_q<40, 64>", "step_us"] == (12.0, 12.0, 12.0)
    assert values["step products NVFP4: mul_mat_q<40, 64>", "launch_us"] == (6.0,)
    assert values["step products NVFP4: mul_mat_q<40, 64>", "launches"] == (2.0,)
    assert values["step copies: [memcpy]", "step_us"] == (1.0, 1.0, 1.0)
    assert values["prompt all: all", "step_us"] == (15.0,)


def test_an_export_is_kept_as_its_summary(tmp_path: Path) -> None:
    file = open_file(export(tmp_path / "run.sqlite"))
    with closing(Store.open(tmp_path / "results.db")) as store:
        assert record(store, file)
        assert rows_of(store, file.import_id) == file.reading.rows
        assert len(file.content) < 4096
        assert not record(store, file)


TOO = """INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL
         (start, end, deviceId, correlationId, globalPid, demangledName, shortName)"""


@pytest.mark.parametrize(
    ("ranges", "changes", "told"),
    [
        ((), [], "no NVTX range"),
        (("step",), ["DELETE FROM NVTX_EVENTS"], "no NVTX range"),
        (("step",), ["DROP TABLE NVTX_EVENTS"], "no NVTX range"),
        (("step",), ["UPDATE NVTX_EVENTS SET domainId = 5"], "no NVTX range"),
        (
            ("step",),
            ["INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1, 2, 0, 1, 0, 7, 2, 3, 1, 1)"],
            "--cuda-graph-trace=node",
        ),
        (("step", "step"), [f"{TOO} VALUES (5000, 6000, 0, 101, {PID}, 1, 1)"], "1 times in one, 2 in another"),
        (("step",), [f"{TOO} VALUES (5000, 6000, 1, 100, {PID}, 1, 1)"], "2 devices"),
        (("step",), [f"{TOO} VALUES (5000, 6000, 0, 100, 99, 1, 1)"], "2 processes"),
        (("step", "step"), ["UPDATE NVTX_EVENTS SET end = 2000500 WHERE start = 1000000"], "overlap"),
        (("step",), ["UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = start"], "is 0"),
        (("step",), ["DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME"], "no value in it"),
        (("step",), ["ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN graphNodeId"], "has no graphNodeId"),
        (("step",), ["DROP TABLE StringIds"], "it has no table StringIds"),
        (("step",), ["DELETE FROM META_DATA_EXPORT"], "no EXPORT_SCHEMA_VERSION"),
    ],
)
def test_an_export_that_cannot_be_trusted_is_refused(
    tmp_path: Path, ranges: Sequence[str], changes: Sequence[str], told: str
) -> None:
    path = export(tmp_path / "run.sqlite", ranges, changes)
    with pytest.raises(SpecError) as error:
        open_file(path)
    assert told in error.value.message


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9])
def test_a_cut_export_is_refused(tmp_path: Path, keep: float) -> None:
    path = export(tmp_path / "run.sqlite")
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(SpecError, match="damaged"):
        open_file(path)


def test_another_database_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "other.db")) as database:
        database.execute("CREATE TABLE t (x)")
    with pytest.raises(SpecError, match="unknown schema"):
        open_file(tmp_path / "other.db")


def test_the_csv_of_ncu() -> None:
    """Its program's own times, which the profiler made longer, are no results."""
    file = open_file(NCU)
    assert (file.tool, file.format) == ("profile", "ncu")
    assert file.reading.provenance["Process Name"] == "test-backend-ops"
    (row,) = file.reading.rows
    assert row.params["group"] == "state"
    values = {each.metric: each for each in row.values}
    assert (values["launch_us"].values, values["launch_us"].unit) == ((4.384, 3.968, 3.904), "us")
    assert values["dram__bytes_read.sum"].values == (2152704.0, 2152960.0, 2152960.0)


def test_a_metric_that_two_sections_of_ncu_have(tmp_path: Path) -> None:
    """As Memory Throughput, which is a share in one and a rate in the other."""
    path = tmp_path / "ncu.csv"
    path.write_text(
        re.sub('"[^"]*","dram__bytes_write.sum","byte"', '"Memory","dram__bytes_read.sum","%"', NCU.read_text())
    )
    (row,) = open_file(path).reading.rows
    values = {each.metric: each for each in row.values}
    assert values["dram__bytes_read.sum"].values == (2152704.0, 2152960.0, 2152960.0)
    assert (values["Memory: dram__bytes_read.sum"].values, values["launches"].values) == ((0.0, 0.0, 0.0), (3.0,))


def test_the_raw_page_of_ncu() -> None:
    """Of hundreds of columns, those that were measured, once."""
    (row,) = open_file(NCU.with_name("ncu-raw.csv")).reading.rows
    assert (row.params["kernel"], row.params["grid"]) == ("mul_mat_vec_q<2, 1, 0, 0>", "(4096, 1, 1)")
    assert {each.metric: (each.values, each.unit) for each in row.values} == {
        "launch_us": ((16.96, 15.616, 15.68), "us"),
        "dram__bytes_read.sum": ((33053952.0, 33052928.0, 33054720.0), "byte"),
        "dram__bytes_write.sum": ((335104.0, 2560.0, 6656.0), "byte"),
        "launches": ((3.0,), "launches"),
    }


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace('"4,384"', '"0"'), "is '0'"),
        (lambda text: text.replace('"4,384"', '"n/a"'), "is 'n/a'"),
        (lambda text: text.replace('"1","6830"', '"1","6831"', 1), "2 values of Process ID"),
        (lambda text: text.replace('"0","9.0"', '"1","9.0"', 1), "2 values of Device"),
        (lambda text: text.replace('"byte","2,152,960"', '"Kbyte/s","2"'), "is in byte, and in Kbyte/s"),
        (lambda text: text[:-40], "broken row"),
        (lambda text: text[: text.rindex('"2","6830"')], "launch 2 lacks metrics"),
    ],
)
def test_a_csv_that_cannot_be_trusted_is_refused(tmp_path: Path, change: Callable[[str], str], told: str) -> None:
    path = tmp_path / "ncu.csv"
    path.write_text(change(NCU.read_text()))
    with pytest.raises(SpecError) as error:
        open_file(path)
    assert told in error.value.message
