"""What was really executed on a host, as the toy's programs wrote it down themselves, and whether a store agrees."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dgxlab import audit
from dgxlab.store import Store
from faults.fault import Broken

ROUNDING = 1e-12
"""Relative; two launches of the toy differ by more than 1e-8."""


@dataclass
class Launch:
    """One start of one of the toy's programs.

    Attributes:
        begin: Seconds of the monotonic clock.
        stdout: The file that its output went to.
        argv: As one line.
        printed: The lines that it printed.
        end: As begin; None where a signal ended it.
    """

    begin: float
    pid: int
    stdout: Path
    argv: str
    printed: list[str] = field(default_factory=list)
    end: float | None = None

    @property
    def job_id(self) -> str:
        """The job that it was part of: its folder holds raw/."""
        return self.stdout.parent.parent.name

    @property
    def raw(self) -> str:
        """What its output is called in the store."""
        return f"{self.stdout.parent.name}/{self.stdout.name}"

    @property
    def sha256(self) -> str:
        """Of all that it printed."""
        return hashlib.sha256("".join(f"{line}\n" for line in self.printed).encode()).hexdigest()


def read(ledger: Path) -> list[Launch]:
    """Return all launches so far, in their order."""
    launches: dict[str, Launch] = {}
    for line in ledger.read_text().splitlines() if ledger.exists() else ():
        word, number, rest = (*line.split("\t", 2), "")[:3]
        if word == "begin":
            at, pid, stdout, argv = rest.split("\t")
            launches[number] = Launch(float(at), int(pid), Path(stdout), argv)
        elif word == "said":
            launches[number].printed.append(rest)
        else:
            launches[number].end = float(rest)
    return list(launches.values())


def compare(store: Store, ledger: Path, experiment: str, cut: Collection[str] = ()) -> list[Launch]:
    """See that the store has what was launched for an experiment, all of it, and nothing else; return the launches.

    Args:
        experiment: Its name; jobs of others are not looked at.
        cut: Jobs whose agent may have ended before it could note that its last launch had.

    Raises:
        Broken: if a launch that ended by itself is not in the store, if the store has one that was none, or another
            value than was printed.
    """
    jobs = {row["job_id"] for row in store.rows("SELECT job_id FROM jobs WHERE name = ?", (experiment,))}
    launches = [launch for launch in read(ledger) if launch.job_id in jobs]
    stored = {(row["job_id"], row["stdout"]): row for job_id in sorted(jobs) for row in _stored(store, job_id)}
    last = {launch.job_id: launch for launch in launches if launch.job_id in cut}
    for launch in launches:
        row = stored.pop((launch.job_id, launch.raw), None)
        if row is None and launch.end is not None and launch is not last.get(launch.job_id):
            raise Broken(f"lost: {launch.raw} of job {launch.job_id} ended by itself and is not in the store")
        if row is not None:
            _agree(store, launch, row)
    if stored:
        raise Broken(f"wrong: the store has what was never launched: {sorted(stored)}")
    return launches


def intact(store: Store) -> None:
    """See that the record finds nothing wrong with itself: last, since it does not say what was launched.

    Raises:
        Broken: if it does.
    """
    if flaws := audit.check(store):
        raise Broken(f"the database is not sound: {'; '.join(flaws)}")


def once(launches: list[Launch]) -> None:
    """See that no program was launched in two jobs with the same arguments, or twice with the same files.

    A job itself repeats a run that had to share the processors, and keeps the output of both.

    Raises:
        Broken: if one was.
    """
    jobs = Counter(argv for argv, _ in {(launch.argv, launch.job_id) for launch in launches})
    files = Counter(str(launch.stdout) for launch in launches)
    if twice := [what for what, times in (jobs + files).items() if times > 1]:
        raise Broken(f"run twice: {'; '.join(twice)}")


def _stored(store: Store, job_id: str) -> Iterator[dict[str, Any]]:
    """Yield runs and gates as their kind, key, status and what their stdout is called and hashes to."""
    for kind, key in (("runs", "run_id"), ("gates", "gate_id")):
        sql = f"SELECT {key} AS key, job_id, status, raw FROM {kind} WHERE job_id = ?"  # noqa: S608 - names from above
        for row in store.rows(sql, (job_id,)):
            stdout = json.loads(row["raw"])["stdout"]
            yield {**row, "kind": kind, "stdout": stdout["path"], "sha256": stdout["sha256"]}


def _agree(store: Store, launch: Launch, row: Mapping[str, Any]) -> None:
    """See that a run or gate in the store is what a launch was."""
    good = row["status"] in ("valid", "passed")
    if good and launch.end is None:
        raise Broken(f"wrong: {row['key']} is {row['status']} although a signal ended {launch.raw}")
    if good and row["sha256"] != launch.sha256:
        raise Broken(f"wrong: {row['key']} has another sha256 than what {launch.raw} printed")
    for kept in store.rows("SELECT cell, raw FROM rows WHERE run_id = ?", (row["key"],)):
        printed = json.loads(kept["raw"])
        if not any(_is(line, printed) for line in launch.printed):
            raise Broken(f"wrong: the row of {row['key']} {kept['cell']} was not printed by {launch.raw}")
        _same_samples(store, row["key"], kept["cell"], _values(printed, launch.printed))


def _is(line: str, printed: Mapping[str, Any]) -> bool:
    """Whether a line is a row of llama.cpp's: JSON, or an INSERT of quoted values."""
    if line.startswith("{"):
        return bool(json.loads(line) == printed)
    names, matches, values = line.partition(") VALUES ('")
    columns = zip(names.partition("(")[2].split(", "), values.removesuffix("');").split("', '"), strict=True)
    return bool(matches) and dict(columns) == printed


def _values(printed: Mapping[str, Any], lines: Sequence[str]) -> dict[tuple[str, int], float]:
    """Return what a row says by metric and ordinal, by the definition of each, and not by the program's own parsers.

    Args:
        lines: All that was printed with it: llama-batched-bench's cold rows belong to the warm ones of their size.
    """
    if "samples_ns" in printed:
        tokens = printed["n_prompt"] + printed["n_gen"]
        return {("avg_ts", i): 1e9 * tokens / ns for i, ns in enumerate(printed["samples_ns"])}
    if "speed_pp" in printed:
        pl, pp, tg = printed["pl"], printed["pp"], printed["tg"]
        tokens = {"speed_pp": (pl * pp, "t_pp"), "speed_tg": (pl * tg, "t_tg"), "speed": (pl * (pp + tg), "t")}
        rows = [row for row in map(json.loads, lines) if row["pl"] == pl]
        if printed != rows[1]:
            raise Broken(f"wrong: of the rows with pl={pl} the second counts, not {printed}")
        times = enumerate(rows[:2])
        return {(m, i): count / row[time] for i, row in times for m, (count, time) in tokens.items()}
    values = {(metric, 0): float(printed[metric]) for metric in ("time_us", "flops", "bandwidth_gb_s")}
    return {key: value for key, value in values.items() if value}


def _same_samples(store: Store, run_id: str, cell: str, wanted: Mapping[tuple[str, int], float]) -> None:
    recorded = store.rows("SELECT metric, ordinal, value FROM samples WHERE run_id = ? AND cell = ?", (run_id, cell))
    values = {(row["metric"], row["ordinal"]): row["value"] for row in recorded}
    if values.keys() != wanted.keys():
        raise Broken(f"wrong: {run_id} {cell} has samples {sorted(values)}, and {sorted(wanted)} were printed")
    for key, value in values.items():
        if not math.isclose(value, wanted[key], rel_tol=ROUNDING):
            raise Broken(f"wrong: {run_id} {cell} has {value!r} for {key}, and {wanted[key]!r} was printed")
