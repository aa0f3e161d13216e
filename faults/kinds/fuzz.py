"""Damaged output of tools, read by the agent's parsers, the parity gate, the quoter of build logs, `dgxlab import`."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from dgxlab.agent.build import first_error, progress
from dgxlab.errors import SpecError
from dgxlab.imported import open_file
from dgxlab.model import Cell, Expectation, ParityGate
from dgxlab.tools import backend_ops, batched_bench, llama_bench
from dgxlab.tools.parity import judge_gate, read_gate
from dgxlab.tools.reading import Row
from dgxlab.tools.rows import plain
from faults.damage import Parse, chunks_of, contains, damaged, misread, numbers_in
from faults.fault import Broken, Fault
from tests.tools.captures import batched_cell, capture, kernel_cell, llama_cell

PARSED: Sequence[tuple[Parse, str, Sequence[Cell]]] = (
    (
        backend_ops.parse,
        "h200/tbo-perf-mul_mat.sql",
        [kernel_cell(of, n) for n in (1, 2, 512) for of in ("q4_0", "nvfp4", "q4_K")],
    ),
    (llama_bench.parse, "h200/llama-bench-q4_k.jsonl", [llama_cell(512, 0), llama_cell(2048, 0), llama_cell(0, 32)]),
    (batched_bench.parse, "cpu/batched-bench-twice.jsonl", [batched_cell(16, 4, pl) for pl in (1, 2, 4)]),
)

GATES = (
    ("h200/tbo-test-SSM_CONV.txt", ParityGate("SSM_CONV", "CUDA0", Expectation(45, 45))),
    ("cpu/tbo-test-failing.txt", ParityGate("MUL_MAT", "CPU", Expectation(6, 6))),
    ("cpu/tbo-test-two-cases.txt", ParityGate("MUL_MAT", "CPU", Expectation(2, 2))),
)

LOGS = tuple(f"cpu/build/{name}.log" for name in ("compile", "link", "cuda", "ptxas", "arch", "missing", "colour"))

IMPORTED = (
    *("h200/tbo-perf-gdn.txt", "h200/tbo-perf-mmid.txt", "h200/tbo-perf-mul_mat.sql", "h200/tbo-perf-mul_mat.csv"),
    *("h200/tbo-test-SSM_CONV.txt", "cpu/tbo-test-failing.txt", "cpu/tbo-test-failing.sql"),
    *(f"h200/llama-bench-q4_k.{kind}" for kind in ("json", "jsonl", "sql", "csv", "md")),
    *("h200/batched-bench-q4_k.txt", "h200/batched-bench-q4_k.jsonl", "cpu/batched-bench-shared.jsonl"),
    *("cpu/perplexity.txt", "cpu/perplexity-kld.txt"),
)

HARNESS = "".join(
    f'{{"kernel": "w4a16", "m": {m}, "n": 4096, "k": 14336, "time_us": [{10.5 + m}, {10.25 + m}], '
    f'"flops": {1.5e12 + m}, "passed": true}}\n'
    for m in (1, 8, 512)
)


@dataclass(frozen=True)
class Reader:
    """`read` damages a capture, reads it, and checks the result; `weight` is its relative number of trials."""

    weight: int
    read: Callable[[Path, Random], str]


@contextmanager
def folder() -> Iterator[Path]:
    """Yield the path of the file that is imported."""
    with tempfile.TemporaryDirectory(prefix="dgxlab-faults-") as name:
        yield Path(name) / "output"


def trial(path: Path, random: Random) -> str:
    """Damage one capture, and read it."""
    (reader,) = random.choices(READERS, [each.weight for each in READERS])
    return reader.read(path, random)


def parse(path: Path, random: Random) -> str:
    """Read a benchmark's output as the agent does; each cell must have values of its own row."""
    read, name, cells = random.choice(PARSED)
    text = damaged(capture(name), random)
    if wrong := misread(read, text, cells):
        raise Broken(f"{name}: {wrong}")
    return _word(len(read(text, cells).results), len(cells))


def judge(path: Path, random: Random) -> str:
    """Read a parity gate's output, which must not pass without all of its evidence."""
    name, gate = random.choice(GATES)
    text = damaged(capture(name), random)
    reading = read_gate(text, gate.backend)
    for count in (reading.passed, reading.total):
        if count is not None and not re.search(rf"(?<![0-9])0*{count}(?![0-9])", plain(text)):
            raise Broken(f"{name}: the gate counts {count}, which is not in the text")
    if judge_gate(reading, gate):
        return "refused"
    assert gate.expect
    lacking = _lacking(plain(text), gate.backend, gate.expect)
    if lacking:
        raise Broken(f"{name}: the gate passed without {lacking}")
    return "exact"


def _lacking(text: str, backend: str, expect: Expectation) -> str:
    """Return what a text lacks to be evidence that all cases passed, "" for nothing."""
    parts = re.split(r"^Backend [0-9]+/[0-9]+: ", text, flags=re.MULTILINE)
    own = "".join(part for part in parts[1:] if part.partition("\n")[0].rstrip() == backend)
    own, status, _ = own.partition(f"\n  Backend {backend}: OK")
    if not status:
        return f"'Backend {backend}: OK'"
    summary = rf"  0*{expect.passed}/0*{expect.total} tests passed"
    if not own.count("tests passed") == len(re.findall(summary, own)) == 1:
        return f"one summary of {expect}"
    if len(re.findall(r"OK\s*$", own, re.MULTILINE)) < expect.passed:
        return f"{expect.passed} cases that say OK"
    return "no case that says FAIL" if re.search(r"\bFAIL\s*$", own, re.MULTILINE) else ""


def quote_log(path: Path, random: Random) -> str:
    """Read a build log: the quoted lines must be in it, and progress must not exceed its end."""
    log = damaged(capture(random.choice(LOGS)), random)
    lines = [line.strip() for line in plain(log).split("\n")]
    quoted = [line.removesuffix("...").strip() for line in first_error(log).split("\n")]
    if invented := [line for line in quoted if not any(whole.startswith(line) for whole in lines)]:
        raise Broken(f"the log does not say {invented[0]!r}")
    for line in log.split("\n"):
        counted = progress(line)
        if counted and (counted[0] > counted[1] or counted[2] not in plain(line)):
            raise Broken(f"progress {counted} of {line!r}")
    return "exact" if any(quoted) else "refused"


def import_it(path: Path, random: Random) -> str:
    """Import a file: the values of a row must be together in one piece of it."""
    name = random.choice([*IMPORTED, "harness"])
    whole = HARNESS if name == "harness" else capture(name)
    text = damaged(whole, random)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    try:
        opened = open_file(path)
    except SpecError as refusal:
        if refusal.exit_code != 9 or str(path) not in refusal.message:
            raise Broken(f"{name}: the refusal does not name the file: {refusal.message}") from refusal
        return "refused"
    text = opened.content.decode("utf-8-sig").replace("\r\n", "\n")
    chunks = chunks_of(text)
    for row in opened.reading.rows:
        if not _printed(row, text, chunks):
            raise Broken(f"{name}: {row.label} has values that were not printed together: {row.values}")
    return _word(len(opened.reading.rows), _rows(name, whole, path))


def _printed(row: Row, text: str, chunks: Sequence[str]) -> bool:
    values = [value for each in row.values for value in each.values]
    if row.params.get("test_mode") == "test":
        # counted, not printed: each case is a line
        counts = {each.metric: each.values[0] for each in row.values}
        return counts["passed"] <= counts["total"] and 0 < counts["total"] + counts["unsupported"] <= len(chunks)
    if row.label == "perplexity":
        return set(values) <= numbers_in(plain(text))
    # on the console a diagnostic may be between a case and its result, which then are two pieces
    names = [] if "us/run" in text else [value for value in row.params.values() if value and type(value) in (int, str)]
    return any(contains(values, chunk) and all(_named(name, chunk) for name in names) for chunk in chunks)


def _named(value: int | str, chunk: str) -> bool:
    return str(value) in chunk or value in numbers_in(chunk)


_TRUE_ROWS: dict[str, int] = {}


def _rows(name: str, whole: str, path: Path) -> int:
    """Return how many rows a capture has when nothing is damaged."""
    if name not in _TRUE_ROWS:
        path.write_text(whole)
        try:
            _TRUE_ROWS[name] = len(open_file(path).reading.rows)
        except SpecError:  # one without values
            _TRUE_ROWS[name] = 0
    return _TRUE_ROWS[name]


def _word(read: int, there: int) -> str:
    return "exact" if read >= there else "in part" if read else "refused"


READERS = (Reader(4, parse), Reader(2, judge), Reader(1, quote_log), Reader(6, import_it))

FUZZ = Fault(
    "fuzz",
    "fuzzed tool output: captures with lines and keys lost, spliced and cut, NaN, 0, negative, ANSI, debug lines",
    100_000,
    "exact or refused; no traceback, no wrong number",
    folder,
    trial,
    limit_s=30.0,
)
