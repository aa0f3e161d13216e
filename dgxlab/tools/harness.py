"""A kernel's own harness: its tests as a gate, and its JSON lines, which can be imported.

Every row has `kernel`, `time_us` (a sample, or a list of them) and what tells cases apart: `case`, or `m`, `n`, `k`, or
`rows`, `cols`. Other values: `flops` or `tflops`, `bandwidth_gb_s` or `gbps`, `clock`, and whatever ends in a unit, as
`sm_clock_mhz` does. All the rest is a label; of a truth value, as in `"cold": true`, its name. GB/s are 10^9 bytes a
second, in `bandwidth_gb_s` too: only test-backend-ops divides by 2^30, and the record does as it does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from dgxlab.errors import SpecError, command
from dgxlab.model import ARM, CheckCommand, HarnessGate, environments, sources
from dgxlab.tools.reading import Format, Line, Reading, Row, Values, finite_at, json_lines, shared
from dgxlab.tools.rows import Refused
from dgxlab.tools.tool import Checker, Key, Readings, Tool
from dgxlab.units import METRICS

# -- the gate ---------------------------------------------------------------------------------------------------------

KEYS = {
    "kernel": Key("Name", "A folder of kernels/."),
    "arch": Key(
        "GpuArch",
        "The architecture that nvcc compiles for, as sm_90; native is the GPU that is there.",
        default="native",
    ),
    "tests": Key("Count", "How many tests must run and pass: its `test` prints a line for each."),
}

TEST = re.compile(r"(ok  |FAIL) (\S.*)")


def kernel_files(root: str, kernel: str) -> dict[str, str]:
    """Return a kernel's sources by path below kernels/, with those that all kernels share.

    Of the folders below a kernel's only `ladder` is read.

    Raises:
        SpecError: if there is no such kernel, or a file of it is no text.
    """
    home = Path(root) / "kernels"
    if not (home / kernel / "Makefile").is_file():
        raise SpecError(f"there is no kernel {kernel}: {home / kernel} has no Makefile", next=command("ls", home))
    files = {}
    for folder in (home, home / "common", home / kernel, home / kernel / "ladder"):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if not path.is_file() or path.suffix == ".md" or path.name.startswith("."):
                continue
            try:
                files[str(path.relative_to(home))] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                text = f"{path} is no text, as a kernel's sources are"
                raise SpecError(text, next=command("ls", "-l", path)) from error
    return files


def step(gate: HarnessGate, env: Mapping[str, str], root: str) -> dict[str, Any]:
    """Return the command of a gate and the sources that it compiles; raises SpecError as `kernel_files` does."""
    argv = ("make", "-C", f"{{files}}/{gate.kernel}", "test", f"ARCH={gate.arch}", "OUT={files}/build")
    commands = (CheckCommand(ARM, argv, environments(gate, env)[0]),)
    return {"commands": commands, "files": kernel_files(root, gate.kernel)}


def read(gate: HarnessGate, role: str, stdout: bytes, stderr: str) -> dict[str, Any]:
    """Return how many tests passed, which failed and why, and the harness's last word.

    stderr has a line a test, `ok   WHAT` or `FAIL WHAT: WHY`, and in the end `passed` or `FAILED`.
    """
    lines = [line.rstrip() for line in stderr.split("\n")]
    tests = [match.groups() for line in lines if (match := TEST.fullmatch(line))]
    verdicts = [line for line in lines if line in ("passed", "FAILED")]
    return {
        "passed": sum(how == "ok  " for how, _ in tests),
        "failed": [what for how, what in tests if how == "FAIL"],
        "verdict": verdicts[0] if len(verdicts) == 1 else "",
    }


def judge(gate: HarnessGate, readings: Readings) -> Iterator[str]:
    """Yield why the gate did not pass."""
    tests = readings[ARM]
    if failed := tests["failed"]:
        yield f"failed: {failed[0]}{f' and {len(failed) - 1} more' if len(failed) > 1 else ''}"
    elif not tests["passed"]:
        yield "no test was run"
    elif tests["verdict"] != "passed":
        yield "the harness does not end with 'passed'"
    elif gate.tests and tests["passed"] != gate.tests:
        yield f"expected {gate.tests} tests, got {tests['passed']}"


def shown(gate: HarnessGate, readings: Readings) -> Iterator[str]:
    """Yield how many tests passed."""
    arm = readings.get(ARM, {})
    if "passed" in arm:
        yield f"{arm['passed']} of {arm['passed'] + len(arm['failed'])} tests passed"


# -- imported rows ----------------------------------------------------------------------------------------------------

UNITS = {
    "_ns": "ns",
    "_us": "us",
    "_ms": "ms",
    "_s": "s",
    "_mhz": "MHz",
    "_mib": "MiB",
    "_kb": "kB",
    "_gb_s": "GB/s",
    "_w": "W",
    "_c": "°C",
}
"""By the end of a name; where one is the end of another, the longer counts."""

_GB = Fraction(10**9, 2**30)
SYNONYMS = {
    "tflops": ("flops", Fraction(10**12)),
    "gflops": ("flops", Fraction(10**9)),
    "bandwidth_gb_s": ("bandwidth_gb_s", _GB),
    "gbps": ("bandwidth_gb_s", _GB),
    "clock": ("clock_mhz", Fraction(1)),
}
"""Further names of a value: its name in the record, and the factor to that one's unit."""

SHAPE = ("case", "m", "n", "k", "rows", "cols")

MADE_ON = ("gpu", "host", "driver", "cuda", "arch", "commit", "date")
"""Provenance of the file where all of its rows agree on it."""


def lines(text: str) -> Reading:
    """Read one row a line; values of a row that says `"passed": false` are discarded.

    Raises:
        Refused: if a row is broken, is no harness's, or has a value that is no finite number, that cannot be below 0
            and is, or that it says twice.
    """
    rows = list(json_lines(text))
    for line in rows:
        lacking = [name for name in ("kernel", "time_us") if name not in line.columns]
        lacking += [] if any(name in line.columns for name in SHAPE) else [f"any of {', '.join(SHAPE)}"]
        if lacking:  # JSON lines are what many programs print
            text = f"a row without {' and '.join(lacking)}: no harness's, nor of a tool of llama.cpp"
            raise Refused(text, line.number)
    same = shared([line.columns for line in rows], MADE_ON) if rows else {}
    return Reading(tuple(_row(line, same) for line in rows), same)


def _row(line: Line, same: Mapping[str, Any]) -> Row:
    why = "it did not pass" if line.columns.get("passed") is False else ""
    values: dict[str, Values] = {}
    for name, value in line.columns.items():
        if unit := _unit(name):
            metric, factor = SYNONYMS.get(name, (name, Fraction(1)))
            if metric in values:
                raise Refused(f"{metric} is there twice, once as {name}", line.number)
            values[metric] = Values(metric, unit, _samples(name, value, factor, line.number), why)
    params = {name: value for name, value in line.columns.items() if not _unit(name) and name not in same}
    label = []
    for name, value in params.items():
        if value is True and name != "passed":
            label.append(name)
        elif value is not None and name != "passed" and not isinstance(value, (dict, list, bool)):
            label.append(f"{name}={value}")
    return Row(" ".join(label), params, tuple(values.values()))


def _unit(name: str) -> str:
    """Return the unit of a value, "" for a name that belongs to no value."""
    name = SYNONYMS[name][0] if name in SYNONYMS else name
    if name in METRICS:
        return METRICS[name].unit
    ends = [end for end in UNITS if name.endswith(end)]
    return UNITS[max(ends, key=len)] if ends else ""


def _samples(name: str, value: Any, factor: Fraction, number: int) -> tuple[float, ...]:
    if value == []:
        raise Refused(f"{name} is an empty list", number)
    samples = [finite_at(name, sample, number) for sample in (value if isinstance(value, list) else [value])]
    if (name in METRICS or name in SYNONYMS) and min(samples) < 0:
        raise Refused(f"{name} is {min(samples):g}, below 0", number)
    scaled = []
    for sample in samples:
        try:  # the decimals that are printed times the factor, rounded once
            scaled.append(float(Fraction(Decimal(repr(sample))) * factor))
        except OverflowError:
            scaled.append(math.inf)
        if math.isinf(scaled[-1]):
            raise Refused(f"{name} is {sample:g}, too large", number)
    return tuple(scaled)


TOOL = Tool(
    "harness",
    check=Checker(
        HarnessGate,
        "A kernel's own tests: kernels/<kernel> is compiled on the host with its Makefile and run.",
        KEYS,
        lambda gate: iter(()),
        step,
        read,
        judge,
        shown,
        sources=lambda gate, files: sources(gate.kernel, files),
        told_on="stderr",
    ),
    formats={"jsonl": Format(lines, '"kernel"', r'^\{(?=.*"kernel"\s*:)(?=.*"time_us"\s*:)', otherwise=True)},
    built=False,
)
