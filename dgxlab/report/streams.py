"""Single stream and concurrency with experiments side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dgxlab import units
from dgxlab.report.arms import ArmCells, by_environment, common, in_order, side_by_side
from dgxlab.report.ask import CellAsk
from dgxlab.report.evidence import Measured
from dgxlab.report.numbers import Value
from dgxlab.report.records import ArmsTable, Column
from dgxlab.report.tables import CONCURRENCY, SINGLE_STREAM, Form, env_text, leading, others_of, rank, stream_test

SPEEDS = ("speed_pp", "speed_tg")
"""What a table of concurrency shows of each experiment."""


def single_stream(found: Sequence[ArmCells]) -> ArmsTable:
    """Return a row for each experiment and a column for each test."""
    found = by_environment(found)
    groups: dict[tuple[str, str], list[Measured]] = {}
    for one in found:
        for cell in one.cells:
            groups.setdefault((one.name, repr(_row_key(cell.ask))), []).append(cell)
    shared, varying = _settings(SINGLE_STREAM, found)
    models = len({cell.ask.model for one in found for cell in one.cells}) > 1
    rows: list[dict[str, Value]] = []
    for (name, _), cells in groups.items():
        values = {stream_test(cell.ask.cell.params): cell.quantities.get("avg_ts") for cell in cells}
        others = _others(SINGLE_STREAM, cells[0].ask)
        lead = {"arm": name, "model": cells[0].ask.model, **{key: others.get(key) for key in varying}}
        rows.append({**lead, **values})
    asks = in_order(_cells(found), lambda ask: stream_test(ask.cell.params))
    asks.sort(key=lambda ask: (not ask.cell.params.get("n_prompt"), rank(SINGLE_STREAM, ask)))
    tests = [stream_test(ask.cell.params) for ask in asks]
    columns = [Column("arm", "experiment"), *leading(rows, ["model"] * models + varying)]
    columns += [Column(test, test, "avg_ts") for test in tests]
    settings = {**({} if models else {"model": found[0].cells[0].ask.model}), **shared}
    notes = environments(found)
    return side_by_side("single-stream", "Single stream", found, columns, rows, settings=settings, notes=notes)


def concurrency(found: Sequence[ArmCells]) -> ArmsTable:
    """Return a row for each number of sequences, and the speeds of each experiment beside each other."""
    found = by_environment(found)
    shared, varying = _settings(CONCURRENCY, found)
    models = len({cell.ask.model for one in found for cell in one.cells}) > 1
    rows: dict[str, dict[str, Value]] = {}
    for ask in sorted(in_order(_cells(found), lambda ask: repr(_place(ask))), key=lambda ask: rank(CONCURRENCY, ask)):
        others = _others(CONCURRENCY, ask)
        lead: dict[str, Value] = {"model": ask.model} if models else {}
        rows[repr(_place(ask))] = {**lead, **CONCURRENCY.lead(ask), **{key: others.get(key) for key in varying}}
    columns = leading(list(rows.values()), list(next(iter(rows.values()))))
    for number, one in enumerate(found):
        for metric in SPEEDS:
            key = f"{metric}.{number}"
            for cell in one.cells:
                rows[repr(_place(cell.ask))][key] = cell.quantities.get(metric)
            label = units.metric(metric).label
            columns.append(Column(key, f"{one.name} {label}" if len(found) > 1 else label, metric))
    settings = {**({} if models else {"model": found[0].cells[0].ask.model}), **shared}
    notes = environments(found)
    return side_by_side("concurrency", "Concurrency", found, columns, rows.values(), settings=settings, notes=notes)


def environments(found: Sequence[ArmCells]) -> Iterator[str]:
    """Yield with which variables experiments ran, of those that set any; a name may say it already."""
    for one in found:
        for env in dict.fromkeys(env_text(cell.ask.env) for cell in one.cells):
            if env and not one.name.endswith(f" {env}"):
                yield f"{one.name} ran with {env}"


def _cells(found: Sequence[ArmCells]) -> list[Measured]:
    return [cell for one in found for cell in one.cells]


def _others(form: Form, ask: CellAsk) -> dict[str, Value]:
    """Return what shapes a number, the environment left out: it belongs to the experiment and not to the row."""
    return {key: value for key, value in others_of(form, ask).items() if key not in ("env", "model")}


def _row_key(ask: CellAsk) -> tuple[object, ...]:
    return ask.model, sorted(_others(SINGLE_STREAM, ask).items())


def _place(ask: CellAsk) -> tuple[object, ...]:
    return ask.model, sorted(CONCURRENCY.lead(ask).items()), sorted(_others(CONCURRENCY, ask).items())


def _settings(form: Form, found: Sequence[ArmCells]) -> tuple[Mapping[str, Value], list[str]]:
    """Return what shapes every number alike, and the keys of what does not."""
    every = [_others(form, cell.ask) for cell in _cells(found)]
    shared = common(every)
    return shared, [key for key in dict.fromkeys(key for one in every for key in one) if key not in shared]
