"""Harnesses of kernels/: a gate that runs a kernel's tests, and the import of the JSON lines that a harness prints.

Every line has `kernel`, `time_us` (a sample, or a list of them) and the name or sizes of the case: `case`, or `m`, `n`,
`k`, or `rows`, `cols`. Other measured values are `flops` or `tflops`, `bandwidth_gb_s` or `gbps`, `clock`, and every
key that ends in a unit, such as `sm_clock_mhz`. All other keys label the row; a true one, as in `"cold": true`, by its
name. GB/s are 10^9 bytes per second, also in `bandwidth_gb_s`; the record stores GiB/s (2^30), as llama.cpp does.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

from dgxlab.errors import SpecError, command
from dgxlab.model import ARM, Against, Check, CheckCommand, Readings, digest, environments
from dgxlab.model.reasons import Code, Reason, reason
from dgxlab.tools.reading import Format, Line, Reading, Row, Values, each_line, json_lines, shared
from dgxlab.tools.rows import Refused, finite
from dgxlab.tools.tool import Tool, key
from dgxlab.units import METRICS

# -- the gate ---------------------------------------------------------------------------------------------------------

_TEST = re.compile(r"(ok  |FAIL) (\S.*)")


def kernel_files(root: str, kernel: str) -> dict[str, str]:
    """Return the texts of a kernel's sources, of what all share and of what it includes, by path below `root`/kernels/.

    A kernel includes another if a source or the Makefile names ../OTHER, as #include "../OTHER/x.cuh" or -I../OTHER.
    Raises SpecError if the kernel has no Makefile, or a file is not text.
    """
    home = Path(root) / "kernels"
    if not (home / kernel / "Makefile").is_file():
        raise SpecError(f"there is no kernel {kernel}: {home / kernel} has no Makefile", next=command("ls", home))
    own = _texts(home, "", kernel)
    others = {other for text in own.values() for other in re.findall(r'(?:#include "|-I)\.\./(\w+)', text)}
    return own | _texts(home, "common", *sorted(others - {"common", kernel}))


def _texts(home: Path, *folders: str) -> dict[str, str]:
    files = {}
    for folder in (home / name for name in folders):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if not path.is_file() or path.suffix == ".md" or path.name.startswith("."):
                continue
            try:
                files[str(path.relative_to(home))] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                text = f"{path} is no text, as a kernel's sources are"
                raise SpecError(text, next=command("ls", "-l", path)) from error
    return files


@dataclass(frozen=True)
class HarnessGate(Check):
    """A kernel's tests on the host: make runs them, from the sources of kernels/<kernel>, or a program of the build."""

    name = "harness"
    failures_on = "stderr"
    against: ClassVar[Against] = {}

    kernel: str = key("Name", "A folder of kernels/.")
    arch: str = key(
        "GpuArch", "The architecture that nvcc compiles for, as sm_90; native is the GPU that is there.", "native"
    )
    tests: int = key("Count", "How many tests must run and pass: a line is printed for each.", 0, must=True, later=True)
    target: str = key("Name", "The target of the kernel's Makefile that runs them.", "test", later=True)
    program: str = key("Name", "A program that a series adds to the build, run in place of make.", "", later=True)
    model: str = key("Name", "A name under models, for program.", "", later=True)
    engaged: str = key("Line", "What must be on stderr, because the path under test prints it.", "", later=True)

    def subject(self) -> str:
        """Return the kernel's name, with its target where that is not `test`, or the program's and its model's."""
        if self.program:
            return f"{self.program} on {self.model}"
        return self.kernel if self.target == "test" else f"{self.kernel} {self.target}"

    def flaws(self) -> Iterator[str]:
        """Yield why the gate cannot run."""
        if bool(self.program) != bool(self.model):
            yield "program and model need each other"

    def limits(self) -> tuple[str, ...]:
        """Return what must hold for the gate to pass, in words."""
        # older records may lack the number of tests
        tests = f"{self.tests} tests pass" if self.tests else "every test passes, and there are some"
        return (tests, *([f"{self.engaged!r} on stderr"] if self.engaged else []))

    def step(self, env: Mapping[str, str], root: str) -> dict[str, Any]:
        """Return the command and the sources that it compiles; raises SpecError if `kernel_files` does."""
        make = ("make", "-C", f"{{files}}/{self.kernel}", self.target, f"ARCH={self.arch}", "OUT={files}/build")
        argv = (f"{{bin}}/{self.program}", f"{{model:{self.model}}}") if self.program else make
        commands = (CheckCommand(ARM, argv, environments(self, env)[0], self.model),)
        return {"commands": commands, "files": kernel_files(root, self.kernel)}

    def sources(self, files: Mapping[str, str]) -> dict[str, str]:
        """Return {"kernels/<kernel>": digest of all the files}."""
        return {f"kernels/{self.kernel}": digest(files, 16)}

    def read(self, role: str, stdout: bytes, stderr: str) -> dict[str, Any]:
        """Return the number of tests that passed, the failed ones, and the verdict.

        stderr has a line per test, `ok   WHAT` or `FAIL WHAT: WHY`, and at the end the verdict: `passed` or `FAILED`.
        """
        lines = [line.rstrip() for line in stderr.split("\n")]
        tests = [match.groups() for line in lines if (match := _TEST.fullmatch(line))]
        verdicts = [line for line in lines if line in ("passed", "FAILED")]
        return {
            "passed": sum(how == "ok  " for how, _ in tests),
            "failed": [what for how, what in tests if how == "FAIL"],
            "verdict": verdicts[0] if len(verdicts) == 1 else "",
        }

    def judge(self, readings: Readings) -> Iterator[Reason]:
        """Yield why the gate did not pass."""
        tests = readings[ARM]
        if failed := tests["failed"]:
            yield reason(Code.CASES_FAILED, case=failed[0], more=len(failed) - 1)
        elif not tests["passed"]:
            yield reason(Code.NO_TEST)
        elif tests["verdict"] != "passed":
            yield reason(Code.NO_VERDICT)
        elif self.tests and tests["passed"] != self.tests:
            yield reason(Code.TESTS, wanted=self.tests, passed=tests["passed"])
        elif self.engaged and not tests["engaged"]:
            yield reason(Code.ARM_NOT_ENGAGED, marker=self.engaged, where="the arm")

    def shown(self, readings: Readings) -> Iterator[str]:
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
"""Units by suffix of a name; the longest matching suffix counts."""

_GB = Fraction(10**9, 2**30)
_SYNONYMS = {
    "tflops": ("flops", Fraction(10**12)),
    "gflops": ("flops", Fraction(10**9)),
    "bandwidth_gb_s": ("bandwidth_gb_s", _GB),
    "gbps": ("bandwidth_gb_s", _GB),
    "clock": ("clock_mhz", Fraction(1)),
}
"""Further names of a value: its name in the record, and the factor to that one's unit."""

_SHAPE = ("case", "m", "n", "k", "rows", "cols")

_MADE_ON = ("gpu", "host", "driver", "cuda", "arch", "commit", "date")
"""Provenance of the file where all of its rows agree on it."""


def _rows_of_kernel(rows: Sequence[Line]) -> Reading:
    """Read one row a line; values of a row that says `"passed": false` are discarded."""
    for line in rows:
        lacking = [name for name in ("kernel", "time_us") if name not in line.columns]
        lacking += [] if any(name in line.columns for name in _SHAPE) else [f"any of {', '.join(_SHAPE)}"]
        if lacking:  # many other programs print JSON lines
            text = f"a row without {' and '.join(lacking)}: no harness's, nor of a tool of llama.cpp"
            raise Refused(text, line.number)
    same = shared([line.columns for line in rows], _MADE_ON)
    return Reading(tuple(each_line(rows, lambda line: _row(line.columns, same))), same)


def _row(columns: Mapping[str, Any], same: Mapping[str, Any]) -> Row:
    why = "it did not pass" if columns.get("passed") is False else ""
    values: dict[str, Values] = {}
    params: dict[str, Any] = {}
    for name, value in columns.items():
        metric, factor = _SYNONYMS.get(name, (name, Fraction(1)))
        ends = [end for end in UNITS if metric.endswith(end)]
        unit = METRICS[metric].unit if metric in METRICS else UNITS[max(ends, key=len)] if ends else ""
        if not unit:
            params |= {} if name in same else {name: value}
        elif metric in values:
            raise Refused(f"{metric} is there twice, once as {name}")
        else:
            values[metric] = Values(metric, unit, _samples(name, value, factor), why)
    label = []
    for name, value in params.items():
        if value is True and name != "passed":
            label.append(name)
        elif value is not None and name != "passed" and not isinstance(value, (dict, list, bool)):
            label.append(f"{name}={value}")
    return Row(" ".join(label), params, tuple(values.values()))


def _samples(name: str, value: Any, factor: Fraction) -> tuple[float, ...]:
    if value == []:
        raise Refused(f"{name} is an empty list")
    samples = [finite(sample, name) for sample in (value if isinstance(value, list) else [value])]
    if (name in METRICS or name in _SYNONYMS) and min(samples) < 0:
        raise Refused(f"{name} is {min(samples):g}, below 0")
    # the decimals that are printed times the factor, rounded once
    exact = [Fraction(Decimal(repr(sample))) * factor for sample in samples]
    if max(exact) > Fraction(sys.float_info.max):
        raise Refused(f"{name} is {max(samples):g}, too large")
    return tuple(map(float, exact))


TOOL = Tool(
    "harness",
    check=HarnessGate,
    formats={"jsonl": Format(_rows_of_kernel, '"kernel"', r'^\{.*"kernel"\s*:', rows=json_lines)},
    built=False,
)
