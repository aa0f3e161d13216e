"""Profiles: which groups of kernels take the time of a prompt or a step, of one experiment or of two side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dgxlab.errors import UsageError
from dgxlab.judgement.names import CellAsk
from dgxlab.report.arms import of_forms, side_by_side
from dgxlab.report.ask import Query
from dgxlab.report.evidence import Evidence, Measured, doubts
from dgxlab.report.records import Column, Number, Page, Row, Table, Value, grouped
from dgxlab.report.tables import flags, origin_of
from dgxlab.tools import BY_FORM
from dgxlab.tools.profile_files import NODES, OTHER, group_of, short

if TYPE_CHECKING:
    from dgxlab.store import Store

UNEXPLAINED = 0.05  # if kernels that no rule groups take more than this share of a step, a note names them
OVERLAP = 1.05  # if the times of kernels add up to more than this times the time in which any runs, a note says so
SHOWN = 0.01
"""Kernels with a smaller share of a step are not listed; of two experiments, kernels whose time changed by less."""

KERNELS = """SELECT cells.params, metric, unit, value, n, spread
             FROM measurements JOIN cells USING (cell) WHERE run_id = ? ORDER BY cell, metric"""

TIMES = (
    Column("launches", "launches", numeric=True),
    Column("launch_us", "of one", "launch_us"),
    Column("step_us", "a step", "step_us"),
    Column("share", "share (%)", numeric=True),
    Column("token_us", "a token (us)", numeric=True),
)


@dataclass(frozen=True)
class Kernel:
    """One kernel in a step: its launches and times, by metric."""

    name: str
    group: str
    numbers: Mapping[str, Number]

    @property
    def us(self) -> float:
        """Its time in a step, in microseconds."""
        return self.numbers["step_us"].middle


@dataclass(frozen=True)
class Profile:
    """The kernels of one cell of an experiment, by decreasing time."""

    arm: Evidence
    cell: Measured
    kernels: tuple[Kernel, ...]

    @property
    def us(self) -> float:
        """The time of all kernels in a step, in microseconds, summed even where streams overlap."""
        return sum(kernel.us for kernel in self.kernels)

    @property
    def tokens(self) -> int:
        """The tokens of a step: a whole prompt, or one token of each sequence."""
        params = self.cell.ask.cell.params
        return int(params["pl"]) * (int(params["pp"]) if params["phase"] == "prompt" else 1)

    def groups(self) -> dict[str, list[Kernel]]:
        """Return the kernels of each group, by the group's decreasing time."""
        groups = grouped((kernel.group, kernel) for kernel in self.kernels)
        return dict(sorted(groups.items(), key=lambda item: -sum(kernel.us for kernel in item[1])))


def profile(store: Store, wanted: Query) -> Page:
    """Return the page of form=profile: the kernels of one experiment, or what changed between two.

    Raises UsageError if there are more experiments, or no profile, or none that both have.
    """
    arms = of_forms(store, wanted, "profile")
    if len(arms) > 2:
        raise UsageError("profiles of at most two experiments fit side by side", next="dgxlab report --help")
    first, *others = [profiles(store, arm) for arm in arms]
    if not others:
        return Page(wanted.form, tuple(table for each in first for table in (by_group(each), _by_kernel(each))))
    by_name = {_name(each.cell.ask): each for each in others[0]}
    pairs = [(each, by_name[_name(each.cell.ask)]) for each in first if _name(each.cell.ask) in by_name]
    if not pairs:
        raise UsageError(f"{arms[0].name} and {arms[1].name} have no profile in common", next="dgxlab report")
    return Page(wanted.form, tuple(table for pair in pairs for table in _beside(pair)))


def profiles(store: Store, arm: Evidence) -> list[Profile]:
    """Return a profile for each cell of an experiment that was profiled, in the order of its spec."""
    measured = [cell for cell in arm.measured if cell.ask.cell.tool == BY_FORM["profile"]]
    return [Profile(arm, cell, tuple(_kernels(store, cell))) for cell in measured]


def _kernels(store: Store, cell: Measured) -> list[Kernel]:
    total = cell.ask.cell.params
    rows = [(json.loads(row["params"]), row) for row in store.rows(KERNELS, (cell.run["run_id"],))]
    by_kernel = grouped(
        (params["kernel"], (row["metric"], Number.of_row(row)))
        for params, row in rows
        if params["kernel"] != total["kernel"] and {**total, "kernel": params["kernel"]} == params
    )
    kernels = [Kernel(short(name), group_of(name), dict(numbers)) for name, numbers in by_kernel.items()]
    return sorted(kernels, key=lambda kernel: -kernel.us)


def by_group(each: Profile) -> Table:
    """Return the table of a profile with a row for each group of kernels."""
    rows = [{"group": name, **_times(kernels, each)} for name, kernels in each.groups().items()]
    columns = (Column("group", "group"), *(column for column in TIMES if column.key != "launch_us"))
    return _table(each, _name(each.cell.ask), columns, rows, tuple(_notes(each)))


def _by_kernel(each: Profile) -> Table:
    shown = [kernel for kernel in each.kernels if kernel.us >= SHOWN * each.us]
    rows: list[Row] = []
    for kernel in shown:
        lead = {"kernel": kernel.name, "group": kernel.group}
        rows.append({**lead, "launch_us": kernel.numbers["launch_us"], **_times([kernel], each)})
    left = len(each.kernels) - len(shown)
    notes = [f"{left} kernels below {100 * SHOWN:g} % are left out"] if left else []
    columns = (Column("kernel", "kernel"), Column("group", "group"), *TIMES)
    return _table(each, f"Kernels: {_name(each.cell.ask)}", columns, rows, notes)


def _table(each: Profile, title: str, columns: Sequence[Column], rows: Sequence[Row], notes: Sequence[str]) -> Table:
    settings = {"model": each.cell.ask.model, **{k: v for k, v in each.cell.ask.cell.fixed.items() if v != ""}}
    return Table(
        "profile",
        title,
        tuple(columns),
        tuple(rows),
        origin_of(each.arm, [each.cell]),
        settings,
        each.cell.conditions,
        flags(each.arm, [each.cell]),
        notes=(*notes, *doubts({"": replace(each.arm, measured=(each.cell,))})),
    )


def _times(kernels: Sequence[Kernel], each: Profile) -> dict[str, Value]:
    time = _step_us(kernels)
    count = sum(kernel.numbers["launches"].middle for kernel in kernels)
    return {
        "launches": f"{count:g}",
        "step_us": time,
        "share": f"{100 * time.middle / each.us:.1f}",
        "share_pct": 100 * time.middle / each.us,
        "token_us": f"{time.middle / each.tokens:.4g}",
    }


def _step_us(kernels: Sequence[Kernel]) -> Number:
    """Return the time of kernels in a step; of several it is a sum, which has no spread."""
    first = kernels[0].numbers["step_us"]
    total = sum(kernel.us for kernel in kernels)
    return first if len(kernels) == 1 else replace(first, spread=None, median=total, of="kernels")


def _notes(each: Profile) -> Iterable[str]:
    numbers = each.cell.quantities
    busy, wall = numbers["busy_us"].middle, numbers["wall_us"].middle
    yield f"kernels run in {100 * busy / wall:.1f} % of a step of {wall:.1f} us, which the tracer makes longer"
    if NODES in numbers:
        nodes, launches = (numbers[name].middle for name in (NODES, "launches"))
        yield f"{nodes:g} of {launches:g} launches of a step are nodes of a CUDA graph"
    if each.us > OVERLAP * busy:
        yield f"kernels overlap: times that add up to {each.us:.1f} us pass in {busy:.1f} us"
    others = [kernel for kernel in each.kernels if kernel.group == OTHER]
    if (share := sum(kernel.us for kernel in others) / each.us) > UNEXPLAINED:
        names = ", ".join(kernel.name for kernel in others[:3])
        yield f"{100 * share:.1f} % is of kernels that no rule names: {names}"


def _beside(pair: tuple[Profile, Profile]) -> list[Table]:
    groups = [{name: _step_us(of) for name, of in each.groups().items()} for each in pair]
    by_name = [grouped((kernel.name, kernel) for kernel in each.kernels) for each in pair]
    kernels = [{name: _step_us(of) for name, of in each.items()} for each in by_name]
    least = SHOWN * max(each.us for each in pair)
    name = _name(pair[0].cell.ask)
    total = " and ".join(f"{each.us:.1f}" for each in pair)
    by_group = _moved(pair, name, "group", groups, 0.0, notes=[f"a step has {total} us of kernels"])
    by_kernel = _moved(pair, f"Kernels that moved: {name}", "kernel", kernels, least)
    return [table for table in (by_group, by_kernel) if table.rows]


def _moved(
    pair: tuple[Profile, Profile],
    title: str,
    lead: str,
    times: Sequence[Mapping[str, Number]],
    least: float,
    notes: Sequence[str] = (),
) -> Table:
    first, second = times
    rows: list[dict[str, Value]] = []
    for name in dict.fromkeys((*first, *second)):
        before, after = (of[name].middle if name in of else 0.0 for of in (first, second))
        moved = after - before
        if abs(moved) < least:
            continue
        row: dict[str, Value] = {lead: name, "moved": f"{moved:+.1f}", "moved_us": moved}
        for number, each in enumerate(pair):
            if name in times[number]:
                row[f"us.{number}"] = time = times[number][name]
                row[f"share.{number}"] = f"{100 * time.middle / each.us:.1f}"
        rows.append(row)
    columns = [Column(lead, lead)]
    for number, each in enumerate(pair):
        columns.append(Column(f"us.{number}", each.arm.name, "step_us"))
        columns.append(Column(f"share.{number}", "share (%)", numeric=True))
    columns.append(Column("moved", "moved (us)", numeric=True))
    arms = [each.arm for each in pair]
    return side_by_side("profile", title, arms, columns, rows, settings={"model": pair[0].cell.ask.model}, notes=notes)


def _name(ask: CellAsk) -> str:
    return f"{ask.cell.label} of {ask.model}"
