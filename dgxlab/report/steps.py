"""The ledger of a kernel's steps: what each reached on its shapes and prompts, and how that stands to a baseline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dgxlab import units
from dgxlab.report import levers
from dgxlab.report.arms import ArmCells, by_environment, common, find_arms, in_order, of_tools, side_by_side
from dgxlab.report.ask import CellAsk, op_params
from dgxlab.report.beside import is_of_op, rows_beside
from dgxlab.report.evidence import Measured, find
from dgxlab.report.levers import Found
from dgxlab.report.numbers import Mean, Quantity, Value
from dgxlab.report.query import Query
from dgxlab.report.records import ArmsTable, Column
from dgxlab.report.series import Cell
from dgxlab.report.session import WORDS
from dgxlab.report.streams import environments
from dgxlab.report.tables import OPS, SINGLE_STREAM, others_of, rank, stream_test

if TYPE_CHECKING:
    from dgxlab.store import Store

TOOLS = ("backend-ops", "llama-bench")
OP_METRICS = ("flops", "bandwidth_gb_s", "time_us")
"""What a column of an operation shows: the first of these that its rows have."""

OTHER_DEVICE = "of another device"


@dataclass(frozen=True)
class _Cells:
    """One column: the cell that every step may have.

    Attributes:
        key: Identity, whatever the step's environment.
        label: What is said above it.
        metric: What it shows of the cell.
        ask: One step's cell of it.
    """

    key: tuple[str, str]
    label: str
    metric: str
    ask: CellAsk

    @property
    def op(self) -> bool:
        """It is of an operation."""
        return self.ask.cell.tool == "backend-ops"


def steps(store: Store, wanted: Query) -> ArmsTable:
    """Return a row for each experiment, in the order given, the baseline first where it is not among them.

    Raises:
        UsageError: if one was never measured, or nothing fits.
    """
    names = wanted.experiment
    if wanted.baseline and wanted.baseline not in names:
        names = (wanted.baseline, *names)
    every = find_arms(store, Query("steps", names, host=wanted.host))
    found = by_environment(of_tools(every, TOOLS, wanted))
    verdicts = {one.name: levers.newest(store, one.experiment, wanted.baseline) for one in found if _alone(one, found)}
    found = tuple(_as_judged(store, one, verdicts.get(one.name)) for one in found)
    shown, settings = _columns(found)
    base = next((one for one in found if one.experiment == wanted.baseline), None)
    rows = [_row(one, base, shown, verdicts.get(one.name)) for one in found]
    columns = [Column("step", "step"), *(Column(_name(cell), cell.label, cell.metric) for cell in shown)]
    if base is not None:
        columns.append(Column("ratio", f"vs {base.name}", numeric=True))
    if any(row["verdict"] for row in rows):
        columns.append(Column("verdict", "A/B verdict"))
    columns.append(Column("notes", "notes"))
    notes = [*environments(found), *_caveats(base, rows)]
    table = side_by_side("steps", "Steps", found, columns, rows, settings=settings, notes=notes)
    return rows_beside(wanted, table, lambda cell: _column_of(cell, shown))


def _column_of(published: Cell, shown: Sequence[_Cells]) -> str | None:
    """Return the only column that a published cell belongs into."""
    fitting = [cell for cell in shown if cell.metric in ("flops", "avg_ts") and _is(published, cell.ask)]
    return _name(fitting[0]) if len(fitting) == 1 else None


def _is(published: Cell, ask: CellAsk) -> bool:
    params = ask.cell.params
    if ask.cell.tool == "llama-bench":
        return published == (stream_test(params),)
    return is_of_op(published, params.get("op_name"), params)


def _caveats(base: ArmCells | None, rows: Sequence[Mapping[str, Value]]) -> Iterator[str]:
    if base is None:
        return
    yield f"vs {base.name} is how many times as fast, over a row's columns from the lowest to the highest"
    ratios = [str(row["ratio"]) for row in rows]
    for row in rows:
        if row["verdict"]:
            elsewhere = ", which measured another build or device than the row's numbers" * bool(
                row["verdict_elsewhere"]
            )
            session = f"session {row['verdict_session']}{elsewhere}"
            yield f"{row['step']}'s verdict against {base.name}, and its ratio, are of {session}"
    if any(text.endswith("x") for text in ratios):
        yield "a ratio alone is of the medians above, of sessions apart: no verdict"
    if OTHER_DEVICE in ratios:
        yield f"no ratio is taken between devices: {base.name} was measured on {base.evidence.host}"


def _alone(one: ArmCells, found: Sequence[ArmCells]) -> bool:
    """Tell whether an experiment has one row: a verdict is of an experiment, not of one of its environments."""
    return sum(other.arm is one.arm for other in found) == 1


def _as_judged(store: Store, one: ArmCells, verdict: Found | None) -> ArmCells:
    """Put the numbers of the session that judged an experiment in place of those of others: its verdict is on them."""
    if verdict is None:
        return one
    judged = {
        _whole_key(cell): cell for cell in find(store, replace(one.ask, session=verdict.session), one.arm).measured
    }
    return replace(one, cells=tuple(judged.get(_whole_key(cell), cell) for cell in one.cells))


def _whole_key(cell: Measured) -> tuple[str, str, str]:
    return *_key(cell.ask), cell.ask.env_digest


def _row(one: ArmCells, base: ArmCells | None, shown: Sequence[_Cells], verdict: Found | None) -> dict[str, Value]:
    mine = _quantities(one, shown)
    return {
        "step": one.name,
        **mine,
        "ratio": None if base is None else _ratio(one, base, shown, verdict),
        "verdict": None if verdict is None else verdict.shown,
        "verdict_session": None if verdict is None else verdict.session,
        "verdict_elsewhere": None
        if verdict is None
        else verdict.session not in {cell.run["job_id"] for cell in one.cells},
        "notes": one.ask.hypothesis,
    }


def _ratio(one: ArmCells, base: ArmCells, shown: Sequence[_Cells], verdict: Found | None) -> str | None:
    """Say how many times as fast as the baseline a step is, over the columns that both have."""
    if one is base:
        return "baseline"
    compared = {(cell.key[0], "time_us" if cell.op else cell.metric) for cell in shown}
    if verdict and (gains := [gain for key, gain in verdict.gains.items() if key in compared]):
        return f"{_ends(gains)} ({WORDS[verdict.kind]})"
    if one.evidence.device != base.evidence.device:
        return OTHER_DEVICE
    mine, others = _quantities(one, shown), _quantities(base, shown)
    ratios = []
    for cell in shown:
        new, old = mine.get(_name(cell)), others.get(_name(cell))
        if new is not None and old is not None:
            share = new.middle / old.middle
            ratios.append(share if units.metric(cell.metric).better == "higher" else 1 / share)
    return _ends(ratios) if ratios else None


def _ends(ratios: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{share:.2f}x" for share in (min(ratios), max(ratios))))


def _quantities(one: ArmCells, shown: Sequence[_Cells]) -> dict[str, Quantity | Mean]:
    by_key = {_key(cell.ask): cell for cell in one.cells}
    found = ((_name(c), by_key[c.key].quantities.get(c.metric)) for c in shown if c.key in by_key)
    return {name: quantity for name, quantity in found if quantity is not None}


def _columns(found: Sequence[ArmCells]) -> tuple[list[_Cells], dict[str, Value]]:
    """Return the columns, operations before prompts, and what shapes them all alike."""
    cells = [cell for one in found for cell in one.cells]
    asks = in_order(cells, _key)
    ops = sorted((ask for ask in asks if ask.cell.tool == "backend-ops"), key=lambda ask: rank(OPS, ask))
    streams = sorted((ask for ask in asks if ask.cell.tool == "llama-bench"), key=lambda ask: rank(SINGLE_STREAM, ask))
    alike = common([_op_words(ask) for ask in ops])
    if len(ops) == 1:  # nothing tells it apart, and it still needs a name
        alike = {key: value for key, value in alike.items() if key not in ("type_a", "n")}
    shown = []
    for ask in ops:
        have = {metric for cell in cells if _key(cell.ask) == _key(ask) for metric in cell.quantities}
        metric = next((metric for metric in OP_METRICS if metric in have), "")
        shown.append(_Cells(_key(ask), _op_label(ask, alike), metric, ask))
    settings = [_stream_words(ask) for ask in streams]
    shared = common(settings)
    for ask, words in zip(streams, settings, strict=True):
        more = [f"{key}={value}" for key, value in words.items() if key not in shared]
        label = " ".join([stream_test(ask.cell.params), *more])
        shown.append(_Cells(_key(ask), label, "avg_ts", ask))
    return [cell for cell in shown if cell.metric], {**alike, **shared}


def _op_words(ask: CellAsk) -> dict[str, Value]:
    return {"op": ask.cell.params.get("op_name"), "backend": ask.cell.params.get("backend_name"), **op_params(ask.cell)}


def _op_label(ask: CellAsk, alike: Mapping[str, Value]) -> str:
    words = {key: value for key, value in _op_words(ask).items() if key not in alike}
    return " ".join(str(value) if isinstance(value, str) else f"{key}={value}" for key, value in words.items())


def _stream_words(ask: CellAsk) -> dict[str, Value]:
    others = {key: value for key, value in others_of(SINGLE_STREAM, ask).items() if key != "env"}
    return {"model": ask.model, **others}


def _key(ask: CellAsk) -> tuple[str, str]:
    return ask.key, ask.model


def _name(cell: _Cells) -> str:
    return " ".join(filter(None, cell.key))
