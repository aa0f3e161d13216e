"""What a report consists of, before it is laid out: tables, numbers, provenance, notes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, Union

from dgxlab.compare import Difference
from dgxlab.model import Device, SeriesRef
from dgxlab.model.wire import LATER
from dgxlab.published import Figure


@dataclass(frozen=True)
class Number:
    """One metric of one cell: exactly one of `median`, `mean` and `value` is set."""

    metric: str  # a name of `units`, or a tool's own
    unit: str  # the unit in which the metric is stored
    n: int | None  # number of values or runs; None if an imported file lacks it
    spread: float | None = None  # scaled MAD, or what the tool printed; None for a single value
    median: float | None = field(default=None, metadata=LATER)
    mean: float | None = field(default=None, metadata=LATER)  # geometric, of the runs of a chain that count
    value: float | None = field(default=None, metadata=LATER)  # as printed
    of: str = field(default="", metadata=LATER)
    """What the median is taken over: "samples", "values" or "runs"; "kernels" for a sum of their medians."""

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Number:
        """Return the median of a run's samples, given a row of the view `measurements`."""
        return cls(row["metric"], row["unit"], row["n"], row["spread"], median=row["value"], of="samples")

    @property
    def middle(self) -> float:
        """The median, the mean or the value, whichever is set."""
        return next(each for each in (self.median, self.mean, self.value) if each is not None)


Value = Union[Number, Figure, str, int, float, bool, None]
"""Value of a table's cell; None is missing and shown as a dash."""

Row = Mapping[str, Value]

Conditions = Mapping[str, tuple[float, float]]
"""Quantities sampled during runs, by name: the lowest and the highest median of a run."""


@dataclass(frozen=True)
class Column:
    """One column: `key` in each row, `label` in the header. The unit of a metric is chosen when it is shown."""

    key: str
    label: str
    metric: str = ""
    numeric: bool = False
    unit: str = ""  # of a metric that `units` does not know


def columns(keys: str, numeric: str = "", **labels: str) -> tuple[Column, ...]:
    """Return columns given their keys, separated by blanks; `numeric` are keys of numbers, `labels` replace headers."""
    return tuple(Column(key, labels.get(key, key), numeric=key in numeric.split()) for key in keys.split())


@dataclass(frozen=True)
class Provenance:
    """Where the numbers of one arm come from."""

    experiment: str  # the arm's name
    sessions: tuple[str, ...] = ()  # job ids, oldest first
    pin: str = ""
    series: tuple[SeriesRef, ...] = ()
    tree: str = ""
    build_id: str | None = None
    host: str = ""  # its name in hosts.yaml, its own name, and the device
    dirty: bool = False
    synthetic: tuple[str, ...] = ()  # names of the models that were made from a recipe
    device: Device | None = None
    backend: str = ""  # CPU, CUDA; several with commas
    models: tuple[str, ...] = field(default=(), metadata=LATER)  # name, architecture, weights and type of each


@dataclass(frozen=True)
class ShownFlag:
    """A warning about the runs of the rows `labels`, () for every row; verdicts do not use runs with a hard flag."""

    labels: tuple[str, ...]
    hard: bool
    reason: str
    plain: bool = field(default=False, metadata=LATER)  # shown without --wide too, as hard ones are
    sessions: tuple[str, ...] = field(default=(), metadata=LATER)  # whose own reports have it


@dataclass(frozen=True)
class FigureSource:
    """One document, machine and engine that published figures come from, with their lines in the CSV file."""

    doc: str
    host: str
    engine: str
    tools: tuple[str, ...]
    file: str
    lines: tuple[int, ...]


@dataclass(frozen=True)
class Remark:
    """A note on the published figures of the rows or columns `labels`."""

    labels: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Beside:
    """The notes beneath a table that has published figures beside measured numbers."""

    sources: tuple[FigureSource, ...]
    shared: tuple[str, ...] = ()  # common to all of them: engine, version, model
    excess: tuple[Remark, ...] = ()  # impossible ones, and why
    remarks: tuple[Remark, ...] = ()
    left: tuple[str, ...] = ()  # sentences about requested figures without a place in the table


@dataclass(frozen=True)
class Origin:
    """Where the numbers of one arm of a table come from."""

    label: str
    provenance: Provenance
    conditions: Conditions = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), metadata=LATER)


@dataclass(frozen=True)
class Discard:
    """A cycle, from 1, that does not count for the rows `labels`, () for every row of its chain."""

    chain: str
    cycle: int
    labels: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class VerdictReasons:
    """The reasons of one verdict, which the rows `labels` share, () for every row."""

    verdict: str
    labels: tuple[str, ...]
    reasons: tuple[str, ...]


Differ = Mapping[str, tuple[Value, Value]]
"""Settings that differ between arms, by name: the baseline's value and the candidate's, None for unset."""


@dataclass(frozen=True)
class Table:
    """One table of a report.

    A row with the key `published` has published figures; settings, conditions and provenance are about the other rows.
    """

    form: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    provenance: Provenance  # of every row; of the baseline or the first arm where there are several
    settings: Mapping[str, Value] = field(default_factory=dict)  # settings common to all rows, without a column
    conditions: Conditions = field(default_factory=dict)
    flags: tuple[ShownFlag, ...] = ()  # the hard ones first
    beside: Beside | None = None
    kind: str = field(default="", metadata=LATER)  # "arms", "session" of two, "published", "imported"; "": one arm
    notes: tuple[str, ...] = field(default=(), metadata=LATER)
    origins: tuple[Origin, ...] = field(default=(), metadata=LATER)  # of experiments side by side
    candidate: Provenance | None = field(default=None, metadata=LATER)  # of a session, unless it is an A/A
    candidate_conditions: Conditions = field(default_factory=dict)
    differ: Differ = field(default_factory=dict)
    protocol: Mapping[str, Value] = field(default_factory=dict)  # how chains were measured
    discards: tuple[Discard, ...] = field(default=(), metadata=LATER)
    because: tuple[VerdictReasons, ...] = field(default=(), metadata=LATER)
    file: str = field(default="", metadata=LATER)  # the name of an imported file
    sha256: str = field(default="", metadata=LATER)
    tool: str = field(default="", metadata=LATER)  # the program that printed it, and its format
    told: tuple[tuple[str, str], ...] = field(default=(), metadata=LATER)  # what the file says about all its rows


@dataclass(frozen=True)
class Missing:
    """Cells of an arm that were asked for and have no valid run, and why if that is known."""

    arm: str
    tool: str
    model: str
    labels: tuple[str, ...]
    reason: str  # "" if no run of them was begun


@dataclass(frozen=True)
class Failure:
    """A gate or run that does not count, or a session that is not done."""

    session: str
    what: str  # the gate, the run with its cells, or "session"
    status: str  # failed, discarded, disturbed, refused (in part), lost, cancelled, running, rejected, noted
    reason: str
    again: bool = False  # a later repetition of it counted, without a hard event
    kind: str = "run"  # session, gate or run


@dataclass(frozen=True)
class Report:
    """The tables of an experiment or of one session, in reading order, with what is missing and what failed."""

    title: str
    hypothesis: str
    tables: tuple[Table, ...]
    missing: tuple[Missing, ...]
    failures: tuple[Failure, ...]
    disturbed: tuple[str, ...] = field(default=(), metadata=LATER)
    """The session of each number that has a hard event: no run of its cell is without."""


@dataclass(frozen=True)
class SessionReport(Report):
    """The report of a session of two arms: an A/B, a screen or an A/A."""

    session: str = ""
    kind: str = ""  # ab, screen or noise
    ended: bool = True  # else the results of its chains are hidden
    verdict: str = ""  # `judgement.session_verdict` of its comparisons
    counts: Mapping[str, int] = field(default_factory=dict)  # rows by verdict
    summary: str = ""
    differences: tuple[Difference, ...] = ()
    progress: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """The tables of one form, at least one; `summary` is shown above them."""

    form: str
    tables: tuple[Table, ...]
    summary: str = ""


@dataclass(frozen=True)
class Glance:
    """A table of the overview: the newest rows; `more` is how many older ones were left out."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    more: int = 0


@dataclass(frozen=True)
class Overview:
    """The overview of a database, `record`: its newest sessions, gates and verdicts, and how many rows it has."""

    record: str
    tables: tuple[Glance, ...]
    counts: Mapping[str, int]


Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


def grouped(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """Return the items of each key; keys and items are in the order of their first appearance."""
    groups: dict[Key, list[Item]] = {}
    for key, item in pairs:
        groups.setdefault(key, []).append(item)
    return groups


def labels_of(labels: Sequence[str], every: int) -> tuple[str, ...]:
    """Return the labels of the rows that a note is about, or () if they are all `every` rows of the table."""
    return () if len(labels) == every else tuple(labels)


def some(items: Sequence[str]) -> list[str]:
    """Return at most three items; if there are more, `and N more` follows them."""
    return [*items[:3], f"and {len(items) - 3} more"] if len(items) > 3 else list(items)
