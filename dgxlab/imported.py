"""Import output files of tools that ran elsewhere: read as rows with provenance, and stored in the record.

`open_file` reads a file exactly or refuses it with line and reason. Values are as printed, in the units of
`units.METRICS` for known metrics: 3.61 TFLOPS on the console become 3.61e12 FLOPS, and the "GB/s" of ggml's tools are
named GiB/s, which they are.
"""

import hashlib
import re
import shlex
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dgxlab.errors import SpecError, UsageError
from dgxlab.model import canonical
from dgxlab.roofline import implausible, together, weights_of
from dgxlab.store import Store
from dgxlab.tools import TOOLS
from dgxlab.tools.reading import GZIP, LARGEST, Format, Reading, Row, decoded, unpacked
from dgxlab.tools.rows import Refused
from dgxlab.units import METRICS

WATCHED = re.compile(r"^(?:==PROF== |========= COMPUTE-SANITIZER)", re.MULTILINE)
"""Printed by Nsight Compute and compute-sanitizer, under which every time is wrong."""

FORMATS: Mapping[str, Mapping[str, Format]] = {program: tool.formats for program, tool in TOOLS.items() if tool.formats}
"""By tool, its formats that can be read, by name."""

GPU_NAMES = ("device_description", "gpu_info", "gpu")  # columns that name the GPU; several GPUs are separated by commas
NAMED = 10  # max number of values listed; of more only the count is shown


@dataclass(frozen=True)
class Imported:
    """An output file of a tool, after it was read."""

    name: str  # the file's name, without its folder
    content: bytes  # the file's content, unpacked; of an SQLite export of nsys its summary
    tool: str
    format: str
    reading: Reading

    @property
    def sha256(self) -> str:
        """The sha256 of the content, in hex."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def import_id(self) -> str:
        """The file's key in the record: the first 16 digits of the sha256."""
        return self.sha256[:16]


def open_file(path: Path, tool: str = "", format: str = "") -> Imported:
    """Read a file, plain or gzip, as output of `tool` in `format`, both from FORMATS; "" means that it is detected.

    Raises:
        UsageError: if there is no such file, tool or format.
        SpecError: if it cannot be read exactly, with line and reason.
    """
    if tool and tool not in FORMATS:
        raise UsageError(f"no tool {tool!r} can be read; there are {', '.join(FORMATS)}", next="dgxlab import --help")
    known = dict.fromkeys(each for name in FORMATS if tool in ("", name) for each in FORMATS[name])
    if format and format not in known:
        message = f"{tool or 'no tool'} has {'no ' if tool else 'a '}format {format!r}; there are {', '.join(known)}"
        raise UsageError(message, next="dgxlab import --help")
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", next=f"ls -l {_typed(path)}") from error
    try:
        formats = [each for kinds in FORMATS.values() for each in kinds.values()]
        summary = next((each.summary for each in formats if each.summary and raw.startswith(each.binary)), None)
        content = summary(path).encode() if summary else unpacked(raw)
        text = decoded(content)
        detected, kind = _detect(text, tool, format)
        reading = FORMATS[detected][kind].read(text)
        if not reading.rows:
            note = f": {reading.notes[0]}" if reading.notes else ""
            raise Refused(f"{detected} printed no value in it{note}")
        reading = replace(reading, notes=(*reading.notes, *_impossible(reading)))
    except Refused as error:
        where = f", line {error.line}" if error.line else ""
        # the command that shows the line
        name, zipped, print_line = _typed(path), raw.startswith(GZIP), f"sed -n {error.line}p"
        look = f"zcat {name} | {print_line if error.line else 'head'}" if zipped else f"{print_line} {name}"
        raise SpecError(f"{path}{where}: {error}", next=look if zipped or error.line else f"head {name}") from error
    return Imported(path.name, content, detected, kind, reading)


def _typed(path: Path) -> str:
    """Return a path quoted for a shell, also safe if it begins with a dash."""
    return ("-- " if str(path).startswith("-") else "") + shlex.quote(str(path))


def _detect(text: str, tool: str, format: str) -> tuple[str, str]:
    """Detect tool and format; refuse a text that matches none or several, or not the requested ones."""
    matching = [(t, f) for t, kinds in FORMATS.items() for f, kind in kinds.items() if kind.fits(text)]
    wanted = [(t, f) for t, f in matching if tool in ("", t) and format in ("", f)]
    if profilers := [(t, f) for t, f in wanted if FORMATS[t][f].profiler]:
        wanted = profilers  # what the program printed besides has no true time
    elif watched := WATCHED.search(text):
        why = f"a profiler or sanitizer was watching ({watched[0].strip()}), which makes every time a wrong one"
        raise Refused(why, text.count("\n", 0, watched.start()) + 1)
    if len(wanted) == 1:
        return wanted[0]
    names = " and ".join(f"{t} ({f})" for t, f in (wanted or matching))
    if wanted:
        raise Refused(f"it holds output of {names}: name one with --tool and --format-of, or split it")
    asked = " ".join(filter(None, (tool, format and f"({format})")))
    if matching:
        raise Refused(f"it is output of {names}, not of {asked}")
    raise Refused(f"it is not output of {asked}" if asked else "it is not output of any tool that can be imported")


def _impossible(reading: Reading) -> Iterator[str]:
    provenance = reading.provenance
    gpu_name = next((str(value) for name in GPU_NAMES if (value := provenance.get(name))), "")
    gpu = together(gpu_name.split(", "))
    if gpu is None:
        return
    model = " ".join(str(provenance.get(name, "")) for name in ("model_filename", "model_type"))
    weights = weights_of(model, str(provenance.get("model_type", ""))) if model.strip() else None
    reasons = []
    for row in reading.rows:
        # bytes of one call, from the row if given, else from its bandwidth and time
        first = {each.metric: each.values[0] for each in row.values}
        moved = None
        if "memory_kb" in first:
            moved = first["memory_kb"] * 1024
        elif "bandwidth_gb_s" in first and "time_us" in first:
            moved = first["bandwidth_gb_s"] * 2**30 * first["time_us"] / 1e6
        for each in (each for each in row.values if each.metric in METRICS):
            why = (implausible(each.metric, row.params, v, gpu, weights=weights, moved=moved) for v in each.values)
            reasons += [f"{row.label} cannot be true: {reason}" for reason in why if reason]
    yield from reasons[:NAMED]
    if len(reasons) > NAMED:
        yield f"{len(reasons) - NAMED} more values cannot be true either"


def record(store: Store, file: Imported) -> bool:
    """Store a file in the record, with its content; return False if it was there already.

    Raises UsageError if it is there as output of another tool or in another format.
    """
    row = {
        "import_id": file.import_id,
        "sha256": file.sha256,
        "size": len(file.content),
        "tool": file.tool,
        "format": file.format,
        "provenance": canonical(file.reading.provenance),
        "notes": canonical(file.reading.notes),
        "content": zlib.compress(file.content, 9),
        "name": file.name,
        "at": time.time(),
    }
    with store.transaction():
        known = store.rows("SELECT tool, format, name FROM imports WHERE import_id = ?", (file.import_id,))
        if not known:
            store.put("imports", row)
    for other in known:
        if (file.tool, file.format) != (other["tool"], other["format"]):
            raise UsageError(
                f"{file.name} was imported before, as {other['name']}: output of {other['tool']} ({other['format']}), "
                f"not of {file.tool} ({file.format})"
            )
    return not known


_READ: dict[str, tuple[Row, ...]] = {}  # cache of the rows read in this process, by import_id, a digest of the content


def rows_of(store: Store, import_id: str) -> tuple[Row, ...]:
    """Return the rows of an imported file, read again from its stored content.

    Raises SpecError if this version cannot read it.
    """
    if import_id not in _READ:
        (row,) = store.rows("SELECT tool, format, name, content FROM imports WHERE import_id = ?", (import_id,))
        try:
            text = decoded(row["content"].encode())
            _READ[import_id] = FORMATS[row["tool"]][row["format"]].read(text).rows
        except (LookupError, Refused) as error:
            raise SpecError(f"{row['name']} in {store.path} cannot be read any more: {error}") from error
    return _READ[import_id]
