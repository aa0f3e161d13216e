"""One experiment, or one pair of arms, on several devices: side by side, with their spread; and the arms of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dgxlab import judgement, stats, units
from dgxlab.errors import UsageError
from dgxlab.judgement import fleets
from dgxlab.judgement.names import CellAsk, told_apart, varying_of
from dgxlab.report import ask as asking
from dgxlab.report.arms import side_by_side
from dgxlab.report.ask import Ask, Query
from dgxlab.report.evidence import Evidence, find_evidence
from dgxlab.report.records import Column, Number, Page, Row, Table, grouped
from dgxlab.report.session import WORDS, ChainSession
from dgxlab.report.tables import env_text, leading
from dgxlab.report.verdicts import Claim, comparisons
from dgxlab.stats import Pooled, Verdict
from dgxlab.store import UNCOUNTED
from dgxlab.tools import BENCHES, metric_label

if TYPE_CHECKING:
    from dgxlab.store import Store

_APART = "devices that stand out are 3.5 scaled MADs or more from the median"
_ALONE = "each experiment has a session of its own, and each session is judged by itself"
_POOLED = "effects of the devices are pooled as random effects, so that the verdict is about the kind of device"


_MEASURED = f"""SELECT job_id, host, device_id FROM arms JOIN jobs USING (job_id)
                WHERE arm = :name AND protocol = :protocol
                AND (pin, tree) = (SELECT pin, tree FROM arms WHERE job_id = :job_id AND arm = :name)
                AND job_id IN (SELECT job_id FROM runs WHERE status = 'valid') AND job_id NOT IN ({UNCOUNTED})
                ORDER BY intent_at DESC, job_id DESC"""  # noqa: S608 - our own

_COMPARED = """WITH pairs AS (
                   SELECT DISTINCT job_id, host, v.device_id, intent_at,
                                   b.pin, b.tree, c.pin AS to_pin, c.tree AS to_tree
                   FROM verdict_list AS v JOIN arms AS b USING (job_id) JOIN arms AS c USING (job_id)
                   WHERE kind = 'ab' AND b.arm = baseline_arm AND c.arm = candidate_arm
                   AND baseline_arm = :baseline AND candidate_arm = :name
                   AND job_id NOT IN (SELECT job_id FROM rejections))
               SELECT job_id, host, device_id FROM pairs
               WHERE (pin, tree, to_pin, to_tree) = (SELECT pin, tree, to_pin, to_tree FROM pairs
                                                     ORDER BY intent_at DESC, job_id DESC LIMIT 1)
               ORDER BY intent_at DESC, job_id DESC"""


def fleet(store: Store, wanted: Query) -> Page:
    """Return an experiment on each device that has measured its newest tree; with a baseline, the verdict over devices.

    Raises UsageError if the query names several experiments, or the record has none of it.
    """
    name, *others = wanted.experiment
    if others:
        raise UsageError("form=fleet is about one experiment", next=f"dgxlab report --form fleet {name}")
    if wanted.baseline:
        asked = {"name": name, "baseline": wanted.baseline}
        if jobs := _by_device(store, store.rows(_COMPARED, asked)):
            return collect_fleet_sessions(store, jobs)
        raise asking.no_verdict(store, name, wanted.baseline)
    newest = asking.job_of_arm(store, name)
    ask = asking.of_newest(store, newest, name)
    jobs = _by_device(store, store.rows(_MEASURED, {"name": name, "job_id": newest.job_id, "protocol": ask.protocol}))
    return collect_fleet(store, [ask.on(host, store.devices(job_id)[name].id) for host, job_id in jobs.items()])


def _by_device(store: Store, rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the newest job of each device, given newest first, by its host; other nodes of a host are named too."""
    jobs: dict[str, str] = {}
    for row in {row["device_id"]: row for row in reversed(rows)}.values():
        facts = store.job(row["job_id"]).facts or {}
        node = facts.get("details", {}).get("slurm", {}).get("node") or facts.get("hostname", "")
        names = (row["host"], f"{row['host']} ({node})", f"{row['host']} ({row['device_id']})")
        jobs[next(name for name in names if name not in jobs)] = row["job_id"]
    return jobs


def collect_fleet(store: Store, asks: Sequence[Ask], *, failed: int = 0) -> Page:
    """Return an experiment's cells on several devices, given an ask for each; devices without results are left out.

    A device with several names counts once, under the first. The summary counts the devices that have none, and the
    `failed` hosts, whose devices are not known.
    """
    of_device: dict[str, Ask] = {}
    for ask in asks:
        of_device.setdefault(ask.device_id or ask.host, ask)
    evidence = [find_evidence(store, ask) for ask in of_device.values()]
    arms = [replace(arm, name=arm.ask.host) for arm in evidence if arm.measured]
    tables = [table for tool in _tools(arms) for table in _of_tool(tool, arms)]
    return Page("fleet", tuple(tables), f"{len(arms)} of {len(evidence) + failed} devices measured")


def collect_sweep(store: Store, asks: Sequence[Ask], *, failed: int = 0) -> Page:
    """Return the experiments of a sweep beneath one another, given an ask for each; those without results are left out.

    A column for each setting in which they differ comes first. The summary also counts those without results, and the
    `failed` ones, which have no ask.
    """
    evidence = [find_evidence(store, ask) for ask in asks]
    arms = [arm for arm in evidence if arm.measured]
    columns, leads = _leads(arms)
    tables = [
        side_by_side("sweep", title, arms, [*columns, *own], _rows_of(leads, arms, by_cell))
        for tool in _tools(arms)
        for title, own, by_cell in _by_metric(tool, arms)
    ]
    return Page("sweep", tuple(tables), f"{len(arms)} of {len(evidence) + failed} experiments measured")


def collect_sweep_sessions(store: Store, jobs: Sequence[str]) -> Page:
    """Return the A/B sessions of a sweep, each of one experiment against the same baseline, beneath one another."""
    sessions = [ChainSession(store, store.job(job_id)) for job_id in jobs]
    arms = [session.candidate or session.baseline for session in sessions]
    columns, leads = _leads(arms)
    compared = [comparisons(session) for session in sessions]
    words = [judgement.session_verdict([row.verdict.verdict for row in rows]) for rows in compared]
    effects = [
        dict(zip(_names(of, rows), (_effect(row.verdict) for row in rows), strict=True))
        for of, rows in zip(sessions, compared, strict=True)
    ]
    columns += [Column("session", "session"), Column("verdict", "verdict")]
    columns += [Column(name, f"{name} (%)") for name in dict.fromkeys(name for of in effects for name in of)]
    rows = [
        {**lead, "session": session.job.job_id, "verdict": word, **of}
        for lead, session, word, of in zip(leads, sessions, words, effects, strict=True)
    ]
    title = f"{WORDS[sessions[0].plan.shown_kind]} of a sweep against {sessions[0].baseline.name}"
    table = side_by_side("sweep", title, arms, columns, rows, notes=(_ALONE,))
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    return Page("sweep", (table,), f"{len(sessions)} sessions: {counts}")


def _leads(arms: Sequence[Evidence]) -> tuple[list[Column], list[Row]]:
    settings = [{"host": arm.ask.host, **arm.ask.arm.cmake, **arm.ask.arm.env} for arm in arms]
    rows: list[Row] = [{"arm": arm.name, **of} for arm, of in zip(arms, settings, strict=True)]
    return [Column("arm", "experiment"), *leading(rows, varying_of(settings))], rows


def collect_fleet_sessions(store: Store, jobs: Mapping[str, str]) -> Page:
    """Return the verdicts of A/B sessions of the same arms over their devices, given the session of each host.

    A device with several names counts once, under the first. There must be a session.
    """
    chosen = fleets.one_a_device(store, jobs)
    sessions = {host: ChainSession(store, store.job(job_id)) for host, job_id in chosen.items()}
    by_cell: dict[fleets.Identity, dict[str, Verdict]] = {}
    names: dict[fleets.Identity, str] = {}
    for host, session in sessions.items():
        claims = comparisons(session)
        for row, name in zip(claims, _names(session, claims), strict=True):
            if row.verdict.effect is not None:
                by_cell.setdefault(row.identity, {})[host] = row.verdict
                names[row.identity] = name
    pooled = fleets.pooled(store, list(chosen.values()))
    rows = [_pooled_row(names[key], of, pooled[key]) for key, of in by_cell.items()]
    words = [pooled[key].verdict for key in by_cell]
    counts = ", ".join(f"{words.count(word)} {word}" for word in stats.VERDICTS if word in words)
    return Page(
        "fleet", tuple(_session_tables(sessions, names, by_cell, rows)), f"over {len(sessions)} devices: {counts}"
    )


def _tools(arms: Sequence[Evidence]) -> list[str]:
    return list(dict.fromkeys(cell.ask.cell.tool for arm in arms for cell in arm.measured))


def _by_metric(tool: str, arms: Sequence[Evidence]) -> Iterator[tuple[str, list[Column], dict[str, dict[str, Number]]]]:
    """Yield, for each metric of a tool that is compared, a title, a column for each cell, and the values by arm."""
    for metric in BENCHES[tool].compared:
        by_cell: dict[str, dict[str, Number]] = {}
        for arm in arms:
            asks = [ask for ask in arm.ask.cells if ask.cell.tool == tool]
            names = told_apart([_name(ask, metric, arm.ask) for ask in asks], asks)
            measured = {cell.ask.identity: cell.quantities for cell in arm.measured}
            for name, ask in zip(names, asks, strict=True):
                if metric in (numbers := measured.get(ask.identity, {})):
                    by_cell.setdefault(name, {})[arm.name] = numbers[metric]
        if by_cell:
            title = ", ".join(filter(None, (tool, units.metric(metric).label)))
            yield title, [Column(name, name, metric) for name in by_cell], by_cell


def _of_tool(tool: str, arms: Sequence[Evidence]) -> Iterator[Table]:
    """Yield, for each metric of a tool that is compared, the spread of its cells and the devices' own values."""
    for title, own, by_cell in _by_metric(tool, arms):
        columns = [Column("cell", "cell"), Column("devices", "devices", numeric=True)]
        columns += [Column(key, key, own[0].metric) for key in ("median", "lowest", "highest")]
        columns += [Column("spread", "spread (%)", numeric=True), Column("out", "stands out")]
        rows = [_spread_row(name, values) for name, values in by_cell.items()]
        yield side_by_side("fleet", f"Spread of {title}", arms, columns, rows, notes=_apart(rows))
        rows = _rows_of([{"device": arm.name} for arm in arms], arms, by_cell)
        yield side_by_side("fleet", f"Devices, {title}", arms, [Column("device", "device"), *own], rows)


def _rows_of(leads: Sequence[Row], arms: Sequence[Evidence], by_cell: Mapping[str, Mapping[str, Number]]) -> list[Row]:
    return [
        {**lead, **{name: of.get(arm.name) for name, of in by_cell.items()}}
        for lead, arm in zip(leads, arms, strict=True)
    ]


def _spread_row(name: str, of_device: Mapping[str, Number]) -> Row:
    hosts, numbers = list(of_device), list(of_device.values())
    values = [number.middle for number in numbers]
    apart, first = stats.spread(values), numbers[0]
    return {
        "cell": name,
        "devices": len(values),
        "median": Number(first.metric, first.unit, len(values), median=stats.median(values), of="values"),
        "lowest": Number(first.metric, first.unit, None, value=min(values)),
        "highest": Number(first.metric, first.unit, None, value=max(values)),
        "spread": None if apart is None else f"{100 * apart:.2f}",
        "out": ", ".join(hosts[i] for i in stats.outliers(values)) or None,
    }


def _apart(rows: Sequence[Row]) -> tuple[str, ...]:
    return (_APART,) if any(row["out"] for row in rows) else ("no device stands out",)


def _name(ask: CellAsk, metric: str, of: Ask) -> str:
    """Return the name of a cell and metric, the same on every device and in every experiment of a sweep."""
    own = {name: value for name, value in ask.env.items() if of.arm.env.get(name) != value}
    words = (ask.model, asking.label(ask.cell), metric_label(ask.cell.tool, metric), env_text(own))
    return " ".join(filter(None, words))


def _names(session: ChainSession, claims: Sequence[Claim]) -> list[str]:
    names = [_name(claim.ask, claim.judged.comparison.metric, session.baseline.ask) for claim in claims]
    return told_apart(names, [claim.ask for claim in claims])


def _pooled_row(name: str, of_device: Mapping[str, Verdict], pooled: Pooled) -> Row:
    hosts = list(of_device)
    effects = [verdict.effect or 0.0 for verdict in of_device.values()]
    return {
        "cell": name,
        "devices": pooled.devices,
        "verdict": pooled.verdict,
        "effect": None if pooled.effect is None else units.change(pooled.effect),
        "interval": units.interval(pooled.ci) if pooled.ci else None,
        "between": None if pooled.between is None else f"{100 * pooled.between:.2f}",
        "out": ", ".join(hosts[i] for i in stats.outliers(effects)) or None,
    }


def _session_tables(
    sessions: Mapping[str, ChainSession],
    names: Mapping[fleets.Identity, str],
    by_cell: Mapping[fleets.Identity, Mapping[str, Verdict]],
    rows: Sequence[Row],
) -> Iterator[Table]:
    arms = [replace(session.candidate or session.baseline, name=host) for host, session in sessions.items()]
    columns = [Column("cell", "cell"), Column("devices", "devices", numeric=True), Column("verdict", "verdict")]
    columns += [Column("effect", "effect (%)", numeric=True), Column("interval", "interval (%)", numeric=True)]
    columns += [Column("between", "between devices (%)", numeric=True), Column("out", "stands out")]
    title = next(iter(sessions.values())).title
    yield side_by_side("fleet", title, arms, columns, rows, notes=(_POOLED, *_apart(rows)))
    keyed = list(grouped((names[key], of) for key, of in by_cell.items()).items())
    columns = [Column("device", "device"), Column("session", "session")]
    columns += [Column(name, f"{name} (%)") for name, _ in keyed]
    own = [
        {"device": host, "session": session.job.job_id, **{name: _effect(of.get(host)) for name, (of, *_) in keyed}}
        for host, session in sessions.items()
    ]
    yield side_by_side("fleet", "Effects of the devices", arms, columns, own)


def _effect(verdict: Verdict | None) -> str | None:
    if verdict is None or verdict.effect is None:
        return None
    return f"{units.change(verdict.effect)} {verdict.verdict}"
