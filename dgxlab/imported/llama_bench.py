"""llama-bench: prompt and generation speed, in each of the formats of its `-o`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dgxlab.agent.parse.parsed import RowError, agree, speed
from dgxlab.imported.reading import (
    Reading,
    Refused,
    Row,
    Values,
    finite_at,
    number_or_text,
    shared,
    span,
    value,
    whole_at,
)
from dgxlab.imported.tables import Line, csv_rows, json_array, json_lines, markdown, sql

MADE_BY = ("build_commit", "build_number", "cpu_info", "gpu_info", "backends")
MODEL = ("model_filename", "model_type", "model_size", "model_n_params")
TEXTS = ("build_commit", "cpu_info", "gpu_info", "backends", "model_filename", "model_type")
TEST = ("n_prompt", "n_gen", "n_depth")
MEASURED = ("test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns", "samples_ts")

SHOWN = {
    "model": "model_type",
    "size": "model_size",
    "params": "model_n_params",
    "backend": "backends",
    "ngl": "n_gpu_layers",
    "sm": "split_mode",
    "threads": "n_threads",
    "nkvo": "no_kv_offload",
    "fa": "flash_attn",
    "mmap": "use_mmap",
    "dio": "use_direct_io",
    "embd": "embeddings",
    "nopo": "no_op_offload",
    "noh": "no_host",
    "dev": "devices",
    "ts": "tensor_split",
    "ot": "tensor_buft_overrides",
    "fitt": "fit_target",
    "fitc": "fit_min_ctx",
}
"""What the columns of its markdown stand for."""

TESTED = re.compile(r"(?:pp([0-9]{1,9}))?(?:(?:^|\+)tg([0-9]{1,9}))?(?: @ d([0-9]{1,9}))?")
SPEED = re.compile(r"([0-9]{1,12}\.[0-9]{2}) ± ([0-9]{1,12}\.[0-9]{2})")
BUILD = re.compile(r"build: (\S+) \(([0-9]{1,9})\)")


def array(text: str) -> Reading:
    """Read `-o json`: each repetition's time beside the mean."""
    return _reading([_Found(line, line.columns) for line in json_array(text)])


def lines(text: str) -> Reading:
    """Read `-o jsonl`: each repetition's time beside the mean."""
    return _reading([_Found(line, line.columns) for line in json_lines(text)])


def statements(text: str) -> Reading:
    """Read `-o sql`: mean and spread of each test."""
    return _reading([_Found(line, _numbers(line.columns)) for line in sql(text, "llama_bench")])


def table(text: str) -> Reading:
    """Read `-o csv`: mean and spread of each test."""
    return _reading([_Found(line, _numbers(line.columns)) for line in csv_rows(text, "build_commit")])


def page(text: str) -> Reading:
    """Read `-o md`: mean and spread of each test to two decimals, and of the settings those that it shows.

    Raises:
        Refused: if a row is broken, or the tables are of several builds.
    """
    builds = list(dict.fromkeys(BUILD.findall(text)))
    if len(builds) > 1:
        raise Refused(f"its tables are of {len(builds)} builds: split it after the first line `build: ...`")
    of_build = dict(zip(("build_commit", "build_number"), builds[0], strict=True)) if builds else {}
    found = [_Found(line, _shown(line, of_build)) for line in markdown(text, "t/s")]
    notes = () if builds else ("no line `build: ...`, with which a table ends: more rows may have followed",)
    return _reading(found, notes)


class _Found:
    """A row with its columns under llama-bench's own names."""

    def __init__(self, line: Line, columns: Mapping[str, Any]) -> None:
        self.number = line.number
        self.columns = columns

    def size(self, name: str) -> int:
        """Return one of TEST; older versions know no depth."""
        return whole_at(name, self.columns.get(name, 0 if name == "n_depth" else None), self.number)

    def values(self) -> tuple[Values, ...]:
        """Return the mean and its spread as printed, and the repetitions' times where they are there."""
        found = [value("avg_ts", "t/s", self.columns.get("avg_ts"), self.number, above=0)]
        found.append(value("stddev_ts", "t/s", self.columns.get("stddev_ts"), self.number))
        if found[1].values[0] < 0:
            raise Refused(f"stddev_ts is {self.columns['stddev_ts']}, below 0", self.number)
        if "samples_ns" in self.columns:
            found.append(self._samples(found[0].values[0]))
        return tuple(found)

    def _samples(self, avg_ts: float) -> Values:
        times = self.columns["samples_ns"]
        if not isinstance(times, list) or not times:
            raise Refused("samples_ns is no list of times", self.number)
        numbers = [finite_at("a time in samples_ns", time, self.number, above=0) for time in times]
        tokens = self.size("n_prompt") + self.size("n_gen")
        try:
            agree("avg_ts", sum(speed(tokens, ns / 1e9) for ns in numbers) / len(numbers), avg_ts)
        except RowError as error:
            raise Refused(str(error), self.number) from error
        return Values("samples_ns", "ns", tuple(numbers))


def _reading(found: Sequence[_Found], notes: Iterable[str] = ()) -> Reading:
    if not found:
        return Reading((), {})
    columns = [each.columns for each in found]
    names = [name for name in columns[0] if name not in (*MEASURED, *TEST)]
    same = shared(columns, names)
    provenance = {name: same[name] for name in (*MADE_BY, *MODEL) if name in same}
    times = [str(row["test_time"]) for row in columns if "test_time" in row]
    if times:
        provenance["test_time"] = span(times)
    provenance["settings"] = {name: same[name] for name in names if name in same and name not in provenance}
    rows = []
    for each in found:
        test = {name: each.size(name) for name in TEST}
        own = {name: each.columns[name] for name in each.columns if name not in (*MEASURED, *TEST, *same)}
        label = _label(test) + "".join(f" {name}={setting}" for name, setting in own.items())
        rows.append(Row(label, {**test, **own}, each.values()))
    return Reading(tuple(rows), provenance, tuple(notes))


def _label(test: Mapping[str, int]) -> str:
    parts = [f"{short}{test[name]}" for short, name in (("pp", "n_prompt"), ("tg", "n_gen")) if test[name]]
    return "+".join(parts) + (f" @ d{test['n_depth']}" if test["n_depth"] else "")


def _numbers(columns: Mapping[str, str]) -> dict[str, Any]:
    """Turn columns that are all texts into what JSON would hold; a commit of digits alone stays a text."""
    return {name: text if name in TEXTS else number_or_text(text) for name, text in columns.items()}


def _shown(line: Line, of_build: Mapping[str, str]) -> dict[str, Any]:
    """Return a row of the markdown under llama-bench's own names.

    Raises:
        Refused: if its test or its speed cannot be read.
    """
    cells = {SHOWN.get(name, name): number_or_text(cell) for name, cell in line.columns.items()}
    tested, spread = TESTED.fullmatch(str(cells.pop("test", ""))), SPEED.fullmatch(str(cells.pop("t/s")))
    if not tested or not (tested[1] or tested[2]):
        raise Refused("its test is none of pp512, tg128, pp512+tg128, with or without @ d4096", line.number)
    if not spread:
        raise Refused("its speed is not of the form 123.45 ± 6.78", line.number)
    test = dict(zip(TEST, (int(digits or 0) for digits in tested.groups()), strict=True))
    return {**of_build, **cells, **test, "avg_ts": spread[1], "stddev_ts": spread[2]}
