"""What a report says, before anybody decides how it looks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dgxlab.compare import Difference
from dgxlab.model import Device, SeriesRef
from dgxlab.report.citation import Beside
from dgxlab.report.numbers import Value


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
        dirty: The tree came from somebody's checkout.
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
    """Something that speaks against runs whose numbers a table shows.

    Attributes:
        labels: The cells of those runs that are in the table; () for every row.
        hard: A verdict would leave the runs out.
        reason: In words.
    """

    labels: tuple[str, ...]
    hard: bool
    reason: str


@dataclass(frozen=True)
class Table:
    """One table of a report.

    Attributes:
        form: gates, ops, single-stream or concurrency.
        title: What stands above it.
        columns: In order.
        rows: A value for each column's key; a key that is not there is missing.
        settings: What shapes every row alike and has no column: n_ubatch, environment, repetitions.
        provenance: Beneath it.
        conditions: Range of what was sampled, from the lowest to the highest median of a run, by name.
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
    conditions: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    flags: tuple[Flag, ...] = ()
    beside: Beside | None = None


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
    """Something that ran and does not count, or a session that did not end well.

    Attributes:
        session: Job id.
        what: The gate, the run with its cells, or "session".
        status: failed, discarded, lost, cancelled, running, rejected.
        reason: In words.
        again: It was done again later, and then it counted.
    """

    session: str
    what: str
    status: str
    reason: str
    again: bool = False


@dataclass(frozen=True)
class Report:
    """All tables of an experiment, or of one session.

    Attributes:
        title: Its heading.
        hypothesis: What the experiment was made to show, or "".
        tables: In reading order.
        missing: Planned and not measured.
        failures: Ran and does not count.
    """

    title: str
    hypothesis: str
    tables: tuple[Table, ...]
    missing: tuple[Missing, ...]
    failures: tuple[Failure, ...]


# -- forms ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """Where the numbers of one arm of a table come from.

    Attributes:
        label: What the table calls it.
        provenance: Of all its numbers.
        conditions: Range of what was sampled, as in `Table`.
    """

    label: str
    provenance: Provenance
    conditions: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class ArmsTable(Table):
    """A table in which experiments stand beside each other, each with a provenance of its own.

    Attributes:
        provenance: The first one's.
        origins: All of them.
        notes: What else a reader must know, in sentences.
    """

    origins: tuple[Origin, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """What was asked for by the name of a form.

    Attributes:
        form: Its name.
        tables: At least one.
        summary: What stands above them, or "".
    """

    form: str
    tables: tuple[Table, ...]
    summary: str = ""


@dataclass(frozen=True)
class Overview:
    """The latest of everything.

    Attributes:
        record: The database.
        tables: Sessions, gates and verdicts, the newest first; those that are empty are left out.
        counts: What the record holds in all, by name.
    """

    record: str
    tables: tuple[Glance, ...]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Glance:
    """A table of an overview: a line for each of the newest, with the session that has the rest.

    Attributes:
        title: What stands above it.
        columns: As in `Table`.
        rows: As in `Table`.
        more: How many older ones there are.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Value], ...]
    more: int = 0


# -- sessions of two arms ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Discard:
    """A cycle that does not count.

    Attributes:
        chain: Id of its chain.
        cycle: From 1.
        labels: The rows for which it does not; () for every row of its chain.
        reason: In words.
    """

    chain: str
    cycle: int
    labels: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Because:
    """Why rows have their verdict.

    Attributes:
        verdict: As the table says it.
        labels: The rows; () for every row.
        reasons: In words.
    """

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
        candidate_conditions: Of the candidate's runs.
        protocol: How its chains were held.
        discards: The cycles that do not count.
        because: Why each verdict.
    """

    differ: Mapping[str, tuple[Value, Value]] = field(default_factory=dict)
    candidate: Provenance | None = None
    candidate_conditions: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    protocol: Mapping[str, Value] = field(default_factory=dict)
    discards: tuple[Discard, ...] = ()
    because: tuple[Because, ...] = ()


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
