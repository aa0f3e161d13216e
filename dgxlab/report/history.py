"""The history of a cell: what each session measured, over pins, trees and drivers, and where its level changed.

A history has one patch series, one set of cmake definitions, one model, one environment and one kind of GPU, whatever
the experiments are called. Sessions are not alike: other days, other temperatures, perhaps another GPU of that kind.
So a change point is a place to look at, not a verdict.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dgxlab import stats, units
from dgxlab.errors import UsageError, command, needs
from dgxlab.model import SeriesRef
from dgxlab.report.ask import Query, has_words, job_of_arm
from dgxlab.report.records import Column, Number, Page, Provenance, Row, Table, Value, grouped
from dgxlab.report.tables import env_text
from dgxlab.store import UNFIT, alias
from dgxlab.tools import BENCHES

if TYPE_CHECKING:
    import numpy as np

    from dgxlab.store import Store

FLOOR = "ruptures>=1.1.9"
ALPHA = 0.05  # share of steady histories that show a change point
ORDERS = 999  # random orders that a change is compared with
LEAST = 8  # sessions: of fewer, no change is rarer than ALPHA among the orders of the same values
SHORTEST = 2  # sessions on either side of a change
CAUSES = ("experiment", "pin", "tree", "driver", "GPU", "protocol")  # columns of what may have changed a level

RUNS = f"""SELECT m.job_id, m.arm, m.build_id, m.host, m.tool, m.cell, m.label, m.metric, m.value, m.unit, m.n,
                  m.spread, m.at, pin, tree, series, cmake, dirty, driver, d.names, d.uuids, env, protocol,
                  coalesce(inputs.name, '') AS model, coalesce(m.model_id, '') AS model_id,
                  coalesce({UNFIT}, iif(dirty, 'was of a working tree', NULL)) AS unfit
           FROM measurements AS m JOIN runs USING (run_id) JOIN devices AS d USING (device_id)
           JOIN jobs ON jobs.job_id = m.job_id
           JOIN arms ON (arms.job_id, arms.arm) = (m.job_id, m.arm)
           LEFT JOIN inputs ON (inputs.job_id, inputs.model_id) = (m.job_id, m.model_id)
           WHERE m.cell IN (SELECT value FROM json_each(:cells))
           AND :host IN ('', m.host) AND :model IN ('', coalesce(inputs.name, ''))
           AND (:names = '[]' OR m.arm IN (SELECT value FROM json_each(:names)))
           ORDER BY m.at, m.run_id"""  # noqa: S608 - our own


@dataclass(frozen=True)
class SpeedChange:
    """A session from which on a history has another level."""

    at: int  # its place among the sessions
    share: float  # the new level by the old one, less 1
    p: float  # share of random orders of the sessions that have as clear a change


def history(store: Store, wanted: Query) -> Page:
    """Return the tables of the cells that match a query's patterns, one for each history.

    Trees with changes that were not committed, and runs that do not count or that a hard event disturbed, are left out.
    If any history has several sessions, those with one are. Raises UsageError if no cell matches, no run of one counts,
    or ruptures is missing.
    """
    cells = [row["cell"] for row in store.rows("SELECT * FROM cells") if _matches(row, wanted.cells)]
    if not cells:
        message = f"no cell of the record has all of {' or '.join(map(repr, wanted.cells))}"
        raise UsageError(message, next="dgxlab report")
    for name in wanted.experiment:
        job_of_arm(store, name, wanted.host)
    asked = {"cells": json.dumps(cells), "names": json.dumps(wanted.experiment)}
    runs = store.rows(RUNS, {**asked, "host": wanted.host, "model": wanted.model})
    # a profile compares none, and all of its metrics are of interest
    runs = [run for run in runs if run["metric"] in (BENCHES[run["tool"]].compared or [run["metric"]])]
    histories = list(grouped((_identity(run), run) for run in runs if not run["unfit"]).values())
    if runs and not histories:
        why = dict.fromkeys(run["unfit"] for run in runs)
        last = alias(runs[-1]["job_id"])
        message = f"every run of such a cell there {' or '.join(why)}; the last is in {last}"
        raise UsageError(message, next=command("dgxlab", "report", last, "--wide"))
    if not histories:
        raise UsageError("no such cell was measured there", next="dgxlab report")
    several = [runs for runs in histories if len({run["job_id"] for run in runs}) > 1]
    left = len(histories) - len(several) if several else 0
    tables = [
        _table(runs) for runs in sorted(several or histories, key=lambda runs: (runs[0]["label"], runs[0]["arm"]))
    ]
    return Page(wanted.form, tuple(tables), f"{left} more with a single session" if left else "")


def _matches(cell: Mapping[str, Any], patterns: Sequence[str]) -> bool:
    params = {**json.loads(cell["params"]), **json.loads(cell["fixed"])}
    return any(has_words(pattern, cell["label"], params) for pattern in patterns)


def _identity(run: Mapping[str, Any]) -> tuple[str, ...]:
    series = [each["name"] for each in json.loads(run["series"])]
    own = ("cell", "metric", "model", "model_id", "env", "host", "names", "cmake")
    return (*(str(run[name]) for name in own), *series)


def _table(runs: Sequence[Mapping[str, Any]]) -> Table:
    sessions = list(grouped(((run["job_id"], run["arm"]), run) for run in runs).values())
    numbers = [_number(of_one) for of_one in sessions]
    metric, first, last = units.metric(runs[0]["metric"]), runs[0], runs[-1]
    changes = change_points([number.middle for number in numbers])
    begins = [0, *(change.at for change in changes), len(numbers)]
    rows: list[dict[str, Value]] = []
    for begin, end in itertools.pairwise(begins):
        level = stats.median([number.middle for number in numbers[begin:end]])
        rows += [
            {**_facts(of_one[0]), "value": number, "level": level, "change": None}
            for of_one, number in zip(sessions[begin:end], numbers[begin:end], strict=True)
        ]
    for change in changes:
        rows[change.at] |= {"change": f"{100 * change.share:+.1f} %", "change_pct": 100 * change.share, "p": change.p}
    label = f"{first['label']} {metric.label}".strip()
    series = tuple(SeriesRef(each["name"], each["digest"]) for each in json.loads(last["series"]))
    synthetic = " (made from a recipe)" if first["model_id"].startswith("synthetic") else ""
    settings: dict[str, Value] = {
        "model": first["model"] + synthetic,
        "series": ", ".join(ref.name for ref in series) or "none",
        "host": f"{first['host']} ({', '.join(json.loads(first['names'])) or 'CPU'})",
        "env": env_text(json.loads(first["env"])),
    }
    origin = Provenance(
        last["arm"],
        tuple(sorted({run["job_id"] for run in runs})),
        last["pin"],
        series,
        last["tree"],
        last["build_id"],
        str(settings["host"]),
    )
    columns = [Column(key, key) for key in ("session", "when", *CAUSES)]
    columns += [Column("value", metric.label, metric.name), Column("change", "change", numeric=True)]
    return Table(
        "history",
        f"{label}: {', '.join(dict.fromkeys(run['arm'] for run in runs))}",
        tuple(column for column in columns if column.key != "change" or changes),
        tuple(rows),
        origin,
        {name: value for name, value in settings.items() if value},
        kind="arms",
        notes=tuple(_notes(rows, changes)),
    )


def _number(runs: Sequence[Mapping[str, Any]]) -> Number:
    """Return a session's number: the median of its runs, or of the samples of its only run."""
    values = [run["value"] for run in runs]
    if len(values) == 1:
        return Number.of_row(runs[0])
    return Number(runs[0]["metric"], runs[0]["unit"], len(values), stats.mad(values), stats.median(values), of="runs")


def _facts(run: Mapping[str, Any]) -> Row:
    uuids = [text[:12] for text in json.loads(run["uuids"])]
    return {
        "session": run["job_id"],
        "when": f"{datetime.fromtimestamp(run['at'], UTC):%Y-%m-%d %H:%M}",
        "experiment": run["arm"],
        "pin": run["pin"][:12],
        "tree": run["tree"][:12],
        "driver": run["driver"],
        "GPU": ", ".join(uuids),
        "protocol": run["protocol"],
    }


def _notes(rows: Sequence[Row], changes: Sequence[SpeedChange]) -> Iterator[str]:
    if len(rows) < LEAST:
        yield f"{len(rows)} of {LEAST} sessions: fewer than {LEAST} cannot tell a change from chance"
        return
    for change in changes:
        before, since = rows[change.at - 1], rows[change.at]
        new = [name for name in CAUSES if before[name] != since[name]]
        also = f"; new there: {', '.join(new)}" if new else "; nothing that is recorded here changed"
        yield f"since {alias(str(since['session']))} {100 * change.share:+.1f} % (p {change.p:.3f}){also}"
    if changes:
        yield "sessions differ in more than the build: a change is a place to look at, and dgxlab ab judges"
        yield f"of steady histories one in {round(1 / ALPHA)} shows a change; a slow drift shows several"
    else:
        yield f"no change of level that one in {round(1 / ALPHA)} random orders would not show as well"


def change_points(values: Sequence[float]) -> list[SpeedChange]:
    """Return where the level of a series changes, by binary segmentation of its logarithms; values are above 0.

    A change counts if at most a share ALPHA of random orders of the values has one as clear. So fewer than LEAST values
    have none. Raises UsageError if ruptures is missing.
    """
    if len(values) < LEAST:
        return []
    with needs(FLOOR, "change points are found with ruptures"):
        import numpy as np
        import ruptures  # noqa: F401 - said before anything is computed
    changes = sorted(_changes(np.log(np.asarray(values, dtype=float)), 0))
    begins = [0, *(at for at, _ in changes), len(values)]
    levels = [stats.median(values[begin:end]) for begin, end in itertools.pairwise(begins)]
    return [
        SpeedChange(at, after / before - 1, p)
        for (at, p), before, after in zip(changes, levels, levels[1:], strict=False)
    ]


def _changes(logs: np.ndarray[Any, Any], begin: int) -> Iterator[tuple[int, float]]:
    """Yield the place and p of each change, in any order; `begin` is the place of the first value."""
    import numpy as np

    if len(logs) < LEAST or not logs.std():
        return
    random = np.random.default_rng(0)  # the same record gives the same table
    at, gain = _split(logs)
    as_clear = 0
    for _ in range(ORDERS):
        as_clear += _split(random.permutation(logs))[1] >= gain * (1 - 1e-9)
        if 1 + as_clear > ALPHA * (1 + ORDERS):
            return
    yield begin + at, (1 + as_clear) / (1 + ORDERS)
    yield from _changes(logs[:at], begin)
    yield from _changes(logs[at:], begin + at)


def _split(logs: np.ndarray[Any, Any]) -> tuple[int, float]:
    """Return the best place to divide values in two, and how much of their sum of squares that explains."""
    import ruptures

    search = ruptures.KernelCPD(kernel="linear", min_size=SHORTEST).fit(logs.reshape(-1, 1))
    at = search.predict(n_bkps=1)[0]
    difference = float(logs[:at].mean() - logs[at:].mean())
    return at, at * (len(logs) - at) / len(logs) * difference**2
