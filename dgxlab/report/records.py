"""What a report says, before it is laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Union

from dgxlab.compare import Difference
from dgxlab.model import Device, SeriesRef
from dgxlab.model.wire import LATER
from dgxlab.published import Figure

# -- numbers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """One metric of one cell, with its spread: a median, a mean, or a value as a tool printed it.

    Attributes:
        metric: Name in `units`, or a tool's own.
        unit: The metric's stored one.
        n: How many values it is of: `of`, or runs of a mean; None where an imported file does not say.
        spread: Their scaled MAD, or what the tool printed; None for a single one.
        median: Of a run's samples that count, or of the values of an imported file; `of` says which.
        mean: Geometric, of an arm's runs in the cycles of a chain that count.
        value: As printed, mostly a mean.
    """

    metric: str
    unit: str
    n: int | None
    spread: float | None = None
    median: float | None = field(default=None, metadata=LATER)
    mean: float | None = field(default=None, metadata=LATER)
    value: float | None = field(default=None, metadata=LATER)
    of: str = field(default="", metadata=LATER)

    @property
    def middle(self) -> float:
        """The number itself, whatever kind of average it is."""
        return next(each for each in (self.median, self.mean, self.value) if each is not None)


Value = Union[Number, Figure, str, int, float, bool, None]
"""What a table's cell holds; None is missing, shown as a dash and never as 0."""

# -- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One column: `key` in each row, `label` in the header; with a metric its unit is chosen when it is shown.

    Attributes:
        unit: Of a metric that `units` does not know.
    """

    key: str
    label: str
    metric: str = ""
    numeric: bool = False
    unit: str = ""


def columns(keys: str, numeric: str = "", **labels: str) -> tuple[Column, ...]:
    """Return columns by their keys, separated by blanks; a label is the key unless it is given."""
    return tuple(Column(key, labels.get(key, key), numeric=key in numeric.split()) for key in keys.split())


@dataclass(frozen=True)
class Provenance:
    """Where a table's numbers come from; every row of it shares all of this.

    Attributes:
        experiment: Name of the experiment, or of the arm in a session with two.
        sessions: Ids of the jobs that measured it, oldest first.
        pin: 40 hex digits.
        series: Series applied, with their digests.
        tree: Hash of the tree that was built.
        build_id: None when there is no build.
        host: Name in hosts.yaml, and the host's own and the device's once it was reached.
        dirty: The tree came from a checkout with uncommitted changes.
        synthetic: Names of the models in it that were made from a recipe.
        device: What computed them; None where nothing was built.
        backend: Its kind: CPU, CUDA; several with commas.
    """

    experiment: str
    sessions: tuple[str, ...]
    pin: str
    series: tuple[SeriesRef, ...]
    tree: str
    build_id: str | None
    host: str
    dirty: bool = False
    synthetic: tuple[str, ...] = ()
    device: Device | None = None
    backend: str = ""


@dataclass(frozen=True)
class Flag:
    """A warning about runs whose numbers a table shows.

    Attributes:
        labels: The cells of those runs that are in the table; () for every row.
        hard: A verdict would leave the runs out.
        reason: In words.
    """

    labels: tuple[str, ...]
    hard: bool
    reason: str


@dataclass(frozen=True)
class Source:
    """Where some of a table's published figures come from.

    Attributes:
        doc: The document.
        host: The machine, in its words.
        engine: With its version.
        tools: What measured them.
        file: Of the published record.
        lines: Of that file.
    """

    doc: str
    host: str
    engine: str
    tools: tuple[str, ...]
    file: str
    lines: tuple[int, ...]


@dataclass(frozen=True)
class Remark:
    """What is said about figures of a table beside their numbers."""

    labels: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Beside:
    """The notes beneath a table that has published figures beside measured ones.

    Attributes:
        sources: Of all of them.
        shared: What all of them are about: engine, version, model and the like.
        excess: Which of them cannot be true, and why.
        remarks: In the order of the figures.
        left: Which were asked for and have no place in the table, in sentences.
    """

    sources: tuple[Source, ...]
    shared: tuple[str, ...] = ()
    excess: tuple[Remark, ...] = ()
    remarks: tuple[Remark, ...] = ()
    left: tuple[str, ...] = ()


Conditions = Mapping[str, tuple[float, float]]
"""What was sampled during runs, by name: the lowest and the highest median of a run."""


@dataclass(frozen=True)
class Table:
    """One table of a report.

    Attributes:
        form: gates, ops, single-stream or concurrency.
        title: Its heading.
        columns: In order.
        rows: A value for each column's key; a key that is not there is missing.
        settings: What shapes every row alike and has no column: n_ubatch, environment, repetitions.
        provenance: Shown beneath it.
        flags: The hard ones first.
        beside: The sources of the published figures in it; None where all of it was measured. A row of its own for
            such figures says `published`; what provenance, settings and conditions say is about the other rows.
    """

    form: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Value], ...]
    provenance: Provenance
    settings: Mapping[str, Value] = field(default_factory=dict)
    conditions: Conditions = field(default_factory=dict)
    flags: tuple[Flag, ...] = ()
    beside: Beside | None = None


@dataclass(frozen=True)
class Origin:
    """Where the numbers of one arm of a table come from.

    Attributes:
        label: The arm's name in the table.
        notes: What else is true of its runs, in sentences.
    """

    label: str
    provenance: Provenance
    conditions: Conditions = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), metadata=LATER)


@dataclass(frozen=True)
class ArmsTable(Table):
    """A table with several experiments side by side, each with its origin; `provenance` is the first one's.

    Attributes:
        notes: What else a reader must know, in sentences.
    """

    origins: tuple[Origin, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Discard:
    """A cycle, from 1, that does not count for the rows `labels`; () for every row of its chain."""

    chain: str
    cycle: int
    labels: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Because:
    """Why the rows `labels` have their verdict; () for every row."""

    verdict: str
    labels: tuple[str, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class SessionTable(Table):
    """A table about both arms of a session: verdicts or gates. Its flags are of runs, not of rows.

    Attributes:
        provenance: The baseline's.
        settings: What shapes every row and both arms alike.
        differ: What shapes the arms differently, a variable or parameter by its name: the baseline's value and the
            candidate's, None for one that is not set.
        conditions: Of the baseline's runs.
        candidate: The candidate's provenance; None where the baseline is compared with itself.
        protocol: How its chains were measured.
        discards: The cycles that do not count.
        because: Why each verdict.
    """

    differ: Mapping[str, tuple[Value, Value]] = field(default_factory=dict)
    candidate: Provenance | None = None
    candidate_conditions: Conditions = field(default_factory=dict)
    protocol: Mapping[str, Value] = field(default_factory=dict)
    discards: tuple[Discard, ...] = ()
    because: tuple[Because, ...] = ()


# -- pages ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Missing:
    """Cells that were asked for and have no valid run, with the reason when one is known."""

    arm: str
    tool: str
    model: str
    labels: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Failure:
    """A gate or run that does not count, or a session that did not end well.

    Attributes:
        session: Job id.
        kind: session, gate or run.
        what: The gate, the run with its cells, or "session".
        status: failed, discarded, lost, cancelled, running, rejected.
        again: It was repeated later, and then it counted.
    """

    session: str
    what: str
    status: str
    reason: str
    again: bool = False
    kind: str = "run"


@dataclass(frozen=True)
class Report:
    """All tables of an experiment or of one session, in reading order; `hypothesis` is "" where there is none."""

    title: str
    hypothesis: str
    tables: tuple[Table, ...]
    missing: tuple[Missing, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True)
class SessionReport(Report):
    """All of one session of two arms: an A/B, a screen or an A/A.

    Attributes:
        session: Job id.
        kind: ab, screen or noise.
        ended: Nothing that its chains measured is shown before.
        verdict: The whole session's word, "" before its end.
        counts: Rows by verdict.
        summary: The same in words.
        differences: What was compared.
        progress: How far each chain is, while the session goes on.
    """

    session: str = ""
    kind: str = ""
    ended: bool = True
    verdict: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
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
    """A table of the overview: a line for each of the newest; `more` is how many older ones there are."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Value], ...]
    more: int = 0


@dataclass(frozen=True)
class Overview:
    """The newest sessions, gates and verdicts of the database `record`, and what it holds in all, by name."""

    record: str
    tables: tuple[Glance, ...]
    counts: Mapping[str, int]


def some(items: Sequence[str], most: int) -> list[str]:
    """Return the first items, and how many more there are."""
    rest = len(items) - most
    return [*items[:most], f"and {rest} more"] if rest > 0 else list(items)
