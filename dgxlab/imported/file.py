"""One file of raw output: which tool printed it, in which format, and what it says."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dgxlab.errors import SpecError, UsageError
from dgxlab.imported import backend_ops, batched_bench, harness, llama_bench, perplexity
from dgxlab.imported.guard import impossible
from dgxlab.imported.reading import Reading, Refused
from dgxlab.imported.text import GZIP, LARGEST, decoded, unpacked

Reader = Callable[[str], Reading]


WATCHED = re.compile(r"^(?:==PROF== |========= COMPUTE-SANITIZER)", re.MULTILINE)
"""What Nsight Compute and compute-sanitizer print before anything else."""


@dataclass(frozen=True)
class Kind:
    """A format of a tool.

    Attributes:
        words: In whatever the tool prints so; quickly looked for.
        signs: Found in what the tool prints so, and in nothing else's output.
    """

    read: Reader
    words: str
    signs: re.Pattern[str]

    def fits(self, text: str) -> bool:
        """Tell whether a text looks like this."""
        return self.words in text and bool(self.signs.search(text))


def _kind(read: Reader, words: str, signs: str) -> Kind:
    return Kind(read, words, re.compile(signs, re.MULTILINE))


READERS: Mapping[str, Mapping[str, Kind]] = {
    "test-backend-ops": {
        "console": _kind(backend_ops.console, "", r"^Backend \d+/\d+: |us/run - | tests passed$"),
        "sql": _kind(
            backend_ops.statements, "test_backend_ops", r"INSERT INTO test_backend_ops |CREATE TABLE .*test_backend_ops"
        ),
        "csv": _kind(backend_ops.without_values, '"op_name"', r'^"backend_name","op_name"'),
        "jsonl": _kind(backend_ops.lines, '"op_name"', r'^\{(?=.*"op_name"\s*:)(?=.*"test_mode"\s*:)'),
    },
    "llama-bench": {
        "json": _kind(llama_bench.array, '"n_prompt": ', r'^    "n_prompt": '),
        "jsonl": _kind(llama_bench.lines, '"n_prompt": ', r'^\{.*"n_prompt": '),
        "sql": _kind(llama_bench.statements, "llama_bench", r"INSERT INTO llama_bench |CREATE TABLE .*llama_bench"),
        "csv": _kind(llama_bench.table, "build_commit", r'^"?build_commit"?,'),
        "md": _kind(llama_bench.page, " t/s |", r"^\| model +\|.*\| +t/s \|$"),
    },
    "llama-batched-bench": {
        "console": _kind(batched_bench.console, " TG |", r"^\| +PP \| +TG \| +B \|"),
        "jsonl": _kind(batched_bench.lines, '"speed_pp": ', r'^\{.*"speed_pp": '),
    },
    "llama-perplexity": {
        "console": _kind(perplexity.console, "PPL", r"Final estimate: PPL|^====== KL divergence statistics"),
    },
    "harness": {
        "jsonl": _kind(harness.lines, '"kernel"', r'^\{(?=.*"kernel"\s*:)(?=.*"time_us"\s*:)'),
    },
}

OTHER_ROWS = re.compile(r"^\{", re.MULTILINE)
"""JSON lines without a tool's signs."""

FORMATS = {tool: tuple(kinds) for tool, kinds in READERS.items()}
"""The formats of each tool that can be read."""


@dataclass(frozen=True)
class Imported:
    """A file that was read.

    Attributes:
        name: What the file is called, without its folder.
        content: The whole of it, unpacked; `sha256` is its digest, of which `import_id` is the beginning.
    """

    name: str
    content: bytes
    tool: str
    format: str
    reading: Reading

    @property
    def sha256(self) -> str:
        """The identity of the content."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def import_id(self) -> str:
        """The identity in the record: 16 hex digits."""
        return self.sha256[:16]


def open_file(path: Path, tool: str = "", format: str = "") -> Imported:
    """Read a file, plain or gzip.

    Args:
        tool: Whose output it is, a key of FORMATS; "" to look.
        format: In which of the tool's formats; "" to look.

    Raises:
        UsageError: if there is no such file, tool or format.
        SpecError: if it cannot be read exactly, with the line and why.
    """
    _known(tool, format)
    raw = _bytes(path)
    try:
        content = unpacked(raw)
        text = decoded(content)
        _unprofiled(text)
        found, kind = _detect(text, tool, format)
        reading = READERS[found][kind].read(text)
        if not reading.rows:
            said = f": {reading.notes[0]}" if reading.notes else ""
            raise Refused(f"{found} printed no value in it{said}")
        reading = replace(reading, notes=(*reading.notes, *impossible(reading)))
    except Refused as error:
        where = f", line {error.line}" if error.line else ""
        raise SpecError(f"{path}{where}: {error}", next=_look(path, raw, error.line)) from error
    return Imported(path.name, content, found, kind, reading)


def _known(tool: str, format: str) -> None:
    """Refuse a tool or a format that there is not.

    Raises:
        UsageError: if so.
    """
    if tool and tool not in FORMATS:
        raise UsageError(f"no tool {tool!r} can be read; there are {', '.join(FORMATS)}", next="dgxlab import --help")
    known = dict.fromkeys(each for name, formats in FORMATS.items() if tool in ("", name) for each in formats)
    if format and format not in known:
        raise UsageError(
            f"{tool or 'no tool'} has {'no ' if tool else 'a '}format {format!r}; there are {', '.join(known)}",
            next="dgxlab import --help",
        )


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(LARGEST + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", next=f"ls -l {_typed(path)}") from error


def _unprofiled(text: str) -> None:
    """Refuse what was printed while a tool watched every kernel.

    Raises:
        Refused: if so.
    """
    if watched := WATCHED.search(text):
        line = text.count("\n", 0, watched.start()) + 1
        raise Refused(
            f"a profiler or sanitizer was watching ({watched[0].strip()}), which makes every time a wrong one", line
        )


def _look(path: Path, raw: bytes, line: int | None) -> str:
    """Return the command that shows the line."""
    name, zipped = _typed(path), raw.startswith(GZIP)
    if not line:
        return f"{'zcat' if zipped else 'head'} {name}" + (" | head" if zipped else "")
    return f"zcat {name} | sed -n {line}p" if zipped else f"sed -n {line}p {name}"


def _typed(path: Path) -> str:
    """Return a path as a shell takes it behind a program's options."""
    return ("-- " if str(path).startswith("-") else "") + shlex.quote(str(path))


def _detect(text: str, tool: str, format: str) -> tuple[str, str]:
    """Return tool and format, from the signs of each.

    Raises:
        Refused: if there are none, of several, or of others than was asked for.
    """
    seen = [(t, f) for t, kinds in READERS.items() for f, kind in kinds.items() if kind.fits(text)]
    wanted = [(t, f) for t, f in seen if tool in ("", t) and format in ("", f)]
    if len(wanted) == 1:
        return wanted[0]
    names = " and ".join(f"{t} ({f})" for t, f in (wanted or seen))
    if wanted:
        raise Refused(f"it holds output of {names}: name one with --tool and --format-of, or split it")
    asked = " ".join(filter(None, (tool, format and f"({format})")))
    if seen:
        raise Refused(f"it is output of {names}, not of {asked}")
    if OTHER_ROWS.search(text) and tool in ("", "harness") and format in ("", "jsonl"):
        return "harness", "jsonl"  # whose reader says which row lacks what
    raise Refused(f"it is not output of {asked}" if asked else "it is not output of any tool that can be imported")
