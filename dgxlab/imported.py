"""Raw output of tools that others ran: from a file to rows, with the provenance it has, and into the record.

`open_file` reads a file as exactly as its format allows or refuses it with line and reason; `record` keeps what was
read, and the file itself with it. Values are as printed, in the units of `units.METRICS` where the metric is one of
those: what test-backend-ops prints as 3.61 TFLOPS is 3.61e12 FLOPS, and its GB/s are called what they are, GiB/s.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dgxlab.errors import SpecError, UsageError
from dgxlab.model import canonical
from dgxlab.roofline import implausible, together, weights_of
from dgxlab.store import Store
from dgxlab.tools import TOOLS
from dgxlab.tools.reading import GZIP, LARGEST, Format, Reading, Row, decoded, packed, unpacked
from dgxlab.tools.rows import Refused
from dgxlab.units import METRICS

WATCHED = re.compile(r"^(?:==PROF== |========= COMPUTE-SANITIZER)", re.MULTILINE)
"""What Nsight Compute and compute-sanitizer print before anything else."""


READERS: Mapping[str, Mapping[str, Format]] = {program: tool.formats for program, tool in TOOLS.items() if tool.formats}

FORMATS = {tool: tuple(kinds) for tool, kinds in READERS.items()}
"""The formats of each tool that can be read."""

GPU_NAMES = ("device_description", "gpu_info", "gpu")
"""What files call the GPU; llama-bench lists several with commas."""

NAMED = 10
"""Values that are named one by one; of more only the number is told."""


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
    if tool and tool not in FORMATS:
        raise UsageError(f"no tool {tool!r} can be read; there are {', '.join(FORMATS)}", next="dgxlab import --help")
    known = dict.fromkeys(each for name, formats in FORMATS.items() if tool in ("", name) for each in formats)
    if format and format not in known:
        raise UsageError(
            f"{tool or 'no tool'} has {'no ' if tool else 'a '}format {format!r}; there are {', '.join(known)}",
            next="dgxlab import --help",
        )
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", next=f"ls -l {_typed(path)}") from error
    try:
        content = unpacked(raw)
        text = decoded(content)
        if watched := WATCHED.search(text):
            why = f"a profiler or sanitizer was watching ({watched[0].strip()}), which makes every time a wrong one"
            raise Refused(why, text.count("\n", 0, watched.start()) + 1)
        detected, kind = _detect(text, tool, format)
        reading = READERS[detected][kind].read(text)
        if not reading.rows:
            note = f": {reading.notes[0]}" if reading.notes else ""
            raise Refused(f"{detected} printed no value in it{note}")
        reading = replace(reading, notes=(*reading.notes, *impossible(reading)))
    except Refused as error:
        where = f", line {error.line}" if error.line else ""
        raise SpecError(f"{path}{where}: {error}", next=_look(path, raw, error.line)) from error
    return Imported(path.name, content, detected, kind, reading)


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
    """Return tool and format; refuse a text with the signs of none, of several, or of others than was asked for."""
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
    if re.search(r"^\{", text, re.MULTILINE):
        for t, f in ((t, f) for t, kinds in READERS.items() for f, kind in kinds.items() if kind.otherwise):
            if tool in ("", t) and format in ("", f):
                return t, f
    raise Refused(f"it is not output of {asked}" if asked else "it is not output of any tool that can be imported")


def impossible(reading: Reading) -> Iterator[str]:
    """Yield a sentence for each value that exceeds the GPU's peaks; none where the file names no known GPU."""
    provenance = reading.provenance
    gpu_name = next((str(value) for name in GPU_NAMES if (value := provenance.get(name))), "")
    gpu = together(gpu_name.split(", "))
    if gpu is None:
        return
    model = " ".join(str(provenance.get(name, "")) for name in ("model_filename", "model_type"))
    weights = weights_of(model, str(provenance.get("model_type", ""))) if model.strip() else None
    count = 0
    for row in reading.rows:
        # the bytes of one call, where the row says them, or from its bandwidth and time, as of a harness
        first = {each.metric: each.values[0] for each in row.values}
        moved = None
        if "memory_kb" in first:
            moved = first["memory_kb"] * 1024
        elif "bandwidth_gb_s" in first and "time_us" in first:
            moved = first["bandwidth_gb_s"] * 2**30 * first["time_us"] / 1e6
        for each in (each for each in row.values if each.metric in METRICS):
            reasons = (implausible(each.metric, row.params, v, gpu, weights=weights, moved=moved) for v in each.values)
            for why in filter(None, reasons):
                count += 1
                if count <= NAMED:
                    yield f"{row.label} cannot be true: {why}"
    if count > NAMED:
        yield f"{count - NAMED} more values cannot be true either"


def record(store: Store, file: Imported) -> bool:
    """Keep a file; its rows are read from it when they are asked for, see `rows_of`.

    Returns:
        Whether it is new; of a file that is there already, under whatever name, nothing changes.

    Raises:
        UsageError: if the same file is there as the output of another tool or in another format.
    """
    import_id, sha256 = file.import_id, file.sha256
    with store.transaction():
        known = store.rows("SELECT tool, format, name FROM imports WHERE import_id = ?", (import_id,))
        if known:
            (row,) = known
            if (file.tool, file.format) != (row["tool"], row["format"]):
                raise UsageError(
                    f"{file.name} was imported before, as {row['name']}: output of {row['tool']} ({row['format']}), "
                    f"not of {file.tool} ({file.format})"
                )
            return False
        row = {
            "import_id": import_id,
            "sha256": sha256,
            "size": len(file.content),
            "tool": file.tool,
            "format": file.format,
            "provenance": canonical(file.reading.provenance),
            "notes": canonical(file.reading.notes),
            "content": packed(file.content),
            "name": file.name,
            "at": time.time(),
        }
        store.put("imports", row)
        return True


_READ: dict[str, tuple[Row, ...]] = {}
"""By import_id, which is a digest of the content, the rows that were read in this process."""


def rows_of(store: Store, import_id: str) -> tuple[Row, ...]:
    """Return the rows of an imported file, in its order.

    Raises:
        SpecError: if this dgxlab cannot read the copy, which an older one could.
    """
    if import_id not in _READ:
        (row,) = store.rows("SELECT tool, format, name, content FROM imports WHERE import_id = ?", (import_id,))
        try:
            text = decoded(row["content"].encode())
            _READ[import_id] = READERS[row["tool"]][row["format"]].read(text).rows
        except (LookupError, Refused) as error:
            raise SpecError(f"{row['name']} in {store.path} cannot be read any more: {error}") from error
    return _READ[import_id]
