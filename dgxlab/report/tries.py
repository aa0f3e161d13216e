"""Tables of the tries of loops: one for each ledger, a row for each try, with the best so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dgxlab.errors import UsageError
from dgxlab.judgement import tries
from dgxlab.judgement.tries import RecordedTry
from dgxlab.report.ask import Query
from dgxlab.report.evidence import arms_of_job
from dgxlab.report.records import Origin, Page, Provenance, Row, Table, columns, grouped
from dgxlab.report.tables import provenance
from dgxlab.stats import Ended
from dgxlab.store import alias

if TYPE_CHECKING:
    from dgxlab.store import Store

NOT_YET = "not yet"  # shown in place of how a try ended, while it has not
LABELS = {"gain": "speed (%)", "best": "best so far (%)", "parent": "against try", "changed": "lines"}
NUMERIC = "try gain best p level parent changed minutes"
COLUMNS = columns("try ended gain best p level parent changed minutes session because why", NUMERIC, **LABELS)


def ledgers(store: Store, wanted: Query) -> Page:
    """Return the table of each ledger of a query; raises UsageError if the record has no such ledger."""
    names = wanted.experiment or ("",)
    every = [row for name in names for row in tries.ledger(store, name, wanted.host)]
    if not every:
        named = " or ".join(wanted.experiment)
        raise UsageError(f"{store.path} has no try{named and f' of {named}'}", next="dgxlab try --help")
    of_each = grouped(((row.baseline, row.host), row) for row in every)
    results = [_table(store, rows, title=f"{name} on {host}") for (name, host), rows in of_each.items()]
    return Page(wanted.form, tuple(results))


def ended(which: RecordedTry) -> str:
    """Return how a try ended, "rejected" if one of its sessions was."""
    return "rejected" if which.rejected else which.ended or NOT_YET


def changed(which: RecordedTry) -> str:
    """Return how many lines a try changes, with a word if they are counted over the pin."""
    return f"{which.lines}{' over pin' * (which.diff_over == 'pin')}"


def _table(store: Store, ledger: Sequence[RecordedTry], title: str) -> Table:
    shown = _sessions(store)
    rows = list(_rows(ledger, shown))
    counts = {how.value: sum(row["ended"] == how.value for row in rows) for how in Ended}
    newest = next((shown[row.try_id][0] for row in reversed(ledger) if row.try_id in shown), None)
    source = Provenance(ledger[0].baseline, host=ledger[0].host)
    if newest and (arms := arms_of_job(store, store.job(newest))):
        source = provenance(next(iter(arms.values())), [newest])
    settings = {how: count for how, count in counts.items() if count}
    origins = (Origin(source.experiment, source),)
    return Table("tries", f"Tries: {title}", COLUMNS, tuple(rows), source, settings, kind="arms", origins=origins)


def _rows(ledger: Sequence[RecordedTry], shown: Mapping[str, tuple[str, float | None]]) -> Iterator[Row]:
    speeds: dict[str | None, float] = {None: 1.0}  # of each try by the baseline's
    numbers: dict[str | None, int] = {each.try_id: each.number for each in ledger}
    best = 1.0
    for each in ledger:
        session, gain = shown.get(each.try_id, (None, None))
        speed = None if gain is None else speeds.get(each.parent, 1.0) * (1 + gain)
        if each.ended == Ended.PROMOTED.value and speed:
            speeds[each.try_id] = speed
            best = best if each.rejected else max(best, speed)  # its parent may be an older one
        yield {
            "try": each.number,
            "ended": ended(each),
            "gain": None if gain is None else f"{100 * gain:+.2f}",
            "speed": speed,
            "best": f"{100 * (best - 1):+.2f}",
            "best_speed": best,
            "parent": numbers.get(each.parent),
            "session": session and alias(session),
            "minutes": None if each.seconds is None else f"{each.seconds / 60:.1f}",
            **{name: None if (value := getattr(each, name)) is None else f"{value:.2g}" for name in ("p", "level")},
            "changed": changed(each),
            **{name: getattr(each, name) for name in ("lines", "diff_over", "because", "why")},
        }


def _sessions(store: Store) -> dict[str, tuple[str, float | None]]:
    """Return the last shown session of each try, and its mean speedup (geometric, over its cells), if it has one."""
    rows = store.rows(
        """SELECT try_id, job_id, exp(avg(CASE better WHEN 'higher' THEN 1 ELSE -1 END * ln(1 + effect))) - 1 AS gain
           FROM try_sessions JOIN jobs USING (job_id) LEFT JOIN verdicts USING (job_id)
           WHERE stage <> 'held-out' GROUP BY try_id, job_id ORDER BY stage = 'chain', intent_at"""
    )
    return {row["try_id"]: (row["job_id"], row["gain"]) for row in rows}
