"""The report of a session of two arms: what each chain says, how it was measured, and what does not count of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dgxlab import judgement, units
from dgxlab.judgement import Judged
from dgxlab.model import ChainStep, Plan, RunStep
from dgxlab.report import ask as asking
from dgxlab.report.arms import in_percent, pair_table, percent, range_text, sessions_of_pair
from dgxlab.report.ask import CellAsk, cell_ask
from dgxlab.report.evidence import FLAGS, TELEMETRY, Row, by_run, conditions_of, first_of
from dgxlab.report.records import (
    Because,
    Column,
    Discard,
    Flag,
    Number,
    SessionReport,
    SessionTable,
    Value,
)
from dgxlab.report.session import ChainSession, differences, means_of
from dgxlab.report.tables import FORMS, Form, env_text, leading, of_arms, others_of, rank, varying_of
from dgxlab.stats import SCREEN_DRIFT_LIMIT, STEPS, VERDICTS, Verdict, noise_floor

if TYPE_CHECKING:
    from dgxlab.store import Job, Store

PREFIX = {"ab": "", "screen": "screen: ", "noise": "A/A: "}
"""Put before every verdict of such a session, so that it is not taken for an A/B's."""

AT_TEMPERATURE = ("at shared temperature", "each at its own temperature")
"""How the arms of an ordinary chain are compared, and those of blocks: in turns they heat one another."""


def verdicts(store: Store, job: Job) -> SessionReport:
    """Return the report of a session; of its chains nothing before it has ended.

    Raises:
        UsageError: if its plan cannot be read.
    """
    session = ChainSession(store, job, asking.plan_of(job))
    judged = judgement.recorded(store, job.job_id) if session.ended else []
    words = [each.verdict.verdict for each in judged]
    whole = judgement.whole(words) if words else ""
    pair = sessions_of_pair(store, job) if judged else []
    again = f"; session {pair.index(job) + 1} of {len(pair)} of this pair" if len(pair) > 1 else ""
    beside = [pair_table(store, job, pair)] if len(pair) > 1 else []
    return SessionReport(
        title=f"Session {job.job_id}: {session.what}",
        hypothesis=asking.hypothesis(store, job),
        tables=(*session.gate_tables(), *_chain_tables(session, judged), *beside),
        missing=(),
        failures=tuple(session.failures()),
        session=job.job_id,
        kind=job.kind,
        ended=session.ended,
        verdict=whole,
        counts={word: words.count(word) for word in VERDICTS if word in words},
        summary=summary(job.kind, whole, words) + _floors(job.kind, judged) + again if session.ended else "",
        differences=tuple(differences(session.plan)),
        progress=() if session.ended else tuple(session.progress()),
    )


def summary(kind: str, whole: str, words: Sequence[str]) -> str:
    """Say how many claims came out how: `faster: 2 of 6 faster, 4 inconclusive`."""
    if not words:
        return f"{PREFIX[kind]}no verdict: the session ended before there was one"
    order = sorted(set(words), key=lambda word: (word != whole, VERDICTS.index(word)))
    first, *others = ((words.count(word), word) for word in order)
    counts = [f"{first[0]} of {len(words)} {first[1]}", *(f"{count} {word}" for count, word in others)]
    return f"{PREFIX[kind]}{whole}: {', '.join(counts)}"


def _floors(kind: str, judged: Sequence[Judged]) -> str:
    """Say what an A/A session found."""
    floors = sorted(floor for each in judged if (floor := noise_floor(each.verdict)))
    if kind != "noise" or not floors:
        return ""
    ends = dict.fromkeys((percent(floors[0]), percent(floors[-1])))
    return f"; noise floor {' to '.join(ends)} %"


# -- chains -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Comparison:
    """One comparison of a chain with its verdict.

    Attributes:
        ask, candidate_ask: The cells that are compared.
        baseline, candidate: Means of the runs in the cycles that count; None where there is no verdict.
        label: Names the row in sentences.
    """

    chain: ChainStep
    ask: CellAsk
    candidate_ask: CellAsk
    judged: Judged
    baseline: Number | None
    candidate: Number | None
    label: str = ""

    @property
    def verdict(self) -> Verdict:
        return self.judged.verdict


def _chain_tables(session: ChainSession, judged: Sequence[Judged]) -> list[SessionTable]:
    """Return a table for each tool and model, as in other reports."""
    chains = {chain.id: chain for chain in session.plan.chains}
    groups: dict[tuple[str, str], list[_Comparison]] = {}
    medians = session.medians(list(chains.values())) if judged else {}
    for each in judged:
        chain = chains[each.chain]
        ask, other = _ask(chain.baseline, each.comparison.baseline), _ask(chain.candidate, each.comparison.candidate)
        comparison = _Comparison(chain, ask, other, each, *means_of(each, medians))
        groups.setdefault((ask.cell.tool, FORMS[ask.cell.tool].title(ask)), []).append(comparison)
    return [_table(session, FORMS[tool], title, group) for (tool, title), group in groups.items()]


def _ask(run: RunStep, key: str) -> CellAsk:
    return cell_ask(next(cell for cell in run.cells if cell.key == key), run.model, run.env)


def _table(session: ChainSession, form: Form, title: str, group: Sequence[_Comparison]) -> SessionTable:
    kind = session.plan.kind
    group = sorted(group, key=lambda row: rank(form, row.ask))  # stable: the comparisons of a cell keep their order
    others = [_of_both(form, row) for row in group]
    varying = varying_of(others)
    own = [{key: _in_column(key, *other.get(key, (None, None))) for key in varying} for other in others]
    settings = {key: values for key, values in others[0].items() if key not in varying}
    both = {key: one for key, (one, two) in settings.items() if one == two}
    env = env_text({key: str(value) for key, value in both.items() if key in group[0].ask.env})
    leads = [{**form.lead(row.ask), **mine} for row, mine in zip(group, own, strict=True)]
    group = _with_labels(group, own)
    rows = [{**lead, **_values(kind, row)} for lead, row in zip(leads, group, strict=True)]
    chains = list({row.chain.id: row.chain for row in group}.values())
    runs = session.of_chains(chains)
    models = {row.ask.model for row in group}
    telemetry = by_run(session.store, TELEMETRY, [run["run_id"] for run in runs])
    conditions = [
        conditions_of(row for run in runs if arm and run["arm"] == arm.name for row in telemetry[run["run_id"]])
        for arm in (session.baseline, session.candidate)
    ]
    candidate = session.candidate
    return SessionTable(
        "verdicts",
        f"{title}: {session.what}",
        (*leading(leads, dict.fromkeys(key for lead in leads for key in lead)), *_columns(kind, rows)),
        tuple(rows),
        session.origin(session.baseline, models, [row.ask.cell for row in group]),
        {key: value for key, value in both.items() if key not in group[0].ask.env} | ({"env": env} if env else {}),
        conditions[0],
        _flags(session, runs, several=len(chains) > 1),
        differ={key: values for key, values in settings.items() if key not in both},
        candidate=session.origin(candidate, models, [row.candidate_ask.cell for row in group]) if candidate else None,
        candidate_conditions=conditions[1],
        protocol=_protocol(session.plan, chains, group, runs),
        discards=tuple(_discards(group)),
        because=tuple(_because(group, kind)),
    )


def _of_both(form: Form, row: _Comparison) -> dict[str, tuple[Value, Value]]:
    """Return what shapes a row's numbers and has no leading column, a variable by its own name: both arms' values."""
    sides = [{**others_of(form, replace(ask, env={})), **ask.env} for ask in (row.ask, row.candidate_ask)]
    return {key: (sides[0].get(key), sides[1].get(key)) for key in dict.fromkeys((*sides[0], *sides[1]))}


def _in_column(key: str, baseline: Value, candidate: Value) -> Value:
    return baseline if baseline == candidate else of_arms(key, baseline, candidate)


def _with_labels(group: Sequence[_Comparison], own: Sequence[Mapping[str, Value]]) -> list[_Comparison]:
    several = len({row.judged.comparison.metric for row in group}) > 1
    labelled = []
    for row, mine in zip(group, own, strict=True):
        metric = units.metric(row.judged.comparison.metric).label if several else ""
        words = (asking.label(row.ask.cell), *(f"{k}={v}" for k, v in mine.items() if v is not None), metric)
        labelled.append(replace(row, label=" ".join(filter(None, words))))
    return labelled


def _values(kind: str, row: _Comparison) -> dict[str, Value]:
    """Return the columns of a verdict, and the numbers behind those that are texts."""
    judged, verdict, metric = row.judged, row.verdict, units.metric(row.judged.comparison.metric)
    floor = _floor(kind, judged)
    decided = verdict.verdict in ("faster", "slower")
    return {
        "chain": row.chain.id,
        "metric": metric.name,
        "label": metric.label,
        "baseline": row.baseline,
        "candidate": row.candidate,
        "effect": None if verdict.effect is None else percent(verdict.effect, "+"),
        "interval": verdict.ci and range_text(verdict.ci),
        "same": range_text(verdict.same_ci) if verdict.same_ci and not decided else None,
        "confidence": f"{100 * verdict.confidence:.2f} %" if verdict.ci else None,
        "mde": None if verdict.mde is None else percent(verdict.mde),
        "cycles": f"{verdict.valid_cycles} of {verdict.cycles}",
        "noise_floor": None if floor is None else percent(floor),
        "verdict": PREFIX[kind] + verdict.verdict,
        "promoted": judged.promoted,
        "valid_cycles": verdict.valid_cycles,
        "run_cycles": verdict.cycles,
        "k_to_settle": verdict.k_to_settle,
        "p": verdict.p,
        **in_percent(verdict),
        "mde_pct": None if verdict.mde is None else 100 * verdict.mde,
        "noise_floor_pct": None if floor is None else 100 * floor,
    }


def _floor(kind: str, judged: Judged) -> float | None:
    """Return the noise floor of interest: what an A/A session found, or what decided on promotion."""
    if kind == "noise":
        return noise_floor(judged.verdict) or None
    if judged.verdict.noise is not None:
        return judged.verdict.noise
    return judged.noise.sigma if judged.noise else None


def _columns(kind: str, rows: Sequence[Mapping[str, Value]]) -> list[Column]:
    """Return the columns of verdicts, the verdict first; a screen has no intervals."""
    metric = str(rows[0]["metric"])
    every = [
        Column("label", "speed") if len({row["metric"] for row in rows}) > 1 else None,
        Column("verdict", "verdict"),
        Column("effect", "effect (%)", numeric=True),
        Column("interval", "interval (%)", numeric=True) if kind != "screen" else None,
        Column("baseline", "baseline", metric),
        Column("candidate", "candidate", metric),
        Column("promoted", "promoted") if kind == "ab" else None,
        Column("confidence", "confidence", numeric=True) if kind != "screen" else None,
        Column("same", "interval of same (%)", numeric=True) if any(row["same"] for row in rows) else None,
        Column("mde", "MDE (%)", numeric=True) if kind != "screen" else None,
        Column("cycles", "cycles", numeric=True),
        Column("noise_floor", "noise floor (%)", numeric=True),
    ]
    return [column for column in every if column]


def _protocol(
    plan: Plan, chains: Sequence[ChainStep], group: Sequence[_Comparison], runs: Sequence[Row]
) -> dict[str, Value]:
    """Say how the chains were measured; they all were alike."""
    first = chains[0]
    limit = min(first.drift_limit, SCREEN_DRIFT_LIMIT) if first.screen else first.drift_limit
    decided = first.screen or plan.protocol < STEPS
    floors = sorted({row.judged.noise.session for row in group if row.judged.noise and decided})
    words: dict[str, Value] = {
        "protocol": plan.protocol,
        "cycles planned": first.cycles or f"for an effect of {100 * first.effect:g} %",
        "arms": AT_TEMPERATURE[bool(first.block_s)],
        "thermal": first.thermal,
        "drift limit": f"{100 * limit:g} %",
    }
    if pinned := dict.fromkeys(run["pinned"].strip("[]") for run in runs if run["pinned"]):
        words["pinned"] = "to processors " + " or ".join(pinned)
    return {**words, "noise floors of": ", ".join(floors)} if floors else words


# -- lines beneath a table --------------------------------------------------------------------------------------------


def _flags(session: ChainSession, runs: Sequence[Row], *, several: bool) -> tuple[Flag, ...]:
    """Return the flags of runs, those of a kind together."""
    named = {run["run_id"]: f"{run['chain']} " * several + f"{run['role']} {run['cycle']}" for run in runs}
    groups: dict[tuple[bool, str], list[Row]] = {}
    for flags in by_run(session.store, FLAGS, list(named)).values():
        for flag in flags:
            groups.setdefault((bool(flag["hard"]), flag["kind"]), []).append(flag)
    made = []
    for (hard, _), of_kind in groups.items():
        labels = tuple(dict.fromkeys(named[flag["run_id"]] for flag in of_kind))
        reason = first_of(flag["reason"] for flag in of_kind)
        made.append(Flag(() if len(labels) == len(named) else labels, hard, reason))
    return tuple(sorted(made, key=lambda flag: not flag.hard))


def _discards(group: Sequence[_Comparison]) -> list[Discard]:
    """Return the cycles that do not count, the rows of which the same is true together."""
    groups: dict[tuple[str, int, str], list[str]] = {}
    sizes = Counter(row.chain.id for row in group)
    for row in group:
        for cycle, reason in row.verdict.flaws.items():
            groups.setdefault((row.chain.id, cycle, reason), []).append(row.label)
    return [
        Discard(chain, cycle, () if len(labels) == sizes[chain] else tuple(labels), reason)
        for (chain, cycle, reason), labels in sorted(groups.items())
    ]


def _because(group: Sequence[_Comparison], kind: str) -> list[Because]:
    """Return why each verdict, the rows with the same reasons together."""
    groups: dict[tuple[str, tuple[str, ...]], list[_Comparison]] = {}
    for row in group:
        reasons = judgement.reasons(row.verdict)
        if row.verdict.ci:
            # at which confidence is in the table; here it would tell rows apart that say the same
            reasons = (_deciding(row.verdict), *reasons[1:])
        groups.setdefault((row.verdict.verdict, reasons), []).append(row)
    because = []
    for (verdict, reasons), rows in groups.items():
        labels = () if len(rows) == len(group) else tuple(row.label for row in rows)
        mdes = sorted(row.verdict.mde for row in rows if row.verdict.mde is not None)
        ends = " to ".join(dict.fromkeys(percent(mde) for mde in (*mdes[:1], *mdes[-1:])))
        seen = (f"MDE {ends} %",) if verdict == "inconclusive" and mdes else ()
        because.append(Because(PREFIX[kind] + verdict, labels, (*reasons, *seen)))
    return because


def _deciding(verdict: Verdict) -> str:
    """Say what decided a chain's verdict, which is its first reason, without the confidence of the intervals."""
    same = "the interval of same" if verdict.same_ci else "the 90 % interval"  # that of the older protocols is fixed
    if verdict.verdict == "same":
        return f"{same} lies inside +-1 %"
    if verdict.verdict == "inconclusive":
        return f"the interval contains 0 and {same} is not inside +-1 %"
    return f"the interval lies {'above' if (verdict.effect or 0.0) > 0 else 'below'} 0"
